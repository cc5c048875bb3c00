"""Secure aggregation at the server: four asks in place of one, and the sum of masked answers.

The server never holds a client's answer without a mask. It takes the seeds of those who answered
and the masking keys of those who left, takes their masks away from the sum, and has the sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.errors import NotEnoughReplies, WireError
from harmonium.federation import shamir
from harmonium.federation.fold import Layouts
from harmonium.federation.masking import (
    DIGEST,
    SEALED,
    SECRET,
    Roster,
    add_stream,
    digest_of,
    pair_key,
    public_of,
    sign,
    tensor_of,
)
from harmonium.federation.summable import (
    FEWEST,
    KINDS,
    ROOM,
    Masks,
    from_whole,
    pieces,
)
from harmonium.federation.wire import MASKS, Ask, ClientId, Exchange, Folded

Take = Callable[[ClientId, Mapping[str, Any]], str | None]  # counts an answer, or says why not
Steps = Generator[tuple[Ask, Take], list[ClientId], Folded]


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
        uniform: bool,
        least: int,
    ) -> None:
        """Nothing is known yet.

        Args:
            masks: how many clients it takes.
            ask: the method's own.
            declared: what is uploaded, and how each field is combined.
            layouts: what model parts look like.
            examples: what weighs each client.
            run: the run's seed, the round and the ask.
            uniform: count every client alike wherever its number of examples would weigh it.
            least: fewest answers that the sum needs for other reasons.
        """
        self._masks, self._ask, self._up = masks, ask, declared.up
        self._layouts, self._examples, self._run = layouts, examples, run
        self._uniform, self._least = uniform, max(FEWEST, least)
        self._keys: dict[ClientId, Tensor] = {}
        self._rows: dict[ClientId, Tensor] = {}  # sealed shares by sender
        self._digests: dict[ClientId, Tensor] = {}
        self._told: dict[ClientId, Tensor] = {}  # revealed shares by who reveals
        self._shapes: dict[str, Mapping[str, torch.Size]] | None = None  # as the first answer's
        self._total = np.zeros(0, dtype=np.uint64)

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
        counted = yield masked, self._take_masked
        down = {"counted": torch.tensor(counted)}
        self._joined, self._counted = joined, counted
        telling = yield Ask("unmask", counted, down, least=threshold), self._take_told
        self._unmask(telling[:threshold])
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
            pair_key(secrets.token_bytes(SECRET), roster, client)  # refuses what is no key
        self._keys[client] = keys
        return None

    def _take_shares(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        count = len(self._roster.clients)
        rows = tensor_of(up, "shares", torch.uint8, (count, SEALED))
        digests = tensor_of(up, "digests", torch.uint8, (count, 2, DIGEST))
        self._rows[client], self._digests[client] = rows, digests
        return None

    def _take_masked(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        """Add a masked answer to the sum, if it is cut like the model and the answers before."""
        shapes = self._cut(up)
        if self._shapes is None:
            size = sum(shape.numel() for cut in shapes.values() for shape in cut.values())
            self._shapes, self._total = shapes, np.zeros(size, dtype=np.uint64)
        for name, cut in shapes.items():
            if cut != self._shapes[name]:
                return f"`{name}` is {_shown(cut)}, others {_shown(self._shapes[name])}"
        start = 0
        for _, _, value in pieces(self._up, up):
            flat = value.reshape(-1).numpy().view(np.uint64)
            self._total[start : start + len(flat)] += flat
            start += len(flat)
        return None

    def _cut(self, up: Mapping[str, Any]) -> dict[str, Mapping[str, torch.Size]]:
        """The shapes of a masked answer by field; WireError if it is none."""
        if set(up) != set(self._up):
            raise WireError(f"it sends {', '.join(map(str, up))}, not {', '.join(self._up)}")
        shapes: dict[str, Mapping[str, torch.Size]] = {}
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

    def _take_told(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        """Keep revealed shares, if they are those that were dealt."""
        rows = tensor_of(up, "shares", torch.uint8, (len(self._joined), shamir.WIDTH))
        place = self._roster.place(client)
        for owner, row in zip(self._joined, rows, strict=True):
            kind = 0 if owner in self._counted else 1
            if digest_of(_bytes(row)) != _bytes(self._digests[owner][place, kind]):
                return f"its share of client {owner} is not the one that client dealt"
        self._told[client] = rows
        return None

    # ---- the sum -----------------------------------------------------------------------------
    def _unmask(self, telling: Sequence[ClientId]) -> None:
        """Take away the masks of all who took part."""
        points = {client: self._roster.place(client) + 1 for client in telling}
        counts = shamir.pulls(list(points.values()))
        for place, owner in enumerate(self._joined):
            shares = {points[c]: _bytes(self._told[c][place]) for c in telling}
            try:
                secret = shamir.join(shares, counts, SECRET)
                if owner not in self._counted and public_of(secret) != self._roster.mask_key(owner):
                    raise OverflowError
            except OverflowError:
                raise NotEnoughReplies(
                    f"client {owner} dealt shares that do not belong together: the sum stays shut"
                ) from None
            if owner in self._counted:
                add_stream(self._total, secret, -1)
                continue
            for client in self._counted:  # whose masks with the one who left did not cancel
                shared = pair_key(secret, self._roster, client)
                add_stream(self._total, shared, -sign(client, owner))

    def _folded(self) -> Folded:
        """Who answered, and every field combined by its declared rule."""
        signed, room = self._total.view(np.int64), 2**ROOM + len(self._counted)  # and rounding
        if len(signed) and not -room <= signed.min() <= signed.max() <= room:
            raise NotEnoughReplies("the masks did not cancel: some client keeps to other rules")
        sums, start = {}, 0
        for name, cut in (self._shapes or {}).items():
            for key, shape in cut.items():
                end = start + shape.numel()
                values = from_whole(self._total[start:end], self._up[name])
                sums[name, key] = values.reshape(shape)
                start = end
        weights = {name: value for (name, key), value in sums.items() if key == ""}
        weighing = self._roster.weighing(self._examples, self._uniform)
        result: dict[str, Any] = {}
        for name, part in self._up.items():
            whole = weighing.whole(part, self._counted, weights)
            if not whole > 0:
                raise NotEnoughReplies("every answer has weight 0: no client trained on anything")
            means = {key: value / whole for (n, key), value in sums.items() if n == name}
            if part.fold == "parts":
                layout = self._layouts[part.of]
                result[name] = {
                    key: _typed(means[key], slot.dtype, "sum") for key, slot in layout.items()
                }
                continue
            ((kind, value),) = means.items()
            result[name] = value.item() if kind == "" else _typed(value, KINDS[kind], part.fold)
        return Folded(ids=list(self._counted), **result)


def _typed(value: Tensor, dtype: torch.dtype, fold: str) -> Tensor:
    """In the type that was uploaded; a mean of whole numbers is none and stays float64.

    Counters of the model are rounded like sums.
    """
    if dtype.is_floating_point:
        return value.to(dtype)
    return value.round().to(dtype) if fold == "sum" else value


def _bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()


def _shown(cut: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{key} {tuple(shape)}".strip() for key, shape in cut.items())
