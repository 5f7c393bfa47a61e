"""ResNet and VGG: halves beside the whole at every cut, names, heads, and the variants for small images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from contract.errors import ExportError
from exporter.architecture import create
from exporter.checkpoint import own_head
from exporter.models import family_of
from exporter.onnx_graph import export_float, inference_mode
from exporter.runtime import open_session, run_tokens
from exporter.split import backend_state, build_backend, split_model, split_tokens

NARROW = {"channels": (8, 8, 12, 16), "num_classes": 4}
MODELS = {
    "resnet18 small": ("resnet18", {"small_images": True, **NARROW}, 10),
    "resnet18": ("resnet18", {"img_size": 64, **NARROW}, 10),
    "resnet50 small": ("resnet50", {"small_images": True, **NARROW}, 18),
    "deep stem": ("resnet18d", {"small_images": True, **NARROW}, 10),
    "vgg11_bn small": ("vgg11_bn", {"small_images": True, "num_classes": 4}, 21),
    "vgg11 small": ("vgg11", {"small_images": True, "num_classes": 4}, 21),
}


def build(name: str, arguments: dict) -> nn.Module:
    torch.manual_seed(0)
    return create(name, False, arguments).eval()


@pytest.mark.parametrize(("name", "arguments", "depth"), MODELS.values(), ids=MODELS)
def test_every_cut_keeps_the_function_and_the_names(name: str, arguments: dict, depth: int) -> None:
    model = build(name, arguments)
    facts = family_of(model)[1].facts(model)
    assert facts.depth == len(facts.layers) == depth and facts.layout is None
    images = torch.randn(2, *facts.input_shape, generator=torch.Generator().manual_seed(1))
    own = {each for each in model.state_dict() if not each.startswith(("fc.", "head."))}
    with torch.no_grad():
        whole = model.forward_head(model.forward_features(images), pre_logits=True)
        for k in range(1, depth):
            frontend, backend = split_model(model, k)
            torch.testing.assert_close(backend(frontend(images)), whole, rtol=1e-5, atol=1e-6)
            front, back = set(frontend.state_dict()), set(backend.state_dict())
            assert not front & back and front | back == own


@pytest.mark.parametrize(("name", "arguments", "depth"), MODELS.values(), ids=MODELS)
def test_the_head_is_one_linear_layer_over_the_features(name: str, arguments: dict, depth: int) -> None:
    model = build(name, arguments)
    weight, bias = own_head(model)
    images = torch.randn(2, *family_of(model)[1].facts(model).input_shape)
    frontend, backend = split_model(model, depth // 2)
    with torch.no_grad():
        torch.testing.assert_close(backend(frontend(images)) @ weight.T + bias, model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["resnet18 small", "vgg11_bn small"])
def test_a_backend_is_rebuilt_without_the_frontend(key: str) -> None:
    name, arguments, _ = MODELS[key]
    model = build(name, arguments)
    rebuilt = build_backend(name, arguments, 6)
    rebuilt.load_state_dict(backend_state(model, 6))
    frontend, backend, _ = split_tokens(model, 6)
    with torch.no_grad():
        tokens = frontend(torch.randn(2, 3, 32, 32))
        torch.testing.assert_close(rebuilt(tokens), backend(tokens), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", {"img_size": (64, 96), **NARROW}),
        ("resnet50", {"small_images": True, **NARROW}),
        ("resnet18d", {"img_size": 48, **NARROW}),
        ("vgg11_bn", {"small_images": True, "num_classes": 4}),
    ],
)
def test_tokens_are_the_maps_cells_in_row_major_order(name: str, arguments: dict) -> None:
    model = build(name, arguments)
    facts = family_of(model)[1].facts(model)
    layouts = family_of(model)[1].layouts(model)
    assert len(layouts) == facts.depth - 1
    images = torch.randn(2, *facts.input_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.forward_head(model.forward_features(images), pre_logits=True)
        for k in range(1, facts.depth):
            features = split_model(model, k)[0](images)
            frontend, backend, layout = split_tokens(model, k)
            tokens = frontend(images)
            assert layout == layouts[k - 1]
            assert (layout.prefix, layout.dim, layout.grid) == (0, features.shape[1], tuple(features.shape[2:]))
            row, column = layout.grid[0] - 1, layout.grid[1] // 2
            cell = tokens[:, row * layout.grid[1] + column]
            torch.testing.assert_close(cell, features[:, :, row, column], rtol=0, atol=0)
            torch.testing.assert_close(backend(tokens), whole, rtol=1e-5, atol=1e-6)


def test_layers_of_a_frontend_keep_their_names() -> None:
    frontend, _, _ = split_tokens(build("resnet18", {"small_images": True, **NARROW}), 4)
    kinds = {name: type(each) for name, each in frontend.named_modules()}
    assert kinds["conv1"] is nn.Conv2d and kinds["layer1.1.conv2"] is nn.Conv2d
    assert isinstance(frontend.get_submodule("layer1.0.bn1"), nn.BatchNorm2d)


def test_no_cut_lies_inside_a_residual_block() -> None:
    """Only whole blocks: a cut between their layers would lose the shortcut."""
    model = build("resnet50", {"small_images": True, **NARROW})
    layers = family_of(model)[1].facts(model).layers
    assert layers[2:5] == ("layer1.0", "layer1.1", "layer1.2") and not any("conv" in name for name in layers[1:])


def test_ex_02_running_statistics_are_used_and_kept() -> None:
    """A network handed over in training mode, whose norms have seen other data than they would see now."""
    model = build("resnet18", {"small_images": True, "layers": (1, 1, 1, 1), **NARROW})
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    frontend, _, _ = split_tokens(model, 4)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with inference_mode(frontend):
        expected = frontend(images).numpy()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    session = open_session(export_float(frontend, (3, 32, 32), 20).SerializeToString(), 1)
    np.testing.assert_allclose(run_tokens(session, images.numpy()), expected, atol=1e-4)
    np.testing.assert_array_equal(*(run_tokens(session, images.numpy()) for _ in range(2)))
    assert model.training and frontend.get_submodule("layer1.0.bn1").training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_small_stem_keeps_the_picture_at_full_size() -> None:
    model = create("resnet18", False, {"small_images": True})
    for k in range(1, 5):
        assert split_model(model, k)[0](torch.zeros(2, 3, 32, 32)).shape == (2, 64, 32, 32)


def test_vgg16_is_cut_as_the_paper_counts() -> None:
    model = create("vgg16_bn", False, {"small_images": True})
    shapes = [tuple(split_model(model, k)[0](torch.zeros(2, 3, 32, 32)).shape[1:]) for k in range(1, 11)]
    assert shapes == [(64, 32, 32)] * 4 + [(64, 16, 16)] + [(128, 16, 16)] * 4 + [(128, 8, 8)]
    assert set(dict(model.named_children())) == {"features", "pre_logits", "head"}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_other_models_have_no_variant_for_small_images(name: str) -> None:
    with pytest.raises(ExportError, match=name):
        create(name, False, {"small_images": True})


def test_pretrained_weights_of_large_images_are_not_thrown_away() -> None:
    with pytest.raises(ExportError, match="small_images"):
        create("resnet18", True, {"small_images": True})
