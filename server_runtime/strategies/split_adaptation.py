"""Split adaptation (SA), step 6: the server adapts the backend Theta^B and a new head g_gamma on a site's noisy tokens.

Reads like "Split Adaptation for Pre-trained Vision Transformers" as fixed in algorithms.md section 1; steps 1-4 are the
exporter's, step 5 (noisy extraction, patch retrieval) the device's. Symbols: N patches, T = prefix + N tokens of width
d, f features, C classes, N^C images of the site, N^Aug augmentation runs, N^P replaced patches.

Departures, all decided in algorithms.md 1.2: noise once per token, and augmentations as a recipe (C); in each epoch one
of the N^Aug runs per image beside the un-augmented image (D); dL/dlogits instead of "the loss" from the device, or
labels under the site's secret permutation, or the head on the device (E); a Wiener filter before Theta^B (J, noise.md).
Three more are this project's own (docs/results.md has what they are worth): the head starts at zero, not at random
(`backend.zero_head` says why), it reads standardised features, and the rates fall along a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from contract.adaptation import rate_share
from contract.errors import TrainingError
from contract.messages import Gradient

from ..aggregation import is_usable, weighted_mean
from ..backend import (
    Backend,
    adam,
    load_module,
    load_optimiser,
    module_state,
    optimiser_state,
    place,
    standard_of,
    zero_head,
)
from ..epochs import Augmentation, Rows, epoch_batches, labels_of, pool, sample_ids_of, token_rows
from ..store import Upload
from . import Ask, Conduct, Metric, Progress, Record, Replies, Settings, Site, State

LABEL_MODES = ("permuted-label", "logit-gradient", "client-head")
BATCH = 32  # 1.1 step 4; the paper gives it for its baselines
VOID_STEPS = 20  # steps in a row without one usable gradient, after which training ends


@dataclass
class Tally:
    """What an epoch adds up: mean loss and hits of each reply or step, and how many rows stand behind them."""

    losses: list[torch.Tensor] = field(default_factory=list)
    hits: list[torch.Tensor] = field(default_factory=list)  # share of rows that were right
    rows: list[int] = field(default_factory=list)
    void: int = 0  # steps without any usable gradient
    left_out: int = 0  # replies that could not be used

    def add(self, loss: torch.Tensor, hits: torch.Tensor, rows: int) -> None:
        """Count a reply or step; nothing is read off the device yet."""
        self.losses.append(loss)
        self.hits.append(hits)
        self.rows.append(rows)

    def record(self, epoch: int, samples: int) -> Record:
        """The epoch's line; means over nothing are absent (SE-01)."""
        loss, accuracy = (
            weighted_mean(torch.stack(values).tolist() if values else [], self.rows)
            for values in (self.losses, self.hits)
        )
        values: dict[str, Metric] = {"epoch": epoch, "loss": loss, "accuracy": accuracy, "samples": samples}
        return Record(values | {"rows": sum(self.rows), "void_steps": self.void, "unusable_replies": self.left_out})


class SplitAdaptation:
    """One site's adaptation."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._settings = settings
        self._theta_b = backend.copy()  # Theta^B
        self._g: torch.nn.Linear | None = None  # g_gamma; on the device in client-head mode
        self._optimiser: torch.optim.Adam | None = None
        self._mean, self._scale = (
            torch.zeros(()),
            torch.ones(()),
        )  # (f,): of the features that the site's uploads begin with
        self._epoch = 0  # epochs that are over
        self._step = 0

    # -- the algorithm

    def run(self, site: Site) -> Conduct:
        """1.1 step 6: minimise sum_i sum_j CE(g_gamma(Theta^B(X_ij)), y_i) over Theta^B and gamma with Adam.

        Raises:
            TrainingError: the loss is not finite, no device has a sample, or no gradient can be used for long.
        """
        s = self._settings
        question = {"kappa": s.kappa, "seed": s.seed}
        replies = yield Ask("features", "collect_features", {device: {} for device in site.devices}, question)
        uploads = pool([reply for reply in replies.values() if isinstance(reply, Upload)])  # codes (n,T,d) each
        n_c = sum(len(upload.sample_ids) for upload in uploads)  # N^C
        if n_c == 0:
            raise TrainingError(f"site {site.name!r} has no sample", "add images to at least one of its devices")
        uploads = tuple(upload for upload in uploads if len(upload.sample_ids))  # 'no data' devices weigh nothing
        if self._optimiser is None:
            self._prepare(site)
            self._standardise(uploads)
        batches = self._batches(uploads)
        batch = next(batches, None)
        tally = Tally()
        while batch is not None:
            epoch, rows, x = batch
            self._step += 1
            yield from self._descend(x, uploads, rows, tally)
            batch = next(batches, None)  # before the epoch's loss is waited for, while a GPU still has work
            yield Progress(f"training, epoch {epoch} of {s.epochs}", self._step)
            if batch is None or batch[0] != epoch:
                record, tally = tally.record(epoch, n_c), Tally()
                loss = record.values["loss"]
                if loss is not None and not math.isfinite(float(loss)):
                    raise self._diverged(f"the loss is {loss}")
                self._epoch = epoch
                yield record

    def _batches(self, uploads: tuple[Upload, ...]) -> Iterator[tuple[int, Rows, torch.Tensor]]:
        """Epoch, rows and filtered tokens x (B,T,d) of every step that is left."""
        s, theta_b = self._settings, self._theta_b
        codes = theta_b.table([upload.codes for upload in uploads])
        patches, prefix = theta_b.front.patches, theta_b.front.prefix  # N, T - N
        recipe = Augmentation(s.seed, s.augmentations, patches, round(s.replaced * patches), prefix)
        for epoch in range(self._epoch + 1, s.epochs + 1):
            self._set_rates(rate_share(epoch, s.epochs))
            for rows in epoch_batches(uploads, recipe, epoch, BATCH):
                yield epoch, rows, theta_b.tokens(codes.take(token_rows(uploads, rows, recipe)))

    def _descend(
        self, x: torch.Tensor, uploads: tuple[Upload, ...], rows: Rows, tally: Tally
    ) -> Generator[Ask, Replies, None]:
        """One step of Adam on a batch x (B,T,d); the loss comes from where the label mode keeps the labels."""
        assert self._optimiser is not None
        theta_b = self._theta_b
        self._optimiser.zero_grad(set_to_none=True)
        features = self._standard(theta_b.features(x))  # (B,f)
        values = features if self._g is None else self._g(features)  # (B,f) or logits (B,C)
        if self._settings.label_mode == "permuted-label":
            y = place(torch.from_numpy(labels_of(uploads, rows)), theta_b.device)  # (B,), under the site's permutation
            loss = functional.cross_entropy(values, y)
            torch.autograd.backward(loss)
            tally.add(loss.detach(), (values.detach().argmax(dim=1) == y).float().mean(), len(rows))
        else:
            gradient = yield from self._ask_gradient(values, uploads, rows, tally)
            if gradient is None:  # a void step: weights and moments stay bit for bit (SE-01)
                return
            torch.autograd.backward(values, gradient)
        self._optimiser.step()

    def _ask_gradient(
        self, values: torch.Tensor, uploads: tuple[Upload, ...], rows: Rows, tally: Tally
    ) -> Generator[Ask, Replies, torch.Tensor | None]:
        """1.2 E: each device turns its rows of `values` (B,C|f) into dL/dvalues of its own mean loss."""
        sent = values.detach().cpu().numpy()
        if not np.isfinite(sent).all():
            raise self._diverged("its outputs are not finite")
        kind, tensor = ("head_step", "features") if self._g is None else ("score_batch", "logits")
        places = {upload.device: rows.of(index) for index, upload in enumerate(uploads) if rows.of(index).size}
        question = {
            upload.device: {tensor: sent[rows.of(index)], "sample_ids": sample_ids_of(uploads, rows, index)}
            for index, upload in enumerate(uploads)
            if upload.device in places
        }
        parameters: dict[str, float | int | str] = {} if self._g is None else {"split": "train"}
        moved = self._step if self._g is None else None  # a head on the device takes this step as well
        replies = yield Ask(f"step-{self._step}", kind, question, parameters, step=moved)
        usable = {
            device: reply
            for device, reply in replies.items()
            if isinstance(reply, Gradient) and is_usable(reply, places[device].size, sent.shape[1])
        }
        tally.left_out += len(question) - len(usable)
        count = sum(reply.count for reply in usable.values())
        gradient = np.zeros_like(sent)
        for device in sorted(usable):  # a mean of the devices' means, by the rows behind each
            reply = usable[device]
            gradient[places[device]] = reply.gradient * np.float32(reply.count / count)
            tally.add(torch.tensor(reply.mean_loss), torch.tensor(reply.correct / reply.count), reply.count)
        if count == 0:
            tally.void += 1
            if tally.void >= VOID_STEPS:
                raise TrainingError(
                    f"{tally.void} steps of an epoch had no usable gradient from any device",
                    "update the devices' software: their answers do not fit the questions",
                )
            return None
        return torch.from_numpy(gradient).to(values.device)

    def _diverged(self, found: str) -> TrainingError:
        return TrainingError(
            f"training broke in epoch {self._epoch + 1}: {found}",
            "lower backend_lr and head_lr in the backend folder's few_shot.json and start a new run",
        )

    def _prepare(self, site: Site) -> None:
        theta_b, s = self._theta_b, self._settings
        if s.label_mode != "client-head":
            self._g = zero_head(theta_b.width, site.classes, theta_b.device)
        heads = [] if self._g is None else [(self._g.parameters(), s.head_lr)]
        self._optimiser = adam([(theta_b.module.parameters(), s.backend_lr), *heads])

    def _standardise(self, uploads: tuple[Upload, ...]) -> None:
        """Mean and spread of each feature over the site's images: so one head rate suits every backend."""
        parts = []
        for upload in uploads:  # in the order of ids: neither sums nor a feature's last bits may know the arrival
            order = np.lexsort(upload.sample_ids.T[::-1])
            parts.append(self._theta_b.features_of(upload.codes[order]))
        self._mean, self._scale = standard_of(torch.cat(parts).float())  # of (N^C,f)

    def _standard(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self._mean) / self._scale

    def _set_rates(self, share: float) -> None:
        assert self._optimiser is not None
        rates = (self._settings.backend_lr, self._settings.head_lr)  # the second group is missing in client-head mode
        for group, rate in zip(self._optimiser.param_groups, rates, strict=False):
            group["lr"] = rate * share

    # -- going on after a stop, and serving

    def state(self) -> State:
        """Weights, Adam's moments, and how far training is."""
        tensors = module_state("backend", self._theta_b.module)
        tensors |= {
            "features.mean": self._mean.to("cpu", copy=True),
            "features.scale": self._scale.to("cpu", copy=True),
        }
        if self._g is not None:
            tensors |= module_state("head", self._g)
        if self._optimiser is not None:
            tensors |= optimiser_state(self._optimiser)
        return State(tensors, {"epoch": self._epoch, "step": self._step})

    def load(self, site: Site, state: State) -> None:
        """Go on where `state` was taken."""
        self._prepare(site)
        assert self._optimiser is not None
        load_module("backend", self._theta_b.module, state.tensors)
        if self._g is not None:
            load_module("head", self._g, state.tensors)
        load_optimiser(self._optimiser, state.tensors)
        device = self._theta_b.device
        self._mean, self._scale = state.tensors["features.mean"].to(device), state.tensors["features.scale"].to(device)
        self._epoch, self._step = int(state.values["epoch"] or 0), int(state.values["step"] or 0)

    @torch.no_grad()
    def predict(self, codes: np.ndarray) -> np.ndarray:
        """1.2 F: codes (B,T,d), noisy as the uploads are -> logits (B,C), or features (B,f) for a device's head."""
        features = self._standard(self._theta_b.features_of(codes))
        scores: np.ndarray = (features if self._g is None else self._g(features)).float().cpu().numpy()
        return scores


def build(backend: Backend, settings: Settings) -> SplitAdaptation:
    """A strategy for one site."""
    return SplitAdaptation(backend, settings)
