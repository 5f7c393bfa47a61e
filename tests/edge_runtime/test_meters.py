from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_runtime.meters import probe
from edge_runtime.meters._sampled import SampledMeter
from edge_runtime.meters.rapl import SAMPLING, RaplLimits, RaplSensor, find_domains, open_rapl

RANGE_UJ = 262_143_328_850


def domain(root: Path, place: str, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> Path:
    folder = root / "sys/class/powercap" / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder / "energy_uj"


class Bench:
    """A meter on the domains of a tree, by a clock that moves when told."""

    def __init__(self, root: Path) -> None:
        self._now_s = 0.0
        sensor = RaplSensor(find_domains(root)[0], RaplLimits(), self._clock)
        self.meter = SampledMeter(sensor, SAMPLING, self._clock, start=lambda meter: None)

    def _clock(self) -> float:
        return self._now_s

    def read(self, now_s: float) -> tuple[float | None, str | None]:
        self._now_s = now_s
        reading = self.meter.read(now_s)
        return reading.energy_j, reading.reason


def test_packages_and_dram_are_added_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    places = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "uncore",
        "intel-rapl:0:2": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    files = {place: domain(tmp_path, place, name, 1_000_000) for place, name in places.items()}
    (tmp_path / "sys/class/powercap/intel-rapl").mkdir()
    meter = Bench(tmp_path)
    assert meter.meter.scope == "package-0 + package-0 dram + package-1"
    meter.read(0.0)
    for file in files.values():
        file.write_text("3500000\n")
    assert meter.read(1.0)[0] == pytest.approx(7.5)


def test_pw_02_two_wraps_are_exact(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 5_000_000)
    meter = Bench(tmp_path)
    meter.read(0.0)
    total_j, counter, now_s = 0.0, RANGE_UJ - 5_000_000, 0.0
    while total_j < 2.5 * RANGE_UJ / 1e6:
        counter, now_s, total_j = (counter + 20_000_000_000) % RANGE_UJ, now_s + 50.0, total_j + 20_000.0
        file.write_text(f"{counter}\n")
        assert meter.read(now_s)[0] == pytest.approx(total_j)


def test_pw_02_a_gap_longer_than_a_wrap_is_unknown_and_not_guessed(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Bench(tmp_path)
    meter.read(0.0)
    file.write_text("5000000\n")
    energy_j, reason = meter.read(3600.0)
    assert energy_j is None and reason is not None and "wrapped unseen" in reason


def test_nonsense_is_unknown(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Bench(tmp_path)
    meter.read(0.0)
    file.write_text("60293987000\n")
    energy_j, reason = meter.read(1.0)
    assert energy_j is None and reason is not None and "60294 J in 1.00 s is not plausible" in reason


def test_a_failed_read_is_unknown_and_never_raises(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Bench(tmp_path)
    meter.read(0.0)
    file.unlink()
    assert meter.read(1.0)[0] is None


def test_one_failed_read_is_neither_energy_nor_a_wrap(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", 20_000_000_000)
    meter, rng = Bench(tmp_path), random.Random(0)
    meter.read(0.0)
    for number in range(1, 40):
        text = f"{20_000_000_000 + number * 1_000_000}\n" if number != 20 else rng.choice(("", "none\n"))
        file.write_text(text)
        meter.read(float(number))
    assert meter.read(39.0) == (pytest.approx(39.0), None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files of mode 000")
def test_pw_01_an_unreadable_domain_is_named_with_its_cure(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    domain(tmp_path, "intel-rapl:1", "package-1", 0).chmod(0)
    assert_partial(tmp_path)


def test_pw_01_a_denied_domain_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    denied = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    read_text = Path.read_text

    def deny(path: Path, *arguments: object, **options: object) -> str:
        if path == denied:
            raise PermissionError(13, "Permission denied")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", deny)
    assert_partial(tmp_path)
    denied = tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj"
    domain(tmp_path, "intel-rapl:1", "core", 0)
    found = probe(tmp_path)
    assert found.meter.name == "none" and any("permission denied" in reason for reason in found.reasons)


def test_memory_of_two_packages_is_told_apart(tmp_path: Path) -> None:
    for number in range(2):
        domain(tmp_path, f"intel-rapl:{number}", f"package-{number}", 0)
        domain(tmp_path, f"intel-rapl:{number}:0", "dram", 0)
    domain(tmp_path, "intel-rapl:2", "dram", 0)
    assert [each.name for each in find_domains(tmp_path)[0]] == [
        "package-0", "package-0 dram", "package-1", "package-1 dram", "dram"
    ]  # fmt: skip


def test_a_counter_without_a_range_is_no_meter(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=0)
    meter, reasons = open_rapl(tmp_path)
    assert meter is None and reasons == ["rapl intel-rapl:0: unreadable (max_energy_range_uj is 0)"]


def test_domains_that_only_repeat_others_are_named(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    meter, reasons = open_rapl(tmp_path)
    assert meter is None and "only intel-rapl-mmio" in reasons[0] and "intel_rapl_msr" in reasons[0]


@pytest.mark.parametrize("folder", ["drivers", "powercap", "power_supply"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_folder_that_cannot_be_listed_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, error: OSError
) -> None:
    def listing(method: Callable[..., Iterator[Path]]) -> Callable[..., Iterator[Path]]:
        def listed(path: Path, *arguments: str) -> Iterator[Path]:
            if path.name == folder:
                raise error
            return method(path, *arguments)

        return listed

    for name in ("iterdir", "glob"):
        monkeypatch.setattr(Path, name, listing(getattr(Path, name)))
    found = probe(tmp_path)
    meter = {"drivers": "ina", "powercap": "rapl", "power_supply": "battery"}[folder]
    assert found.meter.name == "none" and len(found.reasons) == 4
    assert [reason for reason in found.reasons if error.strerror in reason and reason.startswith(meter)]


def assert_partial(root: Path) -> None:
    domains, reasons = find_domains(root)
    assert [each.name for each in domains] == ["package-0"]
    assert "intel-rapl:1: permission denied" in reasons[0] and "udev" in reasons[0]
    meter, _ = open_rapl(root)
    assert meter is not None and meter.note is not None and "partial" in meter.note
    assert meter.read(0.0).reason == meter.note


def test_without_a_meter_energy_is_unknown_with_the_reason(tmp_path: Path) -> None:
    found = probe(tmp_path)
    reading = found.meter.read(0.0)
    assert found.meter.name == "none" and reading.energy_j is None
    assert reading.reason is not None and "powercap" in reading.reason
