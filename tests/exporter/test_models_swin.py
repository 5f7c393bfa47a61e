"""Swin: halves beside the whole at every cut, whole and padded windows, buffers that no state dict carries, folds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exporter.architecture import create
from exporter.models import family_of
from exporter.onnx_graph import inference_mode
from exporter.quantize import Quantizer, calibrate
from exporter.quantize_folds import fold, sources
from exporter.split import backend_state, build_backend, split_tokens, usual_cut

SMALL = {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "num_classes": 4}
MODELS = {
    "whole windows": ("swin_tiny_patch4_window7_224", {**SMALL, "img_size": 64, "window_size": 4}),
    "padded windows, not square": ("swin_tiny_patch4_window7_224", {**SMALL, "img_size": (64, 96), "window_size": 7}),
    "windows by stage": ("swin_s3_tiny_224", {**SMALL, "img_size": 64, "window_size": (4, 4, 4, 2)}),
    "any image size": (
        "swin_tiny_patch4_window7_224", {**SMALL, "img_size": 64, "window_size": 4, "strict_img_size": False},
    ),
}  # fmt: skip


def build(name: str, arguments: dict) -> nn.Module:
    torch.manual_seed(0)
    model = create(name, False, arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.ndim >= 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images_for(model: nn.Module, count: int = 2, seed: int = 1) -> torch.Tensor:
    shape = family_of(model)[1].facts(model).input_shape
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "arguments"), MODELS.values(), ids=MODELS)
def test_every_block_boundary_keeps_the_function_and_the_names(name: str, arguments: dict) -> None:
    model = build(name, arguments)
    family = family_of(model)[1]
    facts, layouts, images = family.facts(model), family.layouts(model), images_for(model)
    assert facts.depth == 8 and facts.layers[2] == "layers.1.blocks.0" and facts.layout is None
    assert usual_cut(facts) == 6  # behind stage 3 of 4, two thirds would be 5
    own = {each for each in model.state_dict() if not each.startswith("head.")}
    with inference_mode(model):
        whole = model.forward_head(model.forward_features(images), pre_logits=True)
        for k in range(1, 8):
            frontend, backend, layout = split_tokens(model, k)
            tokens = frontend(images)
            assert layout == layouts[k - 1] and tokens.shape == (2, layout.count, layout.dim)
            torch.testing.assert_close(backend(tokens), whole, rtol=1e-5, atol=1e-5)
            front, back = set(frontend.state_dict()), set(backend.state_dict())
            assert not front & back and front | back == own


def test_tokens_lie_as_the_stages_grid() -> None:
    model = build(*MODELS["padded windows, not square"])
    layouts = family_of(model)[1].layouts(model)
    assert [each.grid for each in layouts] == [(16, 24)] * 2 + [(8, 12)] * 2 + [(4, 6)] * 2 + [(2, 3)]
    assert [each.dim for each in layouts] == [24, 24, 48, 48, 96, 96, 192] and not any(each.prefix for each in layouts)


@pytest.mark.parametrize(("name", "arguments"), MODELS.values(), ids=MODELS)
def test_a_backend_is_rebuilt_with_what_no_state_dict_carries(name: str, arguments: dict) -> None:
    model = build(name, arguments)
    for k in (1, 3, 6):
        _, backend, layout = split_tokens(model, k)
        rebuilt = build_backend(name, arguments, k)
        rebuilt.load_state_dict(backend_state(model, k))
        tokens = torch.randn(2, layout.count, layout.dim, generator=torch.Generator().manual_seed(k))
        with torch.no_grad():
            torch.testing.assert_close(rebuilt(tokens), backend(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["whole windows", "padded windows, not square"])
def test_folds_keep_the_function(key: str) -> None:
    """A norm in front of padded windows must be left alone: padding comes behind it and is no token."""
    model = build(*MODELS[key])
    frontend, _, _ = split_tokens(model, 6)
    sites = family_of(model)[1].fold_sites(frontend)
    before = {linear for _, linear in sites.normed}
    padded = {name: any(s % w for s, w in zip(block.input_resolution, block.window_size, strict=True))
              for name, block in frontend.named_modules() if hasattr(block, "input_resolution")}  # fmt: skip
    assert {name for name in padded if f"{name}.attn.qkv" in before} == {n for n, pads in padded.items() if not pads}
    assert any(padded.values()) == key.startswith("padded")
    images = images_for(model)
    with inference_mode(frontend):
        expected = frontend(images)
        others = images_for(model, 4, seed=2)
        fold(frontend, sites, calibrate(frontend, [others]), Quantizer(), sources(frontend, others[:1]))
        torch.testing.assert_close(frontend(images), expected, rtol=1e-4, atol=1e-4)
