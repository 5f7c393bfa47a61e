"""How the adaptation of a site is paced: the server trains by this rule, and an exporter chooses rates for it."""

from __future__ import annotations

import math


def rate_share(epoch: int, epochs: int) -> float:
    """What an epoch, counted from 1, has of the learning rates: from 1 down along a cosine, never to 0.

    By epochs, not steps: a run that goes on after a stop has the same rates.
    """
    return (1.0 + math.cos(math.pi * (epoch - 1) / epochs)) / 2.0
