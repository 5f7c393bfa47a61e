"""Sequential split learning (SSL), the baseline of P3SL: one device after another trains with the server, and hands the
client part on to the next.

algorithms.md sections 3.1 (without noise, with the part handed on) and 7; the cut may differ by device. Symbols: W the
whole model on the server, W^{1:s} its first s layers, W_c a device's own.

Decided here: a device that follows itself keeps its part and its momentum, so that one device alone is plain training;
layers that a device has trained start without momentum where the server trains them again (3.2, split change).
"""

from __future__ import annotations

import numpy as np

from ..split_model import Shipped
from ..split_rounds import LABEL_MODES, Lane, Link, Rounds, Talk
from . import Conduct, Settings, Site, State

__all__ = ["LABEL_MODES", "SequentialSplit", "build"]


class SequentialSplit:
    """One site's training, device by device."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._shipped, self._settings = shipped, settings
        self._rounds: Rounds | None = None
        self._turn = 0  # devices of this epoch that are done
        self._holder = ""  # whose part is W's newest

    def run(self, site: Site) -> Conduct:
        """Epoch by epoch, and in each device by device.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or Rounds(site, self._shipped, self._settings)
        while rounds.epoch < self._settings.epochs:
            for link in list(rounds.links.values())[self._turn :]:
                yield from self._take_turn(rounds, link)
                self._turn, rounds.place = self._turn + 1, 0
            self._turn = 0
            yield rounds.end_round()
        yield from rounds.hand_out()

    def _take_turn(self, rounds: Rounds, link: Link) -> Talk[None]:
        """Load W^{1:s}, an epoch of batches, W^{1:s} <- W_c."""
        if link.samples != 0 and rounds.place == 0 and self._holder != link.device:
            yield from rounds.load([link])
            if link.samples:
                rounds.w.forget_moments(link.cut)
        if not link.samples:
            return
        yield from rounds.local_epoch([Lane(rounds.w, [link])])
        yield from rounds.settle()
        parts = yield from rounds.upload([link])
        self._holder = link.device if parts else ""
        for w_c in parts.values():
            rounds.w.put(w_c)

    def state(self) -> State:
        """W, its moments and where everyone stands."""
        assert self._rounds is not None
        state = self._rounds.state()
        return State(state.tensors, {**state.values, "turn": self._turn, "holder": self._holder})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = Rounds(site, self._shipped, self._settings)
        self._rounds.load_state(state)
        self._turn, self._holder = int(state.values["turn"] or 0), str(state.values["holder"] or "")

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> SequentialSplit:
    """A strategy for one site."""
    return SequentialSplit(shipped, settings)
