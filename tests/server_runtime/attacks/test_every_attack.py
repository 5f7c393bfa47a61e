"""Every file of the registry, each on the smallest world where it must succeed; and the folder's door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from contract.errors import UsageError
from contract.keyed_noise import wire_id
from server_runtime import attacks
from server_runtime.attacks import Effort, Known, Seen
from server_runtime.attacks.inverse_net import InverseNet, Size
from server_runtime.attacks.ridge import image_psnr_db

from .small_world import Whole, masked, masks, pictures, seen_once, update_of, with_epochs, world

Case = tuple[Known, Seen, Tensor, Effort]  # what is known and seen, and the truth


def _one_upload() -> Case:
    small = world(kappa=0.25)
    return small.known, seen_once(small), small.private, Effort(steps=60)


def _white_box() -> Case:
    small = world(kappa=0.0)
    return small.known, seen_once(small), small.private, Effort(steps=150)


def _as_published() -> Case:
    """Weights that are nearly free: an attacker of a shallow part with random weights sees brightness at best."""
    small = world(kappa=0.0, codes=False, private=4)
    return small.known, seen_once(small), small.private, Effort(steps=400)


def _fresh_copies() -> Case:
    small = world()
    uploads = tuple(small.keyed(small.tokens(), 1.0, fresh=number) for number in range(6))
    return small.known, Seen(uploads=uploads), small.private, Effort()


def _two_strengths() -> Case:
    small = world()
    uploads = tuple(small.keyed(small.tokens(), kappa) for kappa in (1.0, 0.5))
    return small.known, Seen(uploads=uploads), small.private, Effort()


def _three_epochs() -> Case:
    small = world()
    known, parts = with_epochs(small, 3)
    uploads = tuple(small.keyed(small.tokens(part), 1.0) for part in parts)
    return known, Seen(uploads=uploads), small.private, Effort()


def _fresh_masks() -> Case:
    small = world(kappa=0.0)
    known, seen = masked(small, [masks(len(small.private), 4, f"upload {number}") for number in range(12)])
    return known, seen, small.private, Effort()


def _one_step() -> Case:
    model, private = Whole(), pictures(1, 5)
    known = replace(world().known, trained=model)
    update = update_of(model, private, torch.tensor([2]), 0.1, 1, 0.0)
    return known, Seen(update=update), private, Effort(steps=150)


def _three_steps() -> Case:
    model, private = Whole(), pictures(1, 5)
    known = replace(world().known, trained=model)
    update = update_of(model, private, torch.tensor([1]), 0.1, 3, 0.9)
    return known, Seen(update=update), private, Effort(steps=100)


def _logit_gradients() -> Case:
    rng = torch.Generator().manual_seed(0)
    logits = (8.0 * torch.randn((200, 100), generator=rng)).requires_grad_(True)
    labels = torch.randint(100, (200,), generator=rng)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert logits.grad is not None
    return world().known, Seen(logit_gradients=logits.grad), labels, Effort()


def _names() -> Case:
    digests = tuple(bytes([number]) * 32 for number in range(40))
    ids = tuple(wire_id(b"stolen", digest) for digest in digests[:20])
    seen = Seen(ids=ids, suspects=digests, guessed_keys=(b"other", b"stolen"))
    return world().known, seen, torch.arange(40) < 20, Effort()


CASES: dict[str, Callable[[], Case]] = {
    "averaging": _fresh_copies,
    "epoch_difference": _three_epochs,
    "gradient_inversion": _one_step,
    "inverse_net": _one_upload,
    "label_inference": _logit_gradients,
    "mask_union": _fresh_masks,
    "membership": _names,
    "ridge": _one_upload,
    "two_scales": _two_strengths,
    "unsplit": _as_published,
    "unsplit_white_box": _white_box,
    "weight_delta": _three_steps,
}
TINY = Size(batch=16, width=32, blocks=1, heads=2, checks=4)
NO_BETTER_THAN_GREY = ("unsplit",)  # a random part has countless images for the same tokens


def run(name: str, known: Known, seen: Seen, effort: Effort) -> Tensor:
    attack = InverseNet(effort, TINY) if name == "inverse_net" else attacks.find(name).build(effort)
    attack.fit(known)
    return attack.reconstruct(seen)


@pytest.mark.parametrize("name", attacks.names())
def test_every_attack_finds_what_it_says_that_it_finds(name: str) -> None:
    module = attacks.find(name)
    known, seen, truth, effort = CASES[name]()
    found = run(name, known, seen, effort)
    if module.FINDS != "images":
        assert (found == truth).all()
        return
    assert found.shape == truth.shape
    assert float(found.min()) >= 0.0 and float(found.max()) <= 1.0
    colour = known.learn.images.mean(dim=(0, 2, 3), keepdim=True).expand_as(truth)
    baseline = colour if name not in NO_BETTER_THAN_GREY else torch.zeros_like(truth)
    assert float(image_psnr_db(truth, found).mean()) > float(image_psnr_db(truth, baseline).mean()) + 1.0


def test_needs_name_what_known_and_seen_have() -> None:
    assert attacks.names() == tuple(sorted(CASES))
    words = {"upload", "uploads", "client", "trained", "update", "logit_gradients", "ids"}
    for name in attacks.names():
        module = attacks.find(name)
        assert words >= module.NEEDS and module.FINDS in ("images", "labels", "members")


def test_an_unknown_attack_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'ridge'"):
        attacks.find("rigde")


@pytest.mark.parametrize("name", ["inverse_net", "unsplit_white_box", "gradient_inversion"])
def test_the_same_seed_finds_the_same(name: str) -> None:
    found = []
    for _ in range(2):
        known, seen, _, effort = CASES[name]()
        found.append(run(name, known, seen, replace(effort, steps=8)))
    assert torch.equal(*found)


def test_progress_is_told_step_by_step() -> None:
    told: list[int] = []
    known, _, _, _ = _one_upload()
    InverseNet(Effort(steps=7, on_steps=told.append), TINY).fit(known)
    assert sum(told) == 7
