from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from contract.errors import ExportError, UsageError
from exporter.checkpoint import create_model, image_rule, own_head, read_state
from tests.exporter import tiny


def _plan(tmp_path: Path, **changes: object):
    return tiny.plan(tmp_path / "front", **changes)


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vit_tiny_patch16_224"):
        create_model(_plan(tmp_path, model="vit_tinny_patch16_224"))


def test_an_argument_that_timm_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="embed_dimm"):
        create_model(_plan(tmp_path, model_args=(("embed_dimm", 3),)))


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    first, again, other = (create_model(_plan(tmp_path, seed=seed)).pos_embed for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "checkpoint"])
def test_half_precision_weights_are_loaded_as_float32(tmp_path: Path, kind: str) -> None:
    state = {name: value.half() for name, value in tiny.tiny_model().state_dict().items()}
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state} if kind == "checkpoint" else state, path)
    model = create_model(_plan(tmp_path, weights=str(path)))
    assert not model.training
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, state[name].float(), rtol=0, atol=0)


def _break_shape(state: dict) -> None:
    state["blocks.1.mlp.fc1.weight"] = torch.zeros(3, 3)


def _drop(state: dict) -> None:
    del state["blocks.2.norm1.bias"]


def _add(state: dict) -> None:
    state["blocks.2.norm1.biass"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_break_shape, r"blocks\.1\.mlp\.fc1\.weight should be \(192, 48\), found \(3, 3\)"),
        (_drop, r"blocks\.2\.norm1\.bias \(48,\), the file has no such"),
        (_add, r"blocks\.2\.norm1\.biass \(did you mean 'blocks\.2\.norm1\.bias'"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(tmp_path: Path, change, said: str) -> None:
    state = tiny.tiny_model().state_dict()
    change(state)
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ExportError, match=said):
        create_model(_plan(tmp_path, weights=str(tmp_path / "weights.safetensors")))


class _Payload:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


def test_a_weights_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Payload()}, "evil.pt")
    with pytest.raises(ExportError, match="state dict"):
        read_state(Path("evil.pt"))
    assert not Path("touched").exists()


@pytest.mark.parametrize("name", ["text.pt", "text.safetensors"])
def test_a_file_that_is_no_state_dict_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("nothing")
    with pytest.raises(ExportError, match="state dict"):
        read_state(tmp_path / name)


def test_a_missing_weights_file_is_an_error(tmp_path: Path) -> None:
    for name in ("absent.pt", "absent.safetensors"):
        with pytest.raises(UsageError, match="no file of weights"):
            read_state(tmp_path / name)


def test_the_image_rule_is_timms_at_the_trained_size_and_the_whole_picture_at_others() -> None:
    large = timm.create_model("vit_tiny_patch16_224")
    rule = image_rule(large, (3, 224, 224))
    assert (rule.crop_fraction, rule.interpolation, rule.mean) == (0.9, "bicubic", (0.5, 0.5, 0.5))
    assert image_rule(tiny.tiny_model(), tiny.SHAPE).crop_fraction == 1.0


def test_the_image_rule_can_be_overridden_as_timm_does() -> None:
    model = tiny.tiny_model(pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3), "interpolation": "bilinear"})
    rule = image_rule(model, tiny.SHAPE)
    assert (rule.mean, rule.interpolation) == ((0.1, 0.2, 0.3), "bilinear")
    with pytest.raises(ExportError, match="border"):
        image_rule(tiny.tiny_model(pretrained_cfg_overlay={"crop_mode": "border"}), tiny.SHAPE)


def test_the_own_head_is_the_models_linear_layer() -> None:
    weight, bias = own_head(tiny.tiny_model())
    assert weight.shape == (4, 48) and bias.shape == (4,)
    assert own_head(tiny.tiny_model(num_classes=0)) is None


def test_a_distilled_models_two_heads_are_one_over_both_tokens() -> None:
    model = tiny.tiny_model("deit_tiny_distilled_patch16_224")
    weight, bias = own_head(model)
    tokens = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(tokens.flatten(1) @ weight.T + bias, model.forward_head(tokens))
