"""Whether a disturbed run ended as the undisturbed one did: every difference in a sentence, none where all is equal.

Files are read here and compared; running and disturbing is left to `chaos_world` and `chaos_strikes`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.make_package import DEVICES

RUN = Path("runs/chaos")
Tensors = dict[str, NDArray[Any]]


def differences(calm: Path, disturbed: Path) -> list[str]:
    """Between two roots of a world, of one work and the same secrets."""
    found = [f"{path.name} holds a traceback" for path in sorted(disturbed.glob("*.log")) if _crashed(path)]
    found += _records(calm, disturbed)
    found += _counted_once(disturbed)
    found += _compare("features", stored_features(calm), stored_features(disturbed))
    found += _compare("trained weights", trained(calm), trained(disturbed))
    for device in DEVICES:
        found += _compare(f"{device}'s part", part(calm, device), part(disturbed, device))
    if not trained(calm):
        found.append("the undisturbed run has trained nothing")
    return found


def _crashed(path: Path) -> bool:
    return "Traceback" in path.read_text()


def _records(calm: Path, disturbed: Path) -> Iterator[str]:
    """Every epoch once, with the same loss, accuracy, images and bytes at the cut."""
    expected, found = ([json.loads(line) for line in _lines(root)] for root in (calm, disturbed))
    epochs = [line["epoch"] for line in found if "epoch" in line]
    if len(epochs) != len(set(epochs)):
        yield f"{len(epochs) - len(set(epochs))} epochs are on record twice"
    unequal = [one.get("epoch") for one, other in zip(expected, found, strict=False) if one != other]
    if unequal:
        yield f"{len(unequal)} records differ, the first of epoch {unequal[0]}"
    if len(expected) != len(found):
        yield f"{len(found)} records instead of {len(expected)}"


def _lines(root: Path) -> list[str]:
    return (root / RUN / "metrics.jsonl").read_text().splitlines()


def uploads(root: Path) -> list[tuple[str, str, int, int, int, str]]:
    """(device, ask, batch, rows, total, file) of every stored batch."""
    with closing(sqlite3.connect(f"file:{root / RUN / 'state.sqlite'}?mode=ro", uri=True)) as ledger:
        return ledger.execute(
            "SELECT device, ask, batch, rows, total, file FROM uploads ORDER BY device, ask, batch"
        ).fetchall()


def _counted_once(root: Path) -> Iterator[str]:
    """No batch twice or missing, in the ledger and on the disk."""
    kept = uploads(root)
    for device in DEVICES:
        batches = [batch for name, _, batch, *_ in kept if name == device]
        if len(set(batches)) != len(batches):
            yield f"{device}: a batch is stored twice"
        rows = sum(count for name, _, _, count, *_ in kept if name == device)
        totals = {total for name, _, _, _, total, _ in kept if name == device}
        if kept and totals != {rows}:
            yield f"{device}: {rows} images are stored, the upload has {totals}"
    files = {file for *_, file in kept}
    on_disk = {str(path.relative_to(root / RUN)) for path in root.glob(f"{RUN}/tensors/*/*/*.safetensors")}
    if files - on_disk:
        yield f"{len(files - on_disk)} files of the ledger are missing"


def stored_features(root: Path) -> dict[str, Tensors]:
    """By device and batch, what the server holds."""
    return {f"{device} batch {batch}": load_file(root / RUN / file) for device, _, batch, _, _, file in uploads(root)}


def trained(root: Path) -> dict[str, Tensors]:
    """What the run published."""
    return {path.name: load_file(path) for path in root.glob(f"{RUN}/models/*/*.safetensors")}


def part(root: Path, device: str) -> dict[str, Tensors]:
    """The part of the model that a device holds in the end, with its optimiser; empty without one.

    What it says of its step is left out: every settled step has a number, and the server has devices settle by a clock.
    """
    files = list(root.glob(f"state/{device}/parts/part.*.safetensors"))
    if not files:
        return {}
    newest = max(files, key=lambda path: int(path.name.split(".")[-2]))
    return {"newest": {name: value for name, value in load_file(newest).items() if name != "facts"}}


def _compare(what: str, calm: dict[str, Tensors], disturbed: dict[str, Tensors]) -> Iterator[str]:
    """Bit for bit."""
    if calm.keys() != disturbed.keys():
        missing, new = calm.keys() - disturbed.keys(), disturbed.keys() - calm.keys()
        yield f"{what}: {len(missing)} are missing, {len(new)} are new"
    unequal = [
        f"{name} {tensor}"
        for name in calm.keys() & disturbed.keys()
        for tensor in calm[name].keys() | disturbed[name].keys()
        if not _equal(calm[name].get(tensor), disturbed[name].get(tensor))
    ]
    if unequal:
        yield f"{what}: {len(unequal)} tensors differ, such as {min(unequal)}"


def _equal(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and one.tobytes() == other.tobytes()
