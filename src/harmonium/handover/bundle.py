"""The files of a bundle, their digests, and the signature over these.

encoder.safetensors    the weights, as the run wrote them
encoder.onnx           uint8 images of any size to features, with all preparation inside
encoder.pt2            a program of torch.export: prepared images to features
config.json            architecture, preparation, versions, digests
MODEL_CARD.md          what it is, how it was trained, how good it is, how to use it
golden.npz             synthetic images and the features that they must have
SHA256SUMS             the digests of all these files; `sha256sum -c SHA256SUMS` reads it
SIGNATURE              ECDSA with SHA-256 over SHA256SUMS, in DER, as openssl verifies it
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core import files
from harmonium.core.errors import StoreError
from harmonium.storage.run_folder import ENCODER

ONNX, PROGRAM = "encoder.onnx", "encoder.pt2"
CONFIG, CARD, GOLDEN = "config.json", "MODEL_CARD.md", "golden.npz"
SUMS, SIGNATURE = "SHA256SUMS", "SIGNATURE"
ALWAYS = (ENCODER, CONFIG, CARD, GOLDEN)  # what every bundle has
FORMAT = 1  # of config.json
AGAIN = "get the bundle again"  # the remedy for whatever is wrong with one

_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9_.-]*)")
_HASH = ec.ECDSA(hashes.SHA256())


def sums_text(digests: Mapping[str, str]) -> bytes:
    """The content of `SHA256SUMS`."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def read_sums(folder: Path) -> tuple[bytes, dict[str, str]]:
    """The content of `SHA256SUMS`, and the digests of files by name."""
    path = folder / SUMS
    if not path.exists():
        raise StoreError(
            f"{folder} is not a bundle: it has no {SUMS}; harmonium export RUN --out DIR makes one"
        )
    with files.reading(path, AGAIN):
        text = path.read_bytes()
        matches = [_LINE.fullmatch(line) for line in text.decode("ascii").splitlines()]
        digests = {match[2]: match[1] for match in matches if match}
        if len(digests) != len(matches):
            raise ValueError("a line is not a digest and the name of a file")
    return text, digests


def sign(text: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The signature over the content of `SHA256SUMS`.

    The server signs asks with the same key; they begin with the word harmonium, and this content
    with a digest, so neither signature serves for the other.
    """
    return key.sign(text, _HASH)


def is_signed(text: bytes, signature: bytes, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether a signature over the content of `SHA256SUMS` is by the owner of a key."""
    try:
        key.verify(signature, text, _HASH)
    except InvalidSignature:
        return False
    return True
