"""Training on devices as users run it: real packages, real commands, TLS.

Split equals unsplit, kills change nothing, and what was trained predicts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from contract import manifest, training
from tests.make_package import DEVICES, PRIVATE_CLASSES
from tests.over_loopback.deployment import BIN, Deployment, copy_secrets, stop, wait_until

torch = pytest.importorskip("torch", reason="the server needs torch")

DEVICE_BINS = [BIN, *(Path(python).parent for python in os.environ.get("CUTLAYER_TEST_DEVICE_PYTHONS", "").split())]
IMAGES = 12  # of each device
SEED = 5
SMOOTH = 1e-5  # relative; without ReLU nothing can jump


@dataclass(frozen=True)
class Plain:
    """The unsplit model, and the batches that one device trains on."""

    model: torch.nn.Module
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # epoch -> images, labels
    rule: training.OptimiserRule


def alone(package: Path, root: Path, front: str) -> Deployment:
    """A deployment whose site has one device."""
    roster = root / "roster" / "site"
    roster.mkdir(parents=True)
    shutil.copy(package / "keys" / "roster" / "site" / f"{DEVICES[0]}.pub", roster)
    return Deployment(package, root, front=front, roster=root / "roster")


def train(deployment: Deployment, strategy: str, *options: object, mode: str = "raw-label") -> list[dict[str, object]]:
    """One run to its end; the devices' reports."""
    names = DEVICES if deployment.roster is None else DEVICES[:1]
    words = ("--label-mode", mode, "--seed", SEED, "--run", "same", *options)
    with deployment.server(*words, "--exit-when-done", strategy=strategy) as server:
        started = [(name, deployment.start_device(name, "--label-mode", mode)) for name in names]
        reports = [deployment.report_of(name, process) for name, process in started]
        assert server.wait(timeout=120) == 0, (deployment.root / "server.log").read_text()
    return reports


def weights(deployment: Deployment) -> dict[str, np.ndarray]:
    """What the run published, by the whole model's names."""
    (folder,) = deployment.root.glob("runs/*/models/site")
    head = {f"head.{name}": value for name, value in load_file(folder / "head.safetensors").items()}
    return load_file(folder / "backend.safetensors") | head


def plain(deployment: Deployment) -> Plain:
    """The same model in one piece, at the same beginning."""
    from edge_runtime.data import load_dataset
    from edge_runtime.picture_cache import PictureCache
    from edge_runtime.pipeline import read_picture
    from edge_runtime.training_set import TrainingSet
    from server_runtime import backend_folder, split_model
    from server_runtime.backend import new_head

    front = deployment.package / deployment.front
    signed = manifest.from_bytes((front / "manifest.json").read_bytes())
    plan = training.from_bytes((front / training.TRAINING_NAME).read_bytes(), signed)
    secret = (deployment.root / "state" / DEVICES[0] / "identity" / "device_secret").read_bytes()
    data = deployment.package / DEVICES[0] / "train"
    dataset = load_dataset(data, tuple(sorted(PRIVATE_CLASSES)), secret, signed.image.max_pixels, lambda: None)
    cache = PictureCache(lambda sample: read_picture(sample, signed.image))
    images = TrainingSet(dataset.samples, len(PRIVATE_CLASSES), signed.image, plan.augment, cache, secret)

    def batch(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = images.batch(SEED, epoch, 0, IMAGES)
        return torch.from_numpy(found.images), torch.from_numpy(found.labels)

    cpu = torch.device("cpu")
    folder = backend_folder.read(deployment.package / f"{deployment.front}.backend")
    shipped = split_model.load(folder, cpu)
    head = new_head(shipped.width, len(PRIVATE_CLASSES), SEED, "site", cpu)
    return Plain(torch.nn.Sequential(shipped.module, head), batch, plan.optimiser)


def named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by the names that are published."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("0.") if name.startswith("0.") else name.replace("1.", "head.", 1), parameter


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))


@pytest.mark.parametrize("cut", [1, 2])
def test_split_equals_unsplit_over_twenty_steps(package: Path, tmp_path: Path, cut: int) -> None:
    deployment = alone(package, tmp_path, "parts")
    train(
        deployment, "sequential_split", "--epochs", 20, "--batch", IMAGES, "--cuts", cut, "--learning-rate", 0.05,
    )  # fmt: skip
    unsplit = plain(deployment)
    rule = unsplit.rule
    optimiser = torch.optim.SGD(unsplit.model.parameters(), 0.05, rule.momentum, weight_decay=rule.weight_decay)
    losses = []
    for epoch in range(1, 21):
        x, y = unsplit.batch(epoch)
        loss = torch.nn.functional.cross_entropy(unsplit.model.train()(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    found = [line["loss"] for line in deployment.metrics() if "epoch" in line]
    assert np.allclose(found, losses, rtol=SMOOTH, atol=0), (found, losses)
    trained = weights(deployment)
    apart = {name: distance(trained[name], value.detach().numpy()) for name, value in named(unsplit.model)}
    assert max(apart.values()) < SMOOTH, apart
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["raw-label", "permuted-label", "logit-gradient"])
def test_every_gradient_of_a_step_is_the_unsplit_models(package: Path, tmp_path: Path, mode: str) -> None:
    """A step of rate 1 moves every weight by its gradient (momentum has none yet, decay is known)."""
    deployment = alone(package, tmp_path, "parts")
    train(
        deployment, "sequential_split", "--epochs", 1, "--batch", IMAGES, "--cuts", 2, "--learning-rate", 1.0, mode=mode
    )
    unsplit, trained = plain(deployment), weights(deployment)
    x, y = unsplit.batch(1)
    y = permuted(deployment, y) if mode == "permuted-label" else y
    loss = torch.nn.functional.cross_entropy(unsplit.model.train()(x), y)
    loss.backward()
    for name, parameter in named(unsplit.model):
        start = parameter.detach().numpy()
        moved = start.astype(np.float64) - trained[name] - unsplit.rule.weight_decay * start
        gradient = parameter.grad.numpy()
        rounding = 2.0**-22 * (np.abs(start).max() + np.abs(trained[name]).max())
        assert np.abs(moved - gradient).max() <= SMOOTH * np.abs(gradient).max() + rounding, name


def permuted(deployment: Deployment, labels: torch.Tensor) -> torch.Tensor:
    """What the site calls its classes on the wire."""
    from contract.keyed_noise import permutation

    front = deployment.package / deployment.front
    secret = (deployment.package / "keys" / "devices" / DEVICES[0] / "site.secret").read_bytes()
    digest = manifest.digest((front / "manifest.json").read_bytes())
    return torch.from_numpy(permutation(secret, len(PRIVATE_CLASSES), "classes", digest))[labels]


@pytest.mark.parametrize("device_bin", DEVICE_BINS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    ("strategy", "front", "mode"),
    [
        ("sequential_split", "parts", "permuted-label"),
        ("parallel_split", "cnn", "logit-gradient"),
        ("split_fed", "parts", "client-head"),
        ("fed_avg", "whole", "raw-label"),
    ],
)
def test_a_site_trains_its_parts_and_predicts(
    package: Path, tmp_path: Path, device_bin: Path, strategy: str, front: str, mode: str
) -> None:
    deployment = Deployment(package, tmp_path, device_bin=device_bin, front=front)
    options = ("--epochs", 15, "--batch", 6, "--learning-rate", 0.02, "--label-mode", mode)
    with deployment.server(*options, strategy=strategy):
        reports = deployment.run_devices("--label-mode", mode)
        answers = deployment.run_devices("--label-mode", mode, "--infer", data="test")
    assert [report["outcome"] for report in reports] == ["done", "done"]
    losses = [line["loss"] for line in deployment.metrics() if "epoch" in line]
    assert len(losses) == 15 and losses[-1] < losses[0]
    for answer in answers:
        assert len(answer["predictions"]) == answer["images"] == 5 * len(PRIVATE_CLASSES)
        assert answer["accuracy"] > 1.5 / len(PRIVATE_CLASSES)


@pytest.mark.parametrize("mode", [pytest.param("raw-label", marks=pytest.mark.slow), "client-head"])
def test_killed_devices_and_a_killed_server_change_nothing(package: Path, tmp_path: Path, mode: str) -> None:
    calm, killed = (Deployment(package, tmp_path / name, front="parts") for name in ("undisturbed", "killed"))
    options = ("--epochs", 40, "--batch", 2, "--learning-rate", 0.02)
    for each in (calm, killed):
        each.root.mkdir()
    train(calm, "sequential_split", *options, mode=mode)

    copy_secrets(calm.root, killed.root)
    words = ("--label-mode", mode, "--seed", SEED, "--run", "same", *options, "--exit-when-done")
    server = killed.start_server(*words, strategy="sequential_split")
    first, second = (killed.start_device(device, "--label-mode", mode) for device in DEVICES)
    log = killed.root / "server.log"
    for _ in range(8):  # until it dies within its turn, between two settled steps
        epoch = epochs_of(killed)
        wait_until(lambda: epochs_of(killed) > epoch, "an epoch more")  # noqa: B023 - called at once
        held = newest_part(killed)
        wait_until(lambda: newest_part(killed) != held, "the turn of the first device")  # noqa: B023
        stop(first, signal.SIGKILL)
        first = killed.start_device(DEVICES[0], "--label-mode", mode)
        wait_until(lambda: newest_part(killed) != held or "both sides" in log.read_text(), "its return")  # noqa: B023
        if "both sides hold" in log.read_text():
            break
    epoch = epochs_of(killed)
    wait_until(lambda: epochs_of(killed) > epoch + 1, "two epochs more")
    stop(server, signal.SIGKILL)
    server = killed.start_server(*words, strategy="sequential_split")
    for device, process in zip(DEVICES, (first, second), strict=True):
        killed.report_of(device, process)
    assert server.wait(timeout=120) == 0, (killed.root / "server.log").read_text()

    assert "both sides hold" in log.read_text()
    assert killed.model() == calm.model() != {}
    assert [line.get("loss") for line in killed.metrics()] == [line.get("loss") for line in calm.metrics()]


def newest_part(deployment: Deployment) -> list[str]:
    """What the first device holds on its disk."""
    return sorted(path.name for path in (deployment.root / "state" / DEVICES[0] / "parts").glob("part.*"))


def epochs_of(deployment: Deployment) -> int:
    return max((line.get("epoch", 0) for line in deployment.metrics()), default=0)


def test_the_whole_model_is_released_only_where_that_was_said(package: Path) -> None:
    for front, whole in (("parts", False), ("whole", True)):
        assert json.loads((package / front / training.TRAINING_NAME).read_bytes())["whole_model"] is whole
