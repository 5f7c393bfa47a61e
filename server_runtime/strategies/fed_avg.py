"""Federated averaging (FedAvg; McMahan et al. 2017, algorithm 1): devices train the whole model, and what they made of
it is averaged after each round.

algorithms.md section 7 (Fed-Full). Symbols: W the whole model with its head, W_i device i's after E local epochs, n_i
its images. The rate is one for a round. A quorum of devices is enough where the operator says so.

With --fraction a round asks some devices only; with a package for --peft, W's trained tensors alone travel: Fed-Head,
Fed-Bias, Fed-Prompt and Fed-LoRA.
"""

from __future__ import annotations

import numpy as np

from contract.messages import Update

from ..aggregation import average
from ..split_model import Shipped
from ..split_rounds import Rounds, Talk, answer
from ..whole_rounds import open_rounds, round_numbers
from . import Ask, Conduct, Settings, Site, State

LABEL_MODES = ("raw-label",)  # no label travels, but an output stands for the class itself, and its bias shows


class FedAvg:
    """One site's rounds."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._shipped, self._settings = shipped, settings
        self._rounds: Rounds | None = None

    def run(self, site: Site) -> Conduct:
        """Each round: W to all devices, E local epochs, W <- sum_i n_i W_i / sum_i n_i.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or open_rounds(site, self._shipped, self._settings)
        w, s = rounds.w, self._settings
        while rounds.epoch < s.epochs:
            e = min(s.local_epochs, s.epochs - rounds.epoch)
            parts = yield from self._train(rounds, e)  # W_i
            n = [rounds.links[device].samples or 0 for device in parts]
            w.put(average(w.floats(), list(parts.values()), n, self._settings.average))
            yield rounds.end_round(e)
        yield from self._hand_out(rounds)

    def _hand_out(self, rounds: Rounds) -> Talk[None]:
        """W to all devices, which predict with it by themselves; who is away does not hold up those that are enough."""
        links = list(rounds.links.values())
        part = rounds.w.part(links[0].cut)
        own = {link.device: {"cut": link.cut.index, "step": rounds.epoch} for link in links}
        quorum = min(self._settings.quorum, len(links)) or None
        yield from rounds.ask("load_part", {link.device: part for link in links}, own, quorum=quorum)

    def _train(self, rounds: Rounds, epochs: int) -> Talk[dict[str, dict[str, np.ndarray]]]:
        """The parts of all devices that answered, have images, and gave finite values."""
        s, links = self._settings, rounds.pick(self._settings.fraction)
        common = round_numbers(rounds, epochs) | {"cut": links[0].cut.index}
        part = rounds.w.part(links[0].cut)
        quorum = min(s.quorum, len(links)) or None
        asked = {link.device: part for link in links}
        replies = yield from rounds.ask("local_round", asked, {}, common, quorum=quorum)
        parts = {}
        for link in links:
            if quorum is not None and link.device not in replies:
                continue
            update = answer(Update, replies, link.device)
            link.samples = update.samples
            w_i = rounds.take_part(update, link) if update.samples and update.count else None
            if w_i is not None:
                parts[link.device] = w_i
                rounds.add(update.mean_loss, update.correct, update.count)
        return rounds.keep_usual(parts)

    def state(self) -> State:
        """W and how far training is."""
        assert self._rounds is not None
        return self._rounds.state()

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = open_rounds(site, self._shipped, self._settings)
        self._rounds.load_state(state)

    def last_part(self, device: str) -> Ask:
        """W for a device that was away when it was handed out."""
        assert self._rounds is not None
        link = self._rounds.links[device]
        numbers = {"cut": link.cut.index, "step": self._rounds.epoch}
        return Ask(f"last-{device}", "load_part", {device: self._rounds.w.part(link.cut)}, numbers)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Logits (B,C) of the device's part, which is the whole model: these are they."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> FedAvg:
    """A strategy for one site."""
    return FedAvg(shipped, settings)
