"""The ONNX graphs with which a device trains its part of a model: forward, backward, evaluation.

How they are traced is exporter.training_trace's, how they are cut exporter.training_partition's, what is written
exporter.training_onnx's, and whether they are right exporter.training_check's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch import nn

from contract.errors import ExportError
from contract.training import PrototypeRule
from exporter.training_onnx import macs, to_onnx
from exporter.training_partition import divide, whole
from exporter.training_trace import plain_copy, sort_tensors, trace_evaluation, trace_training

Loss = Literal["none", "cross-entropy"]


@dataclass(frozen=True)
class TrainingGraphs:
    """Three graphs as bytes, and what a trainer must know of them."""

    forward: bytes
    backward: bytes
    evaluate: bytes
    output_shape: tuple[int, ...]  # of z for one image; 0 where it depends on the kept tokens
    evaluated_shape: tuple[int, ...]  # of z in the evaluation graph
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    moved: tuple[str, ...]  # buffers for which the forward graph has an output new:<name>
    saved: int
    macs: int  # of the evaluation graph, for one image
    prototypes: PrototypeRule | None = None  # of a part that `prototypes.attach` has given a projection head


def make_training_graphs(
    part: nn.Module, input_shape: tuple[int, int, int], *, trainable: Collection[str], loss: Loss = "none",
    kept_tokens: bool = False, recompute: bool = False, class_count: int | None = None,
    prototypes: PrototypeRule | None = None,
) -> TrainingGraphs:  # fmt: skip
    """Graphs for `part`: images (B, 3, h, w) [and kept positions (B, K)] -> z, or (z, loss).

    Every module is traced in the mode it is in: a BatchNorm in train mode uses and moves statistics of the batch, one
    in evaluation mode uses its running ones. With "cross-entropy" z are logits and the loss is made in the graph.
    With prototypes the part returns (z, embedding). The part itself is not changed.

    Raises ExportError for a part that cannot be trained this way.
    """
    if (loss == "cross-entropy") != (class_count is not None):
        raise ExportError(
            f"a class count goes with the loss cross-entropy, found {class_count} with {loss}", "give both or neither"
        )
    tensors = sort_tensors(part, trainable)
    copied = plain_copy(part)
    traced = trace_training(copied, input_shape, tensors, class_count, kept_tokens, prototypes)
    evaluated = trace_evaluation(copied, input_shape, tensors)
    forward, backward = divide(traced, recompute)
    evaluate = whole(evaluated)
    weights = part.state_dict()
    return TrainingGraphs(
        forward=to_onnx(forward, "forward", weights),
        backward=to_onnx(backward, "backward", weights),
        evaluate=to_onnx(evaluate, "evaluate", weights),
        output_shape=traced.output_shape,
        evaluated_shape=evaluated.output_shape,
        trainable=tensors.trainable,
        frozen=tensors.frozen,
        buffers=tensors.buffers,
        moved=tuple(name.removeprefix("new:") for name in traced.outputs if name.startswith("new:")),
        saved=sum(name.startswith("saved:") for name in forward.outputs),
        macs=macs(evaluate),
        prototypes=prototypes,
    )
