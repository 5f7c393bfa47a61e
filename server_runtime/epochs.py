"""Which samples a training step sees, in which order, and which uploaded tokens its batch consists of.

Everything is keyed by (seed, epoch, device, sample id), never by arrival. Fetching the tokens' codes is left to
`backend.CodeTable`, training to the strategies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contract import tokens

from .store import Upload


@dataclass(frozen=True)
class Augmentation:
    """Patch retrieval as a recipe (algorithms.md 1.1 step 5): `runs` draws per image, `replaced` of `patches` each."""

    seed: int
    runs: int
    patches: int
    replaced: int
    prefix: int


@dataclass(frozen=True)
class Rows:
    """R rows of one batch: the device's upload (R,), the sample in it (R,), and the run (R,), 0 for un-augmented."""

    device: np.ndarray
    sample: np.ndarray
    run: np.ndarray

    def __len__(self) -> int:
        return int(self.sample.shape[0])

    def of(self, device: int) -> np.ndarray:
        """Places in this batch (r,) that belong to one device."""
        return np.flatnonzero(self.device == device)


def pool(uploads: Sequence[Upload]) -> tuple[Upload, ...]:
    """The uploads by device name; what each device's own order was stays, because `sources` index it."""
    return tuple(sorted(uploads, key=lambda upload: upload.device))


def epoch_batches(uploads: Sequence[Upload], augmentation: Augmentation, epoch: int, batch: int) -> list[Rows]:
    """Every image once as it came and once under one of its runs, in an order keyed by the epoch.

    A last batch of one row is merged with the one before it (SE-03); a set smaller than the batch is one batch.
    """
    rows: list[tuple[bytes, int, int, int]] = []  # order key, device, sample, run
    for device, upload in enumerate(uploads):
        retrieved = upload.sources is not None and augmentation.runs > 0 and augmentation.replaced > 0
        for sample, sample_id in enumerate(upload.sample_ids):
            key = _key(augmentation.seed, epoch, upload.device, sample_id.tobytes())
            rows.append((key[:8], device, sample, 0))
            if retrieved:
                run = 1 + int.from_bytes(key[8:16], "little") % augmentation.runs
                rows.append((key[16:24], device, sample, run))
    rows.sort(key=lambda row: row[0])
    table = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 3)
    edges = list(range(0, len(table), batch)) + [len(table)]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        del edges[-2]
    return [Rows(*table[first:last].T) for first, last in zip(edges[:-1], edges[1:], strict=True)]


def _key(seed: int, epoch: int, device: str, sample_id: bytes) -> bytes:
    name = device.encode()
    head = b"cutlayer-epoch-v1\0" + seed.to_bytes(8, "little", signed=True) + epoch.to_bytes(8, "little")
    return hashlib.sha256(head + len(name).to_bytes(4, "little") + name + sample_id).digest()


def token_rows(uploads: Sequence[Upload], rows: Rows, augmentation: Augmentation) -> np.ndarray:
    """Where each token (R,T) i64 of a batch lies among the tokens of all uploads, one upload and sample after another:
    augmented rows are rebuilt from the recipe, as a device would make them."""
    count = uploads[0].codes.shape[1]  # T
    samples = np.repeat(rows.sample[:, None], count, axis=1)  # (R,T), counted within each upload
    for device, upload in enumerate(uploads):
        places = rows.of(device)
        changed = places[rows.run[places] > 0]
        if changed.size and upload.sources is not None:
            positions = [
                tokens.augmentation_positions(
                    augmentation.seed,
                    upload.sample_ids[rows.sample[place]].tobytes(),
                    int(rows.run[place]),
                    augmentation.patches,
                    augmentation.replaced,
                )
                for place in changed
            ]  # (r, P) positions
            samples[changed] = tokens.token_origins(
                upload.sources, rows.sample[changed], np.stack(positions), augmentation.prefix
            )
    starts = np.cumsum([0, *(len(upload.sample_ids) for upload in uploads)])
    where: np.ndarray = (starts[rows.device][:, None] + samples) * count + np.arange(count)
    return where


def sample_ids_of(uploads: Sequence[Upload], rows: Rows, device: int) -> np.ndarray:
    """Ids (r,16) u8 of one device's rows in a batch, in batch order."""
    ids: np.ndarray = uploads[device].sample_ids[rows.sample[rows.of(device)]]
    return ids


def labels_of(uploads: Sequence[Upload], rows: Rows) -> np.ndarray:
    """Labels (R,) i64 of a batch, joined by sample, not by position; all uploads carry labels."""
    labels = np.empty(len(rows), np.int64)
    for device, upload in enumerate(uploads):
        places = rows.of(device)
        if upload.labels is not None:
            labels[places] = upload.labels[rows.sample[places]]
    return labels
