"""Damaged and hostile answers at the server's door, for every method.

    python benchmarks/hostile.py [--methods fedavg ...] [--damaged 20000] [--signed 10000] [--json]
                                 [--runs FILE...] [--write docs/results/hostile.md]

Each method runs two rounds with four clients; its real answers are the material. `damaged`: the
sealed answer of a site whose bytes were flipped, cut, moved or replaced on the way. `signed`: lies
that an enrolled site signs with its own key, of fields and values (`harmonium.testing.lies`) and of
the frame around them. All of them are opened by the engine of real federations and counted by the
driver, with the plan's limits. Nothing may be accepted, nothing may end the server, and memory may
not grow by a gigabyte.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core import codec, files
from harmonium.core.errors import Diverged, NotEnoughReplies, WireError
from harmonium.engines.remote import RemoteEngine, RemoteSite, Waits, _PendingTask
from harmonium.engines.seal import seal
from harmonium.federation.driver import Reply
from harmonium.federation.filters import arrival
from harmonium.methods import methods
from harmonium.report.tables import markdown
from harmonium.testing import RecordedAsk, Trial, first_trial, lies
from stored import write_page

SMALL: dict[str, dict[str, Any]] = {  # so that many answers are many
    "fedca": {"method": {"name": "fedca", "align_epochs": 1, "size": 32}},
    "fedsc": {"objective": {"name": "spectral", "form": "fedsc", "out": 16, "hidden": 16}},
    "orchestra": {
        "method": {"name": "orchestra", "clusters": 4, "local_clusters": 3, "global_steps": 5}
    },
}
NAMES = sorted({*methods.table(), "fsimclr"} - {"centralised", "alone"})  # these have no clients
MOST = 2**30  # bytes that memory may grow by
KEY = ec.generate_private_key(ec.SECP384R1())
Sealed = tuple[bytes, list[bytes]]


class Door:
    """The answers of a method's trial, and a server that receives others in their place."""

    def __init__(self, name: str) -> None:
        """Run the trial."""
        self.trial: Trial = first_trial(name, **SMALL.get(name, {}))
        heard: dict[str, RecordedAsk] = {}
        for one in self.trial.recorded:
            if any(reply.up is not None for reply in one.replies):
                heard.setdefault(one.ask.step, one)
        self.heard = list(heard.values())
        member = RemoteSite("site", 0, 1, KEY.public_key())
        examples = self.trial.server.examples
        self.engine = RemoteEngine(
            None,  # type: ignore[arg-type]  # nothing is sent
            dict.fromkeys(examples, member),
            KEY,
            {"federation": "f" * 32, "run": "0" * 32, "plan": "1" * 64},
            b"",
            Waits(),
            limits=lambda step, client: arrival.limits(
                self.trial.method, step, examples[client], len(examples)
            ),
        )

    def task(self, heard: RecordedAsk, client: int) -> _PendingTask:
        """The pending task of a site that was asked."""
        header = {"step": heard.ask.step, "client": client, "nonce": "2" * 32}
        header |= {"round": heard.turn.round, "ask": heard.turn.ask}
        return _PendingTask(header, (), ())

    def sealed(self, heard: RecordedAsk, client: int, frame: bytes) -> Sealed:
        """A frame with the seal of the site that was asked."""
        header = self.task(heard, client).header
        return seal("answer", header, [files.digest_of(frame)], KEY), [frame]

    def outcome(self, heard: RecordedAsk, client: int, came: Sealed) -> str:
        """What becomes of an answer: refused, no answer, or answered."""
        got = self.engine._read_answer(client, self.task(heard, client), came)
        if isinstance(got, str):
            return "unread"
        reply = Reply(client, got["up"], got["why"], tuple(got.get("releases", ())))
        alone = replace(heard, ask=replace(heard.ask, to=[client]), replies=[reply])
        try:
            _, entries = alone.replayed(self.trial.method)
        except (NotEnoughReplies, Diverged):  # of the answers to this ask all were refused
            return "refused"
        return str(entries[client]["outcome"])


def frame_of(reply: Reply, up: Any) -> bytes:
    """An answer as a site sends it."""
    tree = {"up": up, "why": "", "releases": list(reply.releases), "state": None}
    return codec.encode(tree)


def damaged(sealed: Sealed, rng: random.Random) -> Sealed:
    """The sealed answer with a random error in its seal or its body."""
    parts = [bytearray(sealed[0]), bytearray(sealed[1][0])]
    part = parts[rng.randrange(2)]
    place = rng.randrange(len(part))
    match rng.randrange(5):
        case 0:
            part[place] ^= 1 << rng.randrange(8)
        case 1:
            del part[place:]
        case 2:
            part[place:place] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            part[place : place + 8] = bytes(8)
            part[place] ^= 255
        case _:
            other = rng.randrange(len(part))
            part[place], part[other] = part[other] ^ 1, part[place]
    return bytes(parts[0]), [bytes(parts[1])]


def crafted(frame: bytes, rng: random.Random) -> bytes:
    """A hostile frame: a bomb in its header, or tensors that are repeated or missing."""
    size = int.from_bytes(frame[:8], "little")
    header, data = json.loads(frame[8 : 8 + size]), frame[8 + size :]
    tree = json.loads(header["__metadata__"]["tree"])
    match rng.randrange(7):
        case 0:
            tree = {"up": [{"$": 0}] * rng.randrange(2, 20_000), "why": ""}
        case 1:
            tree = {"up": json.loads("[" * 900 + "]" * 900), "why": ""}
        case 2:
            tree = {"up": {str(n): [] for n in range(rng.randrange(50_000))}, "why": ""}
        case 3:
            tree = {"up": {"model": {"$": 10 ** rng.randrange(1, 30)}}, "why": ""}
        case 4:
            tree = {"up": {"#": [[[], 1]]}, "why": ""}
        case 5:
            tree = rng.choice([[], 5, "up", None, {"up": 5, "why": 5}, {"up": {}}, {"why": ""}])
        case _:
            return rng.randbytes(8) + frame[8:]
    header["__metadata__"] = {"tree": json.dumps(tree)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def hostile(door: Door, rng: random.Random) -> Iterator[tuple[str, RecordedAsk, int, Sealed]]:
    """Generate signed lies without end."""
    material = {}
    for heard in door.heard:
        reply = next(one for one in heard.replies if one.up is not None)
        declared = door.trial.method.exchanges()[heard.ask.step]
        material[heard.ask.step] = reply, lies(declared, reply.up or {}, rng)
    while True:
        heard = rng.choice(door.heard)
        reply, some = material[heard.ask.step]
        frame = frame_of(reply, reply.up)
        if rng.random() < 0.2:
            what, frame = "a crafted frame", crafted(frame, rng)
        else:
            what, up = next(some)
            try:
                frame = frame_of(reply, up)
            except WireError:  # no frame can carry it
                continue
        yield what, heard, reply.client, door.sealed(heard, reply.client, frame)


def trial_of(name: str, count: int, signed: int) -> dict[str, Any]:
    """Figures of one method under `count` damaged and `signed` signed answers."""
    door, rng = Door(name), random.Random(name)
    began, memory = time.perf_counter(), peak()
    accepted: list[str] = []
    honest = 0
    for heard in door.heard:
        for reply in heard.replies:
            if reply.up is not None:
                came = door.sealed(heard, reply.client, frame_of(reply, reply.up))
                honest += door.outcome(heard, reply.client, came) == "answered"
    whole = {}
    for heard in door.heard:
        reply = next(one for one in heard.replies if one.up is not None)
        frame = frame_of(reply, reply.up)
        whole[heard.ask.step] = reply.client, door.sealed(heard, reply.client, frame)
    for _ in range(count):
        heard = rng.choice(door.heard)
        client, sealed = whole[heard.ask.step]
        came = damaged(sealed, rng)
        got = door.engine._read_answer(client, door.task(heard, client), came)
        if came != sealed and not isinstance(got, str):
            accepted.append(f"{heard.ask.step}: damaged")
    outcomes: dict[str, int] = {}
    lying = hostile(door, rng)
    for _ in range(signed):
        what, heard, client, came = next(lying)
        outcome = door.outcome(heard, client, came)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome == "answered":
            accepted.append(f"{heard.ask.step}: {what}")
    return {
        "method": name,
        "steps": [heard.ask.step for heard in door.heard],
        "honest": honest,
        "damaged": count,
        "signed": signed,
        "outcomes": outcomes,
        "accepted": accepted[:10],
        "accepted_count": len(accepted),
        "grown": peak() - memory,
        "seconds": round(time.perf_counter() - began, 1),
    }


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def page(results: Sequence[dict[str, Any]]) -> str:
    """The table."""
    rows = [
        {
            "method": one["method"],
            "exchanges": ", ".join(one["steps"]),
            "honest answers counted": one["honest"],
            "damaged": one["damaged"],
            "signed lies": one["signed"],
            "of them unread": one["outcomes"].get("unread", 0),
            "accepted": one["accepted_count"],
            "MB more": one["grown"] / 1e6,
        }
        for one in sorted(results, key=lambda one: str(one["method"]))
    ]
    accepted, grown = (
        sum(one["accepted_count"] for one in results),
        max(one["grown"] for one in results),
    )
    return "\n".join(
        [
            "# Damaged and hostile answers",
            "",
            "What the server does with answers whose bytes were damaged on the way, and with lies "
            "that an enrolled site signs itself: `python benchmarks/hostile.py`. `unread` are "
            "refused before or while they are unpacked, the others once they are checked; "
            "`MB more` is how far the memory of the process grew.",
            "",
            markdown(rows),
            "",
            f"{sum(one['damaged'] for one in results):,} damaged and "
            f"{sum(one['signed'] for one in results):,} signed answers, {accepted} accepted, the "
            f"server never ended, and memory grew by {grown / 1e6:.0f} MB at most.",
            "",
        ]
    )


def main() -> None:
    """Try every method and show the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--damaged", type=int, default=20_000)
    parser.add_argument("--signed", type=int, default=10_000)
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], help="files of lines that --json printed"
    )
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument(
        "--json", action="store_true", help="print one line for each method, and no page"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = [path.read_text(encoding="utf-8") for path in options.runs]
    results = [json.loads(line) for text in texts for line in text.splitlines()]
    for name in options.methods:
        if name not in {one["method"] for one in results}:
            results.append(trial_of(name, options.damaged, options.signed))
            if options.json:
                print(json.dumps(results[-1]), flush=True)
    if not options.json:
        print(page(results))
    if options.write:
        write_page(options.write, page(results))
    if any(one["accepted_count"] or one["grown"] > MOST for one in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
