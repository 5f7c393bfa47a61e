"""A new package in the place of the current one, in two slots: tried beside it on this device, and only then current.

    packages/<digest>/   each package; `current` and `previous` point at two of them, and `ready` at one that the server
                         sent (`taking`): it becomes current once a server asks for it
             quarantine.json   packages that failed here, with the reason: they are not tried again
             attempt.json      which one is being tried, and how often: written before the first image, so that one that
                               stops the device itself is found out by the next call

Verifying is `install`'s part. Tried is what a run does: golden vectors, then pictures of this site, finite, and neither
slower nor hungrier than a factor of the package before. A run uses what is current with
--engine STATE/packages/current.
The state's lock is held meanwhile: no run and no measurement is disturbed, and none disturbs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.errors import (
    CutlayerError,
    DataError,
    DeviceError,
    EngineError,
    PackageError,
    TrialError,
    why,
)
from contract.image_folder import scan
from contract.images import load_pixels, normalise, resize
from contract.manifest import MANIFEST_NAME, Manifest, digest, from_bytes
from contract.signature import PublicKey
from edge_runtime.engines import Engine
from edge_runtime.install import (
    ATTEMPT,
    CURRENT,
    PREVIOUS,
    QUARANTINE,
    READY,
    Installed,
    attempted,
    current_name,
    point,
    quarantined,
    shed_others,
    stage,
)
from edge_runtime.state import write_durably

ATTEMPTS_MOST = 2  # that ended with the device rather than with a verdict
MEASURED_MOST = 3  # times before a package is found too slow: something else may have run meanwhile
OpenFrontend = Callable[[Path], Engine]


@dataclass(frozen=True)
class Trial:
    """What is tried, and what is put up with, as factors of the package before."""

    images: int = 16
    slower: float = 1.5
    hungrier: float = 1.5


@dataclass(frozen=True)
class Cost:
    """Of one picture; joules None where no meter tells."""

    seconds: float
    energy_j: float | None


@dataclass(frozen=True)
class Updated:
    """What is current now."""

    version: int
    digest: str
    before: str | None
    slower: float | None  # times the package before; None: there was none, or it could not be compared
    hungrier: float | None


def update(
    source: Path,
    packages: Path,
    trusted: Mapping[str, PublicKey],
    open_frontend: OpenFrontend,
    data: Path,
    trial: Trial,
    energy_now: Callable[[], float | None],
    say: Callable[[str], None],
    slot: str = CURRENT,
    on_picture: Callable[[], None] = lambda: None,
) -> Updated:
    """Verify, try, and make it current, or `ready`; whatever fails the trial is put into quarantine and nothing else
    changes.

    Raises: SignatureError, RollbackError, PackageError when it is not let in; EngineError when it fails the trial;
        DataError where there is no picture to try it on; DeviceError when the disk refuses.
    """
    name = _digest_of(source)
    if name is not None and _attempts(packages, name) >= ATTEMPTS_MOST:
        _quarantine(packages, name, f"the device stopped {ATTEMPTS_MOST} times while it was tried")
    if name is not None:
        _note_attempt(packages, name)
    try:
        staged = stage(source, packages, trusted, open_frontend, say, same_kind=True)
        before = current_name(packages)
        slower, hungrier = _try(staged, packages, before, open_frontend, data, trial, energy_now, on_picture)
    except EngineError as error:
        if name is not None:
            _quarantine(packages, name, error.cause)
        shed_others(packages)
        reason = error.reason if isinstance(error, TrialError) else "engine"
        raise TrialError(
            f"rolled back: {error.cause}", f"{error.cure}; the package before stays current", reason
        ) from error
    except (CutlayerError, KeyboardInterrupt):  # it was not let in, or could not be tried: nothing is known of it
        forget_attempt(packages)
        raise
    put(packages, staged.folder.name, slot)
    (packages / ATTEMPT).unlink(missing_ok=True)
    return Updated(staged.manifest.version, staged.digest.hex(), before, slower, hungrier)


def put(packages: Path, name: str, slot: str) -> None:
    """Make a package that is here the current one, and keep the one before; or the one that is ready.

    Another that was ready goes altogether: it was never current, so nothing is to stay above its version.
    Raises: DeviceError when the disk refuses.
    """
    ready, current = current_name(packages, READY), current_name(packages)
    with _disk(packages):
        if slot == CURRENT:
            if current not in (None, name):
                point(packages, PREVIOUS, str(current))
            point(packages, CURRENT, name)
        elif name != current:
            point(packages, READY, name)
        if ready is not None and ready == current_name(packages):
            (packages / READY).unlink(missing_ok=True)
        elif ready not in (None, name, current):
            (packages / str(ready) / MANIFEST_NAME).unlink(missing_ok=True)  # first: half a package bars no version
            shutil.rmtree(packages / str(ready), ignore_errors=True)
            if slot == CURRENT:
                (packages / READY).unlink(missing_ok=True)
        shed_others(packages)


def waiting(packages: Path) -> str | None:
    """The package that is ready; None where there is none, or a power cut left its link alone."""
    ready = current_name(packages, READY)
    return ready if ready is not None and (packages / ready / MANIFEST_NAME).exists() else None


@contextmanager
def _disk(packages: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DeviceError(f"{packages} cannot be changed: {why(error, packages)}", "make room on the disk") from error


def go_back(packages: Path, reason: str) -> tuple[str, str]:
    """Make the package before current again, and put the present one into quarantine; their folders' names, in that
    order.

    Raises: PackageError where there is none; DeviceError when the disk refuses.
    """
    before, present = current_name(packages, PREVIOUS), current_name(packages)
    if before is None or present is None or before == present:  # the same: a switch was cut short, and is none to ban
        raise PackageError("there is no package to go back to", "only edge-run update keeps the one before")
    with _disk(packages):
        point(packages, CURRENT, before)
        (packages / PREVIOUS).unlink(missing_ok=True)
        _quarantine(packages, present, reason)
        shed_others(packages)
    return before, present


def _try(
    staged: Installed,
    packages: Path,
    before: str | None,
    open_frontend: OpenFrontend,
    data: Path,
    trial: Trial,
    energy_now: Callable[[], float | None],
    on_picture: Callable[[], None],
) -> tuple[float | None, float | None]:
    """How much slower and hungrier it is. Raises: EngineError when that, or what it computes, is not put up with."""
    if not staged.manifest.cuts:
        return None, None
    pictures = readable(data, staged.manifest.image.max_pixels, trial.images)
    if not pictures:
        raise DataError(f"there is no picture in {data} to try the package on", "give --data the images of this site")
    old_folder = None if before in (None, staged.folder.name) else packages / str(before)
    for _ in range(MEASURED_MOST):  # one engine at a time: a small device has no room for two
        new = measure(open_frontend(staged.onnx), staged.manifest, pictures, energy_now, on_picture)
        if old_folder is None:
            return None, None
        try:
            manifest = from_bytes((old_folder / "manifest.json").read_bytes())
            frontend = open_frontend(old_folder / manifest.cuts[0].onnx)
            old = measure(frontend, manifest, pictures, energy_now, on_picture)
        except (CutlayerError, OSError, IndexError):
            return None, None  # it cannot be compared with what does not run
        if new.seconds <= trial.slower * old.seconds:
            break
    slower = new.seconds / old.seconds
    metered = new.energy_j is not None and old.energy_j is not None and old.energy_j > 0.0
    hungrier = new.energy_j / old.energy_j if metered else None  # type: ignore[operator]
    if slower > trial.slower:
        raise TrialError(
            f"an image takes {slower:.2f} times as long as with the package before, more than {trial.slower:g}",
            "export a cheaper split, or raise --slower",
            "slower",
        )
    if hungrier is not None and hungrier > trial.hungrier:
        raise TrialError(
            f"an image takes {hungrier:.2f} times the energy of the package before, more than {trial.hungrier:g}",
            "export a cheaper split, or raise --hungrier",
            "hungrier",
        )
    return slower, hungrier


def readable(data: Path, max_pixels: int, most: int) -> list[Path]:
    """The first pictures that can be decoded. Raises: DataError where there is no such folder."""
    found: list[Path] = []
    for image in scan(data, None).images:
        with suppress(DataError):
            load_pixels(image.path, image.relative, max_pixels)
            found.append(image.path)
        if len(found) == most:
            break
    return found


def measure(
    engine: Engine,
    manifest: Manifest,
    pictures: Sequence[Path],
    energy_now: Callable[[], float | None],
    on_picture: Callable[[], None] = lambda: None,
) -> Cost:
    """Run pictures one by one; the first of them twice, as it pays for what is made once.

    Raises: EngineError when a token is not finite, or all pictures give the same.
    """
    rule, tokens = manifest.image, []
    began_s, began_j = 0.0, None
    for number, path in enumerate((pictures[0], *pictures)):
        batch = normalise([resize(load_pixels(path, path.name, rule.max_pixels), rule)], rule)
        if number == 1:
            began_s, began_j = time.monotonic(), energy_now()
        tokens.append(engine.run(batch))
        on_picture()
        if not np.isfinite(tokens[-1]).all():
            raise TrialError(
                f"picture {number} of the site gives values that are not finite", "export the package again",
                "not-finite",
            )  # fmt: skip
    seconds, ended_j = time.monotonic() - began_s, energy_now()
    if len(pictures) > 1 and all(np.array_equal(each, tokens[0]) for each in tokens):
        raise TrialError("all pictures of the site give the same tokens", "export the package again", "same-tokens")
    joules = None if began_j is None or ended_j is None else (ended_j - began_j) / len(pictures)
    return Cost(seconds / len(pictures), joules)


def _digest_of(source: Path) -> str | None:
    try:
        return digest((source / "manifest.json").read_bytes()).hex()
    except OSError:
        return None  # `stage` says what is missing


def _attempts(packages: Path, name: str) -> int:
    if attempted(packages) != name:
        return 0
    try:
        return int(json.loads((packages / ATTEMPT).read_bytes())["count"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def forget_attempt(packages: Path) -> None:
    """Nothing stays of a package that was neither taken nor found bad: its version must not bar the current one."""
    name = attempted(packages)
    if name is not None and name not in {current_name(packages, link) for link in (CURRENT, PREVIOUS, READY)}:
        shutil.rmtree(packages / name, ignore_errors=True)
    (packages / ATTEMPT).unlink(missing_ok=True)


def _note_attempt(packages: Path, name: str) -> None:
    if attempted(packages) not in (None, name):
        forget_attempt(packages)
    noted = {"digest": name, "count": _attempts(packages, name) + 1}
    write_durably(packages / ATTEMPT, json.dumps(noted).encode())


def _quarantine(packages: Path, name: str, reason: str) -> None:
    if name != current_name(packages):  # which was tried again, and without which no run would start
        write_durably(packages / QUARANTINE, json.dumps({**quarantined(packages), name: reason[:300]}).encode())
    (packages / ATTEMPT).unlink(missing_ok=True)
