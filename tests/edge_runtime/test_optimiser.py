from __future__ import annotations

import numpy as np
import pytest

from contract.training import OptimiserRule
from edge_runtime.optimiser import BLOCK, Optimiser, squared_norm

RULES = [
    OptimiserRule("sgd", 0.9, 5e-4),
    OptimiserRule("sgd", 0.0, 0.1),
    OptimiserRule("sgd", 0.5, 0.0),
    OptimiserRule("adamw", weight_decay=0.1),
    OptimiserRule("adamw", weight_decay=0.0, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
]
SHAPES = {"matrix": (300, 301), "bias": (7,), "scalar": ()}  # the matrix is more than one block, and not a whole number
RATES = [0.1, 0.01, 0.05, 0.2, 0.0]


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def steps_of(rule: OptimiserRule) -> tuple[dict[str, np.ndarray], Optimiser]:
    parameters = draw(0)
    optimiser = Optimiser(rule, parameters)
    for seed, rate in enumerate(RATES, 1):
        optimiser.step(parameters, draw(seed), rate)
    return parameters, optimiser


def reference(rule: OptimiserRule, name: str) -> np.ndarray:
    """The published laws, in float64 on the whole tensor."""
    p = draw(0)[name].astype(np.float64)
    first, second = np.zeros_like(p), np.zeros_like(p)
    for step, rate in enumerate(RATES, 1):
        g = draw(step)[name].astype(np.float64)
        if rule.kind == "sgd":
            first = rule.momentum * first + g + rule.weight_decay * p
            p = p - rate * first
        else:
            first = rule.beta_1 * first + (1 - rule.beta_1) * g
            second = rule.beta_2 * second + (1 - rule.beta_2) * g * g
            unbiased = first / (1 - rule.beta_1**step), second / (1 - rule.beta_2**step)
            p = (1 - rate * rule.weight_decay) * p - rate * unbiased[0] / (np.sqrt(unbiased[1]) + rule.epsilon)
    return p


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_are_those_of_the_law(rule: OptimiserRule) -> None:
    assert np.prod(SHAPES["matrix"]) > BLOCK
    parameters, optimiser = steps_of(rule)
    assert optimiser.steps == len(RATES)
    for name, array in parameters.items():
        assert array == pytest.approx(reference(rule, name), rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_are_those_of_torch(rule: OptimiserRule) -> None:
    torch = pytest.importorskip("torch")
    theirs = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in draw(0).items()}
    if rule.kind == "sgd":
        other = torch.optim.SGD(theirs.values(), lr=1.0, momentum=rule.momentum, weight_decay=rule.weight_decay)
    else:
        betas = (rule.beta_1, rule.beta_2)
        other = torch.optim.AdamW(
            theirs.values(), lr=1.0, betas=betas, eps=rule.epsilon, weight_decay=rule.weight_decay
        )
    for seed, rate in enumerate(RATES, 1):
        for name, gradient in draw(seed).items():
            theirs[name].grad = torch.from_numpy(gradient)
        other.param_groups[0]["lr"] = rate
        other.step()
    for name, array in steps_of(rule)[0].items():
        assert array == pytest.approx(theirs[name].detach().numpy(), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_same_steps_give_the_same_bits_whatever_else_is_trained(rule: OptimiserRule) -> None:
    whole, _ = steps_of(rule)
    alone = {"matrix": draw(0)["matrix"]}
    optimiser = Optimiser(rule, alone)
    for seed, rate in enumerate(RATES, 1):
        optimiser.step(alone, {"matrix": draw(seed)["matrix"]}, rate)
    assert (alone["matrix"] == whole["matrix"]).all()


def test_gradients_are_left_as_they_are_and_arrays_are_moved_in_place() -> None:
    parameters, gradients = draw(0), draw(1)
    arrays = dict(parameters)
    optimiser = Optimiser(RULES[3], parameters)
    moments = dict(optimiser.moments)
    optimiser.step(parameters, gradients, 0.1)
    assert all(parameters[name] is arrays[name] for name in SHAPES)
    assert all(optimiser.moments[name] is moments[name] and moments[name].any() for name in moments)
    assert all((gradients[name] == draw(1)[name]).all() for name in SHAPES)


def test_a_reset_optimiser_is_a_new_one() -> None:
    parameters, optimiser = steps_of(RULES[3])
    optimiser.reset()
    fresh = {name: array.copy() for name, array in parameters.items()}
    optimiser.step(parameters, draw(9), 0.1)
    Optimiser(RULES[3], fresh).step(fresh, draw(9), 0.1)
    assert all((parameters[name] == fresh[name]).all() for name in SHAPES)


def test_the_squared_norm_is_that_of_all_tensors() -> None:
    gradients = draw(3)
    expected = sum(np.square(array, dtype=np.float64).sum() for array in gradients.values())
    assert squared_norm(gradients) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 8192, 90_299])
def test_no_bad_value_is_missed(bad: float, place: int) -> None:
    gradients = draw(3)
    gradients["matrix"].reshape(-1)[place] = bad
    assert not np.isfinite(squared_norm(gradients))
