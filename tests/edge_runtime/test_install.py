from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contract import training
from contract.errors import (
    CutlayerError,
    EngineError,
    ManifestError,
    PackageError,
    RollbackError,
    SignatureError,
)
from contract.leakage import LEAKAGE_NAME, from_bytes, to_bytes
from contract.signature import generate, key_id, sign
from contract.training import PARAMETERS_NAME, TRAINING_NAME, AugmentRule, OptimiserRule, TrainingCut, TrainingPlan
from edge_runtime.engines import Engine, open_engine
from edge_runtime.install import Installed, install, signal_to_noise_db
from tests.edge_runtime.fake_package import PUBLISHER, Package, write_package
from tests.leakage_table import leakage_table

TRUSTED = {key_id(PUBLISHER.public_key()): PUBLISHER.public_key()}


def put(folder: Path, packages: Path, said: list[str] | None = None) -> Installed:
    packages.mkdir(exist_ok=True)
    say = (said if said is not None else []).append
    return install(folder, packages, TRUSTED, lambda path: open_engine("fake", path, 1), say)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    return tmp_path / "packages"


def names(packages: Path) -> set[str]:
    return {path.name for path in packages.iterdir()}


def test_a_sound_package_becomes_the_current_one(package: Package, packages: Path) -> None:
    installed = put(package.folder, packages)
    assert installed.digest == package.digest and installed.golden_snr_db is None  # equal
    assert names(packages) == {package.digest.hex(), "current"}
    assert os.readlink(packages / "current") == package.digest.hex()
    assert {path.name for path in installed.folder.iterdir()} == {path.name for path in package.folder.iterdir()}


def test_files_that_the_manifest_does_not_list_stay_out(package: Package, packages: Path) -> None:
    (package.folder / "extra.bin").write_bytes(b"x")
    assert not (put(package.folder, packages).folder / "extra.bin").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def sign_by_another(path: Path) -> None:
    path.write_bytes(sign(generate(), (path.parent / "manifest.json").read_bytes()))


@pytest.mark.parametrize(
    ("file", "harm", "error"),
    [
        ("manifest.json", flip, SignatureError),
        ("manifest.json", cut_short, SignatureError),
        ("manifest.json", Path.unlink, PackageError),
        ("manifest.sig", flip, SignatureError),
        ("manifest.sig", sign_by_another, SignatureError),
        ("manifest.sig", Path.unlink, PackageError),
        ("manifest.sig", lambda path: path.write_bytes(bytes(5000)), PackageError),
        ("front.onnx", flip, PackageError),
        ("front.onnx", cut_short, PackageError),
        ("front.onnx", Path.unlink, PackageError),
        ("golden.safetensors", flip, PackageError),
    ],
)
def test_ex_03_every_altered_part_is_named_and_nothing_is_installed(
    package: Package, packages: Path, file: str, harm: Callable[[Path], object], error: type[CutlayerError]
) -> None:
    harm(package.folder / file)
    with pytest.raises(error) as found:
        put(package.folder, packages)
    assert type(found.value) is error and found.value.exit_code == 4
    assert file in str(found.value) or isinstance(found.value, SignatureError)
    assert names(packages) == set()


def signed_with(table: bytes, tmp_path: Path) -> Package:
    """A package that lists this leakage table."""
    package = write_package(tmp_path / "front")
    files = {each.name: (package.folder / each.name).read_bytes() for each in package.manifest.files}
    return write_package(tmp_path / "with-table", version=2, contents={**files, LEAKAGE_NAME: table})


def test_a_leakage_table_comes_with_the_package(package: Package, packages: Path, tmp_path: Path) -> None:
    table = leakage_table(package.manifest)
    installed = put(signed_with(to_bytes(table), tmp_path / "other").folder, packages)
    assert from_bytes((installed.folder / LEAKAGE_NAME).read_bytes()) == table


@pytest.mark.parametrize("table", ["{}", "of another package"])
def test_a_signed_package_with_a_table_of_another_is_refused(
    package: Package, packages: Path, tmp_path: Path, table: str
) -> None:
    other = replace(package.manifest, model="another")
    data = table.encode() if table == "{}" else to_bytes(leakage_table(other))
    with pytest.raises(PackageError, match="leakage"):
        put(signed_with(data, tmp_path / "other").folder, packages)
    assert names(packages) == set()


def test_the_signature_is_checked_before_the_meaning(package: Package, packages: Path) -> None:
    (package.folder / "manifest.json").write_bytes(b"{ not json")
    with pytest.raises(SignatureError):
        put(package.folder, packages)
    (package.folder / "manifest.sig").write_bytes(sign(PUBLISHER, b"{ not json"))
    with pytest.raises(ManifestError):
        put(package.folder, packages)


def test_a_manifest_signed_by_another_trusted_key_than_it_names_is_refused(package: Package, packages: Path) -> None:
    other = generate()
    (package.folder / "manifest.sig").write_bytes(sign(other, (package.folder / "manifest.json").read_bytes()))
    packages.mkdir()
    trusted = {**TRUSTED, key_id(other.public_key()): other.public_key()}
    with pytest.raises(SignatureError, match="names signer"):
        install(package.folder, packages, trusted, lambda path: open_engine("fake", path, 1), lambda text: None)
    assert names(packages) == set()


def test_an_older_version_is_refused_and_a_newer_one_swapped_in(tmp_path: Path, packages: Path) -> None:
    second = write_package(tmp_path / "second", version=2)
    first = write_package(tmp_path / "first", version=1)
    third = write_package(tmp_path / "third", version=3)
    put(second.folder, packages)
    with pytest.raises(RollbackError, match="version 1 is older than the installed 2"):
        put(first.folder, packages)
    put(third.folder, packages)
    assert os.readlink(packages / "current") == third.digest.hex()
    assert [path.name for path in (packages / second.digest.hex()).iterdir()] == ["manifest.json"]  # against rollback
    with pytest.raises(RollbackError):
        put(second.folder, packages)


def test_the_same_version_with_other_content_is_refused(tmp_path: Path, packages: Path) -> None:
    put(write_package(tmp_path / "one", seed=1).folder, packages)
    with pytest.raises(RollbackError, match="version 1 was installed with digest"):
        put(write_package(tmp_path / "two", seed=2).folder, packages)


def test_packages_of_other_names_do_not_get_in_each_others_way(tmp_path: Path, packages: Path) -> None:
    put(write_package(tmp_path / "one", version=5).folder, packages)
    other = write_package(tmp_path / "two", version=1, name="other")
    assert put(other.folder, packages).manifest.name == "other"


def test_installed_again_it_is_checked_and_not_copied(package: Package, packages: Path) -> None:
    folder = put(package.folder, packages).folder
    stamp = (folder / "front.onnx").stat().st_mtime_ns
    put(package.folder, packages)
    assert (folder / "front.onnx").stat().st_mtime_ns == stamp


def test_a_copy_that_was_damaged_later_is_installed_again(package: Package, packages: Path) -> None:
    folder = put(package.folder, packages).folder
    flip(folder / "front.onnx")
    said: list[str] = []
    put(package.folder, packages, said)
    assert (folder / "front.onnx").read_bytes() == (package.folder / "front.onnx").read_bytes()
    assert "front.onnx" in said[0]


def test_what_an_interrupted_installation_left_is_cleared(package: Package, packages: Path) -> None:
    (packages / ".incoming-dead").mkdir(parents=True)
    (packages / ".incoming-dead" / "front.onnx").write_bytes(b"half")
    (packages / ".current.partial").symlink_to("nowhere")
    put(package.folder, packages)
    assert names(packages) == {package.digest.hex(), "current"}


def test_an_engine_that_computes_something_else_is_refused(tmp_path: Path, packages: Path) -> None:
    package = write_package(tmp_path / "front")
    golden = load_file(package.folder / "golden.safetensors")
    golden["tokens"] += np.random.default_rng(0).normal(0, 1, golden["tokens"].shape).astype(np.float32)
    again = republish(package, golden, tmp_path / "again")
    with pytest.raises(EngineError, match=r"golden\.safetensors.* within 25\.0 dB, found"):
        put(again, packages)
    assert "current" not in names(packages)


@pytest.mark.parametrize(
    "golden",
    [
        {"pixels": np.zeros((4, 8, 8, 3), np.uint8), "tokens": np.zeros((4, 5, 8), np.float32)},
        {"pixels": np.zeros((4, 16, 16, 3), np.uint8), "tokens": np.zeros((4, 9, 8), np.float32)},
        {"pixels": np.zeros((4, 16, 16, 3), np.uint8)},
    ],
)
def test_golden_vectors_of_another_shape_are_named(
    tmp_path: Path, packages: Path, golden: dict[str, np.ndarray]
) -> None:
    again = republish(write_package(tmp_path / "front"), golden, tmp_path / "again")
    with pytest.raises(PackageError, match=r"golden\.safetensors"):
        put(again, packages)


def republish(package: Package, golden: dict[str, np.ndarray], folder: Path) -> Path:
    """The package with another golden file, signed by its publisher."""
    import hashlib

    from contract import manifest as manifests

    folder.mkdir()
    (folder / "front.onnx").write_bytes((package.folder / "front.onnx").read_bytes())
    save_file(golden, folder / "golden.safetensors")
    data = (folder / "golden.safetensors").read_bytes()
    record = replace(package.manifest.files[1], size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = replace(package.manifest, files=(package.manifest.files[0], record))
    signed = manifests.to_bytes(manifest)
    (folder / "manifest.json").write_bytes(signed)
    (folder / "manifest.sig").write_bytes(sign(PUBLISHER, signed))
    return folder


# Packages of parts to be trained, without a frontend

PART = TrainingCut(
    1, 4, "conv1", "cut1.forward.onnx", "cut1.backward.onnx", "cut1.evaluate.onnx", (8, 4, 4), (8, 4, 4), None, None,
    ("conv1.weight",), (), (), 0, 1000, "none",
)  # fmt: skip
PLAN = TrainingPlan(
    training.FORMAT, "sequential_split", False, None, (PART,), OptimiserRule(), AugmentRule(), "float32", "float32"
)


def write_parts(folder: Path, *, version: int = 1, listed: bytes | None = None, lacks: str = "") -> Path:
    """A signed package of one part; `listed` is another training.json, `lacks` a file that is left out."""
    files = {name: name.encode() for name in (PART.forward, PART.backward, PART.evaluate, PARAMETERS_NAME)}
    files[TRAINING_NAME] = training.to_bytes(PLAN) if listed is None else listed
    files.pop(lacks, None)
    return write_package(folder, version=version, cuts=(), contents=files).folder


def put_parts(folder: Path, packages: Path) -> Installed:
    def opened(path: Path) -> Engine:
        raise AssertionError(f"{path} is no frontend")

    packages.mkdir(exist_ok=True)
    return install(folder, packages, TRUSTED, opened, lambda text: None)


def test_parts_to_be_trained_are_installed_without_a_frontend(tmp_path: Path, packages: Path) -> None:
    folder = write_parts(tmp_path / "parts")
    for _ in range(2):  # copied, then found whole
        installed = put_parts(folder, packages)
        assert installed.training == PLAN and installed.manifest.cuts == () and installed.golden_snr_db is None
    assert (installed.folder / PARAMETERS_NAME).read_bytes() == PARAMETERS_NAME.encode()
    with pytest.raises(PackageError, match="no frontend"):
        _ = installed.onnx
    assert put(write_package(tmp_path / "front", version=2).folder, packages).training is None


@pytest.mark.parametrize("file", [PART.forward, PART.backward, PART.evaluate, PARAMETERS_NAME, TRAINING_NAME])
@pytest.mark.parametrize("harm", [flip, cut_short, Path.unlink])
def test_every_altered_file_of_a_part_is_named_and_nothing_is_installed(
    tmp_path: Path, packages: Path, file: str, harm: Callable[[Path], object]
) -> None:
    folder = write_parts(tmp_path / "parts")
    harm(folder / file)
    with pytest.raises(PackageError, match=file):
        put_parts(folder, packages)
    assert names(packages) == set()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lacks": PARAMETERS_NAME}, "the listed file parameters.safetensors"),
        ({"lacks": PART.backward}, "the listed file cut1.backward.onnx"),
        ({"listed": b"{}"}, "training.json"),
        ({"listed": training.to_bytes(PLAN) + b" "}, "canonical JSON"),
        ({"listed": training.to_bytes(PLAN).replace(b'"depth":4', b'"depth":1')}, "whole model"),
        ({"listed": training.to_bytes(PLAN).replace(b"cut1.forward.onnx", b"cut2.forward.onnx")}, "cut2.forward"),
    ],
)
def test_a_part_that_contradicts_its_package_is_refused_though_it_is_signed(
    tmp_path: Path, packages: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ManifestError, match=said):
        put_parts(write_parts(tmp_path / "parts", **changes), packages)
    assert names(packages) == set()


def test_an_older_package_of_parts_is_refused(tmp_path: Path, packages: Path) -> None:
    put_parts(write_parts(tmp_path / "second", version=2), packages)
    with pytest.raises(RollbackError, match="version 1 is older than the installed 2"):
        put_parts(write_parts(tmp_path / "first", version=1), packages)


def test_snr_tells_equal_near_far_and_broken_apart() -> None:
    signal = np.ones((2, 3), np.float32)
    assert signal_to_noise_db(signal, signal) == np.inf
    assert signal_to_noise_db(signal, signal * np.float32(1.1)) == pytest.approx(20.0, abs=0.01)
    assert not signal_to_noise_db(signal, signal * np.float32("nan")) >= 25
