"""Learning the head that answers without a server, and answering with it, from tokens that the frontend made anyway.

Both look at tokens as they pass (`pipeline.Frontend.seen`), so that an image goes through the frontend once. What is
kept stays in one file of the state, mode 0600, written whole; nothing of it is ever sent. The laws are `ridge_head`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.tokens import TokenLayout
from edge_runtime.data import Dataset, Sample
from edge_runtime.head import Floats
from edge_runtime.local_record import WIRE_ID_BYTES, Basis, Compared, Facts, LocalRecord, from_bytes, to_bytes
from edge_runtime.ridge_head import fit, pool
from edge_runtime.state import read_or_set_aside, write_durably

LEARNED_MOST = 1000  # images; time goes by their cube, memory by their square
LEARN = "run edge-run --learn with labelled images"


def read_record(path: Path, basis: Basis, say: Callable[[str], None]) -> LocalRecord | None:
    """What this device learned before this frontend; None where there is nothing, or it was damaged, which is said."""
    record = read_or_set_aside(path, from_bytes, say)
    if record is not None and record.facts.basis != basis:
        say("the head that answers here without a server belongs to another package or noise: it learns anew or rests")
        return None
    return record


class Learner:
    """Gathers pooled features of labelled images, and makes the head of them."""

    def __init__(
        self,
        path: Path,
        basis: Basis,
        layout: TokenLayout,
        dataset: Dataset,
        record: LocalRecord | None,
        say: Callable[[str], None],
    ) -> None:
        """`record` is what was learned before, whose features need not be computed again.

        Of too many images the first are learned from: they come in the order of their ids, which says nothing of what
        they show.
        """
        self.record = record
        self._path, self._basis, self._layout, self._say = path, basis, layout, say
        self._classes, self._images = dataset.classes, len(dataset.samples)
        self._samples = dataset.samples[:LEARNED_MOST]
        known = {} if record is None else record.features()
        wanted = (sample.sample_id for sample in self._samples)
        self._features = {sample_id: known.get(sample_id) for sample_id in wanted}

    def see(self, samples: Sequence[Sample], tokens: NDArray[np.float16]) -> None:
        """Take what is needed of clean tokens (B, T, d)."""
        for sample, row in zip(samples, pool(tokens, self._layout), strict=True):
            if sample.sample_id in self._features:
                self._features[sample.sample_id] = row

    def missing(self) -> list[Sample]:
        """Those that were never seen before, told by their pixels."""
        return [sample for sample in self._samples if self._features[sample.sample_id] is None]

    def learn(self) -> None:
        """The head of these images, all of which were seen, durably; what was learned from others is forgotten.

        Raises: DeviceError when the disk refuses.
        """
        if len(self._samples) < self._images:
            self._say(f"answers without a server are learned from {len(self._samples)} of {self._images} images")
        labels = np.array([sample.label for sample in self._samples], np.int64)
        pooled = np.stack([row for row in self._features.values() if row is not None])
        head = fit(pooled, labels, len(self._classes))
        sample_ids = np.frombuffer(b"".join(self._features), np.uint8).reshape(-1, WIRE_ID_BYTES)
        facts = Facts(self._basis, self._classes, head.held_out_accuracy, head.held_out_images, None)
        self.record = LocalRecord(facts, head.weight, head.bias, sample_ids, pooled)
        write_durably(self._path, to_bytes(self.record))


class Answerer:
    """Answers of the head that was learned, for images whose tokens pass by or that it learned from."""

    def __init__(self, path: Path, record: LocalRecord, layout: TokenLayout) -> None:
        self.record = record
        self._path, self._layout, self._head, self._known = path, layout, record.head, record.features()
        self._logits: dict[bytes, Floats] = {}

    def see(self, samples: Sequence[Sample], tokens: NDArray[np.float16]) -> None:
        """Answer for clean tokens (B, T, d)."""
        for sample, row in zip(samples, self._head.logits(pool(tokens, self._layout)), strict=True):
            self._logits[sample.sample_id] = row

    def has_learned(self, sample: Sample) -> bool:
        """Whether the head learned from this very image."""
        return sample.sample_id in self._known

    def missing(self, samples: Iterable[Sample]) -> list[Sample]:
        """Those whose tokens are still needed."""
        return [each for each in samples if each.sample_id not in self._logits and not self.has_learned(each)]

    def logits(self, sample: Sample) -> Floats | None:
        """(C,) in the order of the record's classes; None where the image's tokens are still needed."""
        if sample.sample_id not in self._logits and self.has_learned(sample):
            self._logits[sample.sample_id] = self._head.logits(self._known[sample.sample_id][None])[0]
        return self._logits.get(sample.sample_id)

    def remember(self, compared: Compared) -> None:
        """Keep how right the server was, for a day without one. Raises: DeviceError when the disk refuses."""
        if compared != self.record.facts.compared:
            self.record = replace(self.record, facts=replace(self.record.facts, compared=compared))
            write_durably(self._path, to_bytes(self.record))
