"""CCT: a compact transformer on tokens from convolutions (Hassani et al., 2021).

CCT-4/3x2 has four layers and two 3x3 convolutions that make the tokens. The layers are those of the
authors' code: the second norm acts on the residual stream itself and not on the input of the MLP
alone. The feature is the pooled sequence; there is no classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_device
from harmonium.core.errors import ConfigError
from harmonium.learning.encoders import Encoder, encoders


@encoders("cct-4-3x2")
@dataclass(frozen=True)
class CCT(Encoder):
    """Compact convolutional transformer of four layers, CCT-4/3x2 (Hassani et al., 2021).

    Federated SimCLR uses it on images of 64 pixels. An image becomes a token for every 4x4
    pixels, and positions are learned, so the number of parameters depends on the side.

    >>> sum(p.numel() for p in CCT().build(channels=3, side=32).parameters())
    480833
    """

    layers: ClassVar[int] = 4
    heads: ClassVar[int] = 2
    dim: ClassVar[int] = 128

    attention_dropout: float = 0.1  # share of attention weights left out in training
    stochastic_depth: float = 0.1  # how often training skips the last layer; the first one never

    def __post_init__(self) -> None:
        for name in ("attention_dropout", "stochastic_depth"):
            if not 0 <= (rate := getattr(self, name)) < 1:
                raise ConfigError(f"encoder.{name} is {rate}; it must be at least 0 and below 1")

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        return self.dim

    def build(self, channels: int, side: int) -> nn.Module:
        """Tokens, positions, layers, norm and pooling, initialised as in the authors' code."""
        filters: list[nn.Module] = []
        for wide in (self.dim // 2, self.dim):
            filters += [nn.Conv2d(channels, wide, 3, 1, 1, bias=False), nn.ReLU(inplace=True)]
            filters += [nn.MaxPool2d(3, 2, 1)]
            channels, side = wide, (side + 1) // 2
        skips = [self.stochastic_depth * layer / (self.layers - 1) for layer in range(self.layers)]
        network = nn.Sequential(
            nn.Sequential(*filters, Tokens()),
            Positions(side**2, self.dim),
            *(Layer(self.dim, self.heads, self.attention_dropout, skip) for skip in skips),
            nn.LayerNorm(self.dim),
            SequencePool(self.dim),
        )
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        return network


class Tokens(nn.Module):
    """A feature map as a sequence of tokens, row by row."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, dim, side, side) to (n, tokens, dim)."""
        return x.flatten(2).transpose(1, 2)


class Positions(nn.Module):
    """Learned positions that are added to the tokens."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(tokens, dim), std=0.2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) to the same."""
        return x + self.table


class Layer(nn.Module):
    """x <- norm2(x + attention(norm1(x))), then x + mlp(x); training skips either at random."""

    def __init__(self, dim: int, heads: int, dropout: float, skip: float) -> None:
        super().__init__()
        self.skip = skip
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) to the same."""
        skip = self.skip if self.training else 0.0
        x = self.norm2(x + drop_images(self.attention(self.norm1(x)), skip))
        return x + drop_images(self.mlp(x), skip)


class Attention(nn.Module):
    """Self-attention with several heads; only the last projection has a bias."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) to the same."""
        split = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, dim / heads)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        mixed: Tensor = self.project(seen.transpose(1, 2).flatten(2))
        return mixed


class SequencePool(nn.Module):
    """The mean of the tokens, weighted by a softmax of a learned score of each."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def weights(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) to (n, tokens); each row sums to one."""
        return functional.softmax(self.score(x).squeeze(2), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, tokens, dim) to (n, dim)."""
        return torch.einsum("nt,ntd->nd", self.weights(x), x)


def drop_images(x: Tensor, rate: float) -> Tensor:
    """Set whole images of (n, tokens, dim) to zero at `rate`; the others are scaled up."""
    if rate == 0:
        return x
    kept = functional.dropout(torch.ones(len(x), 1, 1, dtype=x.dtype), rate)
    return x * to_device(kept, x.device)  # drawn on the CPU, so the same on every device
