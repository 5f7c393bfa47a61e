"""What a device answers in rounds in which it trains by itself and keeps what it has: EFTViT and FEDBFPT.

The device holds the whole model and stands at a numbered step, as in `part_keeper`: the weights it trains, and what the
server last sent of those it does not. An ask brings only what has changed since.

EFTViT (algorithms.md section 4): the local module is this device's own and never travels. In a round it learns with the
head through the frozen layers behind it, on freshly drawn patches of each image; then features of a balanced set (or of
every image, as the server asks) leave, of the plain pictures, under one secret mask for each sample that never changes:
fresh masks would show another part of the picture each time. `fresh` draws them anew, only to reproduce what was
published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contract.asks import EVERY_IMAGE
from contract.errors import RemoteProtocolError, TrainingError
from contract.keyed_noise import derive_key
from contract.messages import Ask, Checkpoints, Message, PatchFeatures, Settled, Update
from contract.model_delta import read_delta
from contract.patch_features import write_features
from contract.training import TrainingCut
from edge_runtime.median_sampling import Chosen, balanced, every_image, target_count
from edge_runtime.part_head import PartHead
from edge_runtime.part_keeper import (
    START_ANEW,
    BeforeRelease,
    PartKeeper,
    PartRules,
    _Place,
    _Sums,
    content_of,
    rate_of,
    step_of,
)
from edge_runtime.part_store import PartCheckpoint, PartStore
from edge_runtime.training_set import TrainingSet

if TYPE_CHECKING:  # it loads onnxruntime, which a device that is idle or predicts from afar can do without
    from edge_runtime.trainer import Trainer

Floats = NDArray[np.float32]
Shipped = Callable[[Sequence[str]], Mapping[str, Floats]]
FEATURES_AT_ONCE = 32
KINDS = ("masked_round", "load_global", "block_round")


class RoundKeeper(PartKeeper):
    """Answers the asks of such rounds, and load_part; the same ask gets the same answer."""

    def __init__(
        self,
        rules: PartRules,
        images: TrainingSet,
        open_trainer: Callable[[TrainingCut], Trainer],
        shipped: Shipped,
        store: PartStore,
        tick: Callable[[int], None],
        fresh: bool = False,
        before_release: BeforeRelease | None = None,
    ) -> None:
        """`shipped` reads tensors of the package; `fresh` masks features anew each time; `before_release` is
        `PartKeeper`'s."""
        no_head: PartHead | None = None
        super().__init__(rules, images, open_trainer, no_head, store, tick)
        if before_release is not None:
            self.before_release = before_release
        self._whole = next(cut for cut in rules.plan.cuts if cut.loss != "none")
        self._shipped, self._fresh = shipped, fresh
        self._received: Mapping[str, NDArray[Any]] = {}  # as it came: what the server changed in the whole model
        self._local: Trainer | None = None  # the local module by itself, for features

    def _follow(self, ask: Ask, run: str, content: str) -> Message:
        if ask.kind not in KINDS:
            return super()._follow(ask, run, content)
        after = int(ask.parameters["after"])
        if after == 0:
            self._begin()
        elif self._reach(run, after, 0, ask.kind) is None:
            return Checkpoints(ask.ask, self._store.steps(run))
        self._place = None  # until the ask is done, the trainer stands between two steps
        trainer = self._trainer(self._whole.index)
        if ask.kind == "block_round":
            return self._train_block(ask, run, trainer)
        if ask.tensors:
            self._received = {name: value.copy() for name, value in ask.tensors.items()}
            self._apply(trainer)
        if ask.kind == "load_global":
            self._reset_head(trainer)
            self._sums = _Sums()
            self._settle_at(ask, run)
            return Settled(ask.ask, len(self._images))
        return self._train_masked(ask, run, trainer)

    def _begin(self) -> None:
        """The package's own weights."""
        self._trainers, self._place, self._received, self._local = {}, None, {}, None

    def _restore(self, run: str, step: int) -> _Place | None:
        known = self._store.read(run, step)
        if known is None:
            return None
        trainer = self._trainer(known.cut)
        trainer.load_state(known.part)
        self._received = known.head
        if self._received:
            self._apply(trainer)
        self._place, self._sums = _Place(run, step, known.cut), _Sums(*known.sums)
        return self._place

    def _settle_at(self, ask: Ask, run: str) -> None:
        sums = (self._sums.loss, self._sums.correct, self._sums.count)
        step, cut = step_of(ask), self._whole.index
        state = self._trainer(cut).state()
        self._store.keep(PartCheckpoint(run, step, cut, sums, state, self._received), int(ask.parameters["base"]))
        self._place = _Place(run, step, cut)

    # -- EFTViT

    def _apply(self, trainer: Trainer) -> None:
        """theta_g as the server has it now: the package's, moved by what was received."""
        changed = {name: value for name, value in self._received.items() if not self._is_head(name)}
        trainer.load_frozen(read_delta(changed, self._shipped(self._whole.frozen)))

    def _reset_head(self, trainer: Trainer) -> None:
        """theta_h is the server's at the beginning of a round, as it came (it is small, and the package's is nobody's);
        the optimiser is fresh."""
        names = [name for name in self._whole.trainable if self._is_head(name)]
        received = {name: value for name, value in self._received.items() if self._is_head(name)}
        trainer.load_parameters({**trainer.parameters(), **self._shipped(names), **received})

    def _is_head(self, name: str) -> bool:
        return name.startswith(f"{self._whole.layer}.")

    def _train_masked(self, ask: Ask, run: str, trainer: Trainer) -> PatchFeatures:
        """E epochs of theta_l and theta_h, then the balanced set."""
        self._reset_head(trainer)
        seed = int(ask.parameters["seed"])

        def keep(sample_ids: Sequence[bytes], epoch: int) -> NDArray[np.int64] | None:
            return self._images.drawn_patches(sample_ids, self._whole, seed, epoch)

        self._train(ask, run, trainer, keep, None)
        features, labels = self._features(ask, trainer)
        self._settle_at(ask, run)
        count, mean = self._sums.count, self._sums.loss / self._sums.count if self._sums.count else 0.0
        if features is None:
            return PatchFeatures(ask.ask, len(self._images), count, mean, self._sums.correct, None, None, None)
        wire = write_features(features, self._rules.plan.activations)
        return PatchFeatures(
            ask.ask, len(self._images), count, mean, self._sums.correct, wire.values, wire.scales,
            self._rules.wire_labels[labels].astype(np.uint16),
        )  # fmt: skip

    def _features(self, ask: Ask, trainer: Trainer) -> tuple[Floats | None, NDArray[np.int64]]:
        """h (S, n + 1, d) of the chosen images, and their classes; None of a device without images."""
        labels = self._images.labels
        seed, epoch = int(ask.parameters["seed"]), int(ask.parameters["epoch"])

        def order(places: Sequence[int]) -> Sequence[int]:
            ids = self._images.sample_ids
            return sorted(places, key=lambda place: derive_key(b"", "balanced set", seed, epoch, ids[place]))

        threshold = float(ask.parameters["threshold"])
        chosen = every_image(labels)
        if threshold != EVERY_IMAGE:
            chosen = balanced(labels, target_count(labels, threshold), order)
        if not chosen:
            return None, labels
        local = self.local_module(trainer)
        made = [
            self._features_of(local, chosen[first : first + FEATURES_AT_ONCE], ask.ask)
            for first in range(0, len(chosen), FEATURES_AT_ONCE)
        ]
        return np.concatenate(made), labels[[each.place for each in chosen]]

    def local_weights(self) -> dict[str, Floats] | None:
        """theta_l by the model's names, as the device has it; None before it has trained."""
        cut = next(cut for cut in self._rules.plan.cuts if cut.loss == "none")
        if self._place is None:
            return None
        whole = self._trainer(self._whole.index).parameters()
        return {name: whole[name] for name in (*cut.trainable, *cut.buffers) if name in whole}

    def local_module(self, trainer: Trainer | None = None) -> Trainer:
        """theta_l as a part by itself, at this trainer's weights."""
        if self._local is None:
            cut = next(cut for cut in self._rules.plan.cuts if cut.loss == "none")
            self._local = self._open_trainer(cut)
        if trainer is not None:
            whole = trainer.parameters()
            names = (*self._local.cut.trainable, *self._local.cut.buffers)
            self._local.load_parameters({name: whole[name] for name in names if name in whole})
        return self._local

    def _features_of(self, local: Trainer, chosen: Sequence[Chosen], ask: str) -> Floats:
        plain = self._images.plain([each.place for each in chosen])
        keep = self._images.kept_patches(plain.sample_ids, local.cut)
        if self._fresh:
            turns = [each.turn for each in chosen]
            keep = self._images.fresh_patches(plain.sample_ids, local.cut, ask, turns)
        self.before_release(plain.sample_ids, local.cut, keep, 0.0, "")
        self._tick(0)
        return local.features(plain.images, keep)

    # -- FEDBFPT

    def _train_block(self, ask: Ask, run: str, trainer: Trainer) -> Update:
        """E epochs of one block and the head; both leave."""
        block = f"blocks.{int(ask.parameters['block'])}."
        names = [name for name in self._whole.trainable if name.startswith(block) or self._is_head(name)]
        if not any(name.startswith(block) for name in names):
            raise RemoteProtocolError(f"ask {ask.ask}: the model has no {block[:-1]} to train", START_ANEW)
        trainer.load_parameters({**trainer.parameters(), **ask.tensors})
        self._train(ask, run, trainer, lambda sample_ids, epoch: None, names)
        self._settle_at(ask, run)
        mean = self._sums.loss / self._sums.count if self._sums.count else 0.0
        tensors = {name: value.copy() for name, value in trainer.parameters().items() if name in names}
        return Update(ask.ask, len(self._images), self._sums.count, mean, self._sums.correct, tensors)

    # -- epochs

    def _train(
        self, ask: Ask, run: str, trainer: Trainer,
        keep: Callable[[Sequence[bytes], int], NDArray[np.int64] | None], only: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Epochs `epoch` to `epoch + epochs - 1`; an interrupted round goes on at the epoch that it was in."""
        first, epochs, size, seed = (int(ask.parameters[name]) for name in ("epoch", "epochs", "size", "seed"))
        if epochs < 1:
            raise RemoteProtocolError(f"ask {ask.ask}: expected one epoch or more, found {epochs}", START_ANEW)
        rate, done, content = rate_of(ask), 0, f"{ask.ask} {content_of(ask)}"
        self._sums = _Sums()
        resumed = self._store.read_round(run, content)
        if resumed is not None:
            trainer.load_state(resumed.part)
            done, self._sums = resumed.step, _Sums(*resumed.sums)
        for epoch in range(first + done, first + epochs):
            self._sums = _Sums()
            for place in range(self._images.batch_count(size)):
                batch = self._images.batch(seed, epoch, place, size)
                targets = self._images.one_hot(self._rules.wire_labels[batch.labels])
                out = trainer.forward(batch.images, targets=targets, keep=keep(batch.sample_ids, epoch))
                if out.loss is None:
                    raise TrainingError("the graph gave no loss", "export the package again")
                trainer.backward(None, only=only)
                trainer.step(rate)
                correct = int(np.count_nonzero(out.z.argmax(axis=1) == targets.argmax(axis=1)))
                self._sums.add(out.loss, correct, len(batch.labels))
                self._tick(len(batch.labels))
            if self._store.keeps_rounds:
                sums = (self._sums.loss, self._sums.correct, self._sums.count)
                kept = PartCheckpoint(run, epoch - first + 1, self._whole.index, sums, trainer.state(), {})
                self._store.keep_round(content, kept)
