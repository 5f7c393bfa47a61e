from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.augment import augment, draw
from contract.training import AugmentRule

MEAN = (0.485, 0.456, 0.406)
FILL = np.array([124, 116, 104])
RULES = st.builds(AugmentRule, st.integers(0, 9), st.booleans(), st.floats(0, 0.9))
IDS = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=6, unique=True)
NUMBERS = st.integers(0, 2**40)


def pictures_of(ids: list[bytes], height: int = 7, width: int = 5) -> np.ndarray:
    rng = np.random.default_rng(len(ids))
    return rng.integers(0, 256, (len(ids), height, width, 3), dtype=np.uint8)


@given(RULES, IDS, NUMBERS, NUMBERS, st.randoms())
def test_a_picture_is_varied_alike_in_every_batch_and_order(
    rule: AugmentRule, ids: list[bytes], seed: int, epoch: int, random: np.random.Generator
) -> None:
    pictures = pictures_of(ids)
    whole = augment(pictures, rule, MEAN, seed, epoch, ids)
    assert whole.shape == pictures.shape and whole.dtype == np.uint8
    order = list(range(len(ids)))
    random.shuffle(order)
    turned = augment(pictures[order], rule, MEAN, seed, epoch, [ids[place] for place in order])
    assert (turned == whole[order]).all()
    alone = augment(pictures[:1], rule, MEAN, seed, epoch, ids[:1])
    assert (alone[0] == whole[0]).all()


@given(IDS, NUMBERS, NUMBERS)
def test_the_rule_that_does_nothing_does_nothing(ids: list[bytes], seed: int, epoch: int) -> None:
    pictures = pictures_of(ids)
    same = augment(pictures, AugmentRule(), MEAN, seed, epoch, ids)
    assert (same == pictures).all() and not np.shares_memory(same, pictures)


@given(RULES, IDS, NUMBERS, NUMBERS)
def test_draws_stay_in_their_ranges(rule: AugmentRule, ids: list[bytes], seed: int, epoch: int) -> None:
    for sample_id in ids:
        drawn = draw(rule, seed, epoch, sample_id)
        assert max(abs(drawn.down), abs(drawn.right)) <= rule.crop_padding
        assert abs(drawn.brightness - 1.0) <= rule.brightness + np.finfo(float).eps  # the step of floats at 1
        assert rule.flip or not drawn.mirrored


@given(st.integers(1, 12), IDS, NUMBERS, NUMBERS)
def test_a_crop_shows_shifted_content_and_the_mean_around_it(
    padding: int, ids: list[bytes], seed: int, epoch: int
) -> None:
    rule, pictures = AugmentRule(padding), pictures_of(ids)
    varied = augment(pictures, rule, MEAN, seed, epoch, ids)
    for picture, out, sample_id in zip(pictures, varied, ids, strict=True):
        drawn = draw(rule, seed, epoch, sample_id)
        padded = np.broadcast_to(FILL, (7 + 2 * padding, 5 + 2 * padding, 3)).copy()
        padded[padding : padding + 7, padding : padding + 5] = picture
        top, left = padding - drawn.down, padding - drawn.right
        assert (out == padded[top : top + 7, left : left + 5]).all()


@given(IDS, NUMBERS, NUMBERS)
def test_a_flip_mirrors_left_and_right(ids: list[bytes], seed: int, epoch: int) -> None:
    rule, pictures = AugmentRule(flip=True), pictures_of(ids)
    varied = augment(pictures, rule, MEAN, seed, epoch, ids)
    for picture, out, sample_id in zip(pictures, varied, ids, strict=True):
        assert (out == (picture[:, ::-1] if draw(rule, seed, epoch, sample_id).mirrored else picture)).all()


@given(st.floats(0.01, 0.9), IDS, NUMBERS, NUMBERS)
def test_brightness_scales_and_saturates(strength: float, ids: list[bytes], seed: int, epoch: int) -> None:
    rule, pictures = AugmentRule(brightness=strength), pictures_of(ids)
    varied = augment(pictures, rule, MEAN, seed, epoch, ids)
    for picture, out, sample_id in zip(pictures, varied, ids, strict=True):
        exact = np.minimum(picture * draw(rule, seed, epoch, sample_id).brightness, 255.0)
        assert np.abs(out - exact).max() <= 0.5 + 1e-9


def test_epochs_seeds_and_samples_differ_and_all_places_come_up() -> None:
    rule = AugmentRule(2, True, 0.5)
    drawn = [draw(rule, 0, epoch, b"sample") for epoch in range(400)]
    assert {each.down for each in drawn} == {each.right for each in drawn} == {-2, -1, 0, 1, 2}
    assert 140 < sum(each.mirrored for each in drawn) < 260
    assert 0.95 < np.mean([each.brightness for each in drawn]) < 1.05
    assert draw(rule, 0, 0, b"a") != draw(rule, 0, 0, b"b") != draw(rule, 1, 0, b"b")


def test_parts_of_the_rule_do_not_disturb_each_other() -> None:
    whole = draw(AugmentRule(2, True, 0.5), 3, 4, b"sample")
    assert draw(AugmentRule(2), 3, 4, b"sample").down == whole.down
    assert draw(AugmentRule(0, True), 3, 4, b"sample").mirrored == whole.mirrored
    assert draw(AugmentRule(0, False, 0.5), 3, 4, b"sample").brightness == whole.brightness
