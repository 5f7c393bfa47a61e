"""One device and one server in memory, for tests of the device's conversation."""

from __future__ import annotations

import threading
from pathlib import Path

from contract.messages import Welcome
from contract.signature import load_public
from edge_runtime.conduct import Conduct
from edge_runtime.config import DeviceConfig
from edge_runtime.delivery import Delivery
from edge_runtime.equip import Equipment, equip
from edge_runtime.identity import read_identity
from edge_runtime.run import draws_of
from edge_runtime.spool import Spool
from edge_runtime.unanswered import Unanswered
from tests.edge_runtime.fake_package import Package
from tests.edge_runtime.memory_server import MemoryServer, connect, exchange


class Line:
    """One device and one server, with everything between them but sockets."""

    def __init__(
        self, root: Path, config: DeviceConfig, package: Package, purpose: str = "adapt", **welcome: object
    ) -> None:
        self.said: list[str] = []
        self.stop = threading.Event()
        self.equipment: Equipment = equip(config, purpose, self.stop, self.said.append)  # type: ignore[arg-type]
        self.identity = read_identity(config.name, config.key)
        terms = self.equipment.terms
        values: dict[str, object] = {
            "session": "s1",
            "run": "run-1",
            "site": "clinic",
            "strategy": "split_adaptation",
            "label_mode": config.label_mode,
            "class_count": terms.class_count,
            "class_list_hash": terms.class_list_hash,
            "package_digest": package.digest.hex(),
            "kappa": 1.0,
            "seed": 7,
            "credit": 4,
            "heartbeat_s": 10.0,
            "last_seq": 0,
        }
        self.server = MemoryServer(load_public(root / "device.pub"), Welcome(**values | welcome))  # type: ignore[arg-type]
        self.spool = Spool(self.equipment.state.spool / purpose, self.said.append)
        self.window = Unanswered("infer-1", self.spool) if purpose == "infer" else None
        self.conduct = Conduct(self.identity, terms, self.equipment.purpose, self.spool, self.window)
        self.delivery = Delivery(self.equipment.worker, self.spool, draws_of(config), self.window, self.stop)

    def run(self, until: object = None) -> None:
        connect(self.conduct, self.server)
        exchange(self.conduct, self.delivery, self.server, until or (lambda: self.conduct.outcome is not None))  # type: ignore[arg-type]

    def close(self) -> None:
        self.stop.set()
        self.equipment.state.close()
