"""The product's commands as processes: the server, and both devices of the demo's site at once.

What is run with which settings is the story's business (demo.py); these functions start, wait, and read reports.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import DeviceError, ExportError, TrainingError
from tools.demo_data import DEVICES

BIN = Path(sys.executable).parent
STOP_S = 60.0


@dataclass(frozen=True)
class Site:
    """Both devices: the run's folder, their class list, and the least noise they accept."""

    root: Path
    classes: tuple[str, ...]
    kappa_floor: float


def command(*words: object) -> None:
    """Run a command to its end, its progress on our stderr. Raises: ExportError."""
    texts = [str(word) for word in words]
    code = subprocess.run(texts, stdout=2).returncode
    if code:
        raise ExportError(f"{Path(texts[0]).name} ended with exit code {code}", "see the lines above")


@contextmanager
def server(root: Path, strategy: str, kappa: float, seed: int) -> Iterator[str]:
    """server-run; gives its URL, stops it with SIGTERM. Raises: TrainingError."""
    keys, log = root / "keys", root / f"server-{strategy}-{kappa:g}.log"
    words = [
        BIN / "server-run", "--strategy", strategy, "--backend", root / "front.backend", "--listen", "localhost:0",
        "--roster", keys / "roster", "--certificate", keys / "server.pem", "--certificate-key", keys / "server.key",
        "--runs", root / "runs", "--run", f"{strategy}-{kappa:g}", "--kappa", kappa, "--seed", seed,
    ]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("listening on ")), None)
        if ready is None:
            raise TrainingError(f"the server did not start: {log.read_text().strip()}", f"see {log}")
        yield ready.split()[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)


def devices(site: Site, url: str, folders: tuple[Path, ...], *extra: str) -> list[dict[str, Any]]:
    """edge-run on both devices at once; their reports. Raises: DeviceError."""
    (site.root / "classes.txt").write_text("\n".join(site.classes) + "\n")
    started = [_start(site, url, device, folder, extra) for device, folder in zip(DEVICES, folders, strict=True)]
    reports = []
    for device, process in zip(DEVICES, started, strict=True):
        output, _ = process.communicate()
        if process.returncode:
            said = " ".join((site.root / f"{device}.log").read_text().strip().splitlines()[-2:])
            raise DeviceError(f"{device} ended with exit code {process.returncode}: {said}", f"see {site.root}")
        reports.append(json.loads(output))
    return reports


def preview(site: Site, device: str, images: Sequence[Path], kappa: float) -> dict[str, Any]:
    """edge-run --preview on one device, offline; its document. Raises: DeviceError."""
    words = [
        BIN / "edge-run", "--engine", site.root / "front", "--state", site.root / "state" / device,
        "--trust", site.root / "keys" / "devices" / device / "publisher.pub", "--kappa-floor", kappa, "--threads", 1,
        "--format", "json", "-o", site.root / f"preview-{kappa:g}", "--preview", *images,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DeviceError(f"edge-run --preview ended with exit code {done.returncode}", "see the lines above")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _start(site: Site, url: str, device: str, folder: Path, extra: tuple[str, ...]) -> subprocess.Popen[str]:
    keys = site.root / "keys" / "devices" / device
    words = [
        BIN / "edge-run", "--engine", site.root / "front", "--data", folder, "--server", url,
        "--trust", keys / "publisher.pub", "--ca", keys / "ca.pem", "--key", keys / "device.key", "--name", device,
        "--state", site.root / "state" / device, "--site-secret", keys / "site.secret",
        "--classes", site.root / "classes.txt", "--kappa-floor", site.kappa_floor, "--threads", 1,
        "--max-releases", 2,  # the demo releases each image at two noise strengths; a site would not
        "--format", "json", *extra,
    ]  # fmt: skip
    with (site.root / f"{device}.log").open("a") as log:
        return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=log, text=True)
