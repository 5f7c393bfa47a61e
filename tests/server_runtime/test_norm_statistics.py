"""Statistics that norms take anew from images, and why the mean of several is not enough."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from server_runtime.norm_statistics import AT_ONCE, retake  # noqa: E402

CPU = torch.device("cpu")


def made_net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    convolution = torch.nn.Conv2d(3, 8, 3)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def test_statistics_are_those_of_the_images_and_nothing_else_changes() -> None:
    net, shown = made_net(0), images(2 * AT_ONCE)
    norm, before = net[1], copy.deepcopy(net.state_dict())
    norm.num_batches_tracked += 41
    retake(net, shown, CPU)
    z = net[0](shown)
    torch.testing.assert_close(norm.running_mean, z.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(norm.running_var, z.var(dim=(0, 2, 3)), rtol=1e-3, atol=1e-4)
    assert (int(norm.num_batches_tracked), norm.momentum) == (41, 0.1)
    assert not any(each.training for each in net.modules())
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(net.state_dict()[name], before[name])


def test_values_of_averaged_weights_vary_less_than_the_average_of_variances() -> None:
    """Two nets that know their own statistics: their mean's norm gives values of a deviation far below 1."""
    nets, shown = [made_net(seed) for seed in (1, 2)], images(64)
    for net in nets:
        retake(net, shown, CPU)
    mean = copy.deepcopy(nets[0])
    states = [net.state_dict() for net in nets]
    mean.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    averaged = mean[1](mean[0](shown)).std(dim=(0, 2, 3))
    retake(mean, shown, CPU)
    retaken = mean[1](mean[0](shown)).std(dim=(0, 2, 3))
    assert averaged.max() < 0.95 and averaged.mean() < 0.8
    torch.testing.assert_close(retaken, torch.ones(8), rtol=1e-3, atol=1e-3)


def test_a_net_without_norms_is_left_alone() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    before = copy.deepcopy(net.state_dict())
    retake(net, torch.zeros(4, 3), CPU)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_what_is_dropped_at_random_in_training_does_not_change_the_statistics() -> None:
    plain = made_net(0)
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.5), *copy.deepcopy(plain)).eval()
    for net in (plain, dropping):
        retake(net, images(64), CPU)
    torch.testing.assert_close(dropping[2].running_mean, plain[1].running_mean)
    torch.testing.assert_close(dropping[2].running_var, plain[1].running_var)
