"""Deployments of Flower and NVFlare for the comparisons: their own programs as processes of this machine, over TLS.

Each runs in an interpreter of its own that has the package; nothing of them is imported or copied here. What runs on a
deployment is an app of this folder (`bench_wire_flower` and the like), which is handed over as their users do it.
Stops what it started, by process id, with all that it started in turn (Linux: from /proc).

    Flower    SuperLink with our certificate, SuperNodes with our CA and no keys of their own, `flwr run`
    NVFlare   a POC provisioned by `nvflare poc prepare`, mTLS, its start scripts, `nvflare job submit`
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from contract.errors import DeviceError, UsageError

START_S, STOP_S, POLL_S = 300.0, 20.0, 0.05
ASK_S = 30.0  # between two questions whether a run is over
PACKAGES = {"flower": "flwr", "nvflare": "nvflare"}
LINES_SHOWN = 3
NOT_GIVEN = "no --{name} PYTHON was given, an interpreter that has {package}"
_FLOWER_APP = """\
[project]
name = "comparison"
version = "1.0.0"
description = "comparison"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "cutlayer"

[tool.flwr.app.components]
serverapp = "{module}:server_app"
clientapp = "{module}:client_app"

[tool.flwr.app.config]
"""


def version_of(name: str, python: str) -> str:
    """The version of a peer's package that an interpreter has.

    Raises: UsageError when the interpreter cannot be started, or lacks the package.
    """
    package = PACKAGES[name]
    cure = f"make a virtual environment, pip install {package} into it, and give --{name} its bin/python"
    program = f"from importlib import metadata; print('version', metadata.version('{package}'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--{name} {python} cannot be run: {error}", cure) from error
    words = done.stdout.split()
    if done.returncode or len(words) != 2 or words[0] != "version":
        raise UsageError(f"--{name} {python} is no Python with {package}", cure)
    return words[1]


def stop_on_sigterm() -> None:
    """From now on SIGTERM ends this program as an exception does, so that what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Deployment:
    """Programs of a peer in a folder, which holds all that they write, and their logs."""

    def __init__(self, folder: Path, python: str, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder, self._bin = folder, Path(python).parent.absolute()
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept.pop("PYTHONPATH", None)  # ours
        self._environment = kept | environment | {
            "HOME": str(folder), "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        }  # fmt: skip
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.submitted = ""  # what was said when the run or job was handed over

    def start(self, name: str, *words: object) -> None:
        """A program that stays, and logs to NAME.log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                [self._bin / str(words[0]), *map(str, words[1:])], cwd=self.folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def processes(self, name: str) -> list[int]:
        """Ids of a program that was started, and of what it has running."""
        pid = self._started[name].pid
        return [pid, *descendants(pid)]

    def run(self, *words: object, timeout_s: float = START_S) -> str:
        """A command to its end; what it said. Raises: DeviceError when it fails."""
        try:
            done = subprocess.run(
                [self._bin / str(words[0]), *map(str, words[1:])], cwd=self.folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=timeout_s,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"{words[0]} {words[1]}: {error}", "run it by hand to see what it waits for") from error
        if done.returncode:
            said = " / ".join(done.stdout.strip().splitlines()[-LINES_SHOWN:])
            raise DeviceError(f"{words[0]} {words[1]} ended with {done.returncode}: {said}", "run it by hand")
        return done.stdout

    def wait_for(self, port: int) -> None:
        """Until a program listens there. Raises: DeviceError when it ends, or takes too long."""
        deadline_s = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            if any(program.poll() is not None for program in self._started.values()) or time.monotonic() > deadline_s:
                logs = {path.name: path.read_text(errors="replace") for path in self.folder.glob("*.log")}
                said = "; ".join(f"{name}: {text.strip()[-200:]}" for name, text in logs.items())
                raise DeviceError(f"a program does not listen on port {port}: {said}", "run it by hand")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End every program, and whatever it started."""
        trees = [pid for program in self._started.values() for pid in descendants(program.pid)]
        for program in self._started.values():
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        for program in self._started.values():
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline_s - time.monotonic()))
        for pid in {*trees, *(program.pid for program in self._started.values() if program.poll() is None)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self._started.values():
            program.wait()


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they started; none where /proc does not tell."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in descendants(child)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def start_flower(
    folder: Path, python: str, keys: Path, app: Path, clients: int, config: Mapping[str, str]
) -> Deployment:
    """SuperLink, SuperNodes 0 to `clients` - 1, and a run of the app with this configuration.

    Raises: DeviceError when a program or the run does not start.
    """
    home = folder / ".flwr"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    flower = Deployment(folder, python, quiet)
    try:
        port = free_port()
        tls = ("--ssl-certfile", keys / "server.pem", "--ssl-keyfile", keys / "server.key",
               "--ssl-ca-certfile", keys / "ca.pem")  # fmt: skip
        flower.start("superlink", "flower-superlink", *tls, "--port", port, "--disable-runtime-dependency-installation")
        flower.wait_for(port)
        link = ("--root-certificates", keys / "ca.pem", "--superlink", f"127.0.0.1:{port}")
        for number in range(clients):
            own = ("--port", free_port(), "--node-config", f"partition-id={number}")
            flower.start(f"supernode-{number}", "flower-supernode", *link, *own)
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{keys / "ca.pem"}"\n'
        )
        (folder / "app").mkdir()
        (folder / "app" / app.name).write_bytes(app.read_bytes())
        settings = "".join(f'{name} = "{value}"\n' for name, value in config.items())
        (folder / "app" / "pyproject.toml").write_text(_FLOWER_APP.format(module=app.stem) + settings)
        flower.submitted = flower.run("flwr", "run", folder / "app", "here")
    except BaseException:
        flower.close()
        raise
    return flower


def wait_for_flower(flower: Deployment, result: Path, seconds: float) -> str:
    """Until its run is over, which leaves a file; how Flower says that it ended. Raises: DeviceError when it is not.

    Flower is seldom asked, as its command is a heavy program on a small machine.
    """
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        ask_s = time.monotonic() + ASK_S
        while not result.exists() and time.monotonic() < ask_s:
            time.sleep(POLL_S)
        (run,) = json.loads(flower.run("flwr", "ls", "here", "--format", "json"))["runs"]
        if str(run["status"]).startswith("finished"):
            return str(run["status"])
    raise DeviceError(f"the run is not over after {seconds:g} s", "look into the logs of the SuperNodes")


def wait_for_nvflare(nvflare: Deployment, seconds: float) -> tuple[str, Path]:
    """Until its job is over; how NVFlare says that it ended, and the folder of its results. Raises: DeviceError."""
    (job,) = re.findall(r"job_id: (\S+)", nvflare.submitted)
    (kit,) = (nvflare.folder / "poc").glob("*/prod_00/admin@nvidia.com")
    wait = ("nvflare", "--format", "json", "job", "wait", job, "--timeout", seconds, "--startup-kit", kit)
    said = nvflare.run(*wait, timeout_s=seconds + START_S)
    nvflare.run("nvflare", "job", "download", job, "-o", nvflare.folder / "results", "--startup-kit", kit)
    (document,) = [line for line in said.splitlines() if line.startswith("{")]  # the others are progress
    return str(json.loads(document)["data"]["status"]), nvflare.folder / "results"


def start_nvflare(folder: Path, python: str, app: Path, clients: int, config: Mapping[str, str]) -> Deployment:
    """A POC's server and its clients site-1 to site-`clients`, and a job that the app makes.

    The app is run as a program with `--KEY VALUE` of `config`, and writes the job's folder below `job/`.
    Raises: DeviceError.
    """
    nvflare = Deployment(folder, python, {"NVFLARE_POC_WORKSPACE": str(folder / "poc")})
    try:
        (folder / app.name).write_bytes(app.read_bytes())
        words = [word for name, value in config.items() for word in (f"--{name}", value)]
        nvflare.run("python", app.name, "--clients", clients, "--job", "job", *words)
        nvflare.run("nvflare", "poc", "prepare", "-n", clients)
        project, port = folder / "poc" / "project.yml", free_port()
        (folder / "project.yml").write_text(project.read_text().replace("8002", str(port)))
        nvflare.run("nvflare", "poc", "prepare", "-i", folder / "project.yml", "--force")
        (kit,) = (folder / "poc").glob("*/prod_00")
        nvflare.start("server", kit / "server" / "startup" / "sub_start.sh", "--once")
        nvflare.wait_for(port)
        for number in range(1, clients + 1):
            nvflare.start(f"site-{number}", kit / f"site-{number}" / "startup" / "sub_start.sh", "--once")
        (job,) = (folder / "job").iterdir()
        admin = ("--startup-kit", kit / "admin@nvidia.com")
        nvflare.submitted = nvflare.run("nvflare", "--connect-timeout", START_S, "job", "submit", "-j", job, *admin)
    except BaseException:
        nvflare.close()
        raise
    return nvflare
