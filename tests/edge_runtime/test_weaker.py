"""Parts that come by themselves never show more of an image; frontends are tried in test_fleet_update."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from contract.canonical import to_json
from contract.errors import WeakerError
from edge_runtime.install import install
from edge_runtime.weaker import refuse_weaker_parts
from tests.edge_runtime.fake_package import Package, write_package
from tests.edge_runtime.test_update import TRUSTED, open_fake


def parts_of(strategy: str, index: int = 2, kept: int | None = 4) -> dict[str, bytes]:
    """training.json of one part."""
    plan = json.loads((Path(__file__).parents[1] / "golden" / "training_1.json").read_bytes())
    cut = {**plan["cuts"][0], "index": index, "kept": kept, "patches": None if kept is None else 16}
    cut |= {"evaluated_shape": [17, 8], "output_shape": [17 if kept is None else 1 + kept, 8]}
    return {"training.json": to_json({**plan, "strategy": strategy, "whole_model": False, "cuts": [cut]})}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (parts_of("sequential_split", kept=8), "50% of the patches in place of 25%"),
        (parts_of("sequential_split", kept=None), "100% of the patches in place of 25%"),
        (parts_of("sequential_split", index=1), "a cut after 25% of the layers in place of 50%"),
        (parts_of("parallel_split"), "parts for parallel_split in place of sequential_split"),
        (parts_of("sequential_split", index=3, kept=4), ""),
    ],
)
def test_parts_that_come_by_themselves_never_show_more(tmp_path: Path, contents: dict[str, bytes], said: str) -> None:
    def parts(version: int, contents: dict[str, bytes]) -> Package:
        files = [f"cut_2.{name}.onnx" for name in ("forward", "backward", "evaluate")]
        more = dict.fromkeys([*files, "parameters.safetensors"], b"-")
        return write_package(tmp_path / f"v{version}", version=version, cuts=(), contents={**contents, **more})

    packages = tmp_path / "packages"
    packages.mkdir()
    install(parts(1, parts_of("sequential_split")).folder, packages, TRUSTED, open_fake, print)
    new = parts(2, contents).folder
    with pytest.raises(WeakerError, match=said) if said else nullcontext():
        refuse_weaker_parts(new, packages)
