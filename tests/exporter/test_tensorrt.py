"""TensorRT parses the exported files and builds plans of them in both types; without a GPU they are not run.

The builder is the devices' own process. tensorrt_rtx takes its time; the command around it is tested with the made-up
builder of tests/edge_runtime.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import ExportError
from exporter.models import family_of
from exporter.models._inference import inference_mode
from exporter.onnx_graph import export_float
from exporter.quantize import Quantizer
from exporter.quantize_frontend import prepare, quantized
from exporter.split import split_tokens
from exporter.tensorrt_check import TYPES, check_plans
from tests.edge_runtime.onnx_bytes import quantized_model
from tests.exporter.test_quantize_frontend import SIZE, small_images, whole_model

FAKES = Path(__file__).parents[1] / "edge_runtime" / "fake_gpu"
needs_tensorrt_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs tensorrt_rtx (pip install tensorrt-rtx-cu13), which builds plans without a GPU",
)


def exported(family: str) -> tuple[bytes, bytes, int]:
    """A small frontend of the family in float32 and as INT8, and how many of its layers are quantized."""
    model, k = whole_model(family)
    frontend, _, _ = split_tokens(model, k)
    with inference_mode(frontend):
        prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), Quantizer(), small_images(4).split(2))
    plain = export_float(frontend, SIZE, 20)
    int8 = quantized(export_float(frontend, SIZE, 20), prepared, prepared.min_max())
    pairs = sum(node.op_type == "QuantizeLinear" for node in int8.graph.node)
    return plain.SerializeToString(), int8.SerializeToString(), pairs


@needs_tensorrt_rtx
@pytest.mark.parametrize("family", ["vit", "swin", "resnet", "vgg"])
def test_both_plans_of_every_family_are_built_in_float_and_int8(family: str, tmp_path: Path) -> None:
    plain, int8, pairs = exported(family)
    found = {}
    for name, data in (("float", plain), ("int8", int8)):
        (tmp_path / "front.onnx").write_bytes(data)
        half, single = check_plans(tmp_path / "front.onnx", 64, tmp_path)
        assert (half["types"], single["types"]) == TYPES and half["library"] == "tensorrt_rtx"
        for plan in (half, single):
            print(json.dumps({"family": family, "file": name, "onnx_bytes": len(data)} | plan))
            assert (tmp_path / f"{plan['types']}.plan").stat().st_size == plan["plan_bytes"] > 0.4 * len(data)
            assert plan["layers"].get("int8", 0) == (pairs if name == "int8" else 0)
        assert half["layers"]["half"] > 0 and "half" not in single["layers"]
        found[name] = half, single
    exact = {"vit": True, "swin": True}.get(family, False)  # LayerNorm and softmax stay float32
    assert (found["float"][0]["layers"].get("float", 0) > 1) is exact


@pytest.mark.slow
@needs_tensorrt_rtx
def test_a_choice_of_patches_gets_a_profile_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "front.onnx").write_bytes(quantized_model(masked=True)[0])
    assert all(plan["plan_bytes"] > 0 for plan in check_plans(tmp_path / "front.onnx", 4, tmp_path))


@pytest.mark.slow
@needs_tensorrt_rtx
def test_a_real_build_that_is_killed_half_way_leaves_no_plan(tmp_path: Path) -> None:
    (tmp_path / "front.onnx").write_bytes(exported("swin")[1])
    request = {
        "onnx": str(tmp_path / "front.onnx"), "plan": str(tmp_path / "float16.plan"), "types": "float16",
        "batch_usual": 4, "batch_most": 8, "patches": 64, "workspace_share": 0.25, "level": 3, "few_tactics": False,
        "timing_cache": None, "capability": "SM86",
    }  # fmt: skip
    words = [sys.executable, "-m", "edge_runtime.plans.child", json.dumps(request)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert child.stdout is not None
    while b"fraction" not in child.stdout.readline():
        pass
    child.kill()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["front.onnx"]
    assert check_plans(tmp_path / "front.onnx", 64, tmp_path)[0]["plan_bytes"]


def test_the_check_tells_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKES.parents[2]}:{FAKES}")
    (tmp_path / "front.onnx").write_bytes(quantized_model()[0])
    found = check_plans(tmp_path / "front.onnx", 4, tmp_path)
    assert [plan["types"] for plan in found] == list(TYPES) and {plan["version"] for plan in found} == {"10.3.0"}
    assert sorted(path.name for path in tmp_path.glob("*.plan")) == ["float16.plan", "float32.plan"]


def test_a_file_that_tensorrt_does_not_take_is_refused_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKES.parents[2]}:{FAKES}")
    monkeypatch.setenv("FAKE_TRT", "refuse=1")
    (tmp_path / "front.onnx").write_bytes(quantized_model()[0])
    with pytest.raises(ExportError, match="no float16 plan could be built here: .*UNSUPPORTED_NODE"):
        check_plans(tmp_path / "front.onnx", 4, tmp_path)


def test_without_tensorrt_the_check_says_what_to_install() -> None:
    code = "import sys; sys.modules['tensorrt'] = sys.modules['tensorrt_rtx'] = None; sys.argv[1:] = [sys.argv[1]]\n"
    code += "from edge_runtime.plans.child import main; sys.exit(main())"
    request = {
        "onnx": "", "plan": "", "types": "float16", "batch_usual": 1, "batch_most": 1, "patches": 1,
        "workspace_share": 0.1, "level": 0, "few_tactics": False, "timing_cache": None, "capability": "SM86",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=FAKES.parents[2],
    )
    assert done.returncode == 5 and done.stderr.startswith("TensorRT cannot be imported") and done.stderr[-1] == "\n"
