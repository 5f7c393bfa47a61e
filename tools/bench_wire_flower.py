"""The benchmark's app on Flower: the server asks with a tensor, every asked client answers with one of the same size.

Runs in Flower's interpreter, as the ServerApp and the ClientApp of a deployment (`peers.start_flower`), and imports
nothing of ours. `send_and_receive` is how Flower's own strategies ask. Orders come over a Unix socket
(`bench_wire_control`); what is timed is an exchange as the ServerApp sees it.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

POLL_S = 0.1
server_app = ServerApp()
client_app = ClientApp()


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    (asked,) = message.content["arrays"].to_numpy_ndarrays()
    return Message(RecordDict({"arrays": ArrayRecord([-asked])}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(context.run_config["control"])
    stream = connected.makefile("rw")
    for line in stream:
        stream.write(json.dumps(obey(grid, json.loads(line))) + "\n")
        stream.flush()


def obey(grid: Grid, order: dict[str, Any]) -> dict[str, Any]:
    """`join`: wait for all clients. `exchange`: so many times, ask the first clients and wait for their answers."""
    while len(nodes := sorted(grid.get_node_ids())) < order["clients"]:
        time.sleep(POLL_S)
    if order["do"] == "join":
        return {}
    asked = np.random.default_rng(0).standard_normal(order["size_bytes"] // 4, np.float32)
    whole_s, received_bytes = [], 0
    for _ in range(order["count"]):
        started_s = time.perf_counter()
        content = RecordDict({"arrays": ArrayRecord([asked])})
        chosen = nodes[: order["clients"]]
        answers = list(
            grid.send_and_receive([Message(content, dst_node_id=node, message_type="train") for node in chosen])
        )
        received = [array for each in answers for array in each.content["arrays"].to_numpy_ndarrays()]
        whole_s.append(time.perf_counter() - started_s)
        received_bytes += sum(array.nbytes for array in received)
    return {"whole_s": whole_s, "received_bytes": received_bytes}
