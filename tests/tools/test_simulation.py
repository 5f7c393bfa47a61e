"""A site's run in one process: real workers, a real strategy, and uploads as the store would have joined them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.errors import RefusedError
from contract.messages import Features
from contract.signature import key_id, load_public
from edge_runtime.config import DeviceConfig
from edge_runtime.worker import Upload as Release
from server_runtime import backend, backend_folder, strategies
from server_runtime.store import Store
from server_runtime.strategies import Ask, Settings, Site
from tests.make_package import DEVICES, PRIVATE_CLASSES
from tools.simulation import Answers, Terms, accuracy_of, adapt, release_for_prediction
from tools.torch_worker import Device, make_device, open_torch

KAPPA = 0.25
TERMS = Terms("run", "site", "split_adaptation", "permuted-label", KAPPA, 1)


def devices_of(package: Path, root: Path, label_mode: str, part: str) -> dict[str, Device]:
    keys = package / "keys"
    made = {}
    for name in DEVICES:
        config = DeviceConfig(
            engine=str(package / "front"), data=package / name / part, server="wss://localhost:1",
            trust=keys / "publisher.pub", ca=None, key=keys / "devices" / name / "device.key", name=name,
            state=root / name, site_secret=keys / "sites" / "site.secret", classes=package / "classes.txt",
            label_mode=label_mode, noise="keyed", alpha=None, kappa_floor=KAPPA, max_releases=1, threads=1,
        )  # fmt: skip
        publisher = load_public(config.trust)
        made[name] = make_device(config, {key_id(publisher): publisher}, open_torch)
    return made


@pytest.fixture(scope="module")
def folder(package: Path) -> backend_folder.BackendFolder:
    return backend_folder.read(package / "front.backend")


@pytest.fixture
def build(folder: backend_folder.BackendFolder) -> Callable[..., strategies.Strategy]:
    def make(name: str, label_mode: str, epochs: int) -> strategies.Strategy:
        theta_b = backend.load(folder, KAPPA, torch.device("cpu"))
        settings = Settings(label_mode, KAPPA, epochs, 8, 0.25, 1, 1e-3, 1e-2)
        return strategies.find(name).build(theta_b, settings)

    return make


@pytest.mark.parametrize("label_mode", ["permuted-label", "logit-gradient", "client-head"])
def test_a_site_learns_in_every_label_mode(
    package: Path, tmp_path: Path, build: Callable[..., strategies.Strategy], label_mode: str
) -> None:
    terms = replace(TERMS, label_mode=label_mode)
    train = devices_of(package, tmp_path, label_mode, "train")
    site = Site("site", DEVICES, len(PRIVATE_CLASSES))
    strategy = build("split_adaptation", label_mode, 15)
    last = adapt(strategy, Answers(train, terms), site)
    assert last["epoch"] == 15 and last["samples"] == 24
    assert float(last["loss"] or 9) < 0.9 < np.log(3)
    for name, device in devices_of(package, tmp_path, label_mode, "test").items():
        codes = release_for_prediction(device, terms)
        assert codes.shape == (15, 17, 48)
        # Above chance by more than luck: 1/3 of 15 images is 5 +- 1.8. Labels and scores that do not meet would not be.
        assert accuracy_of(strategy, device, codes, "run") > 0.6, name


def test_an_upload_is_what_the_store_makes_of_the_same_messages(package: Path, tmp_path: Path) -> None:
    devices = devices_of(package, tmp_path, "permuted-label", "train")
    answers = Answers(devices, TERMS)
    question = {"kappa": KAPPA, "seed": 1}
    replies = answers.answer(Ask("features", "collect_features", {name: {} for name in DEVICES}, question))
    assert list(replies) == list(DEVICES) and replies == answers.uploads
    store = Store(tmp_path / "run")
    store.fix_classes("site", len(PRIVATE_CLASSES), None)
    for name, device in devices.items():
        store.open_session(name, "s", "adapt")
        for seq, message in enumerate(device.worker.collect(Release("run.features", "train", KAPPA, 1 << 13)), 1):
            assert isinstance(message, Features)
            store.keep("site", name, "s", seq, message)
        stored = store.upload("site", name, "run.features")
        assert stored is not None and stored.device == answers.uploads[name].device
        for field in ("sample_ids", "codes", "sources", "labels"):
            assert (getattr(stored, field) == getattr(answers.uploads[name], field)).all(), field
    store.close()


def test_the_devices_terms_hold_in_a_simulation_too(package: Path, tmp_path: Path) -> None:
    devices = devices_of(package, tmp_path, "permuted-label", "train")
    with pytest.raises(RefusedError, match="kappa: here at least 0.25"):
        Answers(devices, replace(TERMS, kappa=0.1))
    with pytest.raises(RefusedError, match="label mode"):
        Answers(devices, replace(TERMS, label_mode="logit-gradient"))
    answers = Answers(devices, TERMS)
    too_little = Ask("features", "collect_features", {"device-a": {}}, {"kappa": 0.1, "seed": 1})
    with pytest.raises(RefusedError, match="kappa"):
        answers.answer(too_little)
    assert not answers.uploads


def test_an_adaptation_repeats_bit_for_bit(
    package: Path, tmp_path: Path, build: Callable[..., strategies.Strategy]
) -> None:
    site = Site("site", DEVICES, len(PRIVATE_CLASSES))
    devices = devices_of(package, tmp_path, "permuted-label", "train")
    runs = [adapt(build("split_adaptation", "permuted-label", 2), Answers(devices, TERMS), site) for _ in range(2)]
    assert runs[0] == runs[1]


def test_linear_probing_runs_on_the_same_answers(
    package: Path, tmp_path: Path, build: Callable[..., strategies.Strategy]
) -> None:
    devices = devices_of(package, tmp_path, "permuted-label", "train")
    terms = replace(TERMS, strategy="linear_probe")
    last = adapt(build("linear_probe", "permuted-label", 30), Answers(devices, terms), Site("site", DEVICES, 3))
    assert last["held_out_accuracy"] is not None and last["samples"] == 24
