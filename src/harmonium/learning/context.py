"""What a loss may count on beside the model and the batch: a context, the same in every step.

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
    """Whose training it is, and the model that it started from; losses only read it.

    >>> sorted(Context.names())
    ['anchor', 'me']
    """

    me: ClientId
    anchor: Weights | None = None  # the received model, where one came by message

    @property
    def received_model(self) -> Weights:
        """The anchor, of a loss that cannot do without it."""
        if self.anchor is None:
            raise ConfigError(
                "this loss needs the received model: train with "
                "`self.fit(parts, client, context=Context(me=client.id, anchor=got.model))`"
            )
        return self.anchor

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all that is given."""
        return frozenset(field.name for field in fields(cls))
