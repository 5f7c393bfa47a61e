"""From a torch frontend to the bytes of its ONNX file, through every gate on the way.

The order is: reference outputs, calibration and folds, trace, float gate, INT8, structural check, INT8 gate. Tuning the
backend is left to exporter.backend_tuning, putting the file into a package to exporter.package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import nn

from contract.console import progress, say
from contract.errors import ExportError
from contract.manifest import WeightRecord
from exporter.models import Facts, FoldSites
from exporter.onnx_check import SIZE_LIMIT_BYTES, Expected, check_file
from exporter.onnx_graph import count_macs, export_float, inference_mode
from exporter.onnx_offsets import weight_records
from exporter.onnx_qdq import int8_share, quantize_graph
from exporter.parity import (
    FloatRule,
    Int8Figures,
    channel_bias,
    count_int8_layers,
    gate_float,
    gate_int8,
    measure,
    snr_db,
)
from exporter.plan import ExportPlan, Limits
from exporter.public_set import Parts, PublicSet, is_blank
from exporter.quantize import Folded, calibrate, fold, linear_layers, quantize_linear
from exporter.runtime import executed_kernels, open_session, run_tokens

Floats = NDArray[np.float32]

_PARITY_BATCHES = (1, 2, 5)
_WHOLE_BATCH = 2  # images for which the whole model is run beside its halves
RECIPE = (
    "weights int8 symmetric per output channel",
    "linear inputs int8 symmetric per tensor, min-max",
    "shift and SmoothQuant 0.5 folded into LayerNorm",
    "V channels smoothed for the attention projection",
    "activation output shifted to the middle of its range",
    "bias corrected for the mean effect of weight rounding",
    "patch embedding weights int8, input float",
    "attention products, softmax, LayerNorm and residuals float",
)


@dataclass(frozen=True)
class Halves:
    """A model cut in two, and the whole for comparison."""

    model: nn.Module
    frontend: nn.Module
    backend: nn.Module
    facts: Facts
    sites: FoldSites


@dataclass(frozen=True)
class FrontendFile:
    """The file to ship, what is known of it, and its float32 form on scratch space for comparison."""

    data: bytes
    float_path: Path
    records: tuple[WeightRecord, ...]
    macs: int
    figures: Int8Figures | None  # None: a float32 file
    forced: bool
    differences: tuple[str, ...]


def make_frontend_file(
    halves: Halves, plan: ExportPlan, public: PublicSet, parts: Parts, limits: Limits, threads: int, scratch: Path
) -> FrontendFile:
    """The frontend as a checked ONNX file. With plan.int8 the torch frontend is folded in place; its function stays.

    Raises ExportError when a step fails, GateError when the result is outside a limit.
    """
    compared = np.concatenate([parts.evaluation, parts.calibration])[: limits.compared_images]
    images = next(public.batches(compared, max(_PARITY_BATCHES)))
    reference, features = _reference(halves, images)
    folded = _fold(halves, public, parts, limits) if plan.int8 else None
    model = export_float(halves.frontend, halves.facts.input_shape, plan.opset)
    macs = count_macs(model, halves.facts.layout.count, halves.frontend)
    float_path = scratch / "float.onnx"
    float_path.write_bytes(_serialized(model))
    layers = linear_layers(halves.frontend)
    model = model if folded is None else _quantized(model, layers, folded)
    session = open_session(str(float_path), threads)
    differences = _gate_float(session, halves.backend, images, reference, features)
    data = _serialized(model)
    if folded is None:
        check_file(data, _expected(halves, plan, ()))
        return FrontendFile(data, float_path, (), macs, None, False, differences)
    exact = _run(session, public, compared, limits.batch)
    del session
    check_file(data, _expected(halves, plan, tuple(layers)))
    found = _run_in_unequal_batches(open_session(data, threads), public, compared)
    kernels = count_int8_layers(executed_kernels(data, images[:1], scratch))
    figures = _figures(model, exact, found, len(layers), kernels)
    say(str(figures))
    forced = gate_int8(figures, limits, plan.force)
    shifts = {name: _shift_array(halves.sites, name) for name in folded.shifts}
    return FrontendFile(data, float_path, weight_records(data, shifts), macs, figures, forced, differences)


def _quantized(model: ModelProto, layers: Mapping[str, nn.Linear], folded: Folded) -> ModelProto:
    ranges, shifts = folded.ranges, folded.shifts
    return quantize_graph(
        model, {name: quantize_linear(name, each, ranges[name], shifts.get(name)) for name, each in layers.items()}
    )


def _reference(halves: Halves, images: Floats) -> tuple[Floats, Floats]:
    """Tokens at the cut and features before the head, as the whole model in inference mode computes them."""
    inputs = torch.from_numpy(images)
    with inference_mode(halves.model), inference_mode(halves.frontend):
        whole = halves.model.forward_head(halves.model.forward_features(inputs[:_WHOLE_BATCH]), pre_logits=True)
        return halves.frontend(inputs).numpy(), whole.numpy()


def _fold(halves: Halves, public: PublicSet, parts: Parts, limits: Limits) -> Folded:
    if is_blank(public.pixels(parts.calibration)):
        say("warning: every calibration image has one colour only; ranges and noise scales will fit no real image")
    batches = public.batches(parts.calibration, limits.batch)
    with inference_mode(halves.frontend):
        with progress(total=len(parts.calibration), description="Calibrating", unit="images") as bar:

            def counted() -> Iterator[torch.Tensor]:
                for batch in batches:
                    yield torch.from_numpy(batch)
                    bar.update(len(batch))

            ranges = calibrate(halves.frontend, counted())
        return fold(halves.frontend, halves.sites, ranges)


def _gate_float(
    session: onnxruntime.InferenceSession, backend: nn.Module, images: Floats, reference: Floats, features: Floats
) -> tuple[str, ...]:
    """Compare at several batch sizes, so that a batch frozen by the tracer shows."""
    differences = []
    for size in sorted({min(size, len(images)) for size in _PARITY_BATCHES}):
        tokens = run_tokens(session, images[:size])
        differences.append(measure(f"tokens at batch {size}", reference[:size], tokens))
    with inference_mode(backend):
        joined = backend(torch.from_numpy(tokens[: len(features)])).numpy()
    differences.append(measure("features of frontend and backend together", features, joined))
    for each in differences:
        say(f"float32, {each}")
    gate_float(differences, FloatRule())
    return tuple(map(str, differences))


def _run(session: onnxruntime.InferenceSession, public: PublicSet, indices: NDArray[np.int64], batch: int) -> Floats:
    return np.concatenate([run_tokens(session, images) for images in public.batches(indices, batch)])


def _run_in_unequal_batches(
    session: onnxruntime.InferenceSession, public: PublicSet, indices: NDArray[np.int64]
) -> Floats:
    """The first image alone, then two, then the rest three at a time: a fixed batch size cannot pass."""
    pieces = [_run(session, public, indices[start:end], 3) for start, end in ((0, 1), (1, 3), (3, None))
              if len(indices[start:end])]  # fmt: skip
    return np.concatenate(pieces)


def _figures(model: ModelProto, exact: Floats, found: Floats, linears: int, kernels: int) -> Int8Figures:
    worst, bias = channel_bias(exact, found)
    share, float_weights = int8_share(model)
    cosine = measure("tokens", exact, found).cosine
    return Int8Figures(snr_db(exact, found), cosine, worst, bias, share, float_weights, linears, kernels)


def _expected(halves: Halves, plan: ExportPlan, quantized: tuple[str, ...]) -> Expected:
    layout = halves.facts.layout
    norms = sum(isinstance(each, nn.LayerNorm) for each in halves.frontend.modules())
    return Expected(plan.opset, halves.facts.input_shape, (layout.count, layout.dim), norms, quantized)


def _shift_array(sites: FoldSites, layer: str) -> str | None:
    """Name of the stored shift that noise on this layer's weights must respect, None where it need not.

    Behind an activation the shift is far from the input's mean, and noise would multiply it: 18 dB at the cut become
    3 dB (measured on a trained ViT-S, alpha 0.1). A shift folded into LayerNorm centres its input: no difference.
    """
    activation = next((activation for activation, linear in sites.activated if linear == layer), None)
    return None if activation is None else f"{activation}.1.shift"


def _serialized(model: ModelProto) -> bytes:
    """Raises ExportError for a frontend that one protobuf message cannot hold in float32."""
    if model.ByteSize() > SIZE_LIMIT_BYTES:
        raise ExportError(
            f"a frontend may have at most {SIZE_LIMIT_BYTES} bytes as float32, found {model.ByteSize()}",
            "choose a smaller --split or a smaller model",
        )
    return model.SerializeToString(deterministic=True)
