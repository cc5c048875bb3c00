"""The run's folder: what is in it, and how a round is committed to it.

    recipe.yaml            the resolved recipe, written last when a run begins
    about.json             its digest and those of the data and the split; versions; the card
    init.safetensors       a copy of the weights that the run starts from, if it was given any
    split.npz              who holds which pictures
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
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium import codec, store
from harmonium.engines import shelf
from harmonium.errors import StoreError

ASKED = "asked.jsonl"  # never cut back: noise that was drawn and lost cannot be drawn again
LOGS = ("metrics.jsonl", "ledger.jsonl", "timings.jsonl")


@dataclass(frozen=True)
class Commit:
    """A committed round."""

    round: int
    server: codec.Tree
    clients: codec.Tree  # the engine's snapshot
    sizes: Mapping[str, int]  # bytes of each log that belong to committed rounds


class Folder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        """Refer to a folder, which need not exist yet."""
        self.path = path
        self._commits = path / "commits"

    def commit(self, round: int, server: codec.Tree, clients: codec.Tree) -> codec.Tree:
        """Make a round part of the run, then forget the one before the last.

        Returns the server's state as it would be read back: tuples have become lists and tensors
        lie in memory as new ones do, so that going on and resuming cannot differ.
        """
        name = f"{round:06d}"
        for log in LOGS:
            store.sync_file(self.path / log)
        frame = codec.encode(server)
        digest = store.write_atomic(self._commits / f"{name}.safetensors", frame)
        record = {
            "round": round,
            "server": digest,
            "clients": {str(client): held for client, held in clients.items()},
            "sizes": {log: _size(self.path / log) for log in LOGS},
        }
        text = json.dumps(record)
        seal = store.digest_of(text.encode())
        store.write_atomic(self._commits / f"{name}.json", f"{seal}\n{text}\n".encode())
        for old in self._rounds()[:-2]:
            (self._commits / f"{old:06d}.json").unlink(missing_ok=True)
            (self._commits / f"{old:06d}.safetensors").unlink(missing_ok=True)
        return codec.decode(frame)

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
            raise StoreError(f"no checkpoint can be read. {' '.join(faults)}")
        return None, faults

    @property
    def has_trained(self) -> bool:
        """Whether a round is committed after the setup, or a noisy release may have been made."""
        return any(self._rounds()) or _size(self.path / ASKED) > 0

    def snapshots(self) -> list[codec.Tree]:
        """The clients' snapshots of all readable commits, newest first."""
        found = []
        for round in reversed(self._rounds()):
            try:
                found.append(self._record(round)["clients"])
            except StoreError:
                continue
        return found

    def rewind(self, commit: Commit | None) -> None:
        """Cut the logs back to a commit and drop whatever came after it."""
        kept = commit.round if commit else -1
        for round in self._rounds():
            if round > kept:
                (self._commits / f"{round:06d}.json").unlink(missing_ok=True)
        for path in self._commits.glob("*.safetensors"):
            if int(path.stem) > kept:
                path.unlink(missing_ok=True)
        for log in LOGS:
            path, size = self.path / log, commit.sizes[log] if commit else 0
            if path.exists() or size:
                with path.open("ab") as file:
                    if file.tell() < size:
                        raise StoreError(f"{path} is shorter than the checkpoint says: it was cut")
                    file.truncate(size)
        if (asked := self.path / ASKED).exists():  # a torn line was never acted upon
            os.truncate(asked, asked.read_bytes().rfind(b"\n") + 1)
        for path in (self.path / "scratch").glob("*"):
            path.unlink(missing_ok=True)

    def log(self, name: str, lines: Iterable[str], *, sync: bool = False) -> None:
        """Append lines to a log; they count once a commit names them, or at once if synced."""
        text = "".join(f"{line}\n" for line in lines)
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(text)
            if sync:
                store.sync_file(self.path / name)
        except OSError as error:
            raise StoreError(f"cannot write {self.path / name}: {error.strerror}") from None

    def read_log(self, name: str) -> list[dict[str, Any]]:
        """The lines of a log as plain values."""
        path = self.path / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be torn

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._commits.glob("*.json"))

    def _record(self, round: int) -> dict[str, Any]:
        path = self._commits / f"{round:06d}.json"
        try:
            seal, _, text = path.read_text(encoding="utf-8").partition("\n")
        except (OSError, UnicodeDecodeError):
            raise StoreError(f"{path} cannot be read") from None
        if store.digest_of(text.rstrip("\n").encode()) != seal:
            raise StoreError(f"{path} is damaged")
        record: dict[str, Any] = json.loads(text)
        return record

    def _read(self, round: int, with_states: bool) -> Commit:
        record = self._record(round)
        server = store.read_tree(self._commits / f"{round:06d}.safetensors", record["server"])
        sound: set[tuple[int, str]] = set()
        for held in record["clients"].values() if with_states else ():
            shelf.check(self.path / "clients" / held["file"], held["digest"], sound)
        return Commit(record["round"], server, record["clients"], record["sizes"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
