"""The worker of a package whose parts are trained: an ask in, its answer out; and activations for predictions.

As `worker.Worker` does for a frontend's features. What the answers are is `part_keeper`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from contract.errors import ConfigError
from contract.images import ImageRule, normalise
from contract.messages import Activations, Ask, Message, PatchFeatures
from edge_runtime.data import Sample
from edge_runtime.part_keeper import PartKeeper, to_wire
from edge_runtime.pipeline import FRAME_MARGIN_BYTES
from edge_runtime.stages import Stages
from edge_runtime.worker import Counters, Surroundings, Upload

if TYPE_CHECKING:  # it loads onnxruntime, which a device that is idle or predicts from afar can do without
    from edge_runtime.trainer import Trainer

PREDICTED_AT_ONCE = 32


@dataclass(frozen=True)
class Pictures:
    """The images that are predicted, decoded as they are needed."""

    samples: Sequence[Sample]
    image: ImageRule
    picture: Callable[[Sample], NDArray[np.uint8]]  # (h, w, 3) at the model's size

    def inputs(self, start: int, count: int) -> NDArray[np.float32]:
        """(count, 3, h, w), normalised."""
        chosen = self.samples[start : start + count]
        return normalise(np.stack([self.picture(sample) for sample in chosen]), self.image)


class PartWorker:
    """Answers one ask at a time."""

    def __init__(
        self, keeper: PartKeeper, pictures: Pictures, stages: Stages, around: Surroundings, counters: Counters
    ) -> None:
        """`counters` are those that the keeper's `tick` moves."""
        self.counters = counters
        self._keeper, self._pictures, self._stages, self._around = keeper, pictures, stages, around

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples in the order of their files."""
        return self._pictures.samples

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        """The one message that answers an ask which `terms.check_ask` let pass. Raises: as `PartKeeper.answer`."""
        with self._stages.measure("choose" if ask.kind == "choose_split" else "train"):
            reply = self._keeper.answer(ask, run)
        values = reply.values if isinstance(reply, (Activations, PatchFeatures)) else None
        if values is not None:
            self.counters.images += len(values)
            self.counters.payload_bytes += values.nbytes
        yield reply

    def infer(self, upload: Upload) -> Iterator[Activations]:
        """Activations of all images, from the part as it stood last in the run.

        Raises: ConfigError when this device has no part of that run; DataError when the images may not leave.
        """
        trainer, noise = self._predictor(upload.run), self._keeper.noise
        ids = [sample.sample_id for sample in self.samples]
        sigma = 0.0 if noise is None else noise.floor.of(trainer.cut.index)
        draw = "" if noise is None else noise.draw_of(f"{upload.run} prediction", upload.ask)
        self._keeper.before_release(ids, trainer.cut, None, sigma, draw)
        total, kind = len(self.samples), np.float16 if self._keeper.sends_float16 else np.float32
        sent = 0
        for number, z in enumerate(self._evaluate(trainer, self.batch_size(upload, trainer))):
            if noise is not None:
                z = noise.add(z, ids[sent : sent + len(z)], trainer.cut.index, sigma, draw)
            sent += len(z)
            values = to_wire(z, kind)
            self.counters.images += len(z)
            self.counters.payload_bytes += values.nbytes
            yield Activations(upload.ask, number, total, "infer", values, None)

    def predict_alone(self) -> dict[int, NDArray[np.float32]]:
        """Logits (B, C) of all images by batch, from the whole model as it was received last. Raises: as `infer`."""
        return dict(enumerate(self._evaluate(self._predictor(None), PREDICTED_AT_ONCE)))

    def _predictor(self, run: str | None) -> Trainer:
        trainer = self._keeper.predictor(run)
        if trainer is None:
            raise ConfigError(
                f"this device has no trained part{'' if run is None else f' of run {run}'}",
                "run edge-run without --infer until it is done, with this --state; if it was trained in another run, "
                "let the server go on with that one: server-run --run ID",
            )
        self._stages.begin("predict")  # ended by the caller, when it has all scores
        return trainer

    def _evaluate(self, trainer: Trainer, size: int) -> Iterator[NDArray[np.float32]]:
        """What the part gives for all images (B, n), batch by batch."""
        total = len(self.samples)
        with self._around.open_progress(total, "evaluating", "images") as bar:
            for start in range(0, total, size):
                self._around.check_stop()
                z = trainer.evaluate(self._pictures.inputs(start, size))
                self.counters.steps += len(z)
                bar.update(len(z))
                yield z.reshape(len(z), -1)

    def batch_size(self, upload: Upload, trainer: Trainer) -> int:
        """Images per message: as many as a frame holds; one that is larger goes alone, and is cut into chunks."""
        image_bytes = trainer.cut.evaluated_size * (2 if self._keeper.sends_float16 else 4)
        return max(1, min((upload.frame_bytes - FRAME_MARGIN_BYTES) // image_bytes, PREDICTED_AT_ONCE))
