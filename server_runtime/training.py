"""The torch process: reads frames from its standard input, trains, answers on what was its standard output.

Decisions are `conductor`'s and the strategies'; this file only joins them to pipe, disk and clock. It ends when its
parent does: the pipe's end is noticed by the reading thread at any moment, also during a long step.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import ConfigError, CutlayerError
from contract.messages import Gradient
from contract.training import HOLDS, OWN_HEADS

from . import backend, backend_folder, own_heads, pipe, split_model, strategies
from .backend_folder import TrainingFolder
from .conductor import Conducting, Conductor
from .evaluation import read_evaluation
from .files import DISK_ERRORS, disk_refuses
from .pipe import PipeFrame
from .plan import Plan
from .run_directory import RunDirectory
from .site_run import Request, SiteRun
from .store import Store, Upload
from .strategies import Metric, Settings, State

_IDLE_S = 0.5  # how often a waiting process looks at its deadlines
_PARENT_GONE = 3


class PipePost:
    """Frames to the socket process."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "wb")

    def send(self, frame: PipeFrame) -> None:
        try:
            for part in pipe.parts(frame):  # a large message is not copied
                self._stream.write(part)
            self._stream.flush()
        except BrokenPipeError:
            os._exit(_PARENT_GONE)


class RunRecords:
    """`conductor.Records` over the store and the run directory."""

    def __init__(self, store: Store, directory: RunDirectory) -> None:
        self._store = store
        self._directory = directory

    def upload(self, site: str, device: str, ask: str) -> Upload | None:
        return self._store.upload(site, device, ask)

    def codes(self, site: str, request: Request) -> np.ndarray | None:
        for record in self._store.records(site, "infer", unanswered=True):
            if (record.device, record.ask, record.batch) == (request.device, request.ask, request.batch):
                tensors = self._store.read(record)
                return None if tensors is None else tensors["codes"]
        return None

    def journal(self, site: str, device: str, reply: Gradient) -> None:
        self._directory.journal(site, device, reply)

    def journal_quorum(self, site: str, ask: str, devices: tuple[str, ...]) -> None:
        self._directory.journal_quorum(site, ask, devices)

    def rewind(self, site: str, fits: Callable[[State], bool]) -> State | None:
        return self._directory.rewind(site, fits)

    def keep(self, site: str, record: Mapping[str, Metric], state: State | None, ended: bool) -> None:
        if record:
            self._directory.record({"site": site, **record})
        if state is not None:
            if ended:
                self._directory.publish(site, state)
            self._directory.keep(site, state, ended)


def main() -> int:
    """Serve one parent; the exit code is that of the error, if one ended it."""
    # The parent turns signals into a STOP frame; a terminal's Ctrl-C or a service manager reaches both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for end in (sys.stdin, sys.stdout):
        pipe.widen(end.fileno())
    post = PipePost(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get into the pipe
    frames: queue.Queue[PipeFrame] = queue.Queue()
    threading.Thread(target=_read_frames, args=(sys.stdin.fileno(), frames), daemon=True).start()
    start = json.loads(frames.get().text)
    try:
        try:
            _serve(start, frames, post)
        except DISK_ERRORS as error:
            raise disk_refuses(start["root"], error) from error
        return 0
    except CutlayerError as error:
        values: dict[str, pipe.Value] = {"error": type(error).__name__, "cause": error.cause, "cure": error.cure}
        code = error.exit_code
    except Exception as error:
        traceback.print_exc()
        cause = f"the training process failed: {type(error).__name__}: {error}"
        values = {"error": "TrainingError", "cause": cause, "cure": "see the traceback above; restart to go on"}
        code = 1
    post.send(PipeFrame(pipe.FAILED, values=values))
    return code


def _read_frames(descriptor: int, frames: queue.Queue[PipeFrame]) -> None:
    unpacker = pipe.Unpacker()
    while data := os.read(descriptor, 1 << 20):
        for frame in unpacker.feed(data):
            frames.put(frame)
    os._exit(_PARENT_GONE)  # nobody is left to work for; what is on disk is whole at any moment


def _serve(start: dict[str, Any], frames: queue.Queue[PipeFrame], post: PipePost) -> None:
    def warn(text: str) -> None:
        post.send(PipeFrame(pipe.WARNING, text=text))

    plan, root = Plan(**start["plan"]), Path(start["root"])
    store, directory = Store(root, warn), RunDirectory(root, warn)
    public = None if start["public"] is None else Path(start["public"])
    sites = _site_runs(start["sites"], plan, Path(start["backend"]), public, store, directory)
    rules = Conducting(start["run"], plan.label_mode, HOLDS[plan.strategy] != "frontend")
    conductor = Conductor(sites, rules, post, RunRecords(store, directory), time.monotonic)
    conductor.start()
    post.send(PipeFrame(pipe.READY))
    while not conductor.stopped:
        for frame in _waiting_frames(frames, 0.0 if conductor.runnable else _IDLE_S):
            conductor.feed(frame)
        if not conductor.stopped:
            conductor.work()
    store.close()


def _waiting_frames(frames: queue.Queue[PipeFrame], wait_s: float) -> list[PipeFrame]:
    """All frames that are there, after waiting at most `wait_s` for the first."""
    found: list[PipeFrame] = []
    try:
        found.append(frames.get(timeout=wait_s) if wait_s else frames.get_nowait())
        while True:
            found.append(frames.get_nowait())
    except queue.Empty:
        return found


def _site_runs(
    sites: dict[str, list[str]], plan: Plan, folder: Path, public: Path | None, store: Store, directory: RunDirectory
) -> list[SiteRun]:
    module = strategies.find(plan.strategy)
    if plan.label_mode not in module.LABEL_MODES:
        raise ConfigError(
            f"strategy {plan.strategy} knows the label modes {', '.join(module.LABEL_MODES)}, not {plan.label_mode}",
            "choose another --label-mode or --strategy",
        )
    shipped = backend_folder.read(folder)
    device = backend.choose_device(plan.threads)
    shared = {field.name: getattr(plan, field.name) for field in fields(Settings) if hasattr(plan, field.name)}
    if isinstance(shipped, TrainingFolder) and HOLDS[plan.strategy] in OWN_HEADS:
        model, settings = own_heads.load(shipped), Settings(**shared)
    elif isinstance(shipped, TrainingFolder):
        judged = None if public is None else read_evaluation(public, shipped.manifest.image)
        model, settings = replace(split_model.load(shipped, device), evaluation=judged), Settings(**shared)
    else:
        model = backend.load(shipped, plan.kappa, device)
        settings = Settings(**shared, backend_lr=shipped.backend_lr, head_lr=shipped.head_lr)
    runs = []
    for name, devices in sites.items():
        fixed = store.classes(name)
        site = SiteRun(
            name, tuple(devices), lambda: module.build(model, settings), None if fixed is None else fixed[0],
            directory.resume(name), directory.journalled(name),
        )  # fmt: skip
        site.last_record = next(
            ({k: v for k, v in line.items() if k != "site"} for line in reversed(directory.metrics())
             if line.get("site") == name and "epoch" in line), {},
        )  # fmt: skip
        runs.append(site)
    return runs


if __name__ == "__main__":
    sys.exit(main())
