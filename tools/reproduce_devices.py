"""Devices of a reproduction, all in this process: packages of parts, opened once, and devices whose secrets come from a
seed, so that a row repeats. What they train on, and what a row is, are the laboratories' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from contract.console import say
from contract.keyed_noise import derive_key
from contract.signature import key_id, load_public
from contract.training import TrainingCut
from edge_runtime.config import DeviceConfig
from edge_runtime.install import Installed, install
from edge_runtime.state import open_state, write_durably
from edge_runtime.trainer import TrainerSettings, open_trainer
from server_runtime import backend_folder, split_model
from server_runtime.backend_folder import TrainingFolder
from server_runtime.split_model import Shipped
from tools.torch_worker import OpenPart, PartDevice, make_part_device


class Packages:
    """Packages of parts as the server and devices hold them; each is opened when it is first asked for."""

    def __init__(self, publisher: Path, root: Path, device: torch.device) -> None:
        """`publisher` is the signer's public key; installed packages lie below `root`."""
        self._publisher, self._root, self._device = publisher, root, device
        self._shipped: dict[Path, Shipped] = {}
        self._installed: dict[Path, Installed] = {}

    def ship(self, front: Path) -> Shipped:
        if front not in self._shipped:
            self._shipped[front] = split_model.load(training_folder(front), self._device)
        return self._shipped[front]

    def install(self, front: Path) -> Installed:
        if front not in self._installed:
            publisher = load_public(self._publisher)
            packages = self._root / front.name  # one place holds one package at a time
            packages.mkdir(parents=True)

            def open_nothing(path: Path) -> None:
                raise AssertionError(f"{path}: a package of parts has no frontend")

            self._installed[front] = install(front, packages, {key_id(publisher): publisher}, open_nothing, say)
        return self._installed[front]

    @property
    def installed(self) -> tuple[Installed, ...]:
        return tuple(self._installed.values())


def training_folder(front: Path) -> TrainingFolder:
    """The server's folder that lies beside a package of parts."""
    folder = backend_folder.read(front.with_name(f"{front.name}.backend"))
    assert isinstance(folder, TrainingFolder)
    return folder


@dataclass(frozen=True)
class DeviceKind:
    """What devices of a row have alike."""

    site: str
    publisher: Path
    installed: Installed
    open_part: OpenPart
    label_mode: str
    threads: int


def make_device(
    kind: DeviceKind, root: Path, seed: int, data: Path, classes: Sequence[str], changes: Any = None, **parts: Any
) -> PartDevice:
    """A device named as its state folder `root`. `changes` are of its configuration, `parts` `make_part_device`'s."""
    open_state(root).close()
    for secret, owner in (("device_secret", root.name), ("site_secret", kind.site)):
        write_durably(root / "identity" / secret, derive_key(b"cutlayer reproduction", secret, seed, owner))
    listed = root / "classes.txt"
    write_durably(listed, "".join(f"{each}\n" for each in classes).encode())
    config = DeviceConfig(
        engine=str(kind.installed.folder), data=data, server="wss://localhost:1", trust=kind.publisher, ca=None,
        key=kind.publisher, name=root.name, state=root, site_secret=root / "identity" / "site_secret", classes=listed,
        label_mode=kind.label_mode, noise="keyed", alpha=0.0, kappa_floor=0.0, max_releases=1, threads=kind.threads,
    )  # fmt: skip
    return make_part_device(replace(config, **(changes or {})), kind.installed, kind.open_part, **parts)


def part_opener(engine: str, open_torch: OpenPart, installed: Installed, threads: int) -> OpenPart:
    """The product's own trainer of a part, or with engine "torch" the one that stands for it."""
    plan = installed.training
    assert plan is not None

    def open_onnxruntime(cut: TrainingCut):  # type: ignore[no-untyped-def]
        return open_trainer(installed.folder, cut, plan.optimiser, TrainerSettings(threads))

    return open_torch if engine == "torch" else open_onnxruntime
