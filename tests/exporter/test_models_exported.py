"""Every family from the published files: `front.onnx` then the rebuilt backend answer as the whole model does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from torch import nn

from contract.errors import ExportError, UsageError
from contract.manifest import Manifest, from_bytes
from contract.tokens import TokenLayout
from exporter.checkpoint import create_model
from exporter.runtime import open_session, run_tokens
from exporter.split import build_backend
from tests.exporter import tiny

VIT = {**tiny.ARGS, "depth": 2}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2),
        "num_classes": 4}  # fmt: skip
NARROW = {"channels": (8, 8, 12, 16), "layers": (1, 1, 1, 1), "num_classes": 4}
MODELS = {
    "vit, no class token": (
        tiny.MODEL, {**VIT, "class_token": False, "global_pool": "avg"}, 1, TokenLayout(0, (4, 4), 48), "vit"
    ),
    "vit, not square": (tiny.MODEL, {**VIT, "img_size": (32, 48)}, 1, TokenLayout(1, (4, 6), 48), "vit"),
    "deit": ("deit_tiny_patch16_224", VIT, 1, TokenLayout(1, (4, 4), 48), "vit"),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT, 1, TokenLayout(2, (4, 4), 48), "vit"),
    "vit, four registers": (tiny.MODEL, {**VIT, "reg_tokens": 4}, 1, TokenLayout(5, (4, 4), 48), "vit"),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, None, TokenLayout(0, (2, 2), 96), "swin"),
    "swin, padded": (
        "swin_tiny_patch4_window7_224", {**SWIN, "img_size": (32, 48), "window_size": 7, "depths": (1, 1, 1, 1)}, 2,
        TokenLayout(0, (4, 6), 48), "swin",
    ),
    "resnet": ("resnet18", {"img_size": (64, 96), **NARROW}, 4, TokenLayout(0, (8, 12), 8), "resnet"),
    "resnet, in the stem": ("resnet18", {"small_images": True, **NARROW}, 1, TokenLayout(0, (32, 32), 64), "resnet"),
    "bottlenecks": ("resnet50", {"small_images": True, **NARROW}, 5, TokenLayout(0, (8, 8), 48), "resnet"),
    "vgg": ("vgg11_bn", {"small_images": True, "num_classes": 4}, 6, TokenLayout(0, (8, 8), 128), "vgg"),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A float32 package and its backend, and the whole model that they were made from."""

    folder: Path
    whole: nn.Module
    layout: TokenLayout
    family: str

    @property
    def manifest(self) -> Manifest:
        return from_bytes((self.folder / "manifest.json").read_bytes())

    @property
    def backend(self) -> Path:
        return self.folder.with_name(self.folder.name + ".backend")


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    name, arguments, split, layout, family = request.param
    folder = tmp_path_factory.mktemp("family") / "front"
    changes = {"model": name, "model_args": tuple(arguments.items()), "split": split, "int8": False}
    whole = create_model(tiny.plan(folder, **changes))
    with torch.no_grad():  # a fresh network's norms and biases hide what is left out of a half
        for value in whole.state_dict().values():
            if value.is_floating_point():
                value.mul_(1.5) if value.ndim >= 2 else value.add_(0.2 * torch.rand_like(value))
    save_file({key: value.clone() for key, value in whole.state_dict().items()}, folder.with_name("w.safetensors"))
    pictures = tiny.write_pictures(folder.with_name("public"), 3)
    tiny.run(folder, **changes, weights=str(folder.with_name("w.safetensors")), calibration=str(pictures))
    return Published(folder, whole, layout, family)


def test_frontend_then_backend_from_the_files_equal_the_whole_at_every_batch(published: Published) -> None:
    session = open_session(str(published.folder / "front.onnx"), 1)
    plan = json.loads((published.backend / "export.json").read_text())["plan"]
    backend = build_backend(plan["model"], plan["model_args"], plan["split"])
    backend.load_state_dict(load_file(published.backend / "backend.safetensors"))
    head = load_file(published.backend / "server_head.safetensors")
    shape = published.manifest.cuts[0].input_shape
    images = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = published.whole(images)
        for size in (1, 3, 5):
            tokens = run_tokens(session, images[:size].numpy())
            found = nn.functional.linear(backend(torch.from_numpy(tokens)), head["weight"], head["bias"])
            limit = 1e-4 * max(1.0, float(expected.abs().max()))
            assert float((found - expected[:size]).abs().max()) <= limit
    assert np.abs(tokens[0] - tokens[1]).max() > 1e-3  # two pictures, two answers


def test_the_manifest_says_what_the_tokens_are_and_whether_patches_are_retrieved(published: Published) -> None:
    manifest, layout = published.manifest, published.layout
    cut = manifest.cuts[0]
    assert cut.tokens == layout and manifest.family == published.family
    assert manifest.retrieves_patches == (published.family == "vit")
    assert load_arrays(published.folder / "golden.safetensors")["tokens"].shape[1:] == (layout.count, layout.dim)
    assert max(cut.statistics.sigma_patch) > 0 and len(cut.statistics.sigma_patch) == layout.dim
    assert cut.macs > 0 and not manifest.transforms.weight_noise


def test_ex_01_batch_sizes_are_symbolic_and_picture_sizes_are_not(published: Published) -> None:
    graph = onnx.load(published.folder / "front.onnx").graph
    for value in (graph.input[0], graph.output[0]):
        first, *rest = value.type.tensor_type.shape.dim
        assert first.dim_param and not first.dim_value and all(each.dim_value for each in rest)


def test_a_cut_out_of_range_names_the_range_of_each_family(tmp_path: Path) -> None:
    for name, arguments, _, _, _ in (MODELS["swin"], MODELS["resnet"]):
        with pytest.raises(UsageError, match=r"--split 9 leaves one half empty.*1\.\.[45]"):
            tiny.run(tmp_path / "front", model=name, model_args=tuple(arguments.items()), split=9, int8=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "tensor", "shape"),
    [("swin", "layers.1.downsample.norm.weight", (96,)), ("resnet", "layer1.0.conv1.weight", (8, 64, 3, 3))],
)
def test_weights_of_another_width_name_the_first_tensor_that_does_not_fit(
    tmp_path: Path, key: str, tensor: str, shape: tuple[int, ...]
) -> None:
    name, arguments, _, _, _ = MODELS[key]
    plan = tiny.plan(tmp_path / "front", model=name, model_args=tuple(arguments.items()))
    state = {each: value.clone() for each, value in create_model(plan).state_dict().items()}
    state[tensor] = torch.zeros(3, 5)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ExportError) as caught:
        tiny.run(tmp_path / "front", model=name, model_args=tuple(arguments.items()), int8=False,
                 weights=str(tmp_path / "w.safetensors"), calibration=str(tmp_path))  # fmt: skip
    assert f"{tensor} should be {shape}, found (3, 5)" in caught.value.cause


def test_an_opset_that_is_too_low_names_the_lowest_that_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="opset must be 17 or more"):
        tiny.plan(tmp_path / "front", opset=16)
