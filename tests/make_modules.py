"""Training graphs of every kind of module, and what three steps in float64 make of them, for devices without torch.

`python -m tests.make_modules FOLDER` is run by `tests.make_package`; what it leaves is trained by
`tests/edge_runtime/test_trains_every_module.py`.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call

from exporter.architecture import create
from exporter.models import family_of
from exporter.plan import BACKBONE, ModuleChoices
from exporter.skip_modules import SkipNetwork
from exporter.training_graph import make_training_graphs
from exporter.training_package import set_modes, trained_names
from tests.exporter import test_training_graph as parts
from tests.exporter import tiny

STEPS, BATCH, RATE, CLASSES = 3, 6, 0.05, 4
PATCHES, KEPT = 16, 5


def modules() -> dict[str, tuple[nn.Module, dict[str, object]]]:
    """Modules by name, with what `make_training_graphs` must know of each. Smooth ones: a ReLU's sign may flip."""
    torch.manual_seed(0)
    smooth = {"small_images": True, "act_layer": "silu"}
    narrow = {"layers": (1, 1, 1, 1), "channels": (8, 8, 12, 16)}
    vgg = create("vgg11_bn", False, smooth)
    whole = create("resnet18", False, {**smooth, **narrow, "num_classes": CLASSES})
    skips = parts.shaken(parts.Skips())
    eeft = parts.shaken(SkipNetwork(create("resnet18", False, {**smooth, **narrow}), ModuleChoices()))
    set_modes(eeft, modules_of(eeft))
    return {
        "eeft": (eeft, {"trainable": modules_of(eeft), "loss": "own-head"}),
        "vit": (parts.vit_part(), {}),
        "masked-vit": (parts.vit_part(), {"kept_tokens": True}),
        "resnet": (parts.resnet(**smooth), {}),
        "small-maps": (parts.shaken(parts.SmallMaps(tiny.SHAPE[1] // 3)), {}),
        "vgg": (family_of(vgg)[1].cut(vgg, 4)[0].train(), {}),
        "skip-modules": (skips, {"trainable": [n for n, _ in skips.named_parameters() if not n.startswith("block.")]}),
        "prototype-distance": (parts.Prototypes().train(), {}),
        "projection-head": (parts.shaken(parts.Convolutions()), {}),
        "whole-model": (whole.train(), {"loss": "cross-entropy", "class_count": CLASSES}),
    }


def modules_of(network: SkipNetwork) -> list[str]:
    """What EEFT trains."""
    return list(trained_names(network, (BACKBONE,)))


def make(root: Path) -> None:
    """One folder for each module."""
    for name, (part, more) in modules().items():
        folder = root / name
        folder.mkdir(parents=True)
        given = {"trainable": [each for each, _ in part.named_parameters()], **more}
        graphs = make_training_graphs(part, tiny.SHAPE, **given)  # type: ignore[arg-type]
        for role in ("forward", "backward", "evaluate"):
            (folder / f"{role}.onnx").write_bytes(getattr(graphs, role))
        floats = {key: value for key, value in part.state_dict().items() if value.is_floating_point()}
        save_file({key: value.contiguous().clone() for key, value in floats.items()}, folder / "parameters.safetensors")
        save_file(train(part, list(graphs.trainable), more), folder / "steps.safetensors")
        masked = bool(more.get("kept_tokens"))
        seen = graphs.evaluated_shape
        facts = {
            "output_shape": (seen[0] - PATCHES + KEPT, *seen[1:]) if masked else graphs.output_shape,
            "evaluated_shape": seen, "kept": KEPT if masked else None, "patches": PATCHES if masked else None,
            "trainable": graphs.trainable, "frozen": graphs.frozen, "buffers": graphs.buffers, "saved": graphs.saved,
            "loss": loss_of(part, more), "rate": RATE,
        }  # fmt: skip
        (folder / "facts.json").write_text(json.dumps(facts))


def loss_of(part: nn.Module, more: dict[str, object]) -> str:
    """Where the loss is: elsewhere, in the graph, or in both."""
    return str(more.get("loss", "cross-entropy" if isinstance(part, (parts.Skips, parts.Prototypes)) else "none"))


def train(part: nn.Module, trainable: list[str], more: dict[str, object]) -> dict[str, torch.Tensor]:
    """Inputs of every step, and the tensors after the last one: plain gradient descent in float64."""
    rng = torch.Generator().manual_seed(1)
    exact = copy.deepcopy(part).double()
    kept: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        x = torch.randn(BATCH, *tiny.SHAPE, generator=rng)
        kept[f"x.{step}"] = x
        inputs = [x.double()]
        if more.get("kept_tokens"):
            keep = torch.stack([torch.randperm(PATCHES, generator=rng)[:KEPT] for _ in range(BATCH)])
            kept[f"keep.{step}"] = keep
            inputs.append(keep)
        named = dict(exact.named_parameters())
        out = functional_call(exact, {}, tuple(inputs))
        z, loss = out if isinstance(out, tuple) else (out, None)
        if more.get("loss") == "cross-entropy":
            targets = torch.nn.functional.one_hot(torch.arange(BATCH) % CLASSES, CLASSES).float()
            kept[f"targets.{step}"] = targets
            loss = -(targets.double() * z.log_softmax(1)).sum() / BATCH
        if loss is None or more.get("loss") == "own-head":
            gradient = torch.randn(z.shape, generator=rng) / BATCH
            kept[f"grad_z.{step}"] = gradient
            loss = (z * gradient.double()).sum() + (0.0 if loss is None else loss)
        gradients = torch.autograd.grad(loss, [named[name] for name in trainable])
        with torch.no_grad():
            for name, each in zip(trainable, gradients, strict=True):
                named[name] -= RATE * each
    floats = {name: value for name, value in exact.state_dict().items() if value.is_floating_point()}
    return kept | {f"after.{name}": value.float().contiguous() for name, value in floats.items()}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
