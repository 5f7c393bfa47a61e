from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contract.errors import EngineError
from contract.manifest import WeightRecord
from contract.onnx_weights import noised_onnx
from edge_runtime.cpus import has_vnni
from edge_runtime.engines import engine_names, open_engine
from edge_runtime.engines._streams import patches_of
from edge_runtime.install import signal_to_noise_db
from edge_runtime.int8_check import Kernels
from tests.edge_runtime.fake_package import fake_model
from tests.edge_runtime.onnx_bytes import quantized_model

ROOT = Path(__file__).parents[2]
HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
needs_openvino = pytest.mark.skipif(not HAS_OPENVINO, reason="openvino is not installed: pip install openvino")
INSTALLED = [
    pytest.param(each, marks=needs_openvino) if each == "openvino" else each
    for each in engine_names()
    if each != "tensorrt"  # it runs plans, on a GPU: test_tensorrt_engine.py
]
RUNTIMES = [each for each in INSTALLED if each != "fake"]
# Two neighbouring products near the ends of their range saturate in OpenVINO's kernels where there is no VNNI.
EXPECTED_DB = {"onnxruntime": 80.0, "openvino": 80.0 if has_vnni() else 15.0}
IMAGES = np.random.default_rng(0).uniform(-1, 1, (5, 3, 16, 16)).astype(np.float32)


def test_the_folder_is_the_registry() -> None:
    assert engine_names() == ["fake", "onnxruntime", "openvino", "tensorrt"]


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(EngineError, match=r"onnxruntim'.*'onnxruntime'"):
        open_engine("onnxruntim", b"", 1)


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_engine_gives_each_image_the_same_tokens_in_any_batch(name: str, threads: int) -> None:
    model, _ = fake_model() if name == "fake" else quantized_model()
    engine = open_engine(name, model, threads)
    tokens = engine.run(IMAGES)
    assert tokens.dtype == np.float32 and len(tokens) == 5 and engine.threads == threads
    for row in range(5):
        assert (engine.run(IMAGES[row : row + 1])[0] == tokens[row]).all()


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("data", [b"", b"noise", bytes(500)])
def test_every_engine_refuses_what_is_no_model(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(data)
    for model in (data, tmp_path / "model"):
        with pytest.raises(EngineError):
            open_engine(name, model, 1)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_file_and_its_bytes_give_the_same_engine(name: str, tmp_path: Path) -> None:
    model, _ = quantized_model()
    (tmp_path / "front.onnx").write_bytes(model)
    from_file = open_engine(name, tmp_path / "front.onnx", 1).run(IMAGES)
    assert (from_file == open_engine(name, model, 1).run(IMAGES)).all()


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("masked", [False, True])
def test_int8_layers_are_counted_from_what_really_ran(name: str, masked: bool) -> None:
    assert open_engine(name, quantized_model(masked=masked)[0], 1).kernels == Kernels(1, (), ())


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("threads", [1, 2])
def test_only_the_kept_patches_run_in_the_order_given(name: str, threads: int) -> None:
    whole = open_engine(name, quantized_model()[0], threads).run(IMAGES)
    engine = open_engine(name, quantized_model(masked=True)[0], threads)
    assert (engine.run(IMAGES) == whole).all()
    for kept in (1, 3, 4, 2):
        keep = np.stack([np.random.default_rng(seed).permutation(4)[:kept] for seed in range(5)])
        tokens = engine.run(IMAGES, keep)
        assert tokens == pytest.approx(np.take_along_axis(whole, keep[:, :, None], 1), abs=1e-5)


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("keep", [[[0, 4]], [[-1, 0]], [[0], [1]], [[]], [0, 1]])
def test_patches_that_an_image_does_not_have_are_refused(name: str, keep: list[object]) -> None:
    model, _ = fake_model() if name == "fake" else quantized_model(masked=True)
    with pytest.raises(EngineError, match="keep should be 1 rows of patch numbers from 0 to 3"):
        open_engine(name, model, 1).run(IMAGES[:1], np.array(keep, np.int64))


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_frontend_that_runs_every_patch_refuses_a_choice(name: str) -> None:
    with pytest.raises(EngineError, match="every patch") as caught:
        open_engine(name, quantized_model()[0], 1).run(IMAGES[:1], np.zeros((1, 1), np.int64))
    assert "--masked" in caught.value.cure


@pytest.mark.parametrize("count", ["", "0", "-3", "many", "12345678"])
def test_a_file_that_lies_about_its_patches_is_refused(count: str) -> None:
    with pytest.raises(EngineError, match="the frontend says that an image has"):
        patches_of(count)


@pytest.mark.parametrize("name", RUNTIMES)
def test_noise_in_the_codes_reaches_the_tokens(name: str) -> None:
    model, record = quantized_model()
    noised, changed, _ = noised_onnx(model, [record], 0.3, lambda layer: bytes(32))
    assert changed > 0.5
    plain, noisy = (open_engine(name, bytes(each), 1).run(IMAGES) for each in (model, noised))
    codes = np.frombuffer(bytes(noised), np.int8, 192 * 8, record.codes_offset).reshape(192, 8)
    assert not np.allclose(plain, noisy, atol=1e-2)
    assert signal_to_noise_db(what_codes_say(codes, model, record), noisy) > EXPECTED_DB[name]


def test_the_device_command_never_imports_an_engine_that_was_not_chosen() -> None:
    code = (
        "import sys\nfrom edge_runtime.engines import open_engine\n"
        "from tests.edge_runtime.fake_package import fake_model\n"
        "open_engine('fake', fake_model()[0], 1)\nimport edge_runtime.equip\n"
        "assert not {'openvino', 'onnxruntime'} & set(sys.modules), 'imported unasked'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_openvino_that_is_not_installed_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match="openvino cannot be imported") as caught:
        open_engine("openvino", quantized_model()[0], 1)
    assert "pip install 'cutlayer[openvino]'" in caught.value.cure and "\n" not in str(caught.value)


@needs_openvino
def test_opening_openvino_tells_nobody(tmp_path: Path) -> None:
    code = (
        "import threading, numpy as np\nfrom edge_runtime.engines import open_engine\n"
        "from tests.edge_runtime.onnx_bytes import quantized_model\n"
        "open_engine('openvino', quantized_model()[0], 1).run(np.ones((2, 3, 16, 16), np.float32))\n"
        "assert threading.active_count() == 1, threading.enumerate()"  # its telemetry sends from a thread
    )
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def what_codes_say(codes: np.ndarray, model: bytes, record: WeightRecord) -> np.ndarray:
    """Tokens in exact arithmetic: the pictures rounded to 1/127, times codes and scales."""
    scales = np.frombuffer(model, "<f4", 8, record.scales_offset)
    rows = np.clip(np.rint(IMAGES.reshape(5, 4, 192).astype(np.float64) * 127), -128, 127) / 127
    return (rows @ (codes.astype(np.float64) * scales)).astype(np.float32)


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_computes_what_the_codes_say(name: str) -> None:
    model, record = quantized_model()
    codes = np.frombuffer(model, np.int8, 192 * 8, record.codes_offset).reshape(192, 8)
    tokens = open_engine(name, model, 1).run(IMAGES)
    assert signal_to_noise_db(what_codes_say(codes, model, record), tokens) > EXPECTED_DB[name]


TIGHT = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.engines import open_engine
from tests.edge_runtime.onnx_bytes import quantized_model
import numpy as np
threads = usable_cpus(allowed_affinity())
tokens = open_engine("onnxruntime", quantized_model()[0], threads).run(np.ones((2, 3, 16, 16), np.float32))
print(threads, float(tokens.sum()))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_er_01_a_restricted_cpu_set_gives_one_thread_and_no_noise() -> None:
    done = subprocess.run([sys.executable, "-c", TIGHT], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "affinity" not in done.stderr and done.stderr == ""
    threads, total = done.stdout.split()
    engine = open_engine("onnxruntime", quantized_model()[0], 2)
    assert threads == "1" and float(total) == float(engine.run(np.ones((2, 3, 16, 16), np.float32)).sum())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_er_03_memory_reaches_a_plateau_whatever_the_batch() -> None:
    engine = open_engine("onnxruntime", quantized_model(64, (8, 8), 64)[0], 2)
    images = np.zeros((8, 3, 64, 64), np.float32)

    def cycle(times: int) -> int:
        for number in range(times):
            engine.run(images[: 1 + number % 8])
        return resident_bytes()

    assert cycle(300) - cycle(50) < 30e6
