"""One traced graph of a part's forward pass and its gradients, in which only the batch (and kept tokens) is symbolic.

Weights are inputs, never constants. Cutting the graph in two is left to exporter.training_partition.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from contract.errors import ExportError
from contract.training import PrototypeRule
from exporter.prototypes import distance as distance_of
from exporter.training_decompositions import BatchNorm, decomposition_table
from exporter.training_passes import tidy

IMAGES, KEEP, TARGETS, GRADIENT = "x", "keep", "targets", "grad_z"
OUTPUT, LOSS = "z", "loss"
ANCHORS, PULL = "anchors", "pull"  # of a part with a projection head
EMBEDDING, DISTANCE = "embedding", "distance"


@dataclass(frozen=True)
class Tensors:
    """The named tensors of a part, by what training does with them."""

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]  # float ones

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.trainable, *self.frozen, *self.buffers)


@dataclass
class Traced:
    """A graph with the names of its inputs (placeholders in order) and of its outputs (in order)."""

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_shape: tuple[int, ...]  # of z, without the batch; a kept-token count in it is 0


def sort_tensors(part: nn.Module, trainable: Collection[str]) -> Tensors:
    """Raises ExportError for a name that the part does not have, and for float buffers that no state dict carries."""
    parameters = dict(part.named_parameters(remove_duplicate=False))
    shared = len(parameters) - len(dict(part.named_parameters()))
    unknown = sorted(set(trainable) - set(parameters))
    if unknown or not trainable or shared:
        raise ExportError(
            f"cannot train {unknown[0]}: the part has no such parameter" if unknown
            else "two names of the part mean the same parameter" if shared
            else "no parameter of the part was chosen to be trained",
            "choose among " + ", ".join(list(parameters)[:5]) + ", ...",
        )  # fmt: skip
    state = set(part.state_dict())
    buffers = {name: value for name, value in part.named_buffers() if value.is_floating_point()}
    lost = sorted(set(buffers) - state)
    if lost:
        raise ExportError(
            f"{lost[0]} is a buffer outside the state dict", "make it persistent, or choose another model"
        )
    return Tensors(
        tuple(name for name in parameters if name in set(trainable)),
        tuple(name for name in parameters if name not in set(trainable)),
        tuple(buffers),
    )


def plain_copy(part: nn.Module) -> nn.Module:
    """A copy whose attention is made of plain products, whose activations make new tensors and whose norms count no
    batches; modes stay as they are.

    Raises ExportError where training it would draw random numbers, or a norm has no momentum.
    """
    part = copy.deepcopy(part)
    for name, each in part.named_modules():
        rate = float(getattr(each, "drop_prob", None) or getattr(each, "p", None) or 0.0)
        if each.training and rate > 0 and "drop" in type(each).__name__.lower():
            raise ExportError(
                f"{name} drops values at random (rate {rate:g}), which a training graph cannot repeat backwards",
                "build the model with drop rates of 0",
            )
        if hasattr(each, "fused_attn"):
            each.fused_attn = False
        if isinstance(getattr(each, "inplace", None), bool):
            each.inplace = False  # a graph has no place: what is saved for backward must be the value before
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if each.training and (each.momentum is None or each.running_mean is None):
                raise ExportError(
                    f"{name} keeps no running statistics with a momentum",
                    "use BatchNorm with track_running_stats=True and a momentum such as 0.1",
                )
            each.num_batches_tracked = None
    return part


def trace_training(
    part: nn.Module, input_shape: tuple[int, int, int], tensors: Tensors, class_count: int | None, kept_tokens: bool,
    prototypes: PrototypeRule | None = None, adds_loss: bool = False,
) -> Traced:  # fmt: skip
    """Forward, loss where there is one, running statistics, and the gradient of every trainable tensor.

    `part` is a plain copy, its modules in the modes to be traced. With a class count the loss is the cross-entropy of
    its logits; a part that returns (z, loss) brings its own, which is all of it unless it `adds_loss` to a head's. With
    prototypes the part returns (z, embedding), and the gradient is that of <z, grad_z> + <distance, pull>.

    Raises ExportError when torch cannot trace the part or its gradients.
    """
    example = _Example(part, tensors, input_shape, kept_tokens, class_count)
    norms = _Norms()
    with example.mode, enable_python_dispatcher(), _plain_attention(), _explained():  # or torch 2.11 fixes the batch
        z, own_loss = example.run(norms)
    if prototypes is not None or (class_count is None and (own_loss is None or adds_loss)):
        with example.mode:
            example.inputs[GRADIENT] = torch.empty(z.shape)
    if prototypes is not None:
        with example.mode:
            example.inputs[ANCHORS] = torch.empty(z.shape[0], prototypes.dimension)
            example.inputs[PULL] = torch.empty(z.shape[0])
    outputs: list[str] = []
    names = tuple(example.inputs)

    def joint(*flat: Tensor) -> list[Tensor]:
        given = dict(zip(names, flat, strict=True))
        leaves = {name: given[name].detach().requires_grad_() for name in tensors.trainable}
        z, second = example.run(norms, {**given, **leaves})
        if prototypes is not None:
            apart = distance_of(second, given[ANCHORS], prototypes.distance)
            results, ends = {OUTPUT: z, EMBEDDING: second, DISTANCE: apart}, [z, apart]
            seeds = [given[GRADIENT], given[PULL]]
        else:
            loss = second
            if class_count is not None:
                loss = -(given[TARGETS] * torch.log_softmax(z, dim=1)).sum(1).mean(0)
            results = {OUTPUT: z} if loss is None else {OUTPUT: z, LOSS: loss}
            ends, seeds = ([], []) if loss is None else ([loss], [None])
            if GRADIENT in given:
                ends, seeds = [*ends, z], [*seeds, given[GRADIENT]]
        gradients = torch.autograd.grad(ends, list(leaves.values()), seeds, allow_unused=True)
        unused = [name for name, each in zip(leaves, gradients, strict=True) if each is None]
        if unused:
            raise ExportError(
                f"{unused[0]} has no influence on what the part computes", "leave it out of the trained ones"
            )
        results.update({f"new:{name}": value for name, value in norms.moved.items()})
        results.update({f"grad:{name}": each for name, each in zip(leaves, gradients, strict=True)})
        outputs[:] = list(results)
        return list(results.values())

    module = _trace(joint, example)
    return Traced(module, names, tuple(outputs), _static(z.shape))


def trace_evaluation(part: nn.Module, input_shape: tuple[int, int, int], tensors: Tensors) -> Traced:
    """The part in evaluation mode on all tokens: z alone. Raises ExportError when torch cannot trace it."""
    part.eval()
    example = _Example(part, tensors, input_shape, False, None)
    norms = _Norms()
    names = tuple(example.inputs)

    def forward(*flat: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [example.run(norms, dict(zip(names, flat, strict=True)))[0]]

    module = _trace(forward, example)
    z = next(node for node in module.graph.nodes if node.op == "output").args[0][0].meta["val"]
    return Traced(module, names, (OUTPUT,), _static(z.shape))


def _static(shape: torch.Size) -> tuple[int, ...]:
    """Sizes without the batch; 0 stands for a size that depends on the kept tokens."""
    return tuple(size if isinstance(size, int) else 0 for size in shape[1:])


class _Example:
    """Fake inputs by name, and the part as a function of them."""

    def __init__(
        self, part: nn.Module, tensors: Tensors, input_shape: tuple[int, int, int], kept: bool, classes: int | None
    ) -> None:
        self._part = part
        self._tensors = tensors
        state = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        taken = {size for value in state.values() for size in value.shape} | set(input_shape)
        sizes = (size for size in itertools.count(5, 2) if size not in taken)  # told from every static size
        batch, count = next(sizes), next(sizes)
        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=True), allow_non_fake_inputs=True)
        self.inputs: dict[str, Tensor] = {IMAGES: self._fake(torch.zeros(batch, *input_shape), 1)}
        if kept:
            self.inputs[KEEP] = self._fake(torch.zeros(batch, count, dtype=torch.int64), 2)
        if classes is not None:
            self.inputs[TARGETS] = self._fake(torch.zeros(batch, classes), 1)
        for name in tensors.names:
            self.inputs[name] = self._fake(state[name].detach().float(), 0)

    def _fake(self, value: Tensor, symbolic: int) -> Tensor:
        """A stand-in of which the first `symbolic` sizes are unknown."""
        sizes = [DimDynamic.DUCK if place < symbolic else DimDynamic.STATIC for place in range(value.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return self.mode.from_tensor(value, symbolic_context=context)

    def run(self, norms: _Norms, given: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """z, and the loss or the embedding of a part that returns one."""
        given = self.inputs if given is None else given
        named = {name: given[name] for name in self._tensors.names}
        arguments = (given[IMAGES], given[KEEP]) if KEEP in given else (given[IMAGES],)
        with norms.watch({name: given[name] for name in self._tensors.buffers}):
            found = functional_call(self._part, named, arguments)
        return found if isinstance(found, tuple) else (found, None)


class _Norms(TorchFunctionMode):
    """Makes BatchNorm in train mode a function: its new running statistics are results, by buffer name in `moved`."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    @contextlib.contextmanager
    def watch(self, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        self.moved.clear()
        self._names = {id(value): name for name, value in buffers.items()}
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is nn.functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            return torch.batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, False)
        names = self._names[id(running_mean)], self._names[id(running_var)]
        if names[0] in self.moved:
            raise ExportError(f"{names[0]} is moved twice in one pass", "use a norm of its own at every place")
        out, *moved = BatchNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps)
        self.moved.update(zip(names, moved, strict=True))
        return out


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels' gradients have no ONNX form
        yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # tracing runs the part's own code, which may raise anything
        lines = str(error).strip().splitlines()
        raise ExportError(
            f"torch could not trace the part and its gradients: {lines[0] if lines else type(error).__name__}",
            "run with CUTLAYER_DEBUG=1 for torch's own report, or choose another cut or model",
        ) from error


def _trace(function: Callable[..., list[Tensor]], example: _Example) -> GraphModule:
    with example.mode, _plain_attention(), _explained():
        module = make_fx(function, tracing_mode="symbolic", decomposition_table=dict(decomposition_table()))(
            *example.inputs.values()
        )
    _refuse_fixed_sizes(example)
    _refuse_random(module)
    tidy(module)
    return module


def _refuse_fixed_sizes(example: _Example) -> None:
    """A part that asks whether the batch has a certain size gets the example's answer for good."""
    for name, value in example.inputs.items():
        for size in value.shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_number:
                raise ExportError(
                    f"a size of {name} became fixed at {size.node.expr}: the part depends on how many images there are",
                    "write it so that it takes any batch size",
                )


def _refuse_random(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"the part draws random numbers ({node.target}), which a training graph cannot repeat backwards",
                "build the model with drop rates of 0",
            )
