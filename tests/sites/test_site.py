"""A site: answers what the server asked it, once, within its policy, and writes down what left."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save_file

from harmonium.core import codec
from harmonium.core import files as store
from harmonium.core.errors import ConfigError, DataError, HarmoniumError, StoreError, WireError
from harmonium.data.images import Dataset
from harmonium.data.partition import Split, make_split
from harmonium.data.splits.iid import IID
from harmonium.engines.runtime import ClientRuntime, StateRef
from harmonium.engines.seal import must_match, nonce, seal, unseal
from harmonium.federation.method import Method
from harmonium.federation.wire import exchange, per_example, scalar, statistic, weights
from harmonium.learning.client import Decline
from harmonium.privacy.budget import epsilon
from harmonium.recipe.initial_weights import Init
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.sites.log import LEFT, totals
from harmonium.sites.policy import Policy
from harmonium.sites.site import Identity, Site
from harmonium.storage import state_store
from harmonium.testing import TINY

SERVER, OWN, STRANGER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
FEDERATION, RUN = "f" * 32, "0" * 32
NUMBER, CLIENT = 7, 1  # of the site in its federation, and in this run


@dataclass(frozen=True)
class Noisy(Method):
    """Counts its rounds at the client and sends a guarded mean of the images."""

    sigma: float = 4.0
    head_epochs: int = 1
    keeps = {"count": "scalar", "still": "public", "moves": "public"}

    @exchange(
        down={"model": weights(), "fault": scalar()},
        up={"model": weights(), "mean": statistic("each", guarded=True), "loss": scalar("mean")},
    )
    def train(self, client, got):  # type: ignore[no-untyped-def]
        if got.fault == 1:
            raise Decline("it does not want to")
        if got.fault == 2:
            raise ZeroDivisionError("a bug of\nthe method")
        client.state["count"] = client.state.get("count", 0) + 1
        client.state["still"] = torch.ones(3)
        client.state["moves"] = torch.full((3,), client.state["count"])
        mean = client.examples.pixels().double().mean(dim=(0, 1, 2))
        noisy = client.release("mean", mean, sensitivity=1.0, sigma=self.sigma)
        return {"model": got.model, "mean": noisy, "loss": float(client.state["count"])}


@dataclass(frozen=True)
class Rows(Method):
    """Would send a row for every image."""

    @exchange(up={"rows": per_example()})
    def show(self, client, got):  # type: ignore[no-untyped-def]
        return {"rows": client.examples.pixels().flatten(1).float()}


def named(method: type[Method]) -> str:
    return f"{method.__module__}:{method.__qualname__}"


POLICY = Policy(own_code=(named(Noisy), named(Rows)), epsilon=None)


def plan(method: type[Method] = Noisy, noise: str = "system", **settings: Any) -> Recipe:
    options = settings.pop("options", {})
    tree = {**TINY, "rounds": 5, "data": {"name": "sites", "size": 12}, "split": "iid", **settings}
    tree |= {"privacy": {"noise": noise}, "method": {"name": named(method), **options}}
    return Recipe.from_tree(tree)


PLAN = plan()


@cache
def pictures() -> tuple[Dataset, Split]:
    dataset = Recipe.from_tree({"data": TINY["data"]}).data.load()
    return dataset, make_split(IID(), dataset, None, PLAN.clients, 0)


@dataclass
class Bench:
    """A server's hand and one site; `restart` is the site's process beginning anew."""

    folder: Path
    policy: Policy | Path | None = POLICY
    recipe: Recipe = PLAN
    open_host: Callable[[Recipe, Path, int], ClientRuntime] | None = None
    finished: list[Any] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.site = Site(
            Identity(FEDERATION, NUMBER, OWN, SERVER.public_key()),
            self.folder,
            self._open,
            self.policy,
            lambda *facts: self.finished.append(facts),
            self.notes.append,
        )

    def _open(self, recipe: Recipe, folder: Path, client: int) -> ClientRuntime:
        self.opened.append(recipe.method.name)
        if self.open_host is not None:
            return self.open_host(recipe, folder, client)
        return make_runtime(recipe, *pictures(), folder)

    @property
    def states(self) -> Path:
        return self.folder / "runs" / RUN / "clients" / str(CLIENT)

    def header(self, **changes: Any) -> dict[str, Any]:
        about = {"federation": FEDERATION, "site": NUMBER, "run": RUN, "plan": self.recipe.digest}
        about |= {"round": 1, "ask": 0, "step": "train", "client": CLIENT, "nonce": nonce()}
        return {**about, **changes}

    def bodies(
        self,
        state: Any = None,
        keep: Any = (),
        down: Any = None,
        own: Any = None,
        text: bytes | None = None,
    ) -> list[bytes]:
        model = self.recipe.method_for((12, 12, 3), 0).blueprint.shared()
        down = {"model": model, "fault": 0} if down is None else down
        facts = {"down": {} if own is None else own, "state": state, "keep": list(keep)}
        tree = json.dumps(self.recipe.tree()).encode() if text is None else text
        return [tree, codec.encode(down), codec.encode(facts)]

    def ask(
        self, *, about: Any = None, key: Any = SERVER, way: Any = "ask", **parts: Any
    ) -> tuple[bytes, list[bytes]]:
        bodies = self.bodies(**parts)
        digests = [store.digest_of(body) for body in bodies]
        return seal(way, self.header(**(about or {})), digests, key), bodies

    def answer(self, sealed: bytes, bodies: list[bytes]) -> Any:
        """What the site says, as its server reads it."""
        held, (body,) = self.site.answer(sealed, bodies)
        ask = unseal("ask", sealed, bodies, SERVER.public_key())
        must_match(unseal("answer", held, [body], OWN.public_key()), ask)
        self.body = body
        return codec.decode(body)

    def say(self, **parts: Any) -> Any:
        return self.answer(*self.ask(**parts))

    def refusal(self, **parts: Any) -> str:
        got = self.say(**parts)
        assert set(got) == {"client", "up", "why"} and got["up"] is None
        assert self.last["outcome"] == "refused" and "up" not in self.last
        assert "\n" not in got["why"] + self.last["why"]
        why: str = got["why"]
        return why

    @property
    def last(self) -> dict[str, Any]:
        return self.site.log.entries()[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def lines(bench: Bench) -> list[str]:
    return [entry["outcome"] for entry in bench.site.log.entries()]


def refused(bench: Bench, match: str, sealed: bytes, bodies: list[bytes]) -> None:
    """Nothing is answered, run or written down."""
    before, opened = lines(bench), list(bench.opened)
    with pytest.raises(WireError, match=match) as error:
        bench.site.answer(sealed, bodies)
    assert "\n" not in str(error.value)
    assert lines(bench) == before and bench.opened == opened


# ---- who is answered -------------------------------------------------------------------------


def test_an_ask_is_answered_under_the_site_s_seal_and_what_left_is_written_down(
    bench: Bench,
) -> None:
    sealed, bodies = bench.ask()
    got = bench.answer(sealed, bodies)
    assert set(got["up"]) == {"model", "mean", "loss"} and got["why"] == ""
    entry = bench.last
    header = unseal("ask", sealed, bodies, SERVER.public_key())
    for key in ("run", "round", "ask", "step", "nonce"):
        assert entry[key] == header[key]
    kinds = {"model": "weights", "mean": "statistic", "loss": "scalar"}
    left = {k: {"kind": kinds[k], "bytes": codec.payload_bytes(v)} for k, v in got["up"].items()}
    assert entry["outcome"] == "sent" and entry["up"] == left
    assert entry["down"] == codec.payload_bytes(codec.decode(bodies[1]))
    assert entry["releases"] == got["releases"]
    assert [release["noise"] for release in got["releases"]] == ["system"]
    assert os.stat(bench.site.log.path).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("federation", "e" * 32),
        ("federation", None),
        ("site", NUMBER + 1),
        ("site", float(NUMBER)),
        ("site", str(NUMBER)),
        ("run", "../" + "0" * 29),
        ("run", "0" * 31),
        ("run", "0" * 32 + "\n"),
        ("run", "A" * 32),
        ("run", ["0" * 32]),
        ("plan", 5),
        ("round", -1),
        ("round", True),
        ("round", 1.0),
        ("round", "1"),
        ("round", 10**400),
        ("ask", -1),
        ("ask", None),
        ("step", ["train"]),
        ("step", None),
        ("client", "../../etc"),
        ("client", str(CLIENT)),
        ("client", True),
        ("client", -1),
        ("client", 2**31),
        ("nonce", ""),
        ("nonce", ["0" * 32]),
        ("nonce", 5),
    ],
)
def test_an_ask_for_another_or_with_a_header_that_is_none_is_refused(
    key: str, value: Any, bench: Bench
) -> None:
    refused(bench, f"(is for another|invalid field:) {key}", *bench.ask(about={key: value}))
    assert not (bench.folder / "runs").exists()


def test_an_ask_has_exactly_its_fields_and_three_bodies(bench: Bench) -> None:
    header, bodies = bench.header(), bench.bodies()
    odd = [{k: v for k, v in header.items() if k != key} for key in header]
    for about, sent in (*((one, bodies) for one in [*odd, {**header, "more": 1}]),):
        sealed = seal("ask", about, [store.digest_of(body) for body in sent], SERVER)
        refused(bench, "request ", sealed, sent)
    for sent in (bodies[:2], [*bodies, b""], []):
        sealed = seal("ask", header, [store.digest_of(body) for body in sent], SERVER)
        refused(bench, "request ", sealed, sent)


def test_only_what_the_server_signed_as_an_ask_is_heard(bench: Bench) -> None:
    for key in (STRANGER, OWN):
        refused(bench, "not signed by", *bench.ask(key=key))
    refused(bench, "not signed by", *bench.ask(way="answer"))
    sealed, bodies = bench.ask()
    for number in range(3):
        changed = [*bodies[:number], bodies[number] + b" ", *bodies[number + 1 :]]
        refused(bench, "was changed", sealed, changed)
    refused(bench, "cannot be read", b"[" * 100_000, bodies)
    refused(bench, "seal of the ask has \d+ bytes", b" " * (1 << 21), bodies)
    assert bench.answer(sealed, bodies)["up"]  # all of that did the true one no harm


def test_an_answer_of_the_site_is_no_ask_for_it(bench: Bench) -> None:
    held, bodies = bench.site.answer(*bench.ask())
    refused(bench, "not signed by", held, bodies)


def test_a_replay_is_refused_also_after_a_restart_and_many_other_asks(bench: Bench) -> None:
    first = bench.ask()
    bench.answer(*first)
    refused(bench, "it is a replay", *first)
    for round in (2, 3):
        bench.say(about={"round": round})
    bench.restart()
    refused(bench, "it is a replay", *first)
    bench.say(about={"round": 4})
    refused(bench, "it is a replay", *first)
    assert lines(bench) == ["sent"] * 4


def test_what_was_refused_or_greeted_cannot_be_replayed_either(bench: Bench) -> None:
    asks = [
        bench.ask(about={"step": "hello"}),
        bench.ask(about={"step": "none_of_it"}),
        bench.ask(text=b"{"),
    ]
    for sealed, bodies in asks:
        bench.answer(sealed, bodies)
    bench.restart()
    for sealed, bodies in asks:
        refused(bench, "it is a replay", sealed, bodies)


# ---- the same ask again ----------------------------------------------------------------------


def test_a_lost_answer_goes_out_again_as_it_was_and_counts_once(bench: Bench) -> None:
    bench.say()
    first, spent = bench.body, bench.site.log.releases()
    for restart in (False, True):
        if restart:
            bench.restart()
        bench.say(keep=[f"{CLIENT}/000000-0-train.safetensors"])  # which says nothing of the ask
        assert bench.body == first
        assert bench.last["outcome"] == "stored answer sent again"
        assert bench.last["up"] == bench.site.log.entries()[0]["up"]
        assert bench.site.log.releases() == spent and len(spent) == 1
    counted = totals(bench.site.log.entries(), 1e-5)
    assert counted["answers"] == 1 and counted["releases"] == 1
    assert counted["bytes"]["statistic"] == 3 * 24  # it left three times, with the same noise


def test_another_ask_has_another_answer(bench: Bench) -> None:
    state = bench.say()["state"]
    seen, model = {bench.body}, {"model": codec.decode(bench.bodies()[1])["model"]}
    for parts in (
        {"about": {"round": 2}},
        {"about": {"ask": 1}},
        {"about": {"run": "1" * 32}},
        {"about": {"client": 2}},
        {"down": model, "own": {"fault": 3}},
        {"down": model, "own": {"fault": 4}},
        {"down": model, "own": {"fault": 4}, "state": state},
        {},  # the first again: its answer is no longer kept
    ):
        assert bench.say(**parts)["up"]
        assert bench.last["outcome"] == "sent" and bench.body not in seen
        seen.add(bench.body)
    assert len(bench.site.log.releases()) == 9  # each with its own noise, each counted


@pytest.mark.parametrize("harm", ["body", "name", "list", "gone"])
def test_a_stored_answer_that_is_damaged_is_made_anew_and_counted(bench: Bench, harm: str) -> None:
    bench.say()
    first, path = bench.body, bench.folder / "runs" / RUN / f"answer-{CLIENT}.safetensors"
    if harm == "body":
        path.write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    elif harm == "gone":
        path.unlink()
    else:
        path.with_suffix(".json").write_text("[]" if harm == "list" else '{"answer": 5}')
    assert bench.say()["up"] and bench.body != first
    assert bench.last["outcome"] == "sent" and len(bench.site.log.releases()) == 2


def test_what_a_site_keeps_is_for_its_owner_alone(bench: Bench) -> None:
    bench.say()
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    kept = [path for path in files if path.suffix != ".lock"]
    assert len(kept) == 5  # log, state, answer, what it was to, and which model the run began with
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)


def test_a_release_is_on_the_disk_before_its_answer_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise StoreError("cannot write: no space left")

    monkeypatch.setattr(bench.site, "_keep", full)
    with pytest.raises(StoreError):
        bench.site.answer(*bench.ask())
    assert len(bench.site.log.releases()) == 1


# ---- states ----------------------------------------------------------------------------------


def test_a_state_goes_on_from_the_version_that_the_server_names(bench: Bench) -> None:
    one = bench.say()
    two = bench.say(about={"round": 2}, state=one["state"], keep=[one["state"]["file"]])
    assert (one["up"]["loss"], two["up"]["loss"]) == (1.0, 2.0)
    # The second answer was lost: the server still has the first version.
    again = bench.say(about={"round": 3}, state=one["state"], keep=[one["state"]["file"]])
    assert again["up"]["loss"] == 2.0
    fresh = bench.say(about={"round": 4}, state=None)
    assert fresh["up"]["loss"] == 1.0
    for state in (one["state"], again["state"]):
        assert StateRef(**state).file.startswith(f"{CLIENT}/")


def test_versions_that_no_commit_needs_are_deleted_but_none_that_is_newer(bench: Bench) -> None:
    def kept() -> list[str]:
        return sorted(path.name[:6] for path in bench.states.iterdir())

    states = [bench.say(about={"round": 1})["state"]]
    for round in (2, 3, 4):
        keep = [state["file"] for state in states[-2:]]
        states.append(bench.say(about={"round": round}, state=states[-1], keep=keep)["state"])
    assert kept() == ["000002", "000003", "000004"]
    # An ask that was held up somewhere names old ones; those of now stay.
    got = bench.say(about={"round": 3}, state=states[1], keep=[states[0]["file"]])
    assert got["up"]["loss"] == 3.0
    assert kept() == ["000002", "000003", "000004"]
    assert bench.say(about={"round": 5}, state=states[3])["up"]["loss"] == 5.0
    assert kept() == ["000004", "000005"]


def test_a_large_tensor_that_stays_lies_apart_and_nothing_tells_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "LARGE", 12)
    states = [bench.say(about={"round": 1})["state"]]
    assert len(list(bench.states.glob("apart-*"))) == 2
    for round in (2, 3, 4):
        keep = [state["file"] for state in states[-2:]]
        got = bench.say(about={"round": round}, state=states[-1], keep=keep)
        states.append(got["state"])
        assert got["up"]["loss"] == round and set(got["state"]) == {"file", "digest"}
    (apart,) = bench.states.glob("apart-*")  # of what moves no version refers to it any more
    assert apart.name[6:70] not in json.dumps(states)
    apart.write_bytes(b"damaged")
    why = bench.refusal(about={"round": 5}, state=states[-1], keep=[states[-1]["file"]])
    assert "StoreError" in why and apart.name not in why  # the site's log says more


@pytest.mark.parametrize(
    "name",
    [
        "../0/000001-0-train.safetensors",
        f"{CLIENT}/../0/000001-0-train.safetensors",
        f"{CLIENT}/../../../../log.jsonl",
        "/etc/passwd",
        "0/000001-0-train.safetensors",
        f"0{CLIENT}/000001-0-train.safetensors",
        f"{CLIENT}/masks.safetensors",
        f"{CLIENT}/000001-0-train.safetensors\n",
        f"{CLIENT}/000001-0-train.safetensors\0",
        f"{CLIENT}\\000001-0-train.safetensors",
        f"{CLIENT}/000001-0-tr%2fain.safetensors",
        f"{CLIENT}/.safetensors",
        f"{CLIENT}/",
        "",
    ],
)
def test_a_state_is_no_other_file(bench: Bench, name: str) -> None:
    state = bench.say()["state"]
    secret = bench.folder / "runs" / RUN / "clients" / "0"
    secret.mkdir()
    shutil.copy(bench.states / state["file"].partition("/")[2], secret)
    before = sorted(bench.folder.rglob("*"))
    digest = {"digest": state["digest"]}
    for parts in ({"state": {"file": name, **digest}}, {"keep": [name], "state": state}):
        for step in ("train", "finish"):
            why = bench.refusal(about={"round": 2, "step": step}, **parts)
            assert "which is not a state" in why
    assert sorted(bench.folder.rglob("*")) == before and not bench.finished


def test_a_state_that_is_missing_or_damaged_is_refused_without_a_path(bench: Bench) -> None:
    state = bench.say()["state"]
    for wrong in ({**state, "digest": "0" * 64}, {**state, "file": f"{CLIENT}/0.safetensors"}):
        why = bench.refusal(about={"round": 2}, state=wrong)
        assert why == "StoreError at the site: its log has the details"
        assert str(bench.folder) in bench.last["why"]


# ---- the plan and the policy -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "recipe", "match"),
    [
        (replace(POLICY, methods=("fedavg",)), PLAN, "runs the method .*Noisy.*`methods`"),
        (replace(POLICY, own_code=()), PLAN, "uses the code .*Noisy.*`own_code` allows none"),
        (replace(POLICY, exchanges=("show",)), PLAN, "asks for the exchange train.*`exchanges`"),
        (replace(POLICY, kinds=("weights", "scalar")), PLAN, "sends `mean` of the kind statistic"),
        (POLICY, plan(Rows), "sends `rows` of the kind per_example .*`kinds` allows only"),
        (replace(POLICY, rounds=1), PLAN, "has rounds=5, but `rounds` is 1"),
        (
            replace(POLICY, epochs=2),
            plan(options={"head_epochs": 5}),
            "method.head_epochs=5, but `epochs` is 2",
        ),
        (replace(POLICY, plans=("0" * 64,)), PLAN, f"has the digest {PLAN.digest}"),
        (replace(POLICY, secure_aggregation=True), PLAN, "lets the server see single answers"),
        (POLICY, plan(noise="simulated"), "has privacy.noise=simulated.*`simulated_noise`"),
        (replace(POLICY, epsilon=0.0), PLAN, "releases guarded fields, but `epsilon` is 0"),
        (POLICY, plan(public="digits"), "reads the data set 'digits', but `public` allows none"),
    ],
)
def test_a_plan_outside_the_policy_is_refused_by_name_before_an_image_is_read(
    tmp_path: Path, policy: Policy, recipe: Recipe, match: str
) -> None:
    bench = Bench(tmp_path, policy, recipe)
    for step in ("train", "hello", "show", "finish"):
        why = bench.refusal(about={"step": step})
        assert why.startswith("the site's policy refuses this plan: ")
        assert re.search(match, why)
    assert not bench.opened and not bench.finished


def test_too_few_images_or_too_many_for_delta_are_refused_before_an_answer(
    tmp_path: Path,
) -> None:
    few = Bench(tmp_path / "few", replace(POLICY, pictures=13))
    assert "runs on 12 images, but `pictures` asks for 13" in few.refusal()
    loose = Bench(tmp_path / "loose", replace(POLICY, delta=0.1))
    assert "guards 12 images, but `delta` is 0.1" in loose.refusal()


def test_per_example_fields_leave_once_the_site_allows_them(tmp_path: Path) -> None:
    kinds = (*POLICY.kinds, "per_example")
    bench = Bench(tmp_path, replace(POLICY, kinds=kinds), plan(Rows))  # type: ignore[arg-type]
    got = bench.say(about={"step": "show"}, down={})
    assert got["up"]["rows"].shape == (12, 12 * 12 * 3)
    assert bench.last["up"]["rows"]["kind"] == "per_example"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "the plan cannot be read"),
        (b"\xff", "the plan cannot be read"),
        (b"[" * 100_000, "the plan cannot be read"),
        (b'{"a":' * 100_000, "the plan cannot be read"),
        (b"9" * 5000, "the plan cannot be read"),
        (b"3", "it is a int"),
        (b"[]", "it is a list"),
        (json.dumps(plan(seed=1).tree()).encode(), "not the one that the ask names"),
    ],
)
def test_a_plan_that_is_none_is_refused(bench: Bench, text: bytes, match: str) -> None:
    assert match in bench.refusal(text=text)
    assert not bench.opened


def test_the_plan_must_be_the_one_named_also_when_it_is_known_already(bench: Bench) -> None:
    bench.say()
    assert "not the one that the ask names" in bench.refusal(about={"plan": "0" * 64})
    assert bench.say(about={"round": 2})["up"]


def test_a_client_number_must_be_one_of_the_plan(bench: Bench) -> None:
    why = bench.refusal(about={"client": PLAN.clients})
    assert f"client {PLAN.clients}, but its plan has {PLAN.clients} clients" in why
    assert why.endswith("a site that was added after a run began takes part in the next one")
    assert not bench.opened


def test_a_longer_plan_of_the_same_run_goes_on_with_the_state_that_is_here(bench: Bench) -> None:
    """As when the server trains a run further; the site's policy looks at the new plan."""
    state = bench.say(about={"round": PLAN.rounds})["state"]
    bench.recipe = PLAN.changed(rounds=PLAN.rounds + 1)
    got = bench.say(about={"round": PLAN.rounds + 1}, state=state, keep=[state["file"]])
    assert got["up"]["loss"] == 2  # counted by the client's state
    bench.policy = replace(POLICY, rounds=PLAN.rounds)
    bench.restart()
    why = bench.refusal(about={"round": PLAN.rounds + 1, "ask": 1})
    assert f"rounds={PLAN.rounds + 1}" in why


def test_no_plan_has_more_rounds_than_it_says(bench: Bench) -> None:
    assert bench.say(about={"round": PLAN.rounds})["up"]
    why = bench.refusal(about={"round": PLAN.rounds + 1})
    assert why == f"the ask is for round {PLAN.rounds + 1} of {PLAN.rounds}"


def test_images_are_read_once_a_plan_and_run(bench: Bench) -> None:
    for round in (1, 2, 3):
        bench.say(about={"round": round})
    assert len(bench.opened) == 1
    bench.say(about={"run": "1" * 32})
    assert len(bench.opened) == 2


def test_a_spent_budget_stops_answers_for_good(tmp_path: Path) -> None:
    one = {"sensitivity": 1.0, "sigma": Noisy.sigma}
    most = epsilon([one] * 3, 1e-5)
    bench = Bench(tmp_path, replace(POLICY, epsilon=most * 1.0001))
    for round in (1, 2, 3):
        assert bench.say(about={"round": round})["up"]
    last = bench.body
    for restart in (False, True):
        if restart:
            bench.restart()
        for run in (RUN, "1" * 32):  # another run does not begin anew
            why = bench.refusal(about={"round": 4, "run": run})
            assert "has an answer after which epsilon is" in why
            assert len(bench.site.log.releases()) == 3
    bench.say(about={"round": 3})  # what has left already may leave again
    assert bench.body == last and bench.last["outcome"] == "stored answer sent again"
    assert bench.say(about={"step": "hello"})["up"]


def test_noise_that_can_be_subtracted_does_not_leave(tmp_path: Path) -> None:
    """Also if a host draws other noise than its plan says."""

    def other(recipe: Recipe, folder: Path, client: int) -> ClientRuntime:
        return replace(make_runtime(recipe, *pictures(), folder), noise="simulated")

    bench = Bench(tmp_path, open_host=other)
    assert "noise can be subtracted" in bench.refusal()
    assert not bench.site.log.releases()


def test_without_a_policy_nothing_is_refused_but_what_is_no_ask(tmp_path: Path) -> None:
    bench = Bench(tmp_path, None, plan(noise="simulated"))
    assert bench.say()["up"]
    refused(bench, "another federation", *bench.ask(about={"federation": "e" * 32}))
    assert "the plan cannot be read" in bench.refusal(text=b"{")


# ---- limits that count what was done ----------------------------------------------------------


def many(bench: Bench, times: int, **about: Any) -> list[str]:
    """Asks for as many different trainings; why each was refused, if it was."""
    model, found = codec.decode(bench.bodies()[1])["model"], []
    for number in range(times):
        down = {"model": model, "fault": 10 + number}
        found.append(bench.say(about={"ask": number, **about}, down=down)["why"])
    return found


def test_rounds_count_answers_and_not_what_a_header_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(POLICY, rounds=2), plan(rounds=2))
    *first, third = many(bench, 3, round=1)
    assert first == ["", ""] and "2 answers to `train` of this run, but `rounds` is 2" in third
    bench.restart()
    assert all("`rounds` is 2" in why for why in many(bench, 2, round=2))
    assert many(bench, 1, round=1, run="1" * 32) == [""]


def test_answers_count_in_a_run_and_in_all_of_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(POLICY, answers=2, answers_in_all=3))
    assert ["`answers` is 2" in why for why in many(bench, 3)] == [False, False, True]
    bench.restart()
    found = many(bench, 2, run="1" * 32)
    assert found[0] == "" and "3 answers to all runs, but `answers_in_all` is 3" in found[1]
    assert "`answers_in_all` is 3" in many(bench, 1, run="2" * 32)[0]
    assert bench.say(about={"step": "hello"})["up"]  # which tells of no image


def test_passes_over_the_images_count_whatever_they_are_for(tmp_path: Path) -> None:
    """The method goes over all images once, and says nothing of it anywhere."""
    bench = Bench(tmp_path, replace(POLICY, epochs=2))
    *first, third = many(bench, 3)
    assert first == ["", ""] and "more than 2 times in round 1, but `epochs` is 2" in third
    assert [entry.get("passes") for entry in bench.site.log.entries()] == [1.0, 1.0, None]
    bench.restart()
    assert "`epochs` is 2" in many(bench, 1, ask=9)[0]
    assert many(bench, 1, round=2) == [""]


def test_the_policy_is_read_at_every_ask_and_its_digest_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.yaml())
    bench = Bench(tmp_path / "kept", path)
    assert bench.say()["up"]
    assert bench.last["policy"] == store.digest_of(path.read_bytes())
    path.write_text(replace(POLICY, rounds=1).yaml())
    assert "has rounds=5, but `rounds` is 1" in bench.refusal(about={"round": 2})
    assert bench.last["policy"] == store.digest_of(path.read_bytes())
    path.write_text("rounds: [")
    for step in ("train", "hello"):
        told = bench.refusal(about={"round": 3, "step": step})
        assert told == "invalid policy at the site: its log has the details"
        assert str(path) in bench.last["why"] and "policy" not in bench.last
    path.write_text("epochs: 0\n")
    assert "invalid policy" in bench.refusal(about={"round": 3})
    assert f"invalid policy {path}: policy.epochs" in bench.last["why"]
    path.unlink()
    assert bench.refusal(about={"round": 3}) and "No such file" in bench.last["why"]
    path.write_text(POLICY.yaml())
    assert bench.say(about={"round": 4})["up"] and len(bench.opened) == 1


# ---- the first model --------------------------------------------------------------------------


def other(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value + 0.01 for key, value in model.items()}


def test_a_site_that_may_not_join_late_says_so_when_it_is_greeted(bench: Bench) -> None:
    hello = {"step": "hello", "run": "2" * 32}
    assert bench.say(about={**hello, "round": 1})["up"]["examples"]
    assert "refuses to join the run in round 2" in bench.refusal(about={**hello, "round": 2})
    bench.site.policy = replace(POLICY, join_late=True)
    assert bench.say(about={**hello, "round": 2})["up"]["examples"]


def test_a_site_that_began_goes_on_with_any_model_also_after_a_kill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClientRuntime, "perform", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.say()
    monkeypatch.undo()
    bench.restart()
    model = codec.decode(bench.bodies()[1])["model"]
    later = {"model": other(model), "fault": 0}
    assert bench.say(about={"round": 2}, down=later)["up"]
    assert "`join_late` is false" in bench.refusal(about={"round": 2, "run": "1" * 32}, down=later)
    # Another model under the name of the same run begins anew.
    bench.recipe = plan(encoder={"name": "cnn-small", "width": 8, "out": 16})
    model = codec.decode(bench.bodies()[1])["model"]
    down = {"model": other(model), "fault": 0}
    assert "must be the one that the plan begins with" in bench.refusal(down=down)


def test_a_plan_starts_from_given_weights_that_the_policy_names(tmp_path: Path) -> None:
    method = PLAN.method_for((12, 12, 3), 0)
    file = tmp_path / "weights.safetensors"
    given = {k: v + 0.1 for k, v in method.blueprint["encoder"].state_dict().items()}
    save_file({key: value.contiguous() for key, value in given.items()}, file)
    init = Init(str(file)).resolved()
    recipe = plan(init={"digest": init.digest})
    started = replace(method, initial=init).blueprint.shared()
    right, wrong = ({"model": one, "fault": 0} for one in (started, other(started)))
    bench = Bench(tmp_path / "none", POLICY, recipe)
    assert f"starts from the weights {init.digest}, but `initial_weights`" in bench.refusal()
    for number, name in enumerate((init.digest, str(file))):
        policy = replace(POLICY, initial_weights=("0" * 64, name))
        bench = Bench(tmp_path / str(number), policy, recipe)
        for down in (wrong, {"model": method.blueprint.shared(), "fault": 0}):
            assert "refuses this model" in bench.refusal(down=down)
        assert bench.say(down=right)["up"]


# ---- faults ----------------------------------------------------------------------------------


def test_the_server_does_not_learn_the_names_of_a_site_s_files(tmp_path: Path) -> None:
    def unreadable(recipe: Recipe, folder: Path, client: int) -> ClientRuntime:
        raise DataError("cannot read /data/jones_mary_1961.png: it is no image")

    bench = Bench(tmp_path / "site", open_host=unreadable)
    assert bench.refusal() == "DataError at the site: its log has the details"
    assert "jones_mary" in bench.last["why"] and "jones_mary" in bench.notes[-1]

    def unset(recipe: Recipe, folder: Path, client: int) -> ClientRuntime:
        raise ConfigError("data.label_column=x: no such column, only jones_mary")

    bench = Bench(tmp_path / "settings", open_host=unset)
    assert bench.refusal() == "DataError at the site: its log has the details"
    own = Bench(tmp_path / "rehearsal", None, open_host=unreadable)
    assert "jones_mary" in own.refusal()  # here the server has the files itself


def test_a_bug_of_a_method_is_the_site_s_secret_and_does_not_end_it(bench: Bench) -> None:
    model = codec.decode(bench.bodies()[1])["model"]
    why = bench.refusal(down={"model": model, "fault": 2})
    assert why == "ZeroDivisionError at the site: its log has the details"
    assert bench.last["why"] == "ZeroDivisionError: a bug of the method"
    assert any("Traceback" in note for note in bench.notes)
    assert bench.say()["up"]


def test_a_client_that_declines_says_why_and_is_asked_anew_next_time(bench: Bench) -> None:
    model = codec.decode(bench.bodies()[1])["model"]
    for _ in range(2):
        got = bench.say(down={"model": model, "fault": 1})
        assert got["up"] is None and got["why"] == "it does not want to"
        assert bench.last["outcome"] == "declined" and bench.last["why"] == got["why"]
    assert not bench.site.log.releases()


@pytest.mark.parametrize(
    "parts",
    [
        {"down": {}},
        {"down": {"model": 3.0, "fault": 0}},
        {"down": []},
        {"down": "text"},
        {"own": []},
        {"own": "text"},
        {"own": {3: 4}},
        {"own": {"more": 1.0}},
        {"state": "text"},
        {"state": {"file": 5, "digest": "0"}},
        {"state": {"file": f"{CLIENT}/0.safetensors"}},
        {"state": {"file": f"{CLIENT}/0.safetensors", "digest": "0", "more": 1}},
        {"keep": [5]},
        {"about": {"step": "__init__"}},
        {"about": {"step": "pull"}},
        {"about": {"step": "../train"}},
        {"about": {"step": "\x1b[2J"}},
        {"about": {"step": "mask_keys"}},
    ],
)
def test_an_ask_that_the_server_signed_but_nobody_can_do_is_refused(
    bench: Bench, parts: dict[str, Any]
) -> None:
    why = bench.refusal(**parts)
    assert why.isprintable() and len(why) < 1100
    assert bench.say()["up"]


@pytest.mark.parametrize("body", [b"", b"junk", codec.encode([]), codec.encode({})])
def test_facts_that_are_none_are_refused(bench: Bench, body: bytes) -> None:
    for step in ("train", "finish"):
        bodies = [*bench.bodies()[:2], body]
        digests = [store.digest_of(one) for one in bodies]
        got = bench.answer(seal("ask", bench.header(step=step), digests, SERVER), bodies)
        assert got["up"] is None and bench.last["outcome"] == "refused"


def test_a_frame_with_a_header_beyond_all_bounds_is_not_unpacked(bench: Bench) -> None:
    bomb = (2**25).to_bytes(8, "little") + b" " * 100
    bodies = [bench.bodies()[0], bomb, bench.bodies()[2]]
    digests = [store.digest_of(one) for one in bodies]
    got = bench.answer(seal("ask", bench.header(step="train"), digests, SERVER), bodies)
    assert got["up"] is None and "header of 33,554,432 bytes is too large" in got["why"]


def test_nothing_leaves_by_a_log_that_was_tampered_with(bench: Bench) -> None:
    bench.say()
    path = bench.site.log.path
    path.write_text(path.read_text().replace('"round": 1', '"round": 2'))
    bench.restart()
    for step in ("train", "hello"):
        with pytest.raises(StoreError, match="tampered"):
            bench.site.answer(*bench.ask(about={"step": step}))


def test_nothing_leaves_that_cannot_be_written_down(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(entry: Any) -> None:
        raise StoreError("cannot write: no space left")

    monkeypatch.setattr(bench.site.log, "append", full)
    for step in ("train", "hello", "none_of_it"):
        with pytest.raises(StoreError):
            bench.site.answer(*bench.ask(about={"step": step}))


def test_a_strange_step_cannot_write_to_a_terminal(bench: Bench) -> None:
    bench.refusal(about={"step": "a\x1b[31m\nb"})
    assert all(note.isprintable() for note in bench.notes)


# ---- hello and finish ------------------------------------------------------------------------


def test_a_greeting_says_how_many_images_there_are(bench: Bench) -> None:
    got = bench.say(about={"step": "hello"}, down={})
    assert got["up"]["examples"] == 12 and got["why"] == ""
    assert bench.last["outcome"] == "greeted" and bench.last["outcome"] not in LEFT
    assert bench.last["told"] == got["up"]
    assert bench.say(about={"step": "hello"}, down={})["up"] == got["up"]


def test_the_end_hands_on_the_model_and_what_the_client_kept(bench: Bench) -> None:
    state = bench.say()["state"]
    sent = {"model": {"x": torch.ones(2)}, "statistics": {}}
    got = bench.say(about={"step": "finish", "round": 0}, down=sent, state=state)
    assert got["up"] == {} and bench.last["outcome"] == "finished"
    recipe, host, folder, told, kept = bench.finished[0]
    assert recipe.digest == PLAN.digest and isinstance(host, ClientRuntime)
    assert folder == bench.folder / "runs" / RUN
    assert torch.equal(told["model"]["x"], torch.ones(2)) and kept["count"] == 1


def test_a_fault_at_the_end_is_told(bench: Bench) -> None:
    def broken(*_: Any) -> None:
        raise HarmoniumError("no room in /home/jones")

    bench.site.finish = broken
    sent = {"model": {}, "statistics": {}}
    why = bench.refusal(about={"step": "finish"}, down=sent)
    assert why == "HarmoniumError at the site: its log has the details"


def test_keys_are_in_no_representation() -> None:
    identity = Identity(FEDERATION, NUMBER, OWN, SERVER.public_key())
    assert "key" not in repr(identity).lower().replace("number", "")
    assert asdict(StateRef("1/0.safetensors", "0")) == {"file": "1/0.safetensors", "digest": "0"}


# ---- counts on labelled images -----------------------------------------------------------------


def test_counts_leave_by_the_policy_alone(tmp_path: Path) -> None:
    allowed = replace(POLICY, evaluation=True, evaluation_least=1)
    bench = Bench(tmp_path)
    evaluate = {"sites": "probe", "sites_least": 1}
    bench.recipe = Recipe.from_tree({**PLAN.tree(), "method": "fedavg", "evaluate": evaluate})
    down = {"model": bench.recipe.method_for((12, 12, 3), 0).blueprint.shared()}
    ready: dict[str, Any] = {"about": {"step": "can_evaluate"}, "down": {}}
    assert "`evaluation` is false" in bench.refusal(**ready)
    assert bench.say(down=down)["up"] is not None  # it trains all the same
    bench.site.policy = replace(allowed, evaluation_least=2)
    assert "`evaluation_least` is 2" in bench.refusal(**ready)
    bench.site.policy = allowed
    assert bench.say(**ready)["up"] == {}
    sent = bench.say(about={"step": "measure_counts"}, down=down)["up"]
    assert int(sent["confusion"].sum()) == sent["images"] > 0
    kinds = {name: about["kind"] for name, about in bench.last["up"].items()}
    assert kinds == dict.fromkeys(("confusion", "scores"), "statistic") | dict.fromkeys(
        ("images", "seen"), "scalar"
    )
