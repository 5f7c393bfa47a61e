"""Where a sweep works: candidates that were measured are kept until the end, so that one that was stopped goes on.

A hidden folder beside the output. It is removed when the sweep ends, whatever it ends in; what is measured, and how, is
exporter.gate's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from contract.console import say
from contract.errors import ExportError, UsageError, why
from contract.leakage import Baselines
from contract.scratch import lock_folder
from exporter.gate_choice import Energy, Point
from exporter.gate_plan import GatePlan
from exporter.package import replace_document
from exporter.plan import ExportPlan

_KEY_NAME, _BYTES_MAX = "of.json", 64 << 20


@dataclass(frozen=True)
class Done:
    """One candidate: its points, the leakage table (the file's text) that they come from, and what guesses without any
    token reach; or why the export itself refused it."""

    points: tuple[Point, ...]
    table: str
    baselines: Baselines | None
    refused: str | None = None


@dataclass(frozen=True)
class _Of:
    """What the measured candidates depend on. Limits may change: nothing is measured by them."""

    digest: str


class Workplace:
    """Scratch space, and what is done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, number: int) -> Path:
        """Where candidate `number` is made."""
        folder = self.root / f"candidate-{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def read(self, number: int) -> Done | None:
        """What an earlier run measured; None where it did not."""
        return _read(Done, self._path(number))

    def keep(self, number: int, done: Done) -> None:
        """It is measured; its folder is not needed any more."""
        replace_document(self._path(number), encode(done))
        shutil.rmtree(self.folder(number), ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.root / f"{number}.json"


@contextlib.contextmanager
def workplace(
    output: Path, plan: ExportPlan, gate: GatePlan, energies: Sequence[Energy], public: str
) -> Iterator[Workplace]:
    """The folder of this very sweep; `public` is the digest of the public images.

    Raises: UsageError when an earlier run with other settings left one, or another export has it; ExportError when it
    cannot be written.
    """
    root = output.with_name(f".{output.name}.gate")
    swept = encode(gate, omit=("limits", "max_energy_j"))
    text = to_json([plan.document(), swept, [encode(each) for each in energies], public])
    mine = _Of(hashlib.sha256(text).hexdigest())
    lock = _lock(root)
    try:
        yield from _hold(root, mine)
    finally:
        os.close(lock)


def _lock(root: Path) -> int:
    """The folder, made where it is missing and locked; made again where its owner was just removing it."""
    while True:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(root)
        except BlockingIOError as error:
            raise UsageError(
                f"{root} is in use: another export of the same output is running", "wait for it, or choose another -o"
            ) from error
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ExportError(f"{root} cannot be used: {error.strerror}", "choose another -o") from error
        if root.is_dir():
            return lock
        os.close(lock)


def _hold(root: Path, mine: _Of) -> Iterator[Workplace]:
    found = _read(_Of, root / _KEY_NAME)
    if found is None and any(root.iterdir()):
        raise UsageError(f"{root} is needed for a while, and holds what no export made", "move it away, or change -o")
    if found not in (None, mine):
        raise UsageError(
            f"{root} holds what an export with other settings or images had measured",
            "repeat that command to go on with it, or remove the folder to begin anew",
        )
    try:
        replace_document(root / _KEY_NAME, encode(mine))
        yield Workplace(root)
    except BaseException:
        count = len([each for each in root.glob("*.json") if each.name != _KEY_NAME])
        rows = any(root.glob("*/*.rows"))
        if not count and not rows:
            shutil.rmtree(root, ignore_errors=True)
        else:
            say(f"{count} measured candidates are kept in {root}: the same command goes on from there")
        raise
    shutil.rmtree(root, ignore_errors=True)


def _read(kind, path: Path):
    try:
        return decode(kind, from_json(path.read_bytes(), _BYTES_MAX))
    except FileNotFoundError:
        return None
    except (OSError, CanonicalError) as error:
        raise UsageError(
            f"{path}, of an earlier run, cannot be read: {why(error, path)}", f"remove {path.parent}"
        ) from error
