"""Federated evaluation: sites test the encoder on their own labelled images and send counts only.

With `evaluate.sites`, three exchanges follow the others before each evaluation:

- `can_evaluate`: every site says whether it will answer, without a value. One without labels, with
  too few of them, or whose policy does not allow it, declines with a reason.
- `measure_sums` (`ridge` alone): means over labelled training images, of features, of products of
  features and of the features of each class. Their average over all sites gives the server the
  ridge regression that the images of all sites in one place would give.
- `measure_counts`: every site tests a classifier on its held-out images, the common one (`ridge`)
  or one that it trains on its own labelled images (`probe`), and returns a confusion matrix, counts
  of scores in bins, and how many images they are of.

No value belongs to a single image, and no label leaves as such. A class with fewer than
`evaluate.sites_least` images is left out of what a site sends. With secure aggregation the server
sees sums over at least three sites, and there are no figures of single ones.

A site holds out its own test part, if its data have one, else a share of its training images, by
group where they have groups. The encoder has seen the latter, without labels; `seen` counts them.
Nothing is trained but the classifiers: a run ends with the same model with and without this. It is
refused where clients send anything with noise, for exact counts of the same images would undo what
the noise protects, and for methods that read labels, which would have learned from those that they
are tested on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.devices import CPU, to_host, use_device
from harmonium.core.errors import ConfigError, WireError, counted
from harmonium.core.types import ClientId, Weights
from harmonium.data.images import Integers
from harmonium.evaluation.counts import (
    Counts,
    Ridge,
    at_least,
    class_means,
    counts_fault,
    counts_of,
    figures_of,
    held_out,
    means_fault,
    means_shapes,
    ridge_shape,
    shares_of_logits,
    shares_of_ridge,
)
from harmonium.evaluation.linear import Array, probe_scores
from harmonium.federation import global_objective
from harmonium.federation.label_free_score import encoder_at, model_messages
from harmonium.federation.secure_aggregation.fixed_point import FEWEST
from harmonium.federation.wire import (
    LABELLED,
    Ask,
    Field,
    Fold,
    Plan,
    Value,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Client, Decline, Examples
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server

Protocol = Literal["probe", "ridge"]
KEY = "site_evaluation"  # in the server's memory
FIGURES = "sites"  # in metrics.jsonl and result.json
READY, SUMS, COUNTS = LABELLED
EXTENTS = {  # for the card
    "first": "as many numbers as the encoder has features",
    "second": "as many numbers as there are pairs of features",
    "cross": "as many numbers as the encoder has features, for each class",
    "shares": "a number for each class",
    "confusion": "a count for each pair of classes",
    "scores": "two counts for each class and bin",
    "classifier": "as many numbers as the encoder has features, for each class and two more",
}


@dataclass(frozen=True)
class SiteEvaluation:
    """How sites evaluate the encoder on their own labelled images."""

    protocol: Protocol
    held_out: float  # share of the labelled images to test on, where a site has no test part
    least: int  # fewest images of a class that a site counts
    bins: int  # of the scores of each class; 0: no AUROC
    classes: int
    by_site: bool = True  # the server sees counts site by site, else their sum


def obstacle(method: Method, protocol: Protocol) -> str:
    """Why a method cannot be evaluated at the sites; empty where it can."""
    if reason := global_objective.noise(method):
        return f"{reason}, and exact counts of the same images would undo what noise protects"
    if method.reads_labels:
        return f"{called(method)} learns from the labels that the sites would be tested on"
    if protocol == "ridge" and method.has_own_encoders:
        return (
            f"with {called(method)} each client ends with an encoder of its own, so there are no "
            "common features: set evaluate.sites=probe"
        )
    return ""


def words(method: Method) -> tuple[str, ...]:
    """What clients send for it, for the card."""
    how = method.site_evaluation
    if how is None:
        return ()
    means = "means of its features over the images of each class, and " if _is_common(how) else ""
    return (
        f"At every evaluation each client with labels also sends {means}counts of right and wrong "
        "answers on its own held-out images, by class, of classes with at least "
        f"{counted(how.least, 'image')} (evaluate.sites).",
    )


# ---- declarations ------------------------------------------------------------------------------


def _is_common(how: SiteEvaluation) -> bool:
    return how.protocol == "ridge"


def has_sums(method: Method) -> bool:
    """Whether sites send means for a common classifier."""
    return method.site_evaluation is not None and _is_common(method.site_evaluation)


def sums_up(method: Method) -> dict[str, Field]:
    """Means over a site's labelled training images, weighted by their number."""

    def shape(name: str) -> Any:
        return lambda method, examples: means_shapes(
            method.feature_size, method.site_evaluation.classes
        )[name]

    names = ("first", "second", "cross", "shares")
    means = {
        name: statistic("mean", by="images", shape=shape(name), dtype=torch.float64)
        for name in names
    }
    return {**means, "images": scalar("sum")}


def counts_down(method: Method) -> dict[str, Field]:
    """The model to evaluate, and the common classifier if there is one."""
    classifier = {"classifier": statistic()} if has_sums(method) else {}
    return {"model": weights(), **classifier}


def counts_up(method: Method) -> dict[str, Field]:
    """Counts over a site's held-out images: site by site, or their sum over sites."""
    how = method.site_evaluation
    fold: Fold = "each" if how is None or how.by_site else "sum"

    def confusion(method: Any, examples: int) -> tuple[int, int]:
        return (method.site_evaluation.classes,) * 2

    def scores(method: Any, examples: int) -> tuple[int, int, int]:
        return method.site_evaluation.classes, 2, method.site_evaluation.bins

    return {
        "confusion": statistic(fold, shape=confusion, dtype=torch.int64),
        "scores": statistic(fold, shape=scores, dtype=torch.int64),
        "images": scalar(fold),
        "seen": scalar(fold),  # of these images, those that the encoder was trained on
    }


def fault(method: Method, step: str, up: Mapping[str, Any], examples: int) -> str | None:
    """Why an answer to one of the exchanges cannot be an honest client's; none if it can."""
    how = method.site_evaluation
    if how is None or step not in (SUMS, COUNTS):
        return None
    images = up["images"]
    if not (images == int(images) and how.least <= images <= examples):
        return f"`images` is {images:g}, not a number of the client's {examples} images"
    if step == SUMS:
        return means_fault(up, images, how.least)
    if not 0 <= up["seen"] <= images:
        return f"`seen` is {up['seen']:g}, not within 0 and `images`"
    return counts_fault(Counts(up["confusion"], up["scores"]), images, how.least)


def passes(method: Method, step: str) -> float:
    """Passes over a client's images that an answer takes at most; a test part counts as one."""
    if step == READY:
        return 0.0
    return 1.0 if has_sums(method) else 2.0


# ---- server ------------------------------------------------------------------------------------


def evaluated(method: Method, server: Server) -> Plan:
    """The server with the counts of all sites that answer in its memory."""
    how = method.site_evaluation
    assert how is not None
    ready = yield Ask(READY, server.everyone, least=0)
    able: Sequence[ClientId] = ready.ids
    result: dict[str, Any] = {"protocol": how.protocol, "of": len(server.everyone), "answered": 0}
    if not how.by_site and len(able) < FEWEST:
        result["why"] = (
            f"{counted(len(able), 'site')} can answer, and secure aggregation opens sums over at "
            f"least {FEWEST}"
        )
        able = []
    common: dict[str, Value] = {}
    if able and has_sums(method):
        down, each = model_messages(method, server, "evaluate.sites", able)
        sums = yield Ask(SUMS, able, down, each, least=0)
        common, why = _classifier(method, sums)
        result |= {"learned": round(sums.images)} if common else {"why": why}
        able = able if common else []
    if able:
        down, each = model_messages(method, server, "evaluate.sites", able)
        got = yield Ask(COUNTS, able, {**down, **common}, each, least=0)
        result |= _collected(how, got)
    return replace(server, memory={**server.memory, KEY: result})


def _classifier(method: Method, sums: Any) -> tuple[dict[str, Value], str]:
    """The common classifier from the means of all sites, or why there is none."""
    how = method.site_evaluation
    assert how is not None
    if not sums.ids:
        return {}, "no site sent the means for a common classifier"
    means = {name: getattr(sums, name) for name in ("first", "second", "cross", "shares")}
    if not how.by_site and (reason := means_fault(means, round(sums.images), how.least)):
        return {}, f"the sum over sites is not plausible: {reason}"
    try:
        return {"classifier": Ridge.fit(means).weights}, ""
    except RuntimeError:  # a remote client may send anything; an evaluation must not end the run
        return {}, "the means of the sites give no classifier"


def _collected(how: SiteEvaluation, got: Any) -> dict[str, Any]:
    """The counts as the server keeps them: by client, or their sum."""
    if not got.ids:
        return {"why": "no site sent counts"}
    names = ("confusion", "scores", "images", "seen")
    values = {name: getattr(got, name) for name in names}
    if how.by_site:
        by_site = {
            str(client): {name: values[name][client] for name in names} for client in got.ids
        }
        return {"answered": len(got.ids), "by_site": by_site}
    total = {**values, "images": round(values["images"]), "seen": round(values["seen"])}
    counts = Counts(total["confusion"], total["scores"])
    if reason := counts_fault(counts, total["images"], how.least):
        return {"why": f"the sum over sites is not plausible: {reason}"}
    return {"answered": len(got.ids), "total": total}


def report(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the last evaluation at the sites, as JSON has them; empty without one.

    `by_site` has the site with the lowest balanced accuracy first, `all` the figures of the counts
    of all sites together, `mean` the mean of the sites' own figures.
    """
    if (stored := memory.get(KEY)) is None:
        return {}
    facts = ("protocol", "answered", "of", "why", "learned")
    told = {key: stored[key] for key in facts if stored.get(key) not in (None, "")}
    if "total" in stored:
        return {**told, "all": _figures(stored["total"])}
    if "by_site" not in stored:
        return told
    sites = stored["by_site"]
    rows = [{"client": int(client), **_figures(one)} for client, one in sites.items()]
    rows.sort(key=lambda row: (row["balanced"], row["accuracy"], row["client"]))
    names = ("confusion", "scores", "images", "seen")
    total = {name: sum(one[name] for one in sites.values()) for name in names}
    return {**told, "by_site": rows, "all": _figures(total), "mean": _mean(rows)}


def _figures(stored: Mapping[str, Any]) -> dict[str, Any]:
    figures = figures_of(Counts(stored["confusion"], stored["scores"]))
    matrix = stored["confusion"].tolist()
    return {**figures, "seen": round(stored["seen"]), "confusion": matrix}


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every figure over the sites that have it."""
    mean: dict[str, Any] = {}
    for key in ("accuracy", "commonest", "balanced", "auroc", "auroc_error"):
        values = [row[key] for row in rows if row[key] is not None]
        mean[key] = float(np.mean(values)) if values else None
    return mean


def named(
    figures: Mapping[str, Any], names: Mapping[ClientId, str], classes: Sequence[str]
) -> dict[str, Any]:
    """Figures with the names of sites, where they have any, and of the classes.

    >>> named({"by_site": [{"client": 2}]}, {2: "west"}, ("dog", "cat"))
    {'by_site': [{'client': 2, 'site': 'west'}], 'classes': ['dog', 'cat']}
    """
    told = {**figures, "classes": list(classes)}
    for_sites = [
        {"client": row["client"], "site": names[row["client"]], **row}
        if row["client"] in names
        else row
        for row in figures.get("by_site", ())
    ]
    return {**told, "by_site": for_sites} if "by_site" in figures else told


def without_sites(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures or a round's line without those of single sites, which other sites need not know.

    >>> without_sites({"loss": 1.0, "sites": {"all": {}, "by_site": []}})
    {'loss': 1.0, 'sites': {'all': {}}}
    """
    if FIGURES not in figures:
        return dict(figures)
    told = {key: value for key, value in figures[FIGURES].items() if key != "by_site"}
    return {**figures, FIGURES: told}


# ---- client ------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Which of a client's labelled images a classifier learns from, and which test it."""

    learned: Integers  # positions among its examples
    tested: Examples
    rows: Integers  # positions in these
    seen: int  # how many of these were trained on


def client_ready(method: Method, client: Client) -> dict[str, Value]:
    """Nothing; raises Decline if the client has not enough labelled images."""
    _parts(method, client)
    return {}


def client_sums(method: Method, client: Client, model: Weights) -> dict[str, Value]:
    """Means over the client's labelled training images, of classes with enough of them."""
    how, parts = method.site_evaluation, _parts(method, client)
    assert how is not None and client.labelled is not None
    labels = client.labelled.examples.host_labels().numpy()
    rows = at_least(labels, parts.learned, how.least)
    features = _features(method, client, model, client.labelled.examples, rows)
    return {**class_means(features, labels[rows], how.classes), "images": len(rows)}


def client_counts(
    method: Method, client: Client, model: Weights, classifier: Tensor | None
) -> dict[str, Value]:
    """Counts over the client's held-out images."""
    how, parts = method.site_evaluation, _parts(method, client)
    assert how is not None and client.labelled is not None
    asked = _features(method, client, model, parts.tested, parts.rows)
    if classifier is None:
        predicted, shares = _own_probe(method, client, model, parts.learned, asked)
    else:
        wanted = ridge_shape(method.feature_size, how.classes)
        if tuple(classifier.shape) != wanted:
            raise WireError(f"`classifier` has shape {tuple(classifier.shape)}, not {wanted}")
        scores = Ridge(to_host(classifier).double()).scores(asked)
        predicted, shares = scores.argmax(axis=1), shares_of_ridge(scores)
    labels = parts.tested.host_labels().numpy()[parts.rows]
    counts = counts_of(predicted, shares, labels, how.bins)
    return {
        "confusion": counts.confusion,
        "scores": counts.scores,
        "images": len(labels),
        "seen": parts.seen,
    }


def _own_probe(
    method: Method, client: Client, model: Weights, learned: Integers, asked: Tensor
) -> tuple[Integers, Array]:
    """Predictions, and shares of all classes, by a linear probe of the client's own images."""
    how = method.site_evaluation
    assert how is not None and client.labelled is not None
    examples = client.labelled.examples
    known = _features(method, client, model, examples, learned)
    labels = examples.host_labels(torch.from_numpy(learned))
    with use_device(CPU):  # where the features are; an accelerator would be read once a pass
        scores, classes = probe_scores(known, labels, asked)
    shares = np.zeros((len(asked), how.classes))  # a class without images is never predicted
    shares[:, classes] = shares_of_logits(scores)
    return classes[scores.argmax(axis=1)], shares


def _parts(method: Method, client: Client) -> _Parts:
    """The client's images to learn from and to test on, the same in every round."""
    how, labelled = method.site_evaluation, client.labelled
    assert how is not None
    if labelled is None:
        raise Decline("it has no labels of the plan's classes")
    labels = labelled.examples.host_labels().numpy()
    known = np.flatnonzero(labels >= 0)
    tested, rows, seen = labelled.examples, known[:0], 0
    if labelled.test is not None:
        tested, learned = labelled.test, known
        rows = np.flatnonzero(tested.host_labels().numpy() >= 0)[: len(labels)]
    else:
        rng = seeds.numpy_rng(method.world.seed, "held_out", client.id)
        rows = held_out(labels, labelled.groups, how.held_out, rng)
        learned = np.setdiff1d(known, rows)
    rows = at_least(tested.host_labels().numpy(), rows, how.least)
    seen = len(rows) if tested is labelled.examples else 0
    if not len(known):
        raise Decline("it has no labels of the plan's classes")
    if not len(rows):
        raise Decline(f"no class has {counted(how.least, 'held-out image')} here")
    enough = at_least(labels, learned, how.least if _is_common(how) else 1)
    if not len(enough):
        raise Decline(f"no class has {counted(how.least, 'image')} to learn from here")
    if not _is_common(how) and len(np.unique(labels[enough])) < 2:
        raise Decline("its labelled images are of one class")
    return _Parts(learned, tested, rows, seen)


def _features(
    method: Method, client: Client, model: Weights, examples: Examples, rows: Integers
) -> Tensor:
    """Features of some of the client's images without augmentation, refused if not finite."""
    encoder: nn.Module = encoder_at(method, client, model)
    other = replace(client, examples=examples)
    features: Tensor = to_host(other.features(encoder, torch.from_numpy(rows)))
    if not bool(features.isfinite().all()):
        raise Decline("the features of its images are not finite")
    return features


def check(method: Method) -> None:
    """Refuse a method that cannot be evaluated at the sites."""
    how = method.site_evaluation
    if how is not None and (reason := obstacle(method, how.protocol)):
        raise ConfigError(f"evaluate.sites={how.protocol} is not possible: {reason}")
