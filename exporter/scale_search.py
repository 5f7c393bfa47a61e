"""Scales that hurt the output least: a grid search weighted by the loss's gradient (SA Eq. 8, after PTQ4ViT).

When the result is used is left to exporter.quantize_frontend, which keeps min-max unless the frontend's own output
comes closer on pictures that were not searched on.

Per layer, with X = input W^T and X^ the same from rounded input and weights: minimise sum (g (X^ - X))^2 where
g = dL/dX and L is the cross-entropy of the whole model's answer. PTQ4ViT takes the model's own distribution for the
answer, which leaves a gradient of rounding errors (3e-10); with labels it is 8e-3. Where it vanishes all the same,
every output counts alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from exporter.quantize import CODE_MAX, ChosenScales, SearchSettings, enough_memory

LEAST_GRADIENT = 1e-6  # below it, the gradient is rounding errors

Answer = Callable[[Tensor], Tensor]  # tokens at the cut -> logits (B, C)


@dataclass(frozen=True)
class Rows:
    """Some input rows (R, K) of one layer with the loss's gradient at its output (R, N); None: it vanishes."""

    inputs: Tensor
    gradient: Tensor | None


def collect_rows(
    frontend: nn.Module, layers: Mapping[str, nn.Linear], batches: Iterable[tuple[Tensor, Tensor | None]], images: int,
    answer: Answer | None, settings: SearchSettings, rng: np.random.Generator,
) -> dict[str, Rows]:  # fmt: skip
    """At most settings.rows rows of every layer, the same number from each of `images` images.

    Batches are (B, 3, h, w) with class numbers (B,); without numbers the model's own answer is the target. Images are
    taken one at a time, as all activations of a backward pass are held.
    """
    kept: dict[str, list[tuple[Tensor, Tensor | None]]] = {name: [] for name in layers}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs[0].detach(), output)})
        )
        for name, layer in layers.items()
    ]
    parameters = [each for each in frontend.parameters() if each.requires_grad]
    try:
        for each in parameters:
            each.requires_grad_(False)  # their gradients would be as large as the model
        for batch, labels in batches:
            for place in range(len(batch)):
                label = None if labels is None else labels[place : place + 1]
                with enough_memory("the scale search"):
                    _pass(frontend, batch[place : place + 1], label, answer, seen, kept, settings.rows / images, rng)
    finally:
        for hook in hooks:
            hook.remove()
        for each in parameters:
            each.requires_grad_(True)
    return {name: _joined(parts) for name, parts in kept.items()}


def _pass(
    frontend: nn.Module, image: Tensor, label: Tensor | None, answer: Answer | None,
    seen: dict[str, tuple[Tensor, Tensor]], kept: dict[str, list[tuple[Tensor, Tensor | None]]], rows_an_image: float,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    with torch.set_grad_enabled(answer is not None):
        tokens = frontend(image.clone().requires_grad_(answer is not None))
        gradients: Mapping[str, Tensor] = {}
        if answer is not None:
            logits = answer(tokens)
            loss = cross_entropy(logits, logits.argmax(1) if label is None else label)
            outputs = [output for _, output in seen.values()]
            gradients = dict(zip(seen, torch.autograd.grad(loss, outputs), strict=True))
    for name, (inputs, _) in seen.items():
        rows = inputs.reshape(-1, inputs.shape[-1])
        chosen = torch.from_numpy(rng.permutation(len(rows))[: math.ceil(rows_an_image)])
        gradient = gradients[name].reshape(len(rows), -1)[chosen].clone() if name in gradients else None
        kept[name].append((rows[chosen].clone(), gradient))
    seen.clear()


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> Rows:
    inputs = torch.cat([rows for rows, _ in parts])
    gradients = [gradient for _, gradient in parts if gradient is not None]
    gradient = torch.cat(gradients) if gradients else None
    vanishes = gradient is None or not float(gradient.abs().max()) >= LEAST_GRADIENT
    return Rows(inputs, None if vanishes else gradient)


@torch.no_grad()
def search_scales(
    rows: Rows, weight: Tensor, start: ChosenScales, groups: int | None, settings: SearchSettings
) -> ChosenScales:
    """Scales with no higher cost on `rows` than `start`'s; weight (N, K), turns of weight scales and the input's scale.

    With `groups`, output channels of one group keep one scale together.
    """
    importance = torch.ones(()) if rows.gradient is None else rows.gradient.square()
    exact = rows.inputs @ weight.T  # (R, N)
    per = weight.shape[0] // (groups or weight.shape[0])  # channels that share a scale

    def cost(scales: Tensor, step: float) -> Tensor:
        found = _rounded(rows.inputs, torch.tensor(step)) @ _rounded(weight, scales[:, None]).T
        return ((found - exact).square() * importance).sum(0).reshape(-1, per).sum(1)  # (groups,)

    scales, step = torch.from_numpy(start.weight.copy()), start.input
    factors = np.linspace(settings.lowest, settings.highest, settings.candidates, endpoint=False)
    for _ in range(settings.rounds):
        best, first = cost(scales, step), torch.from_numpy(start.weight)
        for factor in factors:
            candidate = (first * float(factor)).clamp_min(torch.finfo(torch.float32).tiny)
            found = cost(candidate, step)
            better = (found < best).repeat_interleave(per)
            scales, best = torch.where(better, candidate, scales), torch.minimum(found, best)
        lowest = float(best.sum())
        for factor in factors:
            candidate_step = max(start.input * float(factor), float(torch.finfo(torch.float32).tiny))
            found_sum = float(cost(scales, candidate_step).sum())
            if found_sum < lowest:
                step, lowest = candidate_step, found_sum
    return ChosenScales(scales.numpy(), step)


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round().clamp(-CODE_MAX, CODE_MAX) * scale
