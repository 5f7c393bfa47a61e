from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from contract.asks import ASK_KINDS
from contract.errors import ConfigError, RefusedError
from contract.manifest import LabelMode
from contract.messages import Ask
from contract.tokens import SentRule
from contract.training import TrainingPlan
from edge_runtime.terms import ASKS_OF_MODE, PART_ASKS_OF_MODE, Terms, check_ask, check_kappa, device_terms
from tests.edge_runtime.fake_package import Package, write_device, write_package
from tests.edge_runtime.fake_trainer import plan
from tests.golden.samples import MESSAGES


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


def terms(tmp_path: Path, package: Package, **changes: object) -> Terms:
    config = write_device(tmp_path, package, tmp_path, **changes)
    return device_terms(config, package.manifest, package.digest, 3, bytes(32))


def test_the_signed_manifest_decides_what_the_config_leaves_open(tmp_path: Path, package: Package) -> None:
    agreed = terms(tmp_path, package)
    assert (agreed.alpha, agreed.kappa_floor, agreed.kappa_max) == (0.1, 1.0, 2.0)
    own = terms(tmp_path, package, alpha=0.3, kappa_floor=1.5)
    assert (own.alpha, own.kappa_floor) == (0.3, 1.5)


def test_a_package_without_weight_noise_gives_none(tmp_path: Path, package: Package) -> None:
    rules = replace(package.manifest.transforms, weight_noise=False)
    plain = replace(package, manifest=replace(package.manifest, transforms=rules))
    assert terms(tmp_path, plain).alpha == 0.0


def test_a_floor_above_the_packages_ceiling_is_refused_with_both(tmp_path: Path, package: Package) -> None:
    with pytest.raises(ConfigError, match=r"2\.5 .*2\.0"):
        terms(tmp_path, package, kappa_floor=2.5)


def test_a_label_mode_that_the_package_rules_out_is_refused(tmp_path: Path, package: Package) -> None:
    only = replace(package, manifest=replace(package.manifest, label_modes=("permuted-label",)))
    with pytest.raises(ConfigError, match="client-head"):
        terms(tmp_path, only, label_mode="client-head")


MODES = ("raw-label", "permuted-label", "logit-gradient", "client-head")
PART = {"load_part", "forward", "settle", "upload_part", "choose_split", "take_turn", "noisy_forward", "sleep"}
ALLOWED: dict[tuple[str, str], set[str]] = {
    ("frontend", "permuted-label"): {"collect_features"},
    ("frontend", "logit-gradient"): {"collect_features", "score_batch"},
    ("frontend", "client-head"): {"collect_features", "head_step"},
    ("parts", "raw-label"): PART,
    ("parts", "permuted-label"): PART,  # a batch_loss would give the labels away
    ("parts", "logit-gradient"): PART | {"batch_loss"},
    ("parts", "client-head"): PART | {"batch_loss"},
    **{("whole", mode): {"load_part", "local_round"} for mode in MODES},
}
ASKS = {message.kind: message for message in MESSAGES.values() if isinstance(message, Ask)}


def training(holds: str, class_count: int | None = 3) -> TrainingPlan | None:
    whole = holds == "whole"
    return None if holds == "frontend" else plan(whole_model=whole, class_count=class_count)


def training_terms(tmp_path: Path, package: Package, holds: str, mode: str, class_count: int | None = 3) -> Terms:
    any_mode = replace(package, manifest=replace(package.manifest, label_modes=MODES))
    config = write_device(tmp_path, any_mode, tmp_path, label_mode=mode)
    plan_of_it = training(holds, class_count)
    return device_terms(config, any_mode.manifest, package.digest, 3, bytes(32), plan_of_it)


@pytest.mark.parametrize(("holds", "mode"), ALLOWED)
def test_each_package_and_mode_allows_its_own_asks_and_no_other(
    tmp_path: Path, package: Package, holds: str, mode: str
) -> None:
    agreed = training_terms(tmp_path, package, holds, mode)
    assert ASKS.keys() == ASK_KINDS.keys()
    for kind, ask in ASKS.items():
        if kind in ALLOWED[holds, mode]:
            check_ask(ask, agreed)
        else:
            with pytest.raises(RefusedError, match=kind) as error:
                check_ask(ask, agreed)
            assert mode in error.value.cause and error.value.cure


def test_every_mode_that_there_is_has_its_asks() -> None:
    assert set(PART_ASKS_OF_MODE) == set(MODES) == set(get_args(LabelMode))
    assert set(ASKS_OF_MODE) == {mode for holds, mode in ALLOWED if holds == "frontend"}


@pytest.mark.parametrize("holds", ["parts", "whole"])
@pytest.mark.parametrize("mode", MODES)
def test_a_package_with_a_head_of_its_own_wants_that_many_classes(
    tmp_path: Path, package: Package, holds: str, mode: str
) -> None:
    assert training_terms(tmp_path, package, holds, mode, None).class_count == 3
    with pytest.raises(ConfigError, match=r"number of classes: here 3, there 10 \(the package's own head\)"):
        training_terms(tmp_path, package, holds, mode, 10)


@pytest.mark.parametrize("holds", ["parts", "whole"])
def test_weight_noise_that_no_part_gets_is_refused(tmp_path: Path, package: Package, holds: str) -> None:
    config = write_device(tmp_path, package, tmp_path, alpha=0.1)
    with pytest.raises(ConfigError, match="weight noise: here alpha 0.1"):
        device_terms(config, package.manifest, package.digest, 3, bytes(32), training(holds))


def test_noise_that_is_no_number_is_below_every_floor(tmp_path: Path, package: Package) -> None:
    with pytest.raises(RefusedError, match="kappa"):
        check_kappa(float("nan"), terms(tmp_path, package))


def sending(package: Package, rule: SentRule) -> Package:
    cuts = tuple(replace(cut, sent=rule) for cut in package.manifest.cuts)
    return replace(package, manifest=replace(package.manifest, cuts=cuts))


def test_a_devices_own_floor_holds_for_the_tokens_that_get_a_share_of_the_noise(
    tmp_path: Path, package: Package
) -> None:
    half = sending(package, SentRule("checkerboard", 0.5))
    assert terms(tmp_path, half).kappa_floor == 1.0  # without a floor of its own it takes the publisher's word
    own = terms(tmp_path, half, kappa_floor=0.75)
    assert own.kappa_floor == 1.5
    check_kappa(1.5, own)
    with pytest.raises(RefusedError, match="floor"):
        check_kappa(1.4, own)
    with pytest.raises(ConfigError, match=r"3\.0 .*2\.0"):
        terms(tmp_path, half, kappa_floor=1.5)


def test_prefix_tokens_without_noise_are_refused_by_a_device_with_a_floor(tmp_path: Path, package: Package) -> None:
    bare = sending(package, SentRule("all", 0.0))
    assert terms(tmp_path, bare, kappa_floor=0.0).kappa_floor == 0.0
    with pytest.raises(ConfigError, match="prefix"):
        terms(tmp_path, bare, kappa_floor=0.1)
