"""Training graphs beside torch's own gradients: every kind of part, every batch size, and the refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional

from contract.errors import ExportError, GateError
from exporter import training_check
from exporter.architecture import create
from exporter.split import split_model
from exporter.training_check import (
    TrainingFigures,
    TrainingRule,
    check_training_graphs,
    compare,
    random_feeds,
    run_named,
    session_of,
    torch_reference,
)
from exporter.training_decompositions import SMALL_PLANE, convolution, convolution_backward
from exporter.training_graph import TrainingGraphs, make_training_graphs
from exporter.training_onnx import check
from tests.exporter import tiny

SHAPE = (3, 16, 16)
CLASSES = 4


class Convolutions(nn.Module):
    """Strided, dilated, grouped, depthwise and pointwise ones, smooth activations, and BatchNorm in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.SiLU(),
            nn.Conv2d(6, 12, 3, 2, 1), nn.SiLU(),
            nn.Conv2d(12, 12, 3, 1, 1, groups=12), nn.GELU(),
            nn.Conv2d(12, 8, 3, 1, 2, dilation=2, groups=2), nn.Tanh(),
            nn.Conv2d(8, 10, 1, 2, bias=False), nn.BatchNorm2d(10), nn.SiLU(), nn.Conv2d(10, 6, 2, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Pooled(nn.Module):
    """Both kinds of max-pool, ReLU, and a projection head: global average, linear, unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.near, self.far = nn.MaxPool2d(2, 2), nn.MaxPool2d(3, 2, 1)
        self.act, self.project = nn.ReLU(inplace=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.far(self.near(self.act(self.norm(self.conv(x)))))
        return functional.normalize(self.project(x.mean((2, 3))), dim=1)


class AveragePooled(nn.Module):
    """Average pools as in the shortcuts of ResNet-D, with a rest at the rim and without, and GELU in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, 1, 1), nn.GELU(), nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False),
            nn.Conv2d(6, 5, 2), nn.GELU("tanh"), nn.AvgPool2d((2, 3)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skips(nn.Module):
    """A frozen backbone in evaluation mode beside a trained skip, weighed by alpha, with EEFT's complexity as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6))
        self.pool, self.skip, self.norm = nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.head, self.alpha = nn.Linear(6, CLASSES), nn.Parameter(torch.tensor([-1.0]))
        self.beta = nn.Parameter(torch.tensor([2.0, 1.0]))

    def train(self, mode: bool = True) -> Skips:
        super().train(mode)
        self.block.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        alpha, beta = torch.sigmoid(self.alpha), torch.softmax(self.beta, 0)
        skip = self.norm(self.skip(self.pool(x)))
        mixed = functional.silu(alpha * self.block(x) + beta[0] * skip + beta[1] * skip * skip)
        z = self.head(mixed.mean((2, 3)))
        complexity = (alpha * 162.0).sum() / 180 - (beta * 18.0).sum() / 180
        return z, (z * z).sum(1).mean(0) + 0.3 * complexity


class Prototypes(nn.Module):
    """1 - cosine to a prototype that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.project = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 5)
        self.register_buffer("prototype", functional.normalize(torch.randn(1, 5), dim=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = functional.normalize(self.project(functional.silu(self.conv(x)).mean((2, 3))), dim=1)
        return z, (1 - (z * self.prototype).sum(1)).mean(0)


def shaken(part: nn.Module, seed: int = 0) -> nn.Module:
    """In train mode, with norms that are neither 0 nor 1, so that every factor shows."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*part.named_parameters(), *part.named_buffers()]:
            if value.ndim == 1 and value.is_floating_point() and value.numel() > 2:
                noise = torch.rand(value.shape, generator=rng)
                value.copy_(0.5 + noise if name.endswith(("weight", "var")) else noise - 0.5)
    return part.train()


class SmallMaps(nn.Module):
    """Convolutions of every shape on maps of 3 x 3, 3 x 1 and 1 x 1, where they are products."""

    def __init__(self, stride: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride), nn.SiLU(),
            nn.Conv2d(6, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
            nn.Conv2d(8, 6, 1, bias=False), nn.SiLU(), nn.Conv2d(6, 7, 3, 1, 2, dilation=2), nn.Tanh(),
            nn.Conv2d(7, 8, (2, 3), 2, (1, 1), bias=False), nn.SiLU(), nn.Conv2d(8, 5, 1, 2), nn.SiLU(),
            nn.Conv2d(5, 6, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class WideKernels(nn.Module):
    """Kernels of every size that are mirrored, dense and in groups, and attention by a channel's maximum."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1, 2, 3, 4, 5, 6, 7, 9)
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, size, padding=size // 2, groups=2 - size % 2) for size in sizes)
        self.first = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * torch.sigmoid(x.amax(1, keepdim=True) + x.mean((2, 3), keepdim=True).flip(1))


def vit_part() -> nn.Module:
    return split_model(tiny.tiny_model(), 2)[0].train()


def resnet(**more: object) -> nn.Module:
    arguments = {"small_images": True, "num_classes": CLASSES, "channels": (8, 8, 12, 16), "layers": (1, 1, 1, 1)}
    return create("resnet18", False, {**arguments, **more})


PARTS = {
    "convolutions": (Convolutions, SHAPE),
    "pooled": (Pooled, SHAPE),
    "average pooled": (AveragePooled, SHAPE),
    "small maps": (SmallMaps, SHAPE),
    "wide kernels": (WideKernels, SHAPE),
    "skips": (Skips, SHAPE),
    "prototypes": (Prototypes, SHAPE),
    "vit": (vit_part, tiny.SHAPE),
    "vgg": (lambda: split_model(create("vgg11_bn", False, {"small_images": True}), 4)[0], SHAPE),
}


def make(part: nn.Module, shape: tuple[int, int, int] = SHAPE, **more: object) -> TrainingGraphs:
    trained = [name for name, _ in part.named_parameters() if not name.startswith("block.")]
    return make_training_graphs(part, shape, trainable=trained, **more)


@pytest.mark.parametrize("name", PARTS)
def test_gradients_at_every_batch_size_are_those_of_float64(name: str) -> None:
    torch.manual_seed(0)
    builder, shape = PARTS[name]
    part = shaken(builder())
    graphs = make(part, shape)
    for batch in (1, 2, 3, 5, 8, 32):
        figures = check_training_graphs(part, graphs, shape, rule=TrainingRule(batch=batch))
        assert figures.flips or figures.gradient_error < 1e-4


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "image"),
    [(3, 1, 1, 1, 2), (3, 2, 1, 1, 5), (3, 1, 2, 2, 3), (1, 1, 0, 1, 3), (1, 2, 0, 1, 4),
     ((1, 3), (1, 2), (0, 1), 1, (3, 5)), ((3, 2), 1, (2, 0), (2, 1), (1, 4)), (5, 3, 4, 1, 4), (2, 2, 0, 1, 5)],
)  # fmt: skip
def test_a_convolution_of_small_maps_and_its_gradients_are_torchs(
    kernel: object, stride: object, padding: object, dilation: object, image: int | tuple[int, int]
) -> None:
    pair = image if isinstance(image, tuple) else (image, image)
    x = torch.randn(4, 3, *pair, dtype=torch.float64, requires_grad=True)
    layer = nn.Conv2d(3, 5, kernel, stride, padding, dilation, dtype=torch.float64)  # type: ignore[arg-type]
    rest = (layer.stride, layer.padding, layer.dilation, False, (0, 0), 1)
    z = layer(x)
    assert z.shape[2] * z.shape[3] <= SMALL_PLANE
    torch.testing.assert_close(convolution(x, layer.weight, layer.bias, *rest), z)
    grad = torch.randn_like(z)
    found = convolution_backward(grad, x, layer.weight, [5], *rest, [True] * 3)
    torch.testing.assert_close(found, torch.autograd.grad(z, (x, layer.weight, layer.bias), grad))


class Reversed(nn.Module):
    """What a model reverses by itself: numbers, truths, infinities, a weight, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 20))
        self.register_buffer("order", torch.arange(20))
        self.register_buffer("mask", torch.full((20, 20), -torch.inf).triu(1).T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :20] @ torch.softmax(self.weight.flip((1, 0)) + self.mask.flip((0, 1)), 1)
        x = torch.where((self.order > 8).flip(0), x, 2 * x)
        return (x * self.order.flip(0)).flip(())


def test_what_a_model_reverses_by_itself_keeps_its_type_and_its_infinities() -> None:
    part = Reversed()
    figures = check_training_graphs(part, make(part), SHAPE)
    assert figures.gradient_error < 1e-4


def test_a_graph_that_onnxruntime_cannot_open_is_an_error_of_the_export() -> None:
    with pytest.raises(ExportError, match="cannot open a training graph"):
        session_of(b"no graph", 1)


def test_only_small_maps_become_products() -> None:
    part = nn.Sequential(
        nn.Conv2d(3, 4, 3, 4, 1), nn.SiLU(), nn.Conv2d(4, 5, 3, 1), nn.SiLU(), nn.Conv2d(5, 5, 2, groups=5)
    )
    graphs = make(part.train())
    for graph, convolutions in ((graphs.forward, 2), (graphs.evaluate, 2)):
        kinds = [node.op_type for node in onnx.load_from_string(graph).graph.node]
        assert kinds.count("Conv") == convolutions and "ConvTranspose" not in kinds  # 4 x 4, and one in groups
    kinds = [node.op_type for node in onnx.load_from_string(graphs.backward).graph.node]
    assert kinds.count("Col2Im") == 1


@pytest.mark.parametrize("kept", [1, 4, 11, 16])
def test_a_masked_vit_trains_on_any_number_of_kept_patches(kept: int, masked: SimpleNamespace) -> None:
    figures = check_training_graphs(masked.part, masked.graphs, tiny.SHAPE, kept=kept, patches=16)
    assert figures.gradient_error < 1e-4


@pytest.fixture(scope="module")
def masked() -> SimpleNamespace:
    part = vit_part()
    return SimpleNamespace(part=part, graphs=make(part, tiny.SHAPE, kept_tokens=True))


def test_keeping_every_patch_is_no_masking(masked: SimpleNamespace) -> None:
    inputs = tiny.images(3)
    with torch.no_grad():
        whole = masked.part(inputs)
        torch.testing.assert_close(masked.part(inputs, torch.arange(16).repeat(3, 1)), whole, rtol=1e-4, atol=1e-4)
    assert masked.graphs.output_shape == (0, 48) and masked.graphs.evaluated_shape == (17, 48)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_whole_network_with_cross_entropy(recompute: bool) -> None:
    torch.manual_seed(0)
    part = shaken(resnet())
    graphs = make(part, tiny.SHAPE, loss="cross-entropy", class_count=CLASSES, recompute=recompute)
    check_training_graphs(part, graphs, tiny.SHAPE, class_count=CLASSES)
    ends = onnx.load_from_string(graphs.backward).graph.input
    saved = sum(each.name.startswith("saved:") for each in ends)
    assert saved == graphs.saved and (saved == 0) is recompute
    assert "grad_z" not in {each.name for each in ends}


def test_running_statistics_are_torchs_own() -> None:
    part = shaken(Convolutions())
    graphs = make(part)
    feeds = random_feeds(part, graphs, SHAPE, 3, kept=None, patches=None, class_count=None)
    feeds = {name: value.copy() for name, value in feeds.items()}  # they share the part's memory otherwise
    before = {name: feeds[name].copy() for name in graphs.buffers}
    found = run_named(session_of(graphs.forward, 2), feeds)
    for name in graphs.buffers:
        np.testing.assert_array_equal(feeds[name], before[name])
    part(torch.from_numpy(feeds["x"]))
    assert set(graphs.moved) == set(graphs.buffers)
    for name, value in part.named_buffers():
        if value.is_floating_point():
            np.testing.assert_allclose(found[f"new:{name}"], value.numpy(), rtol=1e-5, atol=1e-6)


def test_evaluation_uses_running_statistics() -> None:
    part = shaken(Convolutions())
    graphs = make(part)
    feeds = random_feeds(part, graphs, SHAPE, 2, kept=None, patches=None, class_count=None)
    found = run_named(session_of(graphs.evaluate, 1), feeds)["z"]
    with torch.no_grad():
        expected = part.eval()(torch.from_numpy(feeds["x"])).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_part_keeps_its_modes_and_its_weights() -> None:
    part = shaken(Skips())
    before = {name: value.clone() for name, value in part.state_dict().items()}
    make(part)
    assert part.training and not part.block[1].training
    for name, value in part.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_resnet_whose_shortcuts_average_can_be_trained() -> None:
    torch.manual_seed(0)
    part = shaken(resnet(avg_down=True))
    graphs = make(part, tiny.SHAPE, loss="cross-entropy", class_count=CLASSES)
    check_training_graphs(part, graphs, tiny.SHAPE, class_count=CLASSES)
    assert "AveragePool" in {node.op_type for node in onnx.load_from_string(graphs.forward).graph.node}


def test_a_wrong_gradient_does_not_pass_the_gate() -> None:
    part = shaken(Prototypes())
    graphs = make(part)
    model = onnx.load_from_string(graphs.backward)
    convolution = next(node for node in model.graph.node if "grad:project.bias" in node.output)
    convolution.output[:] = ["half" if each == "grad:project.bias" else each for each in convolution.output]
    model.graph.initializer.append(helper.make_tensor("factor", TensorProto.FLOAT, [], [0.5]))
    model.graph.node.append(helper.make_node("Mul", ["half", "factor"], ["grad:project.bias"]))
    changed = {**vars(graphs), "backward": model.SerializeToString()}
    with pytest.raises(GateError, match="project.bias"):
        check_training_graphs(part, TrainingGraphs(**changed), SHAPE)


def test_a_gradient_is_judged_by_the_signs_that_float32_gets_right() -> None:
    part = shaken(Pooled())
    graphs = make(part)
    feeds = random_feeds(part, graphs, SHAPE, 4, kept=None, patches=None, class_count=None)
    _, sides = torch_reference(part, graphs, feeds, torch.float64)
    assert [tuple(each.shape) for each in sides] == [(4, 6, 16, 16), (4, 6, 8, 8), (4, 6, 4, 4)]
    assert compare(part, graphs, feeds, 1).gradient_error < 1e-4


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x.mean((2, 3))), 0.5, self.training)


class Fixed(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3))).reshape(5, 3)


class Unused(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) * self.linear.bias


class Unknown(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(self.linear(x.mean((2, 3))), 1)


class Lifted(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3))) @ self.hidden


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.1)), "at random"),
        (Dropping(), "random"),
        (Fixed(), "became fixed"),
        (Unused(), "linear.weight has no influence"),
        (Unknown(), "cumsum"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)), "momentum"),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), "plain 2-D convolutions"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2)), "average pools with windows side by side"),
        (nn.Sequential(nn.Conv2d(3, 4, 2), nn.AvgPool2d(2, ceil_mode=True)), "average pools with windows side by side"),
    ],
)
def test_what_cannot_be_trained_is_refused(part: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        make(part.train())


def test_a_weight_that_is_no_parameter_is_refused() -> None:
    part = Lifted()
    object.__setattr__(part, "hidden", torch.randn(3, 100))
    with pytest.raises(ExportError, match="is a constant of the graph"):
        make(part.train())


@pytest.mark.parametrize("trainable", [[], ["no.such"]])
def test_names_that_are_not_there_are_refused(trainable: list[str]) -> None:
    with pytest.raises(ExportError):
        make_training_graphs(Prototypes(), SHAPE, trainable=trainable)


def test_a_scatter_that_races_is_refused() -> None:
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")
    kinds = (("x", TensorProto.FLOAT), ("i", TensorProto.INT64), ("u", TensorProto.FLOAT), ("y", TensorProto.FLOAT))
    x, i, u, y = (helper.make_tensor_value_info(name, kind, ["batch", 1]) for name, kind in kinds)
    model = helper.make_model(
        helper.make_graph([node], "g", [x, i, u], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    with pytest.raises(ExportError, match="ScatterND"):
        check(model, "backward", set(), {})


def test_files_name_nothing_of_this_machine() -> None:
    graphs = make(shaken(Prototypes()))
    for data in (graphs.forward, graphs.backward, graphs.evaluate):
        model = onnx.load_from_string(data)
        assert model.ir_version == 10 and model.producer_name == "cutlayer"
        assert not model.graph.value_info and not any(
            node.doc_string or node.metadata_props for node in model.graph.node
        )


def _figures(gradient_error: float, flips: int) -> TrainingFigures:
    return TrainingFigures(0.0, gradient_error, "grad:weight", 1e-6, flips, 0.0)


@pytest.mark.parametrize(
    ("drawn", "passes"),
    [
        ([(9e-3, 0), (1e-5, 0)], True),  # one sign that onnxruntime alone flipped
        ([(9e-3, 0), (1e-2, 7), (1e-5, 0)], True),  # a draw with flips cannot clear it, a later one can
        ([(9e-3, 0)] * training_check.DRAWS, False),
        ([(9e-3, 0), *[(1e-2, 7)] * (training_check.DRAWS - 1)], False),
        ([(1e-2, 7)], True),
        ([(0.5, 7), (1e-5, 0)], False),
        ([(0.5, 0), (1e-5, 0)], False),  # no flip of one sign does that
    ],
)
def test_what_looks_like_a_flip_is_drawn_anew_and_a_wrong_graph_is_refused(
    drawn: list[tuple[float, int]], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([_figures(*each) for each in drawn])
    monkeypatch.setattr(training_check, "random_feeds", lambda *args, **named: {})
    monkeypatch.setattr(training_check, "compare", lambda *args: next(found))
    if passes:
        check_training_graphs(nn.Identity(), None, SHAPE)  # type: ignore[arg-type]
    else:
        with pytest.raises(GateError, match="gradients of weight differ by"):
            check_training_graphs(nn.Identity(), None, SHAPE)  # type: ignore[arg-type]
