"""The settled states of a client part on the disk, each whole or not there, and a local round that is under way.

Which of them are kept: the newest, and those at the server's last two checkpoints. What they mean is `part_keeper`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from edge_runtime.state import read_or_set_aside, sync_folder, write_durably

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
BASES = 2
_FACTS, _PART, _HEAD = "facts", "part/", "head/"


@dataclass(frozen=True)
class PartCheckpoint:
    """A part of `cut` layers at `step` of `run`: trainer state, head state (empty without one), and loss, hits and
    images so far."""

    run: str
    step: int
    cut: int
    sums: tuple[float, int, int]
    part: Tensors
    head: Tensors


def to_bytes(checkpoint: PartCheckpoint, ask: str = "") -> bytes:
    """Safetensors; what is no tensor as JSON bytes."""
    facts = {
        "run": checkpoint.run, "step": checkpoint.step, "cut": checkpoint.cut, "sums": checkpoint.sums, "ask": ask,
    }  # fmt: skip
    return save(
        {
            _FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8),
            **{_PART + name: np.asarray(value, order="C") for name, value in checkpoint.part.items()},
            **{_HEAD + name: np.asarray(value, order="C") for name, value in checkpoint.head.items()},
        }
    )


def from_bytes(data: bytes) -> tuple[PartCheckpoint, str]:
    """The checkpoint, and the ask that it belongs to. Raises: ValueError when the bytes are no checkpoint."""
    try:
        tensors = load(data)
        facts = json.loads(tensors[_FACTS].tobytes())
        loss, correct, count = facts["sums"]
        part, head = (
            {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            for start in (_PART, _HEAD)
        )
        found = PartCheckpoint(
            str(facts["run"]),
            int(facts["step"]),
            int(facts["cut"]),
            (float(loss), int(correct), int(count)),
            part,
            head,
        )
        return found, str(facts["ask"])
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"not a part: {error}") from error


class PartStore:
    """One folder of checkpoints; what cannot be read is set aside with a warning."""

    keeps_rounds = True  # False where nobody is killed in a round, and its state need not be made

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say

    def steps(self, run: str) -> tuple[int, ...]:
        """The steps of this run that are held, rising; 0, the beginning, always is."""
        return (0, *sorted(step for name, step in self._files() if name == run))

    def newest_run(self) -> str:
        """The run of the checkpoint that was written last, "" where there is none."""
        found = [(self._path(run, step).stat().st_mtime_ns, run) for run, step in self._files()]
        return max(found)[1] if found else ""

    def read(self, run: str, step: int) -> PartCheckpoint | None:
        """The part at a step, None when it is not held."""
        path = self._path(run, step)
        found = read_or_set_aside(path, from_bytes, self._say) if path.exists() else None
        return found[0] if found is not None and (found[0].run, found[0].step) == (run, step) else None

    def keep(self, checkpoint: PartCheckpoint, base: int) -> None:
        """Be durable at a step, then drop what nobody can go back to. The server's newest checkpoint is at `base`.

        So all that is held up to `base` is of its checkpoints, and what lies between `base` and this step was either
        passed or is of a time that the server has gone back from.
        Raises: DeviceError when the disk refuses.
        """
        write_durably(self._path(checkpoint.run, checkpoint.step), to_bytes(checkpoint))
        known = [step for step in self.steps(checkpoint.run) if 0 < step <= base]
        kept = {checkpoint.step, *known[-BASES:]}
        dropped = [self._path(run, step) for run, step in self._files() if run != checkpoint.run or step not in kept]
        for path in dropped:
            path.unlink(missing_ok=True)
        if dropped:
            sync_folder(self._folder)

    def read_round(self, run: str, ask: str) -> PartCheckpoint | None:
        """How far a local round came; `step` counts its epochs."""
        path = self._folder / "round.safetensors"
        found = read_or_set_aside(path, from_bytes, self._say) if path.exists() else None
        return found[0] if found is not None and (found[0].run, found[1]) == (run, ask) else None

    def keep_round(self, ask: str, checkpoint: PartCheckpoint) -> None:
        """Replace the round that is under way. Raises: DeviceError when the disk refuses."""
        write_durably(self._folder / "round.safetensors", to_bytes(checkpoint, ask))

    def _path(self, run: str, step: int) -> Path:
        return self._folder / f"part.{run}.{step}.safetensors"

    def _files(self) -> list[tuple[str, int]]:
        """Run and step of every checkpoint by its name."""
        found = []
        for path in self._folder.glob("part.*.safetensors"):
            run, _, step = path.name.removeprefix("part.").removesuffix(".safetensors").rpartition(".")
            if run and step.isdigit():
                found.append((run, int(step)))
        return found
