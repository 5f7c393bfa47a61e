"""The features that devices sent last, by device, bounded in bytes: what EFTViT's server trains on (algorithms.md 4.2).

Pure. A device's new upload takes the place of its old one. Over the limit, the uploads that came in the oldest round go
first; features stay as they travelled, and become float32 batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contract.patch_features import WireFeatures, read_features


@dataclass(frozen=True)
class Stored:
    """One device's features (B,T,d) with labels (B,), of a round."""

    round: int
    features: WireFeatures
    labels: np.ndarray

    @property
    def nbytes(self) -> int:
        """As it is held."""
        scales = self.features.scales
        return self.features.values.nbytes + self.labels.nbytes + (0 if scales is None else scales.nbytes)


class FeatureStore:
    """Uploads by device."""

    def __init__(self, limit_bytes: int, rounds: int) -> None:
        """`rounds` is how many rounds an upload counts, 0 for ever."""
        self._limit_bytes, self._rounds = limit_bytes, rounds
        self._held: dict[str, Stored] = {}

    def __len__(self) -> int:
        """Rows."""
        return sum(len(each.labels) for each in self._held.values())

    @property
    def nbytes(self) -> int:
        """Of all uploads."""
        return sum(each.nbytes for each in self._held.values())

    @property
    def uploads(self) -> Mapping[str, Stored]:
        """What is held, by device."""
        return self._held

    def put(self, device: str, upload: Stored) -> None:
        """Replace the device's upload, then drop the oldest until the rest fits; even the new one, if it must be."""
        self._held.pop(device, None)
        self._held[device] = upload
        while self.nbytes > self._limit_bytes:
            del self._held[min(self._held, key=lambda name: (self._held[name].round, name))]

    def forget_before(self, current_round: int) -> None:
        """Drop what is too old in this round."""
        if self._rounds:
            oldest = current_round - self._rounds + 1
            self._held = {device: each for device, each in self._held.items() if each.round >= oldest}

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """An epoch in random order: features (R,T,d) f32 and labels (R,) i64. A last batch of one joins the one before.

        The order depends on who is held and on `rng`, never on who came first.
        """
        rows = [(device, row) for device in sorted(self._held) for row in range(len(self._held[device].labels))]
        order = rng.permutation(len(rows))
        starts = list(range(0, len(rows), size))
        if len(starts) > 1 and len(rows) - starts[-1] == 1:
            del starts[-1]
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            yield self._gather([rows[place] for place in order[start:end]])

    def _gather(self, rows: Sequence[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        features, labels = [], []
        for device in sorted({device for device, _ in rows}):
            held, own = self._held[device], [row for name, row in rows if name == device]
            features.append(read_features(WireFeatures(held.features.values[own], held.features.scales)))
            labels.append(held.labels[own].astype(np.int64))
        return np.concatenate(features), np.concatenate(labels)
