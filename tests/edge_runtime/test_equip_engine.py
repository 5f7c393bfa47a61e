"""`--engine front.plan` on a device with a made-up GPU and TensorRT: built, known again, replaced with the reason."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save

from contract import manifest as manifests
from contract.errors import ConfigError, EngineError
from contract.images import normalise
from contract.signature import key_id, save_public
from contract.tokens import TokenLayout
from edge_runtime import package_choice
from edge_runtime.cli import edge_run, parser
from edge_runtime.client import Traffic
from edge_runtime.engines import open_engine
from edge_runtime.engines.tensorrt import TensorRtEngine
from edge_runtime.equip import equip
from edge_runtime.install import signal_to_noise_db
from edge_runtime.package_choice import choose_package
from edge_runtime.pipeline import Frontend
from edge_runtime.plans.child import Outcome, Request
from edge_runtime.profiling.frontends import Images, frontends, verify
from edge_runtime.report import to_table
from edge_runtime.run_report import Talk, make_report
from edge_runtime.throttle import SlowdownWatch
from tests.edge_runtime import fake_package
from tests.edge_runtime.fake_package import IMAGE, PUBLISHER, SIZE
from tests.edge_runtime.onnx_bytes import quantized_model
from tests.edge_runtime.test_tensorrt_engine import FAKES, cuda, plan_of  # noqa: F401


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


def test_a_run_takes_its_tokens_from_the_plan_and_tells_of_it(
    device: Path,
    cuda: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(request: Request, check: object, say: object) -> Outcome:
        Path(request.plan).write_bytes(plan_of(Path(request.onnx).read_bytes(), types=request.types))
        return Outcome("tensorrt", "10.3.0", 1.0, 1, {}, 1, 1, None)

    monkeypatch.setattr("edge_runtime.plans.choose.open_planned.__defaults__", (build,))
    package = fake_package.Package(device / "front", *read_manifest(device / "front"))
    images = fake_package.write_images(device / "images", {"a": 5, "b": 5})
    config = fake_package.write_device(
        device / "own", package, images, engine=str(device / "front.plan"), require="tensorrt"
    )
    equipment = equip(config, "adapt", threading.Event(), lambda text: None)
    try:
        report = make_report(equipment, "done", None, Talk(Traffic()), SlowdownWatch())
        assert report.engine == "tensorrt 10.3.0" and report.engine_fallback is None and len(report.plans) == 2
        assert report.int8_layers == report.linear_layers == 1 and report.codes_changed is not None
        assert "8 images at once" in to_table(report) and "float16 plan: built in" in to_table(report)
        frontend = equipment.worker._bench.frontend  # type: ignore[union-attr]
        tokens = frontend.tokens_in_steps(equipment.dataset.samples, lambda count: None)
        noised = next((device / "own" / "state" / "engines").glob("*.onnx"))
        expected = Frontend(open_engine("onnxruntime", noised, 1), IMAGE, frontend.layout)
        found_db = signal_to_noise_db(
            expected.tokens(equipment.dataset.samples).astype(np.float32), tokens.astype(np.float32)
        )
        assert len(tokens) == 10 and found_db > 40
    finally:
        equipment.state.close()
        frontend.engine.close()


def read_manifest(folder: Path) -> tuple[manifests.Manifest, bytes]:
    data = (folder / manifests.MANIFEST_NAME).read_bytes()
    return manifests.from_bytes(data), manifests.digest(data)


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
