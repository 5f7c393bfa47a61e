"""A torch frontend made ready for INT8, and its float graph with INT8 written in: the order of the steps.

Each step's arithmetic is in exporter.quantize, quantize_folds and scale_search; running the files and judging them is
left to exporter.frontend_file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor, nn

from contract.images import normalise
from exporter.hilbert import transformed_pixels
from exporter.models import FoldSites
from exporter.onnx_qdq import quantize_graph, rectified_convolutions
from exporter.public_set import PublicSet
from exporter.quantize import (
    ChosenScales,
    Quantizer,
    calibrate,
    check_weights,
    convolutions,
    linear_layers,
    min_max_scales,
    quantize_convolution,
    quantize_linear,
    store_linear,
)
from exporter.quantize_folds import Folded, fold, merge_batch_norms, sources
from exporter.scale_search import Answer, collect_rows, search_scales


@dataclass(frozen=True)
class Prepared:
    """A folded frontend (its function is what it was) and what is known of its ranges."""

    frontend: nn.Module
    sites: FoldSites
    folded: Folded
    quantizer: Quantizer

    def products(self) -> dict[str, nn.Linear]:
        """Linear layers that multiply in INT8, by path."""
        return {name: each for name, each in linear_layers(self.frontend).items() if name not in self.folded.tails}

    def groups(self, name: str) -> int | None:
        """How many scales a layer's weights share: one for each of Q, K and V; None: one for every channel."""
        if self.quantizer.per_channel:
            return None
        return 3 if name in {qkv for qkv, _ in self.sites.valued} else 1

    def min_max(self) -> dict[str, ChosenScales]:
        """Scales of every product from its ranges alone."""
        inputs = self.folded.ranges.inputs
        return {name: min_max_scales(each, inputs[name], self.groups(name)) for name, each in self.products().items()}


def prepare(frontend: nn.Module, sites: FoldSites, quantizer: Quantizer, batches: Iterable[Tensor]) -> Prepared:
    """Check, merge, calibrate and fold a frontend in inference mode, in place; its function stays.

    Raises ExportError when weights or activations are not finite, a layer is all zeros, images or memory are short.
    """
    check_weights(frontend)
    batches = iter(batches)
    first = next(batches, None)
    feeds: dict[str, str] = {}
    if first is not None:
        merge_batch_norms(frontend, first[:1])
        feeds = sources(frontend, first[:1])
        batches = _again(first, batches)
        del first
    ranges = calibrate(frontend, batches)
    return Prepared(frontend, sites, fold(frontend, sites, ranges, quantizer, feeds), quantizer)


def _again(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    del first
    yield from rest


def search(
    prepared: Prepared, batches: Iterable[tuple[Tensor, Tensor | None]], images: int, answer: Answer | None,
    rng: np.random.Generator, done: Callable[[], object] = lambda: None,
) -> dict[str, ChosenScales]:  # fmt: skip
    """Searched scales of every product; `done` is called after each layer."""
    settings, layers, start = prepared.quantizer.search, prepared.products(), prepared.min_max()
    rows = collect_rows(prepared.frontend, layers, batches, images, answer, settings, rng)
    found = {}
    for name, layer in layers.items():
        found[name] = search_scales(rows.pop(name), layer.weight.detach(), start[name], prepared.groups(name), settings)
        done()
    return found


def quantized(model: ModelProto, prepared: Prepared, scales: Mapping[str, ChosenScales]) -> ModelProto:
    """INT8 written into the float graph of the prepared frontend."""
    folded, quantizer, layers = prepared.folded, prepared.quantizer, linear_layers(prepared.frontend)
    rectified = rectified_convolutions(model)
    linears = {
        name: quantize_linear(
            name, each, folded.ranges.inputs[name], scales[name], folded.shifts.get(name), quantizer.correct_bias
        )
        for name, each in prepared.products().items()
    }
    tails = {name: store_linear(name, layers[name], folded.shifts.get(name)) for name in folded.tails}
    convolved = {
        name: quantize_convolution(
            name, each, folded.ranges, name in rectified, quantizer.per_channel, quantizer.correct_bias
        )
        for name, each in convolutions(prepared.frontend).items()
    }
    return quantize_graph(model, {**linears, **tails}, convolved)


def calibration_batches(public: PublicSet, indices: NDArray[np.int64], size: int) -> Iterator[NDArray[np.float32]]:
    """Normalised images (B, 3, h, w), B <= size: every second one Hilbert-transformed (SA 1.1 step 2), if any is.

    A frontend meets other pictures at a site than the public ones; ranges from both kinds hold for more of them.
    """
    for start in range(0, len(indices), size):
        pixels = public.pixels(indices[start : start + size])
        odd = (start + np.arange(len(pixels))) % 2 == 1
        if public.hilbert and odd.any():
            pixels[odd] = transformed_pixels(pixels[odd])
        yield normalise(pixels, public.rule)
