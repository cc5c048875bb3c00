"""Slips in methods, objectives and encoders of one's own; by Nobody et al., 2024.

Each is one line that names the piece and what to write, from a run and from `check_method`.
"""

import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harmonium
from harmonium.cli.main import main
from harmonium.core.errors import ConfigError, Diverged, HarmoniumError, NotEnoughReplies, WireError
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import Ask, Field, Folded, exchange, scalar, weights
from harmonium.learning.context import Context
from harmonium.learning.contract import checked_loss
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import Objective
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Part
from harmonium.learning.terms import Term
from harmonium.methods.fedu import OwnTargets
from harmonium.recipe.schema import Recipe
from harmonium.testing import check_method

SMALL = [
    *("data=shapes", "data.count=40", "data.test_count=10", "data.size=12", "clients=2"),
    *("encoder.width=4", "encoder.out=8", "local.batch=8", "local.epochs=1", "rounds=1"),
    *("evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0"),
]


@dataclass(frozen=True)
class KeepsTuple(Method):
    keeps = ("control",)  # type: ignore[assignment]


@dataclass(frozen=True)
class RemembersTuple(Method):
    remembers = ("control",)  # type: ignore[assignment]


@dataclass(frozen=True)
class KeepsKind(Method):
    keeps = {"control": "weight"}  # type: ignore[dict-item]


@dataclass(frozen=True)
class SharesTuple(Method):
    share = ("projector",)  # type: ignore[assignment]


class Undecorated(Method):
    beta: float = 0.5


@dataclass(frozen=True)
class Undeclared(Method):
    def train(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model, "loss": 0.0}


@dataclass(frozen=True)
class Endless(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        self.merge(server, got.model)


@dataclass(frozen=True)
class EndsWithModel(Method):
    def setup(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        return got.model


@dataclass(frozen=True)
class Yieldless(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        return server


@dataclass(frozen=True)
class YieldsWord(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        yield "train"
        return server


@dataclass(frozen=True)
class OtherField(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        return self.merge(server, got.models)


@dataclass(frozen=True)
class AnswersNothing(Method):
    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        self.pull(client, got.model)


@dataclass(frozen=True)
class AnswersTensor(Method):
    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        return torch.zeros(3)


@dataclass(frozen=True)
class ScoresRows(Method):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return seen.z[0].sum(1)


@dataclass(frozen=True)
class ScoresNothing(Method):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        super().score(parts, seen, context)


@dataclass(frozen=True)
class ScoresDetached(Method):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return super().score(parts, seen, context).detach()


@dataclass(frozen=True)
class AddsModule(Method):
    def extra_parts(self, modules, dim):  # type: ignore[no-untyped-def]
        return nn.Linear(dim, 2)


@dataclass(frozen=True)
class BuildsModule(SimCLR):
    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {"projector": nn.Linear(dim, 8)}


@dataclass(frozen=True)
class BuildsNothing(SimCLR):
    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        super().build(modules, dim, world)


@dataclass(frozen=True)
class NoNetwork(Encoder):
    @property
    def features(self) -> int:
        return 4

    def build(self, channels: int, side: int) -> nn.Module:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class NoBuild(Objective):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return seen.z[0].mean()


@dataclass(frozen=True)
class NoScore(Objective):
    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {"projector": Part(nn.Linear(dim, 8))}


@dataclass(frozen=True)
class NoTermScore(Term):
    pass


@dataclass(frozen=True)
class NoSync(OwnTargets):
    pass


@dataclass(frozen=True)
class NoFeatures(Encoder):
    pass


@dataclass(frozen=True)
class TwoViews(SimCLR):
    views = 2  # type: ignore[assignment]


@dataclass(frozen=True)
class WordViews(SimCLR):
    views = (2, "more")  # type: ignore[assignment]


@dataclass(frozen=True)
class Misspelt(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("trian", cohort, {"model": server.model})
        return self.merge(server, got.model)


@dataclass(frozen=True)
class Keeps(Method):
    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        client.state["secret"] = torch.ones(2)
        return Method.train(self, client, got)


@dataclass(frozen=True)
class KeepsObject(Method):
    keeps = {"secret": "statistic"}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        client.state["secret"] = object()
        return Method.train(self, client, got)


@dataclass(frozen=True)
class Remembers(Method):
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        return replace(self.merge(server, got.model), memory={"secret": torch.ones(2)})


@dataclass(frozen=True)
class RemembersObject(Method):
    remembers = {"secret": "statistic"}

    def setup(self, server, cohort):  # type: ignore[no-untyped-def]
        return replace(server, memory={"secret": {"inside": object()}})
        yield


@dataclass(frozen=True)
class RewritesExchanges(Method):
    def exchanges(self):  # type: ignore[no-untyped-def,misc]
        return super().exchanges()


@dataclass(frozen=True)
class TakenProperty(Method):
    feature_size: int = 3  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class TakenModel(RewritesExchanges):
    pass


@dataclass(frozen=True)
class WordByMethod(Method):
    @exchange(down={"model": weights()}, up=lambda method: {**TRAINED, "rows": "statistic"})
    def train(self, client, got):  # type: ignore[no-untyped-def]
        return Method.train(self, client, got)


@dataclass(frozen=True, kw_only=True)
class Margins(Context):
    margin: float


@dataclass(frozen=True)
class LacksContext(Method):
    context = Margins


@dataclass(frozen=True)
class WritesContext(Method):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        context.me = 3
        return super().score(parts, seen, context)


SLIPS: dict[str, tuple[dict[str, Any], type[HarmoniumError], tuple[str, ...]]] = {
    "keeps": ({"method": KeepsTuple}, ConfigError, ("KeepsTuple.keeps", '{"control":')),
    "remembers": ({"method": RemembersTuple}, ConfigError, ("remembers", '{"control":')),
    "kind": ({"method": KeepsKind}, ConfigError, ("keeps", "'weights'")),
    "share": ({"method": SharesTuple}, ConfigError, ("share", '{"projector":')),
    "dataclass": ({"method": Undecorated}, ConfigError, ("beta", "@dataclass(frozen=True)")),
    "no exchange": ({"method": Undeclared}, ConfigError, ("Undeclared.train", "@exchange(")),
    "final": ({"method": RewritesExchanges}, ConfigError, ("RewritesExchanges.exchanges", "when=")),
    "final property": ({"method": TakenProperty}, ConfigError, ("TakenProperty.feature_size",)),
    "final above": ({"method": TakenModel}, ConfigError, ("TakenModel.exchanges",)),
    "function": (
        {"method": WordByMethod},
        WireError,
        ("WordByMethod.train", "`rows`", "statistic()"),
    ),
    "context": ({"method": LacksContext}, ConfigError, ("LacksContext", "Margins")),
    "no return": ({"method": Endless}, ConfigError, ("Endless.round", "return self.merge")),
    "model": ({"method": EndsWithModel}, ConfigError, ("EndsWithModel.setup", "dict")),
    "no yield": ({"method": Yieldless}, ConfigError, ("Yieldless.round", "yield Ask")),
    "no ask": ({"method": YieldsWord}, ConfigError, ("YieldsWord", "str", "yield Ask")),
    "other field": ({"method": OtherField}, WireError, ("got.models", "'model'")),
    "nothing": ({"method": AnswersNothing}, WireError, ("AnswersNothing.train", "nothing")),
    "tensor": ({"method": AnswersTensor}, WireError, ("AnswersTensor.train", '"model": ...')),
    "rows": ({"method": ScoresRows}, ConfigError, ("score", "shape", ".mean()")),
    "no loss": ({"method": ScoresNothing}, ConfigError, ("score", "nothing")),
    "detached": ({"method": ScoresDetached}, ConfigError, ("score", ".detach()")),
    "module": ({"method": AddsModule}, ConfigError, ("AddsModule.extra_parts", "Part(")),
    "build": ({"objective": BuildsModule}, ConfigError, ("BuildsModule.build", "Part(")),
    "no parts": ({"objective": BuildsNothing}, ConfigError, ("BuildsNothing.build", "nothing")),
    "no build": ({"objective": NoBuild}, ConfigError, ("NoBuild", "def build(self, modules, dim")),
    "an instance": ({"objective": NoBuild()}, ConfigError, ("NoBuild", "def build(self, modules")),
    "no score": ({"objective": NoScore}, ConfigError, ("NoScore", "def score(self, parts, seen")),
    "unscored": ({"objective": NoScore()}, ConfigError, ("NoScore", "def score(self, parts")),
    "no term": ({"terms": [NoTermScore()]}, ConfigError, ("NoTermScore", "def score(")),
    "no sync": (
        {"method": NoSync, "objective": BYOL()},
        ConfigError,
        ("NoSync", "def sync(self, client"),
    ),
    "no features": ({"encoder": NoFeatures}, ConfigError, ("NoFeatures", "must define")),
    "views": ({"objective": TwoViews}, ConfigError, ("TwoViews.views is 2", "views = (2, 2)")),
    "a word": ({"objective": WordViews}, ConfigError, ("WordViews.views", "views = (2, 2)")),
    "misspelt": ({"method": Misspelt}, WireError, ("Misspelt asks for `trian`", "'train'")),
    "keeping": ({"method": Keeps}, WireError, ("Keeps.train", "`secret` at the client", "`keeps`")),
    "object": ({"method": KeepsObject}, WireError, ("KeepsObject.train", "`secret`", "object")),
    "memory": (
        {"method": Remembers},
        WireError,
        ("Remembers.round", "`secret` at the server", "remembers"),
    ),
    "memory's": (
        {"method": RemembersObject},
        WireError,
        ("RemembersObject.setup", "`secret`", "type object"),
    ),
    "network": ({"encoder": NoNetwork}, ConfigError, ("NoNetwork.build", "nn.Module")),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_one_line_with_the_fix(slip: str, tmp_path: Path) -> None:
    settings, kind, names = SLIPS[slip]
    words = [word for word in SMALL if word.partition(".")[0] not in settings]
    base = settings.get("method", "fedavg")
    others = {key: value for key, value in settings.items() if key != "method"}
    for call in (
        lambda: harmonium.run(base, *words, **others, out=tmp_path / "run"),
        lambda: check_method(base, **others),
    ):
        with pytest.raises(kind) as error:
            call()
        text = str(error.value)
        assert "\n" not in text and all(name in text for name in names), text


@dataclass(frozen=True)
class NotesNothing(Method):
    def noted(self, server):  # type: ignore[no-untyped-def]
        pass


@dataclass(frozen=True)
class NotesTensor(Method):
    def noted(self, server):  # type: ignore[no-untyped-def]
        return {"drift": torch.ones(())}


@dataclass(frozen=True)
class ShowsNothing(Method):
    def represent(self, server, state=None):  # type: ignore[no-untyped-def]
        pass


@pytest.mark.parametrize("words", [[], ["evaluate.tuning=simclr"]])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        (NotesNothing, "NotesNothing.noted returns nothing: it must return numbers by name"),
        (NotesTensor, 'NotesTensor.noted returns a Tensor as "drift": .*item'),
        (ShowsNothing, "ShowsNothing.represent returns nothing: .* an nn.Module"),
    ],
)
def test_what_only_a_whole_run_calls_is_checked(
    method: type[Method], says: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        harmonium.run(method, *SMALL, *words, out=tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@dataclass(frozen=True)
class NotFinite(Method):
    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return super().score(parts, seen, context) * float("nan")


def test_a_loss_that_is_not_finite_does_not_advise_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (
        lambda: harmonium.run(NotFinite, *SMALL, out=tmp_path / "run"),
        lambda: check_method(NotFinite),
    ):
        with pytest.raises(Diverged, match=r"local\.lr") as error:
            call()
        assert "\n" not in str(error.value)
    words = ["run", f"{__name__}:NotFinite", *SMALL, "--out", str(tmp_path / "again")]
    monkeypatch.setattr(sys, "argv", ["harmonium", *words])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[NotFinite.__module__])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and "local.lr" in told and "continue with" not in told


@dataclass(frozen=True)
class OneNotFinite(Method):
    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model, "loss": float("nan") if client.id == 0 else 0.0}


def test_one_client_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    found = harmonium.run(OneNotFinite, *SMALL, out=tmp_path / "run")
    assert found.rounds[1]["answered"] == 1
    with pytest.raises(NotEnoughReplies, match="not finite") as error:
        harmonium.run(OneNotFinite, *SMALL, "participation.quorum=2", out=tmp_path / "both")
    assert not isinstance(error.value, Diverged)


def test_declarations_that_are_none_are_refused_at_once() -> None:
    with pytest.raises(WireError, match="brackets"):

        @exchange  # type: ignore[arg-type]
        def train() -> None: ...

    for side in ("down", "up"):
        with pytest.raises(
            WireError, match=rf"Mine\.train: @exchange\({side}=\['model'\]\).*e\.g\."
        ):

            class Mine(Method):
                @exchange(**{side: ["model"]})  # type: ignore[arg-type]
                def train(self, client, got): ...  # type: ignore[no-untyped-def]

    with pytest.raises(WireError, match=r"`model`.*weights\(\)"):
        exchange(down={"model": "weights"})(Method.train)  # type: ignore[dict-item]


def test_messages_are_namespaces_all_the_same() -> None:
    got = Folded(model=1, ids=[2])
    assert not hasattr(got, "other") and getattr(got, "other", 5) == 5 and got.ids == [2]
    loss = checked_loss(torch.ones(1, requires_grad=True))
    assert loss.numel() == 1


def test_tables_that_settings_decide_pass() -> None:
    @dataclass(frozen=True)
    class Decides(Method):
        more: bool = True

        @property
        def keeps(self) -> Mapping[str, Any]:  # type: ignore[override]
            return {"control": "weights"} if self.more else {}

    assert Recipe.of(Decides).method.cls is Decides
    assert replace(Decides(), more=False).keeps == {}


def test_one_channel_is_not_plural() -> None:
    colours = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with pytest.raises(ConfigError, match="cannot take images of 8 x 8 with 1 channel: "):
        _ = Recipe.of("fedavg", "data=digits", encoder=colours).known_method().blueprint


@dataclass(frozen=True)
class BySettings(Method):
    """Fields and exchanges that follow from its settings."""

    sends: bool = True

    @property
    def field(self) -> Field:
        return scalar("mean" if self.sends else "each")

    @exchange(
        down=lambda method: {"model": weights()} if method.sends else {},
        up={"number": field, "other": lambda method: scalar()},
    )
    def count(self, client, got):  # type: ignore[no-untyped-def]
        return {"number": 1, "other": 2}

    @exchange(down={"model": weights()}, when=lambda method: method.sends)
    def keep(self, client, got):  # type: ignore[no-untyped-def]
        return {}


@dataclass(frozen=True)
class OverridesField(BySettings):
    @property
    def field(self) -> Field:
        return scalar("sum")


def test_fields_and_exchanges_follow_from_settings() -> None:
    full, less = BySettings().exchanges(), BySettings(sends=False).exchanges()
    assert list(full) == ["count", "keep", "train"] and list(less) == ["count", "train"]
    assert set(full["count"].down) == {"model"} and not less["count"].down
    assert full["count"].up == {"number": scalar("mean"), "other": scalar()}
    assert less["count"].up["number"].fold == "each"
    assert OverridesField().exchanges()["count"].up["number"].fold == "sum"
    assert set(BySettings(sends=False).declared_exchanges()) > {"keep", "calibrate"}


def test_when_is_a_function_of_the_method() -> None:
    with pytest.raises(WireError, match="when=True"):
        exchange(when=True)  # type: ignore[arg-type]


def test_losses_only_read_their_context(tmp_path: Path) -> None:
    with pytest.raises(FrozenInstanceError):
        harmonium.run(WritesContext, *SMALL, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="anchor"):
        _ = Context(me=0).received_model
