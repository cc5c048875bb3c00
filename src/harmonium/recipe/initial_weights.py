"""Given weights: a run starts from them instead of a random initialisation (`init=FILE`).

`init` names a safetensors file (such as a run's `encoder.safetensors`), a run's folder, or a
user's function by `module:function` that returns a state dict; from Python also a state dict or an
`nn.Module`, which are stored by their digest. The tensors are those of an encoder, or of a whole
model with the name of a part as prefix (`encoder.`, `projector.`). The encoder must fit; any other
part is loaded only if all of its tensors fit.

The weights' SHA-256 is part of the recipe and of its digest; the path of their file is not. A run
keeps a copy in its folder (`init.safetensors`), because a file may change and a run may be trained
further. Every process that builds the run's model gets the weights that the run began with, or an
error. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from harmonium.core import files
from harmonium.core.errors import ConfigError, DataError, Key, StoreError
from harmonium.core.paths import home
from harmonium.core.types import Weights
from harmonium.evaluation.whitening import STORED
from harmonium.storage.run_folder import RunFolder

COPY = "init.safetensors"  # in a run's folder
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Init:
    """Weights to start from."""

    file: str | None = None  # a file, a run's folder or module:function; none: known by digest only
    digest: str = ""  # SHA-256 of names, types, shapes and values; empty: computed now

    def __post_init__(self) -> None:
        if self.digest and not _DIGEST.fullmatch(self.digest):
            raise ConfigError(
                Key("init", "digest"), f"={self.digest}: a SHA-256 has 64 digits of 0-9a-f"
            )
        if self.file is None and not self.digest:
            raise ConfigError(
                Key("init"), " names no weights: write init=FILE, a run's folder or module:function"
            )

    def resolved(self) -> Init:
        """The same weights with an absolute path and the digest of the file's content."""
        if self.file is None:
            return self
        file = self.file
        if not is_function(file):
            file = str(Path(file).expanduser().absolute())
        return Init(file, self.digest or digest_of(_read(file)))

    def weights(self) -> Weights:
        """The weights; refused if their digest is not the recipe's."""
        if self.file is None:
            raise DataError(
                Key("init"), f": the weights {self.digest[:8]}… are known by their digest only"
            )
        return _checked(self.file, self.digest, _stamp(self.file))

    def keep(self, folder: Path) -> None:
        """Copy the weights to a run's folder."""
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.weights().items()}
        files.write_atomic(folder / COPY, safetensors.torch.save(tensors))

    def kept_in(self, folder: Path) -> Init:
        """The same weights, read from the copy in a run's folder if there is one."""
        file = folder.absolute() / COPY
        return Init(str(file), self.digest) if file.is_file() else self


def keep_weights(given: Mapping[str, Any] | nn.Module) -> dict[str, Any]:
    """Store a state dict, or that of a module, by its digest; return the settings that name it."""
    called = f"<{type(given).__name__}>"
    if isinstance(given, nn.Module):
        if any(map(nn.parameter.is_lazy, (*given.parameters(), *given.buffers()))):
            raise ConfigError(
                Key("init"),
                f" is a {type(given).__name__} with lazy layers, which have no weights yet: pass "
                "an image through it first",
            )
        given = given.state_dict()
    wanted = {name: value for name, value in given.items() if not str(name).startswith(STORED)}
    state = {
        name: tensor.cpu().contiguous().clone() for name, tensor in _tensors(wanted, called).items()
    }
    digest = digest_of(state)
    path = home() / "data" / "weights" / f"{digest}.safetensors"
    if not path.exists():
        files.write_atomic(path, safetensors.torch.save(state))
    return {"file": str(path), "digest": digest}


def is_function(file: str) -> bool:
    """Whether a word names a function; an existing file of that name takes precedence.

    >>> is_function("mine.weights:pretrained"), is_function("runs/first"), is_function("C:/x")
    (True, False, False)
    """
    return bool(_FUNCTION.fullmatch(file)) and not Path(file).exists()


def digest_of(given: Weights) -> str:
    """SHA-256 of the names, types, shapes and values of tensors, in the order of their names."""
    hashed = hashlib.sha256()
    for name in sorted(given):
        tensor = given[name].detach().cpu().contiguous()
        about = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        hashed.update(about.encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def seal_of(weights: Weights, about: Mapping[str, Any]) -> str:
    """SHA-256 of an encoder's weights and of the metadata in its file."""
    return files.digest_of(f"{digest_of(weights)}{json.dumps(about)}".encode())


def checked_seal(weights: Weights, text: str) -> dict[str, Any]:
    """The metadata of an encoder's file; ValueError where they or the weights have changed.

    Files of earlier versions have no seal.
    """
    about = json.loads(text)
    if not isinstance(about, dict):
        raise ValueError("its metadata hold no settings")
    seal = about.pop(files.SEAL, None)
    if seal is not None and seal != seal_of(weights, about):
        raise ValueError("its weights are not those that were written")
    return about


def _stamp(file: str) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the files, so that they are read again only when one changes."""
    path = Path(file)
    if is_function(file) or not path.exists():
        return ()
    read = [path] if path.is_file() else [path / "encoder.safetensors", *path.glob("commits/*")]
    stats = [(str(one), one.stat()) for one in read if one.exists()]
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


@lru_cache(maxsize=2)
def _checked(file: str, digest: str, stamp: tuple[tuple[str, int, int], ...]) -> Weights:
    given = _read(file)
    if (actual := digest_of(given)) != digest:
        raise DataError(
            Key("init"),
            f"={file}: the weights have changed since the recipe was made: their SHA-256 is "
            f"{actual[:8]}…, not {digest[:8]}…. Restore them, or start a new run",
        )
    return given


def _read(file: str) -> Weights:
    """The tensors of a file, a run's folder or a function."""
    if is_function(file):
        return _called(file)
    path = Path(file)
    if path.is_dir():
        return _of_run(path)
    if not path.is_file():
        raise DataError(Key("init"), f"={file}: there is no such file or run")
    try:
        with safetensors.safe_open(path, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            about = (opened.metadata() or {}).get("harmonium")
    except (safetensors.SafetensorError, OSError, ValueError, MemoryError):
        raise DataError(
            Key("init"),
            f"={file} is not a safetensors file: write one with "
            "safetensors.torch.save_file(state), or give a function that returns a state dict, "
            "init=module:function",
        ) from None
    if about is not None:
        try:
            checked_seal(tensors, about)
        except ValueError as error:
            raise DataError(Key("init"), f"={file} is damaged: {error}") from None
    return _tensors({k: v for k, v in tensors.items() if not k.startswith(STORED)}, file)


def _of_run(path: Path) -> Weights:
    """The model of a run's last committed round, or its exported encoder."""
    try:
        commit = RunFolder(path).newest(with_states=False)
    except StoreError as error:
        raise DataError(Key("init"), f"={path}: {error}") from None
    model: Weights = {}
    if commit is not None:  # statistics that clients measured anew are kept beside it
        model = {**commit.server["model"], **commit.server["memory"].get("statistics", {})}
    if any(name.startswith("encoder.") for name in model):
        return _tensors(model, str(path))
    if (path / "encoder.safetensors").is_file():
        return _read(str(path / "encoder.safetensors"))
    raise DataError(Key("init"), f"={path} holds no run with an encoder")


def _called(file: str) -> Weights:
    path, _, name = file.partition(":")
    wanted = "init=module:function names a function that returns a state dict"
    try:
        module = importlib.import_module(path)
    except Exception as error:  # noqa: BLE001  (someone else's code may raise anything)
        why = f"{type(error).__name__}: {_line(error)}"
        raise ConfigError(
            Key("init"), f"={file}: cannot import module {path} ({why}): {wanted}"
        ) from None
    function = getattr(module, name, None)
    if not hasattr(module, name):
        raise ConfigError(Key("init"), f"={file}: module {path} has no `{name}`: {wanted}")
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(
            Key("init"), f"={file}: `{name}` of module {path} is of type {kind}: {wanted}"
        )
    try:
        returned = function()
    except Exception as error:  # noqa: BLE001  (someone else's code may raise anything)
        raise ConfigError(
            Key("init"), f"={file} failed: {type(error).__name__}: {_line(error)}"
        ) from None
    if not isinstance(returned, Mapping):
        raise ConfigError(
            Key("init"),
            f"={file} returned a {type(returned).__name__}: it must return a state dict, name to "
            "tensor, e.g. module.state_dict()",
        )
    return _tensors(returned, file)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tensors(given: Mapping[str, Any], file: str) -> Weights:
    """Names and tensors, all of them finite."""
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DataError(
                Key("init"), f"={file}: {name!r} is a {type(value).__name__}, not a tensor"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise DataError(Key("init"), f"={file}: `{name}` has values that are not finite")
        tensors[name] = value.detach()
    if not tensors:
        raise DataError(Key("init"), f"={file} holds no tensors")
    return tensors
