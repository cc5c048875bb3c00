"""FedStyle: each client learns what its images look like, and content that does not mind it.

Yang et al., More Generalized and Personalized Unsupervised Representation Learning in a Distributed
System, 2022. The first time a client trains, a network of its own learns to tell its images from
their Sobel copies (Algorithm 2, eq. 2); from then on that style network is held still. In every
round a generator of the client's own, G, infuses content features with style, view 1 with the
image's and view 2 with its Sobel copy's, and the client minimises

  L(g(h1), g(h2)) + strength L(g(G[h1; s(x)]), g(G[h2; s(sobel x)]))

for any objective L of two views (Algorithm 3, eq. 3). Only the content model, f and g, is sent and
averaged (Algorithm 4). A client's own features are h + G[h; s(x)] (eq. 4), with h by the content
model as it last trained it; G learns on, beside a classifier.

Where the paper disagrees with itself: eq. 3 has one style in both views, Algorithm 3 has the two
above. Algorithm 3 does not list G among what is trained, but the analysis fits it by the second
loss. G is said to have 128 outputs, but g and eq. 4 take it for a feature, so it has as many as
those. Eq. 2 is a sum over anchors that divides each anchor's n - 1 partners by 2n - 1; for batches
of 64 it is 63.5 times the mean, which at the published rate can collapse a network without
BatchNorm, so `reduction: mean` is the default. The sum over models divided by client sizes is an
average by size. Rows of eq. 2 are of unit length, which its temperature takes for granted, and both
styles pass the style network as one batch, for BatchNorm would even out the difference of two.

Without strength it is FedAvg bit for bit, for style draws from generators of its own. They do not
depend on the round, so that a client that comes late has the style that it would have had. As style
follows from all images without noise, single images cannot be hidden by `local.dp_clip`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, counted
from harmonium.core.types import Weights
from harmonium.data.augment.sobel import Edges, sobel
from harmonium.data.augment.views import Views
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.personal import Own
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Batch, Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen, check, mlp
from harmonium.learning.parts import Part, Parts
from harmonium.learning.training import fit
from harmonium.methods import methods
from harmonium.methods.fedstyle.contrast import Reduction, style_contrast

OUT = 128  # of the style network's head, which is thrown away
MEMORY = 2**29  # bytes of style features that a client's task may hold; of more, none


@dataclass(frozen=True, kw_only=True)
class Styled(Context):
    """Style features of the client's images."""

    styles: Callable[[Tensor], Tensor] | None  # of images, then of copies, (2 n, dim), by places


@methods("fedstyle")
@dataclass(frozen=True)
class FedStyle(Method):
    """Content that is averaged, infused with style that each client keeps to itself."""

    paper = "Yang et al., 2022"
    context = Styled
    reveals = (
        "Style networks, generators and style features stay with their clients; of style, the "
        "model that leaves has what training beside them left in it."
    )

    strength: float = 0.5  # of the loss of infused features (lambda); published 0.1 to 1; 0: none
    style_epochs: int = 10  # of the style, beside a client's first training; 0: as first drawn
    style_lr: float | None = None  # learning rate of the style, constant; none: local.lr
    style_temperature: float = 0.07  # of the contrast between the two styles
    reduction: Reduction = "mean"  # of the style's loss; sum: eq. 2 as printed
    edges: Edges = "luminance"  # what Sobel's filter looks at
    hidden: int = 256  # width of the inner layer of generator and style head

    def __post_init__(self) -> None:
        if not self.objective.by_projections or len(self.views.pipelines) != 2:
            raise ConfigError(
                "fedstyle infuses the projections of two views: objective is "
                f"{self.objective.name} with {counted(len(self.views.pipelines), 'view')}; set "
                "objective=simclr or objective=simsiam, and views=fedstyle"
            )
        check(self, "0 or more", lambda value: value >= 0, "strength", "style_epochs")
        check(self, "positive", lambda value: value > 0, "style_lr", "style_temperature")
        check(self, "at least 1", lambda size: size >= 1, "hidden")

    def extra_parts(self, made: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """Style and generator, which stay; the style's head, which is needed once."""
        with torch.random.fork_rng(devices=[]):  # terms are drawn as they would be without style
            torch.default_generator.manual_seed(seeds.seed_of(self.world.seed, "init", "style"))
            style = self.encoder.build(self.world.channels, self.world.side)
            return {
                "style": Part(style, "local"),
                "style_head": Part(mlp(dim, self.hidden, OUT), "fresh"),
                "generator": Part(mlp(2 * dim, self.hidden, dim), "local"),
            }

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received content model and the client's generator beside its frozen style."""
        parts = self.pull(client, got.model)
        if "parts" not in client.state:
            self.learn_style(parts, client)
        moving = [name for name in parts if not name.startswith("style")]
        styles = self.styles(parts["style"].eval(), client) if self.strength else None
        context = Styled(me=client.id, anchor=got.model, styles=styles)
        done = self.fit(parts, client, train=moving, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """The first time also those of the style; each time one for style features."""
        more = self.style_epochs + (1 if self.strength else 0) if step == "train" else 0
        return super().passes_of(step) + more

    def learn_style(self, parts: Parts, client: Client) -> None:
        """Tell images from their Sobel copies (Algorithm 2), whatever the round."""
        if not self.style_epochs:
            return

        def loss(batch: Batch) -> Tensor:
            rows = parts["style_head"](parts["style"](self.both(batch.make, batch.pixels)))
            pictures, copies = rows.chunk(2)
            return style_contrast(pictures, copies, self.style_temperature, self.reduction)

        rate = self.local.lr if self.style_lr is None else self.style_lr
        once = replace(self.local, epochs=self.style_epochs, lr=rate, schedule="constant", warmup=0)
        path = (self.world.seed, "style", client.id)
        alike = replace(client, rng=seeds.torch_rng(*path))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of(*path, "torch"))
            fit(parts, alike, loss, once, train=["style", "style_head"])

    def both(self, views: Views, pixels: Tensor) -> Tensor:
        """Images as they are, then their Sobel copies, `(2n, channels, height, width)`."""
        return torch.cat([views.plain(pixels), views.plain(sobel(pixels, self.edges))])

    def styles(self, style: nn.Module, client: Client) -> Callable[[Tensor], Tensor]:
        """Style features of examples by their positions (n,): of images, then of Sobel copies.

        They never change, so they are computed once a task, unless they are too many to hold.
        """

        @torch.no_grad()
        def look(index: Tensor) -> Tensor:
            return cast(Tensor, style(self.both(client.views, client.examples.pixels(index))))

        count = len(client.examples)
        features = self.encoder.features_for(self.world.channels, self.world.side)
        if 2 * count * features * 4 > MEMORY:
            return look
        pieces = [
            look(some).chunk(2) for some in torch.split(torch.arange(count), self.local.batch)
        ]
        pictures, copies = (torch.cat(rows) for rows in zip(*pieces, strict=True))
        return lambda index: torch.cat([pictures[index], copies[index]])

    def score(self, parts: Parts, seen: Seen, context: Styled) -> Tensor:
        """The objective's loss, and that of infused features (eq. 3)."""
        plain = super().score(parts, seen, context)
        if not self.strength or context.styles is None:
            return plain
        styles = context.styles(seen.batch.index).chunk(2)
        both = [torch.cat([h, style], 1) for h, style in zip(seen.h, styles, strict=True)]
        h, z = parts.through(both, "generator", "projector")
        infused = replace(seen, h=h, z=z)
        return plain + self.strength * super().score(parts, infused, context)

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """Content and style of an image; then eq. 4, whose generator learns on."""
        parts = self.blueprint.copy_from(model, state.get("parts", {}))
        frozen = Both(parts["encoder"], parts["style"]).eval()
        return Own(frozen, Stylised(parts["generator"]))


class Both(nn.Module):
    """What two networks make of an image, side by side."""

    def __init__(self, content: nn.Module, style: nn.Module) -> None:
        """Take the networks as they are."""
        super().__init__()
        self.content, self.style = content, style

    def forward(self, pictures: Tensor) -> Tensor:
        """Content and style features, (n, 2 dim)."""
        return torch.cat([self.content(pictures), self.style(pictures)], 1)


class Stylised(nn.Module):
    """Equation 4: content, and content infused with style."""

    def __init__(self, generator: nn.Module) -> None:
        """Take the generator as it is."""
        super().__init__()
        self.generator = generator

    def forward(self, rows: Tensor) -> Tensor:
        """Features (n, dim) of content and style side by side, (n, 2 dim)."""
        return cast(Tensor, rows.chunk(2, 1)[0] + self.generator(rows))
