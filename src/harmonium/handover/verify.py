"""`harmonium verify`: the check of a bundle, offline, which executes no code of the bundle's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
from torch import nn

from harmonium.core import files
from harmonium.core.errors import HarmoniumError, StoreError, counted
from harmonium.handover.bundle import (
    AGAIN,
    ALWAYS,
    CONFIG,
    FORMAT,
    GOLDEN,
    ONNX,
    PROGRAM,
    SIGNATURE,
    SUMS,
    is_signed,
    read_sums,
)
from harmonium.handover.card import is_named
from harmonium.handover.golden import TOLERANCE, difference, features_of, read_golden
from harmonium.handover.programs import run_onnx, run_program
from harmonium.runs.export import load_encoder
from harmonium.sites import certificates

Network = nn.Module | Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Check:
    """One check of a bundle."""

    name: str
    passed: bool | None  # none: it could not be made
    text: str

    def __str__(self) -> str:
        outcome = {True: "ok", False: "WRONG", None: "not checked"}[self.passed]
        return f"{self.name:12} {outcome}: {self.text}"


def verify(
    folder: str | Path,
    *,
    key: str | Path | None = None,
    network: Network | None = None,
    watch: Callable[[Check], None] = lambda check: None,
) -> tuple[Check, ...]:
    """Check a bundle: digests, signature, and that all its forms give the golden features.

    No code of the bundle is executed. Without a signature that is checked by `key`, nobody knows
    who made the bundle.

    Args:
        folder: the bundle's.
        key: the public key of whoever signed it, such as the `server.pub` of a kit.
        network: the network, for encoders that were given as an `nn.Module`.
        watch: called with each check as it was made.

    Returns:
        All checks, of which none failed; if one did, an error names it.
    """
    checks = list[Check]()
    for check in _checks(Path(folder), key, network):
        watch(check)
        checks.append(check)
    if wrong := [f"{check.name}: {check.text}" for check in checks if check.passed is False]:
        raise StoreError(f"{folder} does not verify. {'; '.join(wrong)}")
    return tuple(checks)


def _checks(folder: Path, key: str | Path | None, network: Network | None) -> Iterator[Check]:
    """The checks in order; after a wrong digest or signature nothing is opened."""
    text, digests = read_sums(folder)
    public = certificates.read_public_key(Path(key)) if key is not None else None
    yield (check := _digests(folder, digests))
    if not check.passed:
        return
    with files.reading(folder / CONFIG, AGAIN):
        config = dict(json.loads((folder / CONFIG).read_bytes()))
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']}, and this version reads {FORMAT}")
        if any(digests.get(name) != digest for name, digest in config["files"].items()):
            raise ValueError(f"its digests are not those of {SUMS}")
    yield (check := _signature(folder, text, config, public))
    if check.passed is False:
        return
    pairs, prepared = read_golden(folder / GOLDEN)
    images, features = zip(*pairs, strict=True)

    def by_torch() -> float:
        encoder = load_encoder(folder, layout="NHWC", whiten=_whitened(config), network=network)
        return difference([features_of(encoder, some) for some in images], features)

    def by_onnx() -> float:
        data = (folder / ONNX).read_bytes()
        return difference([run_onnx(data, some) for some in images], features)

    def by_program() -> float:
        data = (folder / PROGRAM).read_bytes()
        return difference([run_program(data, prepared[0])], [prepared[1]])

    what = f"the golden features of {counted(len(images), 'batch')}".replace("batchs", "batches")
    why = (
        ""
        if network is not None or is_named(config)
        else (
            "its network is not part of Harmonium: harmonium.verify(..., network=module) checks it"
        )
    )
    yield _agreement("safetensors", by_torch, what, why or _pillow(config), can=not why)
    if ONNX in digests:
        here = importlib.util.find_spec("onnxruntime") is not None
        lacks = "" if here else "onnxruntime is not installed: pip install 'harmonium[onnx]'"
        yield _agreement("onnx", by_onnx, what, lacks, can=here)
    if PROGRAM in digests:
        yield _agreement("torch.export", by_program, "the golden features", "", can=True)
    for name, reason in config.get("left_out", {}).items():
        yield Check(name, None, f"the bundle has none: {reason}")


def _digests(folder: Path, digests: Mapping[str, str]) -> Check:
    """Whether the files are those that were listed, and nothing needed is missing."""
    wrong = [f"{SUMS} does not list {name}" for name in ALWAYS if name not in digests]
    for name, digest in digests.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            wrong.append(f"{name} is missing")
        elif files.digest_of(path.read_bytes()) != digest:
            wrong.append(f"{name} is not the file that was listed")
    if wrong:
        return Check("digests", False, ", ".join(wrong))
    others = sorted(path.name for path in folder.iterdir())
    others = [name for name in others if name not in (*digests, SUMS, SIGNATURE)]
    more = f"; not part of the bundle and not checked: {', '.join(others[:5])}" if others else ""
    return Check("digests", True, f"{counted(len(digests), 'file')} as listed{more}")


def _signature(folder: Path, text: bytes, config: Mapping[str, Any], key: Any) -> Check:
    """Whether the signature is by the key; without a key, what there is to check."""
    path, maker = folder / SIGNATURE, str(config.get("signed_by") or "")
    if not path.exists():
        if maker:
            return Check(
                "signature", False, f"it was signed by {maker[:16]}, but has no {SIGNATURE}"
            )
        return Check("signature", False if key else None, "the bundle is not signed")
    if key is None:
        return Check(
            "signature", None, f"by the key {maker[:16]}, it says: give its public half with --key"
        )
    if not is_signed(text, path.read_bytes(), key):
        return Check("signature", False, "it is not by the owner of the key that was given")
    return Check("signature", True, f"by the key {certificates.fingerprint(key)[:16]}")


def _agreement(
    name: str, measured: Callable[[], float], what: str, remark: str, *, can: bool
) -> Check:
    """Whether a form of the encoder gives the golden features; `remark` explains if not."""
    if not can:
        return Check(name, None, remark)
    try:
        apart = measured()
    except HarmoniumError as error:
        return Check(name, False, str(error))
    except Exception as error:  # noqa: BLE001  (a damaged graph can make a runtime raise anything)
        return Check(name, False, f"it cannot be run ({' '.join(str(error).split())[:200]})")
    text = f"{what}, largest difference {apart:.1e}"
    if apart <= TOLERANCE:
        return Check(name, True, f"gives {text}")
    return Check(name, False, f"does not give {text}{remark and f' ({remark})'}")


def _pillow(config: Mapping[str, Any]) -> str:
    """A reason why tall images may differ: another order of Pillow's two passes."""
    made = str(config.get("versions", {}).get("pillow", ""))
    first = {version.partition(".")[0] for version in (made, PIL.__version__)}
    if len(first) < 2:
        return ""
    return (
        f"it was made with Pillow {made}, here is {PIL.__version__}: some releases resize otherwise"
    )


def _whitened(config: Mapping[str, Any]) -> bool | int:
    """The `whiten` with which the encoder gives the features of the bundle."""
    return int(config["features"]) if config.get("whitened") else False
