"""A device's own labelled images as training batches: which images, in which order, varied how, as the part takes them.

Everything is keyed by (seed, epoch, sample id): a batch that is asked for again is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.augment import augment
from contract.epoch_order import batch_edges, epoch_order
from contract.errors import RemoteProtocolError
from contract.images import ImageRule, normalise
from contract.keyed_noise import permutation
from contract.training import AugmentRule, TrainingCut
from edge_runtime.data import Sample
from edge_runtime.head import BatchLoss, Floats, Labels, softmax_gradient
from edge_runtime.picture_cache import PictureCache

START_ANEW = "start a new run on the server"


@dataclass(frozen=True)
class Batch:
    """Images (B, 3, h, w) float32 as the model takes them, their class numbers (B,), and who they are."""

    images: Floats
    labels: Labels
    sample_ids: tuple[bytes, ...]


class TrainingSet:
    """The labelled samples of one device."""

    def __init__(
        self,
        samples: Sequence[Sample],
        class_count: int,
        image: ImageRule,
        rule: AugmentRule,
        cache: PictureCache,
        secret: bytes,
    ) -> None:
        self._samples = [sample for sample in samples if sample.label is not None]
        self._class_count, self._image, self._rule, self._cache = class_count, image, rule, cache
        self._secret = secret
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def __len__(self) -> int:
        return len(self._samples)

    def batch_count(self, size: int) -> int:
        """Batches of an epoch. Raises: RemoteProtocolError for a size below one."""
        return len(self._edges(size))

    def batch(self, seed: int, epoch: int, place: int, size: int) -> Batch:
        """Batch number `place` of an epoch.

        Raises: RemoteProtocolError when the epoch has no such batch; DataError when a file changed.
        """
        edges = self._edges(size)
        if not 0 <= place < len(edges):
            raise RemoteProtocolError(
                f"expected a batch from 0 to {len(edges) - 1} of {len(self._samples)} images, found {place}",
                START_ANEW,
            )
        if self._order[0] != (seed, epoch):
            ids = [sample.sample_id for sample in self._samples]
            self._order = ((seed, epoch), epoch_order(ids, seed, epoch))
        first, last = edges[place]
        chosen = [self._samples[index] for index in self._order[1][first:last]]
        pictures = self._cache.pictures(chosen)  # (B, h, w, 3)
        ids = [sample.sample_id for sample in chosen]
        varied = augment(pictures, self._rule, self._image.mean, seed, epoch, ids)
        labels = np.array([sample.label for sample in chosen], np.int64)
        return Batch(normalise(varied, self._image), labels, tuple(ids))

    @property
    def labels(self) -> Labels:
        """Class numbers (n,), by place."""
        return np.array([sample.label for sample in self._samples], np.int64)

    @property
    def sample_ids(self) -> tuple[bytes, ...]:
        """Who they are, by place."""
        return tuple(sample.sample_id for sample in self._samples)

    def plain(self, places: Sequence[int]) -> Batch:
        """The images at these places as they are, not varied. Raises: DataError when a file changed."""
        chosen = [self._samples[place] for place in places]
        labels = np.array([sample.label for sample in chosen], np.int64)
        ids = tuple(sample.sample_id for sample in chosen)
        return Batch(normalise(self._cache.pictures(chosen), self._image), labels, ids)

    def drawn_patches(
        self, sample_ids: Sequence[bytes], cut: TrainingCut, seed: int, epoch: int
    ) -> NDArray[np.int64] | None:
        """Positions (B, kept) to train on, drawn anew for each epoch: for what stays on the device."""
        return self._draw(cut, [("drawn patches", seed, epoch, each) for each in sample_ids])

    def fresh_patches(
        self, sample_ids: Sequence[bytes], cut: TrainingCut, ask: str, turns: Sequence[int]
    ) -> NDArray[np.int64] | None:
        """Positions (B, kept) to send, drawn anew for each ask and turn (`noise = "fresh"`)."""
        pairs = zip(sample_ids, turns, strict=True)
        return self._draw(cut, [("fresh patches", ask, turn, each) for each, turn in pairs])

    def _draw(self, cut: TrainingCut, keys: Sequence[tuple[bytes | str | int, ...]]) -> NDArray[np.int64] | None:
        if cut.kept is None or cut.patches is None:
            return None
        orders = [permutation(self._secret, cut.patches, *key) for key in keys]
        return np.sort(np.stack(orders)[:, : cut.kept], axis=1)

    def kept_patches(self, sample_ids: Sequence[bytes], cut: TrainingCut) -> NDArray[np.int64] | None:
        """Positions (B, kept) of the patches that leave the device, rising; None where the part sees them all.

        Drawn once for a sample, by the device's secret: fresh draws would show another share of the picture with every
        epoch, and in twenty of them all of it (algorithms.md X1).
        """
        return self._draw(cut, [("kept patches", each) for each in sample_ids])

    def _edges(self, size: int) -> list[tuple[int, int]]:
        if size < 1:
            raise RemoteProtocolError(f"expected batches of one image or more, found {size}", START_ANEW)
        return batch_edges(len(self._samples), size)

    def one_hot(self, labels: Labels) -> Floats:
        """(B,) -> (B, C)"""
        rows = np.zeros((len(labels), self._class_count), np.float32)
        rows[np.arange(len(labels)), labels] = 1.0
        return rows

    def loss_of_logits(self, logits: NDArray[np.float32], labels: Labels, ask: str) -> BatchLoss:
        """Loss of the server's logits (B, C). Raises: RemoteProtocolError for another number of classes."""
        if logits.shape[1] != self._class_count:
            raise RemoteProtocolError(
                f"ask {ask}: expected logits of {self._class_count} classes, found {logits.shape[1]}",
                START_ANEW,
            )
        return softmax_gradient(logits, labels)
