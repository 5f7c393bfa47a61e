"""Frozen Swin and convolutional frontends in use: a device's worker on the exported file, the server's strategies on
what it sends. Patches are not retrieved there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.signature import generate, key_id
from edge_runtime.config import DeviceConfig
from edge_runtime.engines import open_engine
from edge_runtime.worker import Upload as Release
from server_runtime import backend, backend_folder, strategies
from server_runtime.strategies import Settings, Site
from tests.exporter import tiny
from tests.exporter.test_models_exported import NARROW, SWIN
from tests.make_package import draw_folder
from tools.simulation import Answers, Terms, accuracy_of, adapt, release_for_prediction
from tools.torch_worker import Device, make_device

KAPPA, CLASSES, IMAGES = 0.25, ("east", "north", "south"), 6
MODELS = {
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 3),
    "resnet": ("resnet18", {"small_images": True, **NARROW, "zero_init_last": False}, 3),
    "vgg": ("vgg11_bn", {"small_images": True, "num_classes": 4}, 6),
    "vit": (tiny.MODEL, tiny.ARGS, 1),
    "class token": (tiny.MODEL, tiny.ARGS, 1),  # which alone is sent
}


@dataclass(frozen=True)
class Deployed:
    """One package, and a device that holds pictures of three classes."""

    root: Path
    family: str
    trusted: dict

    def device(self, part: str) -> Device:
        config = DeviceConfig(
            engine=str(self.root / "front"), data=self.root / part, server="wss://localhost:1", trust=self.root,
            ca=None, key=self.root, name="device", state=self.root / "state", site_secret=None, classes=None,
            label_mode="permuted-label", noise="keyed", alpha=None, kappa_floor=KAPPA, max_releases=9, threads=1,
        )  # fmt: skip
        return make_device(config, self.trusted, lambda path: open_engine("onnxruntime", path, 1))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=[] if each in ("swin", "class token") else pytest.mark.slow, id=each)
        for each in MODELS
    ],
)
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    root, key = tmp_path_factory.mktemp("deployed"), generate()
    name, arguments, split = MODELS[request.param]
    tiny.run(root / "front", key, model=name, model_args=tuple(arguments.items()), split=split, int8=False,
        sent_patches="none" if request.param == "class token" else "all")  # fmt: skip
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for label, each in enumerate(CLASSES):
            draw_folder(root / part / each, label, IMAGES, rng)
    return Deployed(root, request.param, {key_id(key.public_key()): key.public_key()})


@pytest.mark.parametrize(
    ("strategy", "epochs"), [("split_adaptation", 20), pytest.param("linear_probe", 30, marks=pytest.mark.slow)]
)
def test_a_site_learns_from_what_its_device_sends(deployed: Deployed, strategy: str, epochs: int) -> None:
    folder = backend_folder.read(deployed.root / "front.backend")
    theta_b = backend.load(folder, KAPPA, torch.device("cpu"))
    terms = Terms("run", "site", strategy, "permuted-label", KAPPA, 1)
    device = deployed.device("train")
    answers = Answers({"device": device}, terms)
    settings = Settings("permuted-label", KAPPA, epochs, 8, 0.25, 1, 1e-3, 1e-2)
    trained = strategies.find(strategy).build(theta_b, settings)
    last = adapt(trained, answers, Site("site", ("device",), len(CLASSES)))
    assert last["samples"] == len(CLASSES) * IMAGES
    upload, layout = answers.uploads["device"], folder.layout
    assert upload.codes.shape == (18, layout.count, layout.dim)
    if deployed.family == "vit":
        assert upload.sources is not None and upload.sources.shape == (18, layout.patches)
    else:
        assert upload.sources is None and device.worker.counters.payload_bytes == upload.codes.nbytes
    if strategy == "split_adaptation":
        assert float(last["loss"]) < (0.9 if deployed.family == "class token" else 0.8) * np.log(3)
    codes = release_for_prediction(deployed.device("test"), terms)
    assert accuracy_of(trained, deployed.device("test"), codes, "run") > 0.6


def test_without_sources_a_frame_holds_as_many_training_images_as_others(deployed: Deployed) -> None:
    layout = backend_folder.read(deployed.root / "front.backend").layout
    frame_bytes = 4096 + 100 * (layout.count * layout.dim + 16 + 2)
    worker = deployed.device("train").worker
    train, infer = (worker.batch_size(Release("a", split, KAPPA, frame_bytes)) for split in ("train", "infer"))
    assert infer == 100 and (train == infer) == (deployed.family != "vit")
