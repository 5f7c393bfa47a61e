"""The run directory, which is the record of a run: its plan, checkpoints, journal, metrics and trained weights.

What devices sent is left to `store` (same directory), which run is taken up to `runs`.

    RUNS/<id>/run.toml         the plan: all that the result depends on
              state.sqlite     the ledger (store)
              tensors/         what devices sent (store)
              checkpoints/     <site>.safetensors, and the one before as <site>.previous.safetensors
              journal/         <site>: devices' replies since the checkpoint, and quorums that were gone on with; after
                               kill -9 they are not asked again
              metrics.jsonl    one line per record; what is recorded again after a stop replaces what was
              models/<site>/   backend.safetensors (under timm's names), head.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from contract.errors import CutlayerError
from contract.messages import Gradient

from .files import remove, set_aside, write_atomic
from .pipe import QUORUM, PipeFrame, Unpacker, carried, carry, pack
from .site_run import Journal
from .strategies import Metric, State


class RunDirectory:
    """The files of one run that the torch process writes."""

    def __init__(self, root: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self._root = root
        self._warn = warn
        (root / "checkpoints").mkdir(parents=True, exist_ok=True)
        (root / "journal").mkdir(exist_ok=True)
        self._cut_torn_line(root / "metrics.jsonl")
        self._lines = Counter(str(line.get("site")) for line in self.metrics())  # a long run's file is slow to read

    # -- metrics

    def record(self, values: Mapping[str, Metric]) -> None:
        """Append one line to metrics.jsonl; what is unknown is null, NaN is refused."""
        with open(self._root / "metrics.jsonl", "a", encoding="utf-8") as stream:
            stream.write(_line(values))
        self._lines[str(values.get("site"))] += 1

    def metrics(self) -> list[dict[str, Metric]]:
        """All records, oldest first."""
        path = self._root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def _cut_torn_line(self, path: Path) -> None:
        if not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n") and _is_object(line)]
        if len(whole) != len(lines):
            self._warn(f"metrics.jsonl: {len(lines) - len(whole)} unreadable line(s) cut off")
            write_atomic(path, b"".join(whole))

    # -- checkpoints

    def _checkpoint(self, site: str) -> Path:
        return self._root / "checkpoints" / f"{site}.safetensors"

    def keep(self, site: str, state: State, ended: bool) -> None:
        """Replace the site's checkpoint, keep the one before it, and empty the journal."""
        values = json.dumps({**state.values, "ended": ended, "lines": self._lines[site]}, allow_nan=False)
        data = save(dict(state.tensors), {"values": values, "sha256": _digest(state.tensors, values)})
        path = self._checkpoint(site)
        if path.exists():
            os.replace(path, path.with_suffix(".previous.safetensors"))
        write_atomic(path, data)
        remove(self._root / "journal" / site)

    def resume(self, site: str) -> tuple[State, bool] | None:
        """The site's newest whole checkpoint and whether its strategy had ended; None when there is none."""
        path = self._checkpoint(site)
        for candidate in (path, path.with_suffix(".previous.safetensors")):
            if not candidate.exists():
                continue
            found = _read_checkpoint(candidate)
            if found is not None:
                self._forget_metrics(site, found.lines)
                return found.state, found.ended
            self._set_aside(candidate)
            # Replies since a checkpoint that is lost belong to steps that will be asked for anew.
            remove(self._root / "journal" / site)
        self._forget_metrics(site, 0)
        return None

    def rewind(self, site: str, fits: Callable[[State], bool]) -> State | None:
        """The site's newest checkpoint that fits, None for the beginning; the journal and newer checkpoints are gone.

        Whatever is gone belongs to steps that will be taken again; an unreadable checkpoint is set aside.
        """
        remove(self._root / "journal" / site)
        path = self._checkpoint(site)
        for candidate in (path, path.with_suffix(".previous.safetensors")):
            if not candidate.exists():
                continue
            found = _read_checkpoint(candidate)
            if found is None:
                self._set_aside(candidate)
            elif fits(found.state):
                self._forget_metrics(site, found.lines)
                return found.state
            else:
                remove(candidate)
        self._forget_metrics(site, 0)
        return None

    def _set_aside(self, checkpoint: Path) -> None:
        self._warn(f"checkpoint {checkpoint.name} was unreadable: kept as {set_aside(checkpoint).name}")

    def _forget_metrics(self, site: str, kept: int | None) -> None:
        """Drop the site's lines beyond the first `kept`: they will be recorded again. None drops none."""
        if kept is None:
            return
        lines, seen = self.metrics(), 0
        left = []
        for line in lines:
            seen += line.get("site") == site
            if line.get("site") != site or seen <= kept:
                left.append(line)
        if len(left) < len(lines):
            write_atomic(self._root / "metrics.jsonl", "".join(map(_line, left)).encode())
            self._lines[site] = min(kept, self._lines[site])

    def publish(self, site: str, state: State) -> None:
        """Write what was trained as models/<site>/{backend,features,head}.safetensors, where the strategy has it.

        `features` are the mean and scale by which a head's inputs are standardised: (features - mean) / scale.
        """
        for part in ("backend", "features", "head"):
            start = part + "."
            named = {k.removeprefix(start): tensor for k, tensor in state.tensors.items() if k.startswith(start)}
            if named:
                write_atomic(self._root / "models" / site / f"{part}.safetensors", save(named))

    # -- journal of replies

    def journal(self, site: str, device: str, reply: Gradient) -> None:
        """Append a device's reply. Not synced: it is there for kill -9; after a power cut the device is asked again."""
        with open(self._root / "journal" / site, "ab") as stream:
            stream.write(pack(carry(site, device, reply)))

    def journal_quorum(self, site: str, ask: str, devices: tuple[str, ...]) -> None:
        """Append which devices a question went on with; names have no commas."""
        frame = PipeFrame(QUORUM, site, values={"ask": ask, "devices": ",".join(devices)})
        with open(self._root / "journal" / site, "ab") as stream:
            stream.write(pack(frame))

    def journalled(self, site: str) -> Journal:
        """What was journalled since the checkpoint; whatever follows a damaged record is dropped."""
        path = self._root / "journal" / site
        replies: dict[tuple[str, str], Gradient] = {}
        quorums: dict[str, tuple[str, ...]] = {}
        frames: list[PipeFrame] = []
        if not path.exists():
            return Journal()
        try:
            for frame in Unpacker().feed(path.read_bytes()):
                if frame.kind == QUORUM:
                    quorums[str(frame.values["ask"])] = tuple(str(frame.values["devices"]).split(","))
                elif isinstance(message := carried(frame), Gradient):
                    replies[message.ask, frame.device] = message
                frames.append(frame)
        except (CutlayerError, ValueError, KeyError):
            self._warn(f"the journal of {site!r} was damaged after {len(replies)} replies: the rest is asked again")
        write_atomic(path, b"".join(map(pack, frames)))  # without a torn end, so that appending goes on
        return Journal(replies, quorums)


@dataclass(frozen=True)
class _Checkpoint:
    state: State
    ended: bool
    lines: int | None  # the site's lines of metrics.jsonl at that time; None: the checkpoint does not say


def _read_checkpoint(path: Path) -> _Checkpoint | None:
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        if _digest(tensors, metadata["values"]) != metadata["sha256"]:
            return None
        values = json.loads(metadata["values"])
        lines = values.pop("lines", None)
        return _Checkpoint(State(tensors, values), bool(values.pop("ended")), None if lines is None else int(lines))
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def _digest(tensors: Mapping[str, torch.Tensor], values: str) -> str:
    digest = hashlib.sha256(values.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _line(values: Mapping[str, Metric]) -> str:
    return json.dumps(dict(values), allow_nan=False) + "\n"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
