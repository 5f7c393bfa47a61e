"""Steps of training as work to be measured: forward, backward and optimiser of each part that a package holds.

Without a server: the gradient at the cut is drawn, of the right shape and small, and its steps go nowhere. Bytes are
those of an image's activations and of their gradient as they travel; waiting for a server is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from contract.errors import PackageError
from contract.images import ImageRule, normalise
from contract.training import TrainingCut, TrainingPlan
from edge_runtime.install import Installed
from edge_runtime.profiling.frontends import Verified, drawn_pictures
from edge_runtime.profiling.measuring import Candidate, Phase, Point

if TYPE_CHECKING:  # it loads onnxruntime
    from edge_runtime.trainer import Trainer

PHASES = ("forward", "backward", "optimiser")
LEARNING_RATE = 1e-9  # moves what it moves, and leaves the weights where their arithmetic costs what it did
GRADIENT = 1e-3
VALUE_BYTES = {"float32": 4, "float16": 2, "int8": 1}


def parts(packages: Sequence[Verified], batch: int, threads: int, seed: int) -> list[Candidate]:
    """A candidate for each part of each package. Raises: PackageError for a package without any."""
    candidates = []
    for package in packages:
        training = package.installed.training
        if training is None:
            raise PackageError(
                f"{package.choice.folder} holds no parts to be trained",
                "leave --train out, or export with --for STRATEGY",
            )
        candidates += parts_of(package.installed, training, batch, threads, seed)
    return candidates


def parts_of(installed: Installed, plan: TrainingPlan, batch: int, threads: int, seed: int) -> list[Candidate]:
    """A candidate for each part of one package."""
    return [_candidate(installed, plan, cut, batch, threads, seed) for cut in plan.cuts]


def _candidate(
    installed: Installed, plan: TrainingPlan, cut: TrainingCut, batch: int, threads: int, seed: int
) -> Candidate:
    manifest, crosses = installed.manifest, cut.loss == "none"
    point = Point(
        manifest.model, manifest.name, installed.digest.hex(), cut.index, cut.depth, "float32",
        f"onnxruntime {version('onnxruntime')}", threads, batch,
        cut.output_size * VALUE_BYTES[plan.activations] if crosses else 0,
        cut.output_size * VALUE_BYTES[plan.gradient] if crosses else 0,
    )  # fmt: skip

    def open_phases() -> Sequence[Phase]:
        from edge_runtime.trainer import TrainerSettings, open_trainer

        trainer = open_trainer(installed.folder, cut, plan.optimiser, TrainerSettings(threads))
        return step_phases(trainer, draw_feed(plan, cut, manifest.image, batch, seed))

    return Candidate(point, PHASES, open_phases)


@dataclass(frozen=True)
class Feed:
    """What goes into a step: images (B, 3, h, w), and where the part takes them, targets, patches and a gradient."""

    images: NDArray[np.float32]
    targets: NDArray[np.float32] | None
    keep: NDArray[np.int64] | None
    grad_z: NDArray[np.float32] | None


def draw_feed(plan: TrainingPlan, cut: TrainingCut, image: ImageRule, batch: int, seed: int) -> Feed:
    """Made-up images and gradient of the right shapes."""
    rng = np.random.default_rng(seed)
    targets = keep = grad_z = None
    if cut.loss == "none":
        grad_z = (GRADIENT * rng.standard_normal((batch, *cut.output_shape))).astype(np.float32)
    else:
        targets = np.eye(cut.output_size, dtype=np.float32)[rng.integers(0, cut.output_size, batch)]
    if cut.kept is not None and cut.patches is not None:
        keep = np.sort(np.stack([rng.permutation(cut.patches)[: cut.kept] for _ in range(batch)]), axis=1)
    return Feed(normalise(drawn_pictures(batch, image.height, image.width, seed), image), targets, keep, grad_z)


def step_phases(trainer: Trainer, feed: Feed) -> tuple[Phase, Phase, Phase]:
    """A step of training as far as forward, as far as backward, and whole."""

    def forward() -> int:
        trainer.forward(feed.images, feed.targets, feed.keep)
        return len(feed.images)

    def backward() -> int:
        forward()
        trainer.backward(feed.grad_z)
        return len(feed.images)

    def optimiser() -> int:
        backward()
        trainer.step(LEARNING_RATE)
        return len(feed.images)

    return Phase("forward", forward), Phase("backward", backward), Phase("optimiser", optimiser)
