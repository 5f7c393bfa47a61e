"""One device of a federated run sends NaN: it is left out with the reason, and the result is that of the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment, fix_secrets
from tests.over_loopback.test_split_training import alone, train, weights

ROOT = Path(__file__).parents[2]


def write_spoiling_device(folder: Path) -> Path:
    """An edge-run whose updates are NaN, and nothing else about it is wrong."""
    folder.mkdir()
    script = folder / "edge-run"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tools.compare_nan_device "$@"\n')
    script.chmod(0o755)
    return folder


class OneSpoils(Deployment):
    """The second device is another program."""

    spoiling: Path

    def start_device(self, device: str, *extra: object, data: str = "train"):  # type: ignore[no-untyped-def]
        if device == DEVICES[1]:
            return Deployment.start_device(replace(self, device_bin=self.spoiling), device, *extra, data=data)
        return super().start_device(device, *extra, data=data)


@pytest.mark.slow
def test_a_device_that_sends_nan_is_left_out_with_the_reason(package: Path, tmp_path: Path) -> None:
    honest = alone(package, tmp_path / "alone", "whole")
    fix_secrets(honest.root)
    train(honest, "fed_avg", "--epochs", 2)
    (tmp_path / "both").mkdir()
    both = OneSpoils(package, tmp_path / "both", front="whole")
    OneSpoils.spoiling = write_spoiling_device(tmp_path / "spoiling")
    fix_secrets(both.root)
    train(both, "fed_avg", "--epochs", 2)
    lines = [line for line in both.metrics() if "quarantined" in line]
    assert len(lines) == 2
    assert all(str(line["quarantined"]).startswith(f"{DEVICES[1]}: not finite: ") for line in lines)
    assert all(np.isfinite(line["loss"]) for line in lines)
    expected, found = weights(honest), weights(both)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
