"""Client-level differential privacy: the change of the model by one client is clipped and noised.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018. The change of the
whole model by one client is clipped to a norm of at most `clip`. Noise is added either by the
client, to its own change, which protects it from the server as well; or by the server, to the
average, which takes far less noise and trusts the server. Neighbouring data sets replace all images
of one client, so the change moves by at most twice the clip. There is no amplification by sampling,
because the server knows who takes part: every ask of a client counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId, Weights
from harmonium.federation.filters.base import Filter, Message
from harmonium.federation.wire import EXAMPLES, Exchange, Folded, changes_model
from harmonium.learning import dpsgd
from harmonium.learning.contract import called
from harmonium.privacy.mechanisms import Noise, Randomness, Release

if TYPE_CHECKING:
    from harmonium.federation.method import Method
    from harmonium.learning.client import Client

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Updates:
    """How far a client may change the model, and the noise on that change."""

    clip: float  # largest norm of the change, over all tensors of the model that are sent
    noise: float = 0.0  # standard deviation over sensitivity, which is twice the clip
    place: Literal["client", "server"] = "client"  # where noise is added
    source: Randomness = "system"

    @property
    def costs(self) -> tuple[Release, ...]:
        """What one reply costs; for the server's noise, in units of one client's change."""
        if not self.noise:
            return ()
        sensitivity = 2 * self.clip
        scale = self.noise * sensitivity
        return (Release("model", "gaussian", sensitivity, scale, neighbours="client"),)

    @property
    def guards(self) -> bool:
        """Whether models have noise when they leave a client."""
        return self.noise > 0 and self.place == "client"

    @property
    def at_average(self) -> bool:
        """Whether the server adds noise to the average."""
        return self.noise > 0 and self.place == "server"

    def words(self) -> tuple[str, ...]:
        """A description in plain words, for the card."""
        change = f"What a client's training changes in the model is shortened to {self.clip:g}"
        if not self.noise:
            bounds = "without noise, which bounds what a client can do and hides nothing"
            return (f"{change}, {bounds}.",)
        who = "client, before it leaves" if self.place == "client" else "server, on the average"
        size = f"{self.noise:g} deviations over its sensitivity"
        return (f"{change} and gets noise by the {who}: {size}.",)

    def at_client(self, client: Client, before: Weights, after: Weights) -> Weights:
        """The model to send in place of the one that training ended with."""
        change = {key: after[key].double() - before[key].double() for key in after}
        norm = math.sqrt(sum(float(part.square().sum()) for part in change.values()))
        if not math.isfinite(norm) and self.noise:  # a refusal would reveal something of the images
            change = {key: torch.zeros_like(part) for key, part in change.items()}
        elif norm > self.clip:
            change = {key: self.clip / norm * part for key, part in change.items()}
        elif not self.guards:
            return after
        if self.guards:
            sigma = self.noise * 2 * self.clip
            change = {key: client.noise.gaussian(part, sigma) for key, part in change.items()}
        sent = {key: (before[key] + part).to(after[key].dtype) for key, part in change.items()}
        if self.guards:
            client.released("model", sent, self.costs)
        return sent

    def at_server(
        self, mean: Weights, shares: Mapping[ClientId, float], path: tuple[int, ...]
    ) -> Weights:
        """An average with noise for the client of the largest share; `path` is seed, round, ask."""
        sigma = self.noise * 2 * self.clip * max(shares.values()) / sum(shares.values())
        seed, *when = path
        noise = Noise(self.source, seeds.torch_rng(seed, "noise", "server", *when))
        return {
            key: noise.gaussian(part.double(), sigma).to(part.dtype) for key, part in mean.items()
        }

    def check(self, method: Method) -> None:
        """Refuse a method whose replies this would not protect."""
        trained = {s: one for s, one in method.exchanges().items() if changes_model(one)}
        if not trained:
            raise ConfigError(
                f"privacy.update_clip has nothing to do: {called(method)} sends no model"
            )
        _check_nothing_else_is_sent(method, trained)
        _check_tensors(method)
        if self.at_average:
            _check_average(method, trained)


def _check_nothing_else_is_sent(method: Method, trained: Mapping[str, Exchange]) -> None:
    """Refuse weights that leave a client beside the one model whose change is clipped."""
    for step, exchange in method.exchanges().items():
        others = [n for n, f in exchange.up.items() if f.kind == "weights" and n != "model"]
        if others or (step not in trained and "model" in exchange.up):
            name = (others or ["model"])[0]
            raise ConfigError(
                f"privacy.update_clip protects the change of one model, but `{step}` of "
                f"{called(method)} also sends `{name}`"
            )


def _check_tensors(method: Method) -> None:
    """Refuse a model that sends tensors which are not averaged like weights."""
    for key, slot in method.blueprint.layouts()["model"].items():
        if key.endswith(STATISTICS):
            raise ConfigError(
                f"privacy.update_clip cannot protect BatchNorm's {key}: set batch_norm=local, "
                "or norms without statistics (encoder.norm, objective.norm)"
            )
        if slot.rule != "mean" or not slot.dtype.is_floating_point:
            raise ConfigError(
                f"privacy.update_clip cannot protect {key}: it is not averaged as weights are"
            )


def _check_average(method: Method, trained: Mapping[str, Exchange]) -> None:
    """Refuse an average if the server cannot know how far one client moves it."""
    if method.aggregation.name != "mean":
        raise ConfigError(
            "privacy.update_place=server knows how far one client moves a mean, but not how far it "
            f"moves aggregation={method.aggregation.name}: set aggregation=mean or "
            "privacy.update_place=client"
        )
    if any(exchange.up["model"].by not in (None, EXAMPLES) for exchange in trained.values()):
        raise ConfigError(
            f"privacy.update_place=server cannot be used: {called(method)} weighs clients by what "
            "they send; set privacy.update_place=client"
        )


class UpdateNoise(Filter):
    """Clips the change of the model and adds noise to it, where `privacy` asks for that."""

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Replace the trained model by the one to send, with a record of the noise in it."""
        if not changes_model(self.exchange):
            return up
        model, updates = up["model"], self.method.updates
        if updates is not None:
            model = updates.at_client(client, down["model"], model)
        if releases := dpsgd.costs(self.method.local):  # the noise is in the steps of training
            client.released("model", model, releases)
        return {**up, "model": model}

    def folded(
        self, folded: Folded, examples: Mapping[ClientId, int], turn: tuple[int, int]
    ) -> Folded:
        """Add the server's noise to the average, if that is where it is added."""
        updates = self.method.updates
        if updates is None or not updates.at_average or not changes_model(self.exchange):
            return folded
        uniform = self.method.server_optimiser.weighting == "uniform"
        alike = uniform or self.exchange.up["model"].by is None
        shares = {client: 1 if alike else examples[client] for client in folded.ids}
        folded.model = updates.at_server(folded.model, shares, (self.method.world.seed, *turn))
        return folded


def declared_with(method: Method, exchange: Exchange) -> Exchange:
    """An exchange under a method's protections: models that leave with noise are guarded."""
    updates = method.updates
    noisy = method.local.dp_noise or (updates is not None and updates.guards)
    if not (noisy and changes_model(exchange)):
        return exchange
    return replace(
        exchange, up={**exchange.up, "model": replace(exchange.up["model"], guarded=True)}
    )
