"""In which order the samples of an epoch are seen: by a keyed digest, so that it repeats on every machine.

How a sample's picture is varied in that epoch is `contract.augment`'s part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.keyed_noise import derive_key


def epoch_order(sample_ids: Sequence[bytes], seed: int, epoch: int) -> list[int]:
    """Places in `sample_ids` in the order of the epoch, sorted by HMAC-SHA256 of (seed, epoch, id).

    The ids' order does not matter: the same set of ids is seen in the same order.
    """
    keys = [derive_key(b"", "epoch order", seed, epoch, sample_id) for sample_id in sample_ids]
    return sorted(range(len(keys)), key=lambda place: (keys[place], sample_ids[place]))


def batch_edges(count: int, size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) place of each batch of an epoch of `count` samples: `size` at a time, then the rest.

    A last batch of one goes with the batch before it: no statistics can be taken of one sample (SE-03). With a size of
    two or more, only a device that has a single sample has a batch of one.
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        del starts[-1]
    return list(zip(starts, [*starts[1:], count], strict=True)) if count else []


def batches(order: Sequence[int], size: int) -> Iterator[list[int]]:
    """The places of an epoch's order, batch by batch."""
    for first, last in batch_edges(len(order), size):
        yield list(order[first:last])
