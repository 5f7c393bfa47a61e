"""What the threat model says of attacks, each sentence as an attack that is run on a small setting."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.keyed_noise import wire_id
from server_runtime import attacks
from server_runtime.attacks import Effort, Known, Seen, Upload
from server_runtime.attacks.epoch_difference import EpochDifference
from server_runtime.attacks.inverse_net import InverseNet, Size
from server_runtime.attacks.label_inference import from_loss, groups
from server_runtime.attacks.mask_union import MaskUnion
from server_runtime.attacks.membership import by_features
from server_runtime.attacks.ridge import image_psnr_db
from server_runtime.attacks.two_scales import TwoScales

from .small_world import LAYOUT, Whole, World, masked, masks, pictures, seen_once, update_of, with_epochs, world


def psnr_db(name: str, known: Known, seen: Seen, truth: Tensor, effort: Effort | None = None) -> float:
    attack = attacks.find(name).build(effort or Effort())
    attack.fit(known)
    return float(image_psnr_db(truth, attack.reconstruct(seen)).mean())


# Pictures


def test_a_shallow_cut_without_noise_shows_the_pictures() -> None:
    """At least 18 dB for ridge, and no less for the trained decoder and for UnSplit with known weights."""
    small = world(kappa=0.0)
    seen = seen_once(small)
    ridge = psnr_db("ridge", small.known, seen, small.private)
    net = InverseNet(Effort(steps=40), Size(batch=32, width=48, blocks=1, heads=2, checks=4))
    net.fit(small.known)
    trained = float(image_psnr_db(small.private, net.reconstruct(seen)).mean())
    white_box = psnr_db("unsplit_white_box", small.known, seen, small.private, Effort(steps=100))
    assert ridge >= 18.0
    assert trained >= ridge - 0.05 and white_box >= ridge - 0.05
    assert max(net.checks_db) >= net.checks_db[0] == pytest.approx(net.held_ridge_db, abs=1e-6)


def test_a_decoder_that_learns_nothing_leaves_the_ridge() -> None:
    """A learning rate that destroys the network: of all its states the untrained one, which is the ridge, is kept."""
    small = world(kappa=0.5)
    seen = seen_once(small)
    net = InverseNet(Effort(steps=12), Size(batch=16, width=32, blocks=1, heads=2, rate=30.0, checks=4))
    net.fit(small.known)
    ridge = attacks.find("ridge").build(Effort())
    ridge.fit(small.known)
    assert net.checks_db[-1] < net.checks_db[0]
    assert torch.allclose(net.reconstruct(seen), ridge.reconstruct(seen), atol=1e-5)


def test_noise_makes_every_decoder_worse() -> None:
    found = [psnr_db("ridge", (small := world(kappa=k)).known, seen_once(small), small.private) for k in (0, 0.5, 2.0)]
    assert found[0] > found[1] + 1.0 > found[2] + 2.0


# Many uploads of one image


def copies_db(small: World, uploads: Sequence[Upload]) -> float:
    return psnr_db("averaging", small.known, Seen(uploads=tuple(uploads)), small.private)


def test_averaging_gains_nothing_from_keyed_noise_and_much_from_fresh_noise() -> None:
    small = world(kappa=1.5)
    keyed = [small.keyed(small.tokens(), 1.5) for _ in range(20)]
    fresh = [small.keyed(small.tokens(), 1.5, fresh=number) for number in range(20)]
    one = copies_db(small, keyed[:1])
    assert abs(copies_db(small, keyed) - one) < 0.2
    assert copies_db(small, fresh) > copies_db(small, fresh[:1]) + 3.0


def test_a_second_strength_gains_no_more_than_a_second_draw() -> None:
    """With the strength in the key. Of one draw at two strengths the clean tokens would follow by subtraction."""
    small = world(kappa=1.0)
    seen = Seen(uploads=tuple(small.keyed(small.tokens(), kappa) for kappa in (1.0, 0.5)))
    alone = psnr_db("ridge", replace(small.known, release=small.release(0.5)), seen, small.private)
    noise = small.release(1.0).draw(len(small.private), torch.Generator().manual_seed(7))
    same = tuple(
        Upload(small.release(kappa).send(small.tokens(), torch.Generator(), noise), kappa) for kappa in (1.0, 0.5)
    )
    attack = TwoScales(Effort())
    attack.fit(small.known)
    keyed = float(image_psnr_db(small.private, attack.reconstruct(seen)).mean())
    assert not attack.one_draw
    broken = float(image_psnr_db(small.private, attack.reconstruct(Seen(uploads=same))).mean())
    assert attack.one_draw
    assert keyed < alone + 1.5 and broken > keyed + 2.0


def test_no_key_protects_activations_of_a_part_that_trains() -> None:
    """With weights known in every epoch: noise that stays cancels once training has moved the part, noise that is drawn
    anew averages from the start. The attack tells them apart, and gains on one upload in both."""
    small = world(kappa=1.5)
    alone = psnr_db("ridge", small.known, seen_once(small), small.private)
    found = {}
    for step in (0.001, 0.1):
        known, parts = with_epochs(small, 4, step)
        uploads = {
            "stays": tuple(small.keyed(small.tokens(part), 1.5) for part in parts),
            "anew": tuple(small.keyed(small.tokens(part), 1.5, epoch=number) for number, part in enumerate(parts)),
        }
        for name, sent in uploads.items():
            attack = EpochDifference(Effort())
            attack.fit(known)
            found[name, step] = float(image_psnr_db(small.private, attack.reconstruct(Seen(uploads=sent))).mean())
            assert attack.persistent == (name == "stays")
    assert found["anew", 0.001] > found["stays", 0.001] + 1.0 > alone
    assert found["stays", 0.1] > found["anew", 0.1] + 5.0 > alone + 5.0


def test_keyed_masks_show_a_quarter_for_ever_and_fresh_masks_show_everything() -> None:
    small = world(kappa=0.0)
    count, coverage, found = len(small.private), {}, {}
    for name, secrets in (("keyed", ["same"] * 20), ("fresh", [str(number) for number in range(20)])):
        known, seen = masked(small, [masks(count, 4, secret) for secret in secrets])
        attack = MaskUnion(Effort())
        attack.fit(known)
        found[name] = float(image_psnr_db(small.private, attack.reconstruct(seen)).mean())
        coverage[name] = attack.coverage
    assert coverage["keyed"] == 4 / LAYOUT.patches
    assert coverage["fresh"] > 0.98
    assert found["fresh"] > found["keyed"] + 4.0


# Labels


def test_logit_gradients_and_losses_give_every_label() -> None:
    """All of 2000 labels of 100 classes, from the gradients, and from each sample's loss as float32."""
    rng = torch.Generator().manual_seed(1)
    logits = (4.0 * torch.randn((2000, 100), generator=rng)).requires_grad_(True)
    labels = torch.randint(100, (2000,), generator=rng)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses.mean().backward()
    assert logits.grad is not None
    attack = attacks.find("label_inference").build(Effort())
    assert (attack.reconstruct(Seen(logit_gradients=logits.grad)) == labels).all()
    assert (from_loss(logits.detach(), losses.detach()) == labels).all()


def test_permuted_labels_hide_the_class_and_not_the_grouping() -> None:
    """The gradient gives the number that was sent: one for all of a class's images, as a name no better than chance."""
    rng = torch.Generator().manual_seed(2)
    labels = torch.randint(50, (3000,), generator=rng)
    sent = torch.randperm(50, generator=rng)[labels]
    logits = torch.randn((3000, 50), generator=rng).requires_grad_(True)
    torch.nn.functional.cross_entropy(logits, sent).backward()
    found = attacks.find("label_inference").build(Effort()).reconstruct(Seen(logit_gradients=logits.grad))
    assert len(torch.unique(torch.stack([labels, found]), dim=1).T) == 50
    assert float((found == labels).double().mean()) < 0.15


def test_a_head_on_the_device_still_shows_which_images_belong_together() -> None:
    rng = torch.Generator().manual_seed(3)
    head = torch.nn.utils.skip_init(torch.nn.Linear, 32, 6)
    torch.nn.init.normal_(head.weight, generator=rng)
    torch.nn.init.zeros_(head.bias)
    labels = torch.randint(6, (300,), generator=rng)
    features = torch.randn((300, 32), generator=rng).mul_(0.3).requires_grad_(True)
    torch.nn.functional.cross_entropy(head(features), labels).backward()
    assert features.grad is not None
    found = groups(features.grad, 6)
    table = torch.zeros(6, 6).index_put_((found, labels), torch.ones(300), accumulate=True)
    assert float(table.max(dim=1).values.sum()) / 300 > 0.9


def test_an_update_of_one_image_gives_its_label_and_its_picture() -> None:
    model, private = Whole(), pictures(1, 5)
    known = replace(world().known, trained=model)
    update = update_of(model, private, torch.tensor([3]), 0.1, 1, 0.0)
    grey = float(image_psnr_db(private, torch.full_like(private, 0.5)).mean())
    assert psnr_db("gradient_inversion", known, Seen(update=update), private, Effort(steps=150)) > grey + 3.0


# Membership


def test_ids_say_nothing_without_the_key_and_features_tell_members_even_under_noise() -> None:
    small = world(kappa=1.0)
    members, others = small.private, pictures(len(small.private), 9)
    digests = [hashlib.sha256(image.numpy().tobytes()).digest() for image in torch.cat([members, others])]
    ids = tuple(wire_id(b"secret", digest) for digest in digests[: len(members)])
    seen = Seen(ids=ids, suspects=tuple(digests), guessed_keys=tuple(bytes([k]) for k in range(256)))
    assert not attacks.find("membership").build(Effort()).reconstruct(seen).any()
    upload = small.keyed(small.tokens(), 1.0)
    away = [by_features(small.known.release, upload.received, small.tokens(images=each)) for each in (members, others)]
    assert float(away[0].max()) < float(away[1].min())
    assert float(away[0].mean()) == pytest.approx(1.0, abs=0.1)


# The sentences


def test_the_threat_model_names_tests_that_exist() -> None:
    root = Path(__file__).parents[3]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "threat_model.md").read_text()))
    there = {
        name for path in (root / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named and named <= there
