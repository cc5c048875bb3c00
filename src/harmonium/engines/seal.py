"""Signed envelopes: every message is bound to its federation, run, plan, round, ask and client.

A seal is a few lines of JSON: a header, which names the SHA-256 of each body that travels beside
it, and an ECDSA signature over the header. The server signs asks, a site signs its answer, and the
answer's header repeats the ask's. So an answer that was edited, made for another ask, sent twice
or signed by another site is refused, whoever carried it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import WireError
from harmonium.core.files import digest_of

Way = Literal["ask", "answer"]
LARGEST = 1 << 20  # bytes of a seal; a plan is a few thousand
_HASH = ec.ECDSA(hashes.SHA256())


def seal(
    way: Way,
    header: Mapping[str, Any],
    digests: Sequence[str],
    key: ec.EllipticCurvePrivateKey,
) -> bytes:
    """Sign a header and the SHA-256 digests of the bodies; return the envelope."""
    text = _text({**header, "bodies": list(digests)})
    return _envelope(text, key.sign(_signed(way, text), _HASH))


def unseal(
    way: Way, sealed: bytes, bodies: Sequence[bytes], key: ec.EllipticCurvePublicKey
) -> dict[str, Any]:
    """The header of an envelope, once the key's signature over it and these bodies is verified."""
    if len(sealed) > LARGEST:
        raise WireError(
            f"the seal of the {way} has {len(sealed)} bytes: at most {LARGEST} are allowed"
        )
    try:
        envelope = json.loads(sealed)
        text, signature = str(envelope["header"]), bytes.fromhex(envelope["signature"])
        if sealed != _envelope(text, signature):  # other JSON text may parse alike
            raise ValueError("not the canonical form of an envelope")
        key.verify(signature, _signed(way, text), _HASH)
        header: dict[str, Any] = json.loads(text)
        digests = header.pop("bodies")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise WireError(f"the seal of the {way} cannot be read") from None
    except InvalidSignature:
        raise WireError(f"the {way} is not signed by its expected sender") from None
    if digests != [digest_of(body) for body in bodies]:
        raise WireError(
            f"the {way} was changed in transit: its bodies are not those that were signed"
        )
    return header


def _envelope(text: str, signature: bytes) -> bytes:
    """A header and its signature as they are sent, in the only accepted form."""
    return json.dumps({"header": text, "signature": signature.hex()}).encode()


def unverified_header(sealed: bytes) -> dict[str, Any]:
    """Run and client of an unverified envelope, to find the site that verifies it."""
    try:
        header: dict[str, Any] = json.loads(json.loads(sealed)["header"])
        return {"run": str(header["run"]), "client": int(header["client"])}
    except (ValueError, TypeError, LookupError, RecursionError):
        raise WireError("the seal of the ask cannot be read") from None


def nonce() -> str:
    """A number used once, so that no answer fits another ask."""
    return secrets.token_hex(16)


def must_match(answer: Mapping[str, Any], ask: Mapping[str, Any]) -> None:
    """Refuse an answer whose header is not that of the ask."""
    for field, wanted in ask.items():
        if answer.get(field) != wanted:
            raise WireError(f"the answer is for another {field}: it belongs to another ask")


def _signed(way: Way, text: str) -> bytes:
    """The signed bytes; the prefix keeps asks, answers and Flower's own signatures apart."""
    return f"harmonium {way} 1\n{text}".encode()


def _text(header: Mapping[str, Any]) -> str:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
