"""The device's part of the model in split training, and what it answers to the server's asks about it.

The part stands at a numbered *settled* step, which is on the disk: weights, optimiser, and in client-head mode the
head. From there batches go one at a time:

    forward  batch 0         the part's output on a batch of this device's own images
    forward  batch 1, ...    first moves the part by the gradient of the batch before, then as above
    settle                   moves the part by the last gradient, and is durable under the next number

Between two settled steps nothing is written: a device that is killed says at which steps its disk holds the part, and
the server goes back with all devices to one of them. It keeps its newest step and those of the server's last two
checkpoints (wire.md, resume rule).

With noise at the cut (`noisy_forward`, P3SL) the server gets the noisy values, and its gradient with respect to them
goes back through the clean ones. `take_turn` begins wherever the part stands, at the split that the device chose: it
never asks the server to go back.

In a local round the device trains the whole part by itself; where the head is its own, the head goes on from the round
before and never leaves the device. Running graphs is left to `trainer`, what a batch consists
of to `training_set`, whether the label mode allows an ask to `terms`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contract.cut_gradient import WireGradient, read_gradient
from contract.errors import RemoteProtocolError, TrainingError
from contract.messages import Activations, Ask, Checkpoints, Choice, Gradient, Message, Settled, Update
from contract.training import TrainingCut, TrainingPlan
from edge_runtime.head import BatchLoss
from edge_runtime.part_head import PartHead, descend
from edge_runtime.part_prototypes import PartPrototypes
from edge_runtime.part_store import PartCheckpoint, PartStore
from edge_runtime.part_turn import adapted_state
from edge_runtime.training_set import Batch, TrainingSet
from edge_runtime.transforms.cut_noise import CutNoise

if TYPE_CHECKING:  # it loads onnxruntime, which a device that is idle or predicts from afar can do without
    from edge_runtime.trainer import Trainer

Floats: TypeAlias = NDArray[np.float32]
START_ANEW = "start a new run on the server"
LABELLED = ("raw-label", "permuted-label")
BeforeRelease: TypeAlias = Callable[[Sequence[bytes], TrainingCut, NDArray[np.int64] | None, float, str], None]


@dataclass(frozen=True)
class PartRules:
    """What the part is trained by: the signed plan, and what the device agreed to."""

    plan: TrainingPlan
    label_mode: str
    wire_labels: NDArray[np.int64]  # (C,): entry c is what class c is called on the wire


@dataclass
class _Place:
    """Where the part stands: `batch` forwards after the settled `step` of `run`, the last of them waiting if any."""

    run: str
    step: int
    cut: int
    batch: int = 0
    waiting: Batch | None = None  # it went forward, and its gradient has not come
    loss: BatchLoss | None = None  # of the batch that waits; it counts once the part has moved


@dataclass
class _Sums:
    """Loss and hits of the batches that moved the part since it was loaded."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    def add(self, mean_loss: float, correct: int, count: int) -> None:
        self.loss += mean_loss * count
        self.correct += correct
        self.count += count


def _unrecorded(
    sample_ids: Sequence[bytes], cut: TrainingCut, kept: NDArray[np.int64] | None, sigma: float, draw: str
) -> None:
    """Where nothing leaves a machine: a simulated device."""


class PartKeeper:
    """Answers the asks of split training; the same ask gets the same answer."""

    def __init__(
        self,
        rules: PartRules,
        images: TrainingSet,
        open_trainer: Callable[[TrainingCut], Trainer],
        head: PartHead | None,
        store: PartStore,
        tick: Callable[[int], None],
        before_release: BeforeRelease = _unrecorded,
        noise: CutNoise | None = None,
        choose: Callable[[Ask], Choice] | None = None,
    ) -> None:
        """`head` is the device's own, in client-head mode; `tick` is told how many images were used, and may stop;
        `before_release` is told whose activations are about to leave with which patches under how much noise, and may
        refuse; `choose` answers which split this device wants."""
        self._rules, self._images, self._open_trainer = rules, images, open_trainer
        self._head, self._store, self._tick = head, store, tick
        self.before_release, self.noise, self._choose = before_release, noise, choose
        self._trainers: dict[int, Trainer] = {}
        self._place: _Place | None = None
        self._answered: tuple[tuple[object, ...], Message] | None = None
        self._sums = _Sums()
        rule = rules.plan.prototypes
        self._prototypes = None if rule is None else PartPrototypes(len(rules.wire_labels), rule)

    @property
    def sends_float16(self) -> bool:
        """How activations travel."""
        return self._rules.plan.activations == "float16"

    def answer(self, ask: Ask, run: str) -> Message:
        """The answer to an ask that `terms.check_ask` let pass.

        Raises: RemoteProtocolError for what does not fit the part; TrainingError for a step that must not be taken;
        DataError, DeviceError.
        """
        key = (run, ask.ask, content_of(ask))
        if self._answered is None or self._answered[0] != key:
            self._answered = None  # if it fails, the state is between two answers
            self._answered = (key, self._follow(ask, run, key[2]))
        return self._answered[1]

    def _follow(self, ask: Ask, run: str, content: str) -> Message:
        if ask.kind == "load_part":
            return self._load(ask, run)
        if ask.kind == "local_round":
            return self._train_round(ask, run, content)
        if ask.kind in ("attend", "sleep"):
            return Settled(ask.ask, len(self._images))
        if ask.kind == "choose_split" and self._choose is not None:
            return self._choose(ask)
        if ask.kind == "take_turn":
            return self._take_turn(ask, run)
        place = self._reach(run, int(ask.parameters["after"]), int(ask.parameters.get("batch", 0)), ask.kind)
        if place is None:
            return Checkpoints(ask.ask, self._store.steps(run))
        if ask.kind in ("forward", "noisy_forward"):
            return self._forward(ask, place)
        if ask.kind == "batch_loss":
            return self._batch_loss(ask, place)
        if ask.kind == "settle":
            return self._settle(ask, place)
        if self._prototypes is not None and ask.kind == "set_prototypes":
            self._prototypes.set(ask)
            return self._settle(ask, place)
        if self._prototypes is not None and ask.kind == "give_prototypes":
            return self._prototypes.tell(ask)
        return self._upload(ask, place)

    # -- where the part stands

    def _reach(self, run: str, after: int, batch: int, kind: str) -> _Place | None:
        """Stand where the ask begins, from memory or from the disk; None when that is in neither."""
        place = self._place
        here = place is not None and (place.run, place.step) == (run, after)
        if place is not None and here and self._fits(place, batch, kind):
            return place
        if kind == "batch_loss" or batch > 0:
            return None  # it depends on batches that only memory held
        if after == 0:
            return None  # nothing was ever loaded
        return self._restore(run, after)

    @staticmethod
    def _fits(place: _Place, batch: int, kind: str) -> bool:
        if kind == "batch_loss":  # the loss of the very batch that waits
            return place.waiting is not None and place.batch == batch + 1
        if kind in ("take_turn", "upload_part", "set_prototypes", "give_prototypes"):
            return place.batch == 0
        return place.batch == batch and (batch == 0 or place.waiting is not None)

    def _restore(self, run: str, step: int) -> _Place | None:
        known = self._store.read(run, step)
        if known is None:
            return None
        self._trainer(known.cut).load_state(known.part)
        if self._head is not None:
            self._head.load_state(known.head)
        if self._prototypes is not None:
            self._prototypes.load_state(known.head)
        self._place, self._sums = _Place(run, step, known.cut), _Sums(*known.sums)
        return self._place

    def _trainer(self, cut: int) -> Trainer:
        """The trainer of one cut; the graphs of another are let go."""
        if cut not in self._trainers:
            known = self._rules.plan.cut(cut)
            if known is None:
                held = ", ".join(str(each.index) for each in self._rules.plan.cuts)
                raise RemoteProtocolError(f"the ask is about cut {cut}, the package has {held}", START_ANEW)
            self._place = None  # the part in memory goes with its graphs
            self._trainers = {cut: self._open_trainer(known)}
        return self._trainers[cut]

    def _load_into(self, cut: int, ask: Ask) -> Trainer:
        """A trainer at the parameters that the ask carries, or at the package's own where it carries none."""
        if not ask.tensors:
            self._trainers, self._place = {}, None
        trainer = self._trainer(cut)
        if ask.tensors:
            trainer.load_parameters(ask.tensors)
        return trainer

    # -- the asks

    def _load(self, ask: Ask, run: str) -> Message:
        after, cut, step = int(ask.parameters["after"]), int(ask.parameters["cut"]), step_of(ask)
        # The weights come with the ask. What else the device holds, its head, must be that of the step before.
        known = self._rules.plan.cut(cut)
        rounds = known is not None and known.loss == "own-head"  # its head is that of the last round
        if self._head is not None and not rounds and after and self._reach(run, after, 0, "load_part") is None:
            return Checkpoints(ask.ask, self._store.steps(run))
        trainer = self._load_into(cut, ask)
        if trainer.cut.loss == "own-head":
            self._reach_head(run)
        elif self._head is not None and not after:
            self._head.begin(run)
        if self._prototypes is not None:
            self._prototypes.begin()
        self._sums = _Sums()
        self._place = _Place(run, step, cut)
        self._keep(ask, self._place)
        return Settled(ask.ask, len(self._images))

    def _take_turn(self, ask: Ask, run: str) -> Settled:
        """Stand at the ask's split with this device's own layers; those it lacks are the ask's, else the package's.

        The part is the one at `after`, else the newest: what was not settled there is gone. A server that knows of no
        step of this device's begins with the package's weights.
        """
        after, cut, step = int(ask.parameters["after"]), int(ask.parameters["cut"]), step_of(ask)
        place = self._reach(run, after, 0, ask.kind)
        newest = self._store.steps(run)[-1]
        if place is None and after and newest:
            place = self._restore(run, newest)
        if place is None or place.cut != cut or ask.tensors:
            held = {} if place is None else {name: each.copy() for name, each in self._held(place).items()}
            self._trainers, self._place = {}, None
            trainer = self._trainer(cut)
            trainer.load_state(adapted_state(trainer.state(), held, ask))
        if not after and self._head is not None:
            self._head.begin(run)
        self._place, self._sums = _Place(run, step, cut), _Sums()
        self._keep(ask, self._place)
        return Settled(ask.ask, len(self._images))

    def _held(self, place: _Place) -> Mapping[str, NDArray[Any]]:
        return self._trainer(place.cut).state()

    def _forward(self, ask: Ask, place: _Place) -> Message:
        trainer = self._trainer(place.cut)
        if place.batch > 0:
            self._step(ask, place)
        numbers = ask.parameters
        batch = self._images.batch(
            int(numbers["seed"]), int(numbers["epoch"]), int(numbers["place"]), int(numbers["size"])
        )
        keep, sigma = self._images.kept_patches(batch.sample_ids, trainer.cut), sigma_of(ask)
        epoch = f"{place.run} epoch {int(numbers['epoch'])}"
        draw = "" if self.noise is None else self.noise.draw_of(epoch, ask.ask)
        self.before_release(batch.sample_ids, trainer.cut, keep, sigma, draw)
        z = self._run_part(trainer, batch, keep)
        if sigma > 0.0:
            if self.noise is None:
                raise RemoteProtocolError(f"ask {ask.ask}: this device has no noise for it", START_ANEW)
            z = self.noise.add(z, batch.sample_ids, place.cut, sigma, draw)
        self._tick(len(z))
        place.batch, place.waiting = place.batch + 1, batch
        values: NDArray[Any] = to_wire(z.reshape(len(z), -1), np.float16 if self.sends_float16 else np.float32)
        labels = None
        if self._rules.label_mode in LABELLED:
            labels = self._rules.wire_labels[batch.labels].astype(np.uint16)
        return Activations(ask.ask, place.batch - 1, len(self._images), "train", values, labels)

    def _run_part(self, trainer: Trainer, batch: Batch, keep: NDArray[np.int64] | None) -> Floats:
        """What leaves the part; a projection head's embeddings are counted on the way."""
        if self._prototypes is None:
            return trainer.forward(batch.images, keep=keep).z
        out = trainer.forward(batch.images, anchors=self._prototypes.anchors(batch.labels))
        assert out.embedding is not None  # checked with the graph
        self._prototypes.add(out.embedding, batch.labels)
        return out.z

    def _batch_loss(self, ask: Ask, place: _Place) -> Gradient:
        """The loss of the server's logits (B, C), or of the own head on its features (B, f), and d loss / d these."""
        assert place.waiting is not None
        values, labels = ask.tensors["values"], place.waiting.labels
        if len(values) != len(labels):
            raise RemoteProtocolError(f"ask {ask.ask}: expected {len(labels)} rows, found {len(values)}", START_ANEW)
        if self._head is not None:
            loss = self._head.loss(values, labels)
        else:
            loss = self._images.loss_of_logits(values, labels, ask.ask)
        place.loss = loss
        return Gradient(ask.ask, loss.mean_loss, loss.correct, loss.count, loss.gradient)

    def _step(self, ask: Ask, place: _Place) -> None:
        """Move the part by the gradient of the batch that waits, and the head by its own."""
        assert place.waiting is not None
        trainer, rate = self._trainer(place.cut), rate_of(ask)
        labels = place.waiting.labels
        gradient = gradient_of(ask, len(labels), trainer.cut.output_size).reshape(-1, *trainer.cut.output_shape)
        loss, place.loss, place.waiting = place.loss, None, None  # if it fails, the batch is gone
        if self._prototypes is None:
            trainer.backward(gradient)
        else:
            trainer.backward(gradient, self._prototypes.pull(labels))
        trainer.step(rate)
        if self._head is not None:
            self._head.step(rate)
        if loss is not None:
            self._sums.add(loss.mean_loss, loss.correct, loss.count)

    def _settle(self, ask: Ask, place: _Place) -> Settled:
        step = step_of(ask)
        if place.batch > 0:
            self._step(ask, place)
        self._place = _Place(place.run, step, place.cut)
        self._keep(ask, self._place)
        return Settled(ask.ask, len(self._images))

    def _keep(self, ask: Ask, place: _Place) -> None:
        sums = (self._sums.loss, self._sums.correct, self._sums.count)
        part = self._trainer(place.cut).state()
        head = {} if self._head is None else self._head.state()
        head |= {} if self._prototypes is None else self._prototypes.state()
        checkpoint = PartCheckpoint(place.run, place.step, place.cut, sums, part, head)
        self._store.keep(checkpoint, int(ask.parameters["base"]))

    def _upload(self, ask: Ask, place: _Place) -> Update:
        return self._update(ask, self._trainer(place.cut), self._sums)

    def _update(self, ask: Ask, trainer: Trainer, sums: _Sums) -> Update:
        mean = sums.loss / sums.count if sums.count else 0.0
        # Copies: the message may wait in the spool while the part moves on.
        tensors = {name: value.copy() for name, value in trainer.parameters().items()}
        return Update(ask.ask, len(self._images), sums.count, mean, sums.correct, tensors)

    # -- a round of its own

    def _train_round(self, ask: Ask, run: str, content: str) -> Update:
        """Epochs `epoch` to `epoch + epochs - 1` on the ask's parameters, with a fresh optimiser; an interrupted round
        goes on at the epoch that it was in."""
        numbers = ask.parameters
        first, epochs, size, seed = (int(numbers[name]) for name in ("epoch", "epochs", "size", "seed"))
        rate, cut = rate_of(ask), int(numbers["cut"])
        if epochs < 1:
            raise RemoteProtocolError(f"ask {ask.ask}: expected one epoch or more, found {epochs}", START_ANEW)
        known = self._rules.plan.cut(cut)
        if known is not None and known.loss == "none":
            raise RemoteProtocolError(f"ask {ask.ask}: cut {cut} has no loss of its own to train by", START_ANEW)
        trainer = self._load_into(cut, ask)
        self._place = None  # the trainer is used for the round
        done, sums, content = 0, _Sums(), f"{ask.ask} {content}"
        resumed = self._store.read_round(run, content)
        own_head = None
        if trainer.cut.loss == "own-head":
            own_head = self._reach_head(run)
        if resumed is not None:
            trainer.load_state(resumed.part)
            done, sums = resumed.step, _Sums(*resumed.sums)
            if own_head is not None:
                own_head.load_state(resumed.head)
        for epoch in range(first + done, first + epochs):
            sums = _Sums()
            for place in range(self._images.batch_count(size)):
                batch = self._images.batch(seed, epoch, place, size)
                if own_head is None:
                    self._descend(trainer, batch, rate, sums, (seed, epoch))
                else:
                    loss = descend(own_head, trainer, batch.images, batch.labels, rate)
                    sums.add(loss.mean_loss, loss.correct, loss.count)
                self._tick(len(batch.labels))
            if self._store.keeps_rounds:
                head = {} if own_head is None else own_head.state()
                so_far = (sums.loss, sums.correct, sums.count)
                kept = PartCheckpoint(run, epoch - first + 1, cut, so_far, trainer.state(), head)
                self._store.keep_round(content, kept)
        return self._update(ask, trainer, sums)

    def _descend(self, trainer: Trainer, batch: Batch, rate: float, sums: _Sums, draw: tuple[int, int]) -> None:
        """One step of a part whose loss is in its graph: no activations leave, so patches may be drawn anew."""
        keep = self._images.drawn_patches(batch.sample_ids, trainer.cut, *draw)
        out = trainer.forward(batch.images, targets=self._images.one_hot(batch.labels), keep=keep)
        if out.loss is None:
            raise TrainingError("the graph gave no loss", "export the package again")
        trainer.backward(None)
        trainer.step(rate)
        sums.add(out.loss, int(np.count_nonzero(out.z.argmax(axis=1) == batch.labels)), len(batch.labels))

    def _reach_head(self, run: str) -> PartHead:
        """The own head where the last round left it, new in a run that it has not seen.

        Raises: TrainingError in a label mode without one.
        """
        if self._head is None:
            raise TrainingError("the package's part needs a head on the device", "set label_mode to client-head")
        if self._head.run != run:
            last = self._store.last_round(run)
            if last is None:
                self._head.begin(run)
            else:
                self._head.load_state(last.head)
        return self._head

    # -- prediction

    def predictor(self, run: str | None) -> Trainer | None:
        """The part as it stood last in this run, or in the only one that is kept; None when the device has none."""
        run = run or self._store.newest_run()
        steps = self._store.steps(run)
        place = self._restore(run, steps[-1]) if steps[-1] else None
        return None if place is None else self._trainer(place.cut)


def content_of(ask: Ask) -> str:
    """A digest of what an ask holds: taken again on a GPU, it may hold other tensors under the same name."""
    digest = hashlib.blake2b(repr(sorted(ask.parameters.items())).encode(), digest_size=16)
    for name, array in sorted(ask.tensors.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


def step_of(ask: Ask) -> int:
    """The step at which the ask ends. Raises: RemoteProtocolError when it does not follow the one before."""
    step, after = int(ask.parameters["step"]), int(ask.parameters["after"])
    if step <= after:
        raise RemoteProtocolError(f"ask {ask.ask}: expected a step after {after}, found {step}", START_ANEW)
    return step


def rate_of(ask: Ask) -> float:
    """The learning rate of an ask. Raises: RemoteProtocolError when it is negative or not finite."""
    rate = float(ask.parameters["rate"])
    if not 0.0 <= rate < float("inf"):
        raise RemoteProtocolError(f"ask {ask.ask}: expected a learning rate of 0 or more, found {rate}", START_ANEW)
    return rate


def sigma_of(ask: Ask) -> float:
    """The deviation of the noise that an ask wants, 0 where it names none. Raises: RemoteProtocolError."""
    sigma = float(ask.parameters.get("sigma", 0.0))
    if not 0.0 <= sigma < float("inf"):
        raise RemoteProtocolError(f"ask {ask.ask}: expected a sigma of 0 or more, found {sigma}", START_ANEW)
    return sigma


def gradient_of(ask: Ask, rows: int, size: int) -> Floats:
    """The gradient (rows, size) that an ask carries. Raises: RemoteProtocolError when it is missing or another's."""
    values = ask.tensors.get("gradient")
    if values is None:
        raise RemoteProtocolError(f"ask {ask.ask}: expected the gradient of the batch before, found none", START_ANEW)
    scales = ask.tensors.get("scales")
    if (scales is not None) != (values.dtype == np.int8):
        raise RemoteProtocolError(f"ask {ask.ask}: scales belong to an int8 gradient, and to it only", START_ANEW)
    if values.shape != (rows, size):
        found = "x".join(map(str, values.shape))
        raise RemoteProtocolError(f"ask {ask.ask}: expected a gradient of {rows}x{size}, found {found}", START_ANEW)
    return read_gradient(WireGradient(values, scales))


def to_wire(values: Floats, kind: type[np.generic]) -> NDArray[Any]:
    """Activations as they travel. Raises: TrainingError where they are not finite, or too large for float16."""
    with np.errstate(over="ignore"):
        sent = values.astype(kind, copy=False)
    if not np.isfinite(sent).all():
        raise TrainingError(
            f"the activations at the cut are not finite in {np.dtype(kind)}",
            "lower the learning rate; with float16 activations export with --activations float32",
        )
    return sent
