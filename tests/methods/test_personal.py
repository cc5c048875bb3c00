"""Personalised methods: what they share with FedAvg and with training alone, and what is theirs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.core.types import Weights
from harmonium.data.images import Dataset
from harmonium.data.partition import make_split
from harmonium.federation.batch_norm import measure
from harmonium.federation.driver import Reply, Turn, handle
from harmonium.federation.method import Method
from harmonium.federation.wire import Ask
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import Objective, Seen, objectives
from harmonium.learning.parts import Parts
from harmonium.learning.training import Fitted
from harmonium.methods.fedrep import FedRep
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial

NORMED = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
SOME = {"participation": {"number": 2}, "rounds": 3}
SMALL: dict[str, dict[str, Any]] = {
    "moco": {"queue": 32},
    "swav": {"prototypes": 8, "queue": 24, "freeze": 2},
    "assignments": {"cluster_weight": 0},  # centroids are its own method's
}
WAYS: dict[str, dict[str, Any]] = {
    "fedper": {"name": "fedper"},
    "fedrep": {"name": "fedrep"},
    "kept": {"name": "fedprox", "mu": 0.2, "init_from_global": False},
    "crossed": {"name": "apfl", "alpha": 0.8, "adaptive": True},
    "straight": {"name": "apfl", "mixing": "straight", "alpha": 0.2},
    "weights": {"name": "apfl", "mixing": "weights", "alpha": 0.8},
    "received": {"name": "ditto"},
    "updated": {"name": "ditto", "towards": "updated", "personal_epochs": 2},
}


@cache
def dataset() -> Dataset:
    return recipe_of("fedavg").data.load()


def recipe_of(method: Any, **settings: Any) -> Recipe:
    tree = {**TINY, "method": method, **settings}
    tree["privacy"] = {"noise": "simulated", **tree.get("privacy", {})}
    return Recipe.from_tree(tree)


def go(method: Any, **settings: Any) -> Trial:
    """A run of four clients for two rounds."""
    return heard(method, **settings)[0]


def heard(method: Any, **settings: Any) -> tuple[Trial, "Hearing"]:
    """The run, and the last messages of each client."""
    recipe, notes = recipe_of(method, **settings), Hearing()
    split = make_split(recipe.split, dataset(), None, recipe.clients, recipe.seed)
    return Trial(recipe, dataset(), split, wrap=notes.on).go(), notes


def visit(way: Any, at: tuple[int, ...] = (1,), **settings: Any) -> "Visited":
    """One client's trainings in some rounds, each from the model that it sent the time before."""
    method = recipe_of(way, **settings).build_method(dataset())
    examples = Examples(dataset().train, np.arange(12), uses_labels=True)
    found = Visited(method, examples)
    model = method.blueprint.shared()
    for number in at:
        rng = torch.Generator().manual_seed(number)
        noise, state = Noise("simulated", rng), dict(found.state)
        client = Client(0, number, 4, examples, method.views, rng, noise, state=state)
        down = {"model": model} if method.name != "alone" else {}
        up = handle(method, "train", client, down, seed=number)
        assert set(up) == {*down, "loss"}
        model, found.state = {**model, **up.get("model", {})}, client.state
        found.sent.append(up.get("model", {}))
    return found


@dataclass
class Visited:
    """A method, a client's examples, what it sent each time, what it keeps now."""

    method: Method
    examples: Examples
    sent: list[Weights] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def same(first: Weights, second: Weights) -> None:
    assert set(first) == set(second)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def differ(first: Weights, second: Weights) -> bool:
    return any(not torch.equal(tensor, second[key]) for key, tensor in first.items())


@dataclass
class Hearing:
    """An engine that notes the last messages of each client."""

    engine: Any = None
    down: dict[int, Weights] = field(default_factory=dict)
    up: dict[int, Weights] = field(default_factory=dict)

    def on(self, engine: Any) -> "Hearing":
        self.engine = engine
        return self

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for reply in self.engine.deliver(ask, turn):
            if reply.up is not None and "model" in reply.up:
                self.down[reply.client] = dict(ask.down["model"])  # type: ignore[arg-type]
                self.up[reply.client] = dict(reply.up["model"])
            yield reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


# ---- any objective -------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", objectives.table())
def test_any_objective_trains_in_every_way(objective: str) -> None:
    """Each moves what it sends and what it keeps; only mixed projections need projections."""
    chosen = {"name": objective, **SMALL.get(objective, {})}
    for name in ("fedrep", "crossed", "weights", "updated"):  # the others do less than these
        try:
            found = visit(WAYS[name], objective=chosen)
        except ConfigError as error:
            assert name == "crossed"
            assert f"objective={objective} has 0 to mix: set method.mixing=weights" in str(error)
            continue
        start = found.method.blueprint.state_dict()
        assert set(found.sent[0]) == set(found.method.blueprint.shared())
        assert differ(found.sent[0], start)
        assert differ(found.state.get("mine", found.state.get("parts")), start)


SEEN = {
    "rotation": [{"head": "projector"}, {"head": "projector", "turns": "one"}],
    "moco": [{"queue": 32, "symmetric": False}],
    "assignments": [{"rotation_weight": 0}],
}


@pytest.mark.parametrize("objective", objectives.table())
def test_projections_are_as_many_as_is_said(objective: str) -> None:
    for some in [SMALL.get(objective, {}), *SEEN.get(objective, [])]:
        chosen = {"name": "orchestra", "clusters": 2} if objective == "assignments" else "fedavg"
        recipe = recipe_of(chosen, objective={"name": objective, **some})
        method = recipe.build_method(dataset())
        examples = Examples(dataset().train, np.arange(4), uses_labels=True)
        batch = Batch(torch.arange(4), examples, method.views, torch.Generator())
        seen = method.see(method.blueprint.copy_from(), batch)
        said = method.objective.projections(len(batch.views))
        assert said == (0 if objective == "semi-simsiam" else len(seen.z))


# ---- FedAvg and training alone inside ------------------------------------------------------------


@dataclass(frozen=True)
class Bare(Objective):
    """A loss on features, with no head at all."""

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {}

    def see(self, parts, batch):  # type: ignore[no-untyped-def]
        return Seen(batch, [parts["encoder"](view) for view in batch.views], [])

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return (seen.h[0] - seen.h[1]).square().mean() - seen.h[0].var()


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_without_a_head_it_is_fedavg(name: str) -> None:
    settings = {"objective": f"{__name__}:Bare", "encoder": NORMED, **SOME}
    assert go(name, **settings).digest == go("fedavg", **settings).digest


def test_one_client_of_fedper_is_one_of_fedavg() -> None:
    """An average of one is what it was, so it does not matter what stays at home."""
    mine, theirs = (visit(name, LATER, objective="byol") for name in ("fedper", "fedavg"))
    same({**mine.sent[-1], **mine.state["parts"]}, theirs.sent[-1])


DRAWS: list[dict[str, Any]] = [
    {"name": "byol", "update": "before"},
    {"name": "moco", "queue": 32, "negatives": "queue"},  # draws by torch's own generator
    {"name": "assignments", "cluster_weight": 0},  # draws after views were made
]


@dataclass(frozen=True)
class Dropping(Encoder):
    """An encoder that draws by torch's own generator."""

    @property
    def features(self) -> int:
        return 8

    def build(self, channels: int, side: int) -> nn.Module:
        layers = nn.Linear(channels * side**2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout()
        return nn.Sequential(nn.Flatten(), *layers)


LATER = (1, 2, 4)  # the client is away in round 3
SHARED: list[dict[str, Any]] = [
    {"name": "apfl", "mixing": "weights", "alpha": 0.1, "adaptive": True},
    {"name": "apfl", "mixing": "straight", "alpha": 0.9},
    {"name": "apfl", "alpha": 0.7},
    {"name": "ditto", "mu": 5.0},
    {"name": "ditto", "mu": 0.0, "towards": "updated", "personal_epochs": 2},
]


@pytest.mark.parametrize("objective", DRAWS, ids=lambda chosen: str(chosen["name"]))
def test_the_shared_path_is_fedavgs(objective: dict[str, Any]) -> None:
    """Whatever the personal model is and how steep its gradients are."""
    local = {**TINY["local"], "clip": 0.05}
    settings = {"objective": objective, "encoder": f"{__name__}:Dropping", "local": local}
    plain = visit("fedavg", LATER, **settings)
    for way in SHARED if objective["name"] != "assignments" else SHARED[:1] + SHARED[3:]:
        for ours, theirs in zip(visit(way, LATER, **settings).sent, plain.sent, strict=True):
            same(ours, theirs)


def test_the_shared_model_of_a_run_is_fedavgs() -> None:
    plain = go("fedavg", **SOME)
    for way in ("crossed", "received"):
        same(go(WAYS[way], **SOME).server.model, plain.server.model)


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "swav", **SMALL["swav"]},
        *DRAWS,
        {"name": "moco", "queue": 32, "queue_owner": "local", "target": "local"},
    ],
    ids=str,
)
def test_a_personal_model_without_pull_trains_alone(objective: dict[str, Any]) -> None:
    """Bit for bit, absence included; of FedProx the model that is kept as well."""
    settings = {"objective": objective, "encoder": NORMED, "batch_norm": "recalibrate"}
    alone = visit("alone", LATER, **settings)
    ways: list[dict[str, Any]] = [
        {"name": "ditto", "mu": 0.0},
        {"name": "ditto", "mu": 0.0, "towards": "updated"},
        {"name": "fedprox", "mu": 0.0, "init_from_global": False},
    ]
    if "negatives" not in objective:  # a queue that is drawn comes after the shared model's
        ways.append({"name": "apfl", "mixing": "weights", "alpha": 1.0})
    for way in ways:
        same(visit(way, LATER, **settings).state["mine"], alone.state["parts"])


def test_a_personal_model_of_a_run_trains_alone_while_it_takes_part() -> None:
    alone, found = go("alone", **SOME), go({"name": "ditto", "mu": 0.0}, **SOME)
    for client, state in alone.states.items():
        same(found.states[client].get("mine", {}), state.get("parts", {}))


CALM = {"name": "simclr", "norm": "none"}  # no statistics, which no pull holds


@pytest.mark.parametrize("mixing", ["crossed", "straight", "weights"])
def test_a_personal_share_of_nothing_is_not_trained(mixing: str) -> None:
    found = visit({"name": "apfl", "mixing": mixing, "alpha": 0.0}, objective=CALM)
    same(found.state["mine"], dict(found.method.blueprint.state_dict()))


def test_all_of_a_personal_share_is_its_own_training() -> None:
    """Straight as if alone, bit for bit; crossed alike, for SimCLR does not mind the order."""
    alone = visit("alone", LATER, objective=CALM).state["parts"]
    straight = visit({"name": "apfl", "mixing": "straight", "alpha": 1.0}, LATER, objective=CALM)
    same(straight.state["mine"], alone)
    crossed = visit({"name": "apfl", "alpha": 1.0}, LATER, objective=CALM).state["mine"]
    for key, tensor in alone.items():
        torch.testing.assert_close(crossed[key], tensor)


# ---- messages and phases -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "objective"), [("fedper", "simsiam"), ("fedrep", "byol")])
def test_heads_never_leave(name: str, objective: str) -> None:
    found, notes = heard(name, objective=objective, encoder=NORMED)
    encoder = {key for key in found.method.blueprint.state_dict() if key.startswith("encoder.")}
    for messages in (notes.up, notes.down):
        assert len(messages) == 4 and all(set(model) == encoder for model in messages.values())
    assert set(found.server.model) == encoder
    kept = {key.partition(".")[0] for key in found.states[0]["parts"]}
    assert kept == {"projector", "predictor", *(["target"] if objective == "byol" else [])}
    assert not found.method.has_own_encoders


def test_what_is_kept_of_a_personal_model_never_leaves() -> None:
    for way in ("crossed", "weights", "received", "updated"):
        found = visit(WAYS[way], local={**TINY["local"], "clip": None})
        assert set(found.sent[0]) == set(found.method.blueprint.shared())
        assert differ(found.sent[0], found.state["mine"])


Phase = tuple[Weights, Weights, int]  # the model before and after, and epochs


def phases(monkeypatch: pytest.MonkeyPatch, method: Any, **settings: Any) -> list[Phase]:
    """What a client's trainings in a round do to its model."""
    found: list[Phase] = []
    inner = FedRep.fit

    def fit(self: FedRep, parts: Parts, client: Client, **how: Any) -> Fitted:
        before = copied(parts)
        done = inner(self, parts, client, **how)
        found.append((before, copied(parts), (how.get("local") or self.local).epochs))
        return done

    monkeypatch.setattr(Method, "fit", fit)
    local = {**TINY["local"], "epochs": 2}
    visit(method, **{"local": local, "encoder": NORMED, **settings})
    return found


def copied(parts: Parts) -> Weights:
    return {key: value.clone() for key, value in parts.state_dict().items()}


def of(model: Weights, *names: str) -> Weights:
    return {key: value for key, value in model.items() if key.partition(".")[0] in names}


@pytest.mark.parametrize("head_epochs", [None, 5])
def test_heads_learn_first_then_the_encoder(
    monkeypatch: pytest.MonkeyPatch, head_epochs: int | None
) -> None:
    """What is held is held bit for bit, BatchNorm's statistics too."""
    method = {"name": "fedrep", "head_epochs": head_epochs}
    first, second = phases(monkeypatch, method, objective="byol")
    assert (first[2], second[2]) == (head_epochs or 2, 2)
    heads = ("projector", "predictor")
    same(of(first[0], "encoder"), of(first[1], "encoder"))
    same(first[1], second[0])
    same(of(second[0], *heads), of(second[1], *heads))
    for name in heads:
        assert differ(of(first[0], name), of(first[1], name))
    assert differ(of(second[0], "encoder"), of(second[1], "encoder"))
    for phase in (first, second):  # a slow copy follows whatever moves
        assert differ(of(phase[0], "target"), of(phase[1], "target"))


def test_a_held_encoder_has_statistics_where_none_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = phases(monkeypatch, "fedrep", objective="simclr", batch_norm="recalibrate")
    means = [value for key, value in first[0].items() if key.endswith("running_mean")]
    assert len(means) == 5 and all(bool(mean.any()) for mean in means[:4])  # the projector's is 0
    same(of(first[0], "encoder"), of(first[1], "encoder"))


# ---- features of a client's own ------------------------------------------------------------------

POLICIES = ("average", "local", "fedbn", "recalibrate")


def made(name: str, policy: str) -> tuple[Method, Weights, dict[str, Any], Tensor]:
    """A method, a model as sent with the statistics that are measured on it, state, images."""
    found = visit(WAYS.get(name, name), encoder=NORMED, batch_norm=policy)
    method, sent = found.method, found.sent[0]
    pictures = method.views.plain(found.examples.pixels())
    if method.recalibrates:
        with pytest.raises(NotEnoughReplies, match="statistics were not measured"):
            method.own(sent, {})
        parts = method.blueprint.copy_from(sent)
        measure(parts["encoder"], [pictures])
        sent = {**sent, **parts.statistics("encoder")}
    return method, sent, found.state, pictures


def features(method: Method, pictures: Tensor, *sources: Weights) -> Tensor:
    encoder = method.blueprint.copy_from(*(of(source, "encoder") for source in sources))["encoder"]
    with torch.no_grad():
        return encoder.eval()(pictures)  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["fedavg", "alone", *WAYS])
def test_own_features_are_of_what_the_client_has(name: str, policy: str) -> None:
    method, sent, state, pictures = made(name, policy)
    with torch.no_grad():
        ours = method.own(sent, state).encoder(pictures)
    shared = features(method, pictures, sent, state.get("parts", {}))
    if name in ("crossed", "straight"):
        alpha = state.get("alpha", 0.2)
        mine = features(method, pictures, state["mine"])
        wanted = alpha * mine + (1 - alpha) * shared
    elif name == "weights":
        both = {**sent, **state.get("parts", {})}
        mixed = {
            key: 0.8 * value + 0.2 * both[key] if key.endswith(("weight", "bias")) else value
            for key, value in of(state["mine"], "encoder").items()
        }
        wanted = features(method, pictures, mixed)
    else:
        wanted = features(method, pictures, state["mine"]) if "mine" in state else shared
    torch.testing.assert_close(ours, wanted)
    if name in ("received", "kept", "weights"):  # statistics are those of images, not as drawn
        own = method.own(sent, state).encoder.state_dict()
        assert all(bool(v.any()) for k, v in own.items() if k.endswith("running_mean"))
    if name != "alone":
        assert method.own(sent, {}).encoder(pictures).shape == ours.shape  # who never trained


def test_own_features_do_not_mind_rows() -> None:
    """A client sends one row of a table, of which the encoder knows nothing."""
    found = visit("fedavg", terms="uv")
    (sent,) = found.sent
    assert sent["uv.weight"].ndim == 1
    encoder = found.method.own(sent, found.state).encoder
    same(dict(encoder.state_dict()), {k[8:]: v for k, v in of(sent, "encoder").items()})


# ---- protections, rows, refusals -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["kept", "updated"])
def test_rows_of_others_are_as_received(name: str) -> None:
    found, notes = heard(WAYS[name], terms="uv", participation={"number": 3})
    client = max(notes.up)
    table = found.states[client]["mine"]["uv.weight"]
    torch.testing.assert_close(table.norm(dim=1), torch.ones(4))
    for other in range(4):
        assert torch.equal(table[other], notes.down[client]["uv.weight"][other]) == (
            other != client
        )


SHIELDED = {"objective": CALM, "rounds": 1, "participation": {"number": 3}}


@pytest.mark.parametrize("name", ["fedrep", "received"])
def test_what_protects_models_protects_what_is_sent(name: str) -> None:
    """Noise on what leaves moves nothing that stays; sums hide single clients."""
    bare = go(WAYS[name], **SHIELDED)
    noisy = go(WAYS[name], **SHIELDED, privacy={"update_clip": 0.1, "update_noise": 1.0})
    masked = go(WAYS[name], **SHIELDED, privacy={"secure_aggregation": True})
    assert differ(noisy.server.model, bare.server.model)
    for client, state in bare.states.items():
        for held in state:
            same(noisy.states[client][held], state[held])
            same(masked.states[client][held], state[held])
    for key, value in masked.server.model.items():
        torch.testing.assert_close(value, bare.server.model[key], rtol=1e-5, atol=1e-6)


def test_fedper_trains_with_noise_in_every_step() -> None:
    local = {**TINY["local"], "dp_clip": 0.5, "dp_noise": 1.0}
    found = go("fedper", objective="rotation", local=local, rounds=1)
    assert all('"releases"' in line for line in found.lines) and found.states[0]["parts"]


DP = {"objective": "rotation", "local": {**TINY["local"], "dp_clip": 1.0}}


@pytest.mark.parametrize(
    ("method", "tree", "message"),
    [
        ("fedper", {"terms": "uv"}, "fedper keeps heads apart, but part 'uv' has a row for each"),
        ("fedrep", {"terms": "uv"}, "fedrep keeps heads apart, .* or set method=fedavg"),
        ({"name": "fedrep", "head_epochs": 0}, {}, "method.head_epochs is 0"),
        ("fedrep", DP, "fedrep overrides local training"),
        ("ditto", DP, "ditto overrides local training"),
        ({"name": "apfl", "mixing": "weights"}, DP, "apfl overrides local training"),
        ({"name": "ditto", "mu": -1.0}, {}, "method.mu is -1.0"),
        ({"name": "ditto", "personal_epochs": 0}, {}, "method.personal_epochs is 0"),
        ({"name": "ditto", "towards": "other"}, {}, "method.towards"),
        ({"name": "apfl", "alpha": 1.5}, {}, "method.alpha is 1.5"),
        ("apfl", {"objective": "rotation"}, "mixes two projections of an image, .* has 0 to mix"),
        (
            "apfl",
            {"objective": {"name": "moco", "symmetric": False}},
            "objective=moco has 1 to mix: set method.mixing=weights",
        ),
        (
            {"name": "apfl", "mixing": "straight"},
            {"objective": "autoencoder"},
            "mixing=straight mixes projections of an image, .*autoencoder has 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(method: Any, tree: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Recipe.from_tree({**TINY, "method": method, **tree})
    assert "\n" not in str(refused.value)


def test_fedprox_keeps_a_model_only_where_it_goes_on_from_it() -> None:
    assert not visit("fedprox").state
    assert set(visit(WAYS["kept"]).state) == {"mine"}
