"""The client's side of tools/bench_client_cost: one method's work in a process without torch.

    python -m tools.bench_client_cost_device FOLDER

FOLDER holds what `bench_client_cost_parts` wrote, and `images`. One JSON object goes to stdout. What a step is, and how
often it would be done, is in the method's own function; turning seconds of a few steps into those of all epochs is left
to the caller.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.console import say
from contract.image_folder import ImageFile, scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.training import OptimiserRule, TrainingCut
from edge_runtime.config import DeviceConfig
from edge_runtime.equip import equip
from edge_runtime.head import head_step, new_head
from edge_runtime.meters import probe
from edge_runtime.stages import Stages
from edge_runtime.trainer import TrainerSettings, open_trainer
from edge_runtime.worker import Upload
from tools.bench_training_device import peak_bytes

FRAME_BYTES = 1 << 20  # as the server's
LEARNING_RATE = 1e-4
IMAGES = "images"


def main() -> None:
    folder = Path(sys.argv[1])
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    stages = Stages(probe().meter, time.monotonic)
    run = {"sa": adapt, "lp": probe_linearly}.get(facts["method"], train)
    figures = run(folder, facts, stages)
    time.sleep(stages.settle_s)  # a meter tells of the end a while after it
    costs = stages.costs()
    print(
        json.dumps(
            {
                **figures,
                "seconds": {name: cost.seconds for name, cost in costs.items()},
                "energy_j": {name: cost.energy_j for name, cost in costs.items()},
                "energy_reason": stages.energy_reason(),
                "peak_bytes": peak_bytes(),
                "python": sys.version.split()[0],
                "torch_imported": "torch" in sys.modules,
            }
        )
    )


def adapt(folder: Path, facts: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """Split adaptation: the product's device from its folder to its messages, without the socket."""
    package = folder / "front"
    config = DeviceConfig(
        engine=str(package), data=folder / IMAGES, server="wss://localhost:1",
        trust=folder / "signing-key.pub.pem", ca=None, key=folder / "signing-key.pem", name="device",
        state=folder / "state", site_secret=None, classes=None, label_mode="permuted-label", noise="keyed",
        alpha=None, kappa_floor=None, max_releases=1, threads=facts["threads"],
    )  # fmt: skip
    with stages.measure("setup"):  # install, verify, decode once for the ids, noise the weights, open the engine
        equipment = equip(config, "adapt", threading.Event(), say)
    sent_bytes, images = 0, 0
    with stages.measure("work"):
        upload = Upload("bench", "train", equipment.terms.kappa_floor, FRAME_BYTES)
        for message in equipment.worker.collect(upload):  # type: ignore[union-attr]
            arrays = (message.sample_ids, message.codes, message.sources, message.labels)
            sent_bytes += sum(array.nbytes for array in arrays if array is not None)
            images += len(message.codes)
    equipment.state.close()
    return {
        "images": images,
        "sent_bytes": sent_bytes,
        "engine": equipment.engine.name,
        "int8_layers": equipment.engine.int8_layers,
        "stages_s": {name: cost.seconds for name, cost in equipment.stages.costs().items()},
    }


def probe_linearly(folder: Path, facts: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """Linear probing: the whole float32 model forward, an image at a time, then a head on the features."""
    pictures = Pictures(folder / IMAGES, facts)
    with stages.measure("setup"):
        cut = cut_of(facts)
        trainer = open_trainer(folder, cut, OptimiserRule("adamw"), TrainerSettings(facts["threads"], evaluate_batch=1))
        trainer.evaluate(pictures.read(pictures.files[:1])[0])
    chosen = pictures.files[: min(len(pictures.files), facts["steps"] * facts["batch"])]
    features = []
    with stages.measure("forward"):
        for file in chosen:
            features.append(trainer.evaluate(pictures.read([file])[0]))
    # A head's cost does not depend on its values: features that were not computed are copies.
    known = np.concatenate(features)
    inputs = known[np.arange(len(pictures.files)) % len(known)]
    labels = np.array([file.class_index for file in pictures.files])
    with stages.measure("head"):
        head = new_head(facts["classes"], inputs.shape[1], np.random.default_rng(0))
        for epoch in range(facts["epochs"]):
            order = np.random.default_rng(epoch).permutation(len(labels))
            for start in range(0, len(order), facts["batch"]):
                rows = order[start : start + facts["batch"]]
                head, _ = head_step(head, inputs[rows], labels[rows], LEARNING_RATE)
    return {"images": len(chosen), "width": inputs.shape[1]}


def train(folder: Path, facts: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """A few steps of the client's part by the product's trainer: read, forward, backward, AdamW.

    Without a loss in the graph (split learning) the client also trains the head, on features that a server would send
    back, and takes a gradient at the cut; both are made up here, and the wait for them is not counted.
    """
    pictures = Pictures(folder / IMAGES, facts)
    rng = np.random.default_rng(0)
    head = new_head(facts["classes"], facts["width"], rng)
    with stages.measure("setup"):
        trainer = open_trainer(folder, cut_of(facts), OptimiserRule("adamw"), TrainerSettings(facts["threads"]))

    def step(files: Sequence[ImageFile]) -> None:
        nonlocal head
        x, labels = pictures.read(files)
        if facts["loss"] == "none":
            z = trainer.forward(x).z
            features = rng.standard_normal((len(x), facts["width"]), np.float32)
            head, _ = head_step(head, features, labels, LEARNING_RATE)
            trainer.backward(z / np.float32(z.size))
        else:
            trainer.forward(x, targets=np.eye(facts["classes"], dtype=np.float32)[labels])
            trainer.backward()
        trainer.step(LEARNING_RATE)

    with stages.measure("warm-up"):  # it opens the graphs and touches the optimiser's memory
        step(pictures.batch(0, 1))
    with stages.measure("work"):
        for number in range(facts["steps"]):
            step(pictures.batch(number, facts["batch"]))
    return {"images": facts["steps"] * facts["batch"]}


class Pictures:
    """The images of a folder, read anew for every batch, as little memory allows."""

    def __init__(self, root: Path, facts: dict[str, Any]) -> None:
        self.files = scan(root, None).images
        self._rule = ImageRule(**{name: tuple(v) if isinstance(v, list) else v for name, v in facts["image"].items()})

    def batch(self, number: int, size: int) -> list[ImageFile]:
        return [self.files[(number * size + place) % len(self.files)] for place in range(size)]

    def read(self, files: Sequence[ImageFile]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(B, 3, h, w) normalised, and class numbers (B,)."""
        return normalise(np.stack(list(self._pixels(files))), self._rule), np.array(
            [each.class_index for each in files]
        )

    def _pixels(self, files: Sequence[ImageFile]) -> Iterator[NDArray[np.uint8]]:
        for file in files:
            yield resize(load_pixels(file.path, file.relative, self._rule.max_pixels), self._rule)


def cut_of(facts: dict[str, Any]) -> TrainingCut:
    names = {name: tuple(facts[name]) for name in ("output_shape", "evaluated_shape", "trainable", "frozen", "buffers")}
    return TrainingCut(
        1, 1, facts["method"], "forward.onnx", "backward.onnx", "evaluate.onnx", kept=None, patches=None,
        saved=facts["saved"], macs=facts["macs"], loss=facts["loss"], **names,
    )  # fmt: skip


if __name__ == "__main__":
    main()
