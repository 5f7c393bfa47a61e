"""Variations of training pictures that repeat bit for bit: shifted, mirrored, brighter or darker.

For devices and simulations alike. A picture's variation is a function of (seed, epoch, sample id) and the rule alone:
order, batches, machine and numpy version do not matter. It acts on the 8-bit pictures of `contract.images.resize`,
before `normalise`. Which samples are seen when is `contract.epoch_order`'s part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contract.images import Pixels
from contract.keyed_noise import derive_key, random_bits
from contract.training import AugmentRule


@dataclass(frozen=True)
class Variation:
    """What happens to one picture: content moves `down` and `right` by so many pixels (negative: up, left)."""

    down: int
    right: int
    mirrored: bool
    brightness: float  # factor on the pixel values


def draw(rule: AugmentRule, seed: int, epoch: int, sample_id: bytes) -> Variation:
    """The variation of a sample in an epoch; each part has a draw of its own, whatever else the rule says."""
    bits = [int(word) for word in random_bits(derive_key(b"", "augment", seed, epoch, sample_id), 4)]
    places = 2 * rule.crop_padding + 1
    down, right = (rule.crop_padding - (word * places >> 64) for word in bits[:2])
    swing = ((bits[3] >> 11) * 2.0**-53 * 2.0 - 1.0) * rule.brightness  # from -brightness to below +brightness
    return Variation(down, right, rule.flip and bits[2] >> 63 == 1, 1.0 + swing)


def augment(
    pictures: Pixels,
    rule: AugmentRule,
    mean: tuple[float, float, float],
    seed: int,
    epoch: int,
    sample_ids: Sequence[bytes],
) -> Pixels:
    """Varied copies (B, h, w, 3) of pictures (B, h, w, 3), one id each.

    A crop after padding is a shift; what comes into view is the channel's mean of the image rule, which `normalise`
    turns into nothing (to half a level): no edge of black, and no content twice.
    """
    fill = np.rint(np.array(mean) * 255.0).astype(np.uint8)
    varied = np.empty_like(pictures, order="C")
    for picture, out, sample_id in zip(pictures, varied, sample_ids, strict=True):
        _vary(picture, draw(rule, seed, epoch, sample_id), fill, out)
    return varied


def _vary(picture: Pixels, variation: Variation, fill: Pixels, out: Pixels) -> None:
    if variation.brightness != 1.0:
        levels = np.minimum(np.floor(np.arange(256) * variation.brightness + 0.5), 255.0).astype(np.uint8)
        picture = levels[picture]
    if variation.mirrored:
        picture = picture[:, ::-1]
    height, width = picture.shape[:2]
    rows_to, rows_from = _overlap(variation.down, height)
    columns_to, columns_from = _overlap(variation.right, width)
    if variation.down or variation.right:
        out[...] = fill
    out[rows_to, columns_to] = picture[rows_from, columns_from]


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Where content lands, and where it comes from, when it moves by `shift`; both empty where it moves out of view."""
    shift = max(-size, min(size, shift))
    return slice(max(shift, 0), size + min(shift, 0)), slice(max(-shift, 0), size - max(shift, 0))
