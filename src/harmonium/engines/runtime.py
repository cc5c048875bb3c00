"""The client runtime: all that is needed to run client tasks in one process.

The local engine, its worker processes and remote nodes all perform tasks through a `ClientRuntime`,
so a task gives the same bits wherever it runs.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core import codec, files, seeds
from harmonium.core.devices import CPU, room_for
from harmonium.core.errors import EngineError, StoreError
from harmonium.core.threads import single_thread
from harmonium.core.types import ClientId
from harmonium.data.images import Images, Integers
from harmonium.engines import memory
from harmonium.federation.driver import handle
from harmonium.federation.method import Method
from harmonium.federation.secure_aggregation.client import Keyring, planned
from harmonium.federation.secure_aggregation.fixed_point import Masks, Reach
from harmonium.federation.wire import LABELLED, MASKS, STEPS
from harmonium.learning.client import Client, Decline, Examples, Labelled
from harmonium.privacy.mechanisms import Noise, Randomness
from harmonium.storage import state_store

KEYS = "masks.safetensors"  # beside a client's states: its secrets of secure aggregation


@dataclass(frozen=True)
class StateRef:
    """The file of one version of a client's state, and its digest."""

    file: str
    digest: str


@dataclass(frozen=True)
class Task:
    """One exchange to run on one client."""

    step: str
    client: ClientId
    round: int
    ask: int
    down: Mapping[str, Any]  # values for this client alone; the broadcast travels apart
    state: StateRef | None


@dataclass(frozen=True)
class Labels:
    """The labels of a runtime's images, for the exchanges that evaluate alone."""

    labels: Integers  # of all images, -1 where unknown
    groups: Integers | None = None  # of all images, e.g. patients; -1: of no group
    test: Images | None = None  # further images of the one client, which it never trains on


@dataclass(frozen=True)
class ClientRuntime:
    """The method, the images and the folder of the clients' states."""

    method: Method
    images: Images
    indices: Sequence[np.ndarray] | Mapping[ClientId, np.ndarray]  # positions, by client
    folder: Path  # where clients' states are kept
    noise: Randomness = "system"
    public: Images | None = None
    masks: Masks | None = None  # secure aggregation: every upload is masked
    device: torch.device = CPU  # where tasks compute
    labels: Labels | None = None  # for exchanges that evaluate; other tasks never see them
    key: bytes = b""  # a site's secret, which hides the digests of its states from the server

    def on(self, device: torch.device) -> ClientRuntime:
        """The same runtime with another device."""
        return replace(self, device=device)

    def perform(self, task: Task, broadcast: bytes) -> codec.Tree:
        """Run a task; the result is a plain tree, ready to be sent."""
        down = {**codec.decode(broadcast), **task.down}
        try:
            with single_thread():
                if self.masks is not None and task.step in STEPS:
                    examples = len(self.indices[task.client])
                    done = {"up": self._keyring(task, self.masks).answer(task.step, down, examples)}
                else:
                    done = self._exchange(task, down, broadcast)
        except Decline as reason:
            return {"client": task.client, "up": None, "why": str(reason)}
        except RuntimeError as error:
            if self.device.type == "cpu" or not memory.is_exhausted(error):
                raise
            batch = self.method.local.batch
            remedy = memory.advice(self.method, self.device)
            raise EngineError(
                f"client {task.client} ran out of the memory of {self.device} with "
                f"local.batch={batch}: {remedy}"
            ) from None
        return {"client": task.client, "why": "", **done}

    def _exchange(self, task: Task, down: dict[str, Any], broadcast: bytes) -> dict[str, Any]:
        """Run one of the method's exchanges, masked if the plan requires it."""
        method, seed = self.method, self.method.world.seed
        path = ("client", task.round, task.ask, task.step, task.client)
        version = self._version(task.state)
        client = Client(
            id=task.client,
            round=task.round,
            rounds=method.world.rounds,
            examples=Examples(
                self.images,
                self.indices[task.client],
                uses_labels=method.reads_labels,
                device=self.device,
                resident=self.resident,
            ),
            views=method.views,
            rng=seeds.torch_rng(seed, *path),
            noise=Noise(self.noise, seeds.torch_rng(seed, "noise", *path)),
            public=self.public,
            state=version.state,
            device=self.device,
            labelled=self._labelled(task.client) if task.step in LABELLED else None,
        )
        declared, opened = method.exchanges().get(task.step), None
        if self.masks is not None and declared is not None and declared.up:
            mask_message = down.pop(MASKS, None)
            own = {name: value for name, value in task.down.items() if name != MASKS}
            state = task.state and asdict(task.state)
            asked = files.digest_of(codec.encode([*path, own, state]))
            asked = files.digest_of((asked + files.digest_of(broadcast)).encode())
            opened = self._keyring(task, self.masks).open(mask_message, asked)
        up = handle(method, task.step, client, down, seeds.seed_of(seed, *path))
        if declared is not None and opened is not None:
            uniform = method.server_optimiser.weighting == "uniform"
            reach = Reach.of(method, declared, down)
            up = opened.mask(declared.up, up, reach, uniform=uniform)
        return {
            "up": up,
            "releases": [asdict(release) for release in client.releases],
            "state": self._write_state(task, client.state, version),
        }

    def _labelled(self, client: ClientId) -> Labelled | None:
        """A client's images with their labels; none where the plan does not evaluate at clients."""
        known, rows = self.labels, self.indices[client]
        if known is None:
            return None
        groups, test = known.groups, known.test
        return Labelled(
            Examples(
                self.images.relabelled(known.labels),
                rows,
                uses_labels=True,
                device=self.device,
                resident=self.resident,
            ),
            None if groups is None else groups[rows],
            None
            if test is None
            else Examples(test, np.arange(len(test)), uses_labels=True, device=self.device),
        )

    @cached_property
    def resident(self) -> Tensor | None:
        """The pixels of all images on the device, if they fit beside the training; else none."""
        if self.device.type == "cpu" or not len(self.images):
            return None
        bytes_of_all = len(self.images) * math.prod(self.images.shape)
        if not room_for(bytes_of_all, self.device):
            return None
        return torch.from_numpy(np.array(self.images.pixels)).to(self.device)

    def _keyring(self, task: Task, masks: Masks) -> Keyring:
        """The client's secrets for this masked ask, which are not part of its state."""
        run = (self.method.world.seed, task.round, task.ask)
        return Keyring(self.folder / str(task.client) / KEYS, task.client, run, masks)

    def forget_masks(self, client: ClientId) -> None:
        """Delete a client's secrets: the run is over."""
        for name in (KEYS, f"{KEYS}.part"):
            (self.folder / str(client) / name).unlink(missing_ok=True)

    def read_state(self, reference: StateRef | None) -> dict[str, Any]:
        """A version of a client's state; empty without a reference."""
        return self._version(reference).state

    def _version(self, reference: StateRef | None) -> state_store.Version:
        if reference is None:
            return state_store.Version()
        path = self.folder / reference.file
        if not self.key:
            return state_store.read(path, reference.digest)
        digest = files.digest_of(path.read_bytes()) if path.exists() else ""
        if not hmac.compare_digest(self._keyed(digest), reference.digest):
            raise StoreError(
                f"{path} is missing or damaged: it is not the version that the server names"
            )
        return state_store.read(path, digest)

    def _keyed(self, digest: str) -> str:
        """A digest as the server sees it: keyed with the site's secret, if there is one."""
        return hmac.digest(self.key, digest.encode(), "sha256").hex() if self.key else digest

    def _write_state(
        self, task: Task, state: Mapping[str, Any], before: state_store.Version
    ) -> dict[str, str] | None:
        """Write a new version beside the old one; the server decides which one counts."""
        if not state and task.state is None:
            return None
        number = planned(task.ask)  # the same in every try: only one counts
        file = f"{task.client}/{task.round:06d}-{number}-{task.step}.safetensors"
        digest = state_store.write(self.folder / file, state, before)
        return {"file": file, "digest": self._keyed(digest)}
