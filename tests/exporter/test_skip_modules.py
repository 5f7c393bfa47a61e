"""EEFT's network: sizes as published, and what must hold whatever is trained (algorithms.md 2.1, 2.4)."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="the exporter needs torch")

import timm  # noqa: E402

from contract.errors import ExportError, UsageError  # noqa: E402
from exporter.plan import BACKBONE, ModuleChoices  # noqa: E402
from exporter.skip_modules import SkipNetwork  # noqa: E402
from exporter.training_package import set_modes, trained_names  # noqa: E402
from tests.exporter import tiny  # noqa: E402

BLOCK_SIZES = [73_984, 73_984, 230_144, 295_424, 919_040, 1_180_672, 3_673_088, 4_720_640]
SMALL = {"channels": (8, 16, 24, 32), "layers": (1, 1, 1, 1), "num_classes": 4}


VIT = "vit_tiny_patch16_224"


def arguments_of(name: str) -> dict[str, object]:
    return dict(tiny.ARGS) if name == VIT else SMALL


def small(choices: ModuleChoices | None = None, name: str = "resnet18", **arguments: object) -> SkipNetwork:
    torch.manual_seed(3)
    model = timm.create_model(name, **{**arguments_of(name), **arguments})
    for norm in model.modules():  # not those of a fresh network, which change nothing
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.5, 2)
    return SkipNetwork(model, choices or ModuleChoices())


@pytest.mark.parametrize(
    ("k", "skips", "parameters"), [(1, 8, 528_128), (3, 21, 1_145_728), (5, 30, 1_455_232), (7, 35, 1_607_296)]
)
def test_resnet18_has_the_published_numbers_of_parameters(k: int, skips: int, parameters: int) -> None:
    with torch.device("meta"):
        backbone = timm.create_model("resnet18")
    net = SkipNetwork(backbone, ModuleChoices(skips=k))
    assert len(net.beta) == skips and len(net.alpha) == 8
    assert sum(each.numel() for each in net.skips.parameters()) == parameters
    assert net.block_sizes == BLOCK_SIZES
    assert sum(each.numel() for each in net.backbone.parameters()) == 11_176_512


def test_table_7_counts_the_head_of_cub() -> None:
    assert 1_145_728 + (512 * 200 + 200) + 8 + 21 == 1_248_357  # 1.25 M


@pytest.mark.parametrize(
    ("name", "blocks", "skips", "parameters", "backbone"),
    [
        ("resnet34", 16, 45, 2_750_208, 21_284_672),
        ("resnet50", 16, 45, 43_588_608, 23_508_032),
        ("vit_small_patch16_224", 12, 33, 4_891_392, 21_665_664),
    ],
)
def test_modules_around_other_models_have_the_sizes_of_the_guide(
    name: str, blocks: int, skips: int, parameters: int, backbone: int
) -> None:
    with torch.device("meta"):
        net = SkipNetwork(timm.create_model(name), ModuleChoices())
    assert (len(net.alpha), len(net.beta)) == (blocks, skips)
    assert sum(each.numel() for each in net.skips.parameters()) == parameters
    assert sum(each.numel() for each in net.backbone.parameters()) == backbone


@pytest.mark.parametrize("name", ["resnet18", "resnet50", VIT])
def test_factors_of_one_and_silent_skips_give_the_plain_network(name: str) -> None:
    net = small(name=name).eval()
    plain = timm.create_model(name, **{**arguments_of(name), "num_classes": 0})
    plain.load_state_dict(net.backbone.state_dict())
    with torch.no_grad():
        net.alpha.fill_(float("inf"))
        for each in net.skips.modules():
            if isinstance(each, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
                each.weight.zero_()
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(net(x), plain.eval()(x))


@pytest.mark.parametrize("name", ["resnet18", VIT])
def test_training_leaves_every_tensor_of_the_backbone_as_it_was(name: str) -> None:
    net = small(name=name)
    trained = trained_names(net, (BACKBONE,))
    assert trained and not any(name.startswith(BACKBONE) for name in trained)
    set_modes(net, trained)
    before = copy.deepcopy(net.state_dict())
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in trained)
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, 0.5, weight_decay=5e-4)
    for _ in range(3):
        features, penalty = net(torch.randn(4, 3, 32, 32))
        optimiser.zero_grad()
        (features.square().mean() + penalty).backward()
        optimiser.step()
    for name, value in net.state_dict().items():
        still = name.startswith(BACKBONE) or name in ("block_shares", "skip_shares")
        assert torch.equal(value, before[name]) == still, name


def test_shares_of_a_block_sum_to_one_and_factors_lie_between_0_and_1() -> None:
    net = small(ModuleChoices(skips=2))
    with torch.no_grad():
        net.alpha.normal_(0, 3)
        net.beta.normal_(0, 3)
    assert [len(each) for each in net.shares()] == [1, 2, 2, 2]
    assert all(torch.isclose(each.sum(), torch.tensor(1.0)) for each in net.shares())
    assert bool(((torch.sigmoid(net.alpha) > 0) & (torch.sigmoid(net.alpha) < 1)).all())


def test_complexity_rises_with_a_factor_by_its_blocks_share_of_the_parameters() -> None:
    net = small().double()
    gates = torch.rand(4, dtype=torch.float64, requires_grad=True)
    net.alpha.data = torch.logit(gates)  # sigmoid gives the gates back
    logits = torch.nn.Parameter(torch.logit(gates.detach()))
    net.alpha = logits
    (slope,) = torch.autograd.grad(net.complexity(), logits)
    by_factor = slope / (torch.sigmoid(logits) * (1 - torch.sigmoid(logits)))
    expected = torch.tensor(net.block_sizes, dtype=torch.float64) / sum(net.block_sizes)
    assert torch.allclose(by_factor, expected, rtol=1e-6) and bool((by_factor > 0).all())
    with torch.no_grad():
        net.alpha.fill_(float("inf"))
        assert float(net.complexity()) < 1.0
        net.alpha.fill_(float("-inf"))
        assert -0.2 < float(net.complexity()) < 0.0


def test_a_skip_meets_its_blocks_map_at_every_size() -> None:
    net = small(ModuleChoices(skips=4)).eval()
    for side in (32, 33, 47, 64):
        assert net(torch.randn(1, 3, side, side)).shape == (1, 32)


@pytest.mark.parametrize("name", ["resnet18", VIT])
def test_with_silent_skips_and_open_factors_the_model_starts_as_it_is(name: str) -> None:
    net = small(ModuleChoices(start_alpha=20.0, start_skips=0.0), name).eval()
    plain = timm.create_model(name, **{**arguments_of(name), "num_classes": 0})
    plain.load_state_dict(net.backbone.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(net(x), plain.eval()(x), atol=1e-5)
    assert not torch.allclose(
        small(ModuleChoices(start_alpha=20.0, start_skips=1.0), name).eval()(x), plain(x), atol=1e-2
    )


def test_other_networks_and_odd_choices_are_refused() -> None:
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", embed_dim=12, depth=1)
    for other in (timm.create_model("vgg11"), distilled):
        with pytest.raises(ExportError, match="timm's ResNet"):
            SkipNetwork(other, ModuleChoices())
    for odd in ({"skips": 0}, {"complexity": -1.0}, {"start_alpha": 99.0}, {"start_skips": 2.0}):
        with pytest.raises(UsageError):
            ModuleChoices(**odd)
