"""Whether devices' answers fit the questions of split training: what does not names the device and the field.

Gradients and parts are judged by `aggregation`, because a round can do without some; the order of questions is left to
`split_rounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from contract.errors import TrainingError
from contract.messages import Activations, PatchFeatures
from contract.patch_features import TYPES
from contract.training import TrainingCut

from .strategies import Replies

_UPDATE = "install this run's package on the device and update its software"

T = TypeVar("T")


def answer(kind: type[T], replies: Replies, device: str) -> T:
    """A device's reply of the type that was asked for.

    Raises:
        TrainingError: it is another, or none.
    """
    reply = replies.get(device)
    if not isinstance(reply, kind):
        cause = f"{device}: expected {kind.__name__}, found {type(reply).__name__}"
        raise TrainingError(cause, "update the device's software")
    return reply


@dataclass(frozen=True)
class Wanted:
    """What activations must be: `rows` of a device's `samples` images at `cut`, with labels below `classes`, or without
    any where that is None."""

    rows: int
    cut: TrainingCut
    samples: int
    classes: int | None
    label_mode: str


def check_activations(device: str, reply: Activations, wanted: Wanted) -> None:
    """Hold a training batch against what was asked for.

    Raises:
        TrainingError: naming the device and the field.
    """
    labels, classes = reply.labels, wanted.classes
    if reply.total != wanted.samples:
        cure = "leave a device's images as they are while it trains, or start a new run"
        raise _broken(device, "total", f"{wanted.samples}, as at its start", reply.total, cure)
    check_values(device, reply.values, (wanted.rows, wanted.cut.output_size), wanted.cut)
    if (labels is None) != (classes is None):
        expected = f"{'none' if classes is None else 'labels'} in {wanted.label_mode} mode"
        raise _broken(device, "labels", expected, "none" if labels is None else "labels", _UPDATE)
    if labels is None or classes is None:
        return
    if labels.shape != (wanted.rows,):
        raise _broken(device, "labels", f"{wanted.rows} labels", labels.shape, _UPDATE)
    if int(labels.max()) >= classes:
        cure = "give every device of the site the same list of classes"
        raise _broken(device, "labels", f"classes below {classes}", int(labels.max()), cure)


def check_values(device: str, values: np.ndarray, shape: tuple[int, int], cut: TrainingCut) -> None:
    """Hold values at a cut against their shape.

    Raises:
        TrainingError: naming the device and the field.
    """
    if values.shape != shape:
        raise _broken(device, "values", f"{shape} at cut {cut.index}", values.shape, _UPDATE)
    if not np.isfinite(values).all():
        cure = "lower --learning-rate and start a new run"
        raise _broken(device, "values", "finite values", "NaN or infinity", cure)


def check_patch_features(device: str, reply: PatchFeatures, cut: TrainingCut, classes: int, precision: str) -> None:
    """Hold the features of a balanced set against the cut, the class list, and how the package says they travel.

    Raises:
        TrainingError: naming the device and the field.
    """
    values, labels, scales = reply.values, reply.labels, reply.scales
    if values is None or labels is None:
        return
    if values.shape[1:] != cut.output_shape or values.dtype != TYPES[precision]:
        expected = f"{precision} tokens {cut.output_shape} at cut {cut.index}"
        raise _broken(device, "values", expected, f"{values.dtype} {values.shape[1:]}", _UPDATE, "patch_features")
    if (scales is not None) != (precision == "int8"):
        raise _broken(device, "scales", "scales with int8 only", scales is not None, _UPDATE, "patch_features")
    if int(labels.max()) >= classes:
        cure = "give every device of the site the same list of classes"
        raise _broken(device, "labels", f"classes below {classes}", int(labels.max()), cure, "patch_features")


def _broken(
    device: str, field: str, expected: str, found: object, cure: str, message: str = "activations"
) -> TrainingError:
    return TrainingError(f"{device}: {message}.{field}: expected {expected}, found {found}", cure)
