"""EFTViT (seed 003; arXiv 2412.00334): devices train their own first blocks on masked images, the server the others on
the features that these give.

algorithms.md section 4. Symbols: theta_l^k device k's local module (patch embedding and M_l blocks), theta_g the global
module (the other M_g blocks and the norm), theta_h the head; h features of the n kept patches and the class token.

Decided there: the store is keyed by device; the head is trained on both sides and the device's is overwritten; theta_l
never travels; theta_g travels as a change against the package, and not at all to a device that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from contract.asks import EVERY_IMAGE
from contract.errors import TrainingError
from contract.messages import PatchFeatures, Settled
from contract.model_delta import write_delta
from contract.patch_features import WireFeatures

from ..feature_store import FeatureStore, Stored
from ..split_model import Shipped, own_loss
from ..split_replies import answer, check_patch_features
from ..split_rounds import Link, Rounds, Talk
from ..training_macs import sizes_of
from ..whole_rounds import open_rounds, round_numbers, whole_cut
from . import Ask, Conduct, Metric, Progress, Record, Settings, Site, State, Tensors

LABEL_MODES = ("raw-label",)  # as published: labels go with the features
_PROGRESS_STEPS = 50  # of the server's own training, after which others get a turn


class EftVit:
    """One site's rounds."""

    def __init__(self, shipped: Shipped, settings: Settings) -> None:
        self._shipped, self._settings = shipped, settings
        self._local = next(cut for cut in shipped.plan.cuts if cut.loss == "none")
        self._whole = whole_cut(shipped.plan)
        self._sizes = sizes_of(shipped.module)
        self._rounds: Rounds | None = None
        self._store = FeatureStore(settings.store_mb << 20, settings.store_rounds)
        self._version = 1  # of theta_g and theta_h; a device starts at 0, with the package's
        self._has: dict[str, int] = {}  # device -> the version that it was sent
        self._coded: tuple[int, Tensors] = (0, {})  # the newest version as it travels

    def run(self, site: Site) -> Conduct:
        """Each round: some devices train E epochs and send a balanced set of features; 2 epochs on the store.

        Raises:
            TrainingError: no device has an image, an answer does not fit, or the loss explodes.
        """
        rounds = self._rounds = self._rounds or open_rounds(site, self._shipped, self._settings)
        s = self._settings
        while rounds.epoch < s.epochs:
            e = min(s.local_epochs, s.epochs - rounds.epoch)
            picked = rounds.pick(s.fraction)
            values = yield from self._train(rounds, picked, e)
            values |= yield from self._learn(rounds)
            record = rounds.end_round(e)
            values |= {"store_rows": len(self._store), "store_bytes": self._store.nbytes, "asked": len(picked)}
            yield Record({**record.values, **values})
        yield from self._hand_out(rounds)

    # -- the devices' half

    def _train(self, rounds: Rounds, picked: Sequence[Link], epochs: int) -> Talk[dict[str, Metric]]:
        """theta_g, theta_h to the picked devices where they have older ones; features into the store."""
        threshold = EVERY_IMAGE if self._settings.sampling == "all" else self._settings.medians
        common = round_numbers(rounds, epochs) | {"threshold": threshold}
        sent = {link.device: self._news_for(link.device) for link in picked}
        replies = yield from rounds.ask("masked_round", sent, {}, common, moves=True)
        n, features = self._local.kept or 0, 0
        images = 0
        for link in picked:
            reply = answer(PatchFeatures, replies, link.device)
            check_patch_features(link.device, reply, self._local, rounds.site.classes, self._shipped.plan.activations)
            link.samples, self._has[link.device] = reply.samples, self._version
            if reply.count:
                rounds.count_usable()
                rounds.add(reply.mean_loss, reply.correct, reply.count)
                images += reply.count * epochs
            if reply.values is not None and reply.labels is not None:
                wire = WireFeatures(np.array(reply.values), None if reply.scales is None else np.array(reply.scales))
                self._store.put(link.device, Stored(rounds.epoch, wire, reply.labels.astype(np.int64)))
                features += len(reply.labels)
        local = self._local.index
        macs = images * self._sizes.local_step(n, local)
        macs += features * (self._sizes.forward(n) - (self._sizes.blocks - local) * self._sizes.block(n))
        return {"features": features, "macs_devices": macs}

    def _news_for(self, device: str) -> Tensors:
        """What a device has not: nothing, or the newest version as a change against the package."""
        if self._has.get(device, 0) == self._version:
            return {}
        if self._coded[0] != self._version:
            assert self._rounds is not None
            now = self._rounds.w.floats()
            names = self._whole.frozen
            shipped = {name: tensor.cpu().numpy() for name, tensor in self._shipped.module.state_dict().items()}
            coded = write_delta({name: now[f"backend.{name}"] for name in names}, shipped, self._shipped.plan.gradient)
            head = {name: value for name, value in self._rounds.w.part(self._whole).items() if self._is_head(name)}
            self._coded = (self._version, {**coded, **head})
        return self._coded[1]

    def _is_head(self, name: str) -> bool:
        return name.startswith(f"{self._whole.layer}.")

    # -- the server's half

    def _learn(self, rounds: Rounds) -> Talk[dict[str, Metric]]:
        """theta_g, theta_h <- AdamW on the store's (h, y)."""
        s, w = self._settings, rounds.w
        rate = rounds.tally.lr * (s.server_rate / s.learning_rate or 1.0)  # both fall by one schedule
        self._store.forget_before(rounds.epoch)
        loss, rows, steps = 0.0, 0, 0
        for epoch in range(s.server_epochs if len(self._store) else 0):
            loss, rows = 0.0, 0
            for h, y in self._store.batches(s.batch, np.random.default_rng([s.seed, rounds.epoch, epoch])):
                step = w.outputs(self._local, {"store": h.reshape(len(h), -1)})
                found = own_loss(step.outputs, y)
                if not np.isfinite(found.mean_loss):
                    raise TrainingError(
                        f"training broke in epoch {rounds.epoch + 1}: the server's loss is {found.mean_loss}",
                        f"lower --learning-rate ({s.learning_rate:g}), or raise --warmup, and start a new run",
                    )
                w.descend([step], {"store": found.gradient}, rate)
                loss, rows, steps = loss + found.mean_loss * len(y), rows + len(y), steps + 1
                if steps % _PROGRESS_STEPS == 0:
                    yield Progress(f"training on features, epoch {rounds.epoch + 1} of {s.epochs}", steps)
        self._version += steps > 0
        macs = rows * s.server_epochs * self._sizes.global_step(self._local.kept or 0, self._local.index)
        return {"server_loss": loss / rows if rows else None, "macs_server": macs}

    def _hand_out(self, rounds: Rounds) -> Talk[None]:
        """The finished theta_g and theta_h to all devices, which predict by themselves: own local, global, head."""
        yield Progress("handing out the global module", rounds.epoch)
        sent = {device: self._news_for(device) for device in rounds.links}
        replies = yield from rounds.ask("load_global", sent, {}, moves=True)
        for device in rounds.links:
            answer(Settled, replies, device)
            self._has[device] = self._version

    # -- going on after a stop

    def state(self) -> State:
        """theta_g, theta_h and their moments, the store, and what each device has."""
        assert self._rounds is not None
        state = self._rounds.state()
        tensors = dict(state.tensors)
        values: dict[str, Metric] = {**state.values, "version": self._version}
        values |= {f"has/{device}": version for device, version in self._has.items()}
        for device, held in self._store.uploads.items():
            tensors[f"store/{device}/values"] = torch.from_numpy(held.features.values)
            tensors[f"store/{device}/labels"] = torch.from_numpy(held.labels)
            if held.features.scales is not None:
                tensors[f"store/{device}/scales"] = torch.from_numpy(held.features.scales)
            values[f"store/{device}"] = held.round
        return State(tensors, values)

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._rounds = open_rounds(site, self._shipped, self._settings)
        self._rounds.load_state(state)
        self._version = int(state.values["version"] or 0)
        self._coded = (0, {})
        for device in site.devices:
            if f"has/{device}" in state.values:
                self._has[device] = int(state.values[f"has/{device}"] or 0)
            if f"store/{device}" in state.values:
                found = {name: _numpy(state.tensors, f"store/{device}/{name}") for name in _STORED}
                wire = WireFeatures(found["values"], found["scales"])
                self._store.put(device, Stored(int(state.values[f"store/{device}"] or 0), wire, found["labels"]))

    def last_part(self, device: str) -> Ask:
        """theta_g and theta_h for a device that was away when they were handed out."""
        return Ask(f"last-{device}", "load_global", {device: self._news_for(device)}, {"step": 1 << 40})

    def predict_part(self, device: str, values: np.ndarray) -> np.ndarray:
        """Logits (B,C) of the device's own chain: these are they."""
        assert self._rounds is not None
        return self._rounds.predict_part(device, values)


_STORED = ("values", "labels", "scales")


def _numpy(tensors: Mapping[str, torch.Tensor], name: str) -> np.ndarray | None:
    return tensors[name].numpy().copy() if name in tensors else None


def build(shipped: Shipped, settings: Settings) -> EftVit:
    """A strategy for one site."""
    return EftVit(shipped, settings)
