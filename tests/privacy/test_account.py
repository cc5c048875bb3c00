"""A privacy budget: what is asked for counts, and a run ends before it spends too much."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harmonium import Recipe, run
from harmonium.core.callbacks import Callback
from harmonium.core.errors import BudgetSpent, ConfigError, WireError
from harmonium.core.types import ClientId
from harmonium.federation.driver import Reply
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.spending import affordable
from harmonium.federation.wire import Ask, Plan, Value, exchange, statistic, weights
from harmonium.learning.client import Client
from harmonium.privacy.account import Account
from harmonium.privacy.budget import epsilon
from harmonium.privacy.mechanisms import Release
from harmonium.runs.privacy_report import report
from harmonium.runs.start import resume
from harmonium.storage import state_store
from harmonium.storage.run_folder import RunFolder
from harmonium.testing import TINY, first_trial

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

ONE = Release("mean", "gaussian", 1.0, 4.0)


@dataclass(frozen=True)
class Noisy(Method):
    """Asks for a guarded mean, then trains; with `sharing`, only those that can afford it."""

    name = "noisy"
    paper = "none"
    remembers = {"shared": "scalar"}
    keeps = {"turns": "scalar"}
    sigma: float = 40.0
    careful: bool = False
    honest: bool = True
    late: bool = False  # train first
    times: int = 1  # that it tells then

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """One mean."""
        if step != "tell":
            return ()
        return (Release("mean", "gaussian", math.sqrt(2) / examples, self.sigma / examples),)

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Tell, then train."""
        if self.late:
            server = yield from super().round(server, cohort)
            for _ in range(self.times):
                yield Ask("tell", cohort, {"model": server.model})
            return server
        able = affordable(self, server, "tell", cohort) if self.careful else cohort
        if able:
            yield Ask("tell", able, {"model": server.model}, least=0)
        memory = {"shared": [*server.memory.get("shared", []), len(able)]}
        return (yield from super().round(replace(server, memory=memory), cohort))

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train, and count how often."""
        client.state["turns"] = client.state.get("turns", 0) + 1
        return super().train(client, got)

    @exchange(down={"model": weights()}, up={"mean": statistic("each", guarded=True)})
    def tell(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """A mean with noise."""
        (one,) = self.costs("tell", len(client.examples))
        value = client.views.plain(client.examples.pixels()).mean(0).clamp(0, 1)
        sigma = (1.0 if self.honest else 2.0) * self.sigma / len(client.examples)
        sent = client.release("mean", value, sensitivity=one.sensitivity, sigma=sigma)
        return {"mean": sent}


HERE = f"{__name__}:Noisy"
SMALL: dict[str, Any] = {
    **TINY,
    "split": "iid",
    "rounds": 4,
    "evaluate": {"labels_per_class": [], "every": 100},
    "engine": {"workers": 0},
}


def spent(times: int, delta: float = 1e-3) -> float:
    return epsilon([{"sensitivity": math.sqrt(2), "sigma": 40.0}] * times, delta)


def files(folder: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "ledger.jsonl", "encoder.safetensors", "result.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_it_counts_each_client_and_knows_what_more_would_cost() -> None:
    account = Account(limit=1.9, delta=1e-5)
    assert account.spent(3) == 0 and account.affords(3, ())
    account.charge(3, [ONE, replace(ONE, field="other", noise="simulated")])
    one = {"sensitivity": 1.0, "sigma": 4.0}
    assert account.spent(3) == epsilon([one] * 2, 1e-5)
    assert account.spent(3, [ONE]) == epsilon([one] * 3, 1e-5)
    assert account.spent(4) == 0
    assert account.affords(3, [ONE]) and not account.affords(3, [ONE] * 2)
    assert Account(None).affords(0, [replace(ONE, sensitivity=1e9)])


def test_a_run_ends_before_it_would_spend_too_much(tmp_path: Path) -> None:
    """Two rounds fit; the third is not played, and the encoder is that of the second."""
    settings = {
        **SMALL,
        "privacy": {"noise": "simulated", "epsilon": (spent(2) + spent(3)) / 2, "delta": 1e-3},
    }
    found = run(HERE, out=tmp_path / "a", **settings)
    assert [row["answered"] for row in found.rounds] == [0, 4, 4, 0]
    assert f"client 0 would spend epsilon {spent(3):.4g} at delta 0.001" in found.stopped
    short = run(
        HERE,
        out=tmp_path / "b",
        **{**SMALL, "rounds": 4, "privacy": {"noise": "simulated", "delta": 1e-3}},
    )
    assert short.stopped == "" and len(short.rounds) == 5
    assert found.rounds[2]["loss"] == short.rounds[2]["loss"] and "knn" in found.rounds[3]
    assert found.figures and (tmp_path / "a/encoder.safetensors").exists()
    before = files(tmp_path / "a")
    (tmp_path / "a/result.json").unlink()  # killed before the verdict: it is not played on
    resume(tmp_path / "a")
    assert files(tmp_path / "a") == before
    assert not (tmp_path / "a/asked.jsonl").exists()  # simulated noise needs none


def test_what_the_last_round_did_before_it_was_stopped_is_dropped(tmp_path: Path) -> None:
    """Clients had trained already when they were to tell for the third time."""
    settings = {**SMALL, "privacy": {"epsilon": (spent(2) + spent(3)) / 2, "delta": 1e-3}}
    method = {"name": HERE, "late": True}
    found = run(Recipe.from_tree({**settings, "method": method}), out=tmp_path / "a")
    assert found.stopped and len(found.rounds) == 4
    commit, _ = RunFolder(tmp_path / "a").newest_readable()
    assert commit is not None
    for held in commit.clients.values():
        state = state_store.read(tmp_path / "a/clients" / held["file"], held["digest"]).state
        assert state["turns"] == 2


def test_a_careful_plan_goes_on_without(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "privacy": {"noise": "simulated", "epsilon": (spent(2) + spent(3)) / 2, "delta": 1e-3},
    }
    method = {"name": HERE, "careful": True}
    found = run(Recipe.from_tree({**settings, "method": method}), out=tmp_path / "a")
    assert found.stopped == "" and [row["answered"] for row in found.rounds] == [0, 4, 4, 4, 4]
    entries = [json.loads(line) for line in (tmp_path / "a/ledger.jsonl").open()]
    assert [e["round"] for e in entries if e["step"] == "tell"] == [1] * 4 + [2] * 4
    assert [row.get("refused") for row in found.rounds] == [None] * 3 + [{"tell": [0, 1, 2, 3]}] * 2


def test_only_who_was_asked_in_a_round_is_told_to_be_left_out_of_it(tmp_path: Path) -> None:
    """With other clients in every round, those of earlier rounds are not told again."""
    privacy = {"noise": "simulated", "epsilon": (spent(1) + spent(2)) / 2, "delta": 1e-3}
    tree = {**SMALL, "privacy": privacy, "method": {"name": HERE, "careful": True}}
    recipe = Recipe.from_tree({**tree, "rounds": 6, "participation": {"number": 1}})
    found = run(recipe, out=tmp_path / "a")
    told = [row["refused"]["tell"] for row in found.rounds if "refused" in row]
    assert len({some[0] for some in told}) > 1 and all(len(some) == 1 for some in told)


class Notes(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_who_falls_out_is_noted_once_also_over_a_resume(tmp_path: Path) -> None:
    """Clients cannot afford a third; it is said in round 3, and not again in 4 or after a kill."""
    limit = (spent(2) + spent(3)) / 2
    privacy = {"noise": "simulated", "epsilon": limit, "delta": 1e-3}
    method = {"name": HERE, "careful": True}
    recipe = Recipe.from_tree({**SMALL, "privacy": privacy, "method": method})
    first, second = Notes(), Notes()
    run(recipe, out=tmp_path / "a", callbacks=first)
    said = "4 of 4 clients can afford no further `tell` from round 3 on"
    assert sum("afford" in text for text in first.texts) == 1
    assert any(said in text for text in first.texts)
    before = files(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Method, "run_plan", killed_in(4))
        run(recipe, out=tmp_path / "b")
    resume(tmp_path / "b", callbacks=second)
    assert not any("afford" in text for text in second.texts)
    assert files(tmp_path / "b") == before
    found = report(tmp_path / "b")
    assert found.refused == (("tell", 4, 4, 3),)
    assert "4 of 4 clients could afford no further `tell` from round 3 on" in "".join(found.lines())
    assert found.plain()["refused"] == [{"step": "tell", "clients": 4, "of": 4, "since": 3}]


@pytest.mark.parametrize("careful", [False, True])
def test_a_budget_below_the_first_release_is_an_error(tmp_path: Path, careful: bool) -> None:
    """Whether or not the plan could go on without."""
    privacy = {"noise": "simulated", "epsilon": spent(1) * 0.99, "delta": 1e-3}
    method = {"name": HERE, "careful": careful}
    recipe = Recipe.from_tree({**SMALL, "privacy": privacy, "method": method})
    costs = f"one `tell`: it costs epsilon {spent(1):.4g} or more at delta 0.001, and privacy.eps"
    with pytest.raises(BudgetSpent, match=costs):
        run(recipe, out=tmp_path / "a")


def killed_in(stop: int) -> Any:
    """A plan that is killed in a round, once its first ask was answered."""
    run_plan = Method.run_plan

    def killed(self: Method, server: Server, cohort: Any) -> Plan:
        steps = run_plan(self, server, cohort)
        if server.round != stop:
            return (yield from steps)
        yield next(steps)
        raise KeyboardInterrupt

    return killed


def test_noise_that_cannot_be_drawn_again_counts_though_its_round_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills in round 2 after the release: four releases, of which the ledger has two."""
    settings = {**SMALL, "privacy": {"epsilon": (spent(4) + spent(5)) / 2, "delta": 1e-3}}
    with monkeypatch.context() as patch:
        patch.setattr(Method, "run_plan", killed_in(2))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(HERE, out=tmp_path / "a", **settings)
    with (tmp_path / "a/asked.jsonl").open("a") as file:
        file.write('{"round": 2, "ask"')  # torn by another kill: nothing was sent
    found = resume(tmp_path / "a")
    assert [row["answered"] for row in found.rounds] == [0, 4, 4, 0]  # not 4 rounds, but 4 releases
    assert f"would spend epsilon {spent(5):.4g}" in found.stopped
    assert len((tmp_path / "a/asked.jsonl").read_text().splitlines()) == 4 * 4


@pytest.mark.parametrize("careful", [False, True])
def test_a_resumed_run_has_spent_the_same(
    tmp_path: Path, careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        **SMALL,
        "privacy": {"noise": "simulated", "epsilon": (spent(3) + spent(4)) / 2, "delta": 1e-3},
    }
    settings["participation"] = {"fraction": 0.5, "dropout": 0.3}  # clients differ, answers lost
    recipe = Recipe.from_tree(
        {**settings, "rounds": 6, "method": {"name": HERE, "careful": careful}}
    )
    run(recipe, out=tmp_path / "a")
    for stop in (2, 4):
        where = tmp_path / f"killed {stop}"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Method, "run_plan", killed_in(stop))
            run(recipe, out=where)
        resume(where)
        assert files(where) == files(tmp_path / "a")


class Losing:
    """Loses the answers of client 0 to `tell`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def deliver(self, ask: Ask, turn: Any) -> Iterator[Reply]:
        """Client 0 did the work, but nobody hears of it."""
        for reply in self.engine.deliver(ask, turn):
            lost = ask.step == "tell" and reply.client == 0
            yield Reply(0, None, "lost") if lost else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_a_lost_answer_counts_as_released() -> None:
    plain = first_trial(HERE, split="iid", privacy={"delta": 1e-3})
    lossy = plain.again(wrap=Losing)
    account = lossy.server.account
    assert account.spent(0) == account.spent(1) == plain.server.account.spent(0) == spent(2)
    told = [json.loads(line) for line in lossy.lines]
    lost = [entry for entry in told if entry["outcome"] == "no answer"]
    heard = [entry for entry in told if entry["step"] == "tell" and entry["client"] == 1]
    assert len(lost) == 2
    for one, other in zip(lost, heard, strict=True):
        assert "noise" not in one["releases"][0]  # nobody knows where it came from
        assert one["releases"] == [{k: v for k, v in other["releases"][0].items() if k != "noise"}]


def test_a_budget_for_not_even_one_round_is_an_error(tmp_path: Path) -> None:
    """One release could be afforded, but the round needs two."""
    privacy = {"noise": "simulated", "epsilon": (spent(1) + spent(2)) / 2, "delta": 1e-3}
    method = {"name": HERE, "late": True, "times": 2}
    with pytest.raises(BudgetSpent, match="would spend epsilon"):
        run(Recipe.from_tree({**SMALL, "privacy": privacy, "method": method}), out=tmp_path / "a")


def test_releasing_other_than_is_said_is_refused() -> None:
    with pytest.raises(WireError, match=r"noisy.tell released mean by gaussian .* not mean by"):
        first_trial(Noisy, method={"name": HERE, "honest": False})


def test_a_client_that_tells_of_other_releases_is_left_out() -> None:
    class Lying(Losing):
        def deliver(self, ask: Ask, turn: Any) -> Iterator[Reply]:
            for reply in self.engine.deliver(ask, turn):
                lies = reply.client == 0 and ask.step == "tell"
                yield replace(reply, releases=({"field": 3},)) if lies else reply

    trial = first_trial(HERE, split="iid").again(wrap=Lying)
    refused = [e for e in map(json.loads, trial.lines) if e["outcome"] == "refused"]
    assert [(e["client"], e["step"]) for e in refused] == [(0, "tell")] * 2
    assert "it released 3 by None" in refused[0]["why"]


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"epsilon": 3.0}, "has nothing to count: fedavg sends nothing with noise"),
        ({"epsilon": -1.0}, "privacy.epsilon is -1.0"),
        ({"delta": 1.0}, "privacy.delta is 1.0"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(privacy: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.from_tree({**TINY, "privacy": privacy})


def test_a_method_that_does_not_say_what_it_releases_has_no_budget() -> None:
    @dataclass(frozen=True)
    class Silent(Noisy):
        def costs(self, step: str, examples: int) -> Sequence[Release]:
            return ()

    with pytest.raises(ConfigError, match="`tell`"):
        Recipe.from_tree({**TINY, "method": Silent, "privacy": {"epsilon": 3.0}})
