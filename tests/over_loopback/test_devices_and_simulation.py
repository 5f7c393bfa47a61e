"""Real device processes over TLS, and the same devices in one process with torch: the losses are the same.

Networks without ReLU: where a value changes its side, six epochs make 1e-3 of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.signature import key_id, load_public
from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import Deployment, copy_secrets

torch = pytest.importorskip("torch", reason="the server needs torch")

SEED, EPOCHS, BATCH, RATE = 5, 6, 5, 0.01
MODE = ("--label-mode", "raw-label")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "front"),
    [
        ("sequential_split", "smooth-cnn"),
        pytest.param("parallel_split", "parts", marks=slow),
        pytest.param("parallel_split", "smooth-cnn", marks=slow),
        pytest.param("split_fed", "smooth-cnn", marks=slow),
        pytest.param("fed_avg", "whole", marks=slow),
    ],
)
def test_devices_tell_the_story_of_the_simulation(package: Path, tmp_path: Path, strategy: str, front: str) -> None:
    deployment = Deployment(package, tmp_path, front=front)
    options = ("--epochs", EPOCHS, "--batch", BATCH, "--learning-rate", RATE, "--seed", SEED, "--run", "same")
    with deployment.server(*MODE, *options, "--exit-when-done", strategy=strategy) as server:
        deployment.run_devices(*MODE)
        assert server.wait(timeout=120) == 0, (tmp_path / "server.log").read_text()
    real = [line["loss"] for line in deployment.metrics() if "epoch" in line]
    assert len(real) == EPOCHS
    assert simulated(deployment, tmp_path / "simulated", strategy) == pytest.approx(real, abs=1e-3)


def simulated(deployment: Deployment, root: Path, strategy: str) -> list[float]:
    """Losses of every epoch with torch in place of devices, wire and onnxruntime."""
    from edge_runtime.config import DeviceConfig
    from edge_runtime.install import install
    from server_runtime import backend_folder, split_model, strategies
    from server_runtime.strategies import Settings, Site
    from tools.simulation import Answers, Terms, adapt
    from tools.torch_trainer import open_torch_trainer
    from tools.torch_worker import make_part_device

    copy_secrets(deployment.root, root)
    cpu, keys = torch.device("cpu"), deployment.package / "keys" / "devices"
    source = deployment.package / deployment.front
    shipped = split_model.load(backend_folder.read(source.with_name(f"{source.name}.backend")), cpu)
    publisher = load_public(keys / DEVICES[0] / "publisher.pub")
    (root / "packages").mkdir()
    installed = install(source, root / "packages", {key_id(publisher): publisher}, pytest.fail, lambda text: None)

    def device(name: str):
        own = keys / name
        config = DeviceConfig(
            engine=str(installed.folder), data=deployment.package / name / "train", server="wss://localhost:1",
            trust=own / "publisher.pub", ca=None, key=own / "device.key", name=name, state=root / "state" / name,
            site_secret=own / "site.secret", classes=deployment.package / "classes.txt", label_mode="raw-label",
            noise="keyed", alpha=0.0, kappa_floor=0.0, max_releases=1, threads=1,
        )  # fmt: skip
        return make_part_device(
            config,
            installed,
            lambda cut: open_torch_trainer(
                installed.folder, cut, shipped.plan.optimiser, shipped.module, shipped.plan.class_count, cpu
            ),
        )

    settings = Settings("raw-label", 0.0, EPOCHS, 0, 0.0, SEED, batch=BATCH, learning_rate=RATE)
    answers = Answers({name: device(name) for name in DEVICES}, Terms("same", "site", strategy, "raw-label", 0.0, SEED))
    losses: list[float] = []
    adapt(
        strategies.find(strategy).build(shipped, settings),
        answers,
        Site("site", tuple(sorted(DEVICES)), len(PRIVATE_CLASSES)),
        lambda values: losses.append(float(values["loss"])) if "epoch" in values else None,
    )
    return losses
