from __future__ import annotations

import numpy as np
import pytest

from contract.errors import RemoteProtocolError, TrainingError
from contract.training import OptimiserRule
from edge_runtime.part_head import PartHead

SGD, ADAMW = OptimiserRule("sgd", 0.5, 0.25), OptimiserRule("adamw", 0.0, 0.1)
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(6, 4)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0, 1, 1])


def head(run: str = "run-1", secret: bytes = bytes(32), rule: OptimiserRule = SGD) -> PartHead:
    made = PartHead(3, secret, rule)
    made.begin(run)
    return made


def bits(its: PartHead) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in its.state().items()}


def train(its: PartHead, steps: int, rate: float = 0.125) -> None:
    for _ in range(steps):
        its.loss(FEATURES, LABELS)
        its.step(rate)


def test_its_start_is_keyed_by_run_and_secret() -> None:
    starts = []
    for run, secret in (("run-1", bytes(32)), ("run-1", bytes(32)), ("run-2", bytes(32)), ("run-1", b"s" * 32)):
        one = head(run, secret)
        one.loss(FEATURES, LABELS)
        starts.append(one.state()["weight"].tobytes())
    assert starts[0] == starts[1] and len(set(starts)) == 3


def test_the_gradient_of_the_features_is_that_of_the_mean_loss() -> None:
    one = head()
    loss = one.loss(FEATURES, LABELS)
    assert loss.gradient.shape == FEATURES.shape and loss.gradient.dtype == np.float32
    for place in [(0, 0), (3, 2), (5, 3)]:
        moved = FEATURES.copy()
        moved[place] += 1e-2
        slope = (one.loss(moved, LABELS).mean_loss - loss.mean_loss) / 1e-2
        assert slope == pytest.approx(loss.gradient[place], abs=2e-3)


def test_it_moves_by_the_rule_of_the_part_once_for_each_loss() -> None:
    one = head()
    loss = one.loss(FEATURES, LABELS)
    before = {name: value.copy() for name, value in one.state().items()}
    logits = FEATURES @ before["weight"].T + before["bias"]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    gradient = powers / powers.sum(axis=1, keepdims=True)
    gradient[np.arange(6), LABELS] -= 1
    gradient /= 6
    one.loss(FEATURES, LABELS)  # asked again, it does not count again
    one.step(0.125)
    moved = bits(one)
    one.step(0.125)
    assert bits(one) == moved and int(one.state()["steps"][0]) == 1
    weight = before["weight"] - 0.125 * (gradient.T @ FEATURES + 0.25 * before["weight"])
    bias = before["bias"] - 0.125 * (gradient.sum(axis=0) + 0.25 * before["bias"])
    assert one.state()["weight"] == pytest.approx(weight, abs=1e-6)
    assert one.state()["bias"] == pytest.approx(bias, abs=1e-6)
    assert one.loss(FEATURES, LABELS).mean_loss < loss.mean_loss


@pytest.mark.parametrize("rule", [SGD, ADAMW])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_its_state_goes_on_bit_for_bit(rule: OptimiserRule, steps: int) -> None:
    whole, broken, again = head(rule=rule), head(rule=rule), head("another", rule=rule)
    train(whole, steps + 2)
    train(broken, steps)
    again.load_state({name: value.copy() for name, value in broken.state().items()})
    assert bits(again) == bits(broken)
    train(again, 2)
    assert bits(again) == bits(whole)


def test_a_loaded_state_is_a_copy() -> None:
    one = head()
    train(one, 1)
    state = {name: value.copy() for name, value in one.state().items()}
    frozen = {name: value.tobytes() for name, value in state.items()}
    one.load_state(state)
    train(one, 1)
    assert {name: value.tobytes() for name, value in state.items()} == frozen


def test_a_new_run_begins_as_if_there_had_been_none() -> None:
    used = head()
    train(used, 2)
    used.loss(FEATURES, LABELS)
    used.begin("run-2")
    assert bits(used) == bits(head("run-2")) and used.as_head() is None
    used.step(0.125)  # the loss of before is forgotten
    train(used, 1)
    fresh = head("run-2")
    train(fresh, 1)
    assert bits(used) == bits(fresh)


def test_features_of_another_width_are_refused() -> None:
    one = head()
    one.loss(FEATURES, LABELS)
    with pytest.raises(RemoteProtocolError, match="expected features of 4 values, found 3"):
        one.loss(FEATURES[:, :3], LABELS)


def test_a_loss_that_is_not_finite_stops_the_training_and_moves_nothing() -> None:
    one = head()
    train(one, 1)
    state = {name: value.copy() for name, value in one.state().items()}
    state["weight"][...] = 3e38  # as after steps that were too long
    one.load_state(state)
    before = bits(one)
    with pytest.raises(TrainingError, match="head is not finite"):
        one.loss(FEATURES * 100, LABELS)
    one.step(0.125)
    assert bits(one) == before


def test_predictions_are_made_by_what_was_learned() -> None:
    one = head()
    assert one.as_head() is None
    train(one, 50)
    found = one.as_head()
    assert found is not None
    logits = FEATURES @ one.state()["weight"].T + one.state()["bias"]
    assert found.logits(FEATURES) == pytest.approx(logits)
