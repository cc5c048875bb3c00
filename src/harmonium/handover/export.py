"""`harmonium export`: a run's encoder as a bundle for others."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import nn

from harmonium.core import files
from harmonium.core.errors import ConfigError, HarmoniumError, StoreError
from harmonium.core.progress import work
from harmonium.handover.account import Account, read_account
from harmonium.handover.bundle import (
    CARD,
    CONFIG,
    FORMAT,
    GOLDEN,
    ONNX,
    PROGRAM,
    SIGNATURE,
    SUMS,
    sign,
    sums_text,
)
from harmonium.handover.card import card, grey_levels
from harmonium.handover.golden import TOLERANCE, difference, golden_arrays, pairs
from harmonium.handover.programs import (
    FEATURES,
    IMAGES,
    Untraceable,
    lacking,
    onnx_bytes,
    program_bytes,
    run_onnx,
    run_program,
    traced,
)
from harmonium.runs.export import LoadedEncoder, load_encoder
from harmonium.sites import certificates
from harmonium.storage.result_folder import PARTIAL, refuse_run
from harmonium.storage.run_folder import ENCODER

PACKAGES = ("harmonium", "torch", "numpy", "pillow", "onnx", "onnxscript")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written."""

    folder: Path
    files: Mapping[str, str]  # SHA-256 by name
    left_out: Mapping[str, str] = field(default_factory=dict)  # files, and why there are none
    signed_by: str = ""  # the fingerprint of the key; empty: it is not signed
    unsigned: str = ""  # why it is not signed


def export(
    run: str | Path | Any,
    out: str | Path,
    *,
    key: str | Path | None = None,
    whiten: bool | int = False,
    licence: str = "",
    network: nn.Module | Callable[[int, int], nn.Module] | None = None,
) -> Bundle:
    """Write the encoder of a finished run as a bundle: weights, ONNX, program, card, signature.

    Args:
        run: the run's folder, or its `Result`.
        out: the bundle's folder, which must be new or empty.
        key: a private key to sign with; none: that of the federation, for a federation's run.
        whiten: whiten features, as in `load_encoder`; the run must have fitted it.
        licence: the terms of use, for the model card.
        network: the network, for encoders that were given as an `nn.Module`.

    Returns:
        What was written, and what was left out and why.

    >>> import harmonium, tempfile
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", **small)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bundle = harmonium.export(result, f"{folder}/digits")
    ...     checks = harmonium.verify(bundle.folder)
    >>> sorted(bundle.files)[:3], all(check.passed is not False for check in checks)
    (['MODEL_CARD.md', 'config.json', 'encoder.onnx'], True)
    """
    path = Path(run if isinstance(run, str | Path) else run.folder)
    folder = Path(out)
    _check_place(folder, path)
    account = read_account(path)
    encoder = load_encoder(path, layout="NHWC", whiten=whiten, network=network)
    signer, unsigned = _signer(account, key)
    with _whole(folder) as place:
        return _write(place, folder, path, account, encoder, signer, unsigned, licence)


def _write(
    place: Path,
    folder: Path,
    path: Path,
    account: Account,
    encoder: LoadedEncoder,
    signer: ec.EllipticCurvePrivateKey | None,
    unsigned: str,
    licence: str,
) -> Bundle:
    """Write all files of a bundle to `place`; the last are the digests and their signature."""
    signed_by = certificates.fingerprint(signer.public_key()) if signer else ""
    with work("golden features"):
        arrays = golden_arrays(encoder)
    contents = {ENCODER: (path / ENCODER).read_bytes(), GOLDEN: _npz(arrays)}
    programs, left_out = _programs(encoder, arrays)
    contents |= programs
    contents[CARD] = card(account, encoder, left_out, signed_by, licence).encode()
    digests = {name: files.digest_of(data) for name, data in contents.items()}
    config = _config(account, encoder, digests, left_out, signed_by, licence)
    contents[CONFIG] = json.dumps(config, indent=1).encode()
    digests[CONFIG] = files.digest_of(contents[CONFIG])
    contents[SUMS] = sums_text(digests)
    if signer is not None:
        contents[SIGNATURE] = sign(contents[SUMS], signer)
    for name, data in contents.items():
        files.write_atomic(place / name, data)
    return Bundle(folder, digests, left_out, signed_by, unsigned)


def _programs(
    encoder: LoadedEncoder, arrays: Mapping[str, Any]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """ONNX and torch.export's program, as far as they can be made, and why one cannot."""
    written, left_out = dict[str, bytes](), dict[str, str]()
    try:
        with work("tracing the network"):
            program = traced(encoder)
    except Untraceable as error:
        return {}, dict.fromkeys((PROGRAM, ONNX), str(error))
    try:
        with work(f"writing {PROGRAM}"):
            written[PROGRAM] = program_bytes(program)
            found = run_program(written[PROGRAM], arrays["prepared"])
        _must_agree(PROGRAM, difference([found], [arrays["prepared_features"]]))
    except Untraceable as error:
        left_out[PROGRAM] = str(error)
    if missing := lacking():
        left_out[ONNX] = (
            f"it needs {' and '.join(missing)}, not installed where the bundle was made (pip "
            "install 'harmonium[onnx]')"
        )
        return written, left_out
    try:
        with work(f"writing {ONNX}"):
            written[ONNX] = onnx_bytes(program, encoder)
    except Untraceable as error:
        left_out[ONNX] = str(error)
        return written, left_out
    images, features = zip(*pairs(arrays), strict=True)
    _must_agree(ONNX, difference([run_onnx(written[ONNX], some) for some in images], features))
    return written, left_out


def _must_agree(name: str, apart: float) -> None:
    if apart > TOLERANCE:
        raise StoreError(
            f"{name} gives features that differ from PyTorch's by {apart:.2g}, more than "
            f"{TOLERANCE:g}: nothing was exported; report this with the recipe and versions"
        )


def _npz(arrays: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _config(
    account: Account,
    encoder: LoadedEncoder,
    digests: Mapping[str, str],
    left_out: Mapping[str, str],
    signed_by: str,
    licence: str,
) -> dict[str, Any]:
    """The content of `config.json`."""
    about = encoder.about
    return {
        "format": FORMAT,
        "encoder": about["encoder"],
        "method": encoder.method,
        "data": encoder.data,
        "recipe": encoder.recipe,
        "size": list(encoder.size),
        "channels": encoder.channels,
        "fit": encoder.fit,
        "interpolation": "bicubic, as Pillow computes it",
        "grey_levels": grey_levels(account, encoder),
        "depth": encoder.levels.depth,
        "window": about.get("window"),
        "percentiles": about.get("percentiles"),
        "frames": about.get("frames", "all"),
        "mean": about["prepare"]["mean"],
        "std": about["prepare"]["std"],
        "views": about["prepare"]["size"],
        "features": encoder.features,
        "whitened": encoder.whitening is not None,
        "onnx": {"input": IMAGES, "layout": "NHWC", "type": "uint8", "output": FEATURES},
        "tolerance": TOLERANCE,
        "licence": licence or None,
        "signed_by": signed_by or None,
        "left_out": dict(left_out),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "files": dict(digests),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _signer(
    account: Account, key: str | Path | None
) -> tuple[ec.EllipticCurvePrivateKey | None, str]:
    """The key to sign with, or none and the reason."""
    if key is not None:
        return certificates.read_private_key(Path(key)), ""
    if account.at_site:
        return None, "the federation's key is at its server: export there, or give one with --key"
    if account.federation is None:
        return None, "a run on this machine has no key of a federation: give one with --key"
    path = Path(account.federation["folder"]) / "server" / "signing.key"
    try:
        return certificates.read_private_key(path), ""
    except HarmoniumError as error:
        return None, f"{error}; or give a key with --key"


def _check_place(folder: Path, run: Path) -> None:
    """Refuse a folder that holds anything."""
    refuse_run(folder, [run])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: give a new folder with --out")


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its place once everything was written."""
    place = folder.with_name(folder.name + PARTIAL)
    with files.writing(place):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    try:
        yield place
        with files.writing(folder):
            if folder.exists():
                folder.rmdir()  # it is empty
            os.replace(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
