"""Training on devices as users run it: real packages, real commands, TLS.

Split equals unsplit, kills change nothing, and what was trained predicts.
"""

from __future__ import annotations

import copy
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from contract import manifest, training
from tests.make_package import DEVICES, PRIVATE_CLASSES, TRAINING
from tests.over_loopback.deployment import BIN, Deployment, copy_secrets, fix_secrets, pairwise, stop, wait_until

torch = pytest.importorskip("torch", reason="the server needs torch")

IMAGES = 12  # of each device
SEED = 5
SMOOTH = 1e-5  # relative; without ReLU and max-pools nothing can jump
FLIP = 1e-6  # so near to 0, float32 may see another side than float64
RATES = {"smooth-vgg": 3e-4}  # with more, it learns twelve images in a few steps, and 0 has no relative error


@dataclass(frozen=True)
class Plain:
    """The unsplit model, and the batches that one device trains on."""

    model: torch.nn.Module
    batch: Callable[[int], tuple[tuple[torch.Tensor, ...], torch.Tensor]]  # epoch -> images [and kept patches], labels
    rule: training.OptimiserRule


class Masked(torch.nn.Module):
    """A ViT in one piece that sees the kept patches only."""

    def __init__(self, model: torch.nn.Module) -> None:
        from exporter.models import vit

        super().__init__()
        self.model = model
        depth = len(model.blocks)
        self.halves = lambda: (vit.Frontend(model, depth), vit.Backend(model, depth))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        frontend, backend = self.halves()
        return backend(frontend(x, keep))


class Whole(torch.nn.Module):
    """A model and its head; parameters are named as they are published."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(*inputs))


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

    def batch(epoch: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        found = images.batch(SEED, epoch, 0, IMAGES)
        keep = images.kept_patches(found.sample_ids, plan.cuts[0])
        inputs = [found.images] if keep is None else [found.images, keep]
        return tuple(map(torch.from_numpy, inputs)), torch.from_numpy(found.labels)

    cpu = torch.device("cpu")
    folder = backend_folder.read(deployment.package / f"{deployment.front}.backend")
    shipped = split_model.load(folder, cpu)
    head = new_head(shipped.width, len(PRIVATE_CLASSES), SEED, "site", cpu)
    model = shipped.module if plan.cuts[0].kept is None else Masked(shipped.module)
    return Plain(Whole(model, head).train(), batch, plan.optimiser)


def named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by the names that are published."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("model.").removeprefix("model."), parameter


def is_felt(name: str, names: Collection[str]) -> bool:
    """Whether a tensor has a gradient but rounding: the bias of a convolution in front of a BatchNorm has none."""
    module, _, kind = name.rpartition(".")
    start, _, number = module.rpartition(".")
    return not (kind == "bias" and number.isdigit() and f"{start}.{int(number) + 1}.running_mean" in names)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))


def follow(unsplit: Plain, steps: int, rate: float) -> list[float]:
    """Train the unsplit model; the loss of every step."""
    rule = unsplit.rule
    losses = []
    optimiser = torch.optim.SGD(unsplit.model.parameters(), rate, rule.momentum, weight_decay=rule.weight_decay)
    for epoch in range(1, steps + 1):
        inputs, y = unsplit.batch(epoch)
        loss = torch.nn.functional.cross_entropy(unsplit.model(*inputs), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


slow = pytest.mark.slow
# Of each family one cut; the others are the same law and slow.
CUTS = [("parts", 2), ("masked", 1), ("smooth-cnn", 4), ("smooth-vgg", 8)]
OTHER_CUTS = [("parts", 1), ("masked", 2), ("smooth-cnn", 2), ("smooth-vgg", 4)]


@pytest.mark.parametrize(("front", "cut"), [*CUTS, *(pytest.param(*each, marks=slow) for each in OTHER_CUTS)])
def test_split_equals_unsplit_over_twenty_steps(package: Path, tmp_path: Path, front: str, cut: int) -> None:
    equals_unsplit(alone(package, tmp_path, front), cut, 20)


def equals_unsplit(deployment: Deployment, cut: int, steps: int) -> None:
    """Losses of every step, and all weights and statistics after the last one."""
    rate = RATES.get(deployment.front, 0.02)
    options = ("--epochs", steps, "--batch", IMAGES, "--cuts", cut, "--learning-rate", rate)
    train(deployment, "sequential_split", *options)
    single = plain(deployment)
    losses = follow(single, steps, rate)
    found = [line["loss"] for line in deployment.metrics() if "epoch" in line]
    assert losses[-1] < losses[0]
    assert found == pytest.approx(losses, rel=SMOOTH)
    trained = weights(deployment)
    for name, value in published(single.model):
        apart = distance(trained[name], value.numpy())
        assert apart <= SMOOTH or not is_felt(name, trained.keys()), (name, apart)


def published(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and running statistics by the names that are published."""
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            yield name.removeprefix("model.").removeprefix("model."), value.detach()


@pytest.mark.parametrize(
    "mode", [pytest.param("raw-label", marks=slow), pytest.param("permuted-label", marks=slow), "logit-gradient"]
)
def test_every_gradient_of_a_step_is_the_unsplit_models(package: Path, tmp_path: Path, mode: str) -> None:
    deployment = alone(package, tmp_path, "parts")
    found, unsplit = step_of_rate_one(deployment, 2, mode)
    (x,), y = unsplit.batch(1)
    y = permuted(deployment, y) if mode == "permuted-label" else y
    torch.nn.functional.cross_entropy(unsplit.model(x), y).backward()
    for name, parameter in named(unsplit.model):
        gradient = parameter.grad.numpy()
        apart, rounding = np.abs(found[name] - gradient).max(), rounding_of(parameter, gradient)
        assert apart <= SMOOTH * np.abs(gradient).max() + rounding, name


@pytest.mark.parametrize(
    ("front", "cut"),
    [
        pytest.param("cnn", 2, marks=slow),
        pytest.param("cnn", 4, marks=slow),
        pytest.param("vgg", 4, marks=slow),
        ("vgg", 8),  # with BatchNorm and max-pools as well
    ],
)
def test_a_step_through_relu_is_as_near_to_float64_as_torchs_own(
    package: Path, tmp_path: Path, front: str, cut: int
) -> None:
    """Where a value within rounding of 0 falls on either side, float32 gradients differ by 1e-3 and more: such values
    are counted, and none may be there."""
    deployment = alone(package, tmp_path, front)
    found, unsplit = step_of_rate_one(deployment, cut, "raw-label")
    (x,), y = unsplit.batch(1)
    exact = copy.deepcopy(unsplit.model).double()
    near = [0]
    for module in exact.modules():
        if isinstance(module, torch.nn.ReLU):
            module.inplace = False
            module.register_forward_hook(lambda _, inputs, __: near.append(int((inputs[0].abs() < FLIP).sum())))
    loss = torch.nn.functional.cross_entropy(exact(x.double()), y)
    loss.backward()
    (line,) = [line for line in deployment.metrics() if "epoch" in line]
    assert abs(line["loss"] - float(loss.detach())) <= 1e-6 * float(loss.detach())
    truth = {name: parameter.grad.numpy() for name, parameter in named(exact)}
    spread = float32_distances(unsplit.model, x, y, truth)
    names = set(weights(deployment))
    for name, parameter in named(unsplit.model):
        ours, size = float(np.linalg.norm(found[name] - truth[name])), truth[name].size
        limit = 2 * spread[name] + rounding_of(parameter, truth[name]) * size**0.5
        assert ours <= limit or not is_felt(name, names), (name, ours, spread[name], f"{sum(near)} values near 0")


def float32_distances(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, truth: dict[str, np.ndarray]
) -> dict[str, float]:
    """How far from float64 torch's own gradients are: the furthest of four runs that add up in different orders."""
    spread = dict.fromkeys(truth, 0.0)
    for layout in (torch.contiguous_format, torch.channels_last):
        for order in (torch.arange(len(x)), torch.arange(len(x)).flip(0)):
            copied = copy.deepcopy(model).to(memory_format=layout)
            images = x[order].contiguous(memory_format=layout)
            torch.nn.functional.cross_entropy(copied(images), y[order]).backward()
            for name, parameter in named(copied):
                spread[name] = max(spread[name], float(np.linalg.norm(parameter.grad.numpy() - truth[name])))
    return spread


def step_of_rate_one(deployment: Deployment, cut: int, mode: str) -> tuple[dict[str, np.ndarray], Plain]:
    """A step of rate 1 moves every weight by its gradient and the decay, as momentum has nothing yet: gradients by
    name, and the unsplit model at the beginning."""
    options = ("--epochs", 1, "--batch", IMAGES, "--cuts", cut, "--learning-rate", 1.0)
    train(deployment, "sequential_split", *options, mode=mode)
    unsplit, trained = plain(deployment), weights(deployment)
    start = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in named(unsplit.model)}
    decay = unsplit.rule.weight_decay
    return {name: value - trained[name] - decay * value for name, value in start.items()}, unsplit


def rounding_of(parameter: torch.nn.Parameter, gradient: np.ndarray) -> float:
    """What is lost where a gradient is read off the weights that it moved."""
    return 2.0**-23 * float(parameter.detach().abs().max() + np.abs(gradient).max())


@slow
@pytest.mark.parametrize(("front", "cuts"), [("smooth-cnn", range(1, 6)), ("smooth-vgg", range(1, 21))])
def test_split_equals_unsplit_at_every_cut(package: Path, tmp_path: Path, front: str, cuts: range) -> None:
    words = [word for word in TRAINING[front] if word not in ("--cuts", "2,4", "4,8")]
    made = tmp_path / "made"
    made.mkdir()
    for name in ("keys", DEVICES[0], "classes.txt"):
        (made / name).symlink_to(package / name)
    options = ("--cuts", f"{cuts[0]}-{cuts[-1]}", "--signing-key", package / "keys" / "publisher.key")
    export = [BIN / "export-frontend", *words, *options, "-o", made / front]
    subprocess.run([str(word) for word in export], check=True)
    for cut in cuts:
        root = tmp_path / str(cut)
        root.mkdir()
        equals_unsplit(alone(made, root, front), cut, 20)


def permuted(deployment: Deployment, labels: torch.Tensor) -> torch.Tensor:
    """What the site calls its classes on the wire."""
    from contract.keyed_noise import permutation

    front = deployment.package / deployment.front
    secret = (deployment.package / "keys" / "devices" / DEVICES[0] / "site.secret").read_bytes()
    digest = manifest.digest((front / "manifest.json").read_bytes())
    return torch.from_numpy(permutation(secret, len(PRIVATE_CLASSES), "classes", digest))[labels]


STORIES = [
    ("sequential_split", "parts", "permuted-label"),
    ("parallel_split", "cnn", "logit-gradient"),
    ("split_fed", "parts", "client-head"),
    ("fed_avg", "whole", "raw-label"),
]


@pytest.mark.parametrize(
    ("device_bin", "strategy", "front", "mode"),
    pairwise(STORIES),
    ids=lambda value: value.parent.name if isinstance(value, Path) else value,
)
def test_a_site_trains_its_parts_and_predicts(
    package: Path, tmp_path: Path, device_bin: Path, strategy: str, front: str, mode: str
) -> None:
    deployment = Deployment(package, tmp_path, device_bin=device_bin, front=front)
    fix_secrets(tmp_path)
    options = ("--epochs", 20, "--batch", 6, "--learning-rate", 0.005, "--seed", SEED, "--label-mode", mode)
    with deployment.server(*options, strategy=strategy):
        reports = deployment.run_devices("--label-mode", mode)
        answers = deployment.run_devices("--label-mode", mode, "--infer", data="test")
    assert [report["outcome"] for report in reports] == ["done", "done"]
    losses = [line["loss"] for line in deployment.metrics() if "epoch" in line]
    assert len(losses) == 20 and losses[-1] < losses[0]
    for answer in answers:
        assert len(answer["predictions"]) == answer["images"] == 5 * len(PRIVATE_CLASSES)
        assert answer["accuracy"] > 1.5 / len(PRIVATE_CLASSES)


@pytest.mark.parametrize(
    ("mode", "deaths"),
    [("client-head", 1), pytest.param("client-head", 10, marks=slow), pytest.param("raw-label", 10, marks=slow)],
)
def test_killed_devices_and_a_killed_server_change_nothing(
    package: Path, tmp_path: Path, mode: str, deaths: int
) -> None:
    """Devices die within their turns, `deaths` times, then the server does. Where many die, one dies between two
    settled steps, and each side holds the other's half of that step."""
    calm, killed = (Deployment(package, tmp_path / name, front="parts") for name in ("undisturbed", "killed"))
    options = ("--epochs", 6 + 8 * deaths, "--batch", 2, "--learning-rate", 0.005)
    for each in (calm, killed):
        each.root.mkdir()
    train(calm, "sequential_split", *options, mode=mode)

    copy_secrets(calm.root, killed.root)
    words = ("--label-mode", mode, "--seed", SEED, "--run", "same", *options, "--exit-when-done")
    server = killed.start_server(*words, strategy="sequential_split")
    first, second = (killed.start_device(device, "--label-mode", mode) for device in DEVICES)
    log = killed.root / "server.log"
    for _ in range(deaths):
        epoch = epochs_of(killed)
        wait_until(lambda: epochs_of(killed) > epoch, "an epoch more", log)  # noqa: B023 - called at once
        held = newest_part(killed)
        wait_until(lambda: newest_part(killed) != held, "the turn of the first device", log)  # noqa: B023
        stop(first, signal.SIGKILL)
        first = killed.start_device(DEVICES[0], "--label-mode", mode)
        wait_until(lambda: newest_part(killed) != held, "its return", log)  # noqa: B023
    epoch = epochs_of(killed)
    wait_until(lambda: epochs_of(killed) > epoch, "an epoch more", log)
    stop(server, signal.SIGKILL)
    server = killed.start_server(*words, strategy="sequential_split")
    for device, process in zip(DEVICES, (first, second), strict=True):
        killed.report_of(device, process)
    assert server.wait(timeout=120) == 0, log.read_text()

    assert deaths == 1 or "both sides hold" in log.read_text()
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
