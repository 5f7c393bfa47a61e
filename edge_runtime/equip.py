"""Everything a run needs, made ready in one go: state, secrets, package, images, engine, worker.

It decides little: each part's rules are in its own file. The conversation with the server is left to `run`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from contract.console import Progress, progress
from contract.errors import ConfigError, EngineError, suggest
from contract.keyed_noise import class_list_hash, permutation
from contract.signature import PublicKey, key_id, load_public
from edge_runtime.config import DeviceConfig, LocalConfig
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.data import Dataset
from edge_runtime.delivery import Stopped, check_stop
from edge_runtime.engines import engine_names, offered_engines, open_engine
from edge_runtime.equip_engine import EngineFacts, engine_facts, installing_engine, open_chosen
from edge_runtime.equip_images import Purpose, find_images, remember_classes
from edge_runtime.head import Head
from edge_runtime.install import Installed, install
from edge_runtime.label_keeper import LabelKeeper
from edge_runtime.local_answers import Answerer, Learner, read_record
from edge_runtime.local_record import Basis
from edge_runtime.meters import open_plug, probe, read_model
from edge_runtime.package_choice import DEFAULT_ENGINE, PackageChoice, choose_package
from edge_runtime.part_worker import PartWorker
from edge_runtime.pipeline import Frontend
from edge_runtime.reconnect import BUILT
from edge_runtime.release_ledger import ReleaseLedger
from edge_runtime.stages import Stages
from edge_runtime.state import SECRET_BYTES, State, open_secret, open_state, read_secret
from edge_runtime.stop_signals import STOP_S, StopSignals
from edge_runtime.terms import Terms, device_terms, protection
from edge_runtime.threads import in_worker
from edge_runtime.worker import Bench, Surroundings, Worker


@dataclass(frozen=True)
class Equipment:
    """All that `run` drives."""

    config: LocalConfig
    purpose: Purpose
    state: State
    choice: PackageChoice
    installed: Installed
    terms: Terms
    dataset: Dataset
    wire_labels: NDArray[np.int64]  # what each class is called on the wire
    engine: EngineFacts
    codes_changed: float | None
    worker: Worker | PartWorker
    head_of: Callable[[str], Head | None]  # the device's own head of a run
    stages: Stages
    ledger: ReleaseLedger
    learner: Learner | None = None  # of labelled images, before a frontend
    answerer: Answerer | None = None  # of images to be predicted, where this device has learned

    @property
    def predicts_alone(self) -> bool:
        """Whether the whole model is here, so that a prediction needs no server."""
        training = self.installed.training
        return self.purpose == "infer" and training is not None and training.whole_model

    @property
    def clock_floor(self) -> datetime:
        """A time that has passed for certain: this build, and the signing of the package."""
        created = datetime.strptime(self.installed.manifest.created[:19], "%Y-%m-%dT%H:%M:%S")
        return max(BUILT, created.replace(tzinfo=timezone.utc) - timedelta(days=1))  # a day covers any time zone

    def remember_site(self) -> None:
        """Keep the class list for later predictions."""
        remember_classes(self.state, self.dataset.classes)


def equip(config: LocalConfig, purpose: Purpose, stop: threading.Event, say: Callable[[str], None]) -> Equipment:
    """Make everything ready, the cheap checks first; the caller closes `state`.

    Raises: CutlayerError of the part that is not ready; Stopped.
    """
    publisher = load_public(config.trust)
    choice = choose_package(config.engine)
    check_required(choice, config.require)
    if choice.fallback_reason:
        say(choice.fallback_reason)
    state = open_state(config.state)
    try:
        return equip_state(config, purpose, state, choice, {key_id(publisher): publisher}, stop, say)
    except BaseException:
        state.close()
        raise


async def equip_unless_stopped(
    config: LocalConfig, purpose: Purpose, signals: StopSignals, say: Callable[[str], None]
) -> Equipment | None:
    """`equip` on a thread; None when a signal came first, even where the thread is deep in native code."""
    ready = in_worker(lambda: equip(config, purpose, signals.thread_asked, say))
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait((ready, asked), return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await asyncio.wait((ready,), timeout=STOP_S)
    asked.cancel()
    try:
        return ready.result() if ready.done() else None
    except Stopped:
        return None


def equip_state(
    config: LocalConfig,
    purpose: Purpose,
    state: State,
    choice: PackageChoice,
    trusted: Mapping[str, PublicKey],
    stop: threading.Event,
    say: Callable[[str], None],
) -> Equipment:
    """What needs the state directory: secrets, the installed package, images, engine, worker."""
    plug, model = open_plug(config.plug, config.plug_account), read_model(config.power_model)
    stages = Stages(probe(plug=plug, model=model).meter, time.monotonic)
    secret, _ = open_secret(state.device_secret, "device secret")
    site_secret = open_site_secret(config, state, say)
    threads = config.threads or usable_cpus(allowed_affinity())
    installing = installing_engine(choice.engine)
    installed = install(
        choice.folder, state.packages, trusted, lambda path: open_engine(installing, path, threads), say
    )
    check_stop(stop)
    plan, record = installed.training, None
    if installed.manifest.cuts:
        _, alpha = protection(config.kappa_floor, config.alpha, installed.manifest)
        basis = Basis(installed.digest.hex(), installed.cut.index, float(alpha))
        record = read_record(state.local_head, basis, say)
    learned = () if record is None else record.facts.classes
    dataset, classes = find_images(config, purpose, state, installed, secret, learned, lambda: check_stop(stop), say)
    classes_hash = class_list_hash(site_secret, classes)
    terms = device_terms(config, installed.manifest, installed.digest, len(classes), classes_hash, plan)
    wire_labels = number_classes(terms, site_secret, installed.digest)
    around = Surroundings(open_bar, lambda: check_stop(stop))
    ledger = ReleaseLedger(state.ledger, say)
    codes_changed: float | None = None
    worker: Worker | PartWorker
    learner: Learner | None = None
    answerer: Answerer | None = None
    if plan is not None and not installed.manifest.cuts:
        if config.require not in (None, DEFAULT_ENGINE):
            raise EngineError(
                f"{config.require} is required (--require), and parts are trained by {DEFAULT_ENGINE}",
                "leave --require out with this package",
            )
        facts = EngineFacts(f"onnxruntime {onnxruntime_version()}", threads, None, None, None)
        from edge_runtime.equip_parts import equip_parts  # it loads onnxruntime, as `open_engine` does for others

        worker, head_of = equip_parts(
            installed,
            plan,
            terms,
            dataset,
            wire_labels,
            secret,
            threads,
            state,
            stages,
            around,
            ledger,
            config,
            say,
        )
    else:
        opened = open_chosen(
            choice, installed, terms.alpha, secret, threads, state.engines, state.plans, config.require,
            lambda: check_stop(stop), say,
        )  # fmt: skip
        check_stop(stop)
        choice, codes_changed, facts = opened.choice, opened.changed_share, engine_facts(opened, installed)
        if facts.int8_lost:
            say(f"warning: {facts.int8_lost}")
        layout = installed.cut.tokens
        if purpose != "infer":
            learner = Learner(state.local_head, basis, layout, dataset, record, say)
        elif record is not None:
            answerer = Answerer(state.local_head, record, layout)
        sees = learner or answerer
        bench = Bench(
            Frontend(opened.engine, installed.manifest.image, layout, None if sees is None else sees.see),
            installed.cut, dataset, terms, secret, installed.digest, wire_labels, config.max_releases, state.features,
            installed.manifest.retrieves_patches, config.max_patch_share,
        )  # fmt: skip
        labels = {sample.sample_id: sample.label for sample in dataset.samples}
        keeper = LabelKeeper(labels, len(dataset.classes), state.head, say)
        worker, head_of = Worker(bench, ledger, keeper, stages, around, learner), keeper.head_of
    return Equipment(
        config, purpose, state, choice, installed, terms, dataset, wire_labels, facts, codes_changed, worker,
        head_of, stages, ledger, learner, answerer,
    )  # fmt: skip


def check_required(choice: PackageChoice, required: str | None) -> None:
    """Raises: EngineError when another engine than the required one is sure to run; ConfigError for an unknown name."""
    if required is not None and required not in engine_names():
        raise ConfigError(
            f"no engine is called {required!r}{suggest(required, offered_engines())}", "correct --require"
        )
    if required is not None and choice.engine != required:
        raise EngineError(
            f"{required} is required (--require); {choice.fallback_reason or f'--engine names {choice.engine}'}",
            "install what is missing (edge-doctor says what), or leave --require out",
        )


def onnxruntime_version() -> str:
    """The installed onnxruntime; opening a trainer would tell too, but comes later."""
    return version("onnxruntime")


def open_bar(total: int, description: str, unit: str) -> Progress[None]:
    """A progress bar, or lines where there is no terminal."""
    return progress(total=total, description=description, unit=unit)


def open_site_secret(config: LocalConfig, state: State, say: Callable[[str], None]) -> bytes:
    """The secret that a site's devices share; a device that was given none makes its own and says what that means.

    It numbers classes for a server: work that asks none makes none that would stay.
    """
    if config.site_secret is not None:
        return read_secret(config.site_secret, "site secret (--site-secret)")
    if not isinstance(config, DeviceConfig) and not state.site_secret.exists():
        return secrets.token_bytes(SECRET_BYTES)
    secret, made = open_secret(state.site_secret, "site secret")
    if made:
        say(
            f"no --site-secret: this device is taken to be its site's only one, and made {state.site_secret}; "
            "devices of one site must share it, so give a copy of it to each with --site-secret"
        )
    return secret


def number_classes(terms: Terms, site_secret: bytes, package_digest: bytes) -> NDArray[np.int64]:
    """What each class is called on the wire: a secret permutation in permuted-label mode, else its own number."""
    if terms.label_mode != "permuted-label":
        return np.arange(terms.class_count, dtype=np.int64)
    return permutation(site_secret, terms.class_count, "classes", package_digest)


def new_ask_id() -> str:
    """A name for a prediction run that no other run has."""
    return f"infer-{secrets.token_hex(8)}"
