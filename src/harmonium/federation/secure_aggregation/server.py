"""Secure aggregation at the server: four asks in place of one, and the sum of masked answers.

The server never has a client's answer without a mask. It collects the seeds of the clients that
answered and the masking keys of those that dropped out, and subtracts their masks from the sum.

A client may lie in each of the four answers. What the server can see, and what it does:

    mask_keys    no key at all: refused. Another's key: its owner cannot open what is sealed for it
    mask_shares  shares that do not open, or are not those of the digests: a contradiction between
                 the client that dealt a share and the one that reveals it
    (the ask)    other shapes than most answers have: left out of the sum. False numbers or masks:
                 the sum is out of range (`_means`), or it is not and nobody can tell
    unmask       a share that was not dealt: the same contradiction

Every share is known by the digest that its dealer sent, and only shares that agree with it are
used. Two clients that follow the protocol never contradict each other. So a client that contradicts
more clients than may lie (`Roster.liars`) is a liar, and so is one that dealt shares which agree
with their digests but not with each other. If two clients contradict only each other, nobody can
tell which one lies. Liars are named. The sum is opened without their shares if enough others are
left; otherwise the ask is retried, without them and with new keys (`Shut`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from harmonium.core.errors import NotEnoughReplies, WireError
from harmonium.core.types import ClientId
from harmonium.federation.secure_aggregation import shamir
from harmonium.federation.secure_aggregation.client import (
    DIGEST,
    SEALED,
    SECRET,
    Roster,
    add_stream,
    digest_of,
    marked,
    pair_key,
    public_of,
    sign,
    tensor_of,
)
from harmonium.federation.secure_aggregation.fixed_point import (
    FEWEST,
    KINDS,
    Masks,
    Reach,
    bits,
    from_whole,
    most,
    pieces,
    size_of,
)
from harmonium.federation.wire import EXAMPLES, MASKS, Ask, Exchange, Field, Folded
from harmonium.learning.parts import Layouts

Take = Callable[[ClientId, Mapping[str, Any]], str | None]  # counts an answer, or returns why not
Steps = Generator[tuple[Ask, Take], list[ClientId], Folded]
Shapes = dict[str, Mapping[str, torch.Size]]  # by field and tensor
TRIES = 3  # times that an ask is made if its sum cannot be opened


class Shut(NotEnoughReplies):
    """The shares of a masked ask do not open its sum; with new keys another try may."""


class SecureSum:
    """One ask under masks."""

    def __init__(
        self,
        masks: Masks,
        ask: Ask,
        declared: Exchange,
        layouts: Layouts,
        examples: Mapping[ClientId, int],
        *,
        run: tuple[int, ...],
        reach: Reach,
        uniform: bool,
        least: int,
    ) -> None:
        """Start without any answer.

        Args:
            masks: how many clients it takes.
            ask: the method's own ask.
            declared: what is uploaded, and how each field is combined.
            layouts: names, shapes and types of the model parts.
            examples: number of examples of each client, its weight in a mean.
            run: the run's seed, the round and the number of the ask.
            reach: how far a model may be from the one that was sent.
            uniform: weight clients uniformly instead of by their numbers of examples.
            least: fewest answers that the sum needs for other reasons.
        """
        self._masks, self._ask, self._up = masks, ask, declared.up
        self._layouts, self._examples, self._run = layouts, examples, run
        self._reach, self._uniform, self._least = reach, uniform, max(FEWEST, least)
        self.liars: dict[ClientId, str] = {}  # who provably broke the protocol, and how
        self.doubts: dict[ClientId, str] = {}  # who may have broken it
        self._keys: dict[ClientId, Tensor] = {}
        self._rows: dict[ClientId, Tensor] = {}  # sealed shares by sender
        self._digests: dict[ClientId, Tensor] = {}
        self._revealed: dict[ClientId, Tensor] = {}  # revealed shares by who reveals
        self._cuts: list[Shapes] = []  # the different shapes of answers
        self._sums: list[np.ndarray] = []  # of the answers with each of these shapes
        self._cut_as: dict[ClientId, int] = {}

    def steps(self) -> Steps:
        """The four asks; send back who answered each, in the order of asking."""
        asked = list(self._ask.to)
        if len(asked) < self._least:
            raise NotEnoughReplies(
                f"round {self._run[1]}, `{self._ask.step}` asks {len(asked)}, fewer clients than "
                f"the {self._least} that secure aggregation needs"
            )
        began = yield Ask("mask_keys", asked, least=self._least), self._take_keys
        keys = torch.stack([self._keys[client] for client in began])
        counts = {client: self._examples[client] for client in began}
        threshold = self._masks.shares(len(began))
        self._roster = Roster(tuple(began), keys, sum(counts.values()), self._run, threshold)
        least = max(self._least, self._masks.answers(len(began)))
        down = self._roster.tree()
        own = {client: {"examples": torch.tensor([count])} for client, count in counts.items()}
        joined = yield Ask("mask_shares", began, down, own, least), self._take_shares
        each = {c: {**self._ask.each.get(c, {}), MASKS: self._mail(c, joined)} for c in joined}
        masked = replace(self._ask, to=joined, each=each, least=least)
        answered = yield masked, self._take_masked
        self._joined, self._counted = joined, self._alike(answered, least)
        down = {"counted": torch.tensor(self._counted)}
        yield Ask("unmask", self._counted, down, least=0), self._take_revealed
        self._unmask(self._secrets())
        return self._folded()

    def _mail(self, client: ClientId, joined: Sequence[ClientId]) -> dict[str, Tensor]:
        """The shares that were sealed for a client, and who takes part."""
        place = self._roster.place(client)
        rows = torch.stack([self._rows[sender][place] for sender in joined])
        return {"clients": torch.tensor(joined), "shares": rows}

    # ---- answers -----------------------------------------------------------------------------
    def _take_keys(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        keys = tensor_of(up, "keys", torch.uint8, (2 * SECRET,))
        for both in (keys, keys.roll(SECRET)):  # the key of its masks, then the key to seal for it
            roster = Roster((client,), both[None], 0, self._run, 1)
            pair_key(secrets.token_bytes(SECRET), roster, client)  # refuses an invalid key
        self._keys[client] = keys
        return None

    def _take_shares(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        count = len(self._roster.clients)
        rows = tensor_of(up, "shares", torch.uint8, (count, SEALED))
        digests = tensor_of(up, "digests", torch.uint8, (count, 2, DIGEST))
        self._rows[client], self._digests[client] = rows, digests
        return None

    def _take_masked(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        """Add a masked answer to the sum of those with the same shapes."""
        shapes = self._cut(up)
        if shapes not in self._cuts:
            size = sum(shape.numel() for cut in shapes.values() for shape in cut.values())
            self._cuts.append(shapes)
            self._sums.append(np.zeros(size, dtype=np.uint64))
        which = self._cut_as[client] = self._cuts.index(shapes)
        start = 0
        for _, _, value in pieces(self._up, up):
            flat = value.reshape(-1).numpy().view(np.uint64)
            self._sums[which][start : start + len(flat)] += flat
            start += len(flat)
        return None

    def _alike(self, answered: Sequence[ClientId], least: int) -> list[ClientId]:
        """The clients whose answers have the most common shapes; the others are named."""
        which = max(range(len(self._cuts)), key=list(self._cut_as.values()).count)
        self._shapes, self._total = self._cuts[which], self._sums[which]
        for client in answered:
            for name, cut in self._cuts[self._cut_as[client]].items():
                if cut != self._shapes[name]:
                    others = _shown(self._shapes[name])
                    self.liars[client] = f"`{name}` is {_shown(cut)}, others {others}"
        alike = [client for client in answered if client not in self.liars]
        if len(alike) < least:
            raise NotEnoughReplies(
                f"{self._where}: {len(alike)} of {len(answered)} answers are cut alike, fewer than "
                f"the {least} it needs"
            )
        return alike

    def _cut(self, up: Mapping[str, Any]) -> Shapes:
        """The shapes of a masked answer by field; WireError if it is not one."""
        if set(up) != set(self._up):
            raise WireError(f"it sends {', '.join(map(str, up))}, not {', '.join(self._up)}")
        shapes: Shapes = {}
        for name, part in self._up.items():
            value = up[name] if isinstance(up[name], Mapping) else {"": up[name]}
            whole = (isinstance(t, Tensor) and t.dtype == torch.int64 for t in value.values())
            if not all(whole) or not all(isinstance(key, str) for key in value):
                raise WireError(f"`{name}` is not masked")
            cut = {key: value[key].shape for key in sorted(value)}
            if part.fold == "parts":
                layout = self._layouts[part.of]
                fits = cut == {key: torch.Size(slot.shape) for key, slot in layout.items()}
            elif part.kind == "scalar":
                fits = cut == {"": torch.Size()}
            else:
                fits = len(cut) == 1 and set(cut) <= set(KINDS)
            if not fits:
                raise WireError(f"`{name}` is not what is declared")
            shapes[name] = cut
        return shapes

    def _take_revealed(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        shape = (len(self._joined), shamir.WIDTH)
        self._revealed[client] = tensor_of(up, "shares", torch.uint8, shape)
        return None

    # ---- the sum -----------------------------------------------------------------------------
    def _secrets(self) -> dict[ClientId, bytes]:
        """The seeds of those who are counted and the masking keys of those who left."""
        needed, secrets = self._roster.threshold, dict[ClientId, bytes]()
        for owner, shares in self._agreed().items():
            if len(shares) < needed:
                continue
            points = sorted(shares)[:needed]
            secret = self._joined_up(owner, {point: shares[point] for point in points})
            if secret is None:
                self.liars[owner] = "it dealt shares that do not belong together"
            else:
                secrets[owner] = secret
        if len(secrets) == len(self._joined):
            return secrets
        if len(self._revealed) < needed:
            why = (
                f"round {self._run[1]}, `unmask`: {len(self._revealed)} of {len(self._counted)} "
                f"clients answered, fewer than the {needed} it needs"
            )
        else:
            shut = sorted(set(self._joined) - set(secrets))
            why = f"{self._where}: the shares of clients {shut} do not open the sum"
        raise Shut(why)

    def _agreed(self) -> dict[ClientId, dict[int, bytes]]:
        """The shares of each client's secret that agree with their digests, by point.

        The other shares show which clients contradict each other.
        """
        agreed: dict[ClientId, dict[int, bytes]] = {owner: {} for owner in self._joined}
        against: dict[ClientId, set[ClientId]] = {client: set() for client in self._joined}
        for teller, rows in self._revealed.items():
            place = self._roster.place(teller)
            for owner, row in zip(self._joined, rows, strict=True):
                kind = 0 if owner in self._counted else 1
                if digest_of(_bytes(row)) == _bytes(self._digests[owner][place, kind]):
                    agreed[owner][place + 1] = _bytes(row)
                else:
                    against[owner].add(teller)
                    against[teller].add(owner)
        for client, others in against.items():
            if client in others or len(others) > self._roster.liars:
                named = _named(sorted(others))
                self.liars[client] = f"it dealt or revealed false shares: it contradicts {named}"
        for client, others in against.items():
            if client not in self.liars and (left := sorted(others - set(self.liars))):
                self.doubts[client] = f"it and {_named(left)} contradict each other about a share"
        return agreed

    def _joined_up(self, owner: ClientId, shares: Mapping[int, bytes]) -> bytes | None:
        """A secret from as many shares as it needs; None if they do not belong together."""
        counted = owner in self._counted
        try:
            secret = shamir.join(shares, _pulls(tuple(shares)), (2 if counted else 1) * SECRET)
        except OverflowError:
            return None
        if counted:
            return secret[:SECRET] if secret == marked(secret[:SECRET]) else None
        return secret if public_of(secret) == self._roster.mask_key(owner) else None

    def again(self, *, last: bool) -> list[ClientId]:
        """The clients to ask in another try: no liars, and if none is known, no suspects.

        The last try also leaves out those who revealed nothing, if enough others are left.
        """
        honest = [client for client in self._ask.to if client not in self.liars]
        silent = set(self._counted) - set(self._revealed) if last else set[ClientId]()
        suspects = silent | (set() if self.liars else set(self.doubts))
        trusted = [client for client in honest if client not in suspects]
        return trusted if len(trusted) >= self._least else honest

    @property
    def _where(self) -> str:
        return f"round {self._run[1]}, `{self._ask.step}`"

    def _unmask(self, secrets: Mapping[ClientId, bytes]) -> None:
        """Subtract the masks of all participants from the sum."""
        for owner, secret in secrets.items():
            if owner in self._counted:
                add_stream(self._total, secret, -1)
                continue
            for client in self._counted:  # whose masks with the one who left did not cancel
                shared = pair_key(secret, self._roster, client)
                add_stream(self._total, shared, -sign(client, owner))

    def _folded(self) -> Folded:
        """Who answered, and every field combined by its declared rule."""
        sums, start = {}, 0
        for name, cut in self._shapes.items():
            for key, shape in cut.items():
                end = start + shape.numel()
                values = from_whole(self._total[start:end], self._up[name])
                sums[name, key] = values.reshape(shape)
                start = end
        means = self._means(sums)
        result: dict[str, Any] = {}
        for name, part in self._up.items():
            if part.fold == "parts":
                layout = self._layouts[part.of]
                result[name] = {
                    key: _typed(means[name][key], slot.dtype, "sum") for key, slot in layout.items()
                }
                continue
            ((kind, value),) = means[name].items()
            result[name] = value.item() if kind == "" else _typed(value, KINDS[kind], part.fold)
        return Folded(ids=list(self._counted), **result)

    def _means(self, sums: Mapping[tuple[str, str], Tensor]) -> dict[str, dict[str, Tensor]]:
        """Every field's sum or mean; refused if it cannot come from honest clients."""
        weights = {name: float(value) for (name, key), value in sums.items() if key == ""}
        weighing = self._roster.weighing(self._examples, self._uniform)
        means: dict[str, dict[str, Tensor]] = {}
        for name, part in self._up.items():
            own = {key: value for (field, key), value in sums.items() if field == name}
            self._check_weight(part, weights)
            whole = weighing.whole(part, self._counted, weights)
            self._check_range(name, part, own, whole)
            if not whole > 0:
                raise NotEnoughReplies("every answer has weight 0: no client trained on anything")
            means[name] = {key: value / whole for key, value in own.items()}
        if why := self._reach.excess(means):
            self._refuse(why)
        return means

    def _check_weight(self, part: Field, weights: Mapping[str, float]) -> None:
        """Refuse a sum of uploaded weights that honest clients cannot have."""
        if part.by is None or part.by == EXAMPLES:
            return
        most_weight = sum(self._examples[client] for client in self._counted)
        weight = weights[part.by]
        if not -1e-6 <= weight <= most_weight + 1e-6:
            self._refuse(f"weight `{part.by}` is {weight:.4g}, not within 0 and {most_weight}")

    def _check_range(
        self, name: str, part: Field, sums: Mapping[str, Tensor], whole: float
    ) -> None:
        """Refuse sums beyond the largest that honest clients can have together."""
        count = len(self._counted)
        limit = most(part, len(self._roster.clients)) * (count if part.fold == "sum" else whole)
        limit += (count + 1) * 2.0 ** -bits(part) + 1e-9 * limit  # rounding
        for key, value in sums.items():
            if (size := size_of(value)) > limit:
                self._refuse(f"{f'`{name}` {key}'.rstrip()} is {size:.4g}, beyond {limit:.4g}")

    def _refuse(self, why: str) -> NoReturn:
        raise NotEnoughReplies(
            f"{self._where}: the sum over clients {self._counted} is out of range: {why}. At least "
            "one of them sent false numbers or masks; which one cannot be seen from a sum"
        )


@lru_cache(maxsize=64)
def _pulls(points: tuple[int, ...]) -> dict[int, int]:
    return shamir.pulls(points)


def _named(clients: Sequence[ClientId]) -> str:
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {list(clients)}"


def _typed(value: Tensor, dtype: torch.dtype, fold: str) -> Tensor:
    """A value in the type that was uploaded; the mean of integers stays float64.

    Counters of the model are rounded like sums.
    """
    if dtype.is_floating_point:
        return value.to(dtype)
    return value.round().to(dtype) if fold == "sum" else value


def _bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()


def _shown(cut: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{key} {tuple(shape)}".strip() for key, shape in cut.items())
