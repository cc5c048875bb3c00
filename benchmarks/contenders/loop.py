"""Federated averaging in a plain loop, with the usual per-image transforms."""

from __future__ import annotations

import copy

import torch
from common import network, rounds, task
from usual import loader, train


def main() -> None:
    """Play all rounds."""
    of = task()
    model = network(of.width, of.groups)

    def play() -> None:
        states = []
        for client in range(of.clients):
            local = copy.deepcopy(model)
            train(local, loader(of, client), of)
            states.append(local.state_dict())
        mean = {
            key: torch.stack([state[key].float() for state in states]).mean(0) for key in states[0]
        }
        model.load_state_dict(mean)

    rounds(of, play)


if __name__ == "__main__":
    main()
