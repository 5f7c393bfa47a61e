"""A client part in training on a torch device: `edge_runtime.trainer.Trainer`'s methods and laws, for studies on a GPU.

The part is cut from the torch model itself, so neither graphs nor onnxruntime are used; its values come from the
package's parameter file, and go by the same names. Asks, batches and checkpoints stay `edge_runtime.part_keeper`'s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from contract.errors import DeviceError, RemoteProtocolError, TrainingError
from contract.training import PARAMETERS_NAME, OptimiserRule, PrototypeRule, TrainingCut
from edge_runtime.trainer import LOWER_RATE, NEW_RUN, Forward, StepFacts
from exporter import prototypes
from exporter.models import family_of
from exporter.models._masked import masked_whole
from exporter.training_package import set_modes

Floats: TypeAlias = NDArray[np.float32]
EVALUATED_AT_ONCE = 250
# Our names of an optimiser's moments -> torch's
MOMENTS = {"sgd": {"momentum": "momentum_buffer"}, "adamw": {"first": "exp_avg", "second": "exp_avg_sq"}}


def open_torch_trainer(
    folder: Path, cut: TrainingCut, rule: OptimiserRule, model: nn.Module, class_count: int | None,
    device: torch.device, projected: PrototypeRule | None = None,
) -> TorchTrainer:  # fmt: skip
    """A trainer on a verified package's parameters; `model` is the whole one without a head, and is left as it is."""
    with safe_open(str(folder / PARAMETERS_NAME), framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in cut.tensors}
    part = part_of(model, cut, class_count)
    if projected is not None:
        prototypes.attach(part, projected, prototypes.width_of(cut.output_shape))
    return TorchTrainer(cut, rule, part, tensors, device, projected)


def part_of(model: nn.Module, cut: TrainingCut, class_count: int | None) -> nn.Module:
    """A copy of the layers of a cut; with a new head where the loss is the part's own."""
    whole = copy.deepcopy(model)
    if cut.loss == "own-head":
        return whole
    if cut.loss != "none" and cut.kept is not None:
        whole.reset_classifier(class_count)
        return masked_whole(whole)
    if cut.loss == "none":
        part: nn.Module = family_of(whole)[1].cut(whole, cut.index)[0]
        return part
    whole.reset_classifier(class_count)
    return whole


class TorchTrainer:
    """`forward`, `backward`, `step`, in this order, for each batch; until `step` nothing of the state has moved."""

    def __init__(
        self, cut: TrainingCut, rule: OptimiserRule, part: nn.Module, tensors: Mapping[str, NDArray[Any]],
        device: torch.device, projected: PrototypeRule | None = None,
    ) -> None:  # fmt: skip
        """`part` becomes the trainer's own; `tensors` are copied into it."""
        self.cut, self._rule, self._device, self._projected = cut, rule, device, projected
        self._part = part.float().to(device)
        live = {**dict(self._part.named_parameters()), **dict(self._part.named_buffers())}
        self._tensors = {name: live[name] for name in cut.tensors}
        self._put(tensors)
        for name, parameter in self._part.named_parameters():
            parameter.requires_grad_(name in cut.trainable)
        set_modes(self._part, cut.trainable)
        self._trainable = [self._tensors[name] for name in cut.trainable]
        self._optimiser = self._new_optimiser()
        self._steps = 0
        # A forward pass in train mode moves the statistics; they count only from the step on. As `data`, for autograd
        # keeps watch over them, although a backward pass in train mode does not read them.
        self._statistics = [self._tensors[name].data for name in cut.buffers]
        self._before = [each.clone() for each in self._statistics]
        self._after = [each.clone() for each in self._statistics]
        self._output: Tensor | None = None  # z, or the loss where it is the part's own
        self._added: list[Tensor] = []  # a loss that is added to that of a head behind z
        self._distance: Tensor | None = None  # (B,), of a part with a projection head
        self._has_gradients = False

    def forward(
        self, x: Floats, targets: Floats | None = None, keep: NDArray[np.int64] | None = None,
        anchors: Floats | None = None,
    ) -> Forward:  # fmt: skip
        """Images (B, 3, h, w) in train mode; `targets` (B, C) one-hot where the loss is the part's own.

        `keep` (B, K) patch positions where it takes them.
        Raises: TrainingError when the loss is not finite, or a batch has no statistics.
        """
        self.discard()
        if self._statistics:  # a part without norms has none
            torch._foreach_copy_(self._before, self._statistics)
        try:
            z = self._run(x, keep)
        except ValueError as error:  # torch's refusal of one value per channel
            raise TrainingError(f"{error}; nothing was changed", "use batches of two or more") from error
        finally:
            if self._statistics:
                torch._foreach_copy_(self._after, self._statistics)
                torch._foreach_copy_(self._statistics, self._before)
        if self._projected is not None:
            assert anchors is not None
            self._output, embedding = z
            held = torch.from_numpy(anchors).to(self._device)
            self._distance = prototypes.distance(embedding, held, self._projected.distance)
            return Forward(_array(self._output), None, _array(embedding), _array(self._distance))
        if self.cut.loss != "cross-entropy":
            z, *self._added = z if isinstance(z, tuple) else (z,)
            self._output = z
            return Forward(_array(z), float(self._added[0].detach()) if self._added else None)
        assert targets is not None
        self._output = functional.cross_entropy(z, torch.from_numpy(targets).to(self._device))
        loss = float(self._output.detach())
        if not math.isfinite(loss):
            raise TrainingError("the loss of a batch is not finite; nothing was changed", LOWER_RATE)
        return Forward(_array(z), loss)

    def _run(self, x: Floats, keep: NDArray[np.int64] | None) -> Tensor:
        images = torch.from_numpy(x).to(self._device)
        return self._part(images) if keep is None else self._part(images, torch.from_numpy(keep).to(self._device))

    @torch.no_grad()
    def features(self, x: Floats, keep: NDArray[np.int64] | None = None) -> Floats:
        """z (n, *output_shape) as in training, of the patches in `keep`, without a batch being begun."""
        return _array(self._run(x, keep))

    def backward(
        self, grad_z: Floats | None = None, pull: Floats | None = None, only: Collection[str] | None = None
    ) -> None:
        """Gradients from d loss / d z (B, *output_shape), absent where the loss is the part's own, and from
        d loss / d distance (B,) of a part with a projection head; with `only`, of some trainable tensors."""
        if self._output is None:
            raise ValueError("backward without a forward")
        output, self._output = self._output, None
        seed = None if grad_z is None else torch.from_numpy(np.ascontiguousarray(grad_z)).to(self._device)
        ends, seeds = [output, *self._added], [seed, *(None for _ in self._added)]
        if self._distance is not None:
            assert pull is not None
            ends, seeds = [output, self._distance], [seed, torch.from_numpy(pull).to(self._device)]
        inputs = None if only is None else [self._tensors[name] for name in self.cut.trainable if name in only]
        torch.autograd.backward(ends, seeds, inputs=inputs)
        self._added, self._distance, self._has_gradients = [], None, True

    def step(self, learning_rate: float) -> StepFacts:
        """Move the trainable tensors and commit the batch's statistics.

        Raises: TrainingError when a gradient is not finite: then the batch is dropped and nothing has moved.
        """
        if not self._has_gradients:
            raise ValueError("a step without gradients")
        norms = torch._foreach_norm([each.grad for each in self._trainable if each.grad is not None])
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm):
            self.discard()
            raise TrainingError("a gradient is not finite; nothing was changed", LOWER_RATE)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate
        self._optimiser.step()
        if self._statistics:  # a part without norms has none
            torch._foreach_copy_(self._statistics, self._after)
        self._steps += 1
        self.discard()
        return StepFacts(norm, self._steps)

    def discard(self) -> None:
        """Drop a batch that was begun."""
        self._output, self._added, self._distance, self._has_gradients = None, [], None, False
        self._optimiser.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, x: Floats) -> Floats:
        """z (n, *output_shape) of images (n, 3, h, w) in evaluation mode."""
        self._part.eval()
        pieces = torch.from_numpy(x).split(EVALUATED_AT_ONCE)
        found = [_array(self._evaluated(piece)) for piece in pieces if len(piece)]
        set_modes(self._part, self.cut.trainable)
        return np.concatenate(found) if found else np.empty((0, *self.cut.evaluated_shape), np.float32)

    def _evaluated(self, images: Tensor) -> Tensor:
        out = self._part(images.to(self._device))
        z: Tensor = out if self._projected is None else out[0]
        return z

    def parameters(self) -> dict[str, Floats]:
        """Trainable tensors and buffers, copied off the device."""
        return {name: _array(self._tensors[name]) for name in (*self.cut.trainable, *self.cut.buffers)}

    def load_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `parameters` of another device gave; the optimiser starts anew.

        Raises: RemoteProtocolError when names or shapes are not right: then nothing has changed.
        """
        self._take(tensors, (*self.cut.trainable, *self.cut.buffers))
        self._optimiser, self._steps = self._new_optimiser(), 0

    def load_frozen(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take over the tensors that are not trained here. Raises: as `load_parameters`."""
        self._take(tensors, self.cut.frozen)

    def _take(self, tensors: Mapping[str, NDArray[Any]], names: Sequence[str]) -> None:
        expected = {name: tuple(self._tensors[name].shape) for name in names}
        found = {name: array.shape for name, array in tensors.items()}
        if found != expected:
            wrong = sorted(dict(found.items() ^ expected.items()))
            raise RemoteProtocolError(f"tensor {wrong[0]} of cut {self.cut.index} is not as expected", NEW_RUN)
        self.discard()
        self._put(tensors)

    def state(self) -> dict[str, NDArray[Any]]:
        """All that training has moved, by the same names as the device's own trainer has."""
        moved: dict[str, NDArray[Any]] = {f"tensor:{name}": array for name, array in self.parameters().items()}
        for ours, theirs in self._moments.items():
            for name, parameter in zip(self.cut.trainable, self._trainable, strict=True):
                kept = self._optimiser.state.get(parameter, {}).get(theirs)
                moved[f"{ours}:{name}"] = np.zeros(parameter.shape, np.float32) if kept is None else _array(kept)
        return {**moved, "steps": np.array([self._steps], np.int64)}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from where `state` was taken. Raises: DeviceError when it is another cut's or optimiser's."""
        if state.keys() != self.state().keys():
            raise DeviceError(f"the saved training state is not of cut {self.cut.index} and its optimiser", NEW_RUN)
        self.discard()
        self._put({name: state[f"tensor:{name}"] for name in (*self.cut.trainable, *self.cut.buffers)})
        self._optimiser, self._steps = self._new_optimiser(), int(state["steps"][0])
        for name, parameter in zip(self.cut.trainable, self._trainable, strict=True) if self._steps else ():
            kept = {
                theirs: torch.from_numpy(state[f"{ours}:{name}"].copy()).to(self._device)
                for ours, theirs in self._moments.items()
            }
            count = (
                {"step": torch.tensor(float(self._steps), device=self._place_of_steps)}
                if self._rule.kind == "adamw"
                else {}
            )
            self._optimiser.state[parameter].update({**count, **kept})

    @property
    def _moments(self) -> Mapping[str, str]:
        return MOMENTS[self._rule.kind] if self._rule.kind != "sgd" or self._rule.momentum else {}

    @property
    def _place_of_steps(self) -> torch.device:
        """Where torch's AdamW counts: its fused kernel beside the weights, the others on the CPU."""
        return self._device if self._device.type == "cuda" else torch.device("cpu")

    def _new_optimiser(self) -> torch.optim.Optimizer:
        rule, trainable = self._rule, self._trainable
        if rule.kind == "sgd":
            return torch.optim.SGD(trainable, lr=0.0, momentum=rule.momentum, weight_decay=rule.weight_decay)
        betas = (rule.beta_1, rule.beta_2)
        fused = self._device.type == "cuda"
        return torch.optim.AdamW(
            trainable, lr=0.0, betas=betas, eps=rule.epsilon, weight_decay=rule.weight_decay, fused=fused
        )

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        for name, array in tensors.items():
            self._tensors[name].copy_(torch.from_numpy(np.array(array)))


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", copy=True).contiguous().numpy()
    return array
