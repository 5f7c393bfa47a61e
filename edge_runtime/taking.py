"""Taking a package that the server offers: fetched, tried as `edge-run update` tries one, and said what became of it.

It does not become current then: the run that is on needs the one before. It waits as `ready`, and is current from the
moment that a server's run asks for it. Only a device that runs what is current (--engine STATE/packages/current) takes
packages; --trust says whose. What the server hears is a word and the name of a check: times and joules stay here.

    STATE/verdict.json   what is to be told and was not yet
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from pathlib import Path

from websockets.exceptions import WebSocketException

from contract.canonical import decode, encode, from_json, to_json
from contract.errors import (
    ConfigError,
    CutlayerError,
    DataError,
    DeviceError,
    KindError,
    OtherNameError,
    PackageError,
    ProtocolError,
    RollbackError,
    SignatureError,
    TrialError,
    WeakerError,
)
from contract.manifest import LIMITS, MANIFEST_NAME, Manifest, digest, from_bytes
from contract.messages import PIECE_BYTES, Offer, Reason, Verdict
from contract.signature import PublicKey, key_id, load_public
from edge_runtime.allowance import Allowance, BudgetSpent, least_mb, open_allowance
from edge_runtime.config import DeviceConfig
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.dialling import Endpoint
from edge_runtime.engines import open_engine
from edge_runtime.fetching import Fetched
from edge_runtime.identity import read_identity
from edge_runtime.install import (
    CURRENT,
    READY,
    current_name,
    quarantined,
    read_limited,
    refuse_other_kind,
    refuse_other_name,
    refuse_quarantined,
    refuse_rollback,
)
from edge_runtime.meters import open_plug, probe, read_model
from edge_runtime.package_choice import choose_package
from edge_runtime.reconnect import BUILT, explain
from edge_runtime.service import Notifier
from edge_runtime.state import State, open_state, read_or_set_aside, write_durably
from edge_runtime.threads import in_worker
from edge_runtime.update import Trial, forget_attempt, put, update, waiting
from edge_runtime.visit import Caller, visit
from edge_runtime.weaker import refuse_weaker, refuse_weaker_parts

VERDICT_FILE, FETCHED = "verdict.json", "fetched"
VERDICT_BYTES = 4096


class Taken(str, Enum):
    """What a call on the server came to."""

    SWITCHED = "switched"  # another package is current now
    READY = "ready"  # a package waits
    NOTHING = "nothing"
    LATER = "later"  # others try it first
    FAILED = "failed"  # the server could not be heard to the end


def takes_packages(config: DeviceConfig) -> bool:
    """Whether this device runs what is current, so that a package that comes would ever be used."""
    try:
        folder = choose_package(config.engine).folder
    except ConfigError:
        return False
    return folder.name == CURRENT and os.path.realpath(folder.parent) == os.path.realpath(config.state / "packages")


async def take(config: DeviceConfig, say: Callable[[str], None]) -> Taken:
    """Call on the server: say what is to be said, take what it offers, make current what its run wants.

    Raises: DeviceError where the state is in use. Nothing else: a run does not end because an update did not come.
    """
    state = open_state(config.state)
    allowance = open_allowance(state.root, config.max_mb_per_day, BUILT, say)
    try:
        return await _Taker(config, state, say, allowance).call()
    except BudgetSpent:
        assert allowance is not None
        say(f"no package was taken: {allowance.in_words()[0]}")
        return Taken.FAILED
    except (OSError, ssl.SSLError, WebSocketException, asyncio.TimeoutError, ProtocolError) as error:
        told = explain(error, config.server, datetime.now(timezone.utc), BUILT)
        say(f"no package was taken: {told.cause} ({told.cure})")
        return Taken.FAILED
    except CutlayerError as error:
        say(f"no package was taken: {error.cause} ({error.cure})")
        return Taken.FAILED
    except asyncio.CancelledError:
        forget_attempt(state.packages)  # stopped on purpose: that says nothing of the package
        raise
    finally:
        if allowance is not None:
            allowance.close()
        state.close()


class _Taker:
    """One call."""

    def __init__(
        self, config: DeviceConfig, state: State, say: Callable[[str], None], allowance: Allowance | None
    ) -> None:
        self._config, self._state, self._say = config, state, say
        publisher = load_public(config.trust)
        self._trusted: Mapping[str, PublicKey] = {key_id(publisher): publisher}
        self._dog = Notifier()
        self._offered = ""
        self._allowance = allowance
        self._caller = Caller(
            Endpoint(config.server, config.ca, BUILT, config.certificate, config.certificate_key),
            read_identity(config.name, config.key),
            current_name(state.packages),
        )

    async def call(self) -> Taken:
        told = self._untold()
        try:
            done = await visit(self._caller, told, self._begin, self._on_bytes)
            verdict = None if done.fetched is None else await in_worker(partial(self._try, done.fetched))
        except PackageError as error:  # the manifest that came is not let in
            self._say(f"the package that the server offers is refused: {error.cause}")
            verdict = Verdict(self._offered, "refused", _name_of(error))
        except DeviceError as error:  # the disk is full: another may try it
            if not self._offered:
                raise
            self._say(f"the package that the server offers cannot be taken: {error.cause} ({error.cure})")
            shutil.rmtree(self._state.root / FETCHED, ignore_errors=True)
            verdict = Verdict(self._offered, "not-tried", "device")
        if told is not None:
            self._told()
        if verdict is not None:
            write_durably(self._path, to_json(encode(verdict)))
            done = await visit(self._caller, verdict, self._begin, self._on_bytes)
            self._told()
        if waiting(self._state.packages) == done.wanted and self._may_become_current(done.wanted):
            put(self._state.packages, done.wanted, CURRENT)
            self._say(f"package {done.wanted[:12]} is current: the server's run is made for it")
            return Taken.SWITCHED
        if verdict is not None and verdict.verdict == "ok":
            return Taken.READY
        return Taken.LATER if done.later else Taken.NOTHING

    @property
    def _path(self) -> Path:
        return self._state.root / VERDICT_FILE

    def _untold(self) -> Verdict | None:
        return read_or_set_aside(self._path, lambda data: decode(Verdict, from_json(data, VERDICT_BYTES)), self._say)

    def _told(self) -> None:
        self._path.unlink(missing_ok=True)

    def _on_bytes(self, count: int) -> None:
        """What came or goes, of a connection as well. Raises: BudgetSpent."""
        self._dog.tell("WATCHDOG=1")
        if self._allowance is not None:
            allowed = self._allowance.allows(count)
            self._allowance.count(count)
            if not allowed:
                self._allowance.exhaust()
                raise BudgetSpent

    def _begin(self, offer: Offer) -> Fetched | Verdict:
        """What is known of an offer already, or where its files go."""
        assert offer.package is not None
        self._offered, packages = offer.package, self._state.packages
        if offer.package in (current_name(packages), waiting(packages)):
            return Verdict(offer.package, "ok", "")
        if offer.package in quarantined(packages):
            return Verdict(offer.package, "refused", "quarantined")
        largest_bytes = min(offer.size_bytes, PIECE_BYTES)
        if self._allowance is not None and not self._allowance.allows_ever(largest_bytes):
            limit_mb, piece_mb = self._allowance.limit_bytes / 1e6, largest_bytes / 1e6
            raise DeviceError(  # every day would be spent on it, and it would never arrive
                f"the {limit_mb:g} MB of a day never let a piece of {piece_mb:.2f} MB through",
                f"give --max-mb-per-day {least_mb(largest_bytes):g} at the least",
            )
        self._say(f"fetching package version {offer.version} ({offer.package[:12]}, {offer.size_bytes / 1e6:.1f} MB)")
        admit = partial(self._admit, bytes.fromhex(offer.package))
        return Fetched(self._state.root / FETCHED, offer.package, self._trusted, admit)

    def _may_become_current(self, name: str) -> bool:
        """It was let in beside what was current then; another may be current now, or the settings others."""
        packages = self._state.packages
        try:
            manifest = from_bytes(read_limited(packages / name / MANIFEST_NAME, LIMITS.size_bytes))
            refuse_quarantined(bytes.fromhex(name), packages)
            self._admit(bytes.fromhex(name), manifest)
            refuse_weaker_parts(packages / name, packages)
        except PackageError as error:
            self._say(f"package {name[:12]} does not become current: {error.cause} ({error.cure})")
            return False
        return True

    def _admit(self, package_digest: bytes, manifest: Manifest) -> None:
        refuse_other_name(manifest, self._state.packages, self._config.update_names)
        refuse_rollback(manifest, package_digest, self._state.packages)
        refuse_other_kind(manifest, self._state.packages)
        refuse_weaker(manifest, self._state.packages, self._config)

    def _try(self, folder: Path) -> Verdict:
        """The trial of `edge-run update`, on a worker's thread."""
        config, packages = self._config, self._state.packages
        name = digest((folder / MANIFEST_NAME).read_bytes()).hex()
        engine, threads = choose_package(config.engine).engine, config.threads or usable_cpus(allowed_affinity())
        meter = probe(plug=open_plug(config.plug, config.plug_account), model=read_model(config.power_model)).meter
        try:
            refuse_weaker_parts(folder, packages)
            update(
                folder, packages, self._trusted, lambda path: open_engine(engine, path, threads), config.data, Trial(),
                lambda: meter.read(time.monotonic()).energy_j, self._say, READY, lambda: self._dog.tell("WATCHDOG=1"),
            )  # fmt: skip
        except CutlayerError as error:
            self._say(f"package {name[:12]}: {error.cause} ({error.cure})")
            stopped = isinstance(error, PackageError) and name in quarantined(packages)
            return _verdict(name, error, stopped)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._say(f"package {name[:12]} passed its trial; it becomes current when the server's run asks for it")
        return Verdict(name, "ok", "")


def _verdict(package: str, error: CutlayerError, stopped: bool) -> Verdict:
    if isinstance(error, TrialError):
        reason = "slower" if error.reason == "hungrier" else error.reason  # energy stays here, this one bit of it too
        return Verdict(package, "rolled-back", reason)  # type: ignore[arg-type]  # names of checks
    if stopped:
        return Verdict(package, "rolled-back", "stopped")
    if isinstance(error, PackageError):
        return Verdict(package, "refused", _name_of(error))
    return Verdict(package, "not-tried", "no-pictures" if isinstance(error, DataError) else "device")


def _name_of(error: PackageError) -> Reason:
    return (
        "older" if isinstance(error, RollbackError)
        else "signature" if isinstance(error, SignatureError)
        else "kind" if isinstance(error, KindError)
        else "weaker" if isinstance(error, WeakerError)
        else "name" if isinstance(error, OtherNameError)
        else "damaged"
    )  # fmt: skip
