"""One of the clients sends NaN, on Flower: what its strategies make of that.

Runs in Flower's interpreter, as the ServerApp and the ClientApp of a deployment (`peers.start_flower`), and imports
nothing of ours. Every client adds 1 to each weight; the one whose partition-id is 0 sends NaN instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum

CLIENTS, ROUNDS, WEIGHTS = 4, 3, 1000
ALL = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
STRATEGIES = {  # and for how many rounds
    "FedAvg": (FedAvg, {}, ROUNDS),
    "FedMedian": (FedMedian, {}, 1),
    "FedTrimmedAvg, beta 0.25": (FedTrimmedAvg, {"beta": 0.25}, 1),
    "Krum, num_malicious_nodes 1": (Krum, {"num_malicious_nodes": 1}, 1),
}
server_app = ServerApp()
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    trained = weights + 1 if context.node_config["partition-id"] else np.full_like(weights, np.nan)
    content = RecordDict({"arrays": ArrayRecord([trained]), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Leave the share of weights that are not finite after each round, by strategy, in the file `result`."""
    shares: dict[str, list[float]] = {}
    for name, (strategy, words, rounds) in STRATEGIES.items():
        by_round = shares.setdefault(name, [])

        def look(number: int, arrays: ArrayRecord, by_round: list[float] = by_round) -> None:
            if number:  # 0 is the beginning
                (weights,) = arrays.to_numpy_ndarrays()
                by_round.append(float(np.mean(~np.isfinite(weights))))

        beginning = ArrayRecord([np.zeros(WEIGHTS, np.float32)])
        strategy(**ALL, **words).start(grid, beginning, num_rounds=rounds, evaluate_fn=look)
    Path(context.run_config["result"]).write_text(json.dumps(shares))
