"""Generalisation and personalisation: how well an encoder serves all clients, and each client.

FedStyle (Yang et al., 2022) evaluates a federation in two ways, and so does this measure.

- Generalisation: the federation's encoder stays as it is. For each style, a linear classifier is
  trained on all training images of that style and tested on its test images.
- Personalisation: every client trains once more from the final model, by the same rule whatever the
  method; with plain FedAvg that is local fine-tuning. Its own features (`Method.own`) are frozen; a
  linear classifier, and the method's adapter if it has one, is trained on the client's own labelled
  training images, and tested on test images of the client's distribution.

Newcomers, which never trained with the others, are evaluated in the same way, but separately: they
start with the final model and without any state.

A mean over clients can hide that some are served badly, so the spread, the worst client and the
mean of the worst tenth are reported too. Test labels are used only to count correct predictions.

Accuracy weighs test images by the shares that their groups have at the client
(`ClientTests.weights`). Balanced accuracy is the mean recall over the classes of these images, and
AUROC, for a client with exactly two of them, how often an image of one class is ranked above one of
the other. Within a class images have the same weights as in accuracy; the classes count alike. So
where the groups are the classes, their shares at the client play no part in either figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, DataError, counted, suggest
from harmonium.core.progress import each, work
from harmonium.core.settings import plain as plain_settings
from harmonium.core.types import ClientId
from harmonium.data.images import UNKNOWN, Images, Integers
from harmonium.data.newcomers import STYLE, in_turn, most_common
from harmonium.data.shift import with_split_angles
from harmonium.evaluation.classifier import PROTOCOLS, Protocol, ResidualAdapter, train
from harmonium.evaluation.feature_cache import encoder_digest
from harmonium.evaluation.metrics import Answers, answers, commonest_class
from harmonium.evaluation.references import COMMONEST
from harmonium.federation.personal import Own
from harmonium.measures import Figures, Headline, Measure, Shown, measures
from harmonium.measures.probing import BALANCED, FIGURES, counted_right
from harmonium.measures.result_cache import ResultCache
from harmonium.measures.run_reader import Run
from harmonium.report.metric_names import times

if TYPE_CHECKING:
    from harmonium.report.measure_plots import Strip

AUTO, CLASSES = "auto", "classes"
MORE = ("balanced", "auroc")  # figures beside accuracy
LISTED = 12  # clients of a run, and styles, that tables show; all are in eval.json


@dataclass(frozen=True)
class ClientTests:
    """The images that a run's clients are evaluated with; labels -1 are not known."""

    train: Images  # all training images as clients hold them
    seen: Integers  # their labels, as far as clients may see them
    test: Images  # all labelled
    by: str | None  # the column of the groups, or classes, or none
    groups: Integers  # of `train`
    test_groups: Integers  # of `test`
    names: Mapping[int, str]  # of groups that test images have; one for all without a column

    def weights(self, rows: Integers) -> np.ndarray:
        """The weight of each test image for a client with these training images.

        A group is weighted by its share of the client's images; images of a group weigh the same.
        """
        own = self.groups[rows]
        size = 1 + max(self.groups.max(initial=0), self.test_groups.max(initial=0))
        shares = np.bincount(own[own >= 0], minlength=size)
        tested = np.bincount(self.test_groups[self.test_groups >= 0], minlength=size)
        each = shares / np.maximum(tested, 1)
        return np.where(self.test_groups >= 0, each[self.test_groups], 0.0)

    def group(self, rows: Integers) -> str | None:
        """The group of more than half of these training images; none where groups are classes."""
        if self.by in (None, CLASSES):
            return None
        most = most_common(self.groups[rows])
        return self.names.get(most) if (self.groups[rows] == most).mean() > 0.5 else None

    def parts(self) -> Iterator[tuple[int, str, np.ndarray, np.ndarray]]:
        """Each group: its number, its name, its labelled training images and its test images.

        All images are one group where groups are classes or there are none.
        """
        whole = self.by in (None, CLASSES)
        for value, name in ({0: "all"} if whole else self.names).items():
            mine = (self.train.labels != UNKNOWN) & (whole | (self.groups == value))
            if mine.any():
                yield value, name, mine, whole | (self.test_groups == value)


@measures("personal")
@dataclass(frozen=True)
class Personal(Measure):
    """Generalisation of the federation's encoder, and personalisation at each client."""

    legend = (
        "general: a classifier of all clients' labels on the federation's encoder; personal: each "
        "client's own features and classifier, tested on images of its distribution, the mean over "
        f"clients; {BALANCED}; (!) its classifier diverged"
    )

    clients: int | None = None  # of those who train, at most, and of newcomers; none: all
    by: str | None = AUTO  # a column, e.g. style, or classes; none: all test images for everyone
    epochs: int | None = None  # of the further round; none: the recipe's; 0: no further round
    adapter: Literal["own", "frozen", "none", "mlp"] = "own"  # what learns beside the classifier
    hidden: int = 384  # width of mlp; 384 gives as many weights as FedStyle's generator with 256
    protocol: str = "lp_style"  # how classifiers are trained
    standardise: bool | None = None  # features for the classifier; none: as the protocol has it
    part: Literal["test", "validation"] = "test"  # tested on; validation: to choose settings
    pictures: int | None = None  # of it, at most; none: all
    seed: int = 0  # of what is drawn: clients, images, batches

    def __post_init__(self) -> None:
        bounds = {"clients": 1, "epochs": 0, "hidden": 1, "pictures": 1, "seed": 0}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"personal.{name} is {value}; it must be at least {least}")
        if self.protocol not in PROTOCOLS:
            near = suggest(self.protocol, PROTOCOLS)
            raise ConfigError(f"personal.protocol is '{self.protocol}', which is unknown: {near}")

    @property
    def how(self) -> Protocol:
        """The protocol of the classifiers."""
        protocol = PROTOCOLS[self.protocol]
        changed = protocol.standardise if self.standardise is None else self.standardise
        return replace(protocol, standardise=changed)

    def compute(self, run: Run) -> Figures:
        """Both figures of one run."""
        tests = self._client_tests(run)
        general = self._general(run, tests)
        rows, notes = self._clients(run, tests, self._chosen(run, tests, sorted(run.examples)))
        if not rows:
            raise DataError(f"{run.path}: no client could be evaluated: {'; '.join(notes)}")
        new, more = self._clients(run, tests, self._chosen(run, tests, run.split.newcomers))
        plain = {
            "round": run.commit.round,
            "part": self.part,
            "by": tests.by,
            "protocol": {"name": self.protocol, **asdict(self.how)},
            "adapter": self.adapter,
            "generalisation": general,
            "personalisation": {**summary(rows), "each": rows},
            "newcomers": {**summary(new), "each": new} if new else None,
            "references": self._references(run, tests, [row["client"] for row in rows]),
        }
        tested_on = f"tested on {self.part} images, {_WORDS.get(tests.by, f'by {tests.by}')}"
        return Figures(plain, [tested_on, *notes, *more])

    # ---- test images -------------------------------------------------------------------------
    def _client_tests(self, run: Run) -> ClientTests:
        data = run.dataset
        asked = run.images(self.pictures, self.seed, self.part)
        if not asked.labelled or not data.train.labelled:
            what = "training" if asked.labelled else self.part
            raise DataError(f"personal needs labels; the {what} images of {run.path} have none")
        asked = asked.subset(np.flatnonzero(asked.labels != UNKNOWN))
        train, by = with_split_angles(data, run.split).train, self._by(run, asked)
        seen = run.split.seen(train).labels
        if by is None:
            nothing = np.zeros(len(train), np.int64), np.zeros(len(asked), np.int64)
            return ClientTests(train, seen, asked, by, *nothing, {0: "all"})
        if by == CLASSES:
            return ClientTests(train, seen, asked, by, train.labels, asked.labels, {})
        values = asked.factors[by]
        words = data.names.get(by, ())
        names = {
            int(v): words[v] if v < len(words) else str(v) for v in np.unique(values) if v >= 0
        }
        return ClientTests(train, seen, asked, by, train.factors[by], values, names)

    def _by(self, run: Run, asked: Images) -> str | None:
        """The column by which a client's test images are selected: the split's, else the classes.

        A style column also serves where every client holds one style only.
        """
        columns = run.dataset.train.factors
        both = [column for column in columns if column in asked.factors]
        if self.by != AUTO:
            if self.by not in (None, CLASSES, *both):
                known = ", ".join([*both, CLASSES, "none"])
                raise ConfigError(f"personal.by is '{self.by}'; {run.path} has these: {known}")
            return self.by
        rule = run.recipe.split
        if rule.name in ("styles", "column") and (column := getattr(rule, "column", "")) in both:
            known_there = columns[column][columns[column] >= 0]
            if np.isin(known_there, asked.factors[column]).any():
                return column
        if STYLE in both and all(np.ptp(columns[STYLE][own]) == 0 for own in run.split.indices):
            return STYLE
        return CLASSES

    # ---- generalisation ----------------------------------------------------------------------
    def _general(self, run: Run, tests: ClientTests) -> dict[str, Any]:
        """Means over groups, and accuracy by group; over encoders where clients have their own."""
        encoders = run.federations()
        run.note(f"{run.label}: generalisation, {counted(len(encoders), 'encoder')}")
        by_encoder = [self._groups(run, tests, encoder) for encoder in encoders]
        if not by_encoder or not by_encoder[0]:
            raise DataError(f"{run.path}: no group has both training and test images with labels")
        groups = {
            name: float(np.mean([one[name]["accuracy"] for one in by_encoder]))
            for name in by_encoder[0]
        }
        rows = [row for one in by_encoder for row in one.values()]
        return {"mean": float(np.mean(list(groups.values()))), **_beside(rows), "groups": groups}

    def _groups(
        self, run: Run, tests: ClientTests, encoder: nn.Module
    ) -> dict[str, dict[str, Any]]:
        """The figures of a classifier for each group."""
        rows = np.flatnonzero(tests.train.labels != UNKNOWN)
        whose = "the federation's encoder"
        known = run.features(encoder, tests.train.subset(rows), whose)
        asked = run.features(encoder, tests.test, whose)
        by_group = {}
        for value, name, mine, theirs in tests.parts():
            rng = seeds.torch_rng(self.seed, "measure", "general", value)
            labels = torch.from_numpy(tests.train.labels[mine])
            model = train(known[mine[rows]], labels, self.how, rng)
            scores = model.scores(asked[theirs]).numpy(), model.classes.numpy()
            by_group[name] = counted_right(answers([scores], tests.test.labels[theirs]))
        return by_group

    # ---- personalisation ---------------------------------------------------------------------
    def _chosen(self, run: Run, tests: ClientTests, among: Sequence[ClientId]) -> list[ClientId]:
        """All of these clients, or `clients` of them, taken from every group in turn."""
        if self.clients is None or self.clients >= len(among):
            return list(among)
        groups = [tests.group(run.split.indices[client]) for client in among]
        order = in_turn(groups, seeds.numpy_rng(self.seed, "measure", "clients"))
        return sorted(among[place] for place in order[: self.clients])

    def _clients(
        self, run: Run, tests: ClientTests, clients: Sequence[ClientId]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """A row for each client that could be evaluated, and notes on the others."""
        able, left_out = self._able(run, tests, clients)
        rows = []
        with work("personal figures", len(able), "clients") as at:
            for client, own in run.owns(able, self.epochs) if able else ():
                rows.append(self._client(run, tests, client, own))
                at(len(rows))
                if len(rows) % 10 == 0 or len(rows) == len(able):
                    run.note(f"{run.label}: {len(rows)} of {len(able)} clients evaluated")
        evaluated = {row["client"] for row in rows}
        if without_model := [client for client in able if client not in evaluated]:
            left_out["no model of their own"] = without_model
        notes = [f"{_who(some)} left out: {why}" for why, some in left_out.items()]
        return rows, [*notes, *_notes_on(rows)]

    def _able(
        self, run: Run, tests: ClientTests, clients: Sequence[ClientId]
    ) -> tuple[list[ClientId], dict[str, list[ClientId]]]:
        """The clients with both training and test images; the others by reason."""
        able, left_out = [], dict[str, list[ClientId]]()
        for client in clients:
            rows = run.split.indices[client]
            if not (tests.seen[rows] != UNKNOWN).any():
                left_out.setdefault("no labelled training image", []).append(client)
            elif not tests.weights(rows).any():
                left_out.setdefault(f"no {self.part} image of their kind", []).append(client)
            else:
                able.append(client)
        return able, left_out

    def _client(self, run: Run, tests: ClientTests, client: ClientId, own: Own) -> dict[str, Any]:
        rows = run.split.indices[client]
        labels, weights = tests.seen[rows], tests.weights(rows)
        known, tested = labels != UNKNOWN, np.flatnonzero(weights)
        unique, copies = np.unique(rows[known], return_inverse=True)
        whose = f"client {client}"
        mine = run.features(own.encoder, tests.train.subset(unique), whose)[copies]
        asked = run.features(own.encoder, tests.test.subset(tested), whose)
        mine, asked, adapter = self._adapted(own, mine, asked, client)
        rng = seeds.torch_rng(self.seed, "measure", "classifier", client)
        model = train(mine, torch.from_numpy(labels[known]), self.how, rng, adapter=adapter)
        scores = model.scores(asked).numpy(), model.classes.numpy()
        shares = weights[tested] / weights.max()
        return {
            "client": client,
            "group": tests.group(rows),
            **_weighted(answers([scores], tests.test.labels[tested], shares), shares),
            "labels": int(known.sum()),
            "classes": len(model.classes),
            "tested": len(tested),
            "finite": model.finite,
        }

    def _adapted(
        self, own: Own, mine: Tensor, asked: Tensor, client: ClientId
    ) -> tuple[Tensor, Tensor, nn.Module | None]:
        """Features for the classifier, and the adapter that learns beside it, if any."""
        if self.adapter == "own":
            return mine, asked, own.adapter
        if self.adapter == "frozen" and own.adapter is not None:
            with torch.no_grad():
                return own.adapter(mine), own.adapter(asked), None
        mine, asked = own.without(mine), own.without(asked)
        if self.adapter != "mlp":
            return mine, asked, None
        rng = seeds.torch_rng(self.seed, "measure", "adapter", client)
        return mine, asked, ResidualAdapter(mine.shape[1], self.hidden, rng)

    # ---- references --------------------------------------------------------------------------
    def _references(
        self, run: Run, tests: ClientTests, clients: Sequence[ClientId]
    ) -> dict[str, dict[str, Any]]:
        """The figures of encoders without training, over the clients that were evaluated.

        Those of pixels are the same for all runs with the same images and split, so they are kept
        on disk.
        """
        finished = ResultCache(run.finished.folder)  # its counts are of trainings that a call names
        references = {}
        for name, encoder in {"untrained": run.untrained, **run.pixels(run.eval_data())}.items():
            about = {
                "reference": encoder_digest(encoder),
                "measure": self.name,
                "settings": plain_settings(self),
                "data": run.dataset.digest,
                "split": run.split.digest,
                "clients": list(clients),
                "prepared": plain_settings(run.method.views.pipelines[0]),
                "figures": list(FIGURES),
            }

            def compute(encoder: nn.Module = encoder, name: str = name) -> dict[str, Any]:
                bare, general = replace(self, adapter="none"), self._groups(run, tests, encoder)
                order = each(f"personal figures of {name}", clients, "clients")
                own = [bare._client(run, tests, client, Own(encoder)) for client in order]
                return _both([*general.values()], own)

            references[name] = finished(about, compute)
        references[COMMONEST] = self._commonest(run, tests, clients)
        return references

    def _commonest(
        self, run: Run, tests: ClientTests, clients: Sequence[ClientId]
    ) -> dict[str, Any]:
        """Always predicting the commonest class: of all training images, and of each client's."""
        wanted, own = tests.test.labels, []
        for client in clients:
            rows = run.split.indices[client]
            labels, weights = tests.seen[rows], tests.weights(rows)
            tested, known = weights > 0, labels[labels != UNKNOWN]
            shares = weights[tested]
            own.append(_weighted(commonest_class(known, wanted[tested], shares), shares))
        general = [
            counted_right(commonest_class(tests.train.labels[mine], wanted[theirs]))
            for _, _, mine, theirs in tests.parts()
        ]
        return _both(general, own)

    # ---- tables and plots --------------------------------------------------------------------
    def headlines(self) -> dict[str, Headline]:
        """Means over groups and over clients, the worst client, and newcomers, if there are any."""
        return {
            "general": Headline("general"),
            "personal": Headline("personal"),
            "worst": Headline("worst client"),
            "newcomers": Headline("newcomers"),
        }

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """These figures in percent; references have the first two."""
        if reference:
            figures = plain["references"].get(reference, {})
            return {key: 100 * figures[key] for key in ("general", "personal") if key in figures}
        personal, newcomers = plain["personalisation"], plain["newcomers"]
        return {
            "general": 100 * plain["generalisation"]["mean"],
            "personal": 100 * personal["mean"],
            "worst": 100 * personal["worst"],
            **({"newcomers": 100 * newcomers["mean"]} if newcomers else {}),
        }

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """Rows by run and figure, by reference, by group, and by client where those are few."""
        runs, groups, each, beside = (list[dict[str, Any]]() for _ in range(4))
        for label, one in results.items():
            run = {"run": label}
            runs += [{**run, **row} for row in _by_figure(one.plain)]
            beside += [{**run, **row} for row in _by_reference(one.plain)]
            groups += [{**run, **row} for row in _by_group(one.plain)]
            each += [{**run, **row} for row in _by_client(one.plain)]
        shown = {
            f"Accuracy on {self.part} images in percent": runs,
            "References: the same without training, over the same clients": beside,
            "By group": groups,
            "By client": each,
        }
        return [Shown(title, rows, 1) for title, rows in shown.items() if rows]

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """One strip per run, with one dot per client."""
        from harmonium.report.measure_plots import strips

        title = "Personal accuracy of clients' own features"
        meaning = "accuracy in percent; one dot per client, a line at their mean"
        strips(
            path, {k: _strip(one.plain) for k, one in results.items()}, meaning, title, "newcomer"
        )
        return True


_WORDS = {CLASSES: "classes weighted by their shares at the client", None: "the same for everyone"}


_KINDS = {"generalisation": "general", "personalisation": "personal", "newcomers": "newcomers"}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures over clients, and the mean of each group of clients.

    The worst tenth is rounded up to whole clients. AUROC is the mean over the clients that have
    one, reported with their number.

    >>> summary([{"accuracy": k / 10, "group": None} for k in range(11)])["worst_tenth"]
    0.05
    """
    values = np.sort([row["accuracy"] for row in rows])
    having = sum(row.get("auroc") is not None for row in rows)
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["group"] is not None:
            groups.setdefault(row["group"], []).append(row["accuracy"])
    return {
        "clients": len(values),
        "mean": float(values.mean()),
        **_beside(rows),
        **({"auroc_clients": having} if having else {}),
        "spread": float(values.std()) if len(values) > 1 else None,
        "worst": float(values[0]),
        "worst_tenth": float(values[: math.ceil(len(values) / 10)].mean()),
        "groups": {name: float(np.mean(some)) for name, some in sorted(groups.items())},
    }


def _notes_on(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Notes on the clients that were evaluated."""
    if single := [row["client"] for row in rows if row["classes"] == 1]:
        yield f"{_who(single)} with labels of one class: the classifier predicts no other"
    if diverged := [row["client"] for row in rows if not row["finite"]]:
        yield f"{_who(diverged)} whose classifier diverged, so its predictions are arbitrary"
    having = sum(row["auroc"] is not None for row in rows)
    if 0 < having < len(rows):
        yield (
            f"AUROC: the mean over {having} of {counted(len(rows), 'client')}, those that have "
            "exactly two classes"
        )


def _beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of balanced accuracy and AUROC over the rows that have them; absent where none has."""
    values = {key: [row[key] for row in rows if row.get(key) is not None] for key in MORE}
    return {key: float(np.mean(some)) for key, some in values.items() if some}


def _both(
    general: Sequence[Mapping[str, Any]], personal: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """General and personal accuracy; `balanced` and `auroc` of both, as far as there are any."""
    rows = {"general": general, "personal": personal}
    beside = {name: _beside(some) for name, some in rows.items()}
    return {
        **{name: float(np.mean([row["accuracy"] for row in some])) for name, some in rows.items()},
        **{
            key: both
            for key in MORE
            if (both := {n: b[key] for n, b in beside.items() if key in b})
        },
    }


def _weighted(given: Answers, weights: np.ndarray) -> dict[str, Any]:
    """The figures of one client; `given` has its balanced accuracy and AUROC with these weights."""
    accuracy = float(np.average(given.right[0].numpy(), weights=weights))
    return {**counted_right(given), "accuracy": accuracy}


def _columns(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy, balanced accuracy and AUROC in percent, as far as they are there."""
    values = {heading: figures.get(key) for key, heading in FIGURES.items()}
    return {heading: 100 * value for heading, value in values.items() if value is not None}


def _by_figure(plain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind, called in _KINDS.items():
        if figures := plain[kind]:
            row = _columns({**figures, "accuracy": figures["mean"]})
            if "clients" in figures:
                names = {"spread": "spread", "worst": "worst", "worst tenth": "worst_tenth"}
                row |= {words: times(100, figures[key]) for words, key in names.items()}
                row["clients"] = figures["clients"]
            yield {"figure": called, **row}


def _by_reference(plain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, figures in plain.get("references", {}).items():
        for kind in ("general", "personal"):
            values = {key: figures.get(key, {}).get(kind) for key in MORE}
            yield {
                "reference": name,
                "figure": kind,
                **_columns({"accuracy": figures[kind], **values}),
            }


def _by_group(plain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in _KINDS:
        groups = (plain[kind] or {}).get("groups", {})
        if groups and plain["by"] not in (None, CLASSES) and len(groups) <= LISTED:
            yield {"figure": _KINDS[kind], **{name: 100 * value for name, value in groups.items()}}


def _by_client(plain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    new = plain["newcomers"]["each"] if plain["newcomers"] else []
    rows = [*plain["personalisation"]["each"], *new]
    for row in rows if len(rows) <= LISTED else ():
        name = f"{row['client']} (new)" if row in new else str(row["client"])
        name += "" if row["finite"] else " (!)"
        group = {"group": row["group"]} if row["group"] is not None else {}
        counts = {key: row[key] for key in ("labels", "classes", "tested")}
        yield {"client": name, **group, **_columns(row), **counts}


def _strip(plain: Mapping[str, Any]) -> Strip:
    from harmonium.report.measure_plots import Strip

    personal, new = plain["personalisation"], plain["newcomers"] or {"each": []}
    rows = [*personal["each"], *new["each"]]
    return Strip(
        [100 * row["accuracy"] for row in rows],
        [row["group"] or "" for row in rows],
        100 * personal["mean"],
        [place >= len(personal["each"]) for place in range(len(rows))],
    )


def _who(clients: Sequence[ClientId]) -> str:
    named = ", ".join(map(str, clients[:LISTED])) + (", …" if len(clients) > LISTED else "")
    return f"{counted(len(clients), 'client')} ({named})"
