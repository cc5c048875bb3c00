"""Weights on their way: what rounding may take, what is made up for, what it leaves alone."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harmonium.core import codec
from harmonium.core.errors import ConfigError, WireError
from harmonium.data.partition import make_split
from harmonium.engines.local import LocalEngine
from harmonium.federation.card import card
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.filters import Asked
from harmonium.federation.filters.rounding import (
    SCALE,
    UNSENT,
    How,
    Rounding,
    Transport,
    lossy,
    pack,
    size,
    unpack,
)
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, exchange, weights
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.testing import TINY, check_method, first_trial

FLOATS = {"name": "simclr", "norm": "none"}
KEY, ROWS = "encoder.0.weight", "uv.weight"
SHAPES = [(), (1,), (7,), (5, 3), (4, 3, 3, 3), (6, 1)]


def drawn(shape: tuple[int, ...], seed: int = 0, spread: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng) * torch.exp(spread * torch.randn(shape, generator=rng))


def sent(value: Tensor, how: How) -> Tensor:
    return unpack(pack({"w": value}, how), how)["w"]


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_errs_by_half_a_step_at_most(shape: tuple[int, ...]) -> None:
    value = drawn(shape, spread=3.0)
    half = sent(value, "fp16")
    assert ((half - value).abs() <= value.abs() * 2**-11 + 2**-25).all()
    rows = value.reshape(shape[0] if len(shape) > 1 else 1, -1)
    most = rows.abs().amax(1, keepdim=True)
    eighth = sent(value, "int8").reshape(rows.shape)
    assert ((eighth - rows).abs() <= most / 254 * (1 + 1e-5)).all()
    assert torch.allclose(eighth.abs().amax(1, keepdim=True), most)  # the largest is exact
    assert torch.equal(sent(value, "none"), value)


def test_every_row_has_a_scale_of_its_own() -> None:
    value = torch.stack([drawn((50,)), 1e-15 * drawn((50,), 1), torch.zeros(50)])
    came = sent(value, "int8")
    assert (came[1] - value[1]).abs().max() <= value[1].abs().max() / 253
    assert torch.equal(came[2], value[2])


def test_memory_layout_changes_nothing() -> None:
    value = drawn((4, 3, 5, 5))
    for how in ("fp16", "int8"):
        other = pack({"w": value.to(memory_format=torch.channels_last)}, how)
        for key, tensor in pack({"w": value}, how).items():
            assert torch.equal(tensor, other[key])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["fp16", "int8"])
def test_what_is_not_finite_stays_so(how: How, bad: float) -> None:
    value = drawn((3, 4))
    value[1, 2] = bad
    came = sent(value, how)
    assert not came.isfinite().all()
    assert came[0].isfinite().all() and came[2].isfinite().all()


def test_numbers_beyond_16_bits_are_the_largest_that_fit() -> None:
    assert sent(torch.tensor([1e6, -1e38]), "fp16").tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["none", "fp16", "int8"])
def test_sizes_are_those_of_what_travels(shape: tuple[int, ...], how: How) -> None:
    packed = pack({"a.w": drawn(shape)}, how)
    assert codec.payload_bytes(packed) == size("a.w", torch.Size(shape), torch.float32, how)
    kept = size("a.running_var", torch.Size(shape), torch.float32, how)
    assert kept == 4 * math.prod(shape)


def test_counters_and_statistics_are_left_alone() -> None:
    some = torch.Size([3])
    assert lossy("encoder.w", torch.float32, some)
    for key in ("e.running_mean", "e.running_var", "e.num_batches_tracked"):
        assert not lossy(key, torch.float32, some)
    for dtype in (torch.int64, torch.float64, torch.float16, torch.uint8):
        assert not lossy("encoder.w", dtype, some)
    assert not lossy("encoder.w", torch.float32, torch.Size([0, 3]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"w": torch.ones(2, 3)}, "float32, not as torch.int8"),
        ({"w" + SCALE: None}, "without a scale for each of its 2 row"),
        ({"w" + SCALE: torch.ones(3)}, "without a scale"),
        ({"w" + SCALE: torch.ones(2, dtype=torch.float64)}, "without a scale"),
    ],
)
def test_what_is_packed_wrongly_is_refused(change: dict[str, Any], why: str) -> None:
    packed = {**pack({"w": torch.ones(2, 3)}, "int8"), **change}
    with pytest.raises(WireError, match=why):
        unpack({key: value for key, value in packed.items() if value is not None}, "int8")


# ---- methods that do nothing but what is watched -----------------------------------------------


def method_with(change: Callable[[Any, Any], dict[str, Tensor]]) -> type[Method]:
    """A method whose clients send what `change` makes of themselves and the received model."""

    @exchange(down={"model": weights()}, up={"model": weights()})
    def train(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": change(client, got.model)}

    made = type("Planted", (Method,), {"__annotations__": {}, "train": train})
    return dataclass(frozen=True)(made)


class Federation:
    """Some clients of a planted method, round by round."""

    def __init__(
        self, folder: Path, cls: type[Method], wrap: Any = None, terms: Any = None, **how: Any
    ) -> None:
        settings = {"method": cls, "split": "iid", "objective": FLOATS, "transport": how}
        settings["terms"] = terms
        recipe = Recipe.from_tree({**TINY, **settings})
        dataset = recipe.data.load()
        split = make_split(recipe.split, dataset, None, recipe.clients, 0)
        self.folder, self.wrap, self.ledger = folder, wrap or (lambda engine: engine), Ledger()
        self.host = make_runtime(recipe, dataset, split, folder)
        self.engine = LocalEngine(self.host, folder, 0)
        counts = {client: len(index) for client, index in enumerate(split.indices)}
        self.server = Server(counts, self.host.method.blueprint.shared())

    def round(self, cohort: Sequence[int]) -> dict[str, Tensor]:
        """Play one; what the model was before."""
        before, method = self.server.model, self.host.method
        server = replace(self.server, round=self.server.round + 1)
        driver = Driver(method, self.wrap(self.engine), self.ledger)
        self.server = driver.drive(method.round(server, cohort), server)
        return before

    def resume(self) -> None:
        """Forget all that a commit does not hold."""
        snapshot = codec.decode(codec.encode(self.engine.snapshot()))
        self.engine = LocalEngine(self.host, self.folder, 0)
        self.engine.restore(snapshot)

    def unsent(self, client: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.engine.state_of(client)[UNSENT]["train"]["model"]
        return found


def moved(client: Any, model: dict[str, Tensor]) -> dict[str, Tensor]:
    """One large step in a number of every row, small ones in the others."""
    changed = {}
    for key, value in model.items():
        step = torch.full_like(value, 1e-3 * (1 + client.id))
        (step if value.ndim < 2 else step.flatten(1)[:, 0]).fill_(1.0)
        changed[key] = value + step
    return changed


def small(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.flatten(1)[:, 1:].flatten() for v in model.values() if v.ndim > 1])


# ---- error feedback ----------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [True, False])
def test_all_that_was_sent_is_all_that_changed(tmp_path: Path, feedback: bool) -> None:
    """Steps below half of one in 127 never arrive by themselves, and all of them with feedback."""
    fed = Federation(tmp_path, method_with(moved), up="int8", error_feedback=feedback)
    start, rounds = fed.server.model, 12
    for _ in range(rounds):
        fed.round([0])
    went = small({key: value - start[key] for key, value in fed.server.model.items()})
    if not feedback:
        assert went.abs().max() < 1e-5
        assert fed.engine.state_of(0) == {}
        return
    assert (went - rounds * 1e-3).abs().max() <= 1 / 254 + 1e-5
    rest = small(fed.unsent(0))
    assert torch.allclose(went + rest, torch.full_like(went, rounds * 1e-3), atol=1e-5)


def test_what_is_left_outlives_absence_and_resuming(tmp_path: Path) -> None:
    """Each client has its own; nobody else's answer and no new process touches it."""

    def play(folder: Path, resume: bool) -> Federation:
        folder.mkdir()
        fed = Federation(folder, method_with(moved), up="int8")
        for cohort in ([0], [1, 2], [1], [0], [2, 1], [0]):
            held = {c: fed.unsent(c) for c in (0, 1, 2) if fed.engine.state_of(c)}
            fed.round(cohort)
            for client in set(held) - set(cohort):
                assert all(torch.equal(v, held[client][k]) for k, v in fed.unsent(client).items())
            if resume:
                fed.resume()
        return fed

    one, other = play(tmp_path / "one", False), play(tmp_path / "other", True)
    for key, value in one.server.model.items():
        assert torch.equal(value, other.server.model[key])
    assert one.ledger.lines == other.ledger.lines
    # Client 0 moved three times by 0.001; what has not gone out yet is with it.
    left = small(one.unsent(0))
    gone = torch.round((3e-3 - left) * 127)
    assert torch.allclose(gone / 127 + left, torch.full_like(left, 3e-3), atol=1e-5)
    assert left.abs().max() <= 1 / 254 + 1e-5 and left.abs().min() > 1e-4


def test_an_answer_that_is_lost_leaves_what_was_left(tmp_path: Path) -> None:
    @dataclass
    class Deaf:
        engine: LocalEngine

        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in self.engine.deliver(ask, turn):
                lost = reply.client == 0 and turn.round == 2
                yield replace(reply, up=None, why="lost") if lost else reply

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

    fed = Federation(tmp_path, method_with(moved), Deaf, up="int8")
    fed.round([0, 1])
    before = fed.unsent(0)
    fed.round([0, 1])
    assert all(torch.equal(value, before[key]) for key, value in fed.unsent(0).items())


# ---- both ways ---------------------------------------------------------------------------------


@pytest.mark.parametrize("up", ["none", "fp16", "int8"])
def test_a_client_has_the_rounded_model_and_the_server_keeps_its_own(
    tmp_path: Path, up: How
) -> None:
    seen = []

    def same(client: Any, model: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(model)
        return {key: value.clone() for key, value in model.items()}

    fed = Federation(tmp_path, method_with(same), up=up, down="fp16")
    before = fed.round([0, 1, 2])
    for model in seen:
        for key, value in model.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, before[key].half().float())
        assert not torch.equal(model[KEY], before[KEY])
    for key, value in fed.server.model.items():  # nobody changed anything
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("up", ["none", "fp16", "int8"])
def test_steps_below_16_bits_add_up_at_the_server(tmp_path: Path, up: How) -> None:
    def creep(client: Any, model: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value + 2**-18 for key, value in model.items()}

    fed = Federation(tmp_path, method_with(creep), up=up, down="fp16")
    start = fed.server.model
    for _ in range(8):
        fed.round([0, 1])
    for key, value in fed.server.model.items():
        went = value - start[key]
        assert torch.allclose(went, torch.full_like(went, 2**-15), rtol=0.02, atol=1e-6)


class Watched(LocalEngine):
    """Keeps what is counted."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed.host, fed.folder, 0)
        self.counted: dict[int, dict[str, Tensor]] = {}

    def accept(self, reply: Reply) -> None:
        assert reply.up is not None
        self.counted[reply.client] = reply.up["model"]
        super().accept(reply)


def test_plans_engines_and_aggregations_see_whole_models(tmp_path: Path) -> None:
    fed = Federation(tmp_path, method_with(moved), up="int8", down="fp16")
    fed.engine = watched = Watched(fed)
    before = fed.round([0, 1])
    for model in watched.counted.values():
        assert set(model) == set(before)
        for key, value in model.items():
            step = value - before[key]
            assert value.dtype == torch.float32 and step.max() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("up", ["none", "fp16", "int8"])
def test_a_change_is_that_of_the_model_and_the_row_that_a_client_had(
    tmp_path: Path, up: How
) -> None:
    """Clients get models of their own and send them straight back: no bit may be lost."""

    def straight(client: Any, model: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: v[client.id] if key == ROWS else v for key, v in model.items()}

    models: dict[int, dict[str, Tensor]] = {}

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        for client in cohort:
            models[client] = {
                key: v.flip(0) if key == ROWS else (client + 1.7) * v
                for key, v in server.model.items()
            }
        yield Ask("train", cohort, {}, {c: {"model": models[c]} for c in cohort})
        return server

    cls = method_with(straight)
    cls.round = round  # type: ignore[method-assign]
    fed = Federation(tmp_path, cls, terms="uv", up=up, down="fp16")
    fed.engine = watched = Watched(fed)
    fed.round([0, 2, 3])
    for client, model in watched.counted.items():
        for key, value in model.items():
            own = models[client][key]
            assert torch.equal(value, own[client] if key == ROWS else own)
    halved = json.loads(fed.ledger.lines[0])["down"]["model"]
    assert halved == codec.payload_bytes(fed.server.model) / 2


def test_as_they_are_means_untouched() -> None:
    method = Recipe.of("fedavg").known_method()
    rounding, how = Rounding(method, method.exchanges()["train"]), method.transport
    ask = Ask("train", [0], {"model": method.blueprint.shared()})
    up = {"model": method.blueprint.shared(0), "loss": 1.0}
    assert how == Transport() and how.is_plain and how.words() == ""
    assert rounding.outgoing(ask) is ask and rounding.received(ask.down) is ask.down
    client: Any = type("Client", (), {"id": 0, "state": {}})()
    assert rounding.reply(client, ask.down, up) is up and client.state == {}
    asked: Any = Asked(0, 10, ask.down, ask.down, tally=None)  # type: ignore[arg-type]
    assert rounding.arrived(asked, up) is up


# ---- every method ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in methods.table()},
    "fsimclr": {},  # a part with a row a client, and Adam at the server
    "fedbyol": {"batch_norm": "recalibrate", "encoder": {"name": "resnet8", "norm": "batch"}},
    "fedca": {"method": {"name": "fedca", "align_epochs": 1}},
    "orchestra": {"method": {"name": "orchestra", "clusters": 8, "global_steps": 20}},
}


@pytest.mark.parametrize("name", CASES)
def test_any_method_goes_rounded(name: str) -> None:
    """Everyone is counted, the model stays finite, the ledger has what the card says."""
    found = first_trial(name, rounds=1, transport={"up": "int8", "down": "fp16"}, **CASES[name])
    assert all(value.isfinite().all() for value in found.server.model.values())
    told, exchanges = card(found.method).bytes, found.method.exchanges()
    plain = card(replace(found.method, transport=Transport())).bytes
    for line in map(json.loads, found.lines):
        step = line["step"]
        assert line["outcome"] == "answered"
        for way, most in (("up", 0.4), ("down", 0.55)):
            fields = getattr(exchanges[step], way)
            known = [n for n, f in fields.items() if f.fold == "parts" or f.kind == "scalar"]
            assert sum(line[way][field] for field in known) == told[step][way]
            if any(lossy(key, t.dtype, t.shape) for key, t in sent_of(found, fields).items()):
                assert told[step][way] < most * plain[step][way]


def sent_of(found: Any, fields: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of the model that some fields carry."""
    layouts, own = found.method.blueprint.layouts(), found.method.blueprint.state_dict()
    return {key: own[key] for f in fields.values() if f.fold == "parts" for key in layouts[f.of]}


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_rounded_weights_end_near(name: str) -> None:
    plain = first_trial(name, rounds=1).server.model
    for how, most in ({"up": "fp16"}, 1e-5), ({"up": "int8"}, 1e-3), ({"down": "fp16"}, 1e-2):
        model = first_trial(name, rounds=1, transport=how).server.model
        for key, value in model.items():
            apart = (value.double() - plain[key]).norm()
            assert apart <= most * max(plain[key].double().norm(), 1.0)


def test_bytes_fall_by_the_right_factor() -> None:
    """Half for 16 bits; for 8 bits a quarter, a scale a row and what goes as it is."""
    counts = {}
    for up, down in (("none", "none"), ("fp16", "fp16"), ("int8", "none")):
        wide = {"name": "cnn-small", "width": 16, "out": 64}
        how = {"up": up, "down": down}
        found = first_trial("fedavg", rounds=1, transport=how, objective=FLOATS, encoder=wide)
        line = json.loads(found.lines[0])
        counts[up] = line["up"]["model"], line["down"]["model"]
        assert sum(line["parts"]["up"]["model"].values()) == line["up"]["model"]
    assert counts["fp16"] == (counts["none"][0] / 2, counts["none"][1] / 2)
    shared = found.method.blueprint.shared()
    rows = sum(len(value) if value.ndim > 1 else 1 for value in shared.values())
    assert counts["int8"] == (counts["none"][0] / 4 + 4 * rows, counts["none"][1])
    assert counts["none"][0] / counts["int8"][0] > 3.8


def test_the_contract_holds_for_rounded_weights() -> None:
    """Same bits again, in any order, after resuming; drop-outs; nothing undeclared is kept."""
    check_method("fedavg", transport={"up": "int8", "down": "fp16"}, participation={"number": 3})


def test_noise_comes_first() -> None:
    """A guarded model is released before it is rounded: the same records, the same noise."""
    noisy = {"update_clip": 1.0, "update_noise": 2.0}
    settings = {"objective": FLOATS, "rounds": 2, "privacy": noisy, "split": "iid"}
    plain = first_trial("fedavg", **settings)
    found = first_trial("fedavg", transport={"up": "int8"}, **settings)
    for line, other in zip(map(json.loads, found.lines), map(json.loads, plain.lines), strict=True):
        assert line["outcome"] == "answered" and line["releases"] == other["releases"]
    for key, value in found.server.model.items():
        spread = (value - plain.server.model[key]).abs().max()
        assert spread < 4.0 * 5 / 127  # sigma is 4: two roundings, far below the noise


# ---- what is refused ---------------------------------------------------------------------------


def lie_of(change: Callable[[dict[str, Tensor]], object]) -> Callable[[LocalEngine], Any]:
    @dataclass
    class Lying:
        engine: LocalEngine

        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in self.engine.deliver(ask, turn):
                if reply.client == 0 and reply.up is not None:
                    change(reply.up["model"])
                yield reply

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

    return Lying


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update({KEY: m[KEY].float()}), "float32, not as torch.int8"),
        (lambda m: m.pop(KEY + SCALE), "without a scale"),
        (lambda m: m.pop(KEY), "lacks encoder.0.weight"),
        (lambda m: m.update({KEY: m[KEY][:2]}), "has shape (2,"),
        (lambda m: m.update({KEY: m[KEY][:0]}), "has shape (0,"),
        (lambda m: m.update({"more.w": m[KEY]}), "more.w, which is not a shared part"),
        (lambda m: m.update({"more.w" + SCALE: m[KEY]}), "which is not a shared part"),
        (lambda m: m[KEY + SCALE].fill_(math.nan), f"`model` {KEY} is not finite"),
    ],
)
def test_a_client_elsewhere_may_pack_anything(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], why: str
) -> None:
    fed = Federation(tmp_path, method_with(moved), lie_of(change), up="int8")
    fed.round([0, 1, 2])
    entry = json.loads(fed.ledger.lines[0])
    assert entry["outcome"] == "refused" and why in entry["why"]
    assert fed.ledger.answered == {1, 2}
    assert fed.engine.state_of(0) == {}


def test_a_broken_change_is_refused_and_not_kept(tmp_path: Path) -> None:
    def broken(client: Any, model: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v / 0.0 if client.id == 0 else v for k, v in model.items()}

    fed = Federation(tmp_path, method_with(broken), up="int8")
    fed.round([0, 1])
    assert "not finite" in json.loads(fed.ledger.lines[0])["why"]
    assert fed.engine.state_of(0) == {} and fed.engine.state_of(1)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["transport.up=int4"], "transport.up=int4.*none.*fp16.*int8"),
        (["transport.down=int8"], "transport.down=int8.*none.*fp16"),
        (["transport.feedback=true"], "did you mean 'transport.error_feedback'"),
        (
            ["transport.up=int8", "privacy.secure_aggregation=true"],
            "cannot hide `model` of fedavg.train: transport.up=int8",
        ),
        (
            ["transport.down=fp16", "privacy.secure_aggregation=true"],
            "transport.down=fp16",
        ),
        (
            [
                "transport.up=fp16",
                "privacy.update_clip=1",
                "privacy.update_noise=1",
                "privacy.update_place=server",
            ],
            "privacy.update_clip",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        Recipe.of("fedavg", "objective.norm=none", *words)
    assert "\n" not in str(error.value)


def test_the_card_says_how_weights_travel() -> None:
    def text(*words: str) -> str:
        return card(Recipe.of("fedavg", *words).known_method()).text()

    full = text("transport.up=int8", "transport.down=fp16")
    assert "client    keeps unsent (weights) between rounds" in full and "(cross-silo)" in full
    assert "transport weights go down in 16 bits; changes of weights go up in 8 bits" in full
    assert "the rounding error is kept and added to the next answer" in full
    assert "cannot hide model: transport.up=int8" in full
    lost = text("transport.up=fp16", "transport.error_feedback=false")
    assert "the rounding error is lost" in lost and "(cross-device)" in lost
    assert "transport" not in text() and "unsent" not in text("transport.down=fp16")
    assert "unsent" not in card(Recipe.of("alone", "transport.up=int8").known_method()).text()
