"""The comparison of a GPU's counter and power, on a made-up board whose power and energy are known."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tools.bench_nvml import PowerReader, Turn, power_of, turn  # noqa: E402  (after the skip)

ROOT = Path(__file__).parents[2]
IDLE_W, BUSY_W = 100.0, 500.0


class Board:
    """NVML of one board; power steps up while `is_busy`, and the counter adds it up without an error."""

    NVMLError = RuntimeError
    NVML_FI_DEV_POWER_INSTANT = 186

    def __init__(self, knows_instant: bool) -> None:
        self._knows, self._lock = knows_instant, threading.Lock()
        self.is_busy, self._joules, self._at_s = False, 0.0, time.monotonic()

    @property
    def power_w(self) -> float:
        return BUSY_W if self.is_busy else IDLE_W

    def switch(self, busy: bool) -> None:
        with self._lock:
            self._count()
            self.is_busy = busy

    def _count(self) -> None:
        now_s = time.monotonic()
        self._joules += self.power_w * (now_s - self._at_s)
        self._at_s = now_s

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:  # noqa: N802 - NVML's name
        with self._lock:
            self._count()
            return int(1e3 * self._joules)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        return int(1e3 * self.power_w)

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(nvmlReturn=0 if self._knows else 3, value=SimpleNamespace(uiVal=int(1e3 * self.power_w)))
        ]


class Work:
    """A load of a board that does nothing but draw power."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def run(self, seconds: float) -> tuple[float, float]:
        began_s = time.monotonic()
        self._board.switch(True)
        threading.Event().wait(seconds)  # the load itself: nobody is waited for
        self._board.switch(False)
        return began_s, time.monotonic()


@pytest.mark.parametrize("knows_instant", [True, False])
def test_both_ways_find_the_energy_of_a_load(knows_instant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench_nvml.QUIET_S", 0.3)
    board = Board(knows_instant)
    read_w, timing = power_of(board, 0)
    assert timing.window_s == (0.1 if knows_instant else 1.0) and read_w() == IDLE_W
    found = turn(board, 0, PowerReader(read_w), timing, Work(board), 1.0)
    assert found.counter_j is not None and found.counter_bound_j is not None
    assert found.counter_j == pytest.approx(BUSY_W * found.seconds, abs=found.counter_bound_j)
    assert found.power_j is not None and found.power_bound_j is not None
    assert found.power_j == pytest.approx(BUSY_W * found.seconds, abs=found.power_bound_j)


def test_a_difference_is_a_share_of_the_counter() -> None:
    assert Turn(1.0, 200.0, 1.0, 190.0, 1.0).difference == pytest.approx(-0.05)
    assert Turn(1.0, None, None, 190.0, 1.0).difference is None
    assert Turn(1.0, 0.0, None, 190.0, 1.0).difference is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.bench_nvml"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 5 and "torch finds no GPU 0" in done.stderr and "Traceback" not in done.stderr
