"""The device's worker on torch: the shipped QDQ file runs on any torch device, so that large studies take minutes.

Only the engine is ours: a small interpreter of the operators that the exporter writes. Everything around it (install,
weight noise, feature noise, retrieval, labels, ledger, messages) is edge_runtime's own code, which never imports torch.
The same for parts that devices train, whose engine is `torch_trainer`'s. Asking the worker and taking its answers are
left to `simulation`.
"""

from __future__ import annotations

import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import NodeProto, numpy_helper
from torch import Tensor
from torch.nn import functional

from contract.console import say
from contract.cut_noise import laplace_scale
from contract.errors import EngineError
from contract.images import ImageRule
from contract.keyed_noise import class_list_hash
from contract.signature import PublicKey
from contract.training import TrainingCut
from edge_runtime.choose_split import SplitCost
from edge_runtime.config import DeviceConfig
from edge_runtime.data import Dataset, Sample, load_dataset
from edge_runtime.delivery import check_stop
from edge_runtime.engines import Engine
from edge_runtime.equip import number_classes, open_bar, open_site_secret
from edge_runtime.equip_images import find_images
from edge_runtime.equip_parts import read_shipped
from edge_runtime.head import Head
from edge_runtime.install import Installed, install
from edge_runtime.int8_check import Kernels
from edge_runtime.label_keeper import LabelKeeper
from edge_runtime.meters.none import NoMeter
from edge_runtime.own_choice import OwnChoice
from edge_runtime.part_head import PartHead
from edge_runtime.part_keeper import PartKeeper, PartRules
from edge_runtime.part_store import PartCheckpoint, PartStore
from edge_runtime.part_worker import PartWorker, Pictures
from edge_runtime.picture_cache import PictureCache
from edge_runtime.pipeline import Frontend, read_picture
from edge_runtime.release_ledger import ReleaseLedger
from edge_runtime.round_keeper import RoundKeeper
from edge_runtime.stages import Stages
from edge_runtime.state import open_secret, open_state
from edge_runtime.terms import ROUND_ASKS, Terms, device_terms
from edge_runtime.trainer import Trainer
from edge_runtime.training_set import TrainingSet
from edge_runtime.transforms.cut_noise import CutNoise
from edge_runtime.transforms.weight_noise import keys_of, noise_frontend
from edge_runtime.worker import Bench, Counters, Surroundings, Worker
from tools.torch_trainer import TorchTrainer

IMAGES_AT_ONCE = 250  # a device runs as many side by side as it has threads; here they are one batch

Attributes = Mapping[str, object]
Operator = Callable[..., "Tensor | tuple[Tensor, ...]"]  # (attributes, *inputs)
OpenFrontend = Callable[[Path], Engine]
OpenPart = Callable[[TrainingCut], Trainer | TorchTrainer]


# -- operators: torch's meaning of each ONNX operator that the exporter writes; floats and codes lie on the device,
# shapes and axes (int64) on the CPU


def _quantize(attributes: Attributes, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.round(x / scale).add_(zero).clamp_(-128, 127).to(torch.int8)


def _dequantize(attributes: Attributes, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if scale.dim():
        along = [1] * codes.dim()
        along[int(attributes.get("axis", 1))] = -1
        scale, zero = scale.view(along), zero.view(along)
    return (codes.float() - zero) * scale


def _convolution(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if any(attributes.get("pads", ())) or attributes.get("group", 1) != 1:
        raise _unknown("Conv with padding or groups")
    return functional.conv2d(x, weight, bias, attributes.get("strides", 1), 0, attributes.get("dilations", 1))


def _reshape(attributes: Attributes, x: Tensor, sizes: Tensor) -> Tensor:
    wanted = sizes.tolist()
    if 0 in wanted and not attributes.get("allowzero", 0):
        wanted = [x.shape[place] if size == 0 else size for place, size in enumerate(wanted)]
    return x.reshape(wanted)


def _slice(attributes: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor) -> Tensor:
    chosen = [slice(None)] * x.dim()
    for axis, start, end in zip(axes.tolist(), starts.tolist(), ends.tolist(), strict=True):
        chosen[axis] = slice(start, end)
    return x[tuple(chosen)]


def _squeeze(attributes: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    return x.squeeze(tuple(axes.tolist()))


def _expand(attributes: Attributes, x: Tensor, sizes: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, sizes.tolist()))


def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.shape[attributes.get("start", 0) : attributes.get("end", None)])


def _split(attributes: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = int(attributes.get("axis", 0))
    if sizes is not None:
        return x.split(sizes.tolist(), axis)
    return x.split(-(-x.shape[axis] // int(attributes["num_outputs"])), axis)


def _layer_norm(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if attributes.get("axis", -1) not in (-1, x.dim() - 1):
        raise _unknown("LayerNormalization over several axes")
    return functional.layer_norm(x, weight.shape, weight, bias, float(attributes.get("epsilon", 1e-5)))


def _gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=str(attributes.get("approximate", "none")))


OPERATORS: Mapping[str, Operator] = {
    "Add": lambda attributes, a, b: a + b,
    "Sub": lambda attributes, a, b: a - b,
    "Mul": lambda attributes, a, b: a * b,
    "Div": lambda attributes, a, b: a / b,
    "MatMul": lambda attributes, a, b: a @ b,
    "Erf": lambda attributes, x: torch.erf(x),
    "Gelu": _gelu,
    "Softmax": lambda attributes, x: x.softmax(int(attributes.get("axis", -1))),
    "LayerNormalization": _layer_norm,
    "Conv": _convolution,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "Transpose": lambda attributes, x: x.permute(attributes["perm"]),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Concat": lambda attributes, *parts: torch.cat(parts, int(attributes["axis"])),
    "Expand": _expand,
    "Shape": _shape,
    "Split": _split,
}


def _unknown(what: str) -> EngineError:
    known = ", ".join(sorted(OPERATORS))
    return EngineError(f"the torch engine does not know {what}; it knows {known}", "use --engine onnxruntime")


@dataclass(frozen=True)
class Step:
    """One node, ready to run."""

    name: str
    operator: Operator
    attributes: Attributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _step(node: NodeProto) -> Step:
    if node.domain or node.op_type not in OPERATORS:
        raise _unknown(f"operator {node.domain}{'::' if node.domain else ''}{node.op_type} (node {node.name})")
    if "" in node.input or "" in node.output:
        raise _unknown(f"a {node.op_type} with left-out inputs or outputs (node {node.name})")
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    attributes = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    return Step(node.name, OPERATORS[node.op_type], attributes, tuple(node.input), tuple(node.output))


# -- the engine


class TorchEngine:
    """The frontend's graph on a torch device, many images at once; an `edge_runtime.engines.Engine`."""

    name = "torch"
    kernels: Kernels | None = None  # the codes are int8, the products are float32

    def __init__(self, model: onnx.ModelProto, device: torch.device, images_at_once: int) -> None:
        """Raises: EngineError that names an operator it does not know."""
        graph = model.graph
        self.version = f"{torch.__version__} on {device_name(device)}"
        self.threads = images_at_once
        self._device = device
        self._input, self._output = graph.input[0].name, graph.output[0].name
        self._constants = {each.name: self._place(numpy_helper.to_array(each)) for each in graph.initializer}
        self._steps: list[Step] = []
        for step in map(_step, graph.node):
            if all(name in self._constants for name in step.inputs):  # stored weights are dequantized once
                self._constants.update(self._run_step(step, self._constants))
            else:
                self._steps.append(step)
        last_use = {name: place for place, step in enumerate(self._steps) for name in step.inputs}
        self._done_after = [
            [name for name in set(step.inputs) if last_use[name] == place and name not in self._constants]
            for place, step in enumerate(self._steps)
        ]

    @torch.no_grad()
    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Tokens (B, T, d) of images (B, 3, h, w). Raises: EngineError."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # TF32 would round what the device computes exactly
        try:
            values = {self._input: self._place(images)}
            for step, done in zip(self._steps, self._done_after, strict=True):
                values.update(self._run_step(step, ChainMap(values, self._constants)))
                for name in done:
                    del values[name]
            tokens: NDArray[np.float32] = values[self._output].cpu().numpy()
            return tokens
        finally:
            torch.set_float32_matmul_precision(precision)

    def _run_step(self, step: Step, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step's outputs by name."""
        try:
            found = step.operator(step.attributes, *(values[name] for name in step.inputs))
            return dict(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        except (RuntimeError, IndexError, TypeError, KeyError, ValueError) as error:
            raise EngineError(
                f"torch {torch.__version__} cannot run {step.name}: {str(error).splitlines()[0][:300]}",
                "use --engine onnxruntime",
            ) from error

    def _place(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        return tensor if tensor.dtype == torch.int64 else tensor.to(self._device)


def device_name(device: torch.device) -> str:
    """What reports call a torch device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def open_torch(path: Path, device: torch.device | None = None) -> TorchEngine:
    """The file on a GPU where there is one, else on the CPU. Raises: EngineError."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TorchEngine(onnx.load(str(path)), where, IMAGES_AT_ONCE)


# -- the device around it


@dataclass(frozen=True)
class Device:
    """One device's real worker, and what a driver needs beside it."""

    name: str
    worker: Worker
    bench: Bench
    keeper: LabelKeeper
    installed: Installed
    codes_changed: float  # share of weight codes that the noise changed

    @property
    def terms(self) -> Terms:
        """What the device agrees to."""
        return self.bench.terms

    @property
    def engine(self) -> str:
        """Which engine answers, its version and where it runs."""
        return f"{self.bench.frontend.engine.name} {self.bench.frontend.engine.version}"


def make_device(config: DeviceConfig, trusted: Mapping[str, PublicKey], open_frontend: OpenFrontend) -> Device:
    """As edge_runtime.equip does it, but with an engine of the caller's choice and no meter. `config.engine` is the
    package folder, `config.state` the state, whose lock is let go at once: one process drives its devices in turn.

    Raises: CutlayerError of the part that is not ready.
    """
    state = open_state(config.state)
    state.close()
    stop = threading.Event()
    secret, _ = open_secret(state.device_secret, "device secret")
    site_secret = open_site_secret(config, state, say)
    installed = install(Path(config.engine), state.packages, trusted, open_frontend, say)
    dataset = find_images(config, "adapt", state, installed, secret, (), lambda: check_stop(stop), say)[0]
    hashed = class_list_hash(site_secret, dataset.classes)
    terms = device_terms(config, installed.manifest, installed.digest, len(dataset.classes), hashed)
    path, changed = installed.onnx, 0.0
    if terms.alpha > 0:
        keys = keys_of(secret, installed.digest)
        path, noise = noise_frontend(installed.onnx, installed.cut.weights, terms.alpha, keys, state.engines, say)
        changed = noise.changed_share
    bench = Bench(
        Frontend(open_frontend(path), installed.manifest.image, installed.cut.tokens), installed.cut, dataset, terms,
        secret, installed.digest, number_classes(terms, site_secret, installed.digest), config.max_releases,
        state.features, installed.manifest.retrieves_patches,
    )  # fmt: skip
    labels = {sample.sample_id: sample.label for sample in dataset.samples}
    keeper = LabelKeeper(labels, len(dataset.classes), state.head, say)
    around = Surroundings(open_bar, lambda: check_stop(stop))
    stages = Stages(NoMeter("a simulated device"), time.monotonic)
    worker = Worker(bench, ReleaseLedger(state.ledger, say), keeper, stages, around)
    return Device(config.name, worker, bench, keeper, installed, changed)


def engine_labels(devices: Sequence[Device]) -> str:
    """The engines that answered, each once."""
    return ", ".join(sorted({device.engine for device in devices}))


# -- a device that trains its part of the model


class ReadImages:
    """A device's images and the pictures of them that were decoded."""

    def __init__(self, dataset: Dataset, image: ImageRule) -> None:
        self.dataset = dataset

        def picture(sample: Sample) -> NDArray[np.uint8]:
            return read_picture(sample, image)

        self.cache = PictureCache(picture)


@dataclass(frozen=True)
class PartDevice:
    """One device's real worker, and what a driver needs beside it."""

    name: str
    worker: PartWorker
    keeper: PartKeeper
    dataset: Dataset
    terms: Terms
    wire_labels: NDArray[np.int64]  # (C,)
    installed: Installed
    secret: bytes
    head_of: Callable[[str], Head | None]  # its own head of a run
    read: ReadImages


class MemoryStore(PartStore):
    """The newest part, in memory: nobody is killed in a simulation, and a disk would be waited for."""

    keeps_rounds = False

    def __init__(self) -> None:
        self._held: dict[str, PartCheckpoint] = {}

    def steps(self, run: str) -> tuple[int, ...]:
        return (0, self._held[run].step) if run in self._held else (0,)

    def read(self, run: str, step: int) -> PartCheckpoint | None:
        held = self._held.get(run)
        return held if held is not None and held.step == step else None

    def newest_run(self) -> str:
        return next(reversed(self._held), "")

    def keep(self, checkpoint: PartCheckpoint, base: int) -> None:
        part, head = (
            {name: value.copy() for name, value in tensors.items()} for tensors in (checkpoint.part, checkpoint.head)
        )
        self._held = {checkpoint.run: replace(checkpoint, part=part, head=head)}

    def read_round(self, run: str, ask: str) -> PartCheckpoint | None:
        return None

    def last_round(self, run: str) -> PartCheckpoint | None:
        return None  # the keeper lives as long as the run


class QuickNoise:
    """A device's noise in less time, as a keyed draw takes longer than a step on a GPU: the same law from a quicker
    generator, for both kinds of draw, since no image is sent twice in an epoch here."""

    def __init__(self, noise: CutNoise) -> None:
        self.floor, self.draw_of = noise.floor, noise.draw_of
        self._rng = np.random.Generator(np.random.SFC64(list(noise.secret)))

    def add(
        self, z: NDArray[np.float32], sample_ids: Sequence[bytes], cut: int, sigma: float, draw: str
    ) -> NDArray[np.float32]:
        """As `CutNoise.add`."""
        if sigma == 0.0:
            return z
        size = self._rng.standard_exponential(z.shape, np.float32)
        signs = self._rng.integers(0, 2, z.shape, np.int8) * np.int8(2) - np.int8(1)
        return z + size * signs * np.float32(laplace_scale(sigma))


def make_part_device(
    config: DeviceConfig, installed: Installed, open_part: OpenPart, store: PartStore | None = None,
    read: ReadImages | None = None, costs: Sequence[SplitCost] = (),
) -> PartDevice:  # fmt: skip
    """As edge_runtime.equip_parts does it, but with a trainer and a store of the caller's choice and no meter. What is
    installed may be shared by devices, and so may images that were `read` under the same secrets; `costs` stand for the
    device's energy table.

    Raises: CutlayerError of the part that is not ready.
    """
    plan, image = installed.training, installed.manifest.image
    assert plan is not None
    state = open_state(config.state)
    state.close()
    stop = threading.Event()
    secret, _ = open_secret(state.device_secret, "device secret")
    site_secret = open_site_secret(config, state, say)
    if read is None:
        found, _ = find_images(config, "adapt", state, installed, secret, (), lambda: check_stop(stop), say)
        read = ReadImages(found, image)
    dataset = read.dataset
    hashed, count = class_list_hash(site_secret, dataset.classes), len(dataset.classes)
    terms = device_terms(config, installed.manifest, installed.digest, count, hashed, plan)
    wire_labels = number_classes(terms, site_secret, installed.digest)
    head = PartHead(count, secret, plan.optimiser) if terms.label_mode == "client-head" else None
    rules = PartRules(plan, terms.label_mode, wire_labels)
    images = TrainingSet(dataset.samples, count, image, plan.augment, read.cache, secret)
    opened, kept = cast(Callable[[TrainingCut], Trainer], open_part), store or MemoryStore()
    if plan.strategy in ROUND_ASKS:
        shipped, fresh = read_shipped(installed.folder), config.noise == "fresh"
        keeper: PartKeeper = RoundKeeper(rules, images, opened, shipped, kept, lambda images: None, fresh)
    else:
        noise = QuickNoise(CutNoise(secret, installed.digest, config.noise == "fresh", config.wishes.sigma_floor))
        choice = OwnChoice(costs, config.wishes, say)
        keeper = PartKeeper(rules, images, opened, head, kept, lambda images: None, noise=noise, choose=choice.answer)
    return PartDevice(
        config.name, _part_worker(keeper, dataset, installed), keeper, dataset, terms, wire_labels, installed, secret,
        lambda run: None if head is None else head.as_head(), read,
    )  # fmt: skip


def with_images(device: PartDevice, folder: Path) -> PartDevice:
    """The same device, with the same trained part, before other images. Raises: DataError."""
    max_pixels = device.installed.manifest.image.max_pixels
    dataset = load_dataset(folder, device.dataset.classes, device.secret, max_pixels, lambda: None)
    return replace(device, dataset=dataset, worker=_part_worker(device.keeper, dataset, device.installed))


def _part_worker(keeper: PartKeeper, dataset: Dataset, installed: Installed) -> PartWorker:
    image = installed.manifest.image
    pictures = Pictures(dataset.samples, image, lambda sample: read_picture(sample, image))
    stages = Stages(NoMeter("a simulated device"), time.monotonic)
    return PartWorker(keeper, pictures, stages, Surroundings(open_bar, lambda: None), Counters())
