from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contract.errors import EngineError
from edge_runtime.engines import engine_names, open_engine
from tests.edge_runtime.fake_package import fake_model
from tests.edge_runtime.onnx_bytes import quantized_model

ROOT = Path(__file__).parents[2]
IMAGES = np.random.default_rng(0).uniform(-1, 1, (5, 3, 16, 16)).astype(np.float32)


def test_the_folder_is_the_registry() -> None:
    assert engine_names() == ["fake", "onnxruntime"]


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(EngineError, match=r"onnxruntim'.*'onnxruntime'"):
        open_engine("onnxruntim", b"", 1)


@pytest.mark.parametrize("name", engine_names())
@pytest.mark.parametrize("threads", [1, 3])
def test_every_engine_gives_each_image_the_same_tokens_in_any_batch(name: str, threads: int) -> None:
    model, _ = quantized_model() if name == "onnxruntime" else fake_model()
    engine = open_engine(name, model, threads)
    tokens = engine.run(IMAGES)
    assert tokens.dtype == np.float32 and len(tokens) == 5 and engine.threads == threads
    for row in range(5):
        assert (engine.run(IMAGES[row : row + 1])[0] == tokens[row]).all()


@pytest.mark.parametrize("name", engine_names())
@pytest.mark.parametrize("data", [b"", b"noise", bytes(500)])
def test_every_engine_refuses_what_is_no_model(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(data)
    for model in (data, tmp_path / "model"):
        with pytest.raises(EngineError):
            open_engine(name, model, 1)


def test_a_file_and_its_bytes_give_the_same_engine(tmp_path: Path) -> None:
    model, _ = quantized_model()
    (tmp_path / "front.onnx").write_bytes(model)
    from_file = open_engine("onnxruntime", tmp_path / "front.onnx", 1).run(IMAGES)
    assert (from_file == open_engine("onnxruntime", model, 1).run(IMAGES)).all()


def test_int8_layers_are_counted_from_what_really_ran() -> None:
    assert open_engine("onnxruntime", quantized_model()[0], 1).int8_layers == 1


def test_onnxruntime_computes_what_the_codes_say() -> None:
    model, record = quantized_model()
    codes = np.frombuffer(model, np.int8, 192 * 8, record.codes_offset).reshape(192, 8).astype(np.float64)
    scales = np.frombuffer(model, "<f4", 8, record.scales_offset)
    rows = np.clip(np.rint(IMAGES.reshape(5, 4, 192).astype(np.float64) * 127), -128, 127) / 127
    tokens = open_engine("onnxruntime", model, 1).run(IMAGES)
    assert tokens == pytest.approx(rows @ (codes * scales), abs=1e-3)


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
