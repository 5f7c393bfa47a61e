"""Run finished training graphs in onnxruntime beside torch's own float64 gradients, and refuse what is off.

Compared at the batch size and thread count of real use: small batches hide faults of kernels. Twice: equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from contract.errors import GateError
from exporter.prototypes import distance
from exporter.runtime import open_session
from exporter.training_graph import TrainingGraphs
from exporter.training_trace import plain_copy

Arrays = dict[str, NDArray[np.generic]]

DRAWS = 16  # of random inputs, at most


@dataclass(frozen=True)
class TrainingRule:
    """Largest differences that pass, relative to the largest value of the tensor."""

    output: float = 2e-4
    gradient: float = 2e-4  # where no ReLU sees a value of another sign than in float64
    flipped_gradient: float = 0.1
    times_torch: float = 3.0  # of torch's own float32 error: in a deep net of ReLUs it is beyond the 0.1
    batch: int = 32
    redrawn_batch: int = 4  # so few values that draws without a flip are common, however deep the part
    threads: int = 2


@dataclass(frozen=True)
class TrainingFigures:
    """What the comparison found; errors are relative to the largest value of each tensor."""

    output_error: float
    gradient_error: float
    worst_gradient: str
    torch_error: float  # of the worst gradient that torch's own float32 gives
    flips: int  # signs of ReLU inputs, and maxima of poolings, that differ between float32 and float64
    statistics_error: float


def session_of(data: bytes, threads: int) -> onnxruntime.InferenceSession:
    """Of a training graph. Raises ExportError where it cannot be opened."""
    fault = "cannot open a training graph of this part"
    return open_session(data, threads, fault=fault, cure="choose another cut or model")


def run_named(session: onnxruntime.InferenceSession, feeds: Mapping[str, NDArray[np.generic]]) -> Arrays:
    """Outputs by name; of `feeds` the session takes what it asks for."""
    names = [each.name for each in session.get_outputs()]
    asked = {each.name: feeds[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(names, asked), strict=True))


def random_feeds(
    part: nn.Module, graphs: TrainingGraphs, input_shape: tuple[int, int, int], batch: int, *,
    kept: int | None, patches: int | None, class_count: int | None, seed: int = 0,
) -> Arrays:  # fmt: skip
    """x, keep, targets, grad_z and every tensor of the part, float32, seeded."""
    rng = np.random.default_rng(seed)
    state = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    names = (*graphs.trainable, *graphs.frozen, *graphs.buffers)
    feeds: Arrays = {name: state[name].detach().float().numpy() for name in names}
    feeds["x"] = rng.standard_normal((batch, *input_shape), dtype=np.float32)
    shape = list(graphs.output_shape)
    if kept is not None:
        assert patches is not None
        feeds["keep"] = np.stack([rng.permutation(patches)[:kept] for _ in range(batch)]).astype(np.int64)
        if class_count is None:
            shape[0] = graphs.evaluated_shape[0] - patches + kept
    if class_count is not None:
        feeds["targets"] = np.eye(class_count, dtype=np.float32)[rng.integers(0, class_count, batch)]
    feeds["grad_z"] = rng.standard_normal((batch, *shape), dtype=np.float32)
    if graphs.prototypes is not None:
        anchors = rng.standard_normal((batch, graphs.prototypes.dimension), dtype=np.float32)
        feeds["anchors"] = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
        feeds["pull"] = rng.standard_normal(batch, dtype=np.float32)
    return feeds


def run_graphs(graphs: TrainingGraphs, feeds: Arrays, threads: int) -> Arrays:
    """All outputs of forward and backward by name."""
    found = run_named(session_of(graphs.forward, threads), feeds)
    return {**found, **run_named(session_of(graphs.backward, threads), {**feeds, **found})}


def torch_reference(
    part: nn.Module, graphs: TrainingGraphs, feeds: Arrays, dtype: torch.dtype
) -> tuple[Arrays, list[Tensor]]:
    """The same outputs by torch's autograd in `dtype`, and which way every ReLU and maximum fell."""
    copied = plain_copy(part).to(dtype)
    copied.requires_grad_(True)
    sides: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
        value = inputs[0].detach()
        if isinstance(module, nn.MaxPool2d):
            pool = nn.functional.max_pool2d_with_indices
            sides.append(pool(value, module.kernel_size, module.stride, module.padding, module.dilation)[1])
        else:
            sides.append(value > 0)

    for each in copied.modules():
        if isinstance(each, (nn.ReLU, nn.MaxPool2d)):
            each.inplace = False
            each.register_forward_hook(note)
    arrays = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arrays.items()}
    named = {name: given[name].clone() for name in (*graphs.trainable, *graphs.frozen, *graphs.buffers)}
    for name in graphs.trainable:
        named[name].requires_grad_(True)
    arguments = (given["x"], given["keep"]) if "keep" in given else (given["x"],)
    z = functional_call(copied, named, arguments)
    z, second = z if isinstance(z, tuple) else (z, None)
    leaves = [named[name] for name in graphs.trainable]
    if graphs.prototypes is not None:
        apart = distance(second, given["anchors"], graphs.prototypes.distance)
        gradients = torch.autograd.grad([z, apart], leaves, [given["grad_z"], given["pull"]])
        made = {"z": z, "embedding": second, "distance": apart}
    else:
        loss = second
        if "targets" in given:
            loss = -(given["targets"] * torch.log_softmax(z, 1)).sum() / len(z)
        seeds = {} if loss is None else {loss: None}
        seeds |= {z: given["grad_z"]} if loss is None or graphs.loss == "own-head" else {}
        gradients = torch.autograd.grad(list(seeds), leaves, list(seeds.values()))
        made = {"z": z} if loss is None else {"z": z, "loss": loss}
    made.update({f"new:{name}": named[name] for name in graphs.moved})
    made.update({f"grad:{name}": each for name, each in zip(graphs.trainable, gradients, strict=True)})
    return {name: value.detach().numpy() for name, value in made.items()}, sides


def compare(part: nn.Module, graphs: TrainingGraphs, feeds: Arrays, threads: int) -> TrainingFigures:
    """Raises GateError when two runs differ in a bit."""
    found, again = (run_graphs(graphs, feeds, threads) for _ in range(2))
    unequal = [name for name in found if found[name].tobytes() != again[name].tobytes()]
    if unequal:
        raise GateError(f"{unequal[0]} differs between two equal runs", "report the model and its arguments")
    exact, sides = torch_reference(part, graphs, feeds, torch.float64)
    theirs, rough = torch_reference(part, graphs, feeds, torch.float32)
    flips = sum(int((a != b).sum()) for a, b in zip(sides, rough, strict=True))
    torch_error = max(_error(name, exact, theirs, feeds) for name in exact if name.startswith("grad:"))
    errors = {name: _error(name, exact, found, feeds) for name in exact}
    gradients = {name: each for name, each in errors.items() if name.startswith("grad:")}
    worst = max(gradients, key=gradients.__getitem__)
    moved = max((each for name, each in errors.items() if name.startswith("new:")), default=0.0)
    output = max(errors["z"], *(errors.get(name, 0.0) for name in ("loss", "embedding", "distance")))
    return TrainingFigures(output, gradients[worst], worst, torch_error, flips, moved)


def _error(name: str, exact: Arrays, found: Arrays, feeds: Arrays) -> float:
    """Largest difference beside the tensor's largest value; a gradient that is nothing but rounding counts as 0.

    The bias in front of a BatchNorm in train mode has such a one: the norm takes away whatever it adds.
    """
    if found[name].shape != exact[name].shape or not np.isfinite(found[name]).all():
        return float("inf")
    scale = float(np.abs(exact[name]).max(initial=0.0))
    difference = float(np.abs(exact[name] - found[name]).max(initial=0.0))
    weight = exact.get(name.removesuffix("bias") + "weight")
    if name.startswith("grad:") and weight is not None and scale < 1e-9 * float(np.abs(weight).max(initial=0.0)):
        return 0.0 if difference < 1e-3 * float(np.abs(weight).max()) else float("inf")
    return difference / max(scale, 1e-12)


def check_training_graphs(
    part: nn.Module, graphs: TrainingGraphs, input_shape: tuple[int, int, int], *, rule: TrainingRule | None = None,
    kept: int | None = None, patches: int | None = None, class_count: int | None = None,
) -> TrainingFigures:  # fmt: skip
    """Raises GateError where outputs, statistics or gradients are off, or two runs differ in a bit.

    `part` must be in the modes in which it was traced. Where signs flip between float32 and float64, gradients of any
    float32 program differ by much more, torch's own too. onnxruntime may flip one where torch does not: what looks so
    is drawn anew with fewer images, and must then be right to the last where torch flips none; a wrong graph is wrong
    every time.
    """
    rule = rule or TrainingRule()
    faults: list[str] = []
    for seed in range(DRAWS):
        batch = rule.redrawn_batch if seed else rule.batch
        feeds = random_feeds(
            part, graphs, input_shape, batch, kept=kept, patches=patches, class_count=class_count, seed=seed
        )
        figures = compare(part, graphs, feeds, rule.threads)
        if seed and figures.flips:
            continue  # cannot clear what an earlier draw without flips has shown
        found = _faults(figures, rule)
        if not found:
            return figures
        faults = faults or found
        if figures.flips or figures.gradient_error > rule.flipped_gradient:
            break
    raise GateError("the training graphs were refused: " + "; ".join(faults), "report the model and its arguments")


def _faults(figures: TrainingFigures, rule: TrainingRule) -> list[str]:
    """What is off, in words."""
    flipped = max(rule.flipped_gradient, rule.times_torch * figures.torch_error)
    limit = flipped if figures.flips else rule.gradient
    return [
        f"{what} differ by {found:.1e} of their largest value (limit {most:g})"
        for what, found, most in (
            ("outputs", figures.output_error, rule.output),
            ("running statistics", figures.statistics_error, rule.output),
            (f"gradients of {figures.worst_gradient.removeprefix('grad:')}", figures.gradient_error, limit),
        ) if not found <= most
    ]  # fmt: skip
