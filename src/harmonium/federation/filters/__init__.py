"""Message filters: what every message passes through between a plan and a handler.

`ORDER` lists them once. A message that leaves passes them from first to last, at the server
(`outgoing`) and at the client (`reply`); a message that arrives passes them from last to first
(`received`, `arrived`). The combined replies pass `folded`.

    plan or handler
      ValueChecks      arrived: shapes and ranges of values, and what the method knows of a reply
      DeclaredFields   all four: the message carries the declared fields, each of its kind
      UpdateNoise      reply: the change of the model is clipped and gets noise
                       folded: noise of the server on the average
      GuardedFields    reply: guarded fields carry the noise that the method's `costs` state
      Rounding         outgoing, reply: weights are rounded; received, arrived: they are restored
      DeclaredFields   again, so that no filter meets a message of another form
    wire

To add a filter, write a module with a `Filter` and add it to `ORDER`.

Two things act on messages but are not filters, because they need more than one message:

- Masks of secure aggregation (`federation/secure_aggregation`) take the place of rounding, which
  they exclude, and of the checks on arrival, since the server never sees a single reply. They need
  four asks in place of one. A client's engine adds them after `reply`; the driver removes them from
  the sum before `folded`.
- Aggregations such as norm bounds and medians (`federation/aggregation.py`) compare all replies of
  a round. The tally applies them between `arrived` and `folded`.

The releases that come beside a reply are not masked; the driver compares them with the method's
`costs` itself, with and without masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harmonium.federation.filters.arrival import ValueChecks
from harmonium.federation.filters.base import Asked as Asked
from harmonium.federation.filters.base import Chain as Chain
from harmonium.federation.filters.base import Filter as Filter
from harmonium.federation.filters.declared_fields import DeclaredFields
from harmonium.federation.filters.guarded_fields import GuardedFields
from harmonium.federation.filters.rounding import Rounding
from harmonium.federation.filters.update_noise import UpdateNoise
from harmonium.federation.wire import Exchange

if TYPE_CHECKING:
    from harmonium.federation.method import Method

ORDER: tuple[type[Filter], ...] = (
    ValueChecks,
    DeclaredFields,
    UpdateNoise,
    GuardedFields,
    Rounding,
    DeclaredFields,
)


def filters_of(method: Method, exchange: Exchange) -> Chain:
    """The filters of an exchange, as one, in the order of `ORDER`."""
    return Chain(method, exchange, tuple(one(method, exchange) for one in ORDER))
