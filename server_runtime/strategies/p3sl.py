"""P3SL: personalised sequential split learning; every device has its own split, its own noise and its own client part.

algorithms.md section 3; decisions of 3.2 where the paper is silent. Symbols: W the whole model on the server, W^{1:s}
its first s layers, W_ci device i's client part, s_i its split, s_max the deepest that is chosen, T_sigma the noise
table, R the epochs between aggregations, A_ref, A_min and beta of the accuracy floor, (+) "and the rest from".

Decided here: a device says its split before each turn, so that it may change it when its energy, its heat or the noise
changed; an epoch in which a device is away goes on without it, and it begins again where it stands; the accuracy is
held against A_min once it has stopped rising. Eq. 1 overwrites layers that shallow devices train with; with
average_into "copy" the server trains on with its own, and the average is only judged, published, and where newcomers
begin. The device's choice is `edge_runtime.choose_split`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from contract.errors import TrainingError
from contract.messages import Settled

from ..aggregation import average
from ..evaluation import Evaluation
from ..noise_table import NoiseTable, accuracy_floor, is_saturated, reassigned
from ..plan import cut_of
from ..split_model import Shipped
from ..split_replies import answer
from ..split_rounds import LABEL_MODES, Lane, Link, PassedOver, Rounds, Talk
from . import Conduct, Metric, Record, Settings, Site, State

__all__ = ["LABEL_MODES", "P3SL", "build"]

JUDGED_IN = ("raw-label", "logit-gradient")  # label modes in which the server's logits are of classes it can name
WAKE_EARLY = 0.8  # of the time until a device's next turn


class P3SL:
    """One site's training, device by device."""

    def __init__(self, shipped: Shipped, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells how long turns take, and so for how long a device may sleep."""
        sigma = "table" if settings.sigma == "auto" else settings.sigma
        self._shipped, self._settings, self._clock = shipped, replace(settings, sigma=sigma), clock
        self._rounds: Rounds | None = None
        self._turn = 0  # devices of this epoch whose turn is over
        self._begun: set[str] = set()  # devices that hold a part
        self._passed: list[str] = []  # devices that were passed over in this epoch
        self._parts: dict[str, dict[str, np.ndarray]] = {}  # W_ci of this epoch, by W's names
        self._averaged: dict[str, np.ndarray] = {}  # what the newest average has in place of W's, where W keeps its own
        self._accuracies: list[float] = []  # of W, since the noise was assigned last
        self._turn_s: dict[str, float] = {}  # how long each device's last turn took

    def run(self, site: Site) -> Conduct:
        """Epoch by epoch, and in each device by device; every R epochs W^{1:s_max} <- mean_i W_ci (+) W.

        Raises:
            TrainingError: no device has an image, an answer does not fit, the loss explodes, or no noise and no split
                satisfies server and devices (infeasible).
        """
        rounds = self._rounds = self._rounds or self._begin(site)
        while rounds.epoch < self._settings.epochs:
            for link in list(rounds.links.values())[self._turn :]:
                yield from self._take_turn(rounds, link)
                self._turn, rounds.place = self._turn + 1, 0
            self._turn = 0
            if len(self._passed) == len(rounds.links):
                yield from rounds.choose(list(rounds.links.values()), "p3sl", 1)  # waits until someone is there
                self._passed = []
                continue
            values: dict[str, Metric] = {"passed_over": ",".join(self._passed) or None}
            values |= dict(rounds.end_round().values) | rounds.splits()
            if self._aggregates(rounds.epoch):
                values |= self._aggregate(rounds)
            self._passed = []
            yield Record(values)

    def _begin(self, site: Site) -> Rounds:
        rounds = Rounds(site, self._shipped, self._settings)
        rounds.passes_over = True
        return rounds

    def _aggregates(self, epoch: int) -> bool:
        return epoch % self._settings.aggregate_every == 0 or epoch == self._settings.epochs

    # -- a device's turn

    def _take_turn(self, rounds: Rounds, link: Link) -> Talk[None]:
        """s_i, an epoch of noisy batches, W_ci where it is time to aggregate, and a rest until the next turn."""
        began_s = self._clock()
        try:
            if rounds.place == 0:
                yield from self._stand(rounds, link)
            if link.samples:
                yield from rounds.local_epoch([Lane(rounds.w, [link])])
                yield from rounds.settle()
                if self._aggregates(rounds.epoch + 1):
                    self._parts |= yield from rounds.upload([link])
                rounds.count_usable()
            self._turn_s[link.device] = self._clock() - began_s
            yield from self._let_sleep(rounds, link)
        except PassedOver:
            rounds.pass_over(link)
            self._passed.append(link.device)

    def _stand(self, rounds: Rounds, link: Link) -> Talk[None]:
        """The device at its split: with W_ci, and W^{s_old+1:s_new} where it is deeper than before.

        All begin with the package's weights; one that comes later with those that W has by then.
        """
        chosen = yield from rounds.choose([link], "p3sl")
        cut = chosen[link.device]
        part = rounds.w.part(cut)
        if link.device in self._begun:
            part = {name: value for name, value in part.items() if name not in rounds.w.names_of(link.cut)}
        elif rounds.epoch == 0:
            part = {}
        else:
            part = {name: self._averaged.get(here, part[name]) for name, here in rounds.w.names_of(cut).items()}
        own = {link.device: {"cut": cut.index}}
        replies = yield from rounds.ask("take_turn", {link.device: part}, own, moves=True)
        link.samples, link.cut = answer(Settled, replies, link.device).samples, cut
        link.batch, link.gradient, link.residue = 0, None, None
        self._begun.add(link.device)

    def _let_sleep(self, rounds: Rounds, link: Link) -> Talk[None]:
        """Tell the device when it is needed next: after the others' turns, as long as they took last time."""
        others = [device for device in rounds.links if device != link.device]
        least_s, is_last = self._settings.sleep_least_s, rounds.epoch + 1 == self._settings.epochs
        if not least_s or is_last or not all(device in self._turn_s for device in others):
            return
        wake_s = WAKE_EARLY * sum(self._turn_s[device] for device in others)
        if wake_s >= least_s:
            yield from rounds.ask("sleep", {link.device: {}}, {link.device: {"wake_s": wake_s}})

    # -- the end of R epochs

    def _aggregate(self, rounds: Rounds) -> dict[str, Metric]:
        """Eq. 1, and what it is worth; the result goes to no device."""
        parts, w, judged = self._parts, rounds.w, self._shipped.evaluation
        own = w.floats() if self._settings.average_into == "copy" else None
        if parts:
            n = [rounds.links[device].samples or 0 if self._by_images else 1 for device in parts]
            w.put(average(w.floats(), list(parts.values()), n))
            if own is None:
                w.forget_moments(max((rounds.links[device].cut for device in parts), key=lambda cut: cut.index))
        if judged is not None and self._settings.norms == "public":
            w.retake_norms(judged.images)
        values: dict[str, Metric] = {"aggregated": len(parts)}
        accuracy = self._judge(rounds, judged)
        if own is not None:
            self._averaged = {name: each for name, each in w.floats().items() if not np.array_equal(each, own[name])}
            w.put(own)
        if judged is not None and accuracy is not None:
            values |= {"test_accuracy": accuracy}
            values |= {f"chain/{device}": w.accuracy(judged, part) for device, part in parts.items()}
            values |= self._hold_against_floor(rounds, accuracy)
        self._parts = {}
        return values

    def _judge(self, rounds: Rounds, judged: Evaluation | None) -> float | None:
        """W's accuracy; None where the server has nothing to judge it by.

        Raises: TrainingError for images of other classes.
        """
        if judged is None or self._settings.label_mode not in JUDGED_IN:
            return None
        if judged.classes != rounds.site.classes:
            found = f"{judged.classes} classes, and the site has {rounds.site.classes}"
            raise TrainingError(
                f"the model is judged by images of {found}", "give --public one folder for each of the site's classes"
            )
        return rounds.w.accuracy(judged)

    @property
    def _by_images(self) -> bool:
        return self._settings.average_by == "images"

    def _hold_against_floor(self, rounds: Rounds, accuracy: float) -> dict[str, Metric]:
        """Where A has stopped rising below A_min, Eq. 5 lowers the noise, and devices choose anew."""
        reference, noise = self._settings.reference_accuracy, rounds.noise
        if not reference:
            return {}
        floor = accuracy_floor(reference, self._settings.accuracy_loss)
        self._accuracies.append(accuracy)
        values: dict[str, Metric] = {"accuracy_floor": floor, "floor_reached": accuracy >= floor}
        if accuracy >= floor or not is_saturated(self._accuracies):
            return values
        if noise is None or noise.is_silent:
            raise TrainingError(
                f"infeasible: the accuracy has stopped rising at {accuracy:.3f}, below {floor:.3f} "
                f"(A_ref {reference:g}, beta {self._settings.accuracy_loss:g}), and no noise is left to take away",
                "lower --reference-accuracy or raise --accuracy-loss, or train longer at another --learning-rate",
            )
        rounds.noise, self._accuracies = reassigned(noise, accuracy, floor), []
        return values | {"noise_lowered": True}

    # -- going on after a stop

    def state(self) -> State:
        """W, its moments, where everyone stands, and the parts that wait to be averaged."""
        assert self._rounds is not None
        rounds = self._rounds
        state = rounds.state()
        noise = None if rounds.noise is None else [rounds.noise.splits, rounds.noise.sigma]
        cuts = {device: link.cut.index for device, link in rounds.links.items()}
        own = {
            "turn": self._turn, "begun": sorted(self._begun), "passed": self._passed, "accuracies": self._accuracies,
            "turn_s": self._turn_s, "noise": noise, "cuts": cuts,
        }  # fmt: skip
        parts = {
            f"part/{device}/{name}": torch.from_numpy(np.array(value))
            for device, part in self._parts.items()
            for name, value in part.items()
        }
        averaged = {name: torch.from_numpy(np.array(value)) for name, value in self._averaged.items()}
        kept = {f"own/{name}": state.tensors[name] for name in averaged}  # what training goes on with
        return State({**state.tensors, **averaged, **kept, **parts}, {**state.values, "p3sl": json.dumps(own)})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        rounds = self._rounds = self._begin(site)
        kept = {place.removeprefix("own/"): value for place, value in state.tensors.items() if place.startswith("own/")}
        self._averaged = {name: state.tensors[name].numpy().copy() for name in kept}
        rounds.load_state(State({**state.tensors, **kept}, state.values))
        own = json.loads(str(state.values["p3sl"]))
        self._turn, self._begun, self._passed = own["turn"], set(own["begun"]), own["passed"]
        self._accuracies, self._turn_s = own["accuracies"], own["turn_s"]
        rounds.noise = None if own["noise"] is None else NoiseTable(*map(tuple, own["noise"]))
        for device, index in own["cuts"].items():
            rounds.links[device].cut = cut_of(self._shipped.plan, index)
        self._parts = {}
        for place, tensor in state.tensors.items():
            if place.startswith("part/"):
                _, device, name = place.split("/", 2)
                self._parts.setdefault(device, {})[name] = tensor.numpy().copy()

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head: W_ci (+) W."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


def build(shipped: Shipped, settings: Settings) -> P3SL:
    """A strategy for one site."""
    return P3SL(shipped, settings)
