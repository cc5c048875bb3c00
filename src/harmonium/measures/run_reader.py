"""A run's folder, opened for evaluation: its last commit, its images, its clients' encoders.

Nothing here writes to the folder, so a complete run stays as it is, and a run that is still going
can be measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from harmonium.core import files, seeds
from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.core.progress import emit
from harmonium.core.settings import plain
from harmonium.core.types import ClientId
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split
from harmonium.evaluation.feature_cache import FeatureCache
from harmonium.evaluation.features import embed
from harmonium.evaluation.pixels import Pixels
from harmonium.evaluation.references import RAW, WHITENED, whitened_pixels
from harmonium.evaluation.whitening import DIRECTIONS, WhitenedEncoder, moments_of, whitening
from harmonium.federation.method import Method, Server
from harmonium.federation.personal import Own
from harmonium.measures.eval_data import OWN, THEIRS, UPRIGHT, EvalData, EvalSets
from harmonium.measures.result_cache import RandomPass, ResultCache
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import load_encoder
from harmonium.runs.loop import initial_encoder
from harmonium.runs.open_run import opened, read_about
from harmonium.runs.start import evaluation_data
from harmonium.sites.plan import method_of
from harmonium.storage import state_store
from harmonium.storage.run_folder import SITE_REPORT, Commit, RunFolder


@dataclass(frozen=True, eq=False)
class Run:
    """A run's recipe, data, split and last commit."""

    label: str  # its name in tables and plots
    path: Path
    recipe: Recipe
    dataset: Dataset
    public: Dataset | None
    split: Split
    commit: Commit
    note: Callable[[str], None] = field(default=lambda text: None, repr=False)  # while it works
    sets: EvalSets = field(default_factory=EvalSets, repr=False)  # to evaluate on
    feature_cache: FeatureCache = field(default_factory=FeatureCache, repr=False)  # on disk
    finished: ResultCache = field(default_factory=ResultCache, repr=False)  # of earlier calls

    @cached_property
    def method(self) -> Method:
        """The run's method."""
        return self.recipe.build_method(self.dataset)

    @property
    def examples(self) -> dict[ClientId, int]:
        """Registered number of every client that trains."""
        return self.split.examples

    @cached_property
    def server(self) -> Server:
        """The server as it was committed."""
        return Server(self.examples, **self.commit.server)

    @property
    def keeps_encoders(self) -> bool:
        """Whether clients have encoders of their own already, which no round replaces."""
        return self.method.personal or self.method.blueprint.rules["encoder"] == "local"

    @cached_property
    def _eval_data(self) -> dict[str, EvalData]:
        data = {OWN: EvalData(OWN, evaluation_data(self.dataset, self.split))}
        if self.split.angles is not None:
            data[UPRIGHT] = EvalData(
                UPRIGHT, evaluation_data(self.dataset, replace(self.split, angles=None))
            )
        return data

    def eval_data(self, name: str = OWN) -> EvalData:
        """The data to evaluate on: the run's own images, or another set in their shape."""
        if name not in self._eval_data:
            if name == UPRIGHT:
                raise ConfigError(f"no client of {self.path} holds rotated images: set on={OWN}")
            shape, run = self.dataset.train.shape, self.recipe.data
            self._eval_data[name] = EvalData(name, self.sets.load(name, shape, run))
        return self._eval_data[name]

    def overlap(self, name: str) -> list[str]:
        """A warning if the run was trained on a set that it is evaluated on."""
        own, public = self.recipe.data.name, self.recipe.public
        if name != own and (public is None or name != public.name):
            return []
        return [
            f"the run was trained on {name} itself: training images may be among those it is "
            f"tested on" + (f"; on={OWN} keeps them apart" if name == own else "")
        ]

    @cached_property
    def final_encoders(self) -> dict[str, nn.Module]:
        """The encoders that a run evaluates at its end, by owner.

        The federation's; or, where clients end with encoders of their own, those of
        `evaluate.clients` clients.
        """
        from harmonium.measures.extra_round import settled  # imports this module; so below

        method, server = self.method, settled(self)
        if not method.has_own_encoders:
            return {"the federation": method.represent(server)}
        clients = sorted(map(int, self.commit.clients))[: self.recipe.evaluate.clients]
        return {
            f"client {client}": method.represent(server, self.state(client))
            for client in clients or [0]
        }

    @cached_property
    def untrained(self) -> nn.Module:
        """The encoder at initialisation."""
        return initial_encoder(self.method, self._own_data)

    @property
    def _own_data(self) -> Dataset:
        return self.eval_data().dataset

    def pixels(self, data: EvalData) -> dict[str, nn.Module]:
        """Encoders without training: pixels as they are, and whitened.

        Whitening is fitted on the training part of the set, and needs no labels.
        """
        if data.name not in self._pixels:
            encoders: dict[str, nn.Module] = {RAW: Pixels()}
            with suppress(DataError):  # images that are all the same cannot be whitened
                encoders[WHITENED] = whitened_pixels(data.dataset.train, self.method.views.plain)
            self._pixels[data.name] = encoders
        return self._pixels[data.name]

    @cached_property
    def _pixels(self) -> dict[str, dict[str, nn.Module]]:
        return {}

    def whitened(self, encoder: nn.Module, data: EvalData, whiten: bool | int) -> nn.Module:
        """An encoder with its features whitened by those of the training part of a set."""
        directions = DIRECTIONS if isinstance(whiten, bool) else whiten
        features = self.cached_features(encoder, data.dataset.train, "the encoder to whiten")
        return WhitenedEncoder(encoder, whitening(moments_of(features), directions))

    def clients(self, count: int, seed: int, measure: str, least: int = 1) -> list[ClientId]:
        """Up to `count` random clients whose encoders are available.

        Those of the next round's cohort come first, because a further round would train them.
        """
        everyone = sorted(self.examples)
        if self.keeps_encoders:
            groups = [sorted(int(client) for client in self.commit.clients)]
        else:
            cohort = self.cohort
            groups = [cohort, [client for client in everyone if client not in set(cohort)]]
        rng = seeds.numpy_rng(seed, "measure", "clients")
        order = [group[int(place)] for group in groups for place in rng.permutation(len(group))]
        if len(order) < least:
            raise ConfigError(
                f"{measure} needs the encoders of at least {least} clients; {self.path} has "
                f"{len(order)}"
            )
        return sorted(order[:count])

    @property
    def cohort(self) -> list[ClientId]:
        """The clients that would be asked in the next round."""
        recipe, number = self.recipe, self.commit.round + 1
        return recipe.participation.cohort(sorted(self.examples), number, recipe.seed)

    def encoders(self, clients: Sequence[ClientId]) -> dict[ClientId, nn.Module]:
        """The clients' local encoders: their own, or the model after a further round.

        Clients that cannot train are left out.
        """
        if not self.keeps_encoders:
            from harmonium.measures.extra_round import further

            return further(self, clients)
        states = {client: self.state(client) for client in clients}
        return {client: self.method.represent(self.server, states[client]) for client in states}

    def owns(
        self, clients: Sequence[ClientId], epochs: int | None = None
    ) -> Iterator[tuple[ClientId, Own]]:
        """Clients' own features after a further round, one client after another.

        Clients that cannot train are left out. `epochs` replaces the recipe's; with 0 no client
        trains: those that keep encoders use theirs, others the federation's model.
        """
        from harmonium.measures.extra_round import settled, trained

        if epochs != 0:
            for client, one in trained(self, clients, epochs):
                yield client, self.method.own(one.model, one.state)
            return
        server = settled(self)
        model = {**server.model, **server.memory.get("statistics", {})}
        for client in clients:
            state = self.state(client)
            if not state and (self.keeps_encoders or self.method.blueprint.stays):
                self.note(f"{self.label}: client {client} never took part, so it has no encoder")
            elif self.keeps_encoders:
                yield client, Own(self.method.represent(server, state))
            else:
                yield client, self.method.own(model, state)

    def federations(self) -> list[nn.Module]:
        """The federation's encoder; the clients' encoders where parts of it never leave them."""
        from harmonium.measures.extra_round import settled

        parts, represent = self.method.blueprint, self.method.represent
        local = {key.partition(".")[0] for key, rule, _ in parts.tensors() if rule == "local"}
        if "encoder" not in local:
            return [represent(settled(self))]
        took_part = sorted(int(client) for client in self.commit.clients)
        return [represent(self.server, self.state(client)) for client in took_part]

    def state(self, client: ClientId) -> dict[str, Any]:
        """A client's state at the last commit."""
        entry = self.commit.clients.get(str(client))
        if entry is None:
            return {}
        return state_store.read(self.path / "clients" / entry["file"], entry["digest"]).state

    def images(self, count: int | None, seed: int, part: str = "test") -> Images:
        """Up to `count` images of a part: the same for all runs on the same data."""
        test: Images = getattr(self.dataset, part)
        if len(test) == 0:
            raise DataError(f"the data of {self.path} have no {part} images to measure on")
        if count is None or len(test) <= count:
            return test
        rng = seeds.numpy_rng(seed, "measure", "pictures")
        return test.subset(np.sort(rng.choice(len(test), count, replace=False)))

    def cached_features(
        self, encoder: nn.Module, images: Images, whose: str, views: RandomPass | None = None
    ) -> Tensor:
        """Features from the cache on disk; of random views where `views` is given."""
        if isinstance(encoder, WhitenedEncoder):  # plain features are cached, and serve both
            white: Tensor = encoder.white(
                self.cached_features(encoder.encoder, images, whose, views)
            )
            return white
        first = self.method.views.pipelines[0]
        how = {
            "encoder": plain(self.recipe.encoder),
            "prepared": [first.mean, first.std, first.size],
            **({"drawn": plain(views)} if views else {}),
        }
        features = self.feature_cache.features(encoder, images, self.method.views.plain, how, views)
        return self._sound(features, whose)

    def features(self, encoder: nn.Module, images: Images, whose: str) -> Tensor:
        """Frozen features of images, refused where they are not finite."""
        watch = partial(emit, "features")
        return self._sound(embed(encoder, images, self.method.views.plain, watch=watch), whose)

    @property
    def early(self) -> str:
        """A note where the last committed round is not the recipe's last; empty where it is."""
        if self.commit.round == self.recipe.rounds:
            return ""
        return f"measured after round {self.commit.round} of {self.recipe.rounds}"

    def _sound(self, features: Tensor, whose: str) -> Tensor:
        if not bool(features.isfinite().all()):
            raise DataError(
                f"{self.path}: features of {whose} are not finite: its training diverged"
            )
        return features


@dataclass(frozen=True, eq=False)
class Federated(Run):
    """A federation's run: its encoder is here, its clients' images and models are not."""

    at_site: bool = False  # the folder is a site's, which has the encoder and no commits

    @cached_property
    def method(self) -> Method:
        """The method of the plan, which is the same at the server and at every site."""
        return method_of(self.recipe)

    @property
    def _own_data(self) -> Dataset:
        return self.dataset

    def overlap(self, name: str) -> list[str]:
        """A warning if it is evaluated on the public set; the sites' images are unknown."""
        public = self.recipe.public
        return super().overlap(name) if public is not None and name == public.name else []

    @cached_property
    def final_encoders(self) -> dict[str, nn.Module]:
        """The federation's encoder; at a site of a method with personal encoders, its own."""
        method = self.method
        if self.at_site:
            whose = "this site" if method.has_own_encoders else "the federation"
            return {whose: load_encoder(self.path).network}
        if method.has_own_encoders:
            raise DataError(
                f"{self.path}: with {method.name} every site ends with an encoder of its own, so "
                "there is none at the server: evaluate it at a site"
            )
        server = Server({}, **self.commit.server)
        if method.recalibrates and "statistics" not in server.memory:
            raise DataError(
                f"{self.path}: the statistics of BatchNorm are measured at the sites before an "
                f"encoder is evaluated; round {self.commit.round} has none: finish the run first"
            )
        return {"the federation": method.represent(server)}

    def clients(self, count: int, seed: int, measure: str, least: int = 1) -> list[ClientId]:
        """Refused: clients' models stay at the sites."""
        raise self._away(measure)

    def federations(self) -> list[nn.Module]:
        """The encoders that are here."""
        return list(self.final_encoders.values())

    def state(self, client: ClientId) -> dict[str, Any]:
        """Refused: a client's state stays at its site."""
        raise self._away("it")

    def images(self, count: int | None, seed: int, part: str = "test") -> Images:
        """Refused: clients' images stay at the sites."""
        raise self._away("it")

    def _away(self, what: str) -> DataError:
        return DataError(
            f"{self.path} is a run of a federation: {what} needs clients' images and models, "
            "which stay at the sites; knn, linear, semi, transfer and retrieval do not"
        )


def open_run(
    path: Path,
    label: str,
    recipe: Recipe,
    note: Callable[[str], None] = lambda text: None,
    **more: Any,
) -> Run:
    """Open a run at its newest commit that can be read, or a federation's at one of its sites.

    `recipe` is the run's, read from its folder; only its engine may have been changed since. `more`
    are further fields of `Run`.
    """
    at_site = (path / SITE_REPORT).exists()
    of_federation = at_site or bool(read_about(path)["federation"])
    if at_site:
        commit = Commit(_reported_round(path), {}, {}, {})
    else:
        commit = _newest_commit(path, with_states=not of_federation)
    if of_federation:
        return _federated(path, label, recipe, commit, note, at_site, **more)
    dataset, public, split = opened(recipe, path)
    return Run(label, path, recipe, dataset, public, split, commit, note, **more)


def _newest_commit(path: Path, *, with_states: bool) -> Commit:
    commit = RunFolder(path).newest(with_states=with_states)
    if commit is None:
        raise StoreError(f"{path} has no committed round yet: continue the run first")
    return commit


def _reported_round(path: Path) -> int:
    remedy = "take part in a new run"
    with files.reading(path / SITE_REPORT, remedy):
        return int(files.read_sealed(path / SITE_REPORT, remedy)["round"])


def _federated(
    path: Path,
    label: str,
    recipe: Recipe,
    commit: Commit,
    note: Callable[[str], None],
    at_site: bool,
    **more: Any,
) -> Run:
    """A federation's run, to be evaluated on the first of the sets that the call names."""
    sets: EvalSets = more.get("sets", EvalSets())
    if theirs := [name for name in sets.names if name in THEIRS]:
        raise ConfigError(
            f"{path} is a run of a federation, whose images stay at the sites, so on={theirs[0]} "
            "cannot be evaluated: name a data set that is here, e.g. on=digits, or on=folder "
            f"on.folder.path=FOLDER; harmonium server eval {path} asks the sites for counts"
        )
    method = method_of(recipe)
    side, channels = recipe.data.size or method.world.side, method.world.channels
    dataset = sets.load(sets.names[0], (side, side, channels), recipe.data)
    nobody = Split((), {}, dataset.digest, f"federation {recipe.digest}")
    fields: dict[str, Any] = {"at_site": at_site, **more}
    return Federated(label, path, recipe, dataset, None, nobody, commit, note, **fields)
