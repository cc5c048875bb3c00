"""The run's folder: what is in it, and how a round is committed to it.

    recipe.yaml            the resolved recipe, written last when a run begins
    about.json             the run's name, SHA-256 of every file that is written once, digests of
                           recipe, data and split; versions; the card; and a seal of all this
    init.safetensors       a copy of the weights that the run starts from, if it was given any
    split.npz              who holds which images
    metrics.jsonl          one line a round: loss, bytes, and figures of evaluations
    ledger.jsonl           one line a client and ask: what crossed, and what was refused
    timings.jsonl          seconds a round; apart, because no two runs agree on them
    asked.jsonl            asks for noisy releases, before they are sent; only with system noise
    commits/000007.json    a committed round: digests of all that belongs to it
    commits/000007.safetensors   the server's state after that round
    clients/               what clients keep between rounds, readable by the owner only
    encoder.safetensors    the encoder at the end, with result.json and run.png
    earlier/000020/        the same as they were after round 20, of a run that was trained further

A round exists once its commit file does. Writing that file is one atomic rename, so a run killed
at any instant continues from the last committed round and ends with the same bits.

Nothing is read on trust. A commit names its run and has the digests of the server's and the
clients' states and of the logs up to it; `about.json` has those of the other files. Whatever was
damaged, lost or exchanged is made again from an earlier commit, or refused by its path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harmonium.core import codec, files
from harmonium.core.errors import StoreError
from harmonium.storage import state_store

ASKED = "asked.jsonl"  # never cut back: noise that was drawn and lost cannot be drawn again
LOGS = ("metrics.jsonl", "ledger.jsonl", "timings.jsonl")
ABOUT, RECIPE, SPLIT = "about.json", "recipe.yaml", "split.npz"
ENCODER, RESULT = "encoder.safetensors", "result.json"


SITE_REPORT = "run.json"  # in a run's folder at a site: what the server told of the run at its end


@dataclass(frozen=True)
class Commit:
    """A committed round."""

    round: int
    server: codec.Tree
    clients: codec.Tree  # the engine's snapshot
    sizes: Mapping[str, int]  # bytes of each log that belong to committed rounds


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        """Refer to a folder, which need not exist yet."""
        self.path = path
        self._commits = path / "commits"
        self._sums: dict[str, tuple[int, Any]] = {}  # of each log: bytes so far, their SHA-256

    def about(self) -> dict[str, Any]:
        """What is known of the run as a whole, from `about.json`, or at a site from `run.json`."""
        return files.read_sealed(self.path / self._known_by)

    @property
    def _known_by(self) -> str:
        at_site = (self.path / SITE_REPORT).exists() and not (self.path / ABOUT).exists()
        return SITE_REPORT if at_site else ABOUT

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Write `about.json`."""
        files.write_atomic(self.path / ABOUT, files.sealed(about))

    @cached_property
    def run(self) -> str:
        """The run's name, drawn when it began; empty for one of an earlier version."""
        return str(self.about().get("run", "")) if (self.path / ABOUT).exists() else ""

    def check(self, name: str, remedy: str = files.RESTORE) -> None:
        """Refuse a file that is not the one whose digest `about.json` has.

        Where it has none, as in runs of earlier versions, the file is left to its reader.
        """
        with files.reading(self.path / self._known_by):
            known = self.about().get("files", {}).get(name)
            digests = [known] if isinstance(known, str) else list(known or ())
        path = self.path / name
        if not digests:
            return
        with files.reading(path, remedy):
            found = files.digest_of(path.read_bytes())
        if found not in digests:
            raise StoreError(
                f"{path} is damaged, edited or of another run, for its SHA-256 is not the one in "
                f"{self.path / self._known_by}: {remedy}"
            )

    def commit(self, round: int, server: codec.Tree, clients: codec.Tree) -> codec.Tree:
        """Make a round part of the run, then forget the one before the last.

        Returns the server's state as it would be read back: tuples have become lists and tensors
        lie in memory as new ones do, so that going on and resuming cannot differ.
        """
        name = f"{round:06d}"
        for log in LOGS:
            files.sync_file(self.path / log)
        sums = {log: self._sum(log) for log in (*LOGS, ASKED)}
        frame = codec.encode(server)
        digest = files.write_atomic(self._commits / f"{name}.safetensors", frame)
        record = {
            "round": round,
            "run": self.run,
            "server": digest,
            "clients": {str(client): held for client, held in clients.items()},
            "sizes": {log: size for log, (size, _) in sums.items()},
            "logs": {log: digest for log, (_, digest) in sums.items()},
        }
        text = json.dumps(record)
        seal = files.digest_of(text.encode())
        files.write_atomic(self._commits / f"{name}.json", f"{seal}\n{text}\n".encode())
        for old in self._rounds()[:-2]:
            files.remove(self._commits / f"{old:06d}.json")
            files.remove(self._commits / f"{old:06d}.safetensors")
        return codec.decode(frame)

    def _sum(self, log: str) -> tuple[int, str]:
        """Size and SHA-256 of a log; only what was appended since the last call is read."""
        path = self.path / log
        done, hashed = self._sums.get(log, (0, hashlib.sha256()))
        if path.exists():
            with files.reading(path), path.open("rb") as file:
                file.seek(done)
                while piece := file.read(1 << 20):
                    hashed.update(piece)
                    done += len(piece)
        self._sums[log] = done, hashed
        return done, hashed.hexdigest()

    def last(self, *, with_states: bool = True) -> tuple[Commit | None, list[str]]:
        """The newest sound commit, and what was wrong with newer ones.

        `with_states` is whether the clients' states are here; those of real sites are not.
        """
        faults: list[str] = []
        for round in reversed(self._rounds()):
            try:
                return self._read(round, with_states), faults
            except StoreError as error:
                faults.append(str(error))
        if faults:
            raise StoreError(f"no checkpoint can be read. {'; '.join(faults)}")
        if len(self.read_log("metrics.jsonl")) > 1:  # one may be logged and not yet committed
            raise StoreError(
                f"{self._commits} has lost its commits: {files.RESTORE}, for the logs beside it "
                "are of rounds that were committed"
            )
        return None, faults

    def newest(self, *, with_states: bool = True) -> Commit | None:
        """The newest commit for those who only look, who must not be given an earlier round.

        What is wrong with it is an error; so is, in a complete run, that it is not the last.
        """
        commit, faults = self.last(with_states=with_states)
        if faults:
            raise StoreError(f"{faults[0]}; {self.again}")
        if commit is None or not (self.path / RESULT).exists():
            return commit
        for log in LOGS:
            if commit.sizes[log] != _size(self.path / log):
                last = max(commit.round, *(row["round"] for row in self.lines("metrics.jsonl")))
                raise StoreError(
                    f"{self._commits / f'{last:06d}.json'} is missing, or {self.path / log} has "
                    f"more lines than it had at the end: {self.again}"
                )
        return commit

    @property
    def again(self) -> str:
        """What to do about files that follow from commits."""
        try:
            at = "server " if self.about().get("federation") else ""
        except StoreError:
            at = ""
        return f"harmonium {at}resume {self.path} makes it again"

    @property
    def has_trained(self) -> bool:
        """Whether a round is committed after the setup, or a noisy release may have been made."""
        return any(self._rounds()) or _size(self.path / ASKED) > 0

    def snapshots(self) -> list[codec.Tree]:
        """The clients' snapshots of all readable commits, newest first."""
        return [record["clients"] for record in self._records()]

    def rewind(self, commit: Commit | None) -> None:
        """Cut the logs back to a commit and drop whatever came after it."""
        kept = commit.round if commit else -1
        for round in self._rounds():
            if round > kept:
                files.remove(self._commits / f"{round:06d}.json")
        for round in self._rounds("safetensors"):
            if round > kept:
                files.remove(self._commits / f"{round:06d}.safetensors")
        for log in LOGS:
            path, size = self.path / log, commit.sizes[log] if commit else 0
            if path.exists():
                with files.writing(path):
                    os.truncate(path, size)
        if (asked := self.path / ASKED).exists():  # a torn line was never acted upon
            with files.reading(asked):
                size = asked.read_bytes().rfind(b"\n") + 1
            with files.writing(asked):
                os.truncate(asked, size)
        for path in (self.path / "scratch").glob("*"):
            files.remove(path)
        self._sums.clear()

    def log(self, name: str, lines: Iterable[str], *, sync: bool = False) -> None:
        """Append lines to a log; they count once a commit names them, or at once if synced."""
        text = "".join(f"{line}\n" for line in lines)
        with files.writing(self.path / name):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(text)
            if sync:
                files.sync_file(self.path / name)

    def read_log(self, name: str) -> list[dict[str, Any]]:
        """The lines of a log as plain values."""
        return list(self.lines(name))

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a log one by one, provided they are those of the newest commit."""
        path = self.path / name
        record = next(self._records(), {})  # first: a run that goes on only appends
        if not path.exists() and not record.get("sizes", {}).get(name):
            return
        with files.reading(path):
            data = path.read_bytes()
        self._check_log(name, record, data)
        with files.reading(path):
            told = data.decode().splitlines(keepends=True)
            for line in told:
                if line.endswith("\n"):  # the last may be torn
                    yield dict(json.loads(line))

    def _check_log(self, name: str, record: Mapping[str, Any], data: bytes) -> None:
        """Refuse a log that does not begin with what a commit has the digest of."""
        path, size = self.path / name, record.get("sizes", {}).get(name, 0)
        if len(data) < size:
            raise StoreError(
                f"{path} is shorter than at round {record['round']}, which was committed: "
                f"{files.RESTORE}"
            )
        sums = record.get("logs", {})  # earlier versions had lengths only
        if name in sums and files.digest_of(data[:size]) != sums[name]:
            raise StoreError(
                f"{path} is damaged, its lines are not those that were committed by round "
                f"{record['round']}: {files.RESTORE}"
            )

    def _rounds(self, ending: str = "json") -> list[int]:
        named = re.compile(rf"(\d+)\.{ending}")
        found = map(named.fullmatch, (path.name for path in self._commits.glob(f"*.{ending}")))
        return sorted(int(match[1]) for match in found if match)

    def _records(self) -> Iterator[dict[str, Any]]:
        """All commit files that can be read, newest first."""
        _ = self.run  # if it is not known, no commit can be told from those of other runs
        for round in reversed(self._rounds()):
            try:
                yield self._record(round)
            except StoreError:
                continue

    def _record(self, round: int) -> dict[str, Any]:
        path = self._commits / f"{round:06d}.json"
        with files.reading(path):
            seal, _, text = path.read_text(encoding="utf-8").partition("\n")
            if files.digest_of(text.rstrip("\n").encode()) != seal:
                raise ValueError("its seal is broken")
            record: dict[str, Any] = json.loads(text)
        if (other := record.get("run", "")) != self.run:
            raise StoreError(
                f"{path} is of run {other[:8] or 'unknown'}, but {self.path / ABOUT} of run "
                f"{self.run[:8] or 'unknown'}: restore the one that was exchanged, or start a new "
                "run"
            )
        if record["round"] != round:
            raise StoreError(f"{path} is the commit of round {record['round']}: {files.RESTORE}")
        return record

    def _read(self, round: int, with_states: bool) -> Commit:
        record = self._record(round)
        for log, size in record["sizes"].items():
            with files.reading(self.path / log):
                data = (self.path / log).read_bytes() if size else b""
            self._check_log(log, record, data)
        server = files.read_tree(self._commits / f"{round:06d}.safetensors", record["server"])
        sound: set[tuple[int, str]] = set()
        for held in record["clients"].values() if with_states else ():
            state_store.check(self.path / "clients" / held["file"], held["digest"], sound)
        return Commit(record["round"], server, record["clients"], record["sizes"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
