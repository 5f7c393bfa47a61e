"""What the state directory tells of this device's run, without disturbing it: nothing is locked, repaired or removed.

How it is said is `standing`'s part.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.scratch import is_locked
from edge_runtime.spool import HEAD, SpoolLimits, parse_head, scan_records
from edge_runtime.witness import STATUS_FILE

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this boot; empty where the system does not say."""
    try:
        return BOOT.read_text("ascii").strip()
    except OSError:
        return ""


def read_status(root: Path) -> dict[str, Any]:
    """`state` ("running", "stopped"), the run's last words of itself or None, how old they are, and its spools.

    Raises: ConfigError where there is no state directory.
    """
    if not (root / "lock").exists():
        raise ConfigError(f"{root} is no state directory of edge-run", "give --state the one that edge-run is given")
    told: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError):  # no run was equipped so far
        told = json.loads((root / STATUS_FILE).read_text("utf-8"))
    same_boot = told is not None and told["boot"] == boot_id() != ""
    now_s = time.monotonic()
    return {
        "state": "running" if is_locked(root / "lock") else "stopped",
        "run": told,
        "age_s": now_s - told["taken_s"] if told is not None and same_boot else None,
        "link_s": now_s - told["link"]["since_s"] if told is not None and same_boot else None,
        "spools": {name: kept for name in ("adapt", "offline") if (kept := peek(_spool(root, name))) is not None},
    }


def _spool(root: Path, name: str) -> Path:
    return root / name if name == "offline" else root / "spool" / name


def peek(folder: Path) -> dict[str, int] | None:
    """Messages in a spool's segments, and their bytes; those in memory only are not there. None: no spool.

    A segment that was acknowledged in part counts whole.
    """
    frames, size_bytes, generation = 0, 0, None
    segments = sorted(folder.glob("*.segment"))
    for path in segments:
        try:
            data = path.read_bytes()
            records, _ = scan_records(memoryview(data), SpoolLimits().record_bytes)
            head = parse_head(data[records[0].offset : records[0].offset + records[0].size])
        except (OSError, ValueError, IndexError):
            break  # it was just acknowledged, or it is damaged: the next run says so
        if head.generation != generation:
            frames, size_bytes, generation = 0, 0, head.generation
        frames += sum(record.kind != HEAD for record in records)
        size_bytes += sum(record.size for record in records if record.kind != HEAD)
    return {"frames": frames, "bytes": size_bytes} if segments else None
