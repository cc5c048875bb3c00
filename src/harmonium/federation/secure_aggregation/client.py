"""Secure aggregation at a client: masks that cancel in the sum over clients.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017,
for a server that is curious but follows the protocol. One masked ask takes four:

    mask_keys    a client makes two key pairs and a seed, and sends its public keys
    mask_shares  it gets everyone's, and sends each peer sealed shares of its seed and masking key
    (the ask)    it adds to its answer a mask from its seed and one from each pair of clients, which
                 one of the two adds and the other subtracts
    unmask       it reveals shares of the seeds of those who answered, and of the masking keys of
                 those who did not; never both of one client, and nothing if too few are left

Every step but the first gives the same answer to the same message, so a client that was stopped is
simply asked again. Another message for the same step is declined: it would use a mask twice. When a
whole ask is repeated, with new masks, its answers are the same; so a client reveals shares for the
same sum only, because two sums that differ by one client would show that client's answer. A sum
that cannot be opened is therefore retried under another number (`fresh`), with new keys and with
other random draws in training, as in another round.

A client does not trust its peers. A share that does not open does not exclude the client that
received it: it takes part, reveals nothing in that place, and the server compares all revealed
shares. Secrets come from the operating system. They cancel, so a result does not depend on them. A
client deletes them when it has revealed its shares, when it makes new ones, and at the
end of the run, on every engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from harmonium.core import codec, files
from harmonium.core.errors import WireError
from harmonium.core.types import ClientId
from harmonium.federation.secure_aggregation import shamir
from harmonium.federation.secure_aggregation.fixed_point import (
    Masks,
    Reach,
    Weighing,
    kind_of,
    to_whole,
    unfit,
)
from harmonium.federation.wire import MASKS, Field
from harmonium.federation.wire import STEPS as STEPS
from harmonium.learning.client import Decline

SECRET = 32  # bytes of a key or a seed
SEALED = 2 * shamir.WIDTH + 16  # bytes of two shares under seal
DIGEST = 16  # bytes of a share's digest
_CHUNK = 1 << 17  # numbers of a mask that are made at once: they stay in the cache
_ZEROS = bytes(8 * _CHUNK)
_NONCE = bytes(12)  # one for all: every key is used once
_SUMS = 32  # last answers of which a client remembers the clients in their sum
_NUMBERS = 1 << 12  # more than a round has asks
_TRIES = 1 << 18  # numbers that another try of an ask may get


def fresh(ask: int) -> int:
    """A number for another try of an ask, which gives it new keys and random draws.

    It is drawn at random, because a server that was killed does not know which were used before.
    """
    return planned(ask) + _NUMBERS * (1 + secrets.randbelow(_TRIES))


def planned(ask: int) -> int:
    """The number that an ask has in its method's plan, whichever try it is.

    >>> planned(2), planned(fresh(2))
    (2, 2)
    """
    return ask % _NUMBERS


@dataclass(frozen=True)
class Roster:
    """The clients that began a masked ask; shares sealed under another roster do not open."""

    clients: tuple[ClientId, ...]
    keys: Tensor  # (clients, 64) uint8: of each, the key to seal for it and the key of its masks
    total: int  # examples of all of them; no client learns another's
    run: tuple[int, ...]  # the run's seed, the round and the ask
    threshold: int  # shares that recover a secret

    @classmethod
    def read(cls, down: Mapping[str, Any], run: tuple[int, ...], masks: Masks) -> Roster:
        """The roster of a message."""
        clients = whole_numbers(down, "clients")
        keys = tensor_of(down, "keys", torch.uint8, (len(clients), 2 * SECRET))
        totals = whole_numbers(down, "total")
        if len(totals) != 1 or len(set(clients)) != len(clients):
            raise WireError("the roster of a masked ask must name every client once, and one total")
        return cls(clients, keys, totals[0], run, masks.shares(len(clients)))

    def tree(self) -> dict[str, Tensor]:
        """The roster as a message."""
        numbers = {"clients": self.clients, "total": [self.total]}
        return {"keys": self.keys} | {k: torch.tensor(v) for k, v in numbers.items()}

    @cached_property
    def digest(self) -> bytes:
        """The digest that all keys of this ask are bound to."""
        facts = {**self.tree(), "run": list(self.run), "threshold": self.threshold}
        return hashlib.sha256(codec.encode(facts)).digest()

    @property
    def liars(self) -> int:
        """How many clients may break the protocol: as many as the sum can do without, or one."""
        return max(1, len(self.clients) - self.threshold)

    def place(self, client: ClientId) -> int:
        """A client's position, from 0; its shares are those at the point one higher."""
        if client not in self.clients:
            raise WireError(f"client {client} has no part in this masked ask")
        return self.clients.index(client)

    def seal_key(self, client: ClientId) -> bytes:
        """The public key to seal shares for a client with."""
        return self.keys[self.place(client), :SECRET].numpy().tobytes()

    def mask_key(self, client: ClientId) -> bytes:
        """The public key from which a client's masks with others are derived."""
        return self.keys[self.place(client), SECRET:].numpy().tobytes()

    def weighing(self, examples: Mapping[ClientId, int], uniform: bool) -> Weighing:
        """The weights of those clients whose numbers of examples are known."""
        return Weighing(examples, self.total, len(self.clients), uniform)


@dataclass(frozen=True)
class Keyring:
    """One client's secrets of one masked ask, in a file that only its owner can read."""

    path: Path
    client: ClientId
    run: tuple[int, ...]  # the run's seed, the round and the ask
    masks: Masks

    def answer(self, step: str, down: Mapping[str, Any], examples: int) -> dict[str, Tensor]:
        """This client's reply to one of the asks around the method's own."""
        if step == "mask_keys":
            return self._offer()
        return self._deal(down, examples) if step == "mask_shares" else self._reveal(down)

    def _offer(self) -> dict[str, Tensor]:
        """Make new secrets, which replace those of earlier asks; returns the public keys."""
        new = {name: secrets.token_hex(SECRET) for name in ("sealing", "masking", "seed", "deal")}
        self._write({"run": list(self.run), "opened": self._stored().get("opened", {}), **new})
        keys = [public_of(bytes.fromhex(new[name])) for name in ("sealing", "masking")]
        return {"keys": bytes_of(b"".join(keys))}

    def _deal(self, down: Mapping[str, Any], examples: int) -> dict[str, Tensor]:
        """Shares of the seed and of the masking key, sealed to every client of the roster."""
        stored = self._read("sealing")
        roster = Roster.read(down, self.run, self.masks)
        own = roster.place(self.client)
        if len(roster.clients) < self.masks.answers(len(roster.clients)):
            raise Decline(f"{len(roster.clients)} clients are too few for secure aggregation")
        (registered,) = whole_numbers(down, "examples") or (None,)
        if registered != examples or examples > roster.total:
            raise Decline(f"it has {examples} examples, not {registered} of {roster.total}")
        sealing, masking, seed, deal = (
            bytes.fromhex(stored[name]) for name in ("sealing", "masking", "seed", "deal")
        )
        if roster.keys[own].numpy().tobytes() != public_of(sealing) + public_of(masking):
            raise Decline("its keys are not the ones it sent: another ask has begun since")
        self._must_be_same(stored, "roster", roster.tree())
        count, me = len(roster.clients), self.client
        chance = stream(deal, 2 * shamir.WIDTH * roster.threshold)
        halves = chance[: len(chance) // 2], chance[len(chance) // 2 :]
        both = (
            shamir.split(secret, count, roster.threshold, half)
            for secret, half in zip((marked(seed), masking), halves, strict=True)
        )
        dealt = list(zip(*both, strict=True))
        rows = [
            _box(sealing, roster, me, me, peer).encrypt(_NONCE, b"".join(pair), None)
            for peer, pair in zip(roster.clients, dealt, strict=True)
        ]
        digests = b"".join(digest_of(share) for pair in dealt for share in pair)
        self._write({**stored, "roster": roster.tree(), "examples": examples})
        return {
            "shares": bytes_of(b"".join(rows)).reshape(count, SEALED),
            "digests": bytes_of(digests).reshape(count, 2, DIGEST),
        }

    def open(self, given: Any, asked: str) -> Opened:
        """Open the sealed shares that came with the method's own ask.

        Args:
            given: who takes part in the sum, and the shares that they sent.
            asked: a digest of all else that the answer depends on, which must not change.
        """
        if not isinstance(given, Mapping):
            raise Decline("it answers only under secure aggregation, and this ask has no masks")
        stored = self._read("roster")
        roster = Roster.read(stored["roster"], self.run, self.masks)
        peers = whole_numbers(given, "clients")
        rows = tensor_of(given, "shares", torch.uint8, (len(peers), SEALED))
        if self.client not in peers or len(set(peers)) != len(peers):
            raise Decline(
                "the list of participants must name every client once, and this one as well"
            )
        if len(peers) < self.masks.answers(len(roster.clients)):
            raise Decline(
                f"only {len(peers)} of {len(roster.clients)} clients are left: too few for privacy"
            )
        sealing = bytes.fromhex(stored["sealing"])
        shares, shut = dict[ClientId, str](), list[ClientId]()
        for peer, row in zip(peers, rows, strict=True):
            box = _box(sealing, roster, self.client, peer, self.client)
            try:
                pair = box.decrypt(_NONCE, row.numpy().tobytes(), None)
            except InvalidTag:  # the sender's or the server's fault; other shares still count
                shut.append(peer)
                pair = bytes(2 * shamir.WIDTH)
            shares[peer] = pair.hex()
        if len(shut) > roster.liars:
            raise Decline(f"the shares of clients {shut} do not open: its keys changed or are lost")
        self._must_be_same(stored, "message", [asked, list(peers)])
        self._write({**stored, "message": [asked, list(peers)], "shares": shares})
        masking, seed = bytes.fromhex(stored["masking"]), bytes.fromhex(stored["seed"])
        return Opened(self.client, roster, stored["examples"], peers, masking, seed)

    def _reveal(self, down: Mapping[str, Any]) -> dict[str, Tensor]:
        """Shares of the seeds of those who answered, and of the masking keys of the others."""
        counted = whole_numbers(down, "counted")
        stored = self._read("shares", "told")
        if "told" in stored:
            if stored["counted"] != list(counted):
                raise Decline("it has already revealed its shares for other clients")
            return {"shares": stored["told"]}
        shares: dict[ClientId, str] = stored["shares"]
        began = len(stored["roster"]["clients"])
        strangers = set(counted) - set(shares)
        few = len(set(counted)) < max(len(counted), self.masks.answers(began))
        if strangers or self.client not in counted or few:
            raise Decline(f"it reveals nothing for a sum over clients {sorted(counted)}")
        opened: dict[str, list[ClientId]] = stored["opened"]
        over = opened.setdefault(stored["message"][0], sorted(counted))
        if over != sorted(counted):
            raise Decline(
                f"this answer is in a sum over clients {over} already: one over "
                f"{sorted(counted)} would show the difference"
            )
        revealed = b""
        for peer, both in shares.items():
            pair = bytes.fromhex(both)
            revealed += pair[: shamir.WIDTH] if peer in counted else pair[shamir.WIDTH :]
        rows = bytes_of(revealed).reshape(len(shares), shamir.WIDTH)
        latest = dict(list(opened.items())[-_SUMS:])
        stored = {"run": list(self.run), "opened": latest, "counted": list(counted), "told": rows}
        self._write(stored)
        return {"shares": rows}

    def _must_be_same(self, stored: Mapping[str, Any], name: str, value: Any) -> None:
        """Decline a value that differs from the one received before."""
        if name in stored and codec.encode(stored[name]) != codec.encode(value):
            raise Decline(f"it has received another {name} for this ask, and masks are used once")

    def _stored(self) -> dict[str, Any]:
        """The contents of the file; empty if it is lost or damaged."""
        try:
            content: dict[str, Any] = codec.decode(self.path.read_bytes())
        except (OSError, WireError):
            return {}
        return content

    def _read(self, *any_of: str) -> dict[str, Any]:
        stored = self._stored()
        if stored.get("run") != list(self.run) or not set(any_of) & set(stored):
            raise Decline("it has no keys for this step: it lost them, or missed the step before")
        return stored

    def _write(self, content: Mapping[str, Any]) -> None:
        files.write_tree(self.path, content, private=True)


@dataclass(frozen=True)
class Opened:
    """All that a client needs to mask its answer."""

    client: ClientId
    roster: Roster
    examples: int  # this client's own
    peers: tuple[ClientId, ...]  # who takes part in the sum, this client included
    masking: bytes
    seed: bytes

    def mask(
        self, declared: Mapping[str, Field], up: Mapping[str, Any], reach: Reach, *, uniform: bool
    ) -> dict[str, Any]:
        """The answer as whole numbers under masks; declines if a value cannot be summed."""
        weighing = self.roster.weighing({self.client: self.examples}, uniform)
        if reason := unfit(declared, self.client, up, weighing) or reach.excess(up):
            raise Decline(reason)
        vector = to_whole(declared, self.client, up, weighing)
        add_stream(vector, self.seed, 1)
        for peer in self.peers:
            if peer != self.client:
                shared = pair_key(self.masking, self.roster, peer)
                add_stream(vector, shared, sign(self.client, peer))
        return _shaped(declared, up, torch.from_numpy(vector.view(np.int64)))


def _shaped(declared: Mapping[str, Field], up: Mapping[str, Any], vector: Tensor) -> dict[str, Any]:
    """A masked vector in the answer's shapes; a tensor outside the model comes with its type."""
    shaped: dict[str, Any] = {}
    start = 0
    for name in declared:
        value = up[name]
        if isinstance(value, Tensor):
            value = {kind_of(value): value}
        whole = isinstance(value, Mapping)
        cut = {}
        for key in sorted(value) if whole else [""]:
            shape = value[key].shape if whole else torch.Size()
            cut[key] = vector[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
        shaped[name] = cut if whole else cut[""]
    return shaped


# ---- keys and streams, of clients and server alike -------------------------------------------


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agreed(private: bytes, public: bytes, purpose: bytes, owner: ClientId) -> bytes:
    """The key that two clients share for one purpose and nobody else can have."""
    try:
        point = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:  # a point of small order, for which anybody can compute the shared secret
        raise WireError(f"client {owner} sent an invalid key") from None
    return HKDF(SHA256(), SECRET, salt=None, info=purpose).derive(point)


def pair_key(private: bytes, roster: Roster, peer: ClientId) -> bytes:
    """The key of the mask between the owner of a masking key and a peer."""
    return _agreed(private, roster.mask_key(peer), b"harmonium mask" + roster.digest, peer)


def _box(
    private: bytes, roster: Roster, owner: ClientId, sender: ClientId, receiver: ClientId
) -> ChaCha20Poly1305:
    """The seal of one share; its key is bound to the ask and both ends, and seals nothing else."""
    peer = receiver if owner == sender else sender
    ends = sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")
    purpose = b"harmonium share" + roster.digest + ends
    return ChaCha20Poly1305(_agreed(private, roster.seal_key(peer), purpose, peer))


def sign(client: ClientId, peer: ClientId) -> int:
    """The sign of a pair's mask: the first client adds it and the second subtracts it."""
    return 1 if client < peer else -1


def add_stream(vector: np.ndarray, key: bytes, way: int) -> None:
    """Add the mask of a key to a vector modulo 2**64, or subtract it."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    chunk = np.empty(_CHUNK + 2, dtype="<u8")
    for start in range(0, len(vector), _CHUNK):
        piece = vector[start : start + _CHUNK]
        cipher.update_into(memoryview(_ZEROS)[: 8 * len(piece)], chunk.view(np.uint8).data)
        (np.add if way > 0 else np.subtract)(piece, chunk[: len(piece)], out=piece)


def stream(key: bytes, count: int) -> bytes:
    """`count` pseudorandom bytes that are determined by a key."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(count))


def marked(seed: bytes) -> bytes:
    """A seed with its digest, which shows that shares belong together."""
    return seed + hashlib.sha256(b"harmonium seed" + seed).digest()


def digest_of(share: bytes) -> bytes:
    """The digest by which the server can check a share that it has not seen before."""
    return hashlib.blake2b(share, digest_size=DIGEST).digest()


# ---- messages --------------------------------------------------------------------------------


def traffic(clients: int) -> dict[str, dict[str, int]]:
    """Bytes that secure aggregation adds for each of `clients` clients, by ask and direction."""
    return {
        "mask_keys": {"down": 0, "up": 2 * SECRET},
        "mask_shares": {
            "down": clients * (2 * SECRET + 8) + 2 * 8,
            "up": clients * (SEALED + 2 * DIGEST),
        },
        MASKS: {"down": clients * (SEALED + 8), "up": 0},  # beside the method's own
        "unmask": {"down": 8 * clients, "up": shamir.WIDTH * clients},
    }


def bytes_of(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_of(
    values: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """A tensor of a message; WireError unless it has this type and shape."""
    value = values.get(name)
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
        raise WireError(f"`{name}` must be {dtype} of shape {shape}")
    return value


def whole_numbers(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of non-negative integers of a message; WireError if it is not one."""
    value = values.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.ndim != 1:
        raise WireError(f"`{name}` must be a list of whole numbers")
    numbers = tuple(int(number) for number in value)
    if any(number < 0 for number in numbers):
        raise WireError(f"`{name}` has a number below 0")
    return numbers
