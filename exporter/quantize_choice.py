"""Which scales a frontend's INT8 file gets: min-max, or searched ones where these bring its tokens closer to float32.

The search itself is exporter.scale_search; judging the file that comes of it is left to exporter.frontend_file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import nn

from contract.console import progress, say
from exporter.models._inference import inference_mode
from exporter.parity import snr_db
from exporter.plan import Limits
from exporter.public_set import Parts, PublicSet
from exporter.quantize import ChosenScales
from exporter.quantize_frontend import Prepared, calibration_batches, quantized, search
from exporter.runtime import open_session, run_tokens
from exporter.scale_search import Answer


@dataclass(frozen=True)
class ScaleBench:
    """A prepared frontend with its float graph and session, what comes behind it, and the server's pictures.

    `head` is the model's own, weight (C, f) and bias (C,); None: it has none.
    """

    prepared: Prepared
    model: ModelProto
    session: onnxruntime.InferenceSession
    backend: nn.Module
    head: tuple[torch.Tensor, torch.Tensor] | None
    public: PublicSet
    parts: Parts
    limits: Limits
    threads: int


def choose_scales(bench: ScaleBench, rng: np.random.Generator) -> tuple[ModelProto, str]:
    """The INT8 graph whose tokens are closest to float32's on held-out pictures, and how its scales were found.

    A search on few images clips too much (28.2 dB where min-max has 29.3 with 4 images), so it must win elsewhere.
    """
    prepared = bench.prepared
    plain = prepared.min_max()
    min_max = quantized(bench.model, prepared, plain)
    if prepared.quantizer.search is None or not plain:
        return min_max, "min-max"
    searched = _search(bench, rng)
    weights_only = {name: ChosenScales(each.weight, plain[name].input) for name, each in searched.items()}
    candidates = {"min-max": min_max, "searched for weights": quantized(bench.model, prepared, weights_only),
                  "searched": quantized(bench.model, prepared, searched)}  # fmt: skip
    held = _held_out(bench.parts, bench.limits)
    exact = _tokens(bench, bench.session, held)
    figures = {
        name: snr_db(exact, _tokens(bench, open_session(model.SerializeToString(), bench.threads), held))
        for name, model in candidates.items()
    }
    best = max(figures, key=lambda name: figures[name])
    say("scales, SNR on other images: " + ", ".join(f"{name} {value:.2f} dB" for name, value in figures.items()))
    return candidates[best], best


def _tokens(bench: ScaleBench, session: onnxruntime.InferenceSession, indices: NDArray[np.int64]) -> NDArray:
    return np.concatenate([run_tokens(session, images) for images in bench.public.batches(indices, bench.limits.batch)])


def _held_out(parts: Parts, limits: Limits) -> NDArray[np.int64]:
    """Pictures that neither calibration nor the figures use, where there are enough."""
    others = parts.tuning[len(parts.calibration) :][: limits.searched_images]
    return others if len(others) else parts.calibration


def _search(bench: ScaleBench, rng: np.random.Generator) -> dict[str, ChosenScales]:
    """Searched on the calibration images, with the server's labels where its own head answers their classes."""
    public, indices, size = bench.public, bench.parts.calibration, bench.limits.batch
    answer, labels = _answer_of(bench), _labels_of(bench)

    def labelled() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        for place, images in enumerate(calibration_batches(public, indices, size)):
            part = indices[place * size :][: len(images)]
            yield torch.from_numpy(images), None if labels is None else torch.from_numpy(labels[part])

    with inference_mode(bench.prepared.frontend), inference_mode(bench.backend):
        total = len(bench.prepared.products())
        with progress(total=total, description="Searching scales", unit="layers") as bar:
            return search(bench.prepared, labelled(), len(indices), answer, rng, lambda: bar.update(1))


def _answer_of(bench: ScaleBench) -> Answer | None:
    """Tokens -> logits; without a head there is no loss to weigh errors with."""
    head = bench.head
    return None if head is None else lambda tokens: nn.functional.linear(bench.backend(tokens), *head)


def _labels_of(bench: ScaleBench) -> NDArray[np.int64] | None:
    """Class numbers (n,) of the public set where the head has as many classes; else its own answer is the target."""
    labels, folder = bench.public.labels, bench.public.folder
    fits = labels is not None and bench.head is not None and len(folder.classes) == len(bench.head[1])
    return labels if fits else None
