"""What the strategies of split training have in common: the questions of a step, a round's end, and where each device
stands.

Which devices train when, on which model, and what becomes of their parts is each strategy's own; the arithmetic is
`split_model`'s. A device's part moves by the gradient of its own mean loss, in parallel strategies too.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from contract.cut_gradient import WireGradient, write_gradient
from contract.epoch_order import batch_edges
from contract.errors import TrainingError
from contract.messages import Activations, Choice, Gradient, PatchFeatures, Prototypes, Settled, Update, tensors_of
from contract.training import TrainingCut

from .aggregation import is_usable, weighted_mean
from .backend import new_head
from .gates import fault_of, move_of, outliers
from .noise_table import first_table, offer_of
from .plan import cut_of, parse_cuts, parse_sigma
from .schedule import Schedule
from .split_model import OwnLoss, Pass, Shipped, SplitModel, own_loss
from .split_replies import Wanted, answer, check_activations, check_values
from .strategies import Ask, Metric, Progress, Record, Replies, Settings, Site, State, Tensors

LABEL_MODES = ("permuted-label", "raw-label", "logit-gradient", "client-head")
LABELS_HERE = ("permuted-label", "raw-label")  # modes in which labels come with the activations
VOID_STEPS = 20  # steps of an epoch without one usable gradient, after which training ends
VOID_ROUNDS = 3  # rounds in a row without one usable part
COUNT_BYTES = 4  # what the count beside a prototype is reckoned as
EXPLODED = 1e4  # times the first epoch's loss
_LEAST_LOSS = 1e-3  # a first loss below counts as this: nothing explodes from nearly nothing

Parameters = Mapping[str, float | int | str]
NOTHING: Parameters = {}
T = TypeVar("T")
Talk = Generator[Ask | Record | Progress, Replies | bool, T]  # a part of a strategy's run that gives T


class PassedOver(Exception):
    """A device that was asked is away; its turn goes to the next one."""


@dataclass
class Link:
    """One device's place in training. `batch` counts its forwards since the settled step; `gradient` is that of the
    last of them, which moves its part by `rate` with the next question."""

    device: str
    cut: TrainingCut
    samples: int | None = None  # its training images; None before it said so
    batch: int = 0
    rate: float = 0.0
    gradient: WireGradient | None = None
    residue: np.ndarray | None = None  # (n,), what int8 has rounded off so far


class Lane(NamedTuple):
    """A model on the server and the devices that train it together."""

    model: SplitModel
    links: Sequence[Link]


@dataclass
class Tally:
    """What an epoch adds up; plain numbers, so that a checkpoint can hold it."""

    loss: float = 0.0  # summed over rows
    correct: int = 0
    rows: int = 0
    bytes_up: int = 0  # of tensors at the cut and of parts
    bytes_down: int = 0
    void: int = 0  # steps without any usable gradient
    left_out: int = 0  # replies that could not be used
    lr: float = 0.0  # of the last step
    quarantined: str = ""  # "device: reason" of each part that was left out


class Rounds:
    """A site's training: its whole model W, its devices, and how far they are."""

    def __init__(self, site: Site, shipped: Shipped, settings: Settings, cut: TrainingCut | None = None) -> None:
        """`cut` is every device's where the strategy fixes it, else the operator chooses.

        Raises:
            ConfigError: a cut is chosen that the package has not, or noise of a leakage table that is not there.
        """
        self.site, self.settings, self._plan = site, settings, shipped.plan
        default, own = parse_cuts(settings.cuts)
        self.links = {
            device: Link(device, cut or cut_of(shipped.plan, own.get(device, default))) for device in site.devices
        }
        head = None
        if settings.label_mode != "client-head":
            head = new_head(shipped.width, site.classes, settings.seed, site.name, shipped.device)
        self.w = SplitModel(shipped, head)
        self.schedule = Schedule(settings.schedule, settings.learning_rate, settings.warmup, settings.epochs)
        splits, wanted = [each.index for each in shipped.plan.cuts if each.loss == "none"], parse_sigma(settings.sigma)
        self.noise, self.privacy = first_table(wanted, splits, shipped.leakage, settings.fsim_threshold)
        self.passes_over = False  # whether a device that is away is passed over; else it is waited for
        self.epoch = 0  # epochs that are over
        self.place = 0  # batches of the round or turn that are over
        self._is_shipped = True  # W's client layers are still those of the package
        self.tally = Tally()
        self._step = 0  # number of the last question that moved parts
        self._count = 0  # forward questions
        self._usable = 0  # parts of this round
        self._void_rounds = 0
        self._first_loss: float | None = None

    @property
    def with_images(self) -> list[Link]:
        """Devices that have something to train on, as far as is known."""
        return [link for link in self.links.values() if link.samples != 0]

    def pick(self, fraction: float) -> list[Link]:
        """The devices of a round: so large a share of those with images, one at least, drawn for each round anew."""
        links = self.with_images
        count = max(1, round(fraction * len(links)))
        if count >= len(links):
            return links
        drawn = np.random.default_rng([self.settings.seed, self.epoch, 1]).permutation(len(links))[:count]
        return [links[place] for place in sorted(drawn)]

    def splits(self) -> dict[str, Metric]:
        """Each device's split, its noise, and what leaks with and without (None: unknown), for a record."""
        values: dict[str, Metric] = {}
        shown: list[float | None] = []
        for device, link in self.links.items():
            split, privacy = link.cut.index, self.privacy
            if privacy is None or split not in privacy.splits:
                sigma = None if self.noise is None or privacy is not None else self.noise.of(split)
                values |= {f"split/{device}": split, f"sigma/{device}": sigma}
                shown.append(None)
                continue
            sigma = 0.0 if self.noise is None else self.noise.of(split)
            shown.append(privacy.at(split, sigma))
            values |= {f"split/{device}": split, f"sigma/{device}": sigma}
            values |= {f"fsim_clean/{device}": privacy.at(split, 0.0), f"fsim/{device}": shown[-1]}
        known = [each for each in shown if each is not None]
        return values | {"fsim_total": sum(known) if len(known) == len(shown) else None}

    def count_usable(self) -> None:
        """A device gave something that this round can use."""
        self._usable += 1

    def quarantine(self, device: str, reason: str) -> None:
        """What a device gave is left out, and the reason noted."""
        self.tally.quarantined = "; ".join(filter(None, [self.tally.quarantined, f"{device}: {reason}"]))

    def keep_usual(self, parts: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
        """The parts without those that moved much further from W than the others."""
        w = self.w.floats()
        moves = {device: move_of(part, w) for device, part in parts.items()}
        for device, reason in outliers(moves, self.settings.outlier).items():
            self.quarantine(device, reason)
            self._usable -= 1
            del parts[device]
        return parts

    @property
    def steps(self) -> int:
        """Number of the last question that moved parts."""
        return self._step

    # -- questions

    def load(self, links: Sequence[Link]) -> Talk[None]:
        """Hand out W's client parts, with a fresh optimiser on the device; learn how many images there are."""
        parts: dict[str, Tensors] = {link.device: {} if self._is_shipped else self.w.part(link.cut) for link in links}
        own = {link.device: {"cut": link.cut.index} for link in links}
        replies = yield from self.ask("load_part", parts, own, moves=True)
        for link in links:
            link.samples = answer(Settled, replies, link.device).samples
            link.batch, link.gradient = 0, None

    def local_epoch(self, lanes: Sequence[Lane]) -> Talk[None]:
        """The rest of an epoch of every device, in lockstep; who has fewer batches is done earlier."""
        sizes = {
            link.device: [last - first for first, last in batch_edges(link.samples or 0, self.settings.batch)]
            for lane in lanes
            for link in lane.links
        }
        longest = max(map(len, sizes.values()), default=0)
        while self.place < longest:
            here = [
                Lane(model, still)
                for model, links in lanes
                if (still := [link for link in links if len(sizes[link.device]) > self.place])
            ]
            rows = {link.device: sizes[link.device][self.place] for lane in here for link in lane.links}
            yield from self._train_batch(here, rows, self.schedule.at(self.epoch + self.place / longest, 1 / longest))
            self.place += 1
            due = yield Progress(f"training, epoch {self.epoch + 1} of {self.settings.epochs}", self._count)
            if due is True:
                yield from self.settle()
                yield Record({})

    def choose(self, links: Sequence[Link], rule: str, quorum: int | None = None) -> Talk[dict[str, TrainingCut]]:
        """The splits that devices choose by their own tables, for the noise that each would have.

        Raises:
            TrainingError: a device accepts none, or one that was not offered.
        """
        numbers: Parameters = {"rule": rule, "round": self.epoch + 1}
        offer = offer_of(self.noise, self.privacy, [cut.index for cut in self._plan.cuts if cut.loss == "none"])
        replies = yield from self.ask(
            "choose_split", {each.device: offer for each in links}, {}, numbers, quorum=quorum
        )
        chosen = {}
        for device in replies:
            split = answer(Choice, replies, device).split
            if split == 0:
                raise TrainingError(
                    f"infeasible: {device} accepts none of the splits under the noise that they have",
                    "look at the device's log: its power cap, its sigma_floor or its energy table rules them out",
                )
            if split not in offer["splits"]:
                raise TrainingError(f"{device}: split {split} was not offered", "update the device's software")
            chosen[device] = cut_of(self._plan, split)
        return chosen

    def settle(self) -> Talk[None]:
        """Every device that has an open batch applies its gradient and is durable."""
        links = [link for link in self.links.values() if link.batch > 0]
        if not links:
            return
        own = {link.device: {"batch": link.batch, "rate": link.rate} for link in links}
        replies = yield from self.ask("settle", {link.device: _sent(link) for link in links}, own, moves=True)
        for link in links:
            answer(Settled, replies, link.device)
            link.batch, link.gradient = 0, None

    def pass_over(self, link: Link) -> None:
        """A device went away in its turn: what it did not settle is gone."""
        link.batch, link.gradient, self.place = 0, None, 0

    def hand_out(self) -> Talk[None]:
        """Give every device the client part of the finished W, so that it predicts with what was trained."""
        yield Progress("handing out the trained parts", self._count)
        yield from self.load(list(self.links.values()))

    def upload(self, links: Sequence[Link]) -> Talk[dict[str, dict[str, np.ndarray]]]:
        """Client parts of the devices, by W's names; a part that does not pass the gates is left out and noted."""
        replies = yield from self.ask("upload_part", {link.device: {} for link in links}, {})
        parts = {link.device: self.take_part(answer(Update, replies, link.device), link) for link in links}
        self._is_shipped = False
        return self.keep_usual({device: part for device, part in parts.items() if part is not None})

    def take_part(self, update: Update, link: Link) -> dict[str, np.ndarray] | None:
        """An update's tensors by W's names; None, and a note, where they are not those of the device's client part, or
        not finite."""
        fault = fault_of(update.tensors, self.w.part(link.cut))
        if fault is not None:
            self.quarantine(link.device, fault)
            return None
        self._usable += 1
        return {here: update.tensors[name] for name, here in self.w.names_of(link.cut).items()}

    def require_images(self) -> None:
        """Raises TrainingError when no device has an image."""
        if not self.with_images:
            raise TrainingError(f"site {self.site.name!r} has no sample", "add images to at least one of its devices")

    def end_round(self, epochs: int = 1) -> Record:
        """The line of the epochs that just ended.

        Raises:
            TrainingError: the loss exploded, or no part was usable for `VOID_ROUNDS` rounds.
        """
        self.require_images()
        self._void_rounds = 0 if self._usable else self._void_rounds + 1
        self._usable = 0
        if self._void_rounds >= VOID_ROUNDS:
            raise TrainingError(
                f"{self._void_rounds} rounds in a row had no usable part of the model from any device"
                + (f"; left out: {self.tally.quarantined}" if self.tally.quarantined else ""),
                f"lower --learning-rate ({self.settings.learning_rate:g}) and start a new run",
            )
        self.epoch, self.place = self.epoch + epochs, 0
        return self._close()

    def ask(
        self, kind: str, tensors: Mapping[str, Tensors], own: Mapping[str, Parameters], common: Parameters = NOTHING,
        *, moves: bool = False, quorum: int | None = None,
    ) -> Talk[Replies]:  # fmt: skip
        """Ask, and count the tensors' bytes both ways.

        The name says where training is, so that after a stop, or a step back, it never stands for two questions.

        Raises:
            PassedOver: a device is away, where such are passed over.
        """
        self._step += moves
        self._count += kind in _COUNTED
        quorum = 0 if self.passes_over and quorum is None else quorum
        name = f"{kind.partition('_')[0]}-{self._count}-{self._step}"
        replies = yield Ask(name, kind, tensors, common, self._step if moves else None, quorum, own)
        assert not isinstance(replies, bool)
        self._count_bytes(tensors, replies)
        if quorum == 0 and replies.keys() != tensors.keys():
            raise PassedOver
        return replies

    def _count_bytes(self, asked: Mapping[str, Tensors], replies: Replies) -> None:
        self.tally.bytes_down += sum(each.nbytes for tensors in asked.values() for each in tensors.values())
        for reply in replies.values():
            if isinstance(reply, Update):
                self.tally.bytes_up += sum(each.nbytes for each in reply.tensors.values())
            elif isinstance(reply, Activations):
                self.tally.bytes_up += reply.values.nbytes + (0 if reply.labels is None else reply.labels.nbytes)
            elif isinstance(reply, Gradient):
                self.tally.bytes_up += reply.gradient.nbytes
            elif isinstance(reply, PatchFeatures):
                self.tally.bytes_up += sum(each.nbytes for each in tensors_of(reply).values())
            elif isinstance(reply, Prototypes) and reply.values is not None:
                self.tally.bytes_up += reply.values.nbytes + COUNT_BYTES * len(reply.counts)

    # -- one batch

    def _train_batch(self, lanes: Sequence[Lane], rows: Mapping[str, int], rate: float) -> Talk[None]:
        """z -> W^{s+1:} -> loss where the labels are -> one step of each model -> d/dz, which waits for the device."""
        links = [link for lane in lanes for link in lane.links]
        answers = yield from self._forward(links, rows, rate)
        passes = [(model, _passes(model, members, answers)) for model, members in lanes]
        outputs: dict[str, torch.Tensor] = {}
        for _, each in passes:
            for one in each:
                outputs |= one.pieces(one.outputs)
        if self.settings.label_mode in LABELS_HERE:
            losses = self._judge(outputs, answers)
        else:
            losses = yield from self._ask_losses(outputs)
        for loss in losses.values():
            self.add(loss.mean_loss, loss.correct, loss.count)
        self._note_step(void=not losses)
        gradients = {device: loss.gradient for device, loss in losses.items()}
        returned: dict[str, np.ndarray] = {}
        for model, each in passes:
            returned |= model.descend(each, gradients, rate)
        for link in links:
            self._keep_gradient(link, returned.get(link.device), rows[link.device])

    def _keep_gradient(self, link: Link, gradient: np.ndarray | None, rows: int) -> None:
        """What moves the device's part with the next question: d/dz (B,n) of the batch that waits there."""
        if gradient is None:  # its loss could not be used: a step of no length, which moves no weight
            link.rate = 0.0
            nothing = np.zeros((rows, link.cut.output_size), np.float32)
            link.gradient, _ = write_gradient(nothing, self._plan.gradient)
        elif not np.isfinite(gradient).all():
            raise self._diverged(f"the gradient for {link.device} is not finite")
        else:
            link.gradient, link.residue = write_gradient(gradient, self._plan.gradient, link.residue)

    def _forward(self, links: Sequence[Link], rows: Mapping[str, int], rate: float) -> Talk[dict[str, Activations]]:
        self.tally.lr = rate
        s = self.settings
        own: dict[str, dict[str, float | int | str]] = {
            link.device: {"batch": link.batch, "rate": link.rate if link.batch else rate} for link in links
        }
        common = {"epoch": self.epoch + 1, "place": self.place, "size": s.batch, "seed": s.seed}
        tensors = {link.device: _sent(link) for link in links}
        kind = "forward"
        if self.noise is not None:
            kind = "noisy_forward"
            for link in links:
                own[link.device]["sigma"] = self.noise.of(link.cut.index)
        replies = yield from self.ask(kind, tensors, own, common)
        answers = {}
        for link in links:
            link.batch, link.rate = link.batch + 1, rate
            answers[link.device] = answer(Activations, replies, link.device)
            check_activations(link.device, answers[link.device], self._wanted(link, rows[link.device]))
        return answers

    def _wanted(self, link: Link, rows: int) -> Wanted:
        classes = self.site.classes if self.settings.label_mode in LABELS_HERE else None
        return Wanted(rows, link.cut, link.samples or 0, classes, self.settings.label_mode)

    def _judge(self, outputs: Mapping[str, torch.Tensor], answers: Mapping[str, Activations]) -> dict[str, OwnLoss]:
        losses = {}
        for device, logits in outputs.items():
            labels = answers[device].labels
            assert labels is not None  # checked
            losses[device] = own_loss(logits, labels)
            if not math.isfinite(losses[device].mean_loss):
                raise self._diverged(f"the loss is {losses[device].mean_loss}")
        return losses

    def _ask_losses(self, outputs: Mapping[str, torch.Tensor]) -> Talk[dict[str, OwnLoss]]:
        """Each device turns its outputs into the gradient of its own mean loss; what does not fit is left out."""
        sent = {device: {"values": values.detach().cpu().numpy()} for device, values in outputs.items()}
        if not all(np.isfinite(each["values"]).all() for each in sent.values()):
            raise self._diverged("the outputs are not finite")
        own = {device: {"batch": self.links[device].batch - 1} for device in outputs}  # the one that waits
        replies = yield from self.ask("batch_loss", sent, own)
        usable = {
            device: OwnLoss(reply.mean_loss, reply.correct, reply.count, reply.gradient)
            for device, reply in replies.items()
            if isinstance(reply, Gradient) and is_usable(reply, *outputs[device].shape)
        }
        self.tally.left_out += len(outputs) - len(usable)
        return usable

    def add(self, mean_loss: float, correct: int, rows: int) -> None:
        """Count what a device's rows cost."""
        self.tally.loss += mean_loss * rows
        self.tally.correct += correct
        self.tally.rows += rows

    def _note_step(self, void: bool) -> None:
        self.tally.void += void
        if self.tally.void >= VOID_STEPS:
            raise TrainingError(
                f"{self.tally.void} steps of an epoch had no usable gradient from any device",
                "update the devices' software: their answers do not fit the questions",
            )

    def _close(self) -> Record:
        """Means over nothing are absent (SE-01)."""
        tally, self.tally = self.tally, Tally()
        loss = weighted_mean([tally.loss / max(tally.rows, 1)], [tally.rows])
        accuracy = weighted_mean([tally.correct / max(tally.rows, 1)], [tally.rows])
        if loss is not None:
            self._first_loss = loss if self._first_loss is None else self._first_loss
            if not loss <= EXPLODED * max(self._first_loss, _LEAST_LOSS):
                found = f"the loss is {loss:.3g}, more than {EXPLODED:g} times the first epoch's"
                raise self._diverged(found, self.epoch)
        samples = sum(link.samples or 0 for link in self.links.values())
        values: dict[str, Metric] = {"epoch": self.epoch, "loss": loss, "accuracy": accuracy, "samples": samples}
        return Record(
            values
            | {"rows": tally.rows, "bytes_up": tally.bytes_up, "bytes_down": tally.bytes_down, "lr": tally.lr}
            | {"void_steps": tally.void, "unusable_replies": tally.left_out, "quarantined": tally.quarantined or None}
        )

    def _diverged(self, found: str, epoch: int | None = None) -> TrainingError:
        return TrainingError(
            f"training broke in epoch {epoch or self.epoch + 1}: {found}",
            f"lower --learning-rate ({self.settings.learning_rate:g}), or raise --warmup, and start a new run",
        )

    # -- going on after a stop

    def state(self) -> State:
        """W, its moments, and where everyone stands; whole when every device is settled."""
        values: dict[str, Metric] = {name: getattr(self, name) for name in _COUNTERS}
        values |= {f"tally/{each.name}": getattr(self.tally, each.name) for each in fields(Tally)}
        values |= {f"samples/{link.device}": link.samples for link in self.links.values()}
        residues = {
            f"residue/{link.device}": torch.from_numpy(link.residue.copy())
            for link in self.links.values()
            if link.residue is not None
        }
        return State({**self.w.weights(), **self.w.moments(), **residues}, values)

    def load_state(self, state: State) -> None:
        """The inverse of `state`."""
        self.w.load(state.tensors)
        for name in _COUNTERS:
            setattr(self, name, state.values[name])
        self.tally = Tally(**{each.name: state.values[f"tally/{each.name}"] for each in fields(Tally)})  # type: ignore[arg-type]
        for link in self.links.values():
            samples = state.values.get(f"samples/{link.device}")
            link.samples = None if samples is None else int(samples)
            residue = state.tensors.get(f"residue/{link.device}")
            link.residue = None if residue is None else residue.numpy().copy()

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Values (B,n) of a device's part -> logits (B,C), or features (B,f) for its own head.

        Raises:
            TrainingError: they are not as wide as its cut.
        """
        cut = self.links[device].cut
        check_values(device, values, (len(values), cut.evaluated_size), cut)
        return self.w.predict_part(cut, values)


_COUNTED = ("forward", "noisy_forward", "local_round", "choose_split")
_COUNTERS = ("epoch", "place", "_is_shipped", "_step", "_count", "_usable", "_void_rounds", "_first_loss")


def _passes(model: SplitModel, links: Sequence[Link], answers: Mapping[str, Activations]) -> list[Pass]:
    """Devices of one cut go through the backend in one batch."""
    cuts = {link.cut.index: link.cut for link in links}
    return [
        model.outputs(cut, {link.device: answers[link.device].values for link in links if link.cut is cut})
        for _, cut in sorted(cuts.items())
    ]


def _sent(link: Link) -> dict[str, np.ndarray]:
    """A waiting gradient as it travels."""
    if link.gradient is None:
        return {}
    scales = {} if link.gradient.scales is None else {"scales": link.gradient.scales}
    return {"gradient": link.gradient.values} | scales
