"""Is a picture that the server has at hand among a device's samples? By the samples' names, and by their features.

Names are a keyed hash of the pixels: without the key they match nothing, however many keys are guessed. Features under
noise still do: the distance of an upload to the picture's own clean tokens is as the noise makes it, or larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contract.keyed_noise import wire_id

from . import Effort, Finds, Known, Seen
from ._release import Release

FINDS: Finds = "members"
NEEDS = frozenset({"ids"})


class Membership:
    """The attack by name: for each suspect the name that each guessed key would give it, and the unkeyed digest."""

    def fit(self, known: Known) -> None:
        """Nothing."""

    def reconstruct(self, seen: Seen) -> Tensor:
        """One bool per suspect."""
        names = set(seen.ids)
        return torch.tensor(
            [
                digest[:16] in names or any(wire_id(key, digest) in names for key in seen.guessed_keys)
                for digest in seen.suspects
            ],
            dtype=torch.bool,
        )


def planned_steps(asked: int | None, images: int) -> int:
    """None."""
    return 0


def build(effort: Effort) -> Membership:
    """The attack; it has no steps to take."""
    return Membership()


def by_features(release: Release, received: Tensor, tokens: Tensor) -> Tensor:
    """Distance (m,) of each suspect's clean tokens (m, T, d) to the nearest upload (n, S, d).

    In deviations of noise and rounding per value: 1 for a member whose frontend is known exactly, more for others.
    """
    rounding = 0.0 if release.steps is None else release.steps.square() / 12.0
    deviation = (2.0 * release.scales.square() + rounding).sqrt()
    floor = (1e-3 * received.std(dim=(0, 1))).clamp_min(1e-12)  # where there is no noise
    scale = torch.maximum(deviation, floor)
    away = torch.cdist((tokens[:, release.places].float() / scale).flatten(1), (received / scale).flatten(1))
    return away.min(dim=1).values / (scale.numel() ** 0.5)
