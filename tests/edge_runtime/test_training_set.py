from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contract.augment import augment
from contract.epoch_order import epoch_order
from contract.errors import RemoteProtocolError
from contract.images import normalise
from contract.training import AugmentRule
from edge_runtime.head import softmax_gradient
from edge_runtime.picture_cache import PictureCache
from edge_runtime.training_set import Batch, TrainingSet
from tests.edge_runtime.fake_trainer import CLASSES, IMAGE, picture, plan, samples, training_set

PLAIN, VARIED = AugmentRule(), plan().augment


def bits(batch: Batch) -> tuple[bytes, bytes]:
    return batch.images.tobytes(), batch.labels.tobytes()


@pytest.mark.parametrize("rule", [PLAIN, VARIED])
@pytest.mark.parametrize(("seed", "epoch", "size"), [(0, 1, 4), (2**63 - 1, 50, 3), (7, 2, 100)])
def test_an_epoch_is_the_keyed_order_varied_as_keyed(rule: AugmentRule, seed: int, epoch: int, size: int) -> None:
    images, all_samples = training_set(11, rule), samples(11)
    found = [images.batch(seed, epoch, place, size) for place in range(images.batch_count(size))]
    ids = [sample.sample_id for sample in all_samples]
    order = [all_samples[place] for place in epoch_order(ids, seed, epoch)]
    assert np.concatenate([batch.labels for batch in found]).tolist() == [sample.label for sample in order]
    pictures = np.stack([picture(sample) for sample in order])
    varied = augment(pictures, rule, IMAGE.mean, seed, epoch, [sample.sample_id for sample in order])
    assert np.concatenate([batch.images for batch in found]).tobytes() == normalise(varied, IMAGE).tobytes()
    assert found[0].images.shape[1:] == (3, 4, 4) and found[0].images.dtype == np.float32


def test_a_batch_that_is_asked_for_again_is_the_same() -> None:
    images = training_set(11)
    first = bits(images.batch(7, 1, 1, 4))
    images.batch(7, 2, 0, 4)
    assert bits(images.batch(7, 1, 1, 4)) == first == bits(training_set(11).batch(7, 1, 1, 4))
    others = [images.batch(8, 1, 1, 4), images.batch(7, 2, 1, 4), images.batch(7, 1, 0, 4)]
    assert first not in [bits(other) for other in others]


def test_se_03_a_last_batch_of_one_goes_with_the_one_before() -> None:
    images = training_set(9)
    assert [len(images.batch(7, 1, place, 4).labels) for place in range(images.batch_count(4))] == [4, 5]
    assert training_set(1).batch_count(4) == 1 and len(training_set(1).batch(7, 1, 0, 4).labels) == 1


def test_images_without_a_class_do_not_count() -> None:
    some = [replace(sample, label=None) if number % 2 else sample for number, sample in enumerate(samples(9))]
    images = TrainingSet(some, CLASSES, IMAGE, PLAIN, PictureCache(picture), bytes(32))
    assert len(images) == 5 and len(images.batch(7, 1, 0, 100).labels) == 5


@pytest.mark.parametrize("place", [-1, 3, 2**62])
def test_a_batch_that_is_not_there_is_refused(place: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a batch from 0 to 2 of 11 images, found {place}"):
        training_set(11).batch(7, 1, place, 4)


def test_a_device_without_images_has_no_batch() -> None:
    images = training_set(0)
    assert (len(images), images.batch_count(4)) == (0, 0)
    with pytest.raises(RemoteProtocolError, match="of 0 images, found 0"):
        images.batch(7, 1, 0, 4)


@pytest.mark.parametrize("size", [0, -1])
def test_batches_of_no_size_are_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"batches of one image or more, found {size}"):
        training_set(11).batch(7, 1, 0, size)
    with pytest.raises(RemoteProtocolError, match="batches of one image or more"):
        training_set(11).batch_count(size)


def test_targets_are_one_hot() -> None:
    assert training_set(1).one_hot(np.array([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_logits_of_other_classes_are_refused() -> None:
    images, labels = training_set(2), np.array([2, 0])
    logits = np.array([[1, 2, 3], [0, 0, 1]], np.float32)
    assert images.loss_of_logits(logits, labels, "a-1").mean_loss == softmax_gradient(logits, labels).mean_loss
    with pytest.raises(RemoteProtocolError, match="ask a-1: expected logits of 3 classes, found 2"):
        images.loss_of_logits(logits[:, :2], labels, "a-1")
