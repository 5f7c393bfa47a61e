"""The bench on a made-up GPU and TensorRT: what it tells, and that its memory checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.edge_runtime.onnx_bytes import quantized_model
from tests.edge_runtime.test_tensorrt_engine import FAKES, cuda  # noqa: F401
from tools import bench_tensorrt_memory as memory

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_builds_compares_and_times_both_plans(tmp_path: Path) -> None:
    (tmp_path / "front.onnx").write_bytes(quantized_model()[0])
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_tensorrt", "--batches", "1,8", "--seconds", "0", "--memory-mib", "1",
         tmp_path / "front.onnx"],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{FAKES}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    killed = document["killed_build"]
    assert killed["killed_with"] == -9 and killed["plan_served"] in ("float16", "float32")
    assert "front.plan" not in killed["left_by_the_killed"]
    assert {"front.json", "front.plan"} <= set(killed["left_at_the_end"])
    (found,) = document["frontends"]
    cpu, half, single = found["sides"]
    assert [each["batch"] for each in half["times"]] == [1, 8] and len(cpu["times"]) == 1
    assert single["snr_db"] is None and half["snr_db"] > 40 and half["layers"] == {"int8": 1}
    assert document["memory"]["card_has_fewer_free_bytes"] == 0


def test_the_memory_checks_see_a_stream_that_keeps_no_order(
    cuda: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "ROUNDS", 2)
    owner = memory.Owner(cuda)
    try:
        assert owner.do(lambda: memory.keep_order(cuda, 64))["ordered_rounds"] == 2
        synchronize = cuda.Stream.synchronize

        def backwards(stream: object) -> None:
            stream.queue.reverse()  # type: ignore[attr-defined]
            synchronize(stream)

        monkeypatch.setattr(cuda.Stream, "synchronize", backwards)
        with pytest.raises(AssertionError, match="round 0 gave"):
            owner.do(lambda: memory.keep_order(cuda, 64))
        monkeypatch.setattr(cuda.Stream, "synchronize", synchronize)
        monkeypatch.setattr(cuda, "memcpy_htod_async", lambda device, host, stream: np.copyto(host, 0))
        with pytest.raises(AssertionError, match="came back changed"):
            owner.do(lambda: memory.copy(cuda, 64))
    finally:
        owner.close()
    cuda.forget()  # what the broken stream left


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "swin", "resnet", "vgg"])
def test_the_stand_in_computes_what_onnxruntime_does_in_both_types(family: str, cuda: ModuleType) -> None:  # noqa: F811
    torch, onnx = pytest.importorskip("torch"), pytest.importorskip("onnx")
    from edge_runtime.engines import open_engine
    from edge_runtime.install import signal_to_noise_db
    from tests.exporter.test_tensorrt import exported
    from tools.standin import tensorrt as standin

    plain, int8, _ = exported(family)
    images = np.random.default_rng(0).standard_normal((3, 3, 64, 64)).astype(np.float32)
    for data, least_db in ((plain, (100.0, 50.0)), (int8, (35.0, 30.0))):
        expected = open_engine("onnxruntime", data, 1).run(images)
        for types, least in zip((torch.float32, torch.float16), least_db, strict=True):
            model = onnx.load_from_string(data)
            values = {
                each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in model.graph.initializer
            }
            values["images"] = torch.from_numpy(images)
            with torch.no_grad():
                for node in model.graph.node:
                    standin.run_node(torch, node, values, types)
            found_db = signal_to_noise_db(expected, values["tokens"].float().numpy())
            print(family, types, f"{found_db:.1f} dB")
            assert found_db > least
