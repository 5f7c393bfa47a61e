"""Rounds of devices that each have a head of their own, and a part of the model of their own: EEFT and its baselines.

What becomes of the parts is each strategy's `combine`; the server has no data and runs no model. Devices need not have
the same classes, and one that joins late starts from the package's part. Shapes are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from contract.errors import PackageError, TrainingError, why
from contract.messages import Update
from contract.training import TrainingCut

from .aggregation import weighted_mean
from .backend_folder import TrainingFolder
from .gates import fault_of, move_of, outliers
from .schedule import Schedule
from .split_replies import answer
from .strategies import Ask, Conduct, Metric, Progress, Record, Settings, Site, State

LABEL_MODES = ("client-head",)
EXPLODED = 1e4  # times the first round's loss
VOID_ROUNDS = 3  # rounds in a row without one usable part

Part = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Released:
    """What is trained of a model that devices hold whole: its one cut, and the tensors that travel, as exported."""

    cut: TrainingCut
    initial: Part


def load(folder: TrainingFolder) -> Released:
    """Raises: PackageError where the folder's weights are not those of its training.json."""
    (cut,) = (cut for cut in folder.training.cuts if cut.loss == "own-head")
    path = folder.root / "model.safetensors"
    try:
        return Released(cut, _read(path, (*cut.trainable, *cut.buffers)))
    except (SafetensorError, OSError) as error:
        raise PackageError(
            f"{path} has not the tensors of cut {cut.index}: {why(error, path)}", "export again"
        ) from error


def _read(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    with safe_open(str(path), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in names}


@dataclass
class Member:
    """A device, the part that it gets next (None: the package's own), and what it trained."""

    device: str
    part: Part | None = None
    samples: int = 0
    rounds: int = 0  # that it answered


@dataclass
class Answered:
    """What a round gave: parts as the devices trained them, and the bytes of tensors both ways."""

    parts: dict[str, Part] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float = 0.0
    correct: int = 0
    rows: int = 0
    quarantined: list[str] = field(default_factory=list)


# Sets the parts that members get next from those that they trained; what it found is added to the round's line.
Combine = Callable[["OwnHeads", Answered], Mapping[str, Metric]]


class OwnHeads:
    """One site's rounds; a site's devices may have different class lists."""

    def __init__(self, released: Released, settings: Settings, combine: Combine) -> None:
        self.released, self.settings, self._combine = released, settings, combine
        self.members: dict[str, Member] = {}
        self.epoch = 0
        self._schedule = Schedule(settings.schedule, settings.learning_rate, settings.warmup, settings.epochs)
        self._step = 0  # number of the last question that moved parts
        self._count = 0  # rounds that were asked for
        self._void = 0
        self._first_loss: float | None = None

    def part_of(self, device: str) -> Part:
        """What a device gets next."""
        part = self.members[device].part
        return self.released.initial if part is None else part

    def run(self, site: Site) -> Conduct:
        """Each round: every device trains its own part for E local epochs; then `combine`.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        self._enrol(site)
        while self.epoch < self.settings.epochs:
            epochs = min(self.settings.local_epochs, self.settings.epochs - self.epoch)
            yield Progress(f"training, epoch {self.epoch + 1} of {self.settings.epochs}", self._count)
            rate = self._schedule.at(self.epoch, 1)
            answered = yield from self._train(epochs, rate)
            found = self._combine(self, answered) if answered.parts else {}
            self.epoch += epochs
            yield self._line(answered, rate, found)
        yield from self._hand_out()

    def _enrol(self, site: Site) -> None:
        for device in site.devices:
            self.members.setdefault(device, Member(device))

    def _train(self, epochs: int, rate: float):  # type: ignore[no-untyped-def]  # a generator that gives Answered
        s, cut = self.settings, self.released.cut
        asked = {m.device: {} if m.part is None else m.part for m in self.members.values()}
        numbers = {"cut": cut.index, "epoch": self.epoch + 1, "epochs": epochs, "size": s.batch, "seed": s.seed}
        quorum = min(s.quorum, len(asked)) or None
        self._count += 1
        replies = yield Ask(
            f"local-{self._count}-{self._step}", "local_round", asked, numbers | {"rate": rate}, None, quorum
        )
        result = Answered(bytes_down=sum(_bytes(part) for part in asked.values()))
        for member in self.members.values():
            if quorum is None or member.device in replies:
                self._take(member, answer(Update, replies, member.device), result)
        self._keep_usual(result)
        return result

    def _keep_usual(self, result: Answered) -> None:
        """Leave out the parts that moved much further than the others."""
        moves = {device: move_of(part, self.part_of(device)) for device, part in result.parts.items()}
        for device, reason in outliers(moves, self.settings.outlier).items():
            result.quarantined.append(f"{device}: {reason}")
            del result.parts[device]

    def _take(self, member: Member, update: Update, result: Answered) -> None:
        member.samples = update.samples
        result.bytes_up += _bytes(update.tensors)
        if not update.count:
            return
        fault = fault_of(update.tensors, self.released.initial)
        if fault is not None:
            result.quarantined.append(f"{member.device}: {fault}")
            return
        member.rounds += 1
        result.parts[member.device] = update.tensors
        result.loss += update.mean_loss * update.count
        result.correct += update.correct
        result.rows += update.count

    def _line(self, answered: Answered, rate: float, found: Mapping[str, Metric]) -> Record:
        rows = answered.rows
        self._void = 0 if answered.parts else self._void + 1
        if self._void >= VOID_ROUNDS:
            raise self._broken(
                f"{self._void} rounds in a row had no usable part from any device"
                + (f"; left out: {'; '.join(answered.quarantined)}" if answered.quarantined else "")
            )
        loss = weighted_mean([answered.loss / max(rows, 1)], [rows])
        if loss is not None:
            self._first_loss = loss if self._first_loss is None else self._first_loss
            if not loss <= EXPLODED * max(self._first_loss, 1e-3):
                raise self._broken(f"the loss is {loss:.3g}, {EXPLODED:g} times the first round's")
        values: dict[str, Metric] = {
            "epoch": self.epoch, "loss": loss, "accuracy": weighted_mean([answered.correct / max(rows, 1)], [rows]),
            "samples": sum(member.samples for member in self.members.values()), "rows": rows, "lr": rate,
            "devices": len(answered.parts), "bytes_up": answered.bytes_up, "bytes_down": answered.bytes_down,
            "quarantined": "; ".join(answered.quarantined) or None,
        }  # fmt: skip
        return Record({**values, **found})

    def _broken(self, found: str) -> TrainingError:
        return TrainingError(
            f"training broke in epoch {self.epoch}: {found}",
            f"lower --learning-rate ({self.settings.learning_rate:g}), add images, and start a new run",
        )

    def _hand_out(self):  # type: ignore[no-untyped-def]
        """Every device gets its part, to predict with; who is away does not hold up those that are enough."""
        parts = {device: self.part_of(device) for device in self.members}
        quorum = min(self.settings.quorum, len(parts)) or None
        yield Ask(f"load-{self._count}-{self._step}", "load_part", parts, self._numbers, None, quorum)

    @property
    def _numbers(self) -> dict[str, int]:
        return {"cut": self.released.cut.index, "step": self.epoch}

    def last_part(self, device: str) -> Ask:
        """Its part for a device that was away when they were handed out."""
        return Ask(f"last-{device}", "load_part", {device: self.part_of(device)}, self._numbers)

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Features (B, f) for the device's own head: its part is the whole model, and these are they."""
        return values.astype(np.float32)

    # -- going on after a stop; every moment between two rounds is whole

    def state(self) -> State:
        """Each device's part, as `backend.<device>.<name>`, and how far all are."""
        tensors = {
            f"backend.{member.device}.{name}": torch.from_numpy(np.array(array))
            for member in self.members.values()
            for name, array in (member.part or {}).items()
        }
        values: dict[str, Metric] = {"epoch": self.epoch, "count": self._count, "void": self._void}
        values["first_loss"] = self._first_loss
        for member in self.members.values():
            values[f"rounds/{member.device}"] = member.rounds
            values[f"samples/{member.device}"] = member.samples
        return State(tensors, values)

    def load(self, site: Site, state: State) -> None:
        """The inverse of `state`."""
        self._enrol(site)
        known = state.values
        self.epoch, self._count, self._void = (int(known[name] or 0) for name in ("epoch", "count", "void"))
        first = known["first_loss"]
        self._first_loss = None if first is None else float(first)
        for member in self.members.values():
            member.rounds = int(known.get(f"rounds/{member.device}") or 0)
            member.samples = int(known.get(f"samples/{member.device}") or 0)
            part = {
                name: state.tensors[f"backend.{member.device}.{name}"].numpy().copy()
                for name in self.released.initial
                if f"backend.{member.device}.{name}" in state.tensors
            }
            member.part = part or None


def _bytes(part: Part) -> int:
    return sum(array.nbytes for array in part.values())
