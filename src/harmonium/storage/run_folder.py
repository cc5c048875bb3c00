"""The run's folder: its files, and how a round is committed to it.

    recipe.yaml            the resolved recipe, written last when a run begins
    about.json             the run's name, SHA-256 of every file that is written once, digests of
                           recipe, data and split; versions; the card; and a seal of all this
    init.safetensors       a copy of the weights that the run starts from, if it was given any
    split.npz              which client holds which images
    metrics.jsonl          one line per round: loss, bytes, and evaluation results
    ledger.jsonl           one line per client and ask: what was sent, and what was refused
    timings.jsonl          seconds per round; a file of its own, because no two runs agree on them
    asked.jsonl            asks for noisy releases, logged before sending; only with system noise
    commits/000007.json    a committed round: digests of everything that belongs to it
    commits/000007.safetensors   the server's state after that round
    clients/               what clients keep between rounds, readable by the owner only
    encoder.safetensors    the encoder at the end, with result.json and run.png
    earlier/000020/        these three files after round 20, if the run was trained further

A round exists once its commit file does. Writing that file is one atomic rename, so a run killed
at any instant continues from the last committed round and ends with the same bits.

Every file is verified when it is read. A commit names its run and has the digests of the server's
and the clients' states and of the logs up to it; `about.json` has those of the other files. A file
that was damaged, lost or replaced is recomputed from an earlier commit, or refused by its path.
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

ASKED = "asked.jsonl"  # never truncated: noise that was drawn and lost cannot be drawn again
LOGS = ("metrics.jsonl", "ledger.jsonl", "timings.jsonl")
ABOUT, RECIPE, SPLIT = "about.json", "recipe.yaml", "split.npz"
ENCODER, RESULT = "encoder.safetensors", "result.json"

SITE_REPORT = "run.json"  # in a run's folder at a site: the server's summary of the finished run


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
        """The description of the run, from `about.json`, or at a site from `run.json`."""
        return files.read_sealed(self.path / self._about_file)

    @property
    def _about_file(self) -> str:
        at_site = (self.path / SITE_REPORT).exists() and not (self.path / ABOUT).exists()
        return SITE_REPORT if at_site else ABOUT

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Write `about.json`."""
        files.write_atomic(self.path / ABOUT, files.sealed(about))

    @cached_property
    def run(self) -> str:
        """The run's random name, drawn when it began; empty for a run of an earlier version."""
        return str(self.about().get("run", "")) if (self.path / ABOUT).exists() else ""

    def check(self, name: str, remedy: str = files.RESTORE) -> None:
        """Refuse a file whose digest differs from the one in `about.json`.

        Without a digest there, as in runs of earlier versions, the file is not checked.
        """
        with files.reading(self.path / self._about_file):
            known = self.about().get("files", {}).get(name)
            digests = [known] if isinstance(known, str) else list(known or ())
        path = self.path / name
        if not digests:
            return
        with files.reading(path, remedy):
            digest = files.digest_of(path.read_bytes())
        if digest not in digests:
            raise StoreError(
                f"{path} is damaged, edited or of another run: its SHA-256 differs from the one in "
                f"{self.path / self._about_file}: {remedy}"
            )

    def commit(self, round: int, server: codec.Tree, clients: codec.Tree) -> codec.Tree:
        """Make a round part of the run, and delete all commits but the last two.

        Returns the server's state as it would be read back: tuples have become lists and tensors
        have the memory layout of new ones, so that continuing and resuming cannot differ.
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
            "clients": {str(client): version for client, version in clients.items()},
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
        """Size and SHA-256 of a log; reads only what was appended since the last call."""
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

    def newest_readable(self, *, with_states: bool = True) -> tuple[Commit | None, list[str]]:
        """The newest commit that can be read, and what is wrong with newer ones.

        `with_states` is whether the clients' states are stored here; those of real sites are not.
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
                f"{self._commits} has lost its commits, but the logs beside it have committed "
                f"rounds: {files.RESTORE}"
            )
        return None, faults

    def newest(self, *, with_states: bool = True) -> Commit | None:
        """The newest commit, for readers that must not fall back to an earlier round.

        Raises an error if it is damaged, or if it is not the last one of a complete run.
        """
        commit, faults = self.newest_readable(with_states=with_states)
        if faults:
            raise StoreError(f"{faults[0]}; {self.remedy}")
        if commit is None or not (self.path / RESULT).exists():
            return commit
        for log in LOGS:
            if commit.sizes[log] != _size(self.path / log):
                last = max(commit.round, *(row["round"] for row in self.lines("metrics.jsonl")))
                raise StoreError(
                    f"{self._commits / f'{last:06d}.json'} is missing, or {self.path / log} has "
                    f"more lines than at the end of the run: {self.remedy}"
                )
        return commit

    @property
    def remedy(self) -> str:
        """What to do about a damaged file that can be recomputed from commits."""
        try:
            at = "server " if self.about().get("federation") else ""
        except StoreError:
            at = ""
        return f"harmonium {at}resume {self.path} recreates it"

    @property
    def has_trained(self) -> bool:
        """Whether a round is committed after the setup, or a noisy release may have been made."""
        return any(self._rounds()) or _size(self.path / ASKED) > 0

    def snapshots(self) -> list[codec.Tree]:
        """The clients' snapshots of all readable commits, newest first."""
        return [record["clients"] for record in self._records()]

    def rewind(self, commit: Commit | None) -> None:
        """Truncate the logs to a commit and delete everything after it."""
        last = commit.round if commit else -1
        for round in self._rounds():
            if round > last:
                files.remove(self._commits / f"{round:06d}.json")
        for round in self._rounds("safetensors"):
            if round > last:
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
        """Append lines to a log; they count once a commit includes them, or at once if synced."""
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
        """The lines of a log one by one, after a check against the newest commit."""
        path = self.path / name
        record = next(self._records(), {})  # read first, because a run in progress only appends
        if not path.exists() and not record.get("sizes", {}).get(name):
            return
        with files.reading(path):
            data = path.read_bytes()
        self._check_log(name, record, data)
        with files.reading(path):
            for line in data.decode().splitlines(keepends=True):
                if line.endswith("\n"):  # the last may be torn
                    yield dict(json.loads(line))

    def _check_log(self, name: str, record: Mapping[str, Any], data: bytes) -> None:
        """Refuse a log that does not begin with the lines whose digest a commit has."""
        path, size = self.path / name, record.get("sizes", {}).get(name, 0)
        if len(data) < size:
            raise StoreError(
                f"{path} is shorter than when round {record['round']} was committed: "
                f"{files.RESTORE}"
            )
        sums = record.get("logs", {})  # earlier versions had lengths only
        if name in sums and files.digest_of(data[:size]) != sums[name]:
            raise StoreError(
                f"{path} is damaged: its lines differ from those committed with round "
                f"{record['round']}: {files.RESTORE}"
            )

    def _rounds(self, ending: str = "json") -> list[int]:
        pattern = re.compile(rf"(\d+)\.{ending}")
        matches = map(pattern.fullmatch, (path.name for path in self._commits.glob(f"*.{ending}")))
        return sorted(int(match[1]) for match in matches if match)

    def _records(self) -> Iterator[dict[str, Any]]:
        """The contents of all readable commit files, newest first."""
        _ = self.run  # without a name, commits of other runs could not be recognised
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
                raise ValueError("its checksum is wrong")
            record: dict[str, Any] = json.loads(text)
        if (other := record.get("run", "")) != self.run:
            raise StoreError(
                f"{path} is of run {other[:8] or 'unknown'}, but {self.path / ABOUT} of run "
                f"{self.run[:8] or 'unknown'}: restore the one that was replaced, or start a new "
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
        verified: set[tuple[int, str]] = set()
        for version in record["clients"].values() if with_states else ():
            file = self.path / "clients" / version["file"]
            state_store.check(file, version["digest"], verified)
        return Commit(record["round"], server, record["clients"], record["sizes"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
