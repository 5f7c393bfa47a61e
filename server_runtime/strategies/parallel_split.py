"""Parallel split learning (PSL): all devices train at once with one model on the server; their client parts are
averaged after each epoch.

algorithms.md section 7, with the averaging of section 3.1 (Eq. 1) weighted by images. Symbols: W the whole model on the
server, W^{1:s} its first s layers, W_ci device i's own, n_i its images, (+) "and the rest from".

Decided here: the devices of one cut make one batch on the server, which takes one step for all of them, moving every
layer by the mean over the rows that came through it; each device's part moves by the gradient of its own mean loss.
"""

from __future__ import annotations

import numpy as np

from ..aggregation import average
from ..plan import cut_of
from ..split_model import Shipped
from ..split_rounds import LABEL_MODES, Lane, Rounds
from . import Conduct, Record, Settings, Site, State

__all__ = ["LABEL_MODES", "ParallelSplit", "build"]


class ParallelSplit:
    """One site's training, all devices in lockstep."""

    def __init__(self, shipped: Shipped, settings: Settings, rule: str | None = None) -> None:
        """`rule` is the one by which devices choose their splits anew for each round; None: the operator chooses."""
        self._shipped, self._settings, self._rule = shipped, settings, rule
        self._rounds: Rounds | None = None

    def run(self, site: Site) -> Conduct:
        """Each epoch: load W^{1:s_i}, an epoch of common batches, W <- sum_i n_i (W_ci (+) W) / sum_i n_i.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or Rounds(site, self._shipped, self._settings)
        w = rounds.w
        while rounds.epoch < self._settings.epochs:
            if rounds.place == 0:
                if self._rule is not None:
                    chosen = yield from rounds.choose(rounds.with_images, self._rule)
                    for device, cut in chosen.items():
                        rounds.links[device].cut = cut
                yield from rounds.load(rounds.with_images)
                rounds.require_images()
            yield from rounds.local_epoch([Lane(w, rounds.with_images)])
            yield from rounds.settle()
            parts = yield from rounds.upload(rounds.with_images)  # W_ci
            n = [rounds.links[device].samples or 0 for device in parts]
            w.put(average(w.floats(), list(parts.values()), n, self._settings.average))
            record = rounds.end_round()
            yield Record({**record.values, **rounds.splits()} if self._rule else record.values)
        yield from rounds.hand_out()

    def state(self) -> State:
        """W, its moments and where everyone stands."""
        assert self._rounds is not None
        state = self._rounds.state()
        cuts = {f"cut/{link.device}": link.cut.index for link in self._rounds.links.values()}
        return State(state.tensors, {**state.values, **cuts})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        rounds = self._rounds = Rounds(site, self._shipped, self._settings)
        rounds.load_state(state)
        for device, link in rounds.links.items():
            link.cut = cut_of(self._shipped.plan, int(state.values[f"cut/{device}"] or 0))

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> ParallelSplit:
    """A strategy for one site."""
    return ParallelSplit(shipped, settings)
