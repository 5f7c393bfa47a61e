from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from exporter.quantize import ChosenScales, InputRange, SearchSettings, min_max_scales
from exporter.scale_search import Rows, collect_rows, search_scales

SETTINGS = SearchSettings(candidates=30, rows=64)


def _case(seed: int = 0, outlier: float = 1.0) -> tuple[nn.Linear, torch.Tensor, ChosenScales]:
    """A layer, input rows whose largest value is far out, and min-max scales."""
    torch.manual_seed(seed)
    layer, inputs = nn.Linear(24, 12), torch.randn(64, 24)
    inputs[0, 0] *= outlier
    seen = InputRange(*(each.double().numpy() for each in (inputs.amin(0), inputs.amax(0), inputs.mean(0))))
    return layer, inputs, min_max_scales(layer, seen, None)


def _cost(rows: Rows, weight: torch.Tensor, scales: ChosenScales) -> float:
    """SA Eq. 8 written out with loops over nothing: the law beside the search's own arithmetic."""

    def rounded(values: np.ndarray, step: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values / step), -127, 127) * step

    inputs, weight = rows.inputs.double().numpy(), weight.detach().double().numpy()
    found = rounded(inputs, np.float64(scales.input)) @ rounded(weight, scales.weight[:, None].astype(np.float64)).T
    gradient = 1.0 if rows.gradient is None else rows.gradient.double().numpy()
    return float(np.square(gradient * (found - inputs @ weight.T)).sum())


@pytest.mark.parametrize("outlier", [1.0, 30.0])
@pytest.mark.parametrize("weighted", [True, False])
def test_searched_scales_cost_no_more_than_min_max(outlier: float, weighted: bool) -> None:
    """Invariant 2 of split adaptation."""
    layer, inputs, start = _case(outlier=outlier)
    rows = Rows(inputs, torch.randn(64, 12) if weighted else None)
    found = search_scales(rows, layer.weight.detach(), start, None, SETTINGS)
    before, after = _cost(rows, layer.weight, start), _cost(rows, layer.weight, found)
    assert after <= before * (1 + 1e-5)
    assert not outlier > 1 or after < 0.97 * before


def test_what_the_loss_does_not_feel_is_given_up() -> None:
    """All gradient on one output: its error falls below what an even weighting leaves."""
    layer, inputs, start = _case(seed=3, outlier=6.0)
    gradient = torch.full((64, 12), 1e-5)
    gradient[:, 4] = 1.0
    rows = Rows(inputs, gradient)
    focused = search_scales(rows, layer.weight.detach(), start, 1, SETTINGS)
    even = search_scales(Rows(inputs, None), layer.weight.detach(), start, 1, SETTINGS)
    assert _cost(rows, layer.weight, focused) < _cost(rows, layer.weight, even)


def test_grouped_channels_keep_one_scale() -> None:
    layer, inputs, _ = _case()
    seen = InputRange(*(each.double().numpy() for each in (inputs.amin(0), inputs.amax(0), inputs.mean(0))))
    start = min_max_scales(layer, seen, 3)
    found = search_scales(Rows(inputs, None), layer.weight.detach(), start, 3, SETTINGS)
    assert len(set(found.weight)) <= 3 and all(len(set(part)) == 1 for part in found.weight.reshape(3, 4))
    assert not np.array_equal(found.weight, start.weight)


def test_a_layer_of_zeros_is_searched_without_dividing_by_zero() -> None:
    layer, inputs, _ = _case()
    nn.init.zeros_(layer.weight)
    zeros = np.zeros(24)
    start = min_max_scales(layer, InputRange(zeros, zeros, zeros), None)
    found = search_scales(Rows(torch.zeros_like(inputs), None), layer.weight.detach(), start, None, SETTINGS)
    assert np.isfinite(found.weight).all() and (found.weight > 0).all() and found.input > 0


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(images)))


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(4, 7, 6, generator=generator), torch.tensor([0, 1, 2, 1])


def _layers(net: _Net) -> dict[str, nn.Linear]:
    return {"first": net.first, "second": net.second}


def test_rows_are_bounded_and_carry_the_loss_s_own_gradient() -> None:
    net = _Net()
    rows = collect_rows(
        net, _layers(net), _batches(), 12, lambda tokens: tokens.mean(1), SearchSettings(rows=24),
        np.random.default_rng(0),
    )  # fmt: skip
    assert rows["first"].inputs.shape == (24, 6) and rows["first"].gradient.shape == (24, 8)
    assert all(each.requires_grad for each in net.parameters()) and all(each.grad is None for each in net.parameters())
    # Two rows an image: the first two are of the first image, whose gradient at the last layer has a closed form.
    images, labels = next(_batches())
    with torch.no_grad():
        logits = net(images[:1]).mean(1)
        expected = (logits.softmax(1) - nn.functional.one_hot(labels[:1], 5)) / 7
    torch.testing.assert_close(rows["second"].gradient[0], expected[0], rtol=1e-4, atol=1e-7)


def test_more_images_are_not_more_rows() -> None:
    net = _Net()
    few, many = (
        collect_rows(net, _layers(net), list(_batches())[:count], 4 * count, None, SearchSettings(rows=24),
                     np.random.default_rng(0))
        for count in (1, 3)
    )  # fmt: skip
    assert len(few["first"].inputs) == len(many["first"].inputs) == 24


def test_without_a_head_or_with_a_gradient_that_vanishes_every_output_counts_alike() -> None:
    net = _Net()
    for answer in (None, lambda tokens: 1e-9 * tokens.mean(1)):
        rows = collect_rows(net, _layers(net), _batches(), 12, answer, SETTINGS, np.random.default_rng(0))
        assert rows["first"].gradient is None and len(rows["first"].inputs)


def test_without_labels_the_model_s_own_answer_is_the_target() -> None:
    net = _Net()
    images = next(_batches())[0][:1]
    with torch.no_grad():
        own = net(images).mean(1).argmax(1)
    answer = lambda tokens: tokens.mean(1)  # noqa: E731
    unlabelled, labelled = (
        collect_rows(net, _layers(net), [(images, labels)], 1, answer, SETTINGS, np.random.default_rng(0))
        for labels in (None, own)
    )
    torch.testing.assert_close(unlabelled["second"].gradient, labelled["second"].gradient)
    assert float(unlabelled["second"].gradient.abs().max()) > 1e-3
