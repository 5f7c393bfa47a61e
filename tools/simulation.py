"""One site's run in one process: a strategy's questions go to real device workers, their messages back as the store
joins them, without a socket between. What conductor, store and client add (waiting, journal, restarts) is left out.

Whichever engine the workers run on, the strategy, the noise, the labels and the messages are the product's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contract.asks import ASK_KINDS
from contract.errors import TrainingError
from contract.messages import (
    Activations,
    Choice,
    Features,
    Gradient,
    Message,
    PatchFeatures,
    Prototypes,
    Settled,
    Update,
    Welcome,
)
from contract.messages import Ask as AskMessage
from contract.tokens import sent_layout
from edge_runtime.predictions import accuracy, predict
from edge_runtime.terms import check_ask, check_welcome
from edge_runtime.worker import Upload as Release
from server_runtime.acceptance import Expected, check_features
from server_runtime.store import Upload
from server_runtime.strategies import Ask, Metric, PartStrategy, Record, Reply, Site, Strategy
from tools.torch_worker import Device, PartDevice

FRAME_BYTES = 1 << 20  # as the server's
PREDICTED_AT_ONCE = 256
Devices = Mapping[str, Device] | Mapping[str, PartDevice]


@dataclass(frozen=True)
class Terms:
    """What the server says in its welcome."""

    run: str
    site: str
    strategy: str
    label_mode: str
    kappa: float
    seed: int

    def welcome(self, device: Device | PartDevice) -> Welcome:
        """The welcome of one device. Raises: RefusedError when the device does not agree."""
        terms = device.terms
        welcome = Welcome(
            session="simulated", run=self.run, site=self.site, strategy=self.strategy, label_mode=self.label_mode,
            class_count=terms.class_count, class_list_hash=None, package_digest=terms.package_digest,
            kappa=self.kappa, seed=self.seed, credit=1, heartbeat_s=60.0, last_seq=0,
        )  # fmt: skip
        check_welcome(welcome, terms)
        return welcome


class Answers:
    """The devices' side: one question in, every asked device's reply out."""

    def __init__(self, devices: Devices, terms: Terms) -> None:
        self.uploads: dict[str, Upload] = {}  # the training features that each device sent
        self._devices, self._terms = devices, terms
        self._positions: dict[str, int] = {}  # device -> the last step that moved its part of the model
        self._base: dict[str, int] = {}  # the same at the newest checkpoint
        for device in devices.values():
            terms.welcome(device)

    def answer(self, ask: Ask) -> dict[str, Reply]:
        """Replies in the order of asking. Raises: RefusedError, RemoteProtocolError, DeviceError."""
        return {name: self._answer_one(name, ask) for name in ask.tensors}

    def _answer_one(self, name: str, ask: Ask) -> Reply:
        device, parameters = self._devices[name], self._parameters(name, ask)
        question = AskMessage(f"{self._terms.run}.{ask.name}", ask.kind, parameters, 120.0, dict(ask.tensors[name]))
        check_ask(question, device.terms)
        kappa = float(parameters.get("kappa", self._terms.kappa))
        release = Release(question.ask, "train", kappa, FRAME_BYTES)
        messages = list(device.worker.answer(question, self._terms.run, release))
        if ask.step is not None:
            self._positions[name] = ask.step
        if ask.kind == "collect_features":
            self.uploads[name] = self._join(device, messages)
            return self.uploads[name]
        (reply,) = messages
        if not isinstance(reply, Gradient | Settled | Choice | Activations | Update | PatchFeatures | Prototypes):
            raise TrainingError(f"{name} answered {ask.name} with {reply.TYPE}", "start with an empty device state")
        return reply

    def _parameters(self, name: str, ask: Ask) -> dict[str, int | float | str]:
        """With the three numbers of steps that the server's conductor adds, where this kind of question has them."""
        known = ASK_KINDS[ask.kind].parameters
        steps = {"step": ask.step, "after": self._positions.get(name, 0), "base": self._base.get(name, 0)}
        numbers = {which: number for which, number in steps.items() if which in known and number is not None}
        return {**ask.parameters, **ask.own.get(name, {}), **numbers}

    def note_checkpoint(self) -> None:
        """The server could go back to here."""
        self._base = dict(self._positions)

    def _join(self, device: Device | PartDevice, messages: Iterable[Message]) -> Upload:
        """One upload of a device's batches, in the device's order."""
        batches = sorted((each for each in messages if isinstance(each, Features)), key=lambda each: each.batch)
        terms, cut = device.terms, device.installed.cut
        layout = sent_layout(cut.tokens, cut.sent.kept)
        for batch in batches:
            check_features(batch, Expected(layout, self._terms.label_mode), terms.class_count, "adapt")
        optional = {
            name: np.concatenate([getattr(each, name) for each in batches])
            for name in ("sources", "labels")
            if getattr(batches[0], name) is not None
        }
        return Upload(
            device.name,
            np.concatenate([each.sample_ids for each in batches]),
            np.concatenate([each.codes for each in batches]),
            optional.get("sources"),
            optional.get("labels"),
        )


class Answering(Protocol):
    """Whoever answers a strategy's questions: devices, or uploads that are there already."""

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        """Every asked device's reply."""
        ...

    def note_checkpoint(self) -> None:
        """The server could go back to here."""
        ...


def adapt(
    strategy: Strategy | PartStrategy, answers: Answering, site: Site,
    on_record: Callable[[Mapping[str, Metric]], None] | None = None,
) -> dict[str, Metric]:  # fmt: skip
    """Run the strategy to its end; its last record. `on_record` is told each, when the strategy's state is whole.

    Raises: TrainingError, and what the devices raise.
    """
    conduct = strategy.run(site)
    last: dict[str, Metric] = {}
    step = next(conduct)
    while True:
        replies: Mapping[str, Reply] = {}
        if isinstance(step, Ask):
            replies = answers.answer(step)
        elif isinstance(step, Record):
            last = dict(step.values)
            answers.note_checkpoint()
            if on_record is not None:
                on_record(last)
        try:
            step = conduct.send(replies)
        except StopIteration:
            return last


def release_for_prediction(device: Device, terms: Terms) -> NDArray[np.int8]:
    """Wire codes (n, T, d) of all the device's images, in its own order, as it sends them to be predicted."""
    terms.welcome(device)
    release = Release("infer-simulated", "infer", terms.kappa, FRAME_BYTES)
    return np.concatenate([message.codes for message in device.worker.infer(release)])


def accuracy_of(strategy: Strategy, device: Device, codes: NDArray[np.int8], run: str) -> float:
    """Share of the device's labelled images whose class the device reads from the server's scores."""
    scores = {
        place: strategy.predict(codes[start : start + PREDICTED_AT_ONCE])
        for place, start in enumerate(range(0, len(codes), PREDICTED_AT_ONCE))
    }
    head = device.keeper.head_of(run) if device.terms.label_mode == "client-head" else None
    dataset = device.bench.dataset
    share = accuracy(predict(scores, dataset, device.bench.wire_labels, head), dataset)
    if share is None:
        raise TrainingError(f"{device.name} has no labelled image to predict", "put test images into class folders")
    return share


def part_accuracy(strategy: PartStrategy, device: PartDevice, run: str) -> float:
    """The same for a device that sends activations of its trained part, as it stood last in the run.

    Raises: ConfigError when it has no part of that run.
    """
    release = Release("infer-simulated", "infer", 0.0, FRAME_BYTES, run=run)
    scores = {
        message.batch: strategy.predict_part(device.name, message.values) for message in device.worker.infer(release)
    }
    share = accuracy(predict(scores, device.dataset, device.wire_labels, device.head_of(run)), device.dataset)
    if share is None:
        raise TrainingError(f"{device.name} has no labelled image to predict", "put test images into class folders")
    return share
