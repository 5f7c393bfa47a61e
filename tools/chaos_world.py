"""The programs of a campaign, kept alive as a service manager would, and how far their work is as seen from outside.

Real commands over TLS; each device reaches the server through a proxy of its own. What is done to them is left to
`chaos_strikes`, whether the result is right to `chaos_verdict`.
"""

from __future__ import annotations

import select
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from contract.errors import TrainingError
from tests.chaos.limits import DEVICE_SHORT_SILENCE, QUICK_RETURN, SHORT_SILENCE, write_command
from tests.chaos.proxy import FrameProxy, TcpProxy, Weather
from tests.make_package import DEVICES, PRIVATE_CLASSES, PUBLIC_CLASSES, draw_folder
from tests.over_loopback.deployment import Deployment, stop
from tools.chaos_faults import SERVER
from tools.chaos_messages import Altered

POLL_S = 0.02
LIMIT_S = 300.0  # without what is waited for
NO_LONG_WAITS = ("edge_runtime.reconnect:BackoffLimits.early_s=3600",)  # else one long outage makes a device wait long
EXPECTED_ENDS = 8  # the newest count: an end may show when further faults have come
SHOWN_LETTERS = 2000
ROWS_A_STEP = 32  # of split adaptation; every image is there twice, augmented once


@dataclass(frozen=True)
class Work:
    """What is run: the strategy, its package, the server's options, and the images of each device and class.

    Where an upload comes first, links carry `upload_bytes_per_s` until it is over, so that faults fall into it.
    """

    strategy: str
    front: str
    label_mode: str
    epochs: int
    options: tuple[object, ...] = ()
    images_per_class: int = 4
    device_limits: tuple[str, ...] = ()
    upload_bytes_per_s: float | None = None
    slow_bytes_per_s: float = 2000.0  # a frame must pass within the silence that both sides bear


MESSAGES_A_FAULT = 15  # that the work must have, so that it outlasts the faults


def adaptation(faults: int) -> Work:
    """Split adaptation with as many images and epochs as so many faults need."""
    images = max(4, faults // 5)
    messages_an_epoch = len(DEVICES) * -(-2 * images * len(DEVICES) * len(PRIVATE_CLASSES) // ROWS_A_STEP)
    return Work(
        "split_adaptation", "front", "logit-gradient",
        epochs=max(6, MESSAGES_A_FAULT * faults // messages_an_epoch), images_per_class=images,
        device_limits=("edge_runtime.pipeline:BATCH_SAMPLES_MAX=1",), upload_bytes_per_s=8000.0,
    )  # fmt: skip


def sequential(faults: int) -> Work:
    """Sequential split learning of as many epochs as so many faults need."""
    options = ("--batch", 3, "--learning-rate", 0.01)
    return Work(
        "sequential_split",
        "parts",
        "raw-label",
        epochs=max(12, round(1.2 * faults)),
        options=options,
        slow_bytes_per_s=150_000.0,
    )


WORKS: dict[str, Callable[[int], Work]] = {"sa": adaptation, "ssl": sequential}


def make_package(given: Path, root: Path, work: Work) -> Path:
    """The given package with as many images as the work needs; the same ones whenever it is made."""
    made = root / "package"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for name in ("keys", "classes.txt", work.front, f"{work.front}.backend"):
        (made / name).symlink_to(given / name)
    rng = np.random.default_rng(0)
    for place, name in enumerate(PRIVATE_CLASSES):
        for device in DEVICES:
            draw_folder(made / device / "train" / name, PUBLIC_CLASSES + place, work.images_per_class, rng)
    return made


class World:
    """One run of the work from fresh state, from `with` to its end. `deployment.root` is its own."""

    def __init__(self, deployment: Deployment, work: Work, say: Callable[[str], None]) -> None:
        self.root, self.work = deployment.root, work
        self.links: dict[str, TcpProxy] = {}
        self.frames: dict[str, FrameProxy] = {}
        self.altered = {device: Altered() for device in DEVICES}
        self._expected: deque[tuple[str, int]] = deque(maxlen=EXPECTED_ENDS)
        self.unexpected: list[str] = []  # ends that no fault explains
        self.starts = 0  # of the server
        self._say, self._stack = say, ExitStack()
        self._deployment = deployment
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._listens, self._paced = False, True
        self._counted, self._newest = 0, 0  # messages: of earlier ledgers, of this one

    # -- its life

    def __enter__(self) -> World:
        deployment, commands = self._deployment, self.root / "commands"
        deployment.server_bin = write_command(commands, "server-run", SHORT_SILENCE).parent
        limits = (*DEVICE_SHORT_SILENCE, *QUICK_RETURN, *NO_LONG_WAITS, *self.work.device_limits)
        deployment.device_bin = write_command(commands, "edge-run", limits).parent
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        deployment = self._deployment
        stack.callback(self._stop)
        self._start(SERVER)
        self.wait(lambda: self._listens, "the server")
        keys = deployment.package / "keys"
        for device in DEVICES:
            link = TcpProxy(deployment.port, Weather(bytes_per_s=self.work.upload_bytes_per_s))
            self.links[device] = stack.enter_context(link)
            certificate, authority = (keys / "server.pem", keys / "server.key"), keys / "devices" / device / "ca.pem"
            frames = FrameProxy(deployment.port, certificate, authority, self.altered[device])
            self.frames[device] = stack.enter_context(frames)
            self._start(device)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        for name, process in self._running.items():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
            code = stop(process)
            if code and (name, code) not in self._expected:
                self.unexpected.append(f"{name} ended with {code}: {self._last_words(name)}")

    def _start(self, name: str) -> None:
        work = self.work
        if name == SERVER:
            options = ("--run", "chaos", "--seed", 3, "--epochs", work.epochs, "--label-mode", work.label_mode)
            process = self._deployment.launch_server(*options, *work.options, strategy=work.strategy)
            self._listens = False
            self.starts += 1
        else:
            through = replace(self._deployment, port=self.links[name].port)
            process = through.start_device(name, "--label-mode", work.label_mode)
        self._running[name] = process

    def look(self) -> None:
        """See what became of the programs, and start again what ended before its work was done.

        Raises: TrainingError when the server cannot be started.
        """
        if not self._listens:
            process = self._running[SERVER]
            assert process.stdout is not None
            if process.poll() is None and select.select([process.stdout], [], [], 0.0)[0]:
                line = process.stdout.readline()
                if line.startswith("listening on "):
                    self._listens, self._deployment.port = True, int(line.rsplit(":", 1)[1])
        for name, process in list(self._running.items()):
            code = process.poll()
            if code in (None, 0):
                continue
            if (name, code) not in self._expected:
                self.unexpected.append(f"{name} ended with {code}: {self._last_words(name)}")
                self._say(self.unexpected[-1])
                if len(self.unexpected) > 20:
                    raise TrainingError("programs end again and again", f"see the logs in {self.root}")
            self._start(name)
        if self.uploading and self._deployment.newest_epoch():
            self._paced = False
            for link in self.links.values():
                link.weather.bytes_per_s = None

    def _last_words(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return " ".join(path.read_text().split("\n")[-4:])[-SHOWN_LETTERS:] if path.exists() else ""

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Look after the programs until a condition holds or all work is done.

        Raises: TrainingError when neither comes about within LIMIT_S.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while not holds() and not self.over:
            if time.monotonic() > deadline_s:
                raise TrainingError(f"waited {LIMIT_S:g} s for {what}", f"see the logs in {self.root}")
            self.look()
            time.sleep(POLL_S)

    @property
    def over(self) -> bool:
        """Whether every device was let go and has ended well."""
        return all(name in self._running and self._running[name].poll() == 0 for name in DEVICES)

    # -- who is there

    def pid(self, name: str) -> int:
        """Of a device's process, or the server's socket process."""
        return self._running[name].pid

    def is_running(self, name: str) -> bool:
        """Whether a program has not ended."""
        return self._running[name].poll() is None

    def children(self, name: str) -> list[int]:
        """Ids of the processes that a program has started."""
        try:
            return [child.pid for child in psutil.Process(self.pid(name)).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def expect(self, name: str, *codes: int) -> None:
        """A program may end with these exit codes, now or when the next faults have come already."""
        self._expected.extend((name, code) for code in codes)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone; what it started is left to its own devices."""
        process = self._running[name]
        if process.poll() is None:
            self.expect(name, -signal.SIGKILL)
            process.kill()
            process.communicate()

    @property
    def uploading(self) -> bool:
        """Whether no epoch is on record yet, where the work has an upload."""
        return self._paced and self.work.upload_bytes_per_s is not None

    def pace(self) -> float | None:
        """Bytes per second of an undisturbed link, now."""
        return self.work.upload_bytes_per_s if self._paced else None

    def set_upstream(self, device: str, altering: bool) -> None:
        """Let the device's next connections go through the proxy that may alter messages, or straight to the server."""
        self.links[device].upstream = self.frames[device].port if altering else self._deployment.port

    # -- how far the work is

    def messages(self) -> int:
        """Messages of the devices that the server has on record as received; never falls."""
        found = self._received()
        if found is not None:
            self._counted += self._newest if found < self._newest else 0  # a ledger that was made anew
            self._newest = found
        return self._counted + self._newest

    def _received(self) -> int | None:
        path = self.root / "runs" / "chaos" / "state.sqlite"
        if not path.exists():
            return None
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as ledger:
                found = ledger.execute("SELECT sum(received_seq) FROM sessions").fetchone()[0]
        except sqlite3.Error:  # killed while it was being made, or damaged on purpose
            return None
        return None if found is None else int(found)

    def finish(self) -> None:
        """Look on until all work is done. Raises: as `wait`."""
        while not self.over:
            before = self.messages()
            self.wait(lambda: self.messages() > before, "another message")  # noqa: B023 - called at once
