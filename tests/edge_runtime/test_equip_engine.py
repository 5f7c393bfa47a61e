"""`--engine front.plan` on a device with a made-up GPU and TensorRT: built, known again, replaced with the reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save

from contract.errors import ConfigError, EngineError
from contract.images import normalise
from contract.signature import key_id, save_public
from contract.tokens import TokenLayout
from edge_runtime import package_choice
from edge_runtime.cli import edge_run, parser
from edge_runtime.engines import open_engine
from edge_runtime.engines.tensorrt import TensorRtEngine
from edge_runtime.package_choice import choose_package
from edge_runtime.profiling.frontends import Images, frontends, verify
from tests.edge_runtime import fake_package
from tests.edge_runtime.fake_package import IMAGE, PUBLISHER, SIZE
from tests.edge_runtime.onnx_bytes import quantized_model
from tests.edge_runtime.test_tensorrt_engine import FAKES, cuda  # noqa: F401


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package `front/` that onnxruntime runs, and its publisher's key; no CUTLAYER_ variables."""
    model, record = quantized_model()
    pixels = np.random.default_rng(1).integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8)
    tokens = open_engine("onnxruntime", model, 1).run(normalise(pixels, IMAGE))
    contents = {"front.onnx": model, "golden.safetensors": save({"pixels": pixels, "tokens": tokens})}
    (cut,) = fake_package.write_package(tmp_path / "other").manifest.cuts
    cut = dataclasses.replace(cut, tokens=TokenLayout(0, (2, 2), 8), weights=(record,))
    fake_package.write_package(tmp_path / "front", contents=contents, cuts=(cut,))
    save_public(tmp_path / "publisher.pub", PUBLISHER.public_key())
    monkeypatch.setenv("PYTHONPATH", str(FAKES))  # for the process that builds
    return tmp_path


def prewarm(
    device: Path, capsys: pytest.CaptureFixture[str], *more: str, engine: str = "front.plan"
) -> tuple[dict, str]:
    """What `edge-run --prewarm` prints, and what it says."""
    places = {"--engine": device / engine, "--trust": device / "publisher.pub", "--state": device / "state"}
    words = [str(word) for pair in places.items() for word in pair]
    arguments = parser().parse_args(["--prewarm", "--format", "json", *words, *more])
    assert edge_run(arguments, {}, device) == 0
    told = capsys.readouterr()
    return json.loads(told.out), told.err


def test_a_prewarmed_device_has_a_plan_of_its_own_weights(
    device: Path,
    cuda: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (device / "front" / "front.plan").write_bytes(b"of somebody else, and never opened")
    ready, said = prewarm(device, capsys, "--require", "tensorrt", engine="front/front.plan")
    assert ready["engine"] == "tensorrt 10.3.0" and ready["engine_fallback"] is None
    assert ready["int8_layers"] == ready["linear_layers"] == 1 and ready["alpha"] == 0.1
    assert (
        len(ready["plans"]) == 2 and "dB from onnxruntime" in ready["plans"][0] and "ms an image" in ready["plans"][0]
    )
    assert said.count("building the") == 2
    noised = next((device / "state" / "engines").glob("*.onnx"))
    assert (device / "state" / "plans" / "front.plan").read_bytes().endswith(noised.read_bytes())
    again, said = prewarm(device, capsys, engine="front")  # the folder alone means TensorRT where it is
    assert again == ready and "building" not in said


def test_a_device_without_a_gpu_runs_onnxruntime_and_says_why(
    device: Path,
    cuda: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_GPU", "absent")
    ready, said = prewarm(device, capsys)
    assert ready["engine"].startswith("onnxruntime") and "no CUDA-capable device" in ready["engine_fallback"]
    assert "onnxruntime runs instead: CUDA does not start" in said
    with pytest.raises(EngineError, match="CUDA does not start"):
        prewarm(device, capsys, "--require", "tensorrt")


def test_en_03_a_build_without_memory_ends_in_onnxruntime(
    device: Path,
    cuda: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge_runtime.plans.choose.open_planned.__defaults__", (out_of_memory,))
    ready, said = prewarm(device, capsys)
    assert ready["engine"].startswith("onnxruntime") and "too little memory" in ready["engine_fallback"]
    assert not list((device / "state" / "plans").iterdir())


def out_of_memory(*given: object) -> None:
    raise EngineError("building the plan was killed: too little memory", "use less")


@pytest.mark.parametrize("missing", ["tensorrt", "pycuda"])
def test_what_is_not_installed_is_named_before_anything_is_done(
    device: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(package_choice, "find_spec", lambda name: None if name.startswith(missing) else object())
    choice = choose_package(str(device / "front.plan"))
    assert choice.engine == "onnxruntime" and missing in str(choice.fallback_reason).casefold()
    assert choose_package(str(device / "front")) == package_choice.PackageChoice(device / "front", "onnxruntime", None)
    with pytest.raises(EngineError, match=f"(?i)tensorrt is required.*{missing}"):
        prewarm(device, capsys, "--require", "tensorrt")
    with pytest.raises(ConfigError, match="tensort.*did you mean 'tensorrt'"):
        prewarm(device, capsys, "--require", "tensort")
    monkeypatch.setattr(package_choice, "find_spec", lambda name: object())
    assert choose_package(str(device / "front")).engine == "tensorrt"


@pytest.mark.slow
def test_edge_profile_measures_tensorrt_by_a_plan_of_its_own(
    device: Path,
    cuda: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[TensorRtEngine] = []
    real = TensorRtEngine.__init__
    monkeypatch.setattr(TensorRtEngine, "__init__", lambda self, *given: opened.append(self) or real(self, *given))
    said: list[str] = []
    (device / "work").mkdir()
    trusted = {key_id(PUBLISHER.public_key()): PUBLISHER.public_key()}
    packages = verify([str(device / "front.plan")], trusted, device / "work", 1, said.append)
    (candidate,) = frontends(packages, Images(None), 1, 0)
    assert candidate.point.engine == "tensorrt 10.3.0"
    (phase,) = candidate.open()
    assert phase.run() == 8 and len([text for text in said if "plan: built in" in text]) == 2
    for engine in opened:
        engine.close()
