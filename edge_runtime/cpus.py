"""How many CPUs this process may use, and what they can do: from its own limits, not from the host's topology.

onnxruntime's own default pins one thread per core of the machine, which fails inside cpusets (ER-01). Choosing an
engine's options from these figures is left to `engines`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(affinity: int, root: Path = Path("/")) -> int:
    """CPUs of the affinity mask, capped by the cgroup quota rounded up; at least 1."""
    quota = cgroup_quota(root)
    return max(1, min(affinity, math.ceil(quota)) if quota else affinity)


def allowed_affinity() -> int:
    """CPUs in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_quota(root: Path) -> float | None:
    """The tightest CPU quota, in CPUs, of this process's cgroup and those above it; None when there is none."""
    quotas: list[float] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            folder = root / "sys/fs/cgroup"
            quotas += [
                quota for place in with_parents(folder, path) if (quota := parse_cpu_max(read_text(place / "cpu.max")))
            ]
        elif "cpu" in controllers.split(","):
            folder = root / "sys/fs/cgroup/cpu"
            quotas += [quota for place in with_parents(folder, path) if (quota := parse_cfs(place))]
    return min(quotas, default=None)


def with_parents(folder: Path, path: str) -> list[Path]:
    """The cgroup directory and those above it, up to the mount; inside a container the mount alone may exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [folder.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def parse_cpu_max(text: str) -> float | None:
    """`150000 100000` -> 1.5; `max 100000` -> None."""
    fields = text.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or fields[1] == "0":
        return None
    return int(fields[0]) / int(fields[1])


def parse_cfs(folder: Path) -> float | None:
    """Version 1: quota and period in two files; a quota of -1 means none."""
    return parse_cpu_max(
        f"{read_text(folder / 'cpu.cfs_quota_us').strip()} {read_text(folder / 'cpu.cfs_period_us').strip()}"
    )


def has_vnni(root: Path = Path("/")) -> bool:
    """Can this x86 CPU multiply u8 by s8 without saturating? True on other architectures, which have no such kernel."""
    text = read_text(root / "proc/cpuinfo")
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), None)
    return flags is None or "avx_vnni" in flags or "avx512_vnni" in flags


def read_text(path: Path) -> str:
    """The file's text, or nothing where it cannot be read: these files come and go with the kernel."""
    try:
        return path.read_text()
    except OSError:
        return ""
