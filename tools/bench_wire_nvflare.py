"""The benchmark's job on NVFlare: the server asks with a tensor, every asked client answers with one of the same size.

Runs in NVFlare's interpreter and imports nothing of ours: as a program it writes the job's folder
(`peers.start_nvflare`), on the server it is the controller, on the clients the Client API's script in the client's job
process. `send_model_and_wait` is what NVFlare's ModelController offers to ask with. Orders come over a Unix socket
(`bench_wire_control`); what is timed is an exchange as the controller sees it.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

POLL_S = 0.1


class Asker(ModelController):
    """Obeys the orders."""

    def __init__(self, control: str) -> None:
        super().__init__(persistor_id="")
        self.control = control

    def run(self) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(self.control)
        stream = connected.makefile("rw")
        for line in stream:
            stream.write(json.dumps(self.obey(json.loads(line))) + "\n")
            stream.flush()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """`join`: wait for all clients. `exchange`: so many times, ask the first clients and wait for their answers."""
        while len(names := sorted(client.name for client in self.engine.get_clients())) < order["clients"]:
            time.sleep(POLL_S)
        if order["do"] == "join":
            return {}
        asked = np.random.default_rng(0).standard_normal(order["size_bytes"] // 4, np.float32)
        whole_s, received_bytes = [], 0
        for number in range(order["count"]):
            started_s = time.perf_counter()
            model = FLModel(params={"asked": asked}, params_type=ParamsType.FULL, current_round=number)
            answers = self.send_model_and_wait(data=model, targets=names[: order["clients"]])
            received = [answer.params["asked"] for answer in answers]
            whole_s.append(time.perf_counter() - started_s)
            received_bytes += sum(array.nbytes for array in received)
        return {"whole_s": whole_s, "received_bytes": received_bytes}


def answer() -> None:
    """The client's side, until the job ends."""
    flare.init()
    while flare.is_running():
        model = flare.receive()
        if model is None:
            return
        flare.send(FLModel(params={"asked": -model.params["asked"]}, params_type=ParamsType.FULL))


def write_job() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--control", required=True)
    options = parser.parse_args()
    from bench_wire_nvflare import Asker as Named  # by this name the server finds it, too

    job = FedJob(name="bench", min_clients=options.clients)
    job.to_server(Named(options.control))
    job.to_clients(ScriptRunner(script=Path(__file__).name, script_args="--answer", framework=FrameworkType.NUMPY))
    job.export_job(options.job)


if __name__ == "__main__":
    import sys

    answer() if "--answer" in sys.argv else write_job()
