"""What is equipped first, and what the signed manifest decides about the worker's answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime import pipeline
from edge_runtime.equip import equip
from edge_runtime.worker import Upload, Worker
from tests.edge_runtime.fake_package import write_device, write_images, write_package


def test_an_energy_meter_that_cannot_be_is_said_before_anything_is_installed(tmp_path: Path) -> None:
    package = write_package(tmp_path / "front")
    config = write_device(tmp_path / "device", package, write_images(tmp_path / "images", {"a": 1}))
    for wrong in (replace(config, plug_account=tmp_path / "account"), replace(config, power_model="9:1")):
        with pytest.raises(ConfigError, match="plug is not|IDLE:BUSY"):
            equip(wrong, "adapt", threading.Event(), pytest.fail)  # type: ignore[arg-type]
        assert not list(config.state.rglob("*.onnx"))
    equip(config, "adapt", threading.Event(), lambda text: None).state.close()
    assert list(config.state.rglob("*.onnx"))


@pytest.mark.parametrize(("family", "retrieved"), [("vit", True), ("swin", False), ("resnet", False), ("vgg", False)])
def test_patches_are_retrieved_only_in_families_that_keep_them(tmp_path: Path, family: str, retrieved: bool) -> None:
    package = write_package(tmp_path / "front", family=family)
    config = write_device(tmp_path / "device", package, write_images(tmp_path / "images", {"a": 3, "b": 3}))
    equipment = equip(config, "adapt", threading.Event(), lambda text: None)
    try:
        assert isinstance(equipment.worker, Worker)
        (message,) = equipment.worker.collect(Upload("run.features", "train", 1.0, 1 << 16))
    finally:
        equipment.state.close()
    assert (message.sources is not None) == retrieved
    extra_bytes = message.sources.nbytes if message.sources is not None else 0
    assert equipment.worker.counters.payload_bytes == message.codes.nbytes + extra_bytes


def test_clean_features_go_before_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may end the run as soon as it has the last batch; nobody comes back to this generator then."""
    monkeypatch.setattr(pipeline, "BATCH_SAMPLES_MAX", 2)
    package = write_package(tmp_path / "front")
    config = write_device(tmp_path / "device", package, write_images(tmp_path / "images", {"a": 3, "b": 2}))
    equipment = equip(config, "adapt", threading.Event(), lambda text: None)
    try:
        assert isinstance(equipment.worker, Worker)
        left = []
        for message in equipment.worker.collect(Upload("run.features", "train", 1.0, 1 << 16)):
            left.append((message.batch, bool(list(equipment.state.features.iterdir()))))
    finally:
        equipment.state.close()
    assert left == [(0, True), (1, True), (2, False)]
