"""Client-level privacy: what a client's training changes is shortened and drowned in noise.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018. The change of the
whole model by one client is shortened to a norm of at most `clip`. Noise is added by the client
itself, to its own change, which then protects it from the server as well; or by the server, to the
average, which takes far less noise and trusts the server. Neighbours are all of a client's images
and any others in their place: the change moves by at most twice the clip. Nothing is gained from
chance in who takes part, for the server knows it; a client counts each time that it is asked.
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
from harmonium.federation.wire import EXAMPLES, Exchange
from harmonium.learning import dpsgd
from harmonium.learning.contract import called
from harmonium.privacy.mechanisms import Noise, Randomness, Release

if TYPE_CHECKING:
    from harmonium.federation.method import Method
    from harmonium.learning.client import Client

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Updates:
    """How much a client may change the model, and the noise on that."""

    clip: float  # largest norm of the change of all that is sent of the model
    noise: float = 0.0  # standard deviations for each unit of sensitivity, which is twice the clip
    place: Literal["client", "server"] = "client"  # where noise is added
    source: Randomness = "system"

    @property
    def costs(self) -> tuple[Release, ...]:
        """What one answer costs; of the server's noise, in units of one client's change."""
        if not self.noise:
            return ()
        far = 2 * self.clip
        return (Release("model", "gaussian", far, self.noise * far, neighbours="client"),)

    @property
    def guards(self) -> bool:
        """Whether models have noise when they leave a client."""
        return self.noise > 0 and self.place == "client"

    def words(self) -> tuple[str, ...]:
        """What it does, for people."""
        said = f"What a client's training changes in the model is shortened to {self.clip:g}"
        if not self.noise:
            return (f"{said}, without noise, which bounds what a client can do and hides nothing.",)
        who = "client, before it leaves" if self.place == "client" else "server, on the average"
        size = f"{self.noise:g} deviations over its sensitivity"
        return (f"{said} and gets noise by the {who}: {size}.",)

    def at_client(self, client: Client, before: Weights, after: Weights) -> Weights:
        """The model to send in place of the one that training ended with."""
        change = {key: after[key].double() - before[key].double() for key in after}
        norm = math.sqrt(sum(float(part.square().sum()) for part in change.values()))
        if not math.isfinite(norm) and self.noise:  # a refusal by name would tell of the images
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
        """An average with noise for its largest share; `path` is seed, round and ask."""
        sigma = self.noise * 2 * self.clip * max(shares.values()) / sum(shares.values())
        seed, *when = path
        noise = Noise(self.source, seeds.torch_rng(seed, "noise", "server", *when))
        return {
            key: noise.gaussian(part.double(), sigma).to(part.dtype) for key, part in mean.items()
        }

    def check(self, method: Method) -> None:
        """Refuse a method whose answers this would not protect."""
        trained = {s: one for s, one in method.exchanges().items() if covers(one)}
        if not trained:
            raise ConfigError(
                f"privacy.update_clip has nothing to do: {called(method)} sends no model"
            )
        for step, one in method.exchanges().items():
            others = [n for n, f in one.up.items() if f.kind == "weights" and n != "model"]
            if others or (step not in trained and "model" in one.up):
                name = (others or ["model"])[0]
                raise ConfigError(
                    f"privacy.update_clip protects the change of one model, but `{step}` of "
                    f"{called(method)} sends `{name}`, too"
                )
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
        if self.place == "server" and self.noise:
            if method.aggregation.name != "mean":
                raise ConfigError(
                    "privacy.update_place=server knows what one client moves an average by, not "
                    f"what it moves aggregation={method.aggregation.name}: choose mean, or client"
                )
            if any(one.up["model"].by not in (None, EXAMPLES) for one in trained.values()):
                raise ConfigError(
                    f"privacy.update_place=server: {called(method)} weighs clients by what they "
                    "send"
                )


def declared_with(method: Method, one: Exchange) -> Exchange:
    """An exchange as it is under a method's protections: models with noise are guarded."""
    updates = method.updates
    noisy = method.local.dp_noise or (updates is not None and updates.guards)
    if not (noisy and covers(one)):
        return one
    return replace(one, up={**one.up, "model": replace(one.up["model"], guarded=True)})


def shielded(method: Method, client: Client, before: Weights, after: Weights) -> Weights:
    """A trained model as it leaves, with a note of the noise in it."""
    sent = after if method.updates is None else method.updates.at_client(client, before, after)
    if noisy := dpsgd.costs(method.local):  # it followed from noisy steps alone
        client.released("model", sent, noisy)
    return sent


def covers(declared: Exchange) -> bool:
    """Whether an exchange sends a model down and takes a changed one back."""
    down, up = declared.down.get("model"), declared.up.get("model")
    return bool(down and up and down.of == up.of == "model" and up.fold == "parts")
