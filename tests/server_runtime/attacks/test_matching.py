"""Repeating a device's training, labels off a bias, and a part's update under the gradient that the server sent."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from server_runtime.attacks import Effort, Known, Pairs, Seen, Update
from server_runtime.attacks._matching import changes, infer_labels
from server_runtime.attacks.gradient_inversion import build as gradient_inversion
from server_runtime.attacks.ridge import image_psnr_db
from server_runtime.attacks.weight_delta import build as weight_delta

from .small_world import Part, Whole, pictures, update_of, world


@pytest.mark.parametrize(("steps", "momentum", "decay"), [(1, 0.0, 0.0), (3, 0.9, 0.0), (4, 0.9, 0.05)])
def test_repeated_training_is_torchs_own(steps: int, momentum: float, decay: float) -> None:
    model, images, labels = Whole(), pictures(5, 1), torch.tensor([0, 1, 2, 3, 1])
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(local(images), labels).backward()
        optimiser.step()
    update = Update(dict(local.named_parameters()), 5, 0.1, steps, momentum, decay)
    before = dict(model.named_parameters())
    for name, value in changes(model, update, images, labels).items():
        assert torch.allclose(before[name] + value, update.delta[name], atol=1e-6)


def test_labels_are_read_off_the_bias_with_their_counts() -> None:
    model, images = Whole(), pictures(6, 2)
    labels = torch.tensor([3, 1, 3, 3, 0, 1])
    update = update_of(model, images, labels, 0.1, 1, 0.0)
    with torch.no_grad():
        logits = model(pictures(50, 3))
    assert sorted(infer_labels(update, logits).tolist()) == sorted(labels.tolist())
    several = update_of(model, images[:1], labels[:1], 0.01, 5, 0.9)
    assert infer_labels(several, logits).tolist() == [3]


def test_an_update_without_a_bias_has_no_labels_to_read() -> None:
    with pytest.raises(ValueError, match="no classifier's bias"):
        infer_labels(Update({"head.weight": torch.zeros(4, 7)}, 1, 0.1), torch.zeros(1, 4))


def test_several_local_steps_are_read_better_when_they_are_repeated() -> None:
    """Five steps with momentum on two images: one gradient no longer explains how the weights moved."""
    model, private, labels = Whole(), pictures(2, 5), torch.tensor([1, 2])
    known = replace(world().known, trained=model)
    update = replace(update_of(model, private, labels, 0.5, 5, 0.9), labels=labels)
    found = {}
    for name, build in (("delta", weight_delta), ("gradient", gradient_inversion)):
        attack = build(Effort(steps=60))
        attack.fit(known)
        found[name] = float(image_psnr_db(private, attack.reconstruct(Seen(update=update))).mean())
    assert found["delta"] > found["gradient"] + 5.0


def test_a_parts_update_is_inverted_under_the_gradient_that_the_server_sent() -> None:
    part, private = Part(), pictures(1, 6)
    local = copy.deepcopy(part)
    at_cut = torch.randn(local(private).shape, generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.SGD(local.parameters(), lr=0.01)
    (local(private) * at_cut).sum().backward()
    optimiser.step()
    before = dict(part.named_parameters())
    delta = {name: (value - before[name]).detach() for name, value in local.named_parameters()}
    public = pictures(50, 1)
    known = Known(Pairs(public), Pairs(public), world().known.release, trained=part)
    attack = weight_delta(Effort(steps=150))
    attack.fit(known)
    found = attack.reconstruct(Seen(update=Update(delta, 1, 0.01, at_cut=at_cut)))
    grey = float(image_psnr_db(private, public.mean(dim=0, keepdim=True)).mean())
    assert float(image_psnr_db(private, found).mean()) > grey + 3.0
