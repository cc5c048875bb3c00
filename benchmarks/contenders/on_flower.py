"""The same federation on Flower's simulation, which runs clients in actors of Ray.

Written as Flower's documentation writes it: a ClientApp, a ServerApp and the strategy FedAvg.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from common import network, round_over, task
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from usual import loader, train

client_app, server_app = ClientApp(), ServerApp()
OF = task()


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    """A client's epoch."""
    torch.set_num_threads(1)
    model = network(OF.width, OF.groups)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = loader(OF, int(context.node_config["partition-id"]))
    loss = train(model, batches, OF)
    metrics = MetricRecord({"loss": loss, "num-examples": len(batches.dataset)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds."""

    def after(number: int, arrays: ArrayRecord) -> None:
        if number:  # 0 is before the first round
            round_over(number)

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=OF.clients, min_available_nodes=OF.clients
    )
    first = ArrayRecord(network(OF.width, OF.groups).state_dict())
    strategy.start(grid, first, num_rounds=OF.rounds, evaluate_fn=after)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=OF.clients,
        backend_config={
            "init_args": {"num_cpus": OF.workers},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
