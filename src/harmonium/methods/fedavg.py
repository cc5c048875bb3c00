"""FedAvg: clients train the received model on their own images, the server takes the average.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017,
Algorithm 1. Local labels are not needed: the loss is whatever objective the recipe names.
The average is weighted by each client's number of images over those who answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from harmonium.federation.method import Method
from harmonium.methods import methods


@methods("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Weighted averaging of locally trained models; all of it is the base method."""

    paper = "McMahan et al., 2017"
