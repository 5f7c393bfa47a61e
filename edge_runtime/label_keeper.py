"""The labels' side of training on the device: the loss of the server's logits, and in client-head mode the head itself.

Labels stay here; what a gradient tells of them is said in `head.softmax_gradient`. Whether the mode allows an ask is
left to `terms`.

The head is kept under the server's step numbers: the newest, and those at the server's last two checkpoints (`base`).
So either side may lose its newest state: training goes on from the last step that both hold (wire.md, resume rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import RemoteProtocolError
from contract.messages import Ask, Checkpoints, Gradient
from edge_runtime.head import (
    BatchLoss,
    Head,
    HeadCheckpoint,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    head_step,
    softmax_gradient,
    zero_head,
)
from edge_runtime.state import read_or_set_aside, write_durably

BASES = 2
START_ANEW = "start a new run on the server"


@dataclass(frozen=True)
class HeadSettings:
    """How the device's own head learns (algorithms 1.2 J)."""

    learning_rate: float = 1e-3


class LabelKeeper:
    """Answers score_batch and head_step; the same ask id gets the same answer."""

    def __init__(
        self,
        labels: Mapping[bytes, int | None],
        class_count: int,
        head_path: Path,
        say: Callable[[str], None],
        settings: HeadSettings | None = None,
    ) -> None:
        """`labels` maps wire ids to class numbers."""
        self._labels, self._class_count = labels, class_count
        self._head_path, self._settings = head_path, settings or HeadSettings()
        self._checkpoint = read_or_set_aside(head_path, checkpoint_from_bytes, say)
        self._bases = self._read_bases(say)  # by step
        self._scored: Gradient | None = None

    def head_of(self, run: str) -> Head | None:
        """The head that was trained in this run, if there is one."""
        return self._checkpoint.head if self._checkpoint and self._checkpoint.run == run else None

    def score(self, ask: Ask) -> Gradient:
        """SA step 6 with the head on the server: loss of its logits (B, C), and d loss / d logits.

        Raises: RemoteProtocolError for unknown samples or another number of classes.
        """
        if self._scored is None or self._scored.ask != ask.ask:
            logits = ask.tensors["logits"]
            if logits.shape[1] != self._class_count:
                raise RemoteProtocolError(
                    f"ask {ask.ask}: expected logits of {self._class_count} classes, found {logits.shape[1]}",
                    START_ANEW,
                )
            self._scored = gradient_message(ask.ask, softmax_gradient(logits, self._labels_of(ask)))
        return self._scored

    def step_head(self, ask: Ask, run: str) -> Gradient | Checkpoints:
        """SA step 6 with the head here: one Adam step on features (B, d), durable before its gradient is answered.

        Where no head of the step before is held, the steps at which there is one are the answer: the server rewinds.
        Raises: RemoteProtocolError as `score`; DeviceError when the disk refuses.
        """
        known, after = self._checkpoint, int(ask.parameters["after"])
        if known is None or (known.run, known.ask, known.after) != (run, ask.ask, after):
            features = ask.tensors["features"]
            held = self._held(run)
            if after and after not in held:
                return Checkpoints(ask.ask, (0, *sorted(held)))
            before = held.get(after)
            head = before.head if before else zero_head(self._class_count, features.shape[1])
            if head.weight.shape[1] != features.shape[1]:
                raise RemoteProtocolError(
                    f"ask {ask.ask}: expected features of {head.weight.shape[1]} values, found {features.shape[1]}",
                    START_ANEW,
                )
            self._drop_bases(step for step, each in self._bases.items() if each.run == run and step > after)
            if before is not None and after == ask.parameters["base"]:
                self._keep_base(before)
            moved, loss = head_step(head, features, self._labels_of(ask), self._settings.learning_rate)
            known = self._checkpoint = HeadCheckpoint(moved, run, int(ask.parameters["step"]), after, ask.ask, loss)
            write_durably(self._head_path, checkpoint_to_bytes(known))  # syncs what was dropped in its folder as well
        return gradient_message(ask.ask, known.answer)

    def _held(self, run: str) -> dict[int, HeadCheckpoint]:
        """The heads of this run by the step at which they stand."""
        held = dict(self._bases)
        if self._checkpoint is not None:
            held[self._checkpoint.step] = self._checkpoint
        return {step: checkpoint for step, checkpoint in held.items() if checkpoint.run == run}

    def _keep_base(self, checkpoint: HeadCheckpoint) -> None:
        """Keep the head at a step that the server has a checkpoint of; the server keeps two, and so does this."""
        known, data = self._bases.get(checkpoint.step), checkpoint_to_bytes(checkpoint)
        if known is None or checkpoint_to_bytes(known) != data:  # the same step taken again may end elsewhere, on a GPU
            write_durably(self._base_path(checkpoint.step), data)
            self._bases[checkpoint.step] = checkpoint
        own = sorted(step for step, each in self._bases.items() if each.run == checkpoint.run)
        self._drop_bases(set(self._bases) - set(own[-BASES:]))

    def _drop_bases(self, steps: Iterable[int]) -> None:
        """Forget heads that the server cannot go back to: older ones, or of a time that it has gone back from."""
        for step in tuple(steps):
            del self._bases[step]
            self._base_path(step).unlink(missing_ok=True)

    def _base_path(self, step: int) -> Path:
        return self._head_path.with_name(f"{self._head_path.stem}.{step}{self._head_path.suffix}")

    def _read_bases(self, say: Callable[[str], None]) -> dict[int, HeadCheckpoint]:
        paths = self._head_path.parent.glob(f"{self._head_path.stem}.[0-9]*{self._head_path.suffix}")
        found = (read_or_set_aside(path, checkpoint_from_bytes, say) for path in sorted(paths))
        return {checkpoint.step: checkpoint for checkpoint in found if checkpoint is not None}

    def _labels_of(self, ask: Ask) -> NDArray[np.int64]:
        """Class numbers (B,) of the ask's samples: joined by id, never by place (SE-03)."""
        labels = [self._labels.get(sample_id.tobytes()) for sample_id in ask.tensors["sample_ids"]]
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            raise RemoteProtocolError(
                f"ask {ask.ask} names {len(labels) - len(known)} samples that this device never sent", START_ANEW
            )
        return np.array(known, np.int64)


def gradient_message(ask: str, loss: BatchLoss) -> Gradient:
    """The loss of a batch as it goes on the wire."""
    return Gradient(ask, loss.mean_loss, loss.correct, loss.count, loss.gradient)
