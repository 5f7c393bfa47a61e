"""FEDBFPT (IJCAI 2023, 483): federated averaging in which a round trains one block and the head.

algorithms.md section 7. Symbols: W the whole model, L its blocks, T its rounds, b_t the block of round t. Shallow
blocks come first, deeper ones are drawn with growing probability:

    P(b_t = j) ~ (1 - p) (L - j) + p (j + 1),   p = t / (T - 1)

Decided here: all devices of a round train the same block; what a device is sent is what has changed since it was asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contract.messages import Update

from ..aggregation import average
from ..gates import fault_of
from ..split_model import Shipped
from ..split_rounds import Link, Rounds, Talk, answer
from ..training_macs import sizes_of
from ..whole_rounds import open_rounds, round_numbers, whole_cut
from . import Ask, Conduct, Record, Settings, Site, State, Tensors

LABEL_MODES = ("raw-label",)


class FedBfpt:
    """One site's rounds."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._shipped, self._settings = shipped, settings
        self._whole = whole_cut(shipped.plan)
        self._sizes = sizes_of(shipped.module)
        self._rounds: Rounds | None = None
        self._changed: dict[str, int] = {}  # tensor -> the version of W that moved it last
        self._has: dict[str, int] = {}  # device -> the version that it was sent; 0: the package's
        self._version = 1  # the server's own head

    def run(self, site: Site) -> Conduct:
        """Each round: b_t and the head of some devices, W <- the mean of these by images.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or open_rounds(site, self._shipped, self._settings)
        w, s = rounds.w, self._settings
        while rounds.epoch < s.epochs:
            e = min(s.local_epochs, s.epochs - rounds.epoch)
            block, picked = self._block(rounds), rounds.pick(s.fraction)
            parts = yield from self._train(rounds, picked, block, e)
            n = [rounds.links[device].samples or 0 for device in parts]
            moved = average(w.floats(), list(parts.values()), n, self._settings.average) if parts else {}
            w.put(moved)
            self._version += 1
            back = {here: name for name, here in w.names_of(self._whole).items()}
            self._changed |= {back[here]: self._version for here in moved}
            crossed = self._sizes.blocks - block  # the gradient goes no deeper than the block
            macs = (
                rounds.tally.rows
                * e
                * (self._sizes.forward(self._sizes.patches) + (crossed + 1) * self._sizes.block(self._sizes.patches))
            )
            record = rounds.end_round(e)
            yield Record({**record.values, "block": block, "asked": len(picked), "macs_devices": macs})
        links = list(rounds.links.values())
        part = w.part(self._whole)
        own = {link.device: {"cut": self._whole.index} for link in links}
        yield from rounds.ask("load_part", {link.device: part for link in links}, own, moves=True)

    def _block(self, rounds: Rounds) -> int:
        s, blocks = self._settings, self._sizes.blocks
        last = max(1, -(-s.epochs // s.local_epochs) - 1)
        p = min(1.0, (rounds.epoch // s.local_epochs) / last)
        j = np.arange(blocks)
        weights = (1 - p) * (blocks - j) + p * (j + 1)
        return int(np.random.default_rng([s.seed, rounds.epoch]).choice(blocks, p=weights / weights.sum()))

    def _train(
        self, rounds: Rounds, picked: Sequence[Link], block: int, epochs: int
    ) -> Talk[dict[str, dict[str, np.ndarray]]]:
        w, common = rounds.w, round_numbers(rounds, epochs) | {"block": block}
        whole = w.part(self._whole)
        head = f"{self._whole.layer}."
        trained = [name for name in whole if name.startswith((f"blocks.{block}.", head))]
        sent = {link.device: self._news_for(link.device, whole) for link in picked}
        replies = yield from rounds.ask("block_round", sent, {}, common, moves=True)
        parts = {}
        for link in picked:
            update = answer(Update, replies, link.device)
            link.samples, self._has[link.device] = update.samples, self._version
            if not (update.samples and update.count):
                continue
            fault = fault_of(update.tensors, {name: whole[name] for name in trained})
            if fault is not None:
                rounds.quarantine(link.device, fault)
                continue
            rounds.count_usable()
            rounds.add(update.mean_loss, update.correct, update.count)
            names = w.names_of(self._whole)
            parts[link.device] = {names[name]: value for name, value in update.tensors.items()}
        return rounds.keep_usual(parts)

    def _news_for(self, device: str, whole: Tensors) -> Tensors:
        has, head = self._has.get(device, 0), f"{self._whole.layer}."
        return {
            name: value
            for name, value in whole.items()
            if self._changed.get(name, 1 if name.startswith(head) else 0) > has
        }

    def state(self) -> State:
        """W, and what each device has of it."""
        assert self._rounds is not None
        state = self._rounds.state()
        changed = {f"changed/{name}": version for name, version in self._changed.items()}
        has = {f"has/{device}": version for device, version in self._has.items()}
        return State(state.tensors, {**state.values, **changed, **has, "version": self._version})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = open_rounds(site, self._shipped, self._settings)
        self._rounds.load_state(state)
        self._version = int(state.values["version"] or 0)
        for found, start in ((self._changed, "changed/"), (self._has, "has/")):
            found.clear()
            names = [name for name in state.values if name.startswith(start)]
            found |= {name.removeprefix(start): int(state.values[name] or 0) for name in names}

    def last_part(self, device: str) -> Ask:
        """W for a device that was away when it was handed out."""
        assert self._rounds is not None
        numbers = {"cut": self._whole.index, "step": 1 << 40}
        return Ask(f"last-{device}", "load_part", {device: self._rounds.w.part(self._whole)}, numbers)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Logits (B,C) of the device's part, which is the whole model: these are they."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> FedBfpt:
    """A strategy for one site."""
    return FedBfpt(shipped, settings)
