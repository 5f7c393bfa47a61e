"""The torch half of split training: a whole model W, its head and optimiser, and a backend for each cut over one set of
parameters.

Asking devices and the order of training are left to `split_rounds` and the strategies; the backend of a frozen frontend
to `backend`. Shapes: B rows of one device, R rows of a pass, n values at the cut, f features, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional

from contract.errors import ExportError, PackageError
from contract.leakage import Table
from contract.training import PROJECTION, OptimiserRule, TrainingCut, TrainingPlan
from exporter.models import family_of
from exporter.models._peft import add_peft
from exporter.split import create

from . import norm_statistics
from .backend import load_module, module_state, place
from .backend_folder import TrainingFolder
from .evaluation import Evaluation

_JUDGED_AT_ONCE = 250
_DROPS = ("p", "prob", "drop_prob", "drop_rate")  # what torch's and timm's modules call a share to leave out


@dataclass(frozen=True)
class Shipped:
    """The model as it was exported, without its classifier, and what was signed about training it."""

    module: nn.Module
    plan: TrainingPlan
    width: int  # f
    device: torch.device
    leakage: Table | None = None  # what the package's parts show
    evaluation: Evaluation | None = None  # what the operator judges the model by


def load(folder: TrainingFolder, device: torch.device) -> Shipped:
    """The shipped model.

    Raises:
        PackageError: weights, cuts or shapes do not fit the model.
        ExportError: timm cannot build the model, or no family knows it.
    """
    module = _create(folder)
    if folder.training.prototypes is not None:
        _add_projection(module, folder.training.prototypes.dimension, folder.training.cuts[0].output_shape)
    path = folder.root / "model.safetensors"
    try:
        module.load_state_dict(safetensors.torch.load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise _unfit(path, error) from error
    module = module.float().to(device).requires_grad_(True)
    for cut in folder.training.cuts:
        _check_names(module, cut, folder.root)
    widths = {_width_behind(module, cut, folder.root, device) for cut in folder.training.cuts if cut.loss == "none"}
    if len(widths) > 1:
        raise _unfit(folder.root / "training.json", ValueError(f"feature widths {sorted(widths)} behind its cuts"))
    width = widths.pop() if widths else int(module.num_features)
    return Shipped(module, folder.training, width, device, folder.leakage)


def _create(folder: TrainingFolder) -> nn.Module:
    arguments = {**folder.model_args, "num_classes": 0}
    try:
        module = create(folder.model, False, arguments)
        add_peft(module, folder.peft)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ExportError(
            f"timm could not build {folder.model} with {arguments}: {error}",
            "use the timm version that made this package, or export it again",
        ) from error
    for part in module.modules():  # a device's part has none of these, and a step must repeat
        for name in _DROPS:
            if type(getattr(part, name, None)) in (float, int):
                setattr(part, name, 0.0)
    return module


def _add_projection(module: nn.Module, dimension: int, shape: tuple[int, ...]) -> None:
    """The devices' projection head, which the server averages and never runs."""
    width = shape[0] if len(shape) == 3 else shape[-1]
    for name, size in zip(PROJECTION, ((dimension, width), (dimension,)), strict=True):
        module.register_parameter(name, nn.Parameter(torch.zeros(size)))


def _check_names(module: nn.Module, cut: TrainingCut, root: Path) -> None:
    """A cut's tensors are those of the model's first layers; with the loss, also a head's weight and bias."""
    _, family = family_of(module)
    part = module if cut.loss != "none" else family.cut(module, cut.index)[0]
    known = {name for name, tensor in part.state_dict().items() if tensor.is_floating_point()}
    odd = (set(cut.tensors) - set(PROJECTION)) ^ (known - set(PROJECTION))
    is_head = sorted(name.rpartition(".")[2] for name in odd - known) == ["bias", "weight"] and not odd & known
    if odd and not (cut.loss != "none" and is_head):
        names = ", ".join(sorted(odd)[:3])
        raise _unfit(root / "training.json", ValueError(f"cut {cut.index} and the model differ in {names}"))


@torch.no_grad()
def _width_behind(module: nn.Module, cut: TrainingCut, root: Path, device: torch.device) -> int:
    """f behind a cut, whose shape is held against the model."""
    path = root / "training.json"
    try:
        _, family = family_of(module)
        features = family.cut(module, cut.index)[1].eval()(torch.zeros(1, *cut.evaluated_shape, device=device))
    except (RuntimeError, ValueError, IndexError) as error:
        raise _unfit(path, error) from error
    if features.dim() != 2:
        raise _unfit(path, ValueError(f"cut {cut.index} gives features of shape {tuple(features.shape)}"))
    return int(features.shape[1])


def _unfit(path: Path, error: Exception) -> PackageError:
    lines = str(error).splitlines() or [repr(error)]
    return PackageError(
        f"{path} does not fit the model of its export.json: {' '.join(lines)[:300]}",
        "export again, with the versions of torch and timm that are installed here",
    )


@dataclass(frozen=True)
class Pass:
    """One forward pass: z (R,*shape), whose gradient is wanted, and outputs (R,C), or features (R,f) without a head.

    Rows of the devices lie one after another, `rows` of each."""

    cut: TrainingCut
    z: torch.Tensor
    outputs: torch.Tensor
    rows: Mapping[str, int]

    def pieces(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows (B,...) of each device."""
        return dict(zip(self.rows, tensor.split(list(self.rows.values())), strict=True))


@dataclass(frozen=True)
class OwnLoss:
    """A device's own mean loss over `count` rows, its hits, and the gradient (B,C|f) with respect to the outputs."""

    mean_loss: float
    correct: int
    count: int
    gradient: np.ndarray


def own_loss(outputs: torch.Tensor, labels: np.ndarray) -> OwnLoss:
    """Cross-entropy of logits (B,C) where the server has the labels (B,)."""
    leaf = outputs.detach().requires_grad_(True)
    y = torch.from_numpy(labels.astype(np.int64)).to(leaf.device)
    loss = functional.cross_entropy(leaf, y)
    (gradient,) = torch.autograd.grad(loss, leaf)
    correct = int((leaf.detach().argmax(dim=1) == y).sum())
    return OwnLoss(float(loss.detach()), correct, len(labels), gradient.cpu().numpy())


class SplitModel:
    """W with a head of its own, or none where the heads are the devices', and one optimiser for all of it.

    Tensors go by their names in a checkpoint: `backend.<name of the whole model>` (client layers included) and
    `head.weight`, `head.bias`.
    """

    def __init__(self, shipped: Shipped, head: nn.Linear | None) -> None:
        self.plan, self.device = shipped.plan, shipped.device
        self._module, self._head = copy.deepcopy(shipped.module), head
        _, family = family_of(self._module)
        parts = [cut for cut in self.plan.cuts if cut.loss == "none"]
        self._backends = {cut.index: family.cut(self._module, cut.index)[1] for cut in parts}
        self._live = {f"backend.{name}": tensor for name, tensor in self._module.state_dict(keep_vars=True).items()}
        if head is not None:
            self._live |= {f"head.{name}": tensor for name, tensor in head.state_dict(keep_vars=True).items()}
        self._parameters = {name: tensor for name, tensor in self._live.items() if isinstance(tensor, nn.Parameter)}
        self._optimiser = _optimiser_of(self.plan.optimiser, list(self._parameters.values()))

    def copy(self) -> SplitModel:
        """The same weights, with an optimiser at its beginning."""
        head = copy.deepcopy(self._head)
        return SplitModel(Shipped(self._module, self.plan, 0, self.device), head)

    # -- the client part

    def names_of(self, cut: TrainingCut) -> dict[str, str]:
        """What travels of a client part, by the name on the wire -> the name here: trainable tensors and buffers.

        A part that holds the whole model calls the head as the model does: what W has not is the head's.
        """
        named = {name: f"backend.{name}" for name in (*cut.trainable, *cut.buffers)}
        return {name: here if here in self._live else f"head.{name.rpartition('.')[2]}" for name, here in named.items()}

    def part(self, cut: TrainingCut) -> dict[str, np.ndarray]:
        """The client part of a cut, by the names on the wire."""
        return {name: _array(self._live[here]) for name, here in self.names_of(cut).items()}

    def floats(self) -> dict[str, np.ndarray]:
        """All weights and float buffers, by their names here; counters stay what they are."""
        return {name: _array(tensor) for name, tensor in self._live.items() if tensor.is_floating_point()}

    @torch.no_grad()
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over tensors, by their names here."""
        for name, array in arrays.items():
            self._live[name].copy_(torch.from_numpy(np.array(array)))

    def forget_moments(self, cut: TrainingCut) -> None:
        """A device now trains these layers: should they come back to the server, its optimiser starts them at 0."""
        for here in self.names_of(cut).values():
            if here in self._parameters:
                self._optimiser.state.pop(self._parameters[here], None)

    # -- a step

    def outputs(self, cut: TrainingCut, values: Mapping[str, np.ndarray]) -> Pass:
        """Each device's values (B,n) at the cut through the rest of W, in one batch.

        Normalisation is by the batch's own statistics; a batch of one row has none and takes the running ones (SE-03).
        """
        joined = np.concatenate([value.astype(np.float32, copy=False) for value in values.values()])  # (R,n)
        z = place(torch.from_numpy(joined), self.device).reshape(-1, *cut.output_shape).requires_grad_(True)
        features = self._backends[cut.index].train(len(joined) > 1)(z)  # (R,f)
        outputs = features if self._head is None else self._head(features)
        return Pass(cut, z, outputs, {device: len(value) for device, value in values.items()})

    def descend(
        self, passes: Sequence[Pass], gradients: Mapping[str, np.ndarray], rate: float
    ) -> dict[str, np.ndarray]:
        """One step of the optimiser; returns d/dz (B,n) of each device's own mean loss.

        `gradients` (B,C|f) are those of the devices' own means. A device that has none is left out; if none is there,
        nothing moves. Every layer moves by the mean over all rows that came through it, whatever their cut.
        """
        total = sum(count for each in passes for device, count in each.rows.items() if device in gradients)
        if total == 0:
            return {}
        self._optimiser.zero_grad(set_to_none=True)
        came_through = dict.fromkeys(self._parameters.values(), 0)
        returned = {}
        for each in passes:
            seeds = torch.zeros_like(each.outputs)
            for device, rows in each.pieces(seeds).items():
                if device in gradients:
                    rows.copy_(torch.from_numpy(gradients[device] * np.float32(each.rows[device] / total)))
            torch.autograd.backward(each.outputs, seeds)
            assert each.z.grad is not None
            for device, rows in each.pieces(each.z.grad).items():
                if device in gradients:
                    returned[device] = _array(rows.flatten(1) * (total / each.rows[device]))
            counted = sum(count for device, count in each.rows.items() if device in gradients)
            trained = [self._backends[each.cut.index], *([] if self._head is None else [self._head])]
            for parameter in (parameter for module in trained for parameter in module.parameters()):
                came_through[parameter] += counted
        for parameter, counted in came_through.items():
            if parameter.grad is not None and 0 < counted < total:
                parameter.grad *= total / counted
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        return returned

    @torch.no_grad()
    def predict_part(self, cut: TrainingCut, values: np.ndarray) -> np.ndarray:
        """Values (B,n) at a cut -> logits (B,C), or features (B,f) for a device's head; on the running statistics."""
        if cut.loss != "none":  # the part is the whole model: these are its logits
            return values.astype(np.float32)
        z = place(torch.from_numpy(values.astype(np.float32)), self.device).reshape(-1, *cut.evaluated_shape)
        features = self._backends[cut.index].eval()(z)
        if self._head is not None:
            features = self._head(features)
        return _array(features.float())

    @torch.no_grad()
    def accuracy(self, judged: Evaluation, part: Mapping[str, np.ndarray] | None = None) -> float:
        """Share of the images that W classifies rightly, on its running statistics and without noise; with `part` (by
        the names here) W_c and the rest of W. W stays what it is."""
        assert self._head is not None  # without one the logits are the device's
        own = {} if part is None else part
        held = {name: _array(self._live[name]) for name in own}
        self.put(own)
        try:
            correct = 0
            for start in range(0, len(judged.labels), _JUDGED_AT_ONCE):
                piece = slice(start, start + _JUDGED_AT_ONCE)
                images = place(torch.from_numpy(judged.images[piece]), self.device)
                found = self._head(self._module.eval()(images)).argmax(dim=1)
                correct += int((found.cpu() == torch.from_numpy(judged.labels[piece])).sum())
        finally:
            self.put(held)
        return correct / len(judged.labels)

    def retake_norms(self, images: np.ndarray) -> None:
        """Running statistics of W's norms become those over images (n, 3, h, w)."""
        norm_statistics.retake(self._module, torch.from_numpy(images), self.device)

    # -- state as plain tensors: nothing is pickled

    def weights(self) -> dict[str, torch.Tensor]:
        """`backend.*` and `head.*`, copied off the device."""
        head = {} if self._head is None else module_state("head", self._head)
        return module_state("backend", self._module) | head

    def moments(self) -> dict[str, torch.Tensor]:
        """What the optimiser keeps, as `optimiser.<name here>.<key>`, copied off the device."""
        return {
            f"optimiser.{name}.{key}": value.detach().to("cpu", copy=True)
            for name, parameter in self._parameters.items()
            for key, value in self._optimiser.state.get(parameter, {}).items()
            if value is not None
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `weights` and `moments` together."""
        load_module("backend", self._module, tensors)
        if self._head is not None:
            load_module("head", self._head, tensors)
        self._optimiser.state.clear()
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                name, _, key = name.removeprefix("optimiser.").rpartition(".")
                parameter = self._parameters[name]
                where = torch.device("cpu") if key == "step" else parameter.device
                self._optimiser.state[parameter][key] = value.detach().to(where, copy=True)


def _optimiser_of(rule: OptimiserRule, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if rule.kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.0, momentum=rule.momentum, weight_decay=rule.weight_decay)
    betas = (rule.beta_1, rule.beta_2)
    return torch.optim.AdamW(parameters, lr=0.0, betas=betas, eps=rule.epsilon, weight_decay=rule.weight_decay)


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().to("cpu", copy=True).contiguous().numpy()
    return array
