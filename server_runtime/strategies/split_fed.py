"""SplitFed V1: every device has a copy of the model's rest on the server, and both halves are averaged each epoch.

algorithms.md section 5.1 (the remark on SplitFed; weighted by images, as decided there) and 7. Symbols: W the whole
model, W_ci device i's client part, S_i its copy on the server, n_i its images, (+) "and the rest from".

Decided here: copies and client parts both start a round with fresh optimisers, so that a round is one of FedAvg with
split clients; the copies take their steps in lockstep.
"""

from __future__ import annotations

import numpy as np

from ..aggregation import average
from ..split_model import Shipped, SplitModel
from ..split_rounds import LABEL_MODES, Lane, Rounds
from . import Conduct, Settings, Site, State

__all__ = ["LABEL_MODES", "SplitFed", "build"]


class SplitFed:
    """One site's training, a copy for each device."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._shipped, self._settings = shipped, settings
        self._rounds: Rounds | None = None
        self._copies: dict[str, SplitModel] = {}  # S_i, by device, while a round lasts

    def run(self, site: Site) -> Conduct:
        """Each epoch: S_i <- W, an epoch of each device's own batches, W <- sum_i n_i (W_ci (+) S_i) / sum_i n_i.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or Rounds(site, self._shipped, self._settings)
        w = rounds.w
        while rounds.epoch < self._settings.epochs:
            if rounds.place == 0:
                yield from rounds.load(rounds.with_images)
                rounds.require_images()
                self._copies = {link.device: w.copy() for link in rounds.with_images}
            yield from rounds.local_epoch([Lane(self._copies[link.device], [link]) for link in rounds.with_images])
            yield from rounds.settle()
            parts = yield from rounds.upload(rounds.with_images)  # W_ci
            whole = [self._copies[device].floats() | part for device, part in parts.items()]
            n = [rounds.links[device].samples or 0 for device in parts]
            w.put(average(w.floats(), whole, n, self._settings.average))
            self._copies = {}
            yield rounds.end_round()
        yield from rounds.hand_out()

    def state(self) -> State:
        """W, where everyone stands, and in a round the copies with their moments."""
        assert self._rounds is not None
        state = self._rounds.state()
        copies = {
            f"copy/{device}/{name}": tensor
            for device, s_i in self._copies.items()
            for name, tensor in {**s_i.weights(), **s_i.moments()}.items()
        }
        return State({**state.tensors, **copies}, state.values)

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = Rounds(site, self._shipped, self._settings)
        self._rounds.load_state(state)
        self._copies = {}
        for device in site.devices:
            start = f"copy/{device}/"
            own = {name.removeprefix(start): tensor for name, tensor in state.tensors.items() if name.startswith(start)}
            if own:
                self._copies[device] = self._rounds.w.copy()
                self._copies[device].load(own)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> SplitFed:
    """A strategy for one site."""
    return SplitFed(shipped, settings)
