"""x86 RAPL: the energy counters of CPU packages and memory under /sys/class/powercap (devices.md 1.3).

It adds up packages and dram only, for the domains nest and `intel-rapl-mmio` repeats `intel-rapl`. What is read when,
and for which stage, is left to the caller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.meters._reading import Quality, Reading

DOMAIN = re.compile(r"intel-rapl:\d+(:\d+)?")
PERMISSION_CURE = "let this user's group read energy_uj by a udev rule (root only since CVE-2020-8694)"


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
    """Readable packages and dram, and why others are not: one line each."""
    folder = root / "sys/class/powercap"
    domains: list[Domain] = []
    reasons: list[str] = []
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    for place in places:
        if not DOMAIN.fullmatch(place.name):
            continue
        try:
            name = (place / "name").read_text().strip()
            if not name.startswith("package") and name != "dram":
                continue
            int((place / "energy_uj").read_text())
            domains.append(Domain(name, place / "energy_uj", int((place / "max_energy_range_uj").read_text())))
        except PermissionError:
            reasons.append(f"rapl {place.name}: permission denied; {PERMISSION_CURE}")
        except (OSError, ValueError) as error:
            reasons.append(f"rapl {place.name}: unreadable ({error})")
    if not domains and not reasons:
        reasons.append(
            "rapl: no /sys/class/powercap/intel-rapl domains (virtual machine, container, or not an x86 of this kind)"
        )
    return domains, reasons


def open_rapl(root: Path, limits: RaplLimits | None = None) -> tuple[RaplMeter | None, list[str]]:
    """A meter on the readable domains, or None; the reasons name what is missing either way."""
    domains, reasons = find_domains(root)
    if not any(domain.name.startswith("package") for domain in domains):
        return None, reasons or ["rapl: no package domain"]
    return RaplMeter(
        domains, "; ".join(f"partial: {reason}" for reason in reasons) or None, limits or RaplLimits()
    ), reasons


class RaplMeter:
    """Adds up differences of wrapping counters; a gap in which one may have wrapped unseen makes the sum unknown."""

    name = "rapl"
    quality: Quality = "measured"

    def __init__(self, domains: list[Domain], partial: str | None, limits: RaplLimits) -> None:
        self.scope = " + ".join(domain.name for domain in domains)
        self._domains, self._partial, self._limits = domains, partial, limits
        self._last: dict[str, tuple[int, float]] = {}  # domain path -> (microjoules, when)
        self._total_uj = 0
        self._lost: str | None = None

    def read(self, now_s: float) -> Reading:
        """Joules since the first read. Once an interval was lost the sum stays unknown, with the reason."""
        for domain in self._domains:
            try:
                counter_uj = int(domain.path.read_text())
            except (OSError, ValueError) as error:
                self._lost = self._lost or f"rapl {domain.name}: a read failed ({error})"
                continue
            last = self._last.get(str(domain.path))
            self._last[str(domain.path)] = (counter_uj, now_s)
            if last is not None:
                self._add(domain, counter_uj - last[0], now_s - last[1])
        if self._lost:
            return Reading(None, self._lost)
        return Reading(self._total_uj / 1e6, self._partial)

    def _add(self, domain: Domain, difference_uj: int, elapsed_s: float) -> None:
        plausible_uj = self._limits.power_max_w * max(elapsed_s, 0.01) * 1e6
        if elapsed_s * self._limits.power_max_w * 1e6 > domain.range_uj:
            self._lost = (
                self._lost or f"rapl {domain.name}: not read for {elapsed_s:.0f} s, in which it may have wrapped unseen"
            )
            return
        if difference_uj < 0:
            difference_uj += domain.range_uj
        if not 0 <= difference_uj <= plausible_uj:
            self._lost = (
                self._lost or f"rapl {domain.name}: {difference_uj / 1e6:.0f} J in {elapsed_s:.2f} s is not plausible"
            )
            return
        self._total_uj += difference_uj
