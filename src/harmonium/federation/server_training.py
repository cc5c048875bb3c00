"""The server as a client of the public images, for plans that train on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.learning.client import Client, Examples
from harmonium.learning.contract import called
from harmonium.privacy.mechanisms import Noise

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server

SERVER = -1  # the server's client number


def public_client(method: Method, server: Server, purpose: str) -> Client:
    """The server as a client with all public images; `purpose` keys its random generator."""
    if server.public is None:
        raise ConfigError(f"{called(method)} needs public images at the server, e.g. public=shapes")
    rng = seeds.torch_rng(method.world.seed, "server", purpose, server.round)
    everything = np.arange(len(server.public))
    return Client(
        id=SERVER,
        round=server.round,
        rounds=method.world.rounds,
        examples=Examples(
            server.public, everything, uses_labels=method.reads_labels, device=server.device
        ),
        views=method.views,
        rng=rng,
        noise=Noise("simulated", rng),
        public=server.public,
        device=server.device,
    )
