"""Order, batches and the rebuild of augmentations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import tokens
from contract.messages import Gradient
from server_runtime.aggregation import is_usable, weighted_mean
from server_runtime.epochs import Augmentation, epoch_batches, labels_of, pool, sample_ids_of, token_rows
from tests.server_runtime import tiny

RECIPE = Augmentation(seed=7, runs=4, patches=tiny.LAYOUT.patches, replaced=4, prefix=tiny.LAYOUT.prefix)


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(0, 20), min_size=1, max_size=3), batch=st.integers(1, 12), epoch=st.integers(1, 99))
def test_se_03_every_image_is_there_once_plain_and_once_augmented(counts: list[int], batch: int, epoch: int) -> None:
    uploads = pool([tiny.upload(f"d{i}", max(count, 1), seed=i) for i, count in enumerate(counts)])
    found = [
        (int(device), int(sample), bool(run))
        for rows in epoch_batches(uploads, RECIPE, epoch, batch)
        for device, sample, run in zip(rows.device, rows.sample, rows.run, strict=True)
    ]
    samples = [(device, sample) for device, upload in enumerate(uploads) for sample in range(len(upload.codes))]
    wanted = [(*sample, augmented) for sample in samples for augmented in (False, True)]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [(17, 8, [8, 9]), (16, 8, [8, 8]), (18, 8, [8, 8, 2]), (1, 8, [1]), (5, 8, [5]), (3, 1, [1, 2])],
)
def test_se_03_a_last_row_alone_joins_the_batch_before(count: int, batch: int, sizes: list[int]) -> None:
    plain = Augmentation(0, 0, 16, 4, 1)
    found = epoch_batches([tiny.upload("pi", count)], plain, 1, batch)
    assert [len(rows) for rows in found] == sizes


def test_epochs_differ_and_repeat() -> None:
    uploads = [tiny.upload("pi", 12)]
    first, again, second = (epoch_batches(uploads, RECIPE, epoch, 32)[0] for epoch in (1, 1, 2))
    assert first.sample.tolist() == again.sample.tolist()
    assert first.sample.tolist() != second.sample.tolist()
    assert set(first.run.tolist()) <= set(range(5))


def test_the_rebuild_equals_augmentation_on_the_device_bit_for_bit() -> None:
    """The device, which has its own codes only, makes the same rows that the server rebuilds from the recipe."""
    uploads = pool([tiny.upload("jetson", 7, seed=1), tiny.upload("pi", 9)])
    every_token = np.concatenate([upload.codes.reshape(-1, tiny.LAYOUT.dim) for upload in uploads])
    for rows in epoch_batches(uploads, RECIPE, 3, 32):
        rebuilt = every_token[token_rows(uploads, rows, RECIPE)]
        for place in range(len(rows)):
            upload, sample, run = uploads[rows.device[place]], rows.sample[place], int(rows.run[place])
            expected = upload.codes[sample].copy()
            if run:
                sample_id = upload.sample_ids[sample].tobytes()
                for p in tokens.augmentation_positions(RECIPE.seed, sample_id, run, RECIPE.patches, RECIPE.replaced):
                    expected[1 + p] = upload.codes[upload.sources[sample, p], 1 + p]
            assert rebuilt[place].tobytes() == expected.tobytes()


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30])
def test_codes_are_the_same_whether_they_fit_on_the_device_or_not(budget_bytes: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("timm")
    from server_runtime.backend import CodeTable

    uploads = [tiny.upload("jetson", 7, seed=1).codes, tiny.upload("pi", 9).codes, tiny.upload("tx2", 2, seed=2).codes]
    every_token = np.concatenate([codes.reshape(-1, tiny.LAYOUT.dim) for codes in uploads])
    where = np.random.default_rng(0).integers(0, len(every_token), (5, tiny.LAYOUT.count))
    where[0, :2] = 0, len(every_token) - 1
    found = CodeTable(uploads, torch.device("cpu"), budget_bytes).take(where)
    assert found.dtype == torch.int8
    assert found.numpy().tobytes() == every_token[where].tobytes()


def test_se_03_labels_and_ids_are_joined_by_sample() -> None:
    uploads = pool([tiny.upload("pi", 9), tiny.upload("jetson", 7, seed=1)])
    known = {i.tobytes(): label for u in uploads for i, label in zip(u.sample_ids, u.labels, strict=True)}
    for rows in epoch_batches(uploads, RECIPE, 1, 8):
        labels = labels_of(uploads, rows)
        for device in range(2):
            ids = sample_ids_of(uploads, rows, device)
            assert [known[i.tobytes()] for i in ids] == labels[rows.of(device)].tolist()


def test_uploads_without_sources_are_not_augmented() -> None:
    upload = tiny.upload("pi", 5)
    bare = type(upload)(upload.device, upload.sample_ids, upload.codes, None, upload.labels)
    rows = epoch_batches([bare], RECIPE, 1, 32)[0]
    assert rows.run.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [([], [], None), ([1.0, 2.0], [0, 0], None), ([1.0, 3.0], [0, 5], 3.0), ([1.0, 4.0], [1, 2], 3.0)],
)
def test_se_01_means_over_nothing_are_absent(values: list[float], weights: list[int], mean: float | None) -> None:
    assert weighted_mean(values, weights) == mean


def test_se_01_a_weight_of_nothing_does_not_let_nan_in() -> None:
    assert weighted_mean([float("nan"), 2.0], [0, 3]) == 2.0


@pytest.mark.parametrize(
    ("shape", "count", "usable"), [((4, 3), 4, True), ((3, 3), 3, False), ((4, 2), 4, False), ((4, 3), 5, False)]
)
def test_a_gradient_must_have_the_rows_that_were_asked_for(shape: tuple[int, int], count: int, usable: bool) -> None:
    reply = Gradient("a", 0.5, 1, count, np.zeros(shape, np.float32))
    assert is_usable(reply, 4, 3) is usable
