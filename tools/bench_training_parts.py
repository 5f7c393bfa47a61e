"""The parts that tools/bench_training trains, their graphs for the device, and the same steps in torch.

    python -m tools.bench_training_parts write NAME FOLDER
    python -m tools.bench_training_parts train NAME FOLDER STEPS float32|bfloat16

`train` prints one JSON object. As in any torch program its memory includes the library that the model is from (timm).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from contract.training import Loss
from exporter.architecture import create
from exporter.plan import BACKBONE, ModuleChoices
from exporter.skip_modules import SkipNetwork
from exporter.split import split_model
from exporter.training_graph import make_training_graphs
from exporter.training_package import set_modes, trained_names
from tools.bench_training_device import LEARNING_RATE, WARM_UP, peak_bytes


class MaskedViT(nn.Module):
    """A ViT's first blocks on the kept patches alone: they are gathered before the embedding, a linear layer."""

    def __init__(self, model: timm.models.VisionTransformer, blocks: int) -> None:
        super().__init__()
        self.size: int = model.patch_embed.patch_size[0]
        self.proj = model.patch_embed.proj
        self.cls_token, self.pos_embed = model.cls_token, model.pos_embed
        self.blocks = nn.Sequential(*list(model.blocks)[:blocks])

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """(B, 3, h, w), (B, K) -> (B, 1 + K, d)"""
        rows, size = x.shape[2] // self.size, self.size
        patches = x.reshape(-1, 3, rows, size, rows, size).permute(0, 2, 4, 1, 3, 5).reshape(-1, rows**2, 3 * size**2)
        place = self.pos_embed[0, 1:]
        if keep is not None:
            patches = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[2]))
            place = functional.embedding(keep, place)
        tokens = functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias) + place
        first = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        blocks: Tensor = self.blocks(torch.cat([first, tokens], 1))
        return blocks


@dataclass(frozen=True)
class Case:
    """A part, its batch, and the share of patches that is dropped."""

    build: Callable[[], nn.Module]
    pixels: int
    batch: int
    masked: float = 0.0
    loss: Loss = "none"  # own-head: what a graph adds to a head's loss is trained too
    frozen: tuple[str, ...] = ()  # beginnings of the names that are not trained


def split(name: str, layers: int, **arguments: object) -> nn.Module:
    return split_model(create(name, False, arguments), layers)[0]


def with_skips(skips: int) -> Case:
    """EEFT's ResNet-18 with so many skips into a block."""
    choices = ModuleChoices(skips=skips)
    return Case(
        lambda: SkipNetwork(create("resnet18", False, {}), choices), 64, 32, loss="own-head", frozen=(BACKBONE,)
    )


CASES = {
    "vit_tiny_4": Case(lambda: split("vit_tiny_patch16_224", 4), 224, 8),
    "vit_tiny_4_masked": Case(lambda: MaskedViT(create("vit_tiny_patch16_224", False, {}), 4), 224, 8, masked=0.75),
    "resnet18_layer1": Case(lambda: split("resnet18", 4, small_images=True, num_classes=10), 32, 64),
    "resnet18": Case(lambda: create("resnet18", False, {"num_classes": 0}), 64, 32, loss="own-head"),
    "eeft_resnet18": with_skips(3),
    "eeft_resnet18_k1": with_skips(1),
    "vgg16_bn_10": Case(lambda: split("vgg16_bn", 10, small_images=True, num_classes=10), 32, 32),
}


def part_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    part = case.build()
    trained = trained_names(part, case.frozen)
    set_modes(part, trained)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name in trained)
    return part


def write(case: Case, folder: Path) -> None:
    """The graphs, the parameters, and a batch that both sides train on."""
    part, shape = part_of(case), (3, case.pixels, case.pixels)
    trained = trained_names(part, case.frozen)
    graphs = make_training_graphs(part, shape, trainable=trained, kept_tokens=case.masked > 0, loss=case.loss)
    for role in ("forward", "backward", "evaluate"):
        (folder / f"{role}.onnx").write_bytes(getattr(graphs, role))
    state = {name: value.contiguous().clone() for name, value in part.state_dict().items() if value.is_floating_point()}
    save_file(state, folder / "parameters.safetensors")
    names = ("output_shape", "evaluated_shape", "trainable", "frozen", "buffers", "saved", "macs", "loss")
    facts: dict[str, object] = {name: getattr(graphs, name) for name in names}
    patches = (case.pixels // 16) ** 2
    kept = round(patches * (1 - case.masked))
    if case.masked:
        left = (graphs.evaluated_shape[0] - patches + kept, *graphs.evaluated_shape[1:])
        facts |= {"output_shape": left, "kept": kept, "patches": patches}
    (folder / "facts.json").write_text(json.dumps(facts))
    rng = np.random.default_rng(0)
    batch: dict[str, np.ndarray] = {"x": rng.standard_normal((case.batch, *shape), np.float32)}
    if case.masked:
        batch["keep"] = np.stack([rng.permutation(patches)[:kept] for _ in range(case.batch)])
    np.savez(folder / "batch.npz", **batch)


def train(case: Case, folder: Path, steps: int, precision: str) -> dict[str, object]:
    torch.set_num_threads(1)
    part = part_of(case)
    batch = {name: torch.from_numpy(array) for name, array in np.load(folder / "batch.npz").items()}
    trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
    narrow = torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
    spent_s, first_norm = [], 0.0
    for number in range(WARM_UP + steps):
        started_s = time.process_time()
        optimiser.zero_grad(set_to_none=True)
        with narrow:
            out = part(*batch.values())
        z, *added = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward([z, *added], [z.detach() / z.numel(), *(None for _ in added)])
        optimiser.step()
        spent_s.append(time.process_time() - started_s)
        if number == 0:
            first_norm = z.detach().double().norm().item()
    return {
        "step_s": statistics.median(spent_s[WARM_UP:]),
        "peak_bytes": peak_bytes(),
        "norm": first_norm,
        "version": torch.__version__,
        "python": sys.version.split()[0],
    }


def main() -> None:
    verb, name, folder = sys.argv[1:4]
    if verb == "write":
        write(CASES[name], Path(folder))
    else:
        print(json.dumps(train(CASES[name], Path(folder), int(sys.argv[4]), sys.argv[5])))


if __name__ == "__main__":
    main()
