"""The context of a loss: its inputs beside the model and the batch, the same in every step.

A method that gives its loss more subclasses `Context` and names the subclass in the class variable
`context`. An objective that needs more of a method than every method gives declares a context
beside its loss (`objectives/assignments.py`), which the method's context then extends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId, Weights


@dataclass(frozen=True, kw_only=True)
class Context:
    """The client that trains and the model that it started from; losses only read it.

    >>> sorted(Context.names())
    ['anchor', 'me']
    """

    me: ClientId
    anchor: Weights | None = None  # the received model, where one came by message

    @property
    def received_model(self) -> Weights:
        """The received model; raises ConfigError if there is none."""
        if self.anchor is None:
            raise ConfigError(
                "this loss needs the received model: train with "
                "`self.fit(parts, client, context=Context(me=client.id, anchor=got.model))`"
            )
        return self.anchor

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of the fields."""
        return frozenset(field.name for field in fields(cls))
