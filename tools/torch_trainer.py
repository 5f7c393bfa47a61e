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
CAPTURED_AFTER = 3  # batches of one shape; a shape that comes once is not worth a capture
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
        self._captured = Captured(self._part, apart=cut.loss == "none") if device.type == "cuda" else None

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
            z = self._run(x, keep) if self._captured is None else self._replay(self._captured, x, keep)
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
        z: Tensor = self._part(*self._inputs(x, keep))
        return z

    def _replay(self, captured: Captured, x: Floats, keep: NDArray[np.int64] | None) -> Tensor:
        """As `_run`, with few launches; a capture's trial runs leave no trace in the statistics."""
        inputs = self._inputs(x, keep)
        call = captured.find(inputs)
        if self._statistics:
            torch._foreach_copy_(self._statistics, self._before)
        z: Tensor = call(*inputs)
        return z

    def _inputs(self, x: Floats, keep: NDArray[np.int64] | None) -> tuple[Tensor, ...]:
        given = [x] if keep is None else [x, keep]
        return tuple(torch.from_numpy(each).to(self._device) for each in given)

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


class Held(nn.Module):
    """A part under another module, because a capture takes its module's `forward` over."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Tensor) -> Any:
        return self.part(*inputs)


class Captured:
    """Forward and backward of a part as CUDA graphs, one pair for each shape of a batch that comes often.

    A step of a small part is hundreds of launches, each as long as the kernel that it starts; a graph is one. Several
    processes on a GPU, which have it in turn, gain as much. What a graph gave lasts until it is replayed.
    """

    # A graph in the memory of all parts that go forward and back at once. It is never replayed: memory ends with its
    # last graph, after one row of a study, and cannot be taken up again by the next.
    _keeper: Any = None

    def __init__(self, part: nn.Module, apart: bool) -> None:
        """`apart`: others' batches come between a forward pass and its backward pass, so memory cannot be shared."""
        self._part, self._apart = part, apart
        self._seen: dict[tuple[torch.Size, ...], int] = {}
        self._graphed: dict[tuple[torch.Size, ...], nn.Module] = {}

    def find(self, inputs: tuple[Tensor, ...]) -> nn.Module:
        """What runs such inputs: the part, or its capture."""
        shapes = tuple(each.shape for each in inputs)
        if shapes in self._graphed:
            return self._graphed[shapes]
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        if self._seen[shapes] < CAPTURED_AFTER:
            return self._part
        if Captured._keeper is None:
            Captured._keeper = torch.cuda.CUDAGraph()
            with torch.cuda.graph(Captured._keeper):
                torch.zeros(1, device=inputs[0].device)
        copies, pool = tuple(each.clone() for each in inputs), None if self._apart else Captured._keeper.pool()
        captured: Any = torch.cuda.make_graphed_callables(Held(self._part), copies, allow_unused_input=True, pool=pool)
        self._graphed[shapes] = captured
        return self._graphed[shapes]


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", copy=True).contiguous().numpy()
    return array
