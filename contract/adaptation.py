"""How the adaptation of a site is paced: the server trains by this rule, and an exporter chooses rates for it.

A few dozen images and a head that knows nothing yet pull a good backend out of shape, and split adaptation then loses
to a linear probe on the same uploads. So the head learns alone for the first epochs; then both learn, at rates that
fall towards zero along a cosine. By epochs, not steps: a run that goes on after a stop has the same rates.
"""

from __future__ import annotations

import math

PROBING = 0.3  # of the epochs


def is_probing(epoch: int, epochs: int) -> bool:
    """Whether the head learns alone in this epoch of `epochs`, counted from 1."""
    return epoch <= math.floor(PROBING * epochs)


def rate_share(epoch: int, epochs: int) -> float:
    """What an epoch has of the learning rates: 1 while the head learns alone, then down along a cosine, never to 0."""
    if is_probing(epoch, epochs):
        return 1.0
    alone = math.floor(PROBING * epochs)
    return (1.0 + math.cos(math.pi * (epoch - 1 - alone) / (epochs - alone))) / 2.0
