"""The plan of this device's frontend on its disk: what it was built of, and whether it still fits.

A plan is machine code. It is opened only where its record, marked with the device's own secret, names its very bytes
and everything that it depends on (EN-01). Plan first, record last: a build that is killed half-way leaves no record,
and so no plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from contract.canonical import decode, encode, from_json, to_json
from contract.errors import DeviceError
from edge_runtime.state import PARTIAL_SUFFIX, read_or_set_aside, sync_folder, write_durably

RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class PlanKey:
    """All that a plan depends on; any difference means that it is built again."""

    onnx_sha256: str  # of the noised file, so that it names package, device secret and alpha as well
    library: str
    version: str
    gpu: str
    capability: str
    processors: int
    driver: int
    batch_most: int
    patches: int


@dataclass(frozen=True)
class Tried:
    """One serialisation that was built: how near it is to onnxruntime, how fast, and why it may not serve, if so."""

    types: str
    snr_db: float | None  # None: equal to the last bit, or not finite, which `refused` says
    refused: str | None
    median_ms: float | None  # for an image, at the largest batch
    fastest_ms: float | None
    slowest_ms: float | None
    runs: int
    build_s: float
    plan_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class PlanRecord:
    """The plan that was chosen; `types` None where none may serve."""

    key: PlanKey
    types: str | None
    plan_sha256: str
    plan_bytes: int
    tried: tuple[Tried, ...]
    mark: str  # by the device's secret, over all the rest


class PlanStore:
    """`front.plan`, its record and the timings of earlier builds, in a folder of the state."""

    def __init__(self, folder: Path, mark_of: Callable[[bytes], str]) -> None:
        """`mark_of` signs bytes with a secret of this device."""
        self.folder, self._mark_of = folder, mark_of
        self.plan, self._record = folder / "front.plan", folder / "front.json"
        self.timing_cache = folder / "timing.cache"

    def draft(self, types: str) -> Path:
        """Where a plan is built; what a killed build leaves there is removed when the state is opened."""
        return self.folder / f"{types}.plan{PARTIAL_SUFFIX}"

    def find(self, key: PlanKey, say: Callable[[str], None]) -> PlanRecord | None:
        """The record of a plan that fits `key` and is whole; else None, and what is wrong with it is said."""
        record = read_or_set_aside(self._record, lambda data: decode(PlanRecord, from_json(data, RECORD_BYTES)), say)
        reason = self._misfit(record, key)
        if reason is None:
            return record
        if record is not None or self.plan.exists():
            say(f"the TensorRT plan is built again: {reason}")
        return None

    def _misfit(self, record: PlanRecord | None, key: PlanKey) -> str | None:
        if record is None:
            return "it has no record of where it is from"
        if record.mark != self._mark(record):
            return "it was not built by this device for this package"
        for name, found in asdict(record.key).items():
            wanted = getattr(key, name)
            if found != wanted:
                return f"{name.replace('_', ' ')} was {str(found)[:80]}, is {str(wanted)[:80]}"
        if record.types is None:
            return None  # none may serve, and that is known of exactly this key
        try:
            size_bytes = self.plan.stat().st_size
        except FileNotFoundError:
            return "it is gone"
        if size_bytes != record.plan_bytes:
            return f"it should have {record.plan_bytes} bytes, found {size_bytes}"
        if sha256_of(self.plan) != record.plan_sha256:
            return "its bytes changed"
        return None

    def keep(self, key: PlanKey, chosen: Tried | None, tried: tuple[Tried, ...]) -> PlanRecord:
        """Put the chosen plan in its place, drop the others, and write the record.

        Raises: DeviceError when the disk refuses.
        """
        try:
            self._record.unlink(missing_ok=True)
            digest, size_bytes = "", 0
            if chosen is None:
                self.plan.unlink(missing_ok=True)
            else:
                draft = self.draft(chosen.types)
                digest, size_bytes = sha256_of(draft), draft.stat().st_size
                os.replace(draft, self.plan)
            sync_folder(self.folder)
        except OSError as error:
            raise DeviceError(f"{self.plan} cannot be written: {error.strerror}", "make room on the disk") from error
        finally:
            self.drop_drafts()
        unmarked = PlanRecord(key, chosen.types if chosen else None, digest, size_bytes, tried, "")
        record = replace(unmarked, mark=self._mark(unmarked))
        write_durably(self._record, to_json(encode(record)))
        return record

    def drop_drafts(self) -> None:
        """Plans that were built and not chosen."""
        for draft in self.folder.glob(f"*.plan{PARTIAL_SUFFIX}"):
            draft.unlink(missing_ok=True)

    def _mark(self, record: PlanRecord) -> str:
        return self._mark_of(to_json(encode(replace(record, mark=""))))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hex."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()
