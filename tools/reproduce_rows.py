"""One row of a reproduction: split adaptation and three linear probes on one site, and a ridge attack on its uploads.

The probes are those of algorithms.md section 7: (1) the clean float model on clean images; (2) the released features
through the backend as it was before tuning; (3) the same through the tuned one. All but (1) see the same uploads behind
the same Wiener filter, and are tested on images that carry the same noise. Nothing is chosen on test images.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors.torch
import timm
import torch
from numpy.typing import NDArray

from contract.console import say
from contract.image_folder import scan
from contract.images import ImageRule, load_pixels, normalise, resize
from contract.keyed_noise import derive_key
from contract.onnx_weights import noised_onnx
from contract.signature import key_id, load_public
from contract.tokens import dequantize, wire_steps
from edge_runtime.config import DeviceConfig
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.data import Sample, load_dataset
from edge_runtime.engines import Engine, open_engine
from edge_runtime.state import open_state, write_durably
from exporter.checkpoint import load_weights, read_state
from exporter.split import build_backend
from server_runtime import backend as backends
from server_runtime import backend_folder, strategies
from server_runtime.attacks import ridge
from server_runtime.plan import FIELDS
from server_runtime.store import Upload
from server_runtime.strategies import Settings, Site, linear_probe
from tools.reproduce_baselines import Budget, Images, run_baseline
from tools.reproduce_world import SiteFolders, World
from tools.simulation import Answers, Terms, accuracy_of, adapt, release_for_prediction
from tools.torch_worker import IMAGES_AT_ONCE, Device, engine_labels, make_device, open_torch

ALPHA = 0.1
LABEL_MODE = "permuted-label"
RUN, SITE = "reproduce", "site"
ATTACK_IMAGES = 2000  # public images that the attack learns from
ATTACK_FRONTENDS = 3  # weight noises that the attacker draws
HELD_OUT = 5  # every fifth public image chooses the penalty
DEFAULTS = {field.name: field.default for field in FIELDS}  # what server-run does when it is told nothing


@dataclass(frozen=True)
class Cell:
    """One setting and one seed."""

    shots: int
    kappa: float
    seed: int


@dataclass(frozen=True)
class Found:
    """What one cell gave; accuracies as shares, PSNR in dB as means over the uploaded images."""

    accuracy: Mapping[str, float]  # sa, lp_clean, lp_released, lp_tuned
    chosen: Mapping[str, Mapping[str, float | None]]  # learning rate, L2 and held-out accuracy by method
    ridge_psnr_db: float
    mean_colour_psnr_db: float
    ridge_note: str
    images: int
    test_images: int
    codes_changed: float
    frontend_engine: str
    training_device: str
    seconds: float

    def document(self) -> dict[str, object]:
        return asdict(self)


class Laboratory:
    """A world with its package, its engine, and what rows share."""

    def __init__(self, world: World, engine: str) -> None:
        """Raises: PackageError, ConfigError when the package's backend cannot be used."""
        self.folder = backend_folder.read(world.backend)
        self._world, self._engine = world, engine
        self._threads = usable_cpus(allowed_affinity())
        self._device = backends.choose_device(self._threads)
        self._rule: ImageRule = self.folder.manifest.image
        self._decoders: dict[float, tuple[ridge.RidgeDecoder, NDArray[np.float64]]] = {}
        self._tested: tuple[object, dict[str, NDArray[np.int8]]] = (None, {})
        self._clean_tested: tuple[object, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._test_images: tuple[object, Images] | None = None

    # -- baselines that train in the clear

    def baseline(self, name: str, shots: int, seed: int, budget: Budget) -> dict[str, object]:
        """One baseline on the images that rows of these shots and this seed are about; no noise, so no kappa.

        Raises: TrainingError, DataError, ConfigError.
        """
        started_s = time.monotonic()
        folders = self._world.site(shots, seed)
        key = tuple(folders.test.values())
        if self._test_images is None or self._test_images[0] != key:
            self._test_images = (key, self._images(folders, folders.test))
        train, test = self._images(folders, folders.train), self._test_images[1]
        found = run_baseline(
            name, self._model, self.folder.cut.index, train, test, len(folders.classes), budget, seed
        )  # fmt: skip
        return {
            **found.document(), "images": len(train.labels), "test_images": len(test.labels),
            "training_device": f"torch {torch.__version__} on {device_label(self._device)}",
            "seconds": round(time.monotonic() - started_s, 1),
        }  # fmt: skip

    def _images(self, folders: SiteFolders, images: Mapping[str, Path]) -> Images:
        """What the site's devices hold, as they would read it: normalised, each picture once."""
        samples = [
            sample
            for path in images.values()
            for sample in load_dataset(path, folders.classes, bytes(32), self._rule.max_pixels, lambda: None).samples
        ]
        inputs = torch.from_numpy(normalise(self._pictures(samples), self._rule))
        return Images(inputs, torch.tensor([sample.label for sample in samples]))

    # -- the row

    def row(self, cell: Cell) -> Found:
        """Raises: TrainingError, DeviceError, DataError."""
        started_s = time.monotonic()
        folders = self._world.site(cell.shots, cell.seed)
        train, test = (self._devices(cell, folders, part) for part in (folders.train, folders.test))
        codes = self._codes_to_predict(cell, folders, test)
        site = Site(SITE, tuple(sorted(train)), len(folders.classes))
        found: dict[str, float] = {}
        chosen: dict[str, Mapping[str, float | None]] = {}
        answers: Answers | None = None
        for method, name, theta_b in self._methods(cell.kappa):
            terms = Terms(RUN, SITE, name, LABEL_MODE, cell.kappa, cell.seed)
            strategy = strategies.find(name).build(theta_b, self._settings(cell))
            answers = Answers(train, terms)
            last = adapt(strategy, answers, site)
            found[method] = mean_by_images(
                [(accuracy_of(strategy, test[device], codes[device], RUN), len(codes[device])) for device in test]
            )
            rates = {"backend_lr": self.folder.backend_lr, "head_lr": self.folder.head_lr}
            probed = {key: last.get(key) for key in ("lr", "l2", "held_out_accuracy")}
            chosen[method] = rates if method == "sa" else probed  # type: ignore[assignment]
            say(f"   {method} {100 * found[method]:.2f} %")
        found["lp_clean"], chosen["lp_clean"] = self._probe_in_the_clear(folders, train, test)
        say(f"   lp_clean {100 * found['lp_clean']:.2f} %")
        assert answers is not None
        ridge_db, colour_db = self._attack(cell.kappa, train, answers.uploads)
        return Found(
            found, chosen, ridge_db, colour_db,
            "one linear map from token to patch; it flatters the defence: a transformer decoder reads 4 to 7 dB more",
            sum(len(device.worker.samples) for device in train.values()), sum(map(len, codes.values())),
            next(iter(train.values())).codes_changed, engine_labels([*train.values(), *test.values()]),
            f"torch {torch.__version__} on {device_label(self._device)}", round(time.monotonic() - started_s, 1),
        )  # fmt: skip

    def _methods(self, kappa: float) -> Iterator[tuple[str, str, backends.Backend]]:
        """Method, strategy, and the backend it starts from."""
        tuned = backends.load(self.folder, kappa, self._device)
        yield "sa", "split_adaptation", tuned
        yield "lp_tuned", "linear_probe", tuned
        module = build_backend(self.folder.model, self.folder.model_args, self.folder.cut.index)
        module.load_state_dict(safetensors.torch.load_file(self._world.backend / "backend_original.safetensors"))
        yield "lp_released", "linear_probe", backends.Backend(module, tuned.front, self._device)

    def _settings(self, cell: Cell) -> Settings:
        return Settings(
            LABEL_MODE, cell.kappa, DEFAULTS["epochs"], DEFAULTS["augmentations"], DEFAULTS["replaced"], cell.seed,
            self.folder.backend_lr, self.folder.head_lr,
        )  # fmt: skip

    # -- devices

    def _devices(self, cell: Cell, folders: SiteFolders, images: Mapping[str, Path]) -> dict[str, Device]:
        """Devices whose secrets come from the seed: the same noise again whenever a row is computed."""
        publisher = load_public(self._world.publisher)
        made = {}
        for name, data in images.items():
            world_of_its_own = f"{self._engine}-{cell.shots}shot-kappa{cell.kappa:g}-seed{cell.seed}"
            root = self._world.root / "states" / world_of_its_own / name  # rows may be computed side by side
            open_state(root).close()
            for secret in ("device_secret", "site_secret"):
                owner = name if secret == "device_secret" else SITE
                path = root / "identity" / secret
                if not path.exists():
                    write_durably(path, derive_key(b"cutlayer reproduction", secret, cell.seed, owner))
            classes = root / "classes.txt"
            write_durably(classes, "".join(f"{each}\n" for each in folders.classes).encode())
            config = DeviceConfig(
                engine=str(self._world.front), data=data, server="wss://localhost:1", trust=self._world.publisher,
                ca=None, key=self._world.publisher, name=name, state=root,
                site_secret=root / "identity" / "site_secret", classes=classes, label_mode=LABEL_MODE, noise="keyed",
                alpha=ALPHA, kappa_floor=cell.kappa, max_releases=1, threads=self._threads,
            )  # fmt: skip
            made[name] = make_device(config, {key_id(publisher): publisher}, self._open_frontend)
        return made

    def _open_frontend(self, path: Path) -> Engine:
        if self._engine == "torch":
            return open_torch(path, self._device)
        return open_engine(self._engine, path, self._threads)

    def _codes_to_predict(
        self, cell: Cell, folders: SiteFolders, devices: Mapping[str, Device]
    ) -> dict[str, NDArray[np.int8]]:
        """The test images' codes; rows that differ in shots alone share them, where their test folders are the same."""
        key = (cell.kappa, cell.seed, tuple(folders.test.values()))
        if self._tested[0] != key:
            terms = Terms(RUN, SITE, "split_adaptation", LABEL_MODE, cell.kappa, cell.seed)
            self._tested = (
                key, {name: release_for_prediction(device, terms) for name, device in devices.items()}
            )  # fmt: skip
        return self._tested[1]

    # -- linear probing in the clear

    def _probe_in_the_clear(
        self, folders: SiteFolders, train: Mapping[str, Device], test: Mapping[str, Device]
    ) -> tuple[float, Mapping[str, float | None]]:
        """Accuracy of a linear head on the float model's last feature, as linear_probe chooses and fits it."""
        inputs, labels = self._clean_features(train)
        mean, scale = inputs.mean(dim=0), inputs.std(dim=0, correction=0).clamp_min(1e-6)
        inputs = (inputs - mean) / scale
        classes, steps = len(folders.classes), DEFAULTS["epochs"]
        lr, l2, held_out = linear_probe.choose_setting(inputs, labels, classes, steps)
        everyone = torch.ones(1, len(labels))
        weight, bias = linear_probe.fit(inputs, labels, everyone, [(lr, l2)], classes, steps)
        key = tuple(folders.test.values())
        if self._clean_tested is None or self._clean_tested[0] != key:
            self._clean_tested = (key, self._clean_features(test))
        tested, wanted = self._clean_tested[1]
        right = (((tested - mean) / scale) @ weight[0].T + bias[0]).argmax(dim=1) == wanted
        return int(right.sum()) / len(right), {"lr": lr, "l2": l2, "held_out_accuracy": held_out}

    @torch.no_grad()
    def _clean_features(self, devices: Mapping[str, Device]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n, f) and labels (n,) of the devices' images, as the whole model in float32 sees them."""
        samples = [sample for device in devices.values() for sample in device.worker.samples]
        features = []
        for start in range(0, len(samples), IMAGES_AT_ONCE):
            images = normalise(self._pictures(samples[start : start + IMAGES_AT_ONCE]), self._rule)
            batch = torch.from_numpy(images).to(self._device)
            features.append(self._model.forward_head(self._model.forward_features(batch), pre_logits=True))
        labels = torch.tensor([sample.label for sample in samples], device=self._device)
        return torch.cat(features).float(), labels

    @cached_property
    def _model(self) -> torch.nn.Module:
        model = timm.create_model(self._world.model, **self._world.model_args)
        load_weights(model, read_state(self._world.weights), str(self._world.weights))
        return model.float().eval().to(self._device)

    def _pictures(self, samples: Sequence[Sample]) -> NDArray[np.uint8]:
        return pictures([(sample.path, sample.relative) for sample in samples], self._rule)

    # -- the attack

    def _attack(
        self, kappa: float, devices: Mapping[str, Device], uploads: Mapping[str, Upload]
    ) -> tuple[float, float]:
        """PSNR in dB of the ridge decoder and of the public mean colour on all uploaded images."""
        decoder, colour = self._decoder(kappa)
        layout, steps = self.folder.cut.tokens, wire_steps(self.folder.cut.statistics, kappa)
        true, decoded = [], []
        for name, device in devices.items():
            tokens = dequantize(uploads[name].codes, steps, layout.prefix)[:, layout.prefix :]
            size = (self._rule.height, self._rule.width)
            decoded.append(ridge.images_of(decoder.decode(tokens), layout.grid, size))
            true.append(self._pictures(device.worker.samples) / 255.0)
        images, found = np.concatenate(true), np.concatenate(decoded)
        return ridge.mean_psnr_db(images, found), ridge.mean_psnr_db(images, np.broadcast_to(colour, images.shape))

    def _decoder(self, kappa: float) -> tuple[ridge.RidgeDecoder, NDArray[np.float64]]:
        """Trained on noisy public tokens: the attacker knows the law of both noises, and draws its own."""
        if kappa not in self._decoders:
            layout, statistics = self.folder.cut.tokens, self.folder.cut.statistics
            patches, frontends = self._public_pairs
            rng = np.random.default_rng([0, round(1000 * kappa)])
            train, held = (ridge.Moments(layout.dim, patches.shape[2]) for _ in range(2))
            for tokens in frontends:
                for place in range(0, len(tokens), IMAGES_AT_ONCE):
                    rows = np.arange(place, min(place + IMAGES_AT_ONCE, len(tokens)))
                    noisy = ridge.released(tokens[rows].astype(np.float32), statistics, kappa, layout.prefix, rng)
                    for sums, part in ((train, rows % HELD_OUT != 0), (held, rows % HELD_OUT == 0)):
                        seen = noisy[part][:, layout.prefix :]
                        sums.add(seen.reshape(-1, layout.dim), patches[rows[part]].reshape(-1, patches.shape[2]))
            self._decoders[kappa] = (ridge.fit(train, held), ridge.mean_colour(train))
        return self._decoders[kappa]

    @cached_property
    def _public_pairs(self) -> tuple[NDArray[np.float32], list[NDArray[np.float16]]]:
        """Patches (n, N, p) of some public images, and their tokens (n, T, d) from each noised frontend."""
        files = scan(self._world.public, None).images
        order = np.random.default_rng(0).permutation(len(files))[:ATTACK_IMAGES]
        images = pictures([(files[row].path, files[row].relative) for row in order], self._rule)
        patches = ridge.patches_of((images / 255.0).astype(np.float32), self.folder.cut.tokens.grid)
        return patches, [self._attackers_tokens(images, number) for number in range(ATTACK_FRONTENDS)]

    def _attackers_tokens(self, images: NDArray[np.uint8], number: int) -> NDArray[np.float16]:
        cut = self.folder.cut

        def key_for(layer: str) -> bytes:
            return derive_key(b"the attacker's own", number, layer)

        data, _, _ = noised_onnx((self._world.front / cut.onnx).read_bytes(), cut.weights, ALPHA, key_for)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / cut.onnx
            path.write_bytes(data)
            engine = self._open_frontend(path)
        parts = [
            engine.run(normalise(images[start : start + IMAGES_AT_ONCE], self._rule)).astype(np.float16)
            for start in range(0, len(images), IMAGES_AT_ONCE)
        ]
        return np.concatenate(parts)


def pictures(files: Sequence[tuple[Path, str]], rule: ImageRule) -> NDArray[np.uint8]:
    """(n, h, w, 3) as a device makes them before it normalises."""
    return np.stack([resize(load_pixels(path, name, rule.max_pixels), rule) for path, name in files])


def mean_by_images(shares: Sequence[tuple[float, int]]) -> float:
    """Mean of devices' accuracies by their number of images."""
    return sum(share * count for share, count in shares) / sum(count for _, count in shares)


def device_label(device: torch.device) -> str:
    """What rows call the device that trained."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
