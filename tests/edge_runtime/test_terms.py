from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import RefusedError
from contract.messages import ASK_KINDS, Ask
from edge_runtime.terms import ASKS_OF_MODE, Terms, check_ask, check_kappa, device_terms
from tests.edge_runtime.fake_package import Package, write_device, write_package


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
    with pytest.raises(RefusedError, match=r"2\.5 .*2\.0"):
        terms(tmp_path, package, kappa_floor=2.5)


def test_a_label_mode_that_the_package_rules_out_is_refused(tmp_path: Path, package: Package) -> None:
    only = replace(package, manifest=replace(package.manifest, label_modes=("permuted-label",)))
    with pytest.raises(RefusedError, match="client-head"):
        terms(tmp_path, only, label_mode="client-head")


@pytest.mark.parametrize("mode", sorted(ASKS_OF_MODE))
@pytest.mark.parametrize("kind", sorted(ASK_KINDS))
def test_each_mode_allows_its_own_asks_and_no_other(tmp_path: Path, package: Package, mode: str, kind: str) -> None:
    agreed = terms(tmp_path, package, label_mode=mode)
    ids, values = np.zeros((1, 16), np.uint8), np.zeros((1, 3), np.float32)
    ask = {
        "collect_features": lambda: Ask("a", kind, {"kappa": 1.0, "seed": 1}, 1.0),
        "score_batch": lambda: Ask("a", kind, {"split": "train"}, 1.0, {"logits": values, "sample_ids": ids}),
        "head_step": lambda: Ask(
            "a", kind, {"step": 1, "after": 0, "base": 0}, 1.0, {"features": values, "sample_ids": ids}
        ),
    }[kind]()
    if kind in ASKS_OF_MODE[mode]:
        check_ask(ask, agreed)
    else:
        with pytest.raises(RefusedError, match=kind):
            check_ask(ask, agreed)


def test_noise_that_is_no_number_is_below_every_floor(tmp_path: Path, package: Package) -> None:
    with pytest.raises(RefusedError, match="kappa"):
        check_kappa(float("nan"), terms(tmp_path, package))
