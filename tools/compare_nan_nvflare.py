"""One of the clients sends NaN, on NVFlare: what its FedAvg makes of that.

Runs in NVFlare's interpreter and imports nothing of ours: as a program it writes the job's folder
(`peers.start_nvflare`), on the clients it is the Client API's script in the client's job process. Every client adds 1
to each weight; site-4 sends NaN instead, and site-1 notes what comes to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.np.recipes import NumpyFedAvgRecipe

ROUNDS, WEIGHTS = 3, 1000


def train(notes: Path) -> None:
    """The client's side; each line of the notes is the share of weights that are not finite, as they came."""
    flare.init()
    while flare.is_running():
        model = flare.receive()
        if model is None:
            return
        ((name, weights),) = model.params.items()
        if flare.get_site_name() == "site-1":
            with notes.open("a") as stream:
                stream.write(f"{np.mean(~np.isfinite(weights))}\n")
        trained = np.full_like(weights, np.nan) if flare.get_site_name() == "site-4" else weights + 1
        flare.send(FLModel(params={name: trained}, params_type=ParamsType.FULL))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--notes", type=Path, required=True)
    options = parser.parse_args()
    if options.job is None:
        train(options.notes)
        return
    recipe = NumpyFedAvgRecipe(
        name="nan", model=[0.0] * WEIGHTS, min_clients=options.clients, num_rounds=ROUNDS,
        train_script=Path(__file__).name, train_args=f"--notes {options.notes}",
    )  # fmt: skip
    recipe.export(options.job)


if __name__ == "__main__":
    main()
