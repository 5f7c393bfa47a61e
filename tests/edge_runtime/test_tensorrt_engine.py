"""The TensorRT engine on a CUDA layer that refuses wrong threads, sizes and lifetimes; no GPU is needed, or used."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from contract.errors import EngineError
from edge_runtime.engines import open_engine
from edge_runtime.engines.tensorrt import TensorRtEngine, open_model
from edge_runtime.int8_check import Kernels, PlanLayers, layers_of_plan
from tests.edge_runtime.onnx_bytes import quantized_model

FAKES = Path(__file__).with_name("fake_gpu")
IMAGES = np.random.default_rng(0).uniform(-1, 1, (19, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The fake CUDA driver, with which every test must have come to a clean end."""
    monkeypatch.syspath_prepend(str(FAKES))
    driver = importlib.import_module("pycuda.driver")
    driver.forget()
    yield driver
    assert driver.left() == []
    for name in ("pycuda", "pycuda.driver", "tensorrt"):
        sys.modules.pop(name, None)


def plan_of(
    onnx: bytes, most: int = 8, patches: int | None = None, types: str = "float32", version: str = "10.3.0"
) -> bytes:
    profile = {"images": [[1, 3, 16, 16], [4, 3, 16, 16], [most, 3, 16, 16]]}
    if patches is not None:
        profile["keep"] = [[1, 1], [4, 2], [most, patches]]
    header = {"version": version, "types": types, "profile": profile}
    return b"FAKE-TENSORRT\n" + json.dumps(header).encode() + b"\n" + onnx


@pytest.fixture
def engine(cuda: ModuleType) -> Iterator[TensorRtEngine]:
    opened = open_model(plan_of(quantized_model()[0]), 1)
    yield opened
    opened.close()


def reference(images: np.ndarray) -> np.ndarray:
    return open_engine("onnxruntime", quantized_model()[0], 1).run(images)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 19])
def test_any_batch_is_split_to_what_the_plan_takes(engine: TensorRtEngine, count: int) -> None:
    tokens = engine.run(IMAGES[:count])
    assert tokens.shape == (count, 4, 8) and (tokens == reference(IMAGES[:count])).all()
    assert engine.threads == 8 and engine.name == "tensorrt" and engine.version == "10.3.0"


def test_tokens_are_copies_that_a_later_run_leaves_alone(engine: TensorRtEngine) -> None:
    first = engine.run(IMAGES[:8])
    before = first.copy()
    engine.run(IMAGES[8:16])
    assert (first == before).all() and first.flags.owndata


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (2, 3, 16, 8), (2, 1, 16, 16), (3, 16, 16)])
def test_images_that_the_profile_does_not_take_are_refused(engine: TensorRtEngine, shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="images should be"):
        engine.run(np.zeros(shape, np.float32))


def test_en_02_every_thread_may_ask_and_one_thread_touches_cuda(cuda: ModuleType, engine: TensorRtEngine) -> None:
    found: dict[int, np.ndarray] = {}

    def ask(number: int) -> None:
        for _ in range(3):
            found[number] = engine.run(IMAGES[number : number + 5])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert (found[number] == reference(IMAGES[number : number + 5])).all()
    assert len({thread for _, thread in cuda.calls}) == 1
    assert threading.get_ident() not in {thread for _, thread in cuda.calls}


def test_two_engines_have_buffers_of_their_own(cuda: ModuleType, engine: TensorRtEngine) -> None:
    other = open_model(plan_of(quantized_model(seed=5)[0]), 1)
    try:
        assert len(cuda.memory) == 4
        mixed = [each.run(IMAGES[:3]) for each in (engine, other, engine)]
    finally:
        other.close()
    assert (mixed[0] == mixed[2]).all() and not np.allclose(mixed[0], mixed[1])
    assert len(cuda.memory) == 2


def test_a_closed_engine_says_so_and_closes_twice(engine: TensorRtEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(IMAGES[:1])


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_a_choice_of_patches_has_a_profile_of_its_own(cuda: ModuleType, kept: int) -> None:
    masked = quantized_model(masked=True)[0]
    engine = open_model(plan_of(masked, patches=4), 1)
    try:
        keep = np.stack([np.random.default_rng(row).permutation(4)[:kept] for row in range(11)])
        expected = open_engine("onnxruntime", masked, 1)
        assert (engine.run(IMAGES[:11], keep) == expected.run(IMAGES[:11], keep)).all()
        assert (engine.run(IMAGES[:2]) == expected.run(IMAGES[:2])).all()
        with pytest.raises(EngineError, match="from 0 to 3"):
            engine.run(IMAGES[:1], np.array([[0, 4]]))
    finally:
        engine.close()


@pytest.mark.parametrize("plan", [b"", b"noise", b"FAKE-TENSORRT\n" + b'{"version": "8.6", "types": ""}\n'])
def test_a_plan_that_does_not_deserialise_is_one_line(cuda: ModuleType, plan: bytes) -> None:
    with pytest.raises(EngineError, match=r"empty|magic tag|of version 8\.6, not 10\.3\.0") as caught:
        open_model(plan, 1)
    assert "\n" not in caught.value.cause and caught.value.cure


def test_layers_are_counted_by_the_type_they_read(engine: TensorRtEngine) -> None:
    assert engine.layers == PlanLayers({"int8": 1}, Kernels(1, (), ()))
    assert engine.kernels == Kernels(1, (), ())


@pytest.mark.parametrize("report", [None, "", "no", "[]", '{"Layers": []}', '{"Layers": ["names", "alone"]}'])
def test_a_report_without_layers_counts_nothing(report: str | None) -> None:
    assert layers_of_plan(report) is None


def test_many_layers_in_one_are_not_counted_as_int8() -> None:
    layers = [
        {"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin", "Inputs": [{"Format": "Row major linear FP16"}]},
        {"Name": "c", "LayerType": "gemm", "Inputs": [{"Datatype": "Int8"}, {"Datatype": "Float"}]},
        {"Name": "d", "LayerType": "softmax", "Inputs": [{"Format/Datatype": "Row major linear FP32"}]},
    ]
    found = layers_of_plan(json.dumps({"Layers": layers}))
    assert found == PlanLayers({"float16": 1, "float32": 1, "int8": 1}, None)


def test_without_tensorrt_pycuda_or_gpu_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "pycuda", "pycuda.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match="TensorRT cannot be imported") as caught:
        open_model(b"plan", 1)
    assert "--system-site-packages" in caught.value.cure
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(EngineError, match="pycuda cannot be imported") as caught:
        open_model(b"plan", 1)
    assert "cutlayer[tensorrt]" in caught.value.cure


def test_a_machine_without_a_gpu_says_so(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU", "absent")
    with pytest.raises(EngineError, match="CUDA does not start: .*no CUDA-capable device"):
        open_model(b"plan", 1)


ENDS = """
import sys
sys.path.insert(0, {fakes!r})
import numpy as np
from edge_runtime.engines.tensorrt import open_model
assert "pycuda" not in sys.modules, "CUDA at import"
engine = open_model(open({plan!r}, "rb").read(), 1)
engine.run(np.zeros((3, 3, 16, 16), np.float32))
import atexit
from pycuda import driver
atexit._run_exitfuncs()
print(driver.left())
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_en_02_a_program_that_ends_lets_go_of_the_context(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "plan").write_bytes(plan_of(quantized_model()[0]))
    script = ENDS.format(fakes=str(FAKES), plan=str(tmp_path / "plan"), end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=FAKES.parents[2],
        env=os.environ | {"PYTHONPATH": str(FAKES.parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "[]\n", "")
