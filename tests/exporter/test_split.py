from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from contract.errors import ExportError, UsageError
from exporter.checkpoint import own_head
from exporter.models import Facts, family_of
from exporter.onnx_graph import inference_mode
from exporter.split import backend_state, build_backend, check_cut, default_cut, split_model, split_tokens, usual_cut
from tests.exporter import tiny

VARIANTS = {
    "class token": ("vit_tiny_patch16_224", {}, 1),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, 2),
    "layer scale, no position for the class token": ("deit3_small_patch16_224", {}, 1),
    "register tokens": ("vit_tiny_patch16_224", {"reg_tokens": 4}, 5),
    "no class token, mean pooling": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, 0),
    "attention pooling": ("vit_base_patch16_siglip_224", {}, 0),
    "norm before the blocks": ("vit_base_patch16_clip_224", {}, 1),
    "parallel blocks": ("vit_small_patch16_18x2_224", {}, 1),
    "gated dinov2 shape": ("vit_base_patch14_reg4_dinov2", {}, 5),
    "any image size": ("vit_tiny_patch16_224", {"dynamic_img_size": True}, 1),
}


@pytest.mark.parametrize(("name", "more", "prefix"), VARIANTS.values(), ids=VARIANTS)
def test_frontend_then_backend_equals_the_whole(name: str, more: dict, prefix: int) -> None:
    model = tiny.tiny_model(name, **more)
    frontend, backend, layout = split_tokens(model, 2)
    inputs = tiny.images(3)
    weight, bias = own_head(model)
    with inference_mode(model):
        whole = model(inputs)
        tokens = frontend(inputs)
        joined = nn.functional.linear(backend(tokens), weight, bias)
    assert layout == family_of(model)[1].facts(model).layout
    assert (layout.prefix, layout.grid, layout.dim) == (prefix, (4, 4), 48)
    assert tokens.shape == (3, layout.count, layout.dim)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "more", "prefix"), VARIANTS.values(), ids=VARIANTS)
def test_the_halves_hold_every_parameter_under_its_own_name(name: str, more: dict, prefix: int) -> None:
    model = tiny.tiny_model(name, **more)
    frontend, backend = split_model(model, 1)
    front, back, whole = (set(each.state_dict()) for each in (frontend, backend, model))
    assert not front & back
    assert front | back == {each for each in whole if not each.startswith("head")}


@pytest.mark.parametrize(("name", "more", "prefix"), VARIANTS.values(), ids=VARIANTS)
def test_a_backend_is_rebuilt_without_the_frontend(name: str, more: dict, prefix: int) -> None:
    model = tiny.tiny_model(name, **more)
    _, backend = split_model(model, 2)
    rebuilt = build_backend(name, {**tiny.ARGS, **more}, 2)
    rebuilt.load_state_dict(backend_state(model, 2))
    tokens = torch.randn(2, prefix + 16, 48)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(tokens), backend(tokens), rtol=0, atol=0)


def test_a_distilled_models_heads_read_a_token_each() -> None:
    """Their mean is one linear layer over both tokens; over the tokens' mean it would be another function."""
    model = tiny.tiny_model("deit_tiny_distilled_patch16_224")
    frontend, backend = split_model(model, 1)
    weight, _ = own_head(model)
    assert weight.shape == (4, 96)
    with inference_mode(model):
        features = backend(frontend(tiny.images(2)))
        last = model.forward_features(tiny.images(2))
    torch.testing.assert_close(features, torch.cat([last[:, 0], last[:, 1]], 1))
    headless = tiny.tiny_model("deit_tiny_distilled_patch16_224", num_classes=0)
    frontend, backend = split_model(headless, 1)
    with inference_mode(headless):
        torch.testing.assert_close(backend(frontend(tiny.images(2))), headless(tiny.images(2)))


def test_pictures_need_not_be_square() -> None:
    model = tiny.tiny_model(img_size=(32, 48))
    frontend, backend, layout = split_tokens(model, 2)
    inputs = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with inference_mode(model):
        tokens = frontend(inputs)
        torch.testing.assert_close(backend(tokens), model.forward_head(model.forward_features(inputs), pre_logits=True))
    assert layout.grid == (4, 6) and tokens.shape == (2, 25, 48)


def test_every_family_of_the_folder_answers_the_same_questions() -> None:
    from exporter.models import _families, family_names

    assert "vit" in family_names()
    for name, family in _families():
        for function in ("owns", "facts", "layouts", "cut", "fill_buffers", "fold_sites"):
            assert callable(getattr(family, function, None)), f"{name} lacks {function}"


@pytest.mark.parametrize(("depth", "cut"), [(24, 16), (12, 8), (3, 2), (2, 1), (7, 5)])
def test_the_default_cut_is_two_thirds(depth: int, cut: int) -> None:
    assert default_cut(depth) == cut


def test_a_family_may_have_a_cut_of_its_own() -> None:
    facts = Facts(24, None, tiny.SHAPE, tuple(map(str, range(24))))
    assert usual_cut(facts) == 16 and usual_cut(replace(facts, usual_cut=22)) == 22


@pytest.mark.parametrize("cut", [0, 3, -1, 9])
def test_a_cut_that_leaves_a_half_empty_is_refused_with_the_range(cut: int) -> None:
    with pytest.raises(UsageError, match=r"1\.\.2"):
        check_cut(cut, 3)


def test_a_model_of_no_family_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match="ConvNeXt"):
        split_model(timm.create_model("convnext_atto"), 2)
    with pytest.raises(ExportError, match="Sequential"):
        split_model(nn.Sequential(), 1)


def test_arguments_that_timm_refuses_are_an_export_error() -> None:
    with pytest.raises(ExportError, match="vit_tiny_patch16_224"):
        build_backend("vit_tiny_patch16_224", {"no_such_argument": 1}, 2)
