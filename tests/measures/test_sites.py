"""Evaluation at the clients of a finished run: the counts that the run itself would have had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.measures.sites import Sites

LABELLED = {"data": {"name": "shapes", "count": 120, "test_count": 30, "size": 10, "classes": 3}}
COUNTS = {"sites": "ridge", "sites_least": 2}


def figures(found: Any) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("round", "learned")}


@pytest.mark.parametrize("protocol", ["ridge", "probe"])
def test_counts_are_those_of_the_run(
    protocol: str, made: Callable[..., Path], opened: Callable[..., Any]
) -> None:
    run = opened(made("fedavg", **LABELLED))
    found = Sites(protocol=protocol, least=2).compute(run)
    evaluate = {"k": 5, "labels_per_class": [], "every": 9, "sites": protocol, "sites_least": 2}
    there = harmonium.resume(made("fedavg", **LABELLED, evaluate=evaluate))
    assert figures(found.plain) == figures(there.sites)
    clients, overall = Sites(protocol=protocol).tables({"a": found})
    assert [row["client"] for row in clients.rows][0].startswith("client")
    assert [row["over"] for row in overall.rows] == ["all images", "mean of sites"]


def test_a_masked_run_has_figures_of_each_client_where_its_images_are(
    made: Callable[..., Path], opened: Callable[..., Any]
) -> None:
    run = opened(made("fedavg", **LABELLED, privacy={"secure_aggregation": True}))
    assert len(Sites(least=2).compute(run).plain["by_site"]) == 4


def test_figures_sum_a_run_up(made: Callable[..., Path], opened: Callable[..., Any]) -> None:
    measure = Sites(least=2)
    plain = measure.compute(opened(made("fedavg", **LABELLED))).plain
    values = measure.headline_values(plain)
    assert values.keys() == measure.headlines().keys()
    assert values["sites_worst"] <= values["sites"]
    assert not measure.headline_values(plain, "untrained")


def test_without_enough_labels_there_is_one_line(
    made: Callable[..., Path], opened: Callable[..., Any]
) -> None:
    with pytest.raises(DataError, match="labelled"):
        Sites(least=2).compute(opened(made("fedavg")))
    with pytest.raises(DataError, match="labelled"):
        Sites(least=500).compute(opened(made("fedavg", **LABELLED)))
    with pytest.raises(ConfigError, match="sites_bins"):
        Sites(bins=-1)
