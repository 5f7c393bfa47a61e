"""What may be asked for about training on devices, and what is refused before any work is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.config import resolve
from contract.errors import UsageError
from contract.training import HOLDS, RELEASED, AugmentRule, OptimiserRule
from exporter.cli import FIELDS, main, make_plan
from exporter.plan import ExportPlan, optimiser_rule, read_augment, read_cuts


def _plan(release_whole_model: bool = False, environ: dict[str, str] | None = None, **flags: object) -> ExportPlan:
    given = {field.name: None for field in FIELDS} | {"model": "m", "output": "front"} | flags
    return make_plan(resolve("export", FIELDS, given, environ or {}, None), False, release_whole_model)


@pytest.mark.parametrize(
    ("text", "cuts"),
    [("3", (3,)), ("2,6,10", (2, 6, 10)), ("1-10", tuple(range(1, 11))), ("10, 1-3", (1, 2, 3, 10)), ("4-4", (4,))],
)
def test_cuts_are_numbers_and_ranges(text: str, cuts: tuple[int, ...]) -> None:
    assert read_cuts(text) == cuts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "cut 0"), ("0-3", "cut 0"), ("", "numbers and ranges"), ("2,,3", "numbers and ranges"),
        ("two", "numbers and ranges"), ("-3", "numbers and ranges"), ("1.5", "numbers and ranges"),
        ("٣", "numbers and ranges"), ("99999", "numbers and ranges"), ("5-2", "ends before it starts"),
        ("2,2", "cut 2 more than once"), ("1-4,3", "cut 3 more than once"),
    ],
)  # fmt: skip
def test_other_cuts_are_refused_with_cause_and_cure(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_cuts(text)
    assert caught.value.cure


def test_augmentation_is_a_list_of_parts() -> None:
    assert read_augment("none") == AugmentRule()
    assert read_augment("crop=4,flip,brightness=0.2") == AugmentRule(4, True, 0.2)
    assert read_augment(" flip ") == AugmentRule(flip=True)
    for text in ("", "flop", "flip=1", "crop", "crop=x", "crop=1.5", "flip,flip", "brightness=high"):
        with pytest.raises(UsageError, match="--augment"):
            read_augment(text)


def test_each_optimiser_has_its_own_defaults() -> None:
    assert optimiser_rule("sgd", None, None) == OptimiserRule("sgd", 0.9, 5e-4)
    assert optimiser_rule("sgd", 0.0, 0.0) == OptimiserRule("sgd", 0.0, 0.0)
    assert optimiser_rule("adamw", None, None) == OptimiserRule("adamw", 0.0, 0.01)
    with pytest.raises(UsageError, match="adamw has none"):
        optimiser_rule("adamw", 0.9, None)
    with pytest.raises(UsageError, match="one of sgd, adamw"):
        optimiser_rule("lion", None, None)


def test_every_strategy_that_trains_on_devices_can_be_chosen() -> None:
    for strategy, holds in HOLDS.items():
        whole = holds in RELEASED
        plan = _plan(whole, **{"for": strategy}, **({"classes": 3} if holds == "whole" else {}))
        assert (plan.training is None) == (holds == "frontend")
        if plan.training is not None:
            assert plan.training.whole_model == whole and plan.training.strategy == strategy


def test_split_is_one_cut_and_the_command_line_outweighs_the_rest() -> None:
    assert _plan(**{"for": "split_fed"}, split=4).training.cuts == (4,)
    assert _plan(**{"for": "split_fed"}).training.cuts == ()  # the default cut
    environ = {"CUTLAYER_EXPORT_SPLIT": "7"}
    assert _plan(**{"for": "split_fed"}, cuts="1-3", environ=environ).training.cuts == (1, 2, 3)
    assert _plan(cuts="5").split == 5 and _plan(split=5).split == 5 and _plan().split is None


@pytest.mark.parametrize(
    ("release", "flags", "said"),
    [
        (False, {"for": "fed_avg", "classes": 3}, "would give every layer away"),
        (True, {"for": "fed_avg"}, "--classes does not say"),
        (True, {"for": "fed_avg", "classes": 3, "cuts": "1-2"}, "has no cut"),
        (True, {"for": "fed_avg", "classes": 3, "split": 1}, "has no cut"),
        (True, {"for": "fed_avg", "classes": 1}, "classes must be 2 or more"),
        (True, {"for": "sequential_split"}, "needs the first layers only"),
        (True, {}, "split_adaptation trains nothing on devices"),
        (False, {"for": "sequential_split", "classes": 3}, "the head is made where the training runs"),
        (False, {"for": "sequential_split", "int8": True}, "--int8 is for frontends"),
        (False, {"for": "sequential_split", "momentum": 1.0}, "momentum must be"),
        (False, {"for": "sequential_split", "weight_decay": -0.1}, "weight-decay must"),
        (False, {"for": "sequential_split", "augment": "brightness=1"}, "brightness must be"),
        (False, {"for": "sequential_split", "augment": "brightness=nan"}, "brightness must be"),
        (False, {"for": "sequential_split", "augment": "crop=-1"}, "crop must be"),
        (False, {"for": "sequential_split", "gradient": "int4"}, "gradient must be one of"),
        (False, {"for": "sequential_split", "activations": "int8"}, "int8 belongs to eft_vit"),
        (False, {"for": "sequential_split", "activations": "int4"}, "activations must be one of"),
        (False, {"for": "sequential_spilt"}, "did you mean 'sequential_split'"),
        (False, {"for": "eeft"}, "would give every layer away"),
        (True, {"for": "eeft", "classes": 3}, "the head is made where the training runs"),
        (True, {"for": "fed_mtl", "cuts": "1"}, "has no cut"),
        (True, {"for": "eeft", "freeze": ("layer1.",)}, "the modules alone are trained"),
        (True, {"for": "eeft", "skips": 0}, "skips must be 1"),
        (True, {"for": "fed_mtl", "skips": 5}, "--skips was given, but fed_mtl adds no modules"),
        (False, {"start_alpha": -3.0}, "--start-alpha was given"),
        (False, {"cuts": "1-3"}, "holds one frontend"),
        (False, {"cuts": "1", "split": 1}, "found both"),
        (False, {"gradient": "float16"}, "--gradient was given"),
        (False, {"weight_decay": 0.1}, "--weight-decay was given"),
        (False, {"for": "linear_probe", "recompute": True}, "linear_probe trains nothing"),
    ],
)
def test_choices_that_do_not_fit_together_are_refused(release: bool, flags: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        _plan(release, **flags)
    assert caught.value.cure


def test_consent_to_release_the_whole_model_comes_from_the_command_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "m", "-o", "front", "--for", "fed_avg", "--classes", "3"]
    monkeypatch.setenv("CUTLAYER_EXPORT_RELEASE_WHOLE_MODEL", "true")
    assert main(words) == 2 and "unknown environment variable" in capsys.readouterr().err
    monkeypatch.delenv("CUTLAYER_EXPORT_RELEASE_WHOLE_MODEL")
    Path("cutlayer.toml").write_text("[export]\nrelease_whole_model = true\n")
    assert main(words) == 2 and "unknown key release_whole_model" in capsys.readouterr().err


def test_the_stored_plan_of_a_frontend_has_no_word_of_training() -> None:
    assert "training" not in _plan().document()
    document = _plan(**{"for": "parallel_split"}, cuts="2,4", augment="flip", freeze="conv1,bn1").document()
    assert document["training"]["strategy"] == "parallel_split" and document["training"]["cuts"] == (2, 4)
    assert document["training"]["augment"] == {"crop_padding": 0, "flip": True, "brightness": 0.0}
    assert document["training"]["freeze"] == ("conv1", "bn1")
