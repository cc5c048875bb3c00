"""One site: it verifies a sealed ask, answers it under its own seal, and logs what it sent.

An ask must be signed by the server, addressed to this site, and new. The policy is read at every
ask, and the plan must be within it before any image is read. The first model of a run must be the
plan's own, later ones must be plausible, and the work must be within what remains of the policy's
limits, according to the log. The releases of an answer are counted and logged before it is sent.
The last answer is kept: if the server repeats the ask, because it was killed or the answer was
lost, the same bytes are sent and no new noise is drawn.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core import codec, files
from harmonium.core.errors import (
    ConfigError,
    DataError,
    HarmoniumError,
    PolicyRefusal,
    StoreError,
    UnknownSetting,
    WireError,
    counted,
    one_line,
)
from harmonium.core.notes import Note
from harmonium.core.types import ClientId
from harmonium.engines.protocol import Speaker, protocol_fault, version_hint
from harmonium.engines.runtime import ClientRuntime, StateRef, Task
from harmonium.engines.seal import seal, unseal
from harmonium.federation.wire import STEPS, Exchange
from harmonium.learning.client import Reading, counted_reading
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import size_of
from harmonium.sites import limits, received
from harmonium.sites.log import SiteLog
from harmonium.sites.plan import method_of, public_digest
from harmonium.sites.policy import InvalidPolicy, Policy
from harmonium.sites.settings import LimitSettings
from harmonium.storage import state_store

HEADER: Mapping[str, type] = {  # the fields of an ask's header
    "federation": str,
    "site": int,
    "run": str,
    "plan": str,
    "round": int,
    "ask": int,
    "step": str,
    "client": int,
    "nonce": str,
}
SHOWN_TO_SERVER = (PolicyRefusal, WireError, ConfigError)  # about the plan; others may name files
_MOST = 2**31  # bound of the numbers in a header
_STATE_FILE = re.compile(r"\d+/[0-9][\w-]*\.safetensors")  # a server must not name other files
_RANDOM_NAME = re.compile(r"[0-9a-f]{32}")  # runs and nonces


@dataclass(frozen=True)
class Identity:
    """The identity of a site, and of the server that it answers."""

    federation: str
    number: int  # the site's, in its federation
    key: ec.EllipticCurvePrivateKey = field(repr=False)  # signs answers
    server: ec.EllipticCurvePublicKey = field(repr=False)  # verifies asks


class _AnotherPlan(WireError):
    """A plan does not have the digest that its ask names: it is read differently here."""


@dataclass
class _OpenPlan:
    """A plan that the policy accepted, with the runtime that performs it."""

    tree: Any  # the plan as it was received
    recipe: Recipe
    runtime: ClientRuntime
    policy: Policy | None  # that accepted it last
    first_model: str = ""  # digest of the model that it begins with; empty: not computed yet


@dataclass
class Site:
    """Answers the asks to one client."""

    identity: Identity
    folder: Path  # the site's own: its log, and its files of each run
    open_runtime: Callable[[Recipe, Path, ClientId], ClientRuntime]  # for a plan, in a run's folder
    policy: Policy | Path | None = None  # or its file; none: a rehearsal on the server's machine
    finish: Callable[[Recipe, ClientRuntime, Path, Mapping[str, Any], Mapping[str, Any]], None] = (
        lambda *_: None  # called with plan, runtime, run's folder, server's message, client's state
    )
    note: Callable[[str], None] = lambda text: None
    limits: LimitSettings = field(default_factory=LimitSettings)
    record: Callable[[Mapping[str, Any]], None] = lambda entry: None  # called with the log's entry
    _plans: dict[str, _OpenPlan] = field(default_factory=dict)
    _seen: set[str] | None = None  # nonces in the log; none: not read yet

    def __post_init__(self) -> None:
        self.log = SiteLog(self.folder / "log.jsonl")

    def answer(self, sealed: bytes, bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
        """The sealed answer to an ask; an ask that is not for this site, or not new, is refused."""
        header = self._verified_header(sealed, bodies)
        began, reading = time.monotonic(), None
        entry = {key: header[key] for key in ("run", "plan", "round", "ask", "step", "nonce")}
        entry |= {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            policy, digest = self._read_policy()
            entry |= {"policy": digest} if digest else {}
            with counted_reading() as reading, limits.within_memory(self.limits):
                tree, record = self._respond(header, bodies, policy, reading)
        except Exception as error:  # the site goes on, whatever fails
            tree, record = self._refusal(header, error)
        if reading is not None and reading.passes:
            entry |= {"passes": round(reading.passes, 3)}
        entry |= record | {"seconds": round(time.monotonic() - began, 3)}
        self.log.append(entry)
        self.record(entry)
        body = tree if isinstance(tree, bytes) else codec.encode(tree)
        if record["outcome"] == "sent":
            self._keep(header, bodies, body)
            size = size_of(sum(field["bytes"] for field in record["up"].values()))
            self.note(f"round {header['round']}, {header['step']}: sent {size}")
        about = {key: header[key] for key in HEADER} | Speaker(time=time.time()).stated()
        return seal("answer", about, [files.digest_of(body)], self.identity.key), [body]

    def _refusal(
        self, header: Mapping[str, Any], error: Exception
    ) -> tuple[codec.Tree, dict[str, Any]]:
        """The answer with the reason of a refusal, and the log's record of it.

        The server learns the reason only if it is about the plan: others may name files.
        """
        kind, why = type(error).__name__, one_line(error)
        if not isinstance(error, HarmoniumError):
            why = f"{kind}: {why}"
            self.note(Note(traceback.format_exc(), "debug"))
        brief = why
        if not isinstance(error, SHOWN_TO_SERVER):
            kind = "invalid policy" if isinstance(error, InvalidPolicy) else kind
            brief = f"{kind} at the site: its log has the details"
        self.note(Note(f"refused: {why}", "warning", f"refused: {brief}"))
        shown = why if self.policy is None else brief  # without a policy it is a rehearsal
        tree = {"client": header["client"], "up": None, "why": shown}
        return tree, {"outcome": "refused", "why": why}

    def _verified_header(self, sealed: bytes, bodies: list[bytes]) -> dict[str, Any]:
        """The header of an ask that the server signed for this site and that is new."""
        header = unseal("ask", sealed, bodies, self.identity.server)
        if missing := [key for key in HEADER if key not in header]:
            raise WireError(f"request is missing fields: {', '.join(missing)}")
        if unknown := [key for key in header if key not in HEADER]:
            raise WireError(f"request has unknown fields: {one_line(', '.join(unknown))}")
        if len(bodies) != 3:
            raise WireError(f"request has {counted(len(bodies), 'part')} in place of 3")
        for key, kind in HEADER.items():
            if type(header[key]) is not kind or (kind is int and not 0 <= header[key] < _MOST):
                raise WireError(f"request has an invalid field: {key}")
        for key in ("run", "nonce"):  # a run is also the name of a folder
            if not _RANDOM_NAME.fullmatch(header[key]):
                raise WireError(f"request has an invalid field: {key}")
        expected = {"federation": self.identity.federation, "site": self.identity.number}
        for key, value in expected.items():
            if header[key] != value:
                raise WireError(f"the ask is for another {key}")
        if self._seen is None:
            self._seen = {str(entry.get("nonce")) for entry in self.log.entries()}
        if header["nonce"] in self._seen:
            raise WireError("the ask was already answered: it is a replay")
        self._seen.add(header["nonce"])
        return header

    def _read_policy(self) -> tuple[Policy | None, str]:
        """The policy as it is now, and the digest of its file if it has one."""
        if not isinstance(self.policy, Path):
            return self.policy, ""
        try:
            return Policy.read_with_digest(self.policy)
        except ConfigError as error:  # the last valid policy may allow more than the site wants now
            raise InvalidPolicy(f"{error}; the site answers again once it is corrected") from None

    def _respond(
        self,
        header: Mapping[str, Any],
        bodies: list[bytes],
        policy: Policy | None,
        reading: Reading,
    ) -> tuple[codec.Tree | bytes, dict[str, Any]]:
        """The content of the answer, and the log's record of it."""
        for body in bodies[1:]:  # the first is the plan, as text
            codec.LIMITS.check(body)
        server = Speaker.of(codec.decode(bodies[2]))
        if fault := protocol_fault(server, Speaker()):
            raise WireError(fault)
        try:
            plan = self._open(header, bodies[0], policy)
        except (UnknownSetting, _AnotherPlan) as error:
            raise type(error)(f"{error}{version_hint(server, Speaker())}") from None
        if header["round"] > plan.recipe.rounds:  # else a policy's `rounds` would limit nothing
            raise WireError(f"the ask is for round {header['round']} of {plan.recipe.rounds}")
        if header["step"] == "hello":
            return self._answer_hello(header, plan, policy)
        if header["step"] == "finish":
            return self._answer_finish(header, bodies, plan)
        masked = plan.runtime.masks is not None
        declared = plan.runtime.method.exchanges().get(header["step"])
        first_step = header["step"] == STEPS[0]  # keys whose shares were dealt cannot be used again
        if not first_step and (stored := self._stored(header, bodies)) is not None:
            up = _sizes(codec.decode(stored)["up"], declared, masked)
            return stored, {"outcome": "stored answer sent again", "up": up}
        task = self._task(header, bodies, plan.runtime)
        if policy is not None and header["step"] not in STEPS:
            policy.check_evaluation(plan.recipe, header["step"])
            self._apply_limits(header, policy, reading)
            if declared is not None:
                self._check_received(header, plan, declared, bodies[1], task)
        limits.check_disk(self.limits, self.folder)
        with limits.within_time(self.limits):
            result = plan.runtime.perform(task, bodies[1])
        if result["up"] is None:
            return result, {"outcome": "declined", "why": result["why"]}
        releases = result.get("releases", [])
        if policy is not None:
            policy.check_release(self.log.releases(), releases)
        return result, {
            "outcome": "sent",
            "up": _sizes(result["up"], declared, masked),
            "down": codec.payload_bytes(codec.decode(bodies[1])),
            "releases": releases,
        }

    def _answer_hello(
        self, header: Mapping[str, Any], plan: _OpenPlan, policy: Policy | None
    ) -> tuple[codec.Tree, dict[str, Any]]:
        """The answer to a handshake: the number of images, and the digest of the public ones."""
        self._check_late(header, policy)
        recipe, examples = plan.recipe, len(plan.runtime.indices[header["client"]])
        up = {"examples": examples, "public": public_digest(plan.runtime.public)}
        self.note(
            f"run {header['run'][:8]}: {recipe.method.name} with {recipe.objective.name}, "
            f"{counted(recipe.rounds, 'round')}, {counted(examples, 'image')}, "
            f"plan {header['plan']}"
        )
        return {"up": up, "why": ""}, {"outcome": "greeted", "told": up}

    def _answer_finish(
        self, header: Mapping[str, Any], bodies: list[bytes], plan: _OpenPlan
    ) -> tuple[codec.Tree, dict[str, Any]]:
        """Pass on the final model, and delete the secrets of the run."""
        runtime = plan.runtime
        state = runtime.read_state(self._task(header, bodies, runtime).state)
        self.finish(plan.recipe, runtime, self._run(header), codec.decode(bodies[1]), state)
        runtime.forget_masks(header["client"])
        return {"up": {}, "why": ""}, {"outcome": "finished"}

    def _apply_limits(self, header: Mapping[str, Any], policy: Policy, reading: Reading) -> None:
        """Refuse an answer beyond the policy's limits, and bound its passes over images."""
        turn = (header["run"], header["round"], header["step"])
        reading.most = policy.check_answer(self.log.entries, *turn)
        reading.beyond = (
            "the site's policy refuses this task: it passes over the images more than "
            f"{policy.epochs} times in round {header['round']}, but `epochs` is {policy.epochs}"
        )

    def _open(self, header: Mapping[str, Any], plan: bytes, policy: Policy | None) -> _OpenPlan:
        """A plan that the policy accepts; images are read once for a plan and run."""
        digest, client = header["plan"], header["client"]
        name = f"{header['run']}/{client}/{digest}/{files.digest_of(plan)}"
        if (known := self._plans.get(name)) is not None:
            if policy is not None and policy != known.policy:  # the file has changed
                policy.check_tree(known.tree)
                images = len(known.runtime.indices[client])
                policy.check_plan(known.recipe, known.runtime.method, images)
                known.policy = policy
            return known
        try:
            tree = json.loads(plan)
        except (ValueError, RecursionError):
            raise WireError("the plan cannot be read") from None
        recipe = Recipe.from_tree(tree) if policy is None else policy.open_plan(tree)
        if recipe.digest != digest:
            raise _AnotherPlan("the plan is not the one that the ask names")
        if client >= recipe.clients:
            raise WireError(
                f"the ask names client {client}, but its plan has {recipe.clients} clients: a site "
                "that was added after a run began takes part in the next one"
            )
        if policy is not None:  # before any image is read
            policy.check_plan(recipe, method_of(recipe))
        try:
            runtime = self.open_runtime(recipe, self._run(header), client)
        except ConfigError as error:  # about the site's own settings, which the server must not see
            raise DataError(str(error)) from None
        if policy is not None:
            policy.check_plan(recipe, runtime.method, len(runtime.indices[client]))
        opened = _OpenPlan(tree, recipe, runtime, policy)
        self._plans = {name: opened}  # one at a time: the images may fill the memory
        return opened

    def _check_late(self, header: Mapping[str, Any], policy: Policy | None) -> None:
        """Refuse to join a run after round 1, unless the policy allows it."""
        began = (self._run(header) / "began.txt").is_file()
        if policy is not None and not policy.join_late and header["round"] > 1 and not began:
            raise PolicyRefusal(
                f"the site's policy refuses to join the run in round {header['round']}: its first "
                "model could not be compared with the one that the plan begins with, and "
                "`join_late` is false"
            )

    def _check_received(
        self,
        header: Mapping[str, Any],
        plan: _OpenPlan,
        declared: Exchange,
        broadcast: bytes,
        task: Task,
    ) -> None:
        """Refuse implausible values, and a first model that is not the plan's own.

        A correct first model is recorded before it is trained, so that a site that is killed
        meanwhile does not count as late.
        """
        method, policy, recipe = plan.runtime.method, plan.policy, plan.recipe
        down = {**codec.decode(broadcast), **task.down}
        received.check_plausible(method, declared, down)
        if policy is None or not received.brings_model(declared):
            return
        if not plan.first_model:
            initial = "" if recipe.init is None else recipe.init.digest
            plan.first_model = received.first_model_digest(method) + initial
        path = self._run(header) / "began.txt"
        if path.is_file() and path.read_text(encoding="ascii") == plan.first_model:
            return
        start = None
        if recipe.init is not None:
            start = received.allowed_start(recipe.init.digest, policy.initial_weights)
        why = received.first_model_fault(method, declared, down, start)
        if not why:
            files.write_atomic(path, plan.first_model.encode(), private=True)
        elif header["round"] < 2:
            raise PolicyRefusal(
                "the site's policy refuses this model: the first of a run must be the one that "
                f"the plan begins with, and `{header['step']}` brings one that {why}"
            )
        elif not policy.join_late:
            raise PolicyRefusal(
                "the site's policy refuses this model: it is the first of the run at this site, "
                f"in round {header['round']}, where it cannot be compared with the one that "
                "the plan begins with, and `join_late` is false"
            )

    def _task(self, header: Mapping[str, Any], bodies: list[bytes], runtime: ClientRuntime) -> Task:
        """The task of an ask; state versions that the server no longer needs are deleted."""
        facts = codec.decode(bodies[2])
        state, keep = facts["state"], [str(file) for file in facts["keep"]]
        reference = StateRef(**state) if state else None
        names = [*keep, *([reference.file] if reference else [])]
        folder = str(header["client"])
        for name in names:
            if not _STATE_FILE.fullmatch(name) or name.partition("/")[0] != folder:
                raise WireError(f"the ask names `{name}`, which is not a state of this client")
        self._forget(runtime.folder / folder, {name.partition("/")[2] for name in names})
        return Task(
            header["step"],
            header["client"],
            header["round"],
            header["ask"],
            facts["down"],
            reference,
        )

    def _forget(self, folder: Path, needed: set[str]) -> None:
        """Delete state versions that the server no longer needs.

        Versions newer than those in `needed` stay: a delayed ask must not delete them.
        """
        newest = max(needed, default="")
        for path in folder.glob("[0-9]*.safetensors"):
            if path.name < newest and path.name not in needed:
                path.unlink(missing_ok=True)
        state_store.remove_unused_tensors(folder)

    def _run(self, header: Mapping[str, Any]) -> Path:
        return self.folder / "runs" / str(header["run"])

    def _keep(self, header: Mapping[str, Any], bodies: list[bytes], body: bytes) -> None:
        """Keep an answer, to send it again if the server repeats the ask."""
        name = _ask_digest(header, bodies)
        path = self._run(header) / f"answer-{header['client']}.safetensors"
        digest = files.write_atomic(path, body, private=True)
        text = json.dumps({"answer": digest, "to": name})
        files.write_atomic(path.with_suffix(".json"), text.encode(), private=True)

    def _stored(self, header: Mapping[str, Any], bodies: list[bytes]) -> bytes | None:
        """The kept answer, if it belongs to this ask; none if it is damaged."""
        path = self._run(header) / f"answer-{header['client']}.safetensors"
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if record["to"] != _ask_digest(header, bodies):
                return None
            return files.read_checked(path, record["answer"])
        except (OSError, ValueError, TypeError, LookupError, StoreError):
            return None


def _ask_digest(header: Mapping[str, Any], bodies: list[bytes]) -> str:
    """A digest of an ask without its nonce and the list of states to keep."""
    about = {key: header[key] for key in HEADER if key != "nonce"}
    facts = codec.decode(bodies[2])
    own = codec.encode([facts["down"], facts["state"]])
    text = json.dumps([about, *map(files.digest_of, (*bodies[:2], own))], sort_keys=True)
    return files.digest_of(text.encode())


def _sizes(
    up: Mapping[str, Any], declared: Exchange | None, masked: bool
) -> dict[str, dict[str, Any]]:
    """Kind and bytes of each sent field; masked fields have a kind of their own."""
    prefix = "masked " if masked else ""
    kinds = {n: prefix + field.kind for n, field in declared.up.items()} if declared else {}
    return {
        name: {"kind": kinds.get(name, "keys of masks"), "bytes": codec.payload_bytes(value)}
        for name, value in up.items()
    }
