from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.canonical import to_json
from contract.errors import ManifestError
from contract.manifest import FileRecord, Manifest
from contract.training import (
    HOLDS,
    OWN_HEADS,
    PARAMETERS_NAME,
    RELEASED,
    OptimiserRule,
    TrainingPlan,
    from_bytes,
    to_bytes,
)
from tests.golden.samples import MANIFEST, TRAINING, TRAINING_FILE

Document = dict[str, Any]
FILES = [
    PARAMETERS_NAME,
    *(f"cut_{index}.{role}.onnx" for index in (2, 4) for role in ("forward", "backward", "evaluate")),
]


def listing(*names: str) -> Manifest:
    """A manifest that lists these files."""
    return dataclasses.replace(MANIFEST, files=tuple(FileRecord(name, 1, "0" * 64) for name in sorted(names)))


WHOLE = listing(*FILES)


def document() -> Document:
    return json.loads(TRAINING_FILE.read_bytes())


def change(path: str, value: object) -> Callable[[Document], Document]:
    """Sets the field that a path such as `cuts.0.depth` names."""

    def apply(whole: Document) -> Document:
        *parents, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        place: Any = whole
        for part in parents:
            place = place[part]
        place[last] = value
        return whole

    return apply


def changed(plan: TrainingPlan, cut: int | None = None, **fields: Any) -> TrainingPlan:
    """The plan with fields of its own, or of one of its cuts, replaced."""
    if cut is None:
        return dataclasses.replace(plan, **fields)
    cuts = list(plan.cuts)
    cuts[cut] = dataclasses.replace(cuts[cut], **fields)
    return dataclasses.replace(plan, cuts=tuple(cuts))


# --- what is right -----------------------------------------------------------------------------------------------


def test_the_plan_of_version_1_still_reads_and_writes_the_same_bytes() -> None:
    data = TRAINING_FILE.read_bytes()
    assert from_bytes(data, WHOLE) == TRAINING
    assert to_bytes(TRAINING) == data


@given(
    rate=st.floats(0, 1, exclude_max=True),
    decay=st.floats(0, 1e3),
    epsilon=st.floats(0, 1, exclude_min=True, exclude_max=True),
    padding=st.integers(0, 64),
    flip=st.booleans(),
    gradient=st.sampled_from(["float32", "float16", "int8"]),
    activations=st.sampled_from(["float32", "float16"]),
)
def test_plans_survive(
    rate: float, decay: float, epsilon: float, padding: int, flip: bool, gradient: Any, activations: Any
) -> None:
    rule = OptimiserRule("sgd", rate, decay, rate, rate, epsilon)
    augment = dataclasses.replace(TRAINING.augment, crop_padding=padding, flip=flip, brightness=rate)
    plan = changed(TRAINING, optimiser=rule, augment=augment, gradient=gradient, activations=activations)
    assert from_bytes(to_bytes(plan), WHOLE) == plan


def test_a_package_of_parts_alone_needs_no_class_count() -> None:
    plan = changed(TRAINING, cuts=TRAINING.cuts[:1], whole_model=False, class_count=None)
    assert from_bytes(to_bytes(plan), WHOLE) == plan


def test_a_cut_is_found_by_its_index_and_knows_its_tensors() -> None:
    cut = TRAINING.cut(2)
    assert cut is not None and cut.layer == "layer1.0" and cut.output_size == 8 * 4 * 4
    assert cut.tensors == (*cut.trainable, "conv1.weight", *cut.buffers)
    assert TRAINING.cut(3) is None


def test_every_strategy_that_trains_on_devices_has_a_package_of_its_kind() -> None:
    assert set(HOLDS.values()) == {"frontend", "parts", *RELEASED}
    assert HOLDS["fed_avg"] == "whole" and HOLDS["centralised"] == "parts" and HOLDS["eeft"] == "modules"
    assert set(OWN_HEADS) < set(RELEASED)


# --- each rule broken once ---------------------------------------------------------------------------------------

BROKEN = {
    "no_cuts": (changed(TRAINING, cuts=()), "cuts: expected one or more, found none"),
    "a_cut_twice": (changed(TRAINING, 0, index=4), "cuts: expected each index once, found one twice"),
    "cut_0": (changed(TRAINING, 0, index=0), r"cut 0: expected 1 to depth \(4\), found 0"),
    "beyond_depth": (changed(TRAINING, 1, index=5), r"cut 5: expected 1 to depth \(4\), found 5"),
    "a_tensor_twice": (changed(TRAINING, 0, frozen=("layer1.0.bn1.weight",)), "cut 2: expected every tensor once"),
    "nothing_to_train": (changed(TRAINING, 0, trainable=()), "cut 2.trainable: expected one tensor or more"),
    "no_output": (changed(TRAINING, 0, output_shape=()), "cut 2.output_shape: expected sizes of 1 or more"),
    "empty_output": (changed(TRAINING, 0, output_shape=(8, 0)), "cut 2.output_shape: expected sizes of 1 or more"),
    "negative_saved": (changed(TRAINING, 0, saved=-1), "cut 2: expected counts of 0 or more"),
    "negative_macs": (changed(TRAINING, 0, macs=-1), "cut 2: expected counts of 0 or more"),
    "loss_on_no_logits": (changed(TRAINING, 0, loss="cross-entropy"), "cut 2.output_shape: expected the class count"),
    "another_class_count": (changed(TRAINING, class_count=9), "cut 4.output_shape: expected the class count"),
    "unknown_class_count": (changed(TRAINING, class_count=None), "cut 4.output_shape: expected the class count"),
    "no_classes": (
        changed(TRAINING, cuts=TRAINING.cuts[:1], class_count=0),
        "class_count: expected null, or 1 or more",
    ),
    "unreleased_whole": (changed(TRAINING, whole_model=False), "cut 4: expected less than the whole model .4., which"),
    **{
        f"{name}_{number}": (
            changed(TRAINING, optimiser=dataclasses.replace(TRAINING.optimiser, **{name: value})),
            f"optimiser.{said}: expected",
        )
        for name, values, said in (
            ("momentum", (-0.1, 1.0), "momentum"),
            ("weight_decay", (-1e-9,), "weight_decay"),
            ("beta_1", (-0.1, 1.0), "beta"),
            ("beta_2", (-0.1, 1.0), "beta"),
            ("epsilon", (0.0, 1.0), "epsilon"),
        )
        for number, value in enumerate(values)
    },
    "negative_padding": (
        changed(TRAINING, augment=dataclasses.replace(TRAINING.augment, crop_padding=-1)),
        "augment.crop_padding: expected 0 or more",
    ),
    "negative_brightness": (
        changed(TRAINING, augment=dataclasses.replace(TRAINING.augment, brightness=-0.1)),
        "augment.brightness: expected 0 to less than 1",
    ),
    "black_pictures": (
        changed(TRAINING, augment=dataclasses.replace(TRAINING.augment, brightness=1.0)),
        "augment.brightness: expected 0 to less than 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_contradicts_itself_is_neither_written_nor_read(name: str) -> None:
    plan, text = BROKEN[name]
    with pytest.raises(ManifestError, match=text) as written:
        to_bytes(plan)
    assert written.value.cause.startswith("training.json: ") and written.value.cure
    with pytest.raises(ManifestError, match=text):
        from_bytes(to_json(dataclasses.asdict(plan)), WHOLE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_plan_of_numbers_that_are_none_is_not_written(value: float) -> None:
    for field in ("momentum", "weight_decay", "epsilon"):
        rule = dataclasses.replace(TRAINING.optimiser, **{field: value})
        with pytest.raises(ManifestError, match=r"training\.json"):
            to_bytes(changed(TRAINING, optimiser=rule))


FORGED: dict[str, tuple[Callable[[Document], object], str]] = {
    "unknown_field": (change("energy_j", 1.0), "expected no other fields of TrainingPlan, found 'energy_j'"),
    "unknown_field_of_a_cut": (change("cuts.0.url", "x"), "expected no other fields of TrainingCut, found 'url'"),
    "missing_field": (lambda whole: {**whole, "cuts": [{}]}, "expected the field 'backward' of TrainingCut"),
    "another_format": (change("format", "cutlayer-training/2"), "expected one of cutlayer-training/1"),
    "another_optimiser": (change("optimiser.kind", "adam"), "expected one of sgd, adamw"),
    "another_loss": (change("cuts.0.loss", "mse"), "expected one of none, cross-entropy"),
    "another_gradient": (change("gradient", "int4"), "expected one of float32, float16, int8"),
    "activations_as_codes": (change("activations", "int8"), "expected int8 for eft_vit only, found parallel_split"),
    "an_int_for_a_float": (change("optimiser.momentum", 0), "optimiser.momentum: expected a finite float"),
    "a_bool_for_an_int": (change("cuts.0.saved", True), r"cuts\[0\].saved: expected int"),
    "a_list": (lambda whole: [whole], "expected an object"),
}


@pytest.mark.parametrize("name", FORGED)
def test_bytes_that_are_no_plan_are_refused(name: str) -> None:
    forge, text = FORGED[name]
    with pytest.raises(ManifestError, match=text) as raised:
        from_bytes(to_json(forge(document())), WHOLE)
    assert "publisher" in raised.value.cure


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(document(), sort_keys=True).encode(),
        json.dumps(document(), separators=(",", ":")).encode()[:-1] + b' ,"cuts":[]}',
        to_json(dict(reversed(document().items()))) + b"\n",
        TRAINING_FILE.read_bytes().replace(b"0.05", b"5e-2"),
        TRAINING_FILE.read_bytes().replace(b"layer1.0", b"l\\u0061yer1.0"),
        b"",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_only_canonical_bytes_are_read(data: bytes) -> None:
    assert data != TRAINING_FILE.read_bytes()
    with pytest.raises(ManifestError, match=r"training\.json"):
        from_bytes(data, WHOLE)


@pytest.mark.parametrize("missing", FILES)
def test_every_file_of_a_cut_must_be_listed(missing: str) -> None:
    others = listing(*(name for name in FILES if name != missing))
    with pytest.raises(ManifestError, match=f"expected the listed file {missing}, found no such file"):
        from_bytes(TRAINING_FILE.read_bytes(), others)


def test_a_file_outside_the_package_is_not_a_listed_one() -> None:
    plan = changed(TRAINING, 0, forward="../../etc/passwd")
    with pytest.raises(ManifestError, match="expected the listed file"):
        from_bytes(to_bytes(plan), WHOLE)
