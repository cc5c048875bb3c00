"""Metrics in Prometheus's text form: strict, on loopback, off by default, no names of files."""

import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from harmonium.core.errors import EngineError
from harmonium.engines.protocol import Speaker
from harmonium.federation.driver import Reply
from harmonium.sites.activity import ClientActivity, ServerActivity, read
from harmonium.sites.log import SiteLog
from harmonium.sites.metrics import (
    CONTENT_TYPE,
    BudgetReader,
    Metric,
    of_client,
    of_server,
    rendered,
    served,
    with_disk,
)
from harmonium.sites.settings import MetricsSettings

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
Labels = tuple[tuple[str, str], ...]


def parsed(text: str) -> dict[str, tuple[str, str, dict[Labels, float]]]:
    """The metrics of a text: kind, help and samples by name. Whatever the form forbids fails."""
    assert text.endswith("\n") and "\r" not in text and "\n\n" not in text
    metrics: dict[str, tuple[str, str, dict[Labels, float]]] = {}
    words, name = "", ""
    for line in text.split("\n")[:-1]:
        assert line == line.strip()
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert NAME.fullmatch(name) and name not in metrics and words
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert typed == name and kind in ("counter", "gauge") and name not in metrics
            assert (kind == "counter") == name.endswith("_total")
            metrics[name] = kind, words, {}
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == name, line
            kind, _, samples = metrics[name]
            labels = labels_of(match[2] or "")
            value = float(match[3].replace("Inf", "inf").replace("NaN", "nan"))
            assert labels not in samples and len(dict(labels)) == len(labels)
            assert kind == "gauge" or value >= 0
            samples[labels] = value
    assert all(samples for _, _, samples in metrics.values())
    return metrics


def labels_of(text: str) -> Labels:
    labels, place = [], 0
    while place < len(text):
        match = LABEL.match(text, place)
        assert match, text
        plain = re.sub(r"\\(.)", lambda one: {"n": "\n"}.get(one[1], one[1]), match[2])
        labels.append((match[1], plain))
        place = match.end()
    assert not text.endswith(",")
    return tuple(labels)


def test_labels_and_numbers_are_written_as_the_form_wants() -> None:
    odd = 'a"b\\c\nd,e=}'
    metric = Metric("m", "gauge", "Odd.").add(0.1, x=odd, y="").add(math.inf, x="1")
    metric.add(-math.inf, x="2").add(math.nan, x="3").add(2.0**60, x="4").add(None, x="5")
    (kind, help_, samples) = parsed(rendered([metric]))["m"]
    assert (kind, help_) == ("gauge", "Odd.")
    assert samples[("x", odd), ("y", "")] == 0.1
    assert samples[("x", "1"),] == math.inf and samples[("x", "2"),] == -math.inf
    assert math.isnan(samples[("x", "3"),]) and samples[("x", "4"),] == 2.0**60
    assert len(samples) == 5


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a gauge\na 1\n",
        "# HELP a A.\n# TYPE a counter\na 1\n",
        "# HELP a A.\n# TYPE a gauge\na{b=c} 1\n",
        '# HELP a A.\n# TYPE a gauge\na{b="c"} 1\na{b="c"} 2\n',
        "# HELP a A.\n# TYPE a gauge\na 1",
        "# HELP a A.\n# TYPE a gauge\n",
    ],
)
def test_the_parser_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        parsed(text)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerActivity]:
    activity = ServerActivity(tmp_path, ["north", "south"])
    activity.names = {0: "north", 1: "south"}
    with activity.activity.running():
        yield activity


def test_a_server_counts_its_sites(server: ServerActivity, tmp_path: Path) -> None:
    server.about_run(folder=str(tmp_path / "doe-jane"), rounds=20)
    server.joined(["north"])
    server.online(["north"])
    server.heard("north", Speaker(1, "0.2.0", 5.0))
    server.task(Reply(0, {}))
    server.task(Reply(1, None, "its answer was refused: `model` is missing"))
    server.task(Reply(1, None, "its node is gone"))
    server.round({"round": 3, "loss": 0.25}, 1.5)
    ends = {"certificates": {"server": 2e9}}
    text = rendered(of_server(with_disk(server.activity.snapshot() | ends, tmp_path)))
    found = {name: samples for name, (_, _, samples) in parsed(text).items()}
    asks = found["harmonium_site_asks_total"]
    assert asks[("site", "north"), ("outcome", "answered")] == 1
    assert asks[("site", "south"), ("outcome", "refused")] == 1
    assert asks[("site", "south"), ("outcome", "declined")] == 1
    assert found["harmonium_site_connected"] == {(("site", "north"),): 1, (("site", "south"),): 0}
    for name, value in (("round", 3), ("rounds", 20), ("loss", 0.25), ("round_seconds", 1.5)):
        assert found[f"harmonium_{name}"] == {(): value}
    assert found["harmonium_sites"] == {(): 2} and found["harmonium_sites_joined"] == {(): 1}
    assert found["harmonium_certificate_expiry_timestamp_seconds"]
    assert "doe-jane" not in text and "/" not in re.sub(r"# HELP.*", "", text)


def test_a_client_counts_its_asks_and_names_no_file(tmp_path: Path) -> None:
    data = {"name": "folder", "path": "/data/doe-jane"}
    client = ClientActivity(tmp_path, "fl.example.org:8443", data, "cpu")
    sent = {"model": {"kind": "weights", "bytes": 100}, "loss": {"kind": "scalar", "bytes": 8}}
    with client.activity.running():
        client.images(812, 3)
        client.contact(None)
        client.answered({"outcome": "sent", "up": sent, "down": 100, "seconds": 2.5})
        client.answered({"outcome": "refused", "why": "/data/doe-jane/1.png cannot be read"})
        budget = {"budget": {"spent": 2.5, "limit": None}}
        text = rendered(of_client(client.activity.snapshot() | budget))
    found = {name: samples for name, (_, _, samples) in parsed(text).items()}
    assert found["harmonium_asks_total"] == {
        (("outcome", "sent"),): 1,
        (("outcome", "refused"),): 1,
    }
    assert found["harmonium_sent_bytes_total"][("kind", "weights"),] == 100
    assert found["harmonium_images"] == {(): 812} and found["harmonium_connected"] == {(): 1}
    assert found["harmonium_epsilon_spent"] == {(): 2.5}
    assert "harmonium_epsilon_limit" not in found and "doe-jane" not in text


def test_counters_of_a_fresh_client_are_a_valid_text(tmp_path: Path) -> None:
    client = ClientActivity(tmp_path, "x:1", {"name": "folder", "path": ""}, "cpu")
    with client.activity.running():
        assert parsed(rendered(of_client(client.activity.snapshot())))["harmonium_connected"]


# ---- the port ------------------------------------------------------------------------------------


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def test_metrics_are_served_at_one_path_on_loopback() -> None:
    port, place = free_port(), "http://127.0.0.1"
    with served(MetricsSettings(port), lambda: "a 1\n"):
        with urlopen(f"{place}:{port}/metrics") as answer:
            assert answer.read() == b"a 1\n" and answer.headers["Content-Type"] == CONTENT_TYPE
        for path in ("/", "/metrics/", "/status.json", "/../etc/passwd"):
            with pytest.raises(HTTPError) as refused, urlopen(f"{place}:{port}{path}"):
                pass
            assert refused.value.code == 404
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}"):
            served(MetricsSettings(port), lambda: "").__enter__()
        with socket.socket() as other, pytest.raises(OSError):
            other.connect(("127.0.0.2", port))
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.1", port))


def test_metrics_are_off_by_default() -> None:
    before = threading.active_count()
    with served(MetricsSettings(), lambda: "a 1\n"):
        assert threading.active_count() == before


# ---- what they come from -------------------------------------------------------------------------


def test_the_budget_follows_log_and_policy(tmp_path: Path) -> None:
    log, policy = SiteLog(tmp_path / "log.jsonl"), tmp_path / "policy.yaml"
    policy.write_text("epsilon: 5\n")
    reader = BudgetReader(log.path, policy)
    assert reader.read() == {"spent": 0.0, "limit": 5.0}
    release = {"mechanism": "gaussian", "sensitivity": 1.0, "scale": 2.0, "count": 1}
    log.append({"outcome": "sent", "releases": [release]})
    spent = reader.read()["spent"]
    assert spent is not None and spent > 0.5
    policy.write_text("epsilon: [\n")
    assert reader.read() == {}


def test_the_file_says_how_a_process_ended(tmp_path: Path) -> None:
    for error, words in ((None, ""), (EngineError("no port"), "no port"), (ValueError("x"), "Val")):
        client = ClientActivity(tmp_path, "x:1", {"path": ""}, "cpu")
        try:
            with client.activity.running():
                facts = read(tmp_path)
                assert facts is not None and facts["ended"] is None
                if error is not None:
                    raise error
        except (EngineError, ValueError):
            pass
        facts = read(tmp_path)
        assert facts is not None and facts["ended"] and words in facts["why"]
        assert (tmp_path / "status.json").stat().st_mode & 0o077 == 0


def test_a_change_is_written_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harmonium.sites.activity.SOON", 0.01)
    client = ClientActivity(tmp_path, "x:1", {"path": ""}, "cpu")
    with client.activity.running():
        client.contact("it is away")
        for _ in range(500):
            facts: Any = read(tmp_path)
            if facts["lost"]:
                break
            threading.Event().wait(0.01)
        assert facts["lost"] == "it is away" and facts["connected"] is False
    assert read(tmp_path / "nowhere") is None
    (tmp_path / "status.json").write_text(json.dumps({"format": 99}))
    assert read(tmp_path) is None


def test_a_servers_memory_of_its_sites_outlives_it(tmp_path: Path) -> None:
    first = ServerActivity(tmp_path, ["north"])
    with first.activity.running():
        first.heard("north", Speaker(1, "0.2.0", 5.0))
        first.task(Reply(0, None, "gone"))
    again = ServerActivity(tmp_path, ["north", "east"]).activity.snapshot()["sites"]
    assert again["north"]["version"] == "0.2.0" and again["north"]["answer"]
    assert again["north"]["declined"] == 0 and again["east"]["answer"] is None
