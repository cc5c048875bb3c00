"""Python objects given as settings: arrays, networks and functions, initial weights.

Each becomes plain settings before anything else sees it, so that a recipe stays a tree of plain
values which another process can read. Arrays and weights are stored by their digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.data.datasets import DataSpec
from harmonium.data.decoding.in_memory import kind
from harmonium.data.sets.arrays import FORMS, holds_arrays, keep_arrays
from harmonium.learning.encoders.given import keep_network, named
from harmonium.recipe.initial_weights import keep_weights


def as_settings(key: str, value: Any) -> Any:
    """Plain settings for an object that a caller gave as `key`; any other value as it is."""
    if key in ("data", "public") and holds_arrays(value):
        return keep_arrays(value, key)
    if key in ("data", "public") and not isinstance(value, DataSpec | type | Mapping):
        raise ConfigError(f"{key} is a {kind(value)}; give a data set's name, {FORMS}")
    if key == "encoder":
        if isinstance(value, nn.Module):
            return keep_network(value)
        return named(value) or value
    if key == "init":
        value = getattr(value, "network", value)  # of an encoder that was loaded from a file
        if isinstance(value, nn.Module | Mapping):
            return keep_weights(value)
    return value
