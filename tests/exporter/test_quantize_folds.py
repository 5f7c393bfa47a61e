import numpy as np
import pytest
import timm
import torch
from torch import nn

from exporter.models import FoldSites, family_of
from exporter.models._inference import inference_mode
from exporter.quantize import InputRange, Quantizer, calibrate
from exporter.quantize_folds import Shift, TailedLinear, fold, merge_batch_norms, sources
from exporter.split import split_model
from tests.exporter import tiny

WIDE = {"mlp_ratio": 8.0}  # 384 hidden units, of which 16 go into the tail


def _frontend(**more: object) -> tuple[nn.Module, FoldSites]:
    model = tiny.tiny_model(**more)
    frontend, _ = split_model(model, 2)
    return frontend, family_of(model)[1].fold_sites(frontend)


def _folded(frontend: nn.Module, sites: FoldSites, quantizer: Quantizer = Quantizer()) -> object:  # noqa: B008
    ranges = calibrate(frontend, [tiny.images(16, seed=1)])
    return fold(frontend, sites, ranges, quantizer, sources(frontend, tiny.images(1)))


@pytest.mark.parametrize(
    "more", [{}, {"qkv_bias": False}, {"qk_norm": True}, {"name": "deit3_small_patch16_224"}, WIDE]
)
def test_folds_keep_the_function(more: dict) -> None:
    frontend, sites = _frontend(**more)
    inputs = tiny.images(5)
    with inference_mode(frontend):
        before = frontend(inputs)
        folded = _folded(frontend, sites)
        after = frontend(inputs)
    fc2 = "mlp.fc2.body" if more is WIDE else "mlp.fc2"
    assert set(folded.shifts) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", fc2)}
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_each_fold_can_be_left_out() -> None:
    bare = Quantizer(smooth=False, centre=False, tail_units=0)
    frontend, sites = _frontend(**WIDE)
    before = {name: each.clone() for name, each in frontend.state_dict().items()}
    folded = _folded(frontend, sites, bare)
    assert not folded.shifts and not folded.tails and not folded.centred
    assert all(torch.equal(each, before[name]) for name, each in frontend.state_dict().items())


def test_folds_tame_an_outlier_channel() -> None:
    frontend, sites = _frontend()
    with torch.no_grad():
        frontend.blocks[0].norm1.weight[5] *= 60
        frontend.blocks[0].attn.qkv.weight[:, 5] /= 60
    ranges = calibrate(frontend, [tiny.images(16, seed=1)])
    folded = fold(frontend, sites, ranges, Quantizer(), {})

    def unevenness(seen: InputRange) -> float:
        return float(seen.absmax.max() / np.median(seen.absmax))

    assert unevenness(ranges.inputs["blocks.0.attn.qkv"]) > 20
    assert unevenness(folded.ranges.inputs["blocks.0.attn.qkv"]) < 8


@pytest.mark.parametrize("more", [{}, WIDE])
def test_ranges_after_the_folds_are_what_calibration_would_see(more: dict) -> None:
    frontend, sites = _frontend(**more)
    folded = _folded(frontend, sites)
    again = calibrate(frontend, [tiny.images(16, seed=1)]).inputs
    assert set(again) == set(folded.ranges.inputs)
    for name, seen in again.items():
        for field in ("minimum", "maximum", "mean"):
            expected, found = getattr(seen, field), getattr(folded.ranges.inputs[name], field)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * seen.absmax.max())


def test_the_hidden_units_that_reach_farthest_are_the_tail() -> None:
    frontend, sites = _frontend(**WIDE)
    with torch.no_grad():
        frontend.blocks[1].mlp.fc1.weight[[3, 77]] *= 20
    folded = _folded(frontend, sites)
    assert folded.tails == ("blocks.0.mlp.fc2.tail", "blocks.1.mlp.fc2.tail")
    body, tail = (folded.ranges.inputs[f"blocks.1.mlp.fc2.{part}"] for part in ("body", "tail"))
    assert tail.absmax.shape == (16,) and body.absmax.shape == (368,)
    shift = frontend.blocks[1].mlp.fc2.shift[1].shift[0].item()
    assert tail.absmax.min() >= (body.maximum + shift).max() - 1e-5  # as the activation makes them
    assert tail.absmax.max() > 5 * body.absmax.max()
    assert body.minimum.min() == pytest.approx(-body.maximum.max())  # both sides of the codes are used


def test_units_stay_where_nobody_can_move_them() -> None:
    """Without the layer that makes the units, or with too few of them, the product stays in one piece."""
    frontend, sites = _frontend(**WIDE)
    ranges = calibrate(frontend, [tiny.images(4)])
    assert not fold(frontend, sites, ranges, Quantizer(), {}).tails
    narrow, sites = _frontend()
    assert not _folded(narrow, sites).tails


def test_a_layer_in_two_parts_is_the_layer() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(40, 7)
    parts, inputs = TailedLinear(linear, 16), torch.randn(3, 5, 40)
    torch.testing.assert_close(parts(inputs), linear(inputs))
    parts.shift = nn.Sequential(nn.Identity(), Shift(torch.full((24,), 0.5)))
    torch.testing.assert_close(parts(inputs), linear(inputs) - 0.5 * linear.weight[:, :24].sum(1))


# BatchNorm


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=4).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model


def test_batch_norms_are_merged_and_the_function_stays() -> None:
    frontend, _ = split_model(_resnet(), 5)
    images = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with inference_mode(frontend):
        before = frontend(images)
        merged = merge_batch_norms(frontend, images[:1])
        after = frontend(images)
    assert len(merged) == 8 and "bn1" in merged and "layer2.0.downsample.1" in merged
    assert not any(isinstance(each, nn.BatchNorm2d) for each in frontend.modules())
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_a_batch_norm_behind_something_else_stays() -> None:
    frontend = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    assert merge_batch_norms(frontend.eval(), torch.randn(1, 3, 4, 4)) == ("4",)
    assert isinstance(frontend[2], nn.BatchNorm2d)


def test_sources_are_who_made_a_tensor_and_nobody_in_between() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)) + 1)

    assert sources(Net(), torch.zeros(1, 2)) == {"b": "a"}
