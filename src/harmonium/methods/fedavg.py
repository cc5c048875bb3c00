"""FedAvg: clients train the received model on their own images, the server takes the average.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017,
Algorithm 1 (FederatedAveraging). The loss is the objective that the recipe names; labels are needed
only if it needs them. With n_k the number of images of client k and S_t the clients that answered,

    w_{t+1} = sum over k in S_t of n_k / n w_k,    n = sum over k in S_t of n_k.

Where Algorithm 1 is printed with a sum over all K clients, the weights of a partial cohort would
not add up to 1; here, as in common implementations, n counts those who answered.

    ask     to        down       up
    train   cohort    model: w   model: w_k; loss

Nothing else is kept on either side.
"""

from __future__ import annotations

from dataclasses import dataclass

from harmonium.federation.method import Method
from harmonium.methods import methods


@methods("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Weighted averaging of locally trained models."""

    # All of it is in `Method`: `round` (ask the cohort, merge), `train` (ClientUpdate) and `merge`.
    paper = "McMahan et al., 2017"
