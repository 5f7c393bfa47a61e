from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime.package_choice import choose_package


@pytest.fixture
def front(tmp_path: Path) -> Path:
    (tmp_path / "front").mkdir()
    (tmp_path / "front" / "manifest.json").write_bytes(b"{}")
    return tmp_path / "front"


@pytest.mark.parametrize("spec", ["front", "front/", "front/front.onnx"])
def test_a_folder_or_its_onnx_file_runs_on_onnxruntime(front: Path, spec: str) -> None:
    choice = choose_package(str(front.parent / spec))
    assert (choice.folder, choice.engine, choice.fallback_reason) == (front, "onnxruntime", None)


@pytest.mark.parametrize("spec", ["front/front.plan", "front.plan"])
def test_a_plan_names_its_package_and_falls_back_with_a_reason(front: Path, spec: str) -> None:
    choice = choose_package(str(front.parent / spec))
    assert (choice.folder, choice.engine) == (front, "onnxruntime")
    assert choice.fallback_reason is not None
    assert "TensorRT" in choice.fallback_reason and "onnxruntime runs instead" in choice.fallback_reason
    assert "\n" not in choice.fallback_reason


def test_a_suffix_may_name_an_engine(front: Path) -> None:
    assert choose_package(str(front / "front.fake")).engine == "fake"
    assert choose_package(str(front / "front.openvino")).engine == "openvino"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("other.plan", "other/, which does not exist"),
        ("nowhere/front.plan", "does not exist"),
        ("nowhere", "no package folder"),
        ("empty", "is not a package"),
        ("front/front.openvin", "no engine is called 'openvin'"),
    ],
)
def test_what_names_no_package_is_an_error_that_says_so(front: Path, spec: str, said: str) -> None:
    (front.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        choose_package(str(front.parent / spec))
