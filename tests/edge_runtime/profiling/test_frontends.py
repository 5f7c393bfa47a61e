"""Packages as work to be measured: what one repetition does, how many bytes an image is, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import EngineError, PackageError, SignatureError, UsageError
from contract.images import ImageRule
from contract.signature import PublicKey, generate, key_id, load_public
from contract.training import TRAINING_NAME, TrainingPlan
from edge_runtime.data import load_dataset
from edge_runtime.profiling.frontends import Images, Verified, folder_samples, frontends, verify
from edge_runtime.profiling.parts import PHASES, draw_feed, parts, step_phases
from tests.edge_runtime import fake_trainer
from tests.edge_runtime.fake_package import DIM, GRID, PREFIX, PUBLISHER, write_images, write_package

TRUSTED = {key_id(PUBLISHER.public_key()): PUBLISHER.public_key()}
PATCHES = GRID[0] * GRID[1]


def verified(
    tmp_path: Path, specs: Sequence[Path], trusted: dict[str, PublicKey] = TRUSTED, threads: int = 2
) -> list[Verified]:
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    return verify([str(spec) for spec in specs], trusted, workplace, threads, lambda text: None)


def test_each_package_is_a_candidate_with_the_bytes_that_an_image_takes(tmp_path: Path) -> None:
    """Two packages of one name and version: each is looked at by itself, not as an update of the other."""
    write_package(tmp_path / "a")
    write_package(tmp_path / "b", seed=1)
    found = frontends(
        verified(tmp_path, [tmp_path / "a/front.fake", tmp_path / "b/front.fake"]), Images(None, 3), 2, seed=0
    )
    assert [each.point.split for each in found] == [1, 1] and found[0].point.depth == 2
    assert found[0].point.package_digest != found[1].point.package_digest
    assert found[0].point.sent_bytes_per_image == (PREFIX + PATCHES) * DIM + 2 * PATCHES
    assert (found[0].point.received_bytes_per_image, found[0].point.engine) == (0, "fake 1")
    (phase,) = found[0].open()
    assert [phase.run() for _ in range(4)] == [2, 2, 2, 2]  # as many images as the engine runs side by side


def test_the_images_of_a_folder_are_decoded_each_time(tmp_path: Path) -> None:
    package = write_package(tmp_path / "a")
    folder = write_images(tmp_path / "images", {"x": 2, "y": 1})
    (candidate,) = frontends(verified(tmp_path, [tmp_path / "a/front.fake"], threads=1), Images(folder), 1, seed=0)
    (phase,) = candidate.open()
    assert phase.run() == 1
    samples = folder_samples(folder, package.manifest.image.max_pixels)
    assert len(samples) == 3 == len(load_dataset(folder, None, bytes(32), 10**6, lambda: None).samples)
    samples[1].path.unlink()
    with pytest.raises(Exception, match=r"\.png"):
        for _ in range(3):
            phase.run()


def test_a_package_that_nobody_signed_for_is_not_run(tmp_path: Path) -> None:
    write_package(tmp_path / "a")
    stranger = generate().public_key()
    with pytest.raises(SignatureError):
        verified(tmp_path, [tmp_path / "a/front.fake"], {key_id(stranger): stranger})


def test_a_damaged_package_is_not_run(tmp_path: Path) -> None:
    write_package(tmp_path / "a")
    (tmp_path / "a/front.onnx").write_bytes(b"x")
    with pytest.raises(PackageError, match="front.onnx"):
        verified(tmp_path, [tmp_path / "a/front.fake"])


def test_one_package_twice_is_refused(tmp_path: Path) -> None:
    write_package(tmp_path / "a")
    with pytest.raises(UsageError, match="twice"):
        verified(tmp_path, [tmp_path / "a/front.fake", tmp_path / "a/front.fake"])


def test_frontends_and_parts_are_not_taken_for_each_other(tmp_path: Path) -> None:
    write_package(tmp_path / "a")
    package = verified(tmp_path, [tmp_path / "a/front.fake"])
    with pytest.raises(PackageError, match="no parts"):
        parts(package, 4, 1, seed=0)
    with pytest.raises(PackageError, match="no frontend"):
        frontends([dataclasses.replace(package[0], engine=None)], Images(None, 1), 1, seed=0)


IMAGE = ImageRule(4, 4, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 1_000_000)


class CountingTrainer(fake_trainer.FakeTrainer):
    """Notes what it was asked to do."""

    def __init__(self, its: Any) -> None:
        super().__init__(its)
        self.calls: list[str] = []

    def forward(self, *given: Any) -> Any:
        self.calls.append("forward")
        return super().forward(*given)

    def backward(self, *given: Any) -> Any:
        self.calls.append("backward")
        return super().backward(*given)

    def step(self, learning_rate: float) -> Any:
        self.calls.append("step")
        return super().step(learning_rate)


@pytest.mark.parametrize("cut", [fake_trainer.CUTS[0], fake_trainer.CUTS[2]])
def test_each_phase_of_a_step_does_what_the_one_before_does_and_more(cut: Any) -> None:
    plan: TrainingPlan = fake_trainer.plan()
    trainer = CountingTrainer(cut)
    before = trainer.tensors["w"].copy()
    phases = step_phases(trainer, draw_feed(plan, cut, IMAGE, 5, seed=1))  # type: ignore[arg-type]
    assert tuple(phase.name for phase in phases) == PHASES
    done = []
    for phase in phases:
        trainer.calls.clear()
        assert phase.run() == 5
        done.append(list(trainer.calls))
    assert done == [["forward"], ["forward", "backward"], ["forward", "backward", "step"]]
    for _ in range(50):
        phases[2].run()
    assert np.abs(trainer.tensors["w"] - before).max() < 1e-6  # weights stay where their arithmetic costs what it did


def test_what_goes_into_a_step_has_the_shapes_of_the_part() -> None:
    plan = fake_trainer.plan()
    split = draw_feed(plan, fake_trainer.CUTS[0], IMAGE, 5, seed=1)
    assert split.images.shape == (5, 3, 4, 4) and split.targets is None and split.keep is None
    assert split.grad_z is not None and split.grad_z.shape == (5, 3, 1) and split.grad_z.dtype == np.float32
    whole = draw_feed(plan, fake_trainer.CUTS[2], IMAGE, 5, seed=1)
    assert whole.grad_z is None and whole.targets is not None and (whole.targets.sum(axis=1) == 1.0).all()
    masked = dataclasses.replace(fake_trainer.CUTS[0], kept=2, patches=6, output_shape=(3, 8), evaluated_shape=(7, 8))
    keep = draw_feed(plan, masked, IMAGE, 5, seed=1).keep
    assert keep is not None and keep.shape == (5, 2) and (keep[:, 0] < keep[:, 1]).all() and keep.max() < 6


@pytest.mark.parametrize(("name", "sends"), [("parts", True), ("masked", True), ("whole", False)])
def test_the_parts_of_a_real_package_are_trained(tmp_path: Path, name: str, sends: bool) -> None:
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if not given:
        pytest.skip("the graphs are made by tests.make_package: run tools/test, or set CUTLAYER_TEST_PACKAGE")
    key = load_public(Path(given) / "keys/publisher.pub")
    packages = verified(tmp_path, [Path(given) / name], {key_id(key): key})
    assert (packages[0].installed.folder / TRAINING_NAME).is_file()
    for candidate in parts(packages, 3, 1, seed=0):
        assert (candidate.point.sent_bytes_per_image > 0) == sends == (candidate.point.received_bytes_per_image > 0)
        for phase in candidate.open():
            assert phase.run() == 3


def test_a_frontend_that_the_engine_cannot_run_is_refused(tmp_path: Path) -> None:
    write_package(tmp_path / "a")
    with pytest.raises(EngineError, match="onnxruntime"):
        verified(tmp_path, [tmp_path / "a"])  # the fake engine's model is no ONNX
