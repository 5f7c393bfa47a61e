"""Shift-aware prototypes: split federated learning in which labels stay on the devices, and class prototypes draw the
devices' parts together, less where a device's domain is far off.

algorithms.md section 5.1. Symbols: W the whole model with the projection head phi, W_ck device k's client part and phi,
S_k its copy of the rest on the server, n_k its images, P_c class c's prototype, p_{k,c} and n_{k,c} device k's means of
phi and their counts, d_k the distance between the two, lambda_k = lambda_0 exp(-alpha d_k), (+) "and the rest from".
g and the gradient of lambda_k L_proto are in the part's graphs; the labels' gradient comes from the device.

Decided here: the server reckons lambda_k, for it has both p_{k,c} and P_c, and a device need not remember a round;
p_{k,c} is of the device's last round. `server_copies`: "each" is SplitFed V1 (S_k averaged like the parts), "one" V2
(devices after one another with one S). With a quorum a round goes on with the devices that are there when it begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch

from contract.errors import TrainingError
from contract.messages import Prototypes as Told
from contract.messages import Settled

from .. import class_prototypes
from ..aggregation import average
from ..class_prototypes import ClassMeans, ClassPrototypes, means_of
from ..split_model import Shipped, SplitModel
from ..split_replies import answer
from ..split_rounds import Lane, Link, Rounds, Talk
from . import Ask, Conduct, Metric, Record, Settings, Site, State

LABEL_MODES = ("logit-gradient", "client-head")  # in the others labels would travel


class ShiftAwarePrototypes:
    """One site's training."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        assert shipped.plan.prototypes is not None  # checked with the run's plan
        self._shipped, self._settings, self._rule = shipped, settings, shipped.plan.prototypes
        self._rounds: Rounds | None = None
        self._present: list[str] = []  # devices of this round
        self._turn = 0  # with one S: devices of this round that are done
        self._copies: dict[str, SplitModel] = {}  # S_k, while a round lasts
        self._prototypes = ClassPrototypes.none(0, 0)  # P
        self._means: dict[str, ClassMeans] = {}  # device -> its last (p_{k,c}, n_{k,c})
        self._facts: dict[str, Metric] = {}  # of this round, for its line

    def run(self, site: Site) -> Conduct:
        """Each round: W and lambda_k, P to the devices, an epoch of each, averages of parts and copies, P renewed.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or self._start(site)
        while rounds.epoch < self._settings.epochs:
            if rounds.place == 0 and self._turn == 0:
                yield from self._begin_round(rounds)
            links = [rounds.links[name] for name in self._present]
            yield from self._train(rounds, links)
            yield from rounds.settle()
            parts = yield from rounds.upload(links)  # W_ck
            self._average(rounds, parts)
            yield from self._renew(rounds, links)
            yield Record({**rounds.end_round().values, **self._facts})
        yield from self._hand_out(rounds)

    # -- a round

    def _begin_round(self, rounds: Rounds) -> Talk[None]:
        links = yield from self._attendance(rounds)
        yield from rounds.load(links)
        rounds.require_images()
        links = [link for link in links if link.samples]
        if not links:
            raise TrainingError("no device that is there has a sample", "add images to it, or raise --quorum")
        self._present = [link.device for link in links]
        yield from self._set_prototypes(rounds, links)
        if self._settings.server_copies == "each":
            self._copies = {name: rounds.w.copy() for name in self._present}

    def _attendance(self, rounds: Rounds) -> Talk[list[Link]]:
        """The devices of this round: those with images that are there, or all."""
        links = rounds.with_images
        if not 0 < self._settings.quorum < len(links):
            return links
        asked: dict[str, dict[str, np.ndarray]] = {link.device: {} for link in links}
        common = {"epoch": rounds.epoch + 1}
        replies = yield from rounds.ask("attend", asked, {}, common, quorum=self._settings.quorum)
        return [link for link in links if link.device in replies and answer(Settled, replies, link.device)]

    def _set_prototypes(self, rounds: Rounds, links: Sequence[Link]) -> Talk[None]:
        """Broadcast {P_c}, to each device with its lambda_k."""
        s, p = self._settings, self._prototypes
        shifts = {
            link.device: class_prototypes.shift(self._means[link.device], p, self._rule.distance)
            for link in links
            if link.device in self._means
        }
        strengths = {
            link.device: class_prototypes.strength(shifts.get(link.device), s.prototype_strength, s.prototype_shift)
            for link in links
        }
        known = [each for each in shifts.values() if each is not None]
        self._facts = {
            "shift": statistics.fmean(known) if known else None,
            "strength": statistics.fmean(strengths.values()) if strengths else None,
            "devices": len(links),
        }
        asked = [link for link in links if strengths[link.device] > 0.0]
        if asked:
            (classes,) = np.nonzero(p.known)
            tensors = {"classes": classes.astype(np.uint16), "values": p.values[classes].astype(np.float32)}
            own = {link.device: {"strength": strengths[link.device]} for link in asked}
            replies = yield from rounds.ask("set_prototypes", dict.fromkeys(own, tensors), own, moves=True)
            for device in own:
                answer(Settled, replies, device)

    def _train(self, rounds: Rounds, links: Sequence[Link]) -> Talk[None]:
        """An epoch of every device, in lockstep with copies of their own, else one after another."""
        if self._settings.server_copies == "each":
            yield from rounds.local_epoch([Lane(self._copies[link.device], [link]) for link in links])
            return
        for link in links[self._turn :]:
            yield from rounds.local_epoch([Lane(rounds.w, [link])])
            self._turn, rounds.place = self._turn + 1, 0
        self._turn = 0

    def _average(self, rounds: Rounds, parts: dict[str, dict[str, np.ndarray]]) -> None:
        """W <- sum_k n_k (W_ck (+) S_k) / sum_k n_k."""
        n = [rounds.links[device].samples or 0 for device in parts]
        whole = [self._copies[device].floats() | part if self._copies else part for device, part in parts.items()]
        rounds.w.put(average(rounds.w.floats(), whole, n))
        self._copies = {}

    def _renew(self, rounds: Rounds, links: Sequence[Link]) -> Talk[None]:
        """M_k from every device, and P <- (1 - beta) P + beta p-bar; nothing where nothing pulls."""
        if self._settings.prototype_strength == 0.0:
            return
        replies = yield from rounds.ask("give_prototypes", {link.device: {} for link in links}, {})
        classes, dimension = rounds.site.classes, self._rule.dimension
        found = {link.device: means_of(link.device, answer(Told, replies, link.device), classes, dimension)
                 for link in links}  # fmt: skip
        self._means |= found
        self._prototypes = self._prototypes.renewed(found.values(), self._settings.prototype_renewal)
        self._facts["prototypes"] = int(self._prototypes.known.sum())

    def _start(self, site: Site) -> Rounds:
        self._prototypes = ClassPrototypes.none(site.classes, self._rule.dimension)
        return Rounds(site, self._shipped, self._settings)

    # -- the end

    def _hand_out(self, rounds: Rounds) -> Talk[None]:
        """The finished W's part to all; who is away does not hold up those that are enough."""
        links = list(rounds.links.values())
        if not 0 < self._settings.quorum < len(links):
            yield from rounds.hand_out()
            return
        asked = {link.device: self._last(rounds, link) for link in links}
        own = {device: dict(ask.parameters) for device, ask in asked.items()}
        tensors = {device: ask.tensors[device] for device, ask in asked.items()}
        yield from rounds.ask("load_part", tensors, own, quorum=self._settings.quorum)

    def _last(self, rounds: Rounds, link: Link) -> Ask:
        # A step behind all others, without being one: no checkpoint of the server's needs to know who took it.
        numbers = {"cut": link.cut.index, "step": rounds.steps + 1}
        return Ask(f"last-{link.device}", "load_part", {link.device: rounds.w.part(link.cut)}, numbers)

    def last_part(self, device: str) -> Ask:
        """W's part for a device that was away when it was handed out."""
        assert self._rounds is not None
        return self._last(self._rounds, self._rounds.links[device])

    # -- going on after a stop

    def state(self) -> State:
        """W, P, the devices' means, where everyone stands, and in a round the copies with their moments."""
        assert self._rounds is not None
        state = self._rounds.state()
        copies = {
            f"copy/{device}/{name}": tensor
            for device, s_k in self._copies.items()
            for name, tensor in {**s_k.weights(), **s_k.moments()}.items()
        }
        own = {
            "prototypes/values": self._prototypes.values,
            "prototypes/known": self._prototypes.known.astype(np.uint8),
        }
        own |= {f"means/{name}": array for name, array in class_prototypes.to_tensors(self._means).items()}
        arrays = {name: torch.from_numpy(array.copy()) for name, array in own.items()}
        values = {"turn": self._turn, "present": ",".join(self._present)}
        values |= {f"fact/{name}": value for name, value in self._facts.items()}
        return State({**state.tensors, **copies, **arrays}, {**state.values, **values})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = self._start(site)
        self._rounds.load_state(state)
        self._turn = int(state.values["turn"] or 0)
        self._present = [name for name in str(state.values["present"] or "").split(",") if name]
        self._facts = {
            name.removeprefix("fact/"): value for name, value in state.values.items() if name.startswith("fact/")
        }
        known = state.tensors["prototypes/known"].numpy().astype(bool)
        self._prototypes = ClassPrototypes(state.tensors["prototypes/values"].numpy().copy(), known)
        self._means = class_prototypes.from_tensors(
            {name: tensor.numpy() for name, tensor in _named(state, "means/").items()}
        )
        self._copies = {}
        for device in site.devices:
            own = _named(state, f"copy/{device}/")
            if own:
                self._copies[device] = self._rounds.w.copy()
                self._copies[device].load(own)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def _named(state: State, start: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in state.tensors.items() if name.startswith(start)}


def build(shipped: Shipped, settings: Settings) -> ShiftAwarePrototypes:
    """A strategy for one site."""
    return ShiftAwarePrototypes(shipped, settings)
