"""One site: a sealed ask comes in, a sealed answer goes out, and a line says what left.

Before anything else the ask must be signed by the server, for this site, and new. The policy is
read anew at every ask, and the plan must be within it before any image is read. The first model
of a run must be the plan's own, later ones must be sane, and the work must be within what the log
leaves of the policy's limits. What an answer releases is counted and written
down before it is sent. The answer is kept until the next one: when the server asks for the same
again, because it was killed or the answer was lost, the same bytes go out and no noise is drawn
anew.
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
    WireError,
    counted,
    one_line,
)
from harmonium.core.types import ClientId
from harmonium.engines.runtime import ClientRuntime, StateRef, Task
from harmonium.engines.seal import seal, unseal
from harmonium.federation.wire import STEPS, Exchange
from harmonium.learning.client import Reading, counted_reading
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import size_of
from harmonium.sites import received
from harmonium.sites.log import SiteLog
from harmonium.sites.plan import method_of, public_digest
from harmonium.sites.policy import Policy
from harmonium.storage import state_store

ABOUT: Mapping[str, type] = {  # what the header of an ask has
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
TOLD = (PolicyRefusal, WireError, ConfigError)  # about the plan; others may name a site's files
_MOST = 2**31  # of a number in a header
_FILE = re.compile(r"\d+/[0-9][\w-]*\.safetensors")  # a server must not name a site's other files
_ONCE = re.compile(r"[0-9a-f]{32}")  # runs and nonces


@dataclass(frozen=True)
class Identity:
    """Who a site is, and whom it listens to."""

    federation: str
    number: int  # the site's, in its federation
    key: ec.EllipticCurvePrivateKey = field(repr=False)  # signs answers
    server: ec.EllipticCurvePublicKey = field(repr=False)  # asks must be signed by its owner


@dataclass
class _Opened:
    """A plan that the policy let in, with what performs it."""

    tree: Any  # as it came
    recipe: Recipe
    host: ClientRuntime
    policy: Policy | None  # that let it in last
    seeded: str = ""  # digest of the model that it begins with, once somebody asked


@dataclass
class Site:
    """What answers for one client."""

    identity: Identity
    folder: Path  # the site's own: its log, and what it keeps of each run
    open_host: Callable[[Recipe, Path, ClientId], ClientRuntime]  # for a plan, in a run's folder
    policy: Policy | Path | None = (
        None  # or its file; none: a rehearsal on the server's own machine
    )
    finish: Callable[[Recipe, ClientRuntime, Path, Mapping[str, Any], Mapping[str, Any]], None] = (
        lambda *_: None  # told the plan, the run's folder, what the server said, what was kept
    )
    note: Callable[[str], None] = lambda text: None
    _hosts: dict[str, _Opened] = field(default_factory=dict)
    _seen: set[str] | None = None  # nonces of the log, once it was read

    def __post_init__(self) -> None:
        self.log = SiteLog(self.folder / "log.jsonl")

    def answer(self, sealed: bytes, bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
        """The answer to an ask; one that is not for this site, or not new, is refused."""
        header = self._opened(sealed, bodies)
        began, reading = time.monotonic(), None
        entry = {key: header[key] for key in ("run", "plan", "round", "ask", "step", "nonce")}
        entry |= {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            policy, digest = self._policy()
            entry |= {"policy": digest} if digest else {}
            with counted_reading() as reading:
                tree, more = self._answered(header, bodies, policy, reading)
        except Exception as error:  # whatever an ask breaks, the site goes on
            kind, why = type(error).__name__, one_line(error)
            if not isinstance(error, HarmoniumError):
                why = f"{kind}: {why}"
                self.note(traceback.format_exc())
            private = self.policy is not None and not isinstance(error, TOLD)
            told = f"{kind} at the site, whose log says more" if private else why
            tree = {"client": header["client"], "up": None, "why": told}
            more = {"outcome": "refused", "why": why}
            self.note(f"refused: {why}")
        if reading is not None and reading.passes:
            entry |= {"passes": round(reading.passes, 3)}
        self.log.append({**entry, **more, "seconds": round(time.monotonic() - began, 3)})
        body = tree if isinstance(tree, bytes) else codec.encode(tree)
        if more["outcome"] == "sent":
            self._keep(header, bodies, body)
            size = size_of(sum(about["bytes"] for about in more["up"].values()))
            self.note(f"round {header['round']}, {header['step']}: sent {size}")
        about = {key: header[key] for key in ABOUT}
        return seal("answer", about, [files.digest_of(body)], self.identity.key), [body]

    def _opened(self, sealed: bytes, bodies: list[bytes]) -> dict[str, Any]:
        """The header of an ask that is the server's, for this site, and new."""
        header = unseal("ask", sealed, bodies, self.identity.server)
        if set(header) != set(ABOUT) or len(bodies) != 3:
            raise WireError("the ask lacks what an ask has")
        for key, kind in ABOUT.items():
            if type(header[key]) is not kind or (kind is int and not 0 <= header[key] < _MOST):
                raise WireError(f"the ask has a {key} that is none")
        for key in ("run", "nonce"):  # a run is a folder's name as well
            if not _ONCE.fullmatch(header[key]):
                raise WireError(f"the ask has a {key} that is none")
        mine = {"federation": self.identity.federation, "site": self.identity.number}
        for key, wanted in mine.items():
            if header[key] != wanted:
                raise WireError(f"the ask is for another {key}")
        if self._seen is None:
            self._seen = {str(entry.get("nonce")) for entry in self.log.entries()}
        if header["nonce"] in self._seen:
            raise WireError("the ask was answered before: it is a replay")
        self._seen.add(header["nonce"])
        return header

    def _policy(self) -> tuple[Policy | None, str]:
        """The policy as it is now, and the digest of its file if it has one."""
        if not isinstance(self.policy, Path):
            return self.policy, ""
        try:
            return Policy.read_with_digest(self.policy)
        except ConfigError as error:  # an old policy is none that the site still wants
            raise DataError(f"nothing is answered until the policy can be read: {error}") from None

    def _answered(
        self,
        header: Mapping[str, Any],
        bodies: list[bytes],
        policy: Policy | None,
        reading: Reading,
    ) -> tuple[codec.Tree | bytes, dict[str, Any]]:
        """What to say, and what to write down about it."""
        for body in bodies[1:]:  # the first is the plan, as text
            codec.LIMITS.check(body)
        opened = self._open(header, bodies[0], policy)
        recipe, host = opened.recipe, opened.host
        folder = self._run(header)
        if header["round"] > recipe.rounds:  # else a policy's rounds would bound nothing
            raise WireError(f"the ask is for round {header['round']} of {recipe.rounds}")
        if header["step"] == "hello":
            self._check_late(header, policy)
            examples = len(host.indices[header["client"]])
            found = {"examples": examples, "public": public_digest(host.public)}
            what = f"{recipe.method.name} with {recipe.objective.name}"
            pictures = counted(examples, "image")
            rounds = counted(recipe.rounds, "round")
            self.note(
                f"run {header['run'][:8]}: {what}, {rounds}, {pictures}, plan {header['plan']}"
            )
            return {"up": found, "why": ""}, {"outcome": "greeted", "told": found}
        if header["step"] == "finish":
            kept = host.read_state(self._task(header, bodies, host).state)
            self.finish(recipe, host, folder, codec.decode(bodies[1]), kept)
            host.forget_masks(header["client"])
            return {"up": {}, "why": ""}, {"outcome": "finished"}
        declared = host.method.exchanges().get(header["step"])
        anew = header["step"] == STEPS[0]  # keys whose shares were dealt already serve nobody
        if not anew and (stored := self._stored(header, bodies)) is not None:
            up = _sizes(codec.decode(stored)["up"], declared, host.masks is not None)
            return stored, {"outcome": "stored answer sent again", "up": up}
        task = self._task(header, bodies, host)
        if policy is not None and header["step"] not in STEPS:
            turn = (header["run"], header["round"], header["step"])
            reading.most = policy.check_answer(self.log.entries, *turn)
            reading.beyond = (
                "the site's policy refuses this task: it goes over the images more than "
                f"{policy.epochs} times in round {header['round']}, but `epochs` is {policy.epochs}"
            )
            if declared is not None:
                self._check_received(header, opened, declared, bodies[1], task)
        result = host.perform(task, bodies[1])
        if result["up"] is None:
            return result, {"outcome": "declined", "why": result["why"]}
        releases = result.get("releases", [])
        if policy is not None:
            policy.check_release(self.log.releases(), releases)
        return result, {
            "outcome": "sent",
            "up": _sizes(result["up"], declared, host.masks is not None),
            "down": codec.payload_bytes(codec.decode(bodies[1])),
            "releases": releases,
        }

    def _open(self, header: Mapping[str, Any], plan: bytes, policy: Policy | None) -> _Opened:
        """A plan that the policy lets in; images are read once a plan and run."""
        digest, client = header["plan"], header["client"]
        name = f"{header['run']}/{client}/{digest}/{files.digest_of(plan)}"
        if (held := self._hosts.get(name)) is not None:
            if policy is not None and policy != held.policy:  # its file has changed meanwhile
                policy.check_tree(held.tree)
                policy.check_plan(held.recipe, held.host.method, len(held.host.indices[client]))
                held.policy = policy
            return held
        try:
            tree = json.loads(plan)
        except (ValueError, RecursionError):
            raise WireError("the plan cannot be read") from None
        recipe = Recipe.from_tree(tree) if policy is None else policy.open_plan(tree)
        if recipe.digest != digest:
            raise WireError("the plan is not the one that the ask names")
        if client >= recipe.clients:
            raise WireError(
                f"the ask names client {client}, but its plan has {recipe.clients}: a site that "
                "was added after a run began takes part in the next one"
            )
        if policy is not None:  # before any image is read
            policy.check_plan(recipe, method_of(recipe))
        try:
            host = self.open_host(recipe, self._run(header), client)
        except ConfigError as error:  # of the site's own settings, which are not the server's
            raise DataError(str(error)) from None
        if policy is not None:
            policy.check_plan(recipe, host.method, len(host.indices[client]))
        opened = _Opened(tree, recipe, host, policy)
        self._hosts = {name: opened}  # one at a time: images may be many
        return opened

    def _check_late(self, header: Mapping[str, Any], policy: Policy | None) -> None:
        """Refuse to join a run after round 1 where the policy says so, before anything is asked."""
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
        opened: _Opened,
        declared: Exchange,
        broadcast: bytes,
        task: Task,
    ) -> None:
        """Refuse values that no training sends, and a first model that is not the plan's own.

        That the first model was the plan's is written down before it is trained, so that a kill
        meanwhile does not make the site a late one.
        """
        method, policy, recipe = opened.host.method, opened.policy, opened.recipe
        down = {**codec.decode(broadcast), **task.down}
        received.check_sane(method, declared, down)
        if policy is None or not received.brings_model(declared):
            return
        if not opened.seeded:
            given = "" if recipe.init is None else recipe.init.digest
            opened.seeded = received.digest_of_first(method) + given
        path = self._run(header) / "began.txt"
        if path.is_file() and path.read_text(encoding="ascii") == opened.seeded:
            return
        start = None
        if recipe.init is not None:
            start = received.start_of(recipe.init.digest, policy.initial_weights)
        why = received.fault_of_first(method, declared, down, start)
        if not why:
            files.write_atomic(path, opened.seeded.encode(), private=True)
        elif header["round"] < 2:
            raise PolicyRefusal(
                "the site's policy refuses this model: the first of a run must be the one that "
                f"the plan begins with, and `{header['step']}` brings one that {why}"
            )
        elif not policy.join_late:
            raise PolicyRefusal(
                "the site's policy refuses this model: it is the first that this site gets of the "
                f"run, in round {header['round']}, where it cannot be compared with the one that "
                "the plan begins with, and `join_late` is false"
            )

    def _task(self, header: Mapping[str, Any], bodies: list[bytes], host: ClientRuntime) -> Task:
        facts = codec.decode(bodies[2])
        state, keep = facts["state"], [str(file) for file in facts["keep"]]
        reference = StateRef(**state) if state else None
        names = [*keep, *([reference.file] if reference else [])]
        mine = str(header["client"])
        for name in names:
            if not _FILE.fullmatch(name) or name.partition("/")[0] != mine:
                raise WireError(f"the ask names `{name}`, which is no state of this client")
        self._forget(host.folder / mine, {name.partition("/")[2] for name in names})
        return Task(
            header["step"],
            header["client"],
            header["round"],
            header["ask"],
            facts["down"],
            reference,
        )

    def _forget(self, folder: Path, needed: set[str]) -> None:
        """Delete versions of the state that no commit of the server needs.

        Newer ones than it names stay: an ask that was held up on its way must not destroy them.
        """
        newest = max(needed, default="")
        for path in folder.glob("[0-9]*.safetensors"):
            if path.name < newest and path.name not in needed:
                path.unlink(missing_ok=True)
        state_store.tidy(folder)

    def _run(self, header: Mapping[str, Any]) -> Path:
        return self.folder / "runs" / str(header["run"])

    def _keep(self, header: Mapping[str, Any], bodies: list[bytes], body: bytes) -> None:
        name = _name(header, bodies)
        path = self._run(header) / f"answer-{header['client']}.safetensors"
        digest = files.write_atomic(path, body, private=True)
        text = json.dumps({"answer": digest, "to": name})
        files.write_atomic(path.with_suffix(".json"), text.encode(), private=True)

    def _stored(self, header: Mapping[str, Any], bodies: list[bytes]) -> bytes | None:
        """The last answer, if it was to this very ask; a damaged one is made anew."""
        path = self._run(header) / f"answer-{header['client']}.safetensors"
        try:
            held = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if held["to"] != _name(header, bodies):
                return None
            return files.read_checked(path, held["answer"])
        except (OSError, ValueError, TypeError, LookupError, StoreError):
            return None


def _name(header: Mapping[str, Any], bodies: list[bytes]) -> str:
    """What identifies an ask: all but its nonce, and which states to keep."""
    about = {key: header[key] for key in ABOUT if key != "nonce"}
    facts = codec.decode(bodies[2])
    own = codec.encode([facts["down"], facts["state"]])
    text = json.dumps([about, *map(files.digest_of, (*bodies[:2], own))], sort_keys=True)
    return files.digest_of(text.encode())


def _sizes(
    up: Mapping[str, Any], declared: Exchange | None, masked: bool
) -> dict[str, dict[str, Any]]:
    """What leaves, by field: its kind, whether under masks, and its bytes."""
    word = "masked " if masked else ""
    kinds = {name: word + one.kind for name, one in declared.up.items()} if declared else {}
    return {
        name: {"kind": kinds.get(name, "keys of masks"), "bytes": codec.payload_bytes(value)}
        for name, value in up.items()
    }
