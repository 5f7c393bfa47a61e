"""Linear probing (LP), the baseline of every table: a linear head on the unchanged shipped backend.

The third LP of algorithms.md section 7: features come from the same noisy uploads, through the same Wiener filter, as
split adaptation's, and inference carries the same noise, so that the two differ in nothing but what is trained. The
learning rate and L2 come from a small grid by cross-validation over the uploads; no other image is ever looked at.
Symbols: n images, f features, C classes, G settings of the grid, K folds.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch.nn import functional

from contract.errors import TrainingError

from ..backend import Backend, load_module, module_state, standard_of, zero_head
from ..epochs import pool
from ..store import Upload
from . import Ask, Conduct, Progress, Record, Settings, Site, State

LABEL_MODES = ("permuted-label",)  # full-batch descent: the other modes would cost a round trip per step and grid cell
GRID = tuple((lr, l2) for l2 in (1e-1, 1e-2, 1e-3, 1e-4, 0.0) for lr in (1e-3, 1e-2, 1e-1))
FOLDS = 5


class LinearProbe:
    """One site's probe."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings
        self._head: torch.nn.Linear | None = None

    def run(self, site: Site) -> Conduct:
        """Choose (lr, L2) on held-out shots, then train the head on all of them.

        Raises:
            TrainingError: no device has a sample, or no setting of the grid gives a finite loss.
        """
        s = self._settings
        question = {"kappa": s.kappa, "seed": s.seed}
        replies = yield Ask("features", "collect_features", {device: {} for device in site.devices}, question)
        uploads = pool([reply for reply in replies.values() if isinstance(reply, Upload) and len(reply.sample_ids)])
        if not uploads:
            raise TrainingError(f"site {site.name!r} has no sample", "add images to at least one of its devices")
        yield Progress("computing features", 0)
        features, labels = _dataset(self._backend, uploads, s.seed)  # (n,f), (n,)
        # Standardised, so that one grid suits every backend; folded into the head at the end.
        mean, scale = standard_of(features)
        inputs = (features - mean) / scale
        lr, l2, held_out = choose_setting(inputs, labels, site.classes, s.epochs)
        yield Progress("training the head", 1)
        weight, bias = fit(inputs, labels, torch.ones(1, len(labels)), [(lr, l2)], site.classes, s.epochs)
        loss = float(functional.cross_entropy(inputs @ weight[0].T + bias[0], labels))
        if not math.isfinite(loss):
            raise TrainingError(f"site {site.name!r}: the loss is {loss}", "check the backend folder: export it again")
        self._head = zero_head(inputs.shape[1], site.classes, self._backend.device)
        with torch.no_grad():
            self._head.weight.copy_(weight[0] / scale)
            self._head.bias.copy_(bias[0] - (weight[0] / scale) @ mean)
        correct = float((self._head(features).argmax(dim=1) == labels).float().mean())
        yield Record(
            {"epoch": s.epochs, "loss": loss, "accuracy": correct, "samples": len(labels), "rows": len(labels),
             "lr": lr, "l2": l2, "held_out_accuracy": held_out}
        )  # fmt: skip

    def state(self) -> State:
        """The head, once it is trained."""
        return State({} if self._head is None else module_state("head", self._head), {})

    def load(self, site: Site, state: State) -> None:
        """A probe trains in seconds: only its end is kept."""
        self._head = zero_head(self._backend.width, site.classes, self._backend.device)
        load_module("head", self._head, state.tensors)

    @torch.no_grad()
    def predict(self, codes: np.ndarray) -> np.ndarray:
        """Codes (B,T,d) -> logits (B,C)."""
        assert self._head is not None
        logits: np.ndarray = self._head(self._backend.features_of(codes)).float().cpu().numpy()
        return logits


def _dataset(backend: Backend, uploads: tuple[Upload, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n,f) and labels (n,) of all images, in an order keyed by (seed, device, sample id)."""
    keys, labels, codes = [], [], []
    for upload in uploads:
        start = b"cutlayer-probe-v1\0%d\0" % seed + upload.device.encode() + b"\0"
        keys += [hashlib.sha256(start + sample_id.tobytes()).digest() for sample_id in upload.sample_ids]
        labels.append(np.asarray(upload.labels, np.int64))
        codes.append(upload.codes)
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    # Ordered before the backend sees them: a feature's last bits depend on its neighbours in the batch.
    features = backend.features_of(np.concatenate(codes)[order]).float()
    return features, torch.from_numpy(np.concatenate(labels)[order]).to(features.device)


def folds_of(labels: torch.Tensor) -> torch.Tensor:
    """Fold (n,) of each image: the shots of a class are dealt out in turn, at most `FOLDS` of them."""
    count = min(FOLDS, int(torch.bincount(labels.cpu()).max()))
    seen: dict[int, int] = {}
    folds = []
    for label in labels.tolist():
        folds.append(seen.get(label, 0) % count)
        seen[label] = seen.get(label, 0) + 1
    return torch.tensor(folds, device=labels.device)


def choose_setting(
    inputs: torch.Tensor, labels: torch.Tensor, classes: int, steps: int
) -> tuple[float, float, float | None]:
    """(lr, L2, held-out accuracy) with the best held-out accuracy, then loss; the grid's middle where one shot each
    leaves nothing to hold out. Inputs (n,f), labels (n,).

    Raises:
        TrainingError: every setting's held-out loss is not finite.
    """
    folds = folds_of(labels)
    count = int(folds.max()) + 1
    if count < 2:
        return (*GRID[len(GRID) // 2], None)
    correct, losses = torch.zeros(len(GRID)), torch.zeros(len(GRID), dtype=torch.float64)
    for k in range(count):
        kept, held = (folds != k).float(), folds == k
        weight, bias = fit(inputs, labels, kept.expand(len(GRID), -1), list(GRID), classes, steps)  # (G,C,f), (G,C)
        logits = torch.einsum("nf,gcf->gnc", inputs[held], weight) + bias[:, None]  # (G,n_k,C)
        correct += (logits.argmax(dim=2) == labels[held]).sum(dim=1).cpu()
        wanted = labels[held].expand(len(GRID), -1)
        loss = functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").sum(dim=1)
        losses += loss.double().cpu()
    finite = [g for g in range(len(GRID)) if math.isfinite(float(losses[g]))]
    if not finite:
        raise TrainingError("no setting of the probe's grid gives a finite loss", "check the backend: export it again")
    best = max(finite, key=lambda g: (float(correct[g]), -float(losses[g])))
    return (*GRID[best], float(correct[best]) / len(labels))


def fit(
    inputs: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor, settings: list[tuple[float, float]], classes: int,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """G heads at once: weights (G,C,f) and biases (G,C) after `steps` full-batch steps of Adam from zero.

    Inputs (n,f), labels (n,), kept (G,n) = 1 where an image may be seen, settings (lr, L2) of each head.
    """
    g, device = len(settings), inputs.device
    weight = torch.zeros(g, classes, inputs.shape[1], device=device)
    bias = torch.zeros(g, classes, device=device)
    lr = torch.tensor([setting[0] for setting in settings], device=device)
    l2 = torch.tensor([setting[1] for setting in settings], device=device)
    share = kept.to(device) / kept.sum(dim=1, keepdim=True).clamp_min(1).to(device)  # (G,n)
    wanted = functional.one_hot(labels, classes).float()  # (n,C)
    moments = [torch.zeros_like(value) for value in (weight, weight, bias, bias)]
    for step in range(1, steps + 1):
        logits = torch.einsum("nf,gcf->gnc", inputs, weight) + bias[:, None]  # (G,n,C)
        error = (logits.softmax(dim=2) - wanted) * share[:, :, None]  # dCE/dlogits
        gradients = (torch.einsum("gnc,nf->gcf", error, inputs) + l2[:, None, None] * weight, error.sum(dim=1))
        for value, gradient, first, second in zip((weight, bias), gradients, moments[::2], moments[1::2], strict=True):
            first.lerp_(gradient, 0.1)  # Adam as published: 0.9, 0.999, 1e-8
            second.lerp_(gradient.square(), 0.001)
            change = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            value -= lr.view(-1, *[1] * (value.dim() - 1)) * change
    return weight, bias


def build(backend: Backend, settings: Settings) -> LinearProbe:
    """A strategy for one site."""
    return LinearProbe(backend, settings)
