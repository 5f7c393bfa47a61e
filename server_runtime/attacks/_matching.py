"""Find the images whose training would have changed a model as it was changed: the loop behind inverting gradients and
weight deltas.

The training is repeated with autograd through its steps, so that images can follow the difference. Which change was
seen, and under which rule, is left to the attacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from . import Effort, Known, Update

PUBLIC_LOGITS = 256  # images


@dataclass(frozen=True)
class Search:
    """How images are looked for: Adam on 1 - cosine of the changes, and a prior for smooth pictures."""

    steps: int = 1500
    rate: float = 0.05
    smooth: float = 1e-3  # of the mean absolute difference of neighbours
    starts: int = 2


def planned_steps(asked: int | None, images: int) -> int:
    """As asked, or the search's own number."""
    return Search().starts * (Search().steps if asked is None else asked)


def roughness(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels of each image (n,)."""
    down, across = images.diff(dim=2).abs(), images.diff(dim=3).abs()
    return down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)


def infer_labels(update: Update, logits: Tensor) -> Tensor:
    """Labels (count,) from how the classifier's bias moved: by the mean of onehot - softmax, times the rate.

    `logits` (m, C) of public images stand for those of the device's, before training. Raises: ValueError when the
    update carries no such bias.
    """
    classes = logits.shape[1]
    biases = [each for name, each in update.delta.items() if name.endswith("bias") and each.shape == (classes,)]
    if not biases:
        raise ValueError("labels are unknown, and the update has no classifier's bias to read them off")
    momentum = update.momentum
    moved = sum(sum(momentum**past for past in range(step + 1)) for step in range(update.steps)) * update.rate
    counts = update.count * (biases[-1].double() / moved + logits.double().softmax(dim=1).mean(dim=0))
    found = []
    for _ in range(update.count):
        found.append(int(counts.argmax()))
        counts[found[-1]] -= 1.0
    return torch.tensor(found, device=logits.device)


def changes(model: nn.Module, update: Update, images: Tensor, labels: Tensor | None) -> Mapping[str, Tensor]:
    """What training on the images would do to the parameters that `update` names, differentiable in the images."""
    start = {name: value.detach() for name, value in model.named_parameters()}
    now = {name: start[name].clone().requires_grad_(True) for name in update.delta}
    moments = {name: torch.zeros_like(value) for name, value in now.items()}
    for _ in range(update.steps):
        out = functional_call(model, {**start, **now}, (images,))
        if update.at_cut is not None:
            loss = (out.reshape(update.at_cut.shape) * update.at_cut).sum()
        else:
            assert labels is not None
            loss = functional.cross_entropy(out, labels)
        gradients = torch.autograd.grad(loss, list(now.values()), create_graph=True)
        for (name, value), gradient in zip(list(now.items()), gradients, strict=True):
            moments[name] = update.momentum * moments[name] + gradient + update.weight_decay * value
            now[name] = value - update.rate * moments[name]
    return {name: value - start[name] for name, value in now.items()}


def find_images(known: Known, update: Update, effort: Effort, search: Search) -> Tensor:
    """Images (update.count, 3, h, w) in [0, 1]; of several starts the one whose change fits best."""
    count, model, mean = update.count, known.trained, known.learn.images.mean(dim=0, keepdim=True)
    if model is None:
        raise ValueError("inverting an update needs the model that was trained")
    wanted = torch.cat([value.flatten() for value in update.delta.values()])
    labels = update.labels
    if labels is None and update.at_cut is None:
        with torch.no_grad():
            labels = infer_labels(update, model(known.learn.images[:PUBLIC_LOGITS]))
    generator = torch.Generator(mean.device).manual_seed(effort.seed)
    best, best_loss = mean.expand(count, -1, -1, -1), math.inf
    steps = search.steps if effort.steps is None else effort.steps
    for _ in range(search.starts):
        noise = torch.rand((count, *mean.shape[1:]), generator=generator, device=mean.device) - 0.5
        images = (mean + 0.2 * noise).clamp(0, 1).requires_grad_(True)
        optimiser = torch.optim.Adam([images], lr=search.rate)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = search.rate * 0.5 * (1.0 + math.cos(math.pi * step / steps))
            found = torch.cat([value.flatten() for value in changes(model, update, images, labels).values()])
            misfit = 1.0 - functional.cosine_similarity(found, wanted, dim=0)
            loss = misfit + search.smooth * roughness(images).mean()
            (images.grad,) = torch.autograd.grad(loss, images)
            optimiser.step()
            with torch.no_grad():
                images.clamp_(0, 1)
            effort.on_steps(1)
        if misfit.item() < best_loss:
            best, best_loss = images.detach(), misfit.item()
    return best
