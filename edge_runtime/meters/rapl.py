"""x86 RAPL: the energy counters of CPU packages and memory under /sys/class/powercap (devices.md 1.3).

It adds up packages and dram only, for the domains nest and `intel-rapl-mmio` repeats `intel-rapl`. What is read when,
and for which stage, is left to the caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.errors import why
from edge_runtime.meters._pieces import Timing
from edge_runtime.meters._reading import CounterLostError, Quality
from edge_runtime.meters._sampled import SampledMeter, Sampling

DOMAIN = re.compile(r"intel-rapl:\d+(:\d+)?")
PERMISSION_CURE = "let this user's group read energy_uj by a udev rule (root only since CVE-2020-8694)"
SAMPLING = Sampling(
    interval_s=0.1, gap_most_s=60.0, fine_interval_s=0.02, timing=Timing(window_s=0.001, doubt_s=0.001, counts=True)
)


@dataclass(frozen=True)
class RaplLimits:
    """What is plausible; beyond it a difference is not a measurement."""

    power_max_w: float = 1000.0  # one domain; a fall or a leap beyond this is nonsense (intel/powertelemetry #3)


@dataclass(frozen=True)
class Domain:
    """One counter: microjoules that wrap at `range_uj`."""

    name: str
    path: Path
    range_uj: int


def find_domains(root: Path) -> tuple[list[Domain], list[str]]:
    """Readable packages and dram, and why others are not: one line each.

    Raises: OSError when there is such a folder and it cannot be listed.
    """
    folder = root / "sys/class/powercap"
    domains: list[Domain] = []
    reasons: list[str] = []
    try:
        places = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        places = []
    for place in places:
        if not DOMAIN.fullmatch(place.name):
            continue
        try:
            name = (place / "name").read_text().strip()
            if not name.startswith("package") and name != "dram":
                continue
            int((place / "energy_uj").read_text())
            range_uj = int((place / "max_energy_range_uj").read_text())
            if range_uj <= 0:
                raise ValueError(f"max_energy_range_uj is {range_uj}")
            domains.append(Domain(_full_name(place, name), place / "energy_uj", range_uj))
        except PermissionError:
            reasons.append(f"rapl {place.name}: permission denied; {PERMISSION_CURE}")
        except (OSError, ValueError) as error:
            reasons.append(f"rapl {place.name}: unreadable ({why(error)})")
    if not domains and not reasons and any(place.name.startswith("intel-rapl-mmio:") for place in places):
        reasons.append(
            "rapl: only intel-rapl-mmio domains, which are not read: they repeat intel-rapl's; load intel_rapl_msr"
        )
    elif not domains and not reasons:
        reasons.append(
            "rapl: no /sys/class/powercap/intel-rapl domains (virtual machine, container, or not an x86 of this kind)"
        )
    return domains, reasons


def _full_name(place: Path, name: str) -> str:
    """Memory is called the same beside every package. Raises: OSError or ValueError."""
    if name != "dram" or place.name.count(":") < 2:
        return name
    return f"{(place.with_name(place.name.rpartition(':')[0]) / 'name').read_text().strip()} {name}"


def open_rapl(root: Path, limits: RaplLimits | None = None) -> tuple[SampledMeter | None, list[str]]:
    """A meter on the readable domains, or None; the reasons name what is missing either way.

    Raises: OSError as `find_domains` does.
    """
    domains, reasons = find_domains(root)
    if not any(domain.name.startswith("package") for domain in domains):
        return None, reasons or ["rapl: no package domain"]
    note = "; ".join(f"partial: {reason}" for reason in reasons) or None
    return SampledMeter(RaplSensor(domains, limits or RaplLimits()), SAMPLING, note=note), reasons


class RaplSensor:
    """Adds up wrapping counters; where one may have wrapped unseen, or leapt, the sum is lost and starts anew."""

    name = "rapl"
    quality: Quality = "measured"

    def __init__(self, domains: list[Domain], limits: RaplLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.scope = " + ".join(domain.name for domain in domains)
        self._domains, self._limits, self._clock = domains, limits, clock
        self._last: tuple[float, list[int]] | None = None  # when, and the microjoules of each domain
        self._total_uj = 0

    def read_j(self) -> float:
        """Joules. Raises: OSError or ValueError when a domain cannot be read, CounterLostError."""
        counted_uj, now_s = [self._read_uj(domain) for domain in self._domains], self._clock()
        last, self._last = self._last, (now_s, counted_uj)
        if last is not None:
            for domain, counter_uj, before_uj in zip(self._domains, counted_uj, last[1], strict=True):
                self._total_uj += self._difference_uj(domain, counter_uj - before_uj, now_s - last[0])
        return self._total_uj / 1e6

    def _read_uj(self, domain: Domain) -> int:
        try:
            return int(domain.path.read_text())
        except (OSError, ValueError) as error:
            raise OSError(f"rapl {domain.name}: a read failed ({why(error)})") from error

    def _difference_uj(self, domain: Domain, difference_uj: int, elapsed_s: float) -> int:
        if elapsed_s * self._limits.power_max_w * 1e6 > domain.range_uj:
            raise CounterLostError(
                f"rapl {domain.name}: not read for {elapsed_s:.0f} s, in which it may have wrapped unseen"
            )
        if difference_uj < 0:
            difference_uj += domain.range_uj
        if not 0 <= difference_uj <= self._limits.power_max_w * max(elapsed_s, 0.01) * 1e6:
            raise CounterLostError(
                f"rapl {domain.name}: {difference_uj / 1e6:.0f} J in {elapsed_s:.2f} s is not plausible"
            )
        return difference_uj
