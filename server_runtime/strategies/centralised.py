"""Centralised training, the upper bound of every table: one device has all images, and the model is split only in where
it runs.

It is sequential split learning with a single device, whose part and momentum stay where they are: step for step plain
training of the whole model.
"""

from __future__ import annotations

import numpy as np

from contract.errors import TrainingError

from ..split_model import Shipped
from ..split_rounds import LABEL_MODES
from . import Conduct, Settings, Site, State
from .sequential_split import SequentialSplit

__all__ = ["LABEL_MODES", "Centralised", "build"]


class Centralised:
    """One site's training with its only device."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._training = SequentialSplit(shipped, settings)

    def run(self, site: Site) -> Conduct:
        """Train.

        Raises:
            TrainingError: the site has more than one device, or training cannot go on.
        """
        if len(site.devices) != 1:
            raise TrainingError(
                f"site {site.name!r} has {len(site.devices)} devices: {', '.join(site.devices)}; centralised takes one",
                "enrol one device that has all images, or choose sequential_split",
            )
        yield from self._training.run(site)

    def state(self) -> State:
        """All that training needs to go on."""
        return self._training.state()

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._training.load(site, state)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head."""
        return self._training.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> Centralised:
    """A strategy for one site."""
    return Centralised(shipped, settings)
