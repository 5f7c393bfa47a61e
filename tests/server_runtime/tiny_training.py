"""A tiny whole model to be trained with devices, devices of torch, and a conductor of a few lines, for tests.

A device here does with autograd what a real one does with ONNX graphs: the same questions, batches, and rule of a step.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from contract import manifest as package
from contract import training
from contract.asks import ASK_KINDS
from contract.cut_gradient import WireGradient, read_gradient
from contract.cut_noise import image_noise
from contract.epoch_order import batch_edges, epoch_order
from contract.messages import Activations, Choice, Gradient, Settled, Update
from contract.training import AugmentRule, OptimiserRule, TrainingCut, TrainingPlan
from exporter.models import family_of
from exporter.split import create
from server_runtime import backend, backend_folder, split_model
from server_runtime.backend import new_head
from server_runtime.split_model import Shipped
from server_runtime.strategies import Ask, PartStrategy, Progress, Record, Reply, Site, State
from tests.golden.samples import MANIFEST

CLASSES = 3
SIZE = 16
VIT = ("vit_tiny_patch16_224", {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3})
# A ResNet of two small stages would be another family: the smallest that timm names, on pictures of 16 pixels.
RESNET = ("resnet18", {"small_images": True, "img_size": SIZE})
SGD = OptimiserRule()
MODES = ("raw-label", "permuted-label", "logit-gradient", "client-head")


def whole_model(name: str, arguments: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A random model without its classifier."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return create(name, False, {**arguments, "num_classes": 0})


def plan_of(
    model: nn.Module, cuts: Sequence[int], rule: OptimiserRule = SGD, gradient: str = "float32", whole: bool = False
) -> TrainingPlan:
    """What an exporter would sign; with `whole`, one part more that is the model with its head and loss."""
    _, family = family_of(model)
    depth = family.facts(model).depth
    made = [_cut_of(model, index, depth) for index in cuts]
    if whole:
        width = model.num_features
        names = [f"{name}" for name, _ in model.named_parameters()] + ["head.weight", "head.bias"]
        buffers = [name for name, each in model.named_buffers() if each.is_floating_point()]
        assert width > 0
        made.append(_described(depth, depth, (CLASSES,), names, buffers, "cross-entropy"))
    return TrainingPlan(
        training.FORMAT, "sequential_split", whole, CLASSES if whole else None, tuple(made), rule, AugmentRule(),
        gradient, "float32",
    )  # fmt: skip


def _cut_of(model: nn.Module, index: int, depth: int) -> TrainingCut:
    _, family = family_of(model)
    client, _ = family.cut(model, index)
    with torch.no_grad():
        shape = tuple(client.eval()(torch.zeros(1, 3, SIZE, SIZE)).shape[1:])
    names = [name for name, _ in client.named_parameters()]
    buffers = [name for name, each in client.named_buffers() if each.is_floating_point()]
    return _described(index, depth, shape, names, buffers, "none")


def _described(
    index: int, depth: int, shape: tuple[int, ...], names: list[str], buffers: list[str], loss: str
) -> TrainingCut:
    files = (f"forward-{index}.onnx", f"backward-{index}.onnx", f"evaluate-{index}.onnx")
    return TrainingCut(
        index, depth, f"layer {index}", *files, shape, shape, None, None, tuple(names), (), tuple(buffers), 0, 0, loss
    )


def write_folder(
    root: Path, model: tuple[str, Mapping[str, Any]] = VIT, cuts: Sequence[int] = (1, 2), **changes: Any
) -> Path:
    """A backend folder as the exporter leaves it for a package of parts."""
    root.mkdir(parents=True)
    module = whole_model(*model)
    plan = plan_of(module, cuts, **changes)
    data = training.to_bytes(plan)
    names = {training.PARAMETERS_NAME}.union(*({cut.forward, cut.backward, cut.evaluate} for cut in plan.cuts))
    files = [package.FileRecord(name, 1, "0" * 64) for name in sorted(names)]
    files.append(package.FileRecord(training.TRAINING_NAME, len(data), hashlib.sha256(data).hexdigest()))
    manifest = replace(
        MANIFEST, model=model[0], cuts=(), files=tuple(files), label_modes=MODES, classes=None,
        image=replace(MANIFEST.image, height=SIZE, width=SIZE),
        transforms=package.TransformRules(alpha=0.0, kappa=0.0, kappa_max=0.0, weight_noise=False),
    )  # fmt: skip
    (root / "manifest.json").write_bytes(package.to_bytes(manifest))
    (root / "training.json").write_bytes(data)
    (root / "export.json").write_text(json.dumps({"plan": {"model": model[0], "model_args": list(model[1].items())}}))
    safetensors.torch.save_file(
        {name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}, root / "model.safetensors"
    )
    return root


def shipped(root: Path, model: tuple[str, Mapping[str, Any]] = VIT, **changes: Any) -> Shipped:
    """The model of a backend folder that is written first."""
    folder = backend_folder.read(write_folder(root, model, **changes))
    assert isinstance(folder, backend_folder.TrainingFolder)
    return split_model.load(folder, backend.choose_device(1))


def pictures(count: int, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Images (n,3,h,w) that show their class, and labels (n,)."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 3, SIZE, SIZE))
    labels = np.arange(count) % CLASSES
    return torch.from_numpy(
        (centres[labels] + 0.5 * rng.normal(size=(count, 3, SIZE, SIZE))).astype(np.float32)
    ), labels


def optimiser_of(rule: OptimiserRule, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if rule.kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.0, momentum=rule.momentum, weight_decay=rule.weight_decay)
    betas = (rule.beta_1, rule.beta_2)
    return torch.optim.AdamW(parameters, lr=0.0, betas=betas, eps=rule.epsilon, weight_decay=rule.weight_decay)


def step_at(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()


class Device:
    """One device; `twin` names the images' ids, so that two devices can have the very same epoch order."""

    def __init__(
        self, name: str, model: Shipped, images: torch.Tensor, labels: np.ndarray, mode: str = "raw-label",
        twin: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self._shipped, self.images, self.labels, self.mode = name, model, images, labels, mode
        self.ids = [f"{twin or name}-{number}".encode() for number in range(len(images))]
        self.asked: list[str] = []
        self.choose: Callable[[int], int] = lambda number: model.plan.cuts[0].index
        self.offers: list[tuple[Mapping[str, Any], Mapping[str, np.ndarray]]] = []
        self.rests_s: list[float] = []
        self._kept: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        self.head = new_head(model.width, CLASSES, 5, name, torch.device("cpu")) if mode == "client-head" else None
        self._head_optimiser = (
            None if self.head is None else optimiser_of(model.plan.optimiser, [*self.head.parameters()])
        )

    def answer(self, ask: Ask, numbers: Mapping[str, Any]) -> Reply:
        self.asked.append(ask.kind)
        self._ask, self._numbers, self._tensors = ask.name, numbers, ask.tensors[self.name]
        reply: Reply = getattr(self, "_" + ask.kind)()
        return reply

    def batch(self, seed: int, epoch: int, place: int, size: int) -> list[int]:
        """Places of the images of a batch."""
        first, last = batch_edges(len(self.ids), size)[place]
        return epoch_order(self.ids, seed, epoch)[first:last]

    def _load_part(self) -> Settled:
        cut = self._numbers["cut"]
        known = self._shipped.plan.cut(cut)
        if known is not None and known.loss != "none":  # the finished whole model, to predict with
            assert set(self._tensors) == {*known.trainable, *known.buffers}
            self.finished = dict(self._tensors)
            return Settled(self._ask, len(self.ids))
        if not hasattr(self, "_model") or not self._tensors:
            self._model = copy.deepcopy(self._shipped.module)
        self._put(self._model, self._tensors)
        assert known is not None
        assert not self._tensors or set(self._tensors) == {*known.trainable, *known.buffers}
        self._names = (*known.trainable, *known.buffers)
        _, family = family_of(self._model)
        self.part = family.cut(self._model, cut)[0].train()
        self._optimiser = optimiser_of(self._shipped.plan.optimiser, [*self.part.parameters()])
        self._step, self._count = self._numbers["step"], 0
        return Settled(self._ask, len(self.ids))

    @staticmethod
    def _put(model: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
        held = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in tensors.items():
                held[name].copy_(torch.from_numpy(np.array(value)))

    def _check_place(self, batch: int) -> None:
        assert (self._numbers["after"], batch) == (self._step, self._count)

    def _move(self) -> None:
        """Apply the gradient of the batch that waits."""
        values, scales = self._tensors["gradient"], self._tensors.get("scales")
        gradient = torch.from_numpy(np.array(read_gradient(WireGradient(values, scales))))
        self._optimiser.zero_grad()
        self._z.backward(gradient.reshape(self._z.shape))
        step_at(self._optimiser, self._numbers["rate"])
        if self._head_optimiser is not None:
            step_at(self._head_optimiser, self._numbers["rate"])

    def _forward(self) -> Activations:
        n = self._numbers
        self._check_place(n["batch"])
        assert ("gradient" in self._tensors) == (n["batch"] > 0)
        if n["batch"] > 0:
            self._move()
        chosen = self.batch(n["seed"], n["epoch"], n["place"], n["size"])
        self._z, self._y = self.part(self.images[chosen]), self.labels[chosen]
        self._count += 1
        labels = self._y.astype(np.uint16) if self.mode in ("raw-label", "permuted-label") else None
        values = self._z.detach().flatten(1).numpy()
        return Activations(self._ask, n["batch"], len(self.ids), "train", values.copy(), labels)

    def _batch_loss(self) -> Gradient:
        self._check_place(self._numbers["batch"] + 1)
        values = torch.from_numpy(np.array(self._tensors["values"])).requires_grad_(True)
        y = torch.from_numpy(self._y)
        if self._head_optimiser is not None:
            self._head_optimiser.zero_grad()
        logits = values if self.head is None else self.head(values)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        correct = int((logits.argmax(dim=1) == y).sum())
        return Gradient(self._ask, float(loss.detach()), correct, len(y), values.grad.numpy())

    def _settle(self) -> Settled:
        self._check_place(self._numbers["batch"])
        assert self._numbers["batch"] > 0
        self._move()
        self._step, self._count = self._numbers["step"], 0
        self._keep()
        return Settled(self._ask, len(self.ids))

    def _choose_split(self) -> Choice:
        self.offers.append((self._numbers, dict(self._tensors)))
        return Choice(self._ask, self.choose(self._numbers["round"]))

    def _take_turn(self) -> Settled:
        """As `edge_runtime.part_keeper` does it: own layers first, then the server's, then the package's."""
        known = self._shipped.plan.cut(self._numbers["cut"])
        assert known is not None
        self._names = (*known.trainable, *known.buffers)
        kept = self._kept if self._numbers["after"] else {}
        own = {name: kept[name][0] for name in self._names if name in kept}
        self._model = copy.deepcopy(self._shipped.module)
        assert set(self._tensors) <= set(self._names)
        self._put(self._model, {**self._tensors, **own})
        self.part = family_of(self._model)[1].cut(self._model, known.index)[0].train()
        self._optimiser = optimiser_of(self._shipped.plan.optimiser, [*self.part.parameters()])
        for name, parameter in self.part.named_parameters():
            if name in kept and kept[name][1]:
                self._optimiser.state[parameter] = copy.deepcopy(kept[name][1])
        self._step, self._count = self._numbers["step"], 0
        self._keep()
        return Settled(self._ask, len(self.ids))

    def _keep(self) -> None:
        """What would be on the disk: each tensor with its moments."""
        held, live = self._model.state_dict(), dict(self.part.named_parameters())
        self._kept = {
            name: (
                held[name].numpy().copy(),
                copy.deepcopy(self._optimiser.state.get(live[name], {})) if name in live else {},
            )
            for name in self._names
        }

    def held(self) -> dict[str, np.ndarray]:
        """The part as it was settled last."""
        return {name: value for name, (value, _) in self._kept.items()}

    def _noisy_forward(self) -> Activations:
        reply = self._forward()
        n = self._numbers
        chosen = self.batch(n["seed"], n["epoch"], n["place"], n["size"])
        noisy = np.stack([
            values + image_noise(bytes(32), self.ids[place], b"", 0, n["sigma"], values.shape, "epoch")
            for place, values in zip(chosen, reply.values, strict=True)
        ]) if n["sigma"] else reply.values  # fmt: skip
        return replace(reply, values=noisy)

    def _sleep(self) -> Settled:
        self.rests_s.append(self._numbers["wake_s"])
        return Settled(self._ask, len(self.ids))

    def _upload_part(self) -> Update:
        self._check_place(0)
        held = self._model.state_dict()
        tensors = {name: held[name].numpy().copy() for name in self._names}
        return Update(self._ask, len(self.ids), 0, 0.0, 0, tensors)

    def _local_round(self) -> Update:
        n = self._numbers
        model = Whole(self._shipped, None)
        self._put(model.body, {name: value for name, value in self._tensors.items() if not name.startswith("head.")})
        self._put(model.head, {name[5:]: value for name, value in self._tensors.items() if name.startswith("head.")})
        optimiser = optimiser_of(self._shipped.plan.optimiser, [*model.parameters()])
        losses, correct = [], 0
        for epoch in range(n["epoch"], n["epoch"] + n["epochs"]):
            losses, correct = [], 0
            for place in range(len(batch_edges(len(self.ids), n["size"]))):
                chosen = self.batch(n["seed"], epoch, place, n["size"])
                loss, hits = model.descend(self.images[chosen], self.labels[chosen], optimiser, n["rate"])
                losses.append(loss * len(chosen))
                correct += hits
        tensors = {name: value.detach().numpy().copy() for name, value in model.body.state_dict().items()
                   if value.is_floating_point()}  # fmt: skip
        tensors |= {f"head.{name}": value.detach().numpy().copy() for name, value in model.head.state_dict().items()}
        count = len(self.ids)
        return Update(self._ask, count, count, sum(losses) / count if count else 0.0, correct, tensors)


class Whole(nn.Module):
    """The model in one piece, with the head that a server would make: the reference."""

    def __init__(self, model: Shipped, site: str | None, seed: int = 0) -> None:
        super().__init__()
        self.body = copy.deepcopy(model.module).train()
        self.head = new_head(model.width, CLASSES, seed, site or "", torch.device("cpu"))

    def descend(
        self, images: torch.Tensor, labels: np.ndarray, optimiser: torch.optim.Optimizer, rate: float
    ) -> tuple[float, int]:
        """One step; loss and hits before it."""
        y = torch.from_numpy(labels)
        logits = self.head(self.body(images))
        loss = functional.cross_entropy(logits, y)
        optimiser.zero_grad()
        loss.backward()
        step_at(optimiser, rate)
        return float(loss.detach()), int((logits.argmax(dim=1) == y).sum())

    def named(self) -> dict[str, np.ndarray]:
        """Weights and buffers under the names of a strategy's state."""
        body = {f"backend.{name}": value.detach().numpy() for name, value in self.body.state_dict().items()}
        return body | {f"head.{name}": value.detach().numpy() for name, value in self.head.state_dict().items()}


@dataclass
class Drive:
    """Runs a strategy with its devices, as the conductor would."""

    build: Callable[[], PartStrategy]
    devices: Mapping[str, Device]
    due: Callable[[int], bool] = lambda progress: False
    change: Callable[[Ask, str, Reply], Reply | None] = lambda ask, device, reply: reply
    site_name: str = "clinic"
    asks: list[Ask] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    reloads: int = 0

    @property
    def site(self) -> Site:
        return Site(self.site_name, tuple(sorted(self.devices)), CLASSES)

    def run(self) -> PartStrategy:
        """To the end; wherever the strategy makes a whole moment, a new one goes on from its state."""
        self.strategy = self.build()
        conduct, sent = self.strategy.run(self.site), None
        positions: dict[str, int] = {}
        progress, names = 0, set()
        while True:
            try:
                step = next(conduct) if sent is None else conduct.send(sent)
            except StopIteration:
                return self.strategy
            sent = {}
            if isinstance(step, Ask):
                assert step.name not in names
                assert len(step.name) <= 23
                assert step.tensors, "a question to nobody is never answered"
                names.add(step.name)
                self.asks.append(step)
                sent = self._ask(step, positions)
            elif isinstance(step, Progress):
                progress += 1
                sent = self.due(progress)
            elif step.values:
                self.records.append(dict(step.values))
            else:
                assert isinstance(step, Record)
                state = self.strategy.state()
                values = json.loads(json.dumps(dict(state.values), allow_nan=False))
                tensors = safetensors.torch.load(safetensors.torch.save(dict(state.tensors)))
                self.strategy = self.build()
                self.strategy.load(self.site, State(tensors, values))
                conduct, sent = self.strategy.run(self.site), None
                self.reloads += 1

    def _ask(self, ask: Ask, positions: dict[str, int]) -> dict[str, Reply]:
        known, replies = ASK_KINDS[ask.kind].parameters, {}
        for device in ask.tensors:
            numbers: dict[str, Any] = {"step": ask.step, "after": positions.get(device, 0), "base": 0}
            numbers = {name: number for name, number in numbers.items() if name in known and number is not None}
            numbers |= {**ask.parameters, **ask.own.get(device, {})}
            assert {name: type(value) for name, value in numbers.items()} == dict(known)
            reply = self.change(ask, device, self.devices[device].answer(ask, numbers))
            if reply is not None:
                replies[device] = reply
            if ask.step is not None and reply is not None:
                assert ask.step > positions.get(device, 0)
                positions[device] = ask.step
        return replies


def weights_of(strategy: PartStrategy) -> dict[str, np.ndarray]:
    """What would be published."""
    return {
        name: tensor.numpy()
        for name, tensor in strategy.state().tensors.items()
        if name.startswith(("backend.", "head."))
    }
