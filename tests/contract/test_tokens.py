"""Tokens: noise and wire quantization, retrieval against brute force, and the rebuild of augmentations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import tokens as module
from contract.errors import DataError, EngineError
from contract.tokens import (
    KEPT,
    Statistics,
    TokenLayout,
    add_noise,
    augment,
    augmentation_positions,
    dequantize,
    keep_tokens,
    kept_patches,
    noise_scales,
    quantize,
    retrieval_sources,
    sent_layout,
    sent_places,
    token_origins,
    wire_steps,
)

STATISTICS = Statistics(
    sigma_prefix=(1.0, 2.0, 0.0),
    sigma_patch=(0.5, 0.25, 0.0),
    absmax_prefix=(6.0, 9.0, 0.0),
    absmax_patch=(3.0, 2.0, 0.0),
)
TINY = float(np.finfo(np.float32).tiny)


def test_a_layout_counts_its_tokens() -> None:
    layout = TokenLayout(prefix=5, grid=(14, 16), dim=384)
    assert (layout.patches, layout.count) == (224, 229)


def test_kept_patches_are_a_checkerboard_or_every_second_of_every_second_row() -> None:
    grid = (3, 4)
    assert kept_patches(grid, "all").tolist() == list(range(12))
    assert kept_patches(grid, "checkerboard").tolist() == [0, 2, 5, 7, 8, 10]
    assert kept_patches(grid, "quarter").tolist() == [0, 2, 8, 10]
    assert kept_patches(grid, "none").tolist() == []


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_sent_is_the_prefix_and_the_kept_patches(kept: Any) -> None:
    layout = TokenLayout(prefix=2, grid=(3, 4), dim=5)
    tokens = np.arange(2 * 14 * 5, dtype=np.float32).reshape(2, 14, 5)
    sent = keep_tokens(tokens, layout, kept)
    there = sent_layout(layout, kept)
    assert sent.shape == (2, there.count, there.dim) and there.prefix == 2
    assert np.array_equal(sent[:, :2], tokens[:, :2])
    assert np.array_equal(sent[:, 2:], tokens[:, 2:][:, kept_patches(layout.grid, kept)])
    assert np.array_equal(sent, tokens[:, sent_places(layout, kept)])


def test_prefix_tokens_can_get_a_share_of_the_noise() -> None:
    whole, half = noise_scales(STATISTICS, 0.5), noise_scales(STATISTICS, 0.5, 0.5)
    assert np.array_equal(half[0], whole[0] / 2) and np.array_equal(half[1], whole[1])
    steps = wire_steps(STATISTICS, 0.5, 0.5)
    assert steps[0, 0] == np.float32((6 + 2) / 127) and np.array_equal(steps[1], wire_steps(STATISTICS, 0.5)[1])


def test_retrieval_of_some_positions_is_those_columns_of_all() -> None:
    features = np.random.default_rng(9).normal(size=(6, 5, 3)).astype(np.float16)
    chosen = np.array([1, 4])
    assert np.array_equal(retrieval_sources(features, None, chosen), retrieval_sources(features)[:, chosen])


def test_noise_scales_are_kappa_sigma() -> None:
    scales = noise_scales(STATISTICS, 0.5)
    assert scales.dtype == np.float32 and scales.tolist() == [[0.5, 1.0, 0.0], [0.25, 0.125, 0.0]]
    assert not noise_scales(STATISTICS, 0.0).any()


def test_wire_steps_leave_room_for_the_noise() -> None:
    steps = wire_steps(STATISTICS, 0.5)
    assert steps.dtype == np.float32
    expected = [[(6 + 4) / 127, (9 + 8) / 127, TINY], [(3 + 2) / 127, (2 + 1) / 127, TINY]]
    assert np.array_equal(steps, np.array(expected, np.float32))


finite = st.floats(0, 1e30)


@given(st.lists(st.tuples(finite, finite, finite, finite), min_size=1, max_size=5), st.floats(0, 100))
def test_wire_steps_are_positive(channels: list[tuple[float, float, float, float]], kappa: float) -> None:
    statistics = Statistics(*zip(*channels, strict=True))
    steps = wire_steps(statistics, kappa)
    assert steps.shape == (2, len(channels)) and (steps >= TINY).all() and np.isfinite(steps).all()


def test_noise_uses_the_scales_of_its_token() -> None:
    tokens = np.arange(12, dtype=np.float32).reshape(4, 3)
    scales = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
    noisy = add_noise(tokens, np.ones((4, 3), np.float32), scales, prefix=1)
    assert noisy.dtype == np.float32
    assert (noisy - tokens).tolist() == [[1, 2, 3]] + [[10, 20, 30]] * 3
    assert np.array_equal(add_noise(tokens, np.zeros((4, 3), np.float32), scales, prefix=1), tokens)
    batch = add_noise(np.stack([tokens, tokens]), np.ones((2, 4, 3), np.float32), scales, prefix=1)
    assert np.array_equal(batch, [noisy, noisy])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), prefix=st.integers(0, 3), patches=st.integers(0, 6))
def test_codes_are_the_nearest_ones_and_come_back(seed: int, prefix: int, patches: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.normal(0, 1, (2, prefix + patches, 4)).astype(np.float32)
    steps = rng.uniform(0.01, 0.1, (2, 4)).astype(np.float32)
    codes, saturated = quantize(tokens, steps, prefix)
    per_token = np.repeat(steps, [prefix, patches], axis=0)
    inside = np.abs(tokens) <= 127 * per_token
    restored = dequantize(codes, steps, prefix)
    assert codes.dtype == np.int8 and restored.dtype == np.float32 and restored.shape == tokens.shape
    assert (np.abs(restored - tokens) <= per_token * 0.50001)[inside].all()
    assert (np.abs(codes[~inside]) == 127).all()
    exact = np.abs(np.rint(tokens / per_token)) > 127
    assert saturated == np.count_nonzero(exact)
    assert np.array_equal(quantize(restored, steps, prefix)[0], codes)


def test_rounding_is_to_even_and_saturation_is_counted() -> None:
    tokens = np.array([[[0.5, 1.5, -2.5, 127.4, 127.6, -400.0]]], np.float32)
    codes, saturated = quantize(tokens, np.ones((2, 6), np.float32), prefix=0)
    assert codes.tolist() == [[[0, 2, -2, 127, 127, -127]]] and saturated == 2


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_is_an_engine_error(value: float, prefix: int) -> None:
    tokens = np.zeros((1, 2, 3), np.float32)
    tokens[0, 1, 2] = value
    with pytest.raises(EngineError, match="found 1 values that are not"):
        quantize(tokens, np.ones((2, 3), np.float32), prefix)
    with pytest.raises(EngineError, match="must be finite"):
        retrieval_sources(np.concatenate([tokens, tokens]))


def test_a_channel_that_was_always_zero_saturates_without_a_warning() -> None:
    codes, saturated = quantize(np.full((1, 1, 1), 100.0, np.float32), np.full((2, 1), TINY, np.float32), 0)
    assert codes.tolist() == [[[127]]] and saturated == 1


def brute_force(features: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    count, positions, _ = features.shape
    sources = np.zeros((count, positions), np.int64)
    wide = features.astype(np.float64)
    for position in range(positions):
        for i in range(count):
            cosines = []
            for j in range(count):
                one, other = wide[i, position], wide[j, position]
                length = np.linalg.norm(one) * np.linalg.norm(other)
                cosines.append(-2.0 if i == j else float(one @ other / length) if length else 0.0)
            sources[i, position] = next(j for j, cosine in enumerate(cosines) if cosine >= max(cosines) - 1e-6)
    return sources


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(2, 9),
    positions=st.integers(1, 4),
    dim=st.integers(1, 6),
    kind=st.sampled_from([np.float16, np.float32]),
    block=st.sampled_from([1, 100, 1 << 24]),
)
def test_sources_are_those_of_brute_force(
    seed: int, count: int, positions: int, dim: int, kind: type, block: int
) -> None:
    rng = np.random.default_rng(seed)
    features: Any = rng.integers(-3, 4, (count, positions, dim)).astype(kind)  # small integers: many ties, zeros, twins
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SIMILARITY_BLOCK_BYTES", block)
        sources = retrieval_sources(features)
    assert sources.dtype == np.uint16 and np.array_equal(sources, brute_force(features))
    assert (sources != np.arange(count)[:, np.newaxis]).all()


def test_ties_go_to_the_lowest_index_in_wide_tokens_too() -> None:
    token = np.random.default_rng(0).normal(size=1024)
    features: Any = np.stack([token * factor for factor in np.linspace(0.1, 9.0, 77)]).astype(np.float32)[:, np.newaxis]
    assert retrieval_sources(features)[:, 0].tolist() == [1] + [0] * 76


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_very_small_and_very_large_tokens_have_cosines_too(factor: float) -> None:
    features = np.random.default_rng(0).normal(size=(6, 2, 8))
    assert np.array_equal(retrieval_sources((features * factor).astype(np.float32)), brute_force(features))


def test_a_single_image_is_its_own_source() -> None:
    assert retrieval_sources(np.ones((1, 4, 3), np.float32)).tolist() == [[0, 0, 0, 0]]
    assert retrieval_sources(np.ones((0, 4, 3), np.float32)).shape == (0, 4)


def test_features_may_be_a_memory_map_and_progress_is_told(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(7, 5, 8)).astype(np.float16)
    np.save(tmp_path / "features.npy", features)
    steps: list[int] = []
    sources = retrieval_sources(np.load(tmp_path / "features.npy", mmap_mode="r"), steps.append)
    assert np.array_equal(sources, brute_force(features)) and steps == [1] * 5


def test_more_images_than_two_bytes_count_are_refused() -> None:
    with pytest.raises(DataError, match="at most 65535 images, found 65536"):
        retrieval_sources(np.zeros((65536, 1, 1), np.float16))


def test_golden_positions() -> None:
    assert augmentation_positions(7, b"i" * 16, 3, 196, 8).tolist() == [13, 20, 84, 100, 104, 161, 169, 190]


@given(
    seed=st.integers(-(2**70), 2**70),
    sample=st.binary(min_size=16, max_size=16),
    run=st.integers(0, 1000),
    patches=st.integers(0, 300),
    data=st.data(),
)
def test_positions_are_distinct_sorted_patches(seed: int, sample: bytes, run: int, patches: int, data: Any) -> None:
    replaced = data.draw(st.integers(0, patches))
    positions = augmentation_positions(seed, sample, run, patches, replaced)
    assert positions.dtype == np.int64 and positions.shape == (replaced,)
    assert (np.diff(positions) > 0).all() and ((positions >= 0) & (positions < patches)).all()


def test_positions_are_even_and_differ_by_seed_sample_and_run() -> None:
    counts = np.zeros(20)
    drawn = set()
    for seed in (1, 11):
        for run in (1, 11):
            for sample in range(100):
                positions = augmentation_positions(seed, sample.to_bytes(16, "big"), run, 20, 5)
                counts[positions] += 1
                drawn.add(tuple(positions))
    assert ((counts - 100) ** 2 / 75).sum() < 50  # 19 degrees of freedom
    assert len(drawn) > 380  # of 15504


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(2, 6),
    prefix=st.integers(0, 2),
    patches=st.integers(1, 9),
    data=st.data(),
)
def test_the_rebuild_equals_the_device_and_replaces_what_it_should(
    seed: int, count: int, prefix: int, patches: int, data: Any
) -> None:
    replaced = data.draw(st.integers(0, patches))
    rng = np.random.default_rng(seed)
    dim = 16  # no two tokens are equal by chance
    codes = rng.integers(-127, 128, (count, prefix + patches, dim)).astype(np.int8)
    clean = rng.normal(size=(count, patches, dim)).astype(np.float32)
    sources = retrieval_sources(clean)
    rows = rng.integers(0, count, 5)
    ids = [bytes([row]) * 16 for row in range(count)]
    positions = np.stack([augmentation_positions(3, ids[row], run, patches, replaced) for run, row in enumerate(rows)])
    before = codes.copy()
    rebuilt = augment(codes, sources, rows, positions, prefix)
    assert np.array_equal(codes, before) and rebuilt.dtype == np.int8

    materialised = codes[rows].copy()  # the device's way, one token after another
    for copy, row in enumerate(rows):
        for position in positions[copy]:
            materialised[copy, prefix + position] = codes[sources[row, position], prefix + position]
    assert rebuilt.tobytes() == materialised.tobytes()

    different = (rebuilt != codes[rows]).any(axis=2)
    assert not different[:, :prefix].any()
    for copy, row in enumerate(rows):
        assert np.flatnonzero(different[copy, prefix:]).tolist() == positions[copy].tolist()
        for position in positions[copy]:
            twins = (codes[:, prefix + position] == rebuilt[copy, prefix + position]).all(axis=1)
            assert twins.any() and not twins[row]


def test_each_token_of_a_copy_names_the_sample_it_comes_from() -> None:
    sources = np.array([[1, 2, 1], [2, 0, 0], [0, 1, 65535]], np.uint16)
    origins = token_origins(sources, np.array([2, 0]), np.array([[0, 2], [1, 2]]), prefix=2)
    assert origins.dtype == np.int64
    assert origins.tolist() == [[2, 2, 0, 2, 65535], [0, 0, 0, 2, 1]]


def test_augmenting_a_single_image_changes_nothing() -> None:
    codes = np.arange(15).astype(np.int8).reshape(1, 5, 3)
    copies = augment(codes, np.zeros((1, 4), np.uint16), np.zeros(2, np.int64), np.array([[0, 3], [1, 2]]), 1)
    assert np.array_equal(copies, [codes[0], codes[0]])


def test_noise_before_quantization_is_repeated_by_every_copy() -> None:
    """Averaging all copies of a token gains nothing: they are one draw (persistent noise)."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (4, 9, 8)).astype(np.int8)
    sources = retrieval_sources(rng.normal(size=(4, 9, 8)).astype(np.float32))
    rows = np.zeros(50, np.int64)
    positions = np.stack([augmentation_positions(0, b"x" * 16, run, 9, 3) for run in range(50)])
    copies = augment(codes, sources, rows, positions, 0)
    for position in range(9):
        seen = {token.tobytes() for token in copies[:, position]}
        assert seen <= {codes[0, position].tobytes(), codes[sources[0, position], position].tobytes()}
