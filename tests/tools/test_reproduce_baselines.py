"""The baselines that train in the clear: what each of them moves, the emulator, the search, and that they learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import ConfigError, TrainingError  # noqa: E402  (after the skips)
from exporter.architecture import create  # noqa: E402
from tools import reproduce_baselines as baselines  # noqa: E402
from tools.reproduce_baselines import CHOOSE, Budget, Found, Images, Learner, Score  # noqa: E402

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 6, "num_heads": 3, "num_classes": 7}
CUT, CLASSES = 4, 3
SHORT = Budget(epochs=4, offsite_epochs=4, batch=8, rates=(1e-3, 1e-2), folds=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Barriers of such small steps cost more than their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return create("vit_tiny_patch16_224", False, TINY).eval()


def colours(count: int, seed: int) -> Images:
    """Pictures of one colour by class, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    return Images(torch.eye(3)[labels][:, :, None, None] * 2 + 0.5 * noise, labels)


def moved(model: torch.nn.Module, learner: Learner) -> set[str]:
    before, after = model.state_dict(), learner.model.state_dict()
    return {name for name in after if not torch.equal(before[name], after[name])}


def learned(model: torch.nn.Module, name: str) -> Learner:
    learner = baselines.make_learner(name, model, CUT, CLASSES, 1)
    assert learner.learn(colours(12, 0), 1e-3, 1, 8, 1) == 2
    return learner


def names_of(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if not name.startswith("head.")}


def test_fine_tuning_moves_the_whole_model(model: torch.nn.Module) -> None:
    assert moved(model, learned(model, "fine_tuning")) == names_of(model)


def test_ln_tuning_moves_every_norm_and_nothing_else(model: torch.nn.Module) -> None:
    found = moved(model, learned(model, "ln_tuning"))
    assert found == {name for name in names_of(model) if "norm" in name} and len(found) == 2 * (2 * 6 + 1)


def test_split_learning_moves_the_frontend_before_a_frozen_backend(model: torch.nn.Module) -> None:
    behind = ("blocks.4.", "blocks.5.", "norm.")
    expected = {name for name in names_of(model) if not name.startswith(behind)}
    assert moved(model, learned(model, "split_learning")) == expected


def test_offsite_tuning_moves_two_blocks_at_each_end_and_is_plugged_back(model: torch.nn.Module) -> None:
    learner = learned(model, "offsite_tuning")
    ends = tuple(f"blocks.{place}." for place in (0, 1, 4, 5))
    assert moved(model, learner) == {name for name in names_of(model) if name.startswith(ends)}
    assert len(learner.model.blocks) == 6
    # The score is of all six blocks, the emulator's of five.
    score, images = learner.score(colours(30, 2)), colours(30, 2)
    plugged = Learner(learner.model, learner.head).score(images)
    assert (score.accuracy, score.loss) == (plugged.accuracy, plugged.loss)
    emulator = copy.copy(learner.model)
    emulator._modules = {
        **learner.model._modules,
        "blocks": torch.nn.Sequential(*learner.model.blocks[:3], *learner.model.blocks[4:]),
    }
    assert baselines.emulated_blocks(6) == [0, 1, 2, 4, 5]
    assert score.emulator_accuracy == Learner(emulator, learner.head).score(images).accuracy


def test_half_of_the_middle_is_dropped_uniformly() -> None:
    assert baselines.emulated_blocks(12) == [0, 1, 2, 4, 7, 9, 10, 11]
    assert baselines.emulated_blocks(24) == [0, 1, 2, 4, 6, 8, 10, 13, 15, 17, 19, 21, 22, 23]


def test_a_model_without_a_middle_cannot_be_tuned_offsite() -> None:
    with pytest.raises(ConfigError, match="6 blocks or more, found 5"):
        baselines.emulated_blocks(5)


def test_the_model_that_is_given_is_never_changed(model: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learned(model, "offsite_tuning")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", CHOOSE)
def test_each_baseline_learns(model: torch.nn.Module, name: str) -> None:
    found = run(model, name, SHORT)
    assert found.accuracy > 0.6  # chance is a third
    assert found.lr in SHORT.rates and found.held_out_accuracy is not None
    assert (found.emulator_accuracy is None) == (name != "offsite_tuning")
    assert found.steps == 2 * 2 * 4 * 2 + 4 * 3  # rates x folds x epochs x batches of 9 images, then all 18


def test_the_same_seed_gives_the_same_figures(model: torch.nn.Module) -> None:
    budget = replace(SHORT, offsite_epochs=1)
    assert run(model, "offsite_tuning", budget) == run(model, "offsite_tuning", budget)


def run(model: torch.nn.Module, name: str, budget: Budget) -> Found:
    return baselines.run_baseline(name, model, CUT, colours(18, 0), colours(60, 1), CLASSES, budget, 1)


class Told(Learner):
    """A learner whose score is told beforehand."""

    def __init__(self, score: Score) -> None:
        self._told = score

    def score(self, images: Images) -> Score:
        return self._told


def test_the_rate_is_that_of_most_held_out_images_then_of_the_least_loss() -> None:
    scores = {1e-3: Score(0.5, 9.0), 1e-2: Score(0.5, 2.0), 1e-1: Score(0.9, math.nan), 1.0: Score(0.4, 0.1)}
    seen: list[int] = []

    def learn(images: Images, lr: float) -> Told:
        seen.append(len(images.labels))
        return Told(scores[lr])

    budget = Budget(rates=tuple(scores), folds=3)
    assert baselines.choose_rate(learn, colours(18, 0), budget) == (1e-2, 0.5)
    assert seen == [12] * 12  # never an image of the fold that it is judged by


def test_one_shot_leaves_nothing_to_hold_out() -> None:
    def learn(images: Images, lr: float) -> Told:
        raise AssertionError("nothing could be judged")

    assert baselines.choose_rate(learn, colours(3, 0), Budget(rates=(1e-4, 1e-3, 1e-2))) == (1e-3, None)


def test_rates_that_all_diverge_are_an_error() -> None:
    with pytest.raises(TrainingError, match="no learning rate"):
        baselines.choose_rate(lambda images, lr: Told(Score(0.5, math.inf)), colours(18, 0), SHORT)
