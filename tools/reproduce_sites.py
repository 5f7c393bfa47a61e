"""The devices of a reproduction's sites: real workers on a site's images, and the wire codes of what they test.

Which engine runs the frontend is the caller's choice; what is trained on the uploads is left to `reproduce_rows`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from contract.keyed_noise import derive_key
from contract.signature import key_id, load_public
from edge_runtime.config import DeviceConfig
from edge_runtime.engines import Engine, open_engine
from edge_runtime.state import open_state, write_durably
from server_runtime.strategies import Site
from tools.reproduce_cells import Cell
from tools.reproduce_world import SiteFolders, World
from tools.simulation import Terms, release_for_prediction
from tools.torch_worker import Device, make_device, open_torch

LABEL_MODE = "permuted-label"
RUN, SITE = "reproduce", "site"
REMEMBERED = 3

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sitting:
    """One site at one noise strength: its devices with training and with test images, and the latters' wire codes."""

    site: Site
    folders: SiteFolders
    train: Mapping[str, Device]
    test: Mapping[str, Device]
    codes: Mapping[str, NDArray[np.int8]]

    @property
    def test_count(self) -> int:
        return sum(map(len, self.codes.values()))


class Sites:
    """Devices of a world with one package, made when a row first needs them."""

    def __init__(self, world: World, engine: str, alpha: float, threads: int, device: torch.device) -> None:
        self._world, self._engine, self._alpha, self._threads, self._device = world, engine, alpha, threads, device
        self._trained: dict[Hashable, dict[str, Device]] = {}
        self._tested: dict[Hashable, tuple[dict[str, Device], dict[str, NDArray[np.int8]]]] = {}
        self._noised: dict[tuple[str, int], Path] = {}  # where a device's noised frontend lies already

    def sit(self, cell: Cell) -> Sitting:
        """Rows that differ in their case alone share the training devices, those that differ in shots the tested."""
        folders = self._world.site(cell.dataset, cell.shots, cell.seed)
        setting = (cell.dataset, cell.shots, cell.kappa, cell.seed)
        train = kept(self._trained, setting, lambda: self._devices(cell, folders.train, f"{cell.shots}shot"))

        def release() -> tuple[dict[str, Device], dict[str, NDArray[np.int8]]]:
            devices, terms = self._devices(cell, folders.test, "test"), terms_of(cell, "split_adaptation")
            return devices, {name: release_for_prediction(device, terms) for name, device in devices.items()}

        test, codes = kept(self._tested, (cell.kappa, cell.seed, tuple(folders.test.values())), release)
        return Sitting(Site(SITE, tuple(sorted(train)), len(folders.classes)), folders, train, test, codes)

    def _devices(self, cell: Cell, images: Mapping[str, Path], part: str) -> dict[str, Device]:
        """Devices whose secrets come from the seed: the same noise again whenever a row is computed. Each setting has
        states of its own, as a state counts releases; each process too, as rows may be computed side by side."""
        assert cell.kappa is not None
        publisher = load_public(self._world.publisher)
        folders = self._world.site(cell.dataset, cell.shots, cell.seed)
        made = {}
        for name, data in images.items():
            setting = f"{self._engine}-{cell.dataset}-{part}-kappa{cell.kappa:g}-seed{cell.seed}-process{os.getpid()}"
            root = self._world.package_root / "states" / setting / name
            open_state(root).close()
            for secret in ("device_secret", "site_secret"):
                owner = name if secret == "device_secret" else SITE
                path = root / "identity" / secret
                if not path.exists():
                    write_durably(path, derive_key(b"cutlayer reproduction", secret, cell.seed, owner))
            classes = root / "classes.txt"
            write_durably(classes, "".join(f"{each}\n" for each in folders.classes).encode())
            if (name, cell.seed) in self._noised:
                shutil.copytree(self._noised[name, cell.seed], root / "engines", dirs_exist_ok=True)
            config = DeviceConfig(
                engine=str(self._world.front), data=data, server="wss://localhost:1", trust=self._world.publisher,
                ca=None, key=self._world.publisher, name=name, state=root,
                site_secret=root / "identity" / "site_secret", classes=classes, label_mode=LABEL_MODE, noise="keyed",
                alpha=self._alpha, kappa_floor=cell.kappa, max_releases=1, threads=self._threads,
            )  # fmt: skip
            made[name] = make_device(config, {key_id(publisher): publisher}, self.open_frontend)
            self._noised.setdefault((name, cell.seed), root / "engines")
        return made

    def open_frontend(self, path: Path) -> Engine:
        if self._engine == "torch":
            return open_torch(path, self._device)
        return open_engine(self._engine, path, self._threads)


def terms_of(cell: Cell, strategy: str) -> Terms:
    """What the server says of a row's run."""
    assert cell.kappa is not None
    return Terms(RUN, SITE, strategy, LABEL_MODE, cell.kappa, cell.seed)


def kept(memory: dict[Hashable, Made], key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make()` gave for this key, of the few newest keys."""
    if key not in memory:
        while len(memory) >= REMEMBERED:
            del memory[next(iter(memory))]
        memory[key] = make()
    return memory[key]
