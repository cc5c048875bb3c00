"""FedStyle: clients share a content model and infuse it with a style that each keeps to itself.

Yang et al., More Generalized and Personalized Unsupervised Representation Learning in a Distributed
System, 2022. Algorithm and equation numbers below are the paper's.

Symbols, and the parts of the model that they are in this file:

    symbol          part                meaning
    f_{w_c}         `encoder`           content model, images to features h_c of size d
    g_{w_c}         `projector`         content projector, features to z (and SimSiam's predictor)
    f_{w_s}         `style`             style model, an encoder of the same architecture
    g_{w_s}         `style_head`        style projector, needed only while f_{w_s} is trained
    G_{w_g}         `generator`         two-layer MLP, [h_c ; h_s] of size 2d to size d
    lambda          `strength`          weight of the style-infused loss
    E_s             `style_epochs`      epochs of style extraction
    E_l, tau        `local.epochs`, `style_temperature`

Algorithm 2 (`learn_style`, with the loss in `contrast.py`). A client trains f_{w_s} and g_{w_s} to
tell its images from their Sobel-filtered copies (equation 2). f_{w_s} is frozen from then on.

Algorithm 3 (`train`, `score`). With h_c^1 and h_c^2 the content features of two augmentations of x,
h_s = f_{w_s}(x) and h_sobel = f_{w_s}(Sobel(x)), a client minimises

    L_unsup(g(h_c^1), g(h_c^2)) + lambda L_unsup(g(G[h_c^1 ; h_s]), g(G[h_c^2 ; h_sobel]))

for any objective L_unsup of two projected views (equation 3).

Algorithm 4 is FedAvg of the content model around these two.

Equation 4 (`own`). For a client's own tasks its features are h = h_c + G[h_c ; h_s], with h_c from
the content model as the client last trained it. G is trained further, together with the classifier.

Messages:

    ask     to        down                        up
    train   cohort    model: f_{w_c}, g_{w_c}     model: the same, trained; loss

The server remembers nothing but the model. A client keeps f_{w_s} and G (`parts` in its state);
g_{w_s} is discarded after Algorithm 2. Nothing about style is sent.

Where the paper is unclear or contradicts itself:

- Equation 3 infuses both views with the same style (c' twice). Algorithm 3, lines 7 and 8, infuses
  the first with the image's style and the second with the Sobel copy's. This follows Algorithm 3.
- Algorithm 3, line 10, does not list G among what is trained. The paper's analysis has g o G fitted
  by the second loss, so G is trained here.
- The text gives 128 as the output size of "the projector and the generator". Neither g(G[...]) nor
  the sum in equation 4 would then have matching sizes, so G returns d features.
- Equation 2 as printed is a sum; for batches of 64 it is 63.5 times the usual mean. At the
  published learning rate of 0.1 that can collapse a network without BatchNorm. `reduction: mean` is
  the default, `sum` is the formula as printed. `contrast.py` has the details.
- Algorithm 4, line 11 (and Algorithm 1, line 10), sums w_k / |D_k|; these weights do not add up to
  1. Models are averaged in proportion to the clients' sizes, as FedAvg does. The paper's clients
  are all of the same size, for which this is the plain mean.
- Algorithm 4, line 2, extracts every client's style before round 1. Here a client does so the first
  time it is asked to train. The random draws do not depend on the round, so the style is the same.
- The Sobel filter is not specified further; see `harmonium.data.augment.sobel` for the one used.

No code was published with the paper.

With `strength: 0` the content model is FedAvg's, bit for bit, because everything about style draws
from random generators of its own. The style is a function of all the client's images and carries no
noise, so single images cannot be protected by `local.dp_clip`, which is therefore refused.
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

OUT = 128  # output size of the style projector g_{w_s}, as in the paper
MEMORY = 2**29  # bytes of style features that a task may cache; above it none are cached

# Style features of examples, given their positions (n,): h_s in the first n rows and h_sobel in the
# last n, (2n, d).
StyleFeatures = Callable[[Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class StyleContext(Context):
    """What the loss needs beside model and batch: style features of the client's images."""

    style_features: StyleFeatures | None  # none: no style-infused loss (strength is 0)


@methods("fedstyle")
@dataclass(frozen=True)
class FedStyle(Method):
    """FedAvg of a content model that is infused with a style which stays at each client."""

    paper = "Yang et al., 2022"
    context = StyleContext
    reveals = (
        "Style networks, generators and style features stay with their clients; of style, the "
        "model that leaves has what training beside them left in it."
    )

    strength: float = 0.5  # of the style-infused loss (lambda); published 0.1 to 1; 0: FedAvg
    style_epochs: int = 10  # epochs of style extraction (E_s), once a client; 0: untrained style
    style_lr: float | None = None  # learning rate of style extraction, constant; none: local.lr
    style_temperature: float = 0.07  # of the style loss (tau in equation 2)
    reduction: Reduction = "mean"  # of the style loss; sum: equation 2 as printed
    edges: Edges = "luminance"  # what the Sobel filter is applied to
    hidden: int = 256  # width of the hidden layer of generator and style projector

    def __post_init__(self) -> None:
        # Equation 3 passes G's output through g in place of the encoder's, so the objective must be
        # a function of the projections of exactly two views.
        if not self.objective.by_projections or len(self.views.pipelines) != 2:
            raise ConfigError(
                "fedstyle infuses the projections of two views: objective is "
                f"{self.objective.name} with {counted(len(self.views.pipelines), 'view')}; set "
                "objective=simclr or objective=simsiam, and views=fedstyle"
            )
        check(self, "0 or more", lambda value: value >= 0, "strength", "style_epochs")
        check(self, "positive", lambda value: value > 0, "style_lr", "style_temperature")
        check(self, "at least 1", lambda size: size >= 1, "hidden")

    def extra_parts(self, modules: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """The style model and the generator, which stay at the client, and the style projector."""
        # A generator of its own for these weights: other parts are initialised as FedAvg's are.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of(self.world.seed, "init", "style"))
            style = self.encoder.build(self.world.channels, self.world.side)
            return {
                "style": Part(style, "local"),
                # Neither sent nor kept: only Algorithm 2 uses it, which runs once.
                "style_head": Part(mlp(dim, self.hidden, OUT), "fresh"),
                # d outputs and not 128, see the module's docstring.
                "generator": Part(mlp(2 * dim, self.hidden, dim), "local"),
            }

    # ---- Algorithm 4: one round at a client ------------------------------------------------------

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received content model and the client's generator beside the frozen style."""
        # Line 6: w_{c,i} <- w; `pull` also restores the client's own style model and generator.
        parts = self.pull(client, got.model)
        # Line 2: `push` has stored `parts` if the client has answered before.
        if "parts" not in client.state:
            self.learn_style(parts, client)
        # Lines 7 to 9: E_l epochs of Algorithm 3. Its line 1 freezes the style model, which is in
        # evaluation mode: otherwise its BatchNorm statistics would follow every batch.
        style_features = None
        if self.strength:
            style_features = self.style_features(parts["style"].eval(), client)
        context = StyleContext(me=client.id, anchor=got.model, style_features=style_features)
        trained = [name for name in parts if not name.startswith("style")]
        done = self.fit(parts, client, train=trained, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """Beside training: style extraction (the first time) and one pass for style features."""
        more = self.style_epochs + (1 if self.strength else 0) if step == "train" else 0
        return super().passes_of(step) + more

    # ---- Algorithm 2: style extraction -----------------------------------------------------------

    def learn_style(self, parts: Parts, client: Client) -> None:
        """Train the style model and its projector to tell images from their Sobel copies."""
        if not self.style_epochs:
            return

        def loss(batch: Batch) -> Tensor:
            # Lines 4 and 5. Images and copies pass the network as one batch: BatchNorm on either
            # alone would normalise away the very difference that is to be learned.
            h = parts["style"](self.with_sobel_copies(batch.make, batch.pixels))
            z, z_sobel = parts["style_head"](h).chunk(2)
            return style_contrast(z, z_sobel, self.style_temperature, self.reduction)  # line 7

        lr = self.local.lr if self.style_lr is None else self.style_lr
        # The rate must not follow the schedule over rounds, nor the random draws the round: a
        # client that joins late then has the style that it would have had from the start.
        local = replace(self.local, epochs=self.style_epochs, lr=lr, schedule="constant", warmup=0)
        seed_path = (self.world.seed, "style", client.id)
        reseeded = replace(client, rng=seeds.torch_rng(*seed_path))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of(*seed_path, "torch"))
            fit(parts, reseeded, loss, local, train=["style", "style_head"])

    def with_sobel_copies(self, views: Views, pixels: Tensor) -> Tensor:
        """The images without augmentation, then their Sobel copies, `(2n, channels, h, w)`."""
        return torch.cat([views.plain(pixels), views.plain(sobel(pixels, self.edges))])

    # ---- Algorithm 3: content training with infused style ----------------------------------------

    def style_features(self, style: nn.Module, client: Client) -> StyleFeatures:
        """A function that returns h_s and h_sobel of a batch (Algorithm 3, line 4).

        Inputs are not augmented and the style model is frozen, so the features are the same in
        every epoch: they are computed once in a task, unless they would take too much memory.
        """

        @torch.no_grad()
        def compute(pixels: Tensor) -> Tensor:
            return cast(Tensor, style(self.with_sobel_copies(client.views, pixels)))

        count = len(client.examples)
        size = self.encoder.features_for(self.world.channels, self.world.side)
        if 2 * count * size * 4 > MEMORY:  # 4 bytes a float
            return lambda batch: compute(batch.pixels)
        batches = torch.split(torch.arange(count), self.local.batch)
        pairs = [compute(client.examples.pixels(index)).chunk(2) for index in batches]
        h_s, h_sobel = (torch.cat(rows) for rows in zip(*pairs, strict=True))
        return lambda batch: torch.cat([h_s[batch.device_index], h_sobel[batch.device_index]])

    def score(self, parts: Parts, seen: Seen, context: StyleContext) -> Tensor:
        """Equation 3: the objective's loss, plus lambda times that of style-infused features."""
        # Lines 5 and 6 are in `seen`: the views, h_c^1 and h_c^2 (`seen.h`), and g of them.
        plain = super().score(parts, seen, context)
        if not self.strength or context.style_features is None:
            return plain
        styles = context.style_features(seen.batch).chunk(2)  # h_s, h_sobel
        # Lines 7 and 8. Nothing is detached: the second loss reaches f_{w_c} through G.
        concatenated = [torch.cat([h, style], 1) for h, style in zip(seen.h, styles, strict=True)]
        h, z = parts.through(concatenated, "generator", "projector")
        # Lines 10 and 11. The objective's own heads, such as SimSiam's predictor, serve both terms.
        infused = replace(seen, h=h, z=z)
        return plain + self.strength * super().score(parts, infused, context)

    # ---- Equation 4: a client's own features -----------------------------------------------------

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """Frozen content and style models, and the generator as an adapter to train further."""
        parts = self.blueprint.copy_from(model, state.get("parts", {}))
        frozen = ContentAndStyle(parts["encoder"], parts["style"]).eval()
        return Own(frozen, StylisedContent(parts["generator"]))


class ContentAndStyle(nn.Module):
    """Content and style features of images, concatenated: [h_c ; h_s]."""

    def __init__(self, content: nn.Module, style: nn.Module) -> None:
        """Take both encoders without copying them."""
        super().__init__()
        self.content, self.style = content, style

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, 2d) of images (n, channels, height, width)."""
        return torch.cat([self.content(images), self.style(images)], 1)


class StylisedContent(nn.Module):
    """Equation 4: h = h_c + G[h_c ; h_s]."""

    def __init__(self, generator: nn.Module) -> None:
        """Take the generator without copying it."""
        super().__init__()
        self.generator = generator

    def forward(self, rows: Tensor) -> Tensor:
        """Features (n, d) of concatenated content and style, (n, 2d)."""
        h_c, _ = rows.chunk(2, 1)
        return cast(Tensor, h_c + self.generator(rows))
