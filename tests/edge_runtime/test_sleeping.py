"""How a device spends a rest: asleep by its owner's command, awake where there is none or it fails."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest

from contract.errors import ConfigError
from edge_runtime.config import read_sleep_command
from edge_runtime.sleeping import LATE_S, Sleeper, since_boot_s


class Clock:
    """Stands still but when it is told; a look at it while `jumps` are left takes one of them."""

    def __init__(self, *jumps_s: float) -> None:
        self.now_s, self._jumps = 0.0, list(jumps_s)

    def __call__(self) -> float:
        self.now_s += self._jumps.pop(0) if self._jumps else 0.0
        return self.now_s


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def rest(command: str | None, seconds: float, clock: Clock | None = None, stop: bool = False) -> list[str]:
    said: list[str] = []

    async def spend() -> None:
        stopped = asyncio.Event()
        if stop:
            stopped.set()
        await Sleeper(read_sleep_command(command), said.append, clock or since_boot_s).rest(seconds, stopped)

    asyncio.run(asyncio.wait_for(spend(), 30.0))
    return said


def test_the_command_gets_whole_seconds_as_its_last_argument(tmp_path: Path) -> None:
    """It sleeps for the whole rest, as the clock says: nothing is waited for afterwards."""
    fake = script(tmp_path / "fake sleep", f'echo "$# $*" > "{tmp_path}/told"')
    assert rest(f'"{fake}" -m mem -s', 3600.9, Clock(0.0, 3601.0)) == []
    assert (tmp_path / "told").read_text() == "4 -m mem -s 3600\n"


def test_no_server_has_a_device_powered_down_for_longer_than_a_day(tmp_path: Path) -> None:
    fake = script(tmp_path / "fake", f'echo "$1" > "{tmp_path}/told"')
    assert rest(fake, 1e300, Clock(0.0, 86_401.0)) == []
    assert (tmp_path / "told").read_text() == "86400\n"


def test_a_command_that_comes_back_early_is_followed_by_waiting(tmp_path: Path) -> None:
    fake, began_s = script(tmp_path / "fake", "exit 0"), time.monotonic()
    assert rest(fake, 1.2) == []
    assert time.monotonic() - began_s >= 1.2


@pytest.mark.parametrize(
    ("text", "told"),
    [("exit 3", "ended with exit code 3; waiting instead"), (None, "No such file or directory; waiting")],
)
def test_a_command_that_fails_is_told_of_and_waited_through(tmp_path: Path, text: str | None, told: str) -> None:
    fake = str(tmp_path / "fake") if text is None else script(tmp_path / "fake", text)
    began_s = time.monotonic()
    (said,) = rest(fake, 1.2)
    assert f"sleep_command {fake} 1" in said and told in said
    assert time.monotonic() - began_s >= 1.2


def test_a_command_that_never_ends_is_ended_and_told_of(tmp_path: Path) -> None:
    fake = script(tmp_path / "fake", "exec sleep 3600")
    (said,) = rest(fake, 5.0, Clock(0.0, 5.0 + LATE_S + 1.0))
    assert "has not ended in time; waiting instead" in said


def test_a_stop_ends_the_command_and_the_rest(tmp_path: Path) -> None:
    assert rest(script(tmp_path / "fake", "exec sleep 3600"), 3600.0, stop=True) == []
    assert rest(None, 3600.0, stop=True) == []


def test_less_than_a_second_is_not_slept(tmp_path: Path) -> None:
    assert rest(script(tmp_path / "fake", f"touch {tmp_path}/told"), 0.2) == []
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize("text", ["", "   ", 'rtcwake "-m'])
def test_words_that_are_no_command_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sleep_command") as raised:
        read_sleep_command(text)
    assert "rtcwake -m mem -s" in raised.value.cure
