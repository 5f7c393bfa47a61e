"""From a torch frontend to the bytes of its ONNX file, through every gate on the way.

The order is: reference outputs, calibration and folds, trace, float gate, INT8, structural check, INT8 gate. Tuning the
backend is left to exporter.backend_tuning, putting the file into a package to exporter.package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from exporter.macs import count_macs
from exporter.masked_frontend import with_every_pixel
from exporter.models import Facts, FoldSites
from exporter.onnx_check import SIZE_LIMIT_BYTES, Expected, check_file
from exporter.onnx_graph import export_float, inference_mode
from exporter.onnx_offsets import weight_records
from exporter.onnx_qdq import int8_share
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
from exporter.quantize import QUANTIZERS, Quantizer, convolutions
from exporter.quantize_choice import ScaleBench, choose_scales
from exporter.quantize_frontend import Prepared, calibration_batches, prepare
from exporter.runtime import executed_kernels, open_session, run_tokens

Floats = NDArray[np.float32]

_PARITY_BATCHES = (1, 2, 5)
_WHOLE_BATCH = 2  # images for which the whole model is run beside its halves
_FEW_IMAGES = 8


@dataclass(frozen=True)
class Halves:
    """A model cut in two, and the whole for comparison; `facts.layout` is that of the tokens at this cut.

    `head` is the model's own, weight (C, f) and bias (C,) over the backend's features; None where it has none.
    """

    model: nn.Module
    frontend: nn.Module
    backend: nn.Module
    head: tuple[torch.Tensor, torch.Tensor] | None
    facts: Facts
    sites: FoldSites


@dataclass(frozen=True)
class FrontendFile:
    """The file to ship, what is known of it, and its float32 form on scratch space for comparison."""

    data: bytes
    float_path: Path
    records: tuple[WeightRecord, ...]
    recipe: tuple[str, ...]
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
    reference, whole = _reference(halves, images)
    prepared = _prepare(halves, QUANTIZERS[plan.quantizer], public, parts, limits) if plan.int8 else None
    model = export_float(halves.frontend, halves.facts.input_shape, plan.opset)
    macs = count_macs(halves.frontend, halves.facts.input_shape)
    float_path = scratch / "float.onnx"
    float_path.write_bytes(_serialized(model))
    session = open_session(str(float_path), threads)
    differences = _gate_float(session, halves, images, reference, whole)
    if prepared is None:
        data = _serialized(model)
        check_file(data, _expected(halves, plan, ()))
        return FrontendFile(data, float_path, (), (), macs, None, False, differences)
    exact = _run(session, public, compared, limits.batch)
    bench = ScaleBench(prepared, model, session, halves.backend, halves.head, public, parts, limits, threads)
    model, scales = choose_scales(bench, np.random.default_rng(plan.seed))
    del session, bench
    data = _serialized(model)
    check_file(data, _expected(halves, plan, tuple(prepared.products())))
    found = _run_in_unequal_batches(open_session(data, threads), public, compared)
    layers = len(prepared.products()) + len(convolutions(halves.frontend))
    kernels = count_int8_layers(executed_kernels(data, images[:1], scratch))
    figures = _figures(model, exact, found, layers, kernels)
    say(str(figures))
    forced = gate_int8(figures, limits, plan.force)
    records, recipe = weight_records(data, prepared.folded.centred), _recipe(plan.quantizer, prepared, scales)
    return FrontendFile(data, float_path, records, recipe, macs, figures, forced, differences)


def _recipe(name: str, prepared: Prepared, scales: str) -> tuple[str, ...]:
    """What was done, as the manifest tells it."""
    quantizer, folded, sites = prepared.quantizer, prepared.folded, prepared.sites
    steps = (
        (True, f"quantizer {name}"),
        (quantizer.per_channel, "weights int8 symmetric per output channel"),
        (not quantizer.per_channel, "weights int8 symmetric per tensor (Q, K and V apart)"),
        (True, f"inputs int8 symmetric per tensor, scales {scales}"),
        (quantizer.smooth and sites.normed, "shift and SmoothQuant 0.5 folded into LayerNorm"),
        (quantizer.smooth and sites.valued, "V channels smoothed for the attention projection"),
        (folded.tails, "largest hidden units of each MLP multiplied in float"),
        (folded.centred, "activation output shifted to the middle of its range"),
        (quantizer.correct_bias, "bias corrected for the mean effect of weight rounding"),
        (True, "first convolution's weights int8, its input float"),
        (True, "attention products, softmax, LayerNorm and residuals float"),
    )
    return tuple(text for holds, text in steps if holds)


def _reference(halves: Halves, images: Floats) -> tuple[Floats, Floats]:
    """Tokens at the cut, and the whole model's answer in inference mode: features where it has no head of its own."""
    inputs = torch.from_numpy(images)
    with inference_mode(halves.model), inference_mode(halves.frontend):
        whole = halves.model.forward_features(inputs[:_WHOLE_BATCH])
        whole = halves.model.forward_head(whole, pre_logits=halves.head is None)
        return halves.frontend(inputs).numpy(), whole.numpy()


def _prepare(halves: Halves, quantizer: Quantizer, public: PublicSet, parts: Parts, limits: Limits) -> Prepared:
    pieces = np.array_split(parts.calibration, max(1, len(parts.calibration) // limits.batch))
    if all(is_blank(public.pixels(piece)) for piece in pieces):
        say("warning: every calibration image has one colour only; ranges and noise scales will fit no real image")
    elif len(parts.calibration) < _FEW_IMAGES:
        say(f"warning: calibrating on {len(parts.calibration)} images only; {limits.calibration_images} are usual")
    total = len(parts.calibration)
    with inference_mode(halves.frontend), progress(total=total, description="Calibrating", unit="images") as bar:

        def counted() -> Iterator[torch.Tensor]:
            for batch in calibration_batches(public, parts.calibration, limits.batch):
                yield torch.from_numpy(batch)
                bar.update(len(batch))

        prepared = prepare(halves.frontend, halves.sites, quantizer, counted())
    inputs = with_every_pixel(prepared.folded.ranges.inputs, public.rule)
    ranges = replace(prepared.folded.ranges, inputs=inputs)
    return replace(prepared, folded=replace(prepared.folded, ranges=ranges))


def _gate_float(
    session: onnxruntime.InferenceSession, halves: Halves, images: Floats, reference: Floats, whole: Floats
) -> tuple[str, ...]:
    """Compare at several batch sizes, so that a batch frozen by the tracer shows."""
    differences = []
    for size in sorted({min(size, len(images)) for size in _PARITY_BATCHES}):
        tokens = run_tokens(session, images[:size])
        differences.append(measure(f"tokens at batch {size}", reference[:size], tokens))
    with inference_mode(halves.backend):
        joined = halves.backend(torch.from_numpy(tokens[: len(whole)]))
        if halves.head is not None:
            joined = torch.nn.functional.linear(joined, *halves.head)
    differences.append(measure("the answer of frontend and backend together", whole, joined.numpy()))
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
    shape = (0 if plan.masked else layout.count, layout.dim)
    return Expected(plan.opset, halves.facts.input_shape, shape, norms, quantized, plan.masked)


def _serialized(model: ModelProto) -> bytes:
    """Raises ExportError for a frontend that one protobuf message cannot hold in float32."""
    if model.ByteSize() > SIZE_LIMIT_BYTES:
        raise ExportError(
            f"a frontend may have at most {SIZE_LIMIT_BYTES} bytes as float32, found {model.ByteSize()}",
            "choose a smaller --split or a smaller model",
        )
    return model.SerializeToString(deterministic=True)
