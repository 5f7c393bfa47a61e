"""One row of a reproduction, of any study: devices of one site, their uploads, what is trained on them, and its score.

The main study's row is split adaptation beside three linear probes on one site, and a ridge attack on its uploads. The
probes are those of algorithms.md section 7: (1) the clean float model on clean images; (2) the released features
through the backend as it was before tuning; (3) the same through the tuned one. All but (1) see the same uploads behind
the same Wiener filter, and are tested on images that carry the same noise. Nothing is chosen on test images.

Simulated: the frontend may run on torch (every row names its engine), and no socket lies between; the files, the noise,
the labels, the messages and the training are the product's own. Which rows there are is left to `reproduce_cells`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from numpy.typing import NDArray

from contract.console import say
from contract.errors import ConfigError
from contract.image_folder import scan
from contract.images import ImageRule, normalise
from contract.tokens import SentRule
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.data import load_dataset
from edge_runtime.engines import Engine
from exporter.checkpoint import image_rule, load_weights, read_state
from exporter.models import Facts, family_of
from exporter.split import build_backend, default_cut, split_model
from server_runtime import backend as backends
from server_runtime import backend_folder, strategies
from server_runtime.plan import FIELDS
from server_runtime.strategies import Settings, Site, Strategy
from tools import reproduce_attack, reproduce_risk
from tools.reproduce_attack import RidgeAttack, pictures
from tools.reproduce_baselines import Budget, Images, run_baseline
from tools.reproduce_cells import UNTUNED, VARIANTS, Cell
from tools.reproduce_copies import Copying, PreparedAnswers, copies_of
from tools.reproduce_sites import LABEL_MODE, RUN, SITE, Sites, Sitting, terms_of
from tools.reproduce_world import SiteFolders, World
from tools.simulation import Answering, Answers, accuracy_of, adapt
from tools.torch_worker import IMAGES_AT_ONCE, Device, engine_labels

AUXILIARY_DEPTH = 2
DEFAULTS = {field.name: field.default for field in FIELDS}  # what server-run does when it is told nothing

Row = dict[str, Any]


@dataclass(frozen=True)
class Adaptation:
    """How a site adapts; None takes the rates of the package's few_shot.json."""

    alpha: float = 0.1
    epochs: int = DEFAULTS["epochs"]
    runs: int = DEFAULTS["augmentations"]
    replaced: float = DEFAULTS["replaced"]
    backend_lr: float | None = None
    head_lr: float | None = None


@dataclass(frozen=True)
class Effort:
    """What rows may spend."""

    baselines: Budget = Budget()
    auxiliary_epochs: int = 20
    adaptation: Adaptation = Adaptation()


class Laboratory:
    """A world with one package, its engine, and what rows share."""

    def __init__(self, world: World, engine: str, effort: Effort) -> None:
        self._world, self._engine, self._effort = world, engine, effort
        self._threads = usable_cpus(allowed_affinity())
        self._device = backends.choose_device(self._threads)
        self._sites = Sites(world, engine, effort.adaptation.alpha, self._threads, self._device)
        self._test_images: tuple[object, Images] | None = None

    @cached_property
    def folder(self) -> backend_folder.BackendFolder:
        """Raises: PackageError, ConfigError when the package's backend cannot be used."""
        folder = backend_folder.read(self._world.backend)
        assert isinstance(folder, backend_folder.BackendFolder)
        if folder.cut.sent != SentRule():
            raise ConfigError(
                f"these studies read packages that send all tokens under the same noise, found {folder.cut.sent}",
                "use tools/reproduce_noise, whose attacks know the other forms",
            )
        return folder

    @cached_property
    def _attack(self) -> RidgeAttack:
        world = self._world
        alpha = self._effort.adaptation.alpha
        return RidgeAttack(world.front, self.folder.cut, self._rule, world.public, alpha, self._sites.open_frontend)

    @cached_property
    def _rule(self) -> ImageRule:
        """How the model wants its images; the package says the same."""
        return image_rule(self._model, self._shape.input_shape)

    @cached_property
    def _shape(self) -> Facts:
        return family_of(self._model)[1].facts(self._model)

    def row(self, cell: Cell) -> Row:
        """What the cell's study reports. Raises: TrainingError, DeviceError, DataError, ConfigError, PackageError."""
        started_s = time.monotonic()
        found = {
            "main": self._compare, "baselines": self._baseline, "ablation": self._vary, "risk": self._steal,
            "keying": self._copy, "noise": self._trade,
        }[cell.study](cell)  # fmt: skip
        trained_by = f"torch {torch.__version__} on {device_label(self._device)}"
        return {**found, "training_device": trained_by, "seconds": round(time.monotonic() - started_s, 1)}

    # -- the studies

    def _compare(self, cell: Cell) -> Row:
        sitting = self._sites.sit(cell)
        accuracy: dict[str, float] = {}
        chosen: dict[str, Mapping[str, Any]] = {}
        for method, name, tuning in (
            ("sa", "split_adaptation", ""), ("lp_tuned", "linear_probe", ""), ("lp_released", "linear_probe", UNTUNED),
        ):  # fmt: skip
            answers = Answers(sitting.train, terms_of(cell, name))
            theta_b, settings = self._backend(cell, tuning), self._settings(cell)
            strategy, last = self._train(name, theta_b, settings, answers, sitting.site)
            accuracy[method] = self._score(strategy, sitting)
            probed = {key: last.get(key) for key in ("lr", "l2", "held_out_accuracy")}
            chosen[method] = self._rates if method == "sa" else probed
            say(f"   {method} {100 * accuracy[method]:.2f} %")
        clean = self._probe_in_the_clear(sitting.folders)
        accuracy["lp_clean"], chosen["lp_clean"] = clean.accuracy, clean.chosen()
        say(f"   lp_clean {100 * clean.accuracy:.2f} %")
        return {"accuracy": accuracy, "chosen": chosen, **self._read(cell, sitting, answers), **self._facts(sitting)}

    def _baseline(self, cell: Cell) -> Row:
        """One baseline in the clear, on the images that rows of these shots and this seed are about."""
        folders = self._world.site(cell.dataset, cell.shots, cell.seed)
        train, test = self._images(folders, folders.train), self._tested_images(folders)
        cut, classes = self._world.split or default_cut(self._shape.depth), len(folders.classes)
        found = run_baseline(cell.case, self._model, cut, train, test, classes, self._effort.baselines, cell.seed)
        return {**found.document(), "images": len(train.labels), "test_images": len(test.labels)}

    def _vary(self, cell: Cell) -> Row:
        """Split adaptation alone, with one thing changed."""
        variant, sitting, settings = VARIANTS[cell.case], self._sites.sit(cell), self._settings(cell)
        if variant.runs is not None:
            settings = replace(settings, augmentations=variant.runs)
        if variant.replaced is not None:
            settings = replace(settings, replaced=variant.replaced)
        answers = Answers(sitting.train, terms_of(cell, "split_adaptation"))
        theta_b = self._backend(cell, variant.tuning)
        strategy, _ = self._train("split_adaptation", theta_b, settings, answers, sitting.site)
        changed = {"runs": settings.augmentations, "replaced": settings.replaced, **self._rates}
        return {"accuracy": self._score(strategy, sitting), "chosen": changed, **self._facts(sitting)}

    def _trade(self, cell: Cell) -> Row:
        """Accuracy with noisy and with noise-free inference, and what the attack reads of the training uploads.

        Noise-free test tokens exist in a simulation alone: a device whose floor is kappa refuses to send them."""
        sitting, settings = self._sites.sit(cell), self._settings(cell)
        answers = Answers(sitting.train, terms_of(cell, "split_adaptation"))
        theta_b = self._backend(cell, cell.case)
        strategy, _ = self._train("split_adaptation", theta_b, settings, answers, sitting.site)
        quiet = replace(cell, kappa=0.0)
        unfiltered = self._backend(quiet, cell.case)
        behind = strategies.find("split_adaptation").build(unfiltered, self._settings(quiet))
        behind.load(sitting.site, strategy.state())
        noisy = self._score(strategy, sitting)
        free = noisy if cell.kappa == 0 else self._score(behind, self._sites.sit(quiet))
        return {
            "accuracy": noisy, "noise_free_accuracy": free, **self._read(cell, sitting, answers),
            **self._facts(sitting),
        }  # fmt: skip

    def _copy(self, cell: Cell) -> Row:
        """All copies of an image in every epoch, as published; epochs are fewer, so that steps are about as many."""
        assert cell.kappa is not None
        sitting, settings = self._sites.sit(cell), self._settings(cell)
        answers = Answers(sitting.train, terms_of(cell, "split_adaptation"))
        asked: dict[str, dict[str, Any]] = {name: {} for name in sitting.train}
        answers.answer(
            strategies.Ask("features", "collect_features", asked, {"kappa": cell.kappa, "seed": cell.seed})
        )  # fmt: skip
        runs = settings.augmentations
        replaced = round(settings.replaced * self.folder.cut.tokens.patches)
        copying = Copying(runs, cell.seed, replaced, cell.kappa, cell.case == "fresh")
        copies = {
            name: copy
            for device, upload in answers.uploads.items()
            for name, copy in copies_of(sitting.train[device], upload, copying).items()
        }
        epochs = max(1, round(2 * settings.epochs / (runs + 1)))
        settings = replace(settings, epochs=epochs, augmentations=0, replaced=0.0)
        site = Site(SITE, tuple(sorted(copies)), sitting.site.classes)
        prepared, theta_b = PreparedAnswers(copies), self._backend(cell, "")
        strategy, _ = self._train("split_adaptation", theta_b, settings, prepared, site)
        chosen = {"copies": runs + 1, "epochs": epochs, **self._rates}
        return {"accuracy": self._score(strategy, sitting), "chosen": chosen, **self._facts(sitting)}

    def _steal(self, cell: Cell) -> Row:
        """What each thief reaches without the server, beside linear probing in the clear."""
        folders = self._world.site(cell.dataset, cell.shots, cell.seed)
        train, test, classes = self._images(folders, folders.train), self._tested_images(folders), len(folders.classes)
        clean, prefix = self._probe_in_the_clear(folders), self.folder.cut.tokens.prefix
        accuracy, chosen = {"lp_clean": clean.accuracy}, {"lp_clean": clean.chosen()}
        stolen = [self._stolen(images, original=False) for images in (train, test)]
        leaked = [self._stolen(images, original=True) for images in (train, test)]
        for name, (known, unseen) in (("quantized_frontend", stolen), ("original_frontend", leaked)):
            found = reproduce_risk.steal_by_probe(known, unseen, prefix, classes, self._effort.adaptation.epochs)
            accuracy[name], chosen[name] = found.accuracy, found.chosen()
            say(f"   {name} {100 * found.accuracy:.2f} %")
        tuned = reproduce_risk.steal_by_backend(
            self._auxiliary, *stolen, classes, self._effort.baselines, cell.seed
        )  # fmt: skip
        accuracy["auxiliary_backend"] = float(tuned.pop("accuracy") or 0.0)
        chosen["auxiliary_backend"] = dict(tuned)
        say(f"   auxiliary_backend {100 * accuracy['auxiliary_backend']:.2f} %")
        facts = {"images": len(train.labels), "test_images": len(test.labels), "frontend_engine": self._engine}
        return {"accuracy": accuracy, "chosen": chosen, **facts}

    # -- what studies share

    def _train(
        self, name: str, theta_b: backends.Backend, settings: Settings, answers: Answering, site: Site
    ) -> tuple[Strategy, Mapping[str, Any]]:
        """A strategy run to its end, and its last record."""
        strategy = strategies.find(name).build(theta_b, settings)
        return strategy, adapt(strategy, answers, site)

    def _score(self, strategy: Strategy, sitting: Sitting) -> float:
        codes, test = sitting.codes, sitting.test
        return mean_by_images(
            [(accuracy_of(strategy, test[device], codes[device], RUN), len(codes[device])) for device in test]
        )

    def _read(self, cell: Cell, sitting: Sitting, answers: Answers) -> Row:
        """What the ridge attack makes of the training uploads."""
        assert cell.kappa is not None
        uploads = [
            (answers.uploads[name].codes, self._pictures(device)) for name, device in sitting.train.items()
        ]  # fmt: skip
        ridge_db, colour_db = self._attack.psnr_db(cell.kappa, uploads)
        return {"ridge_psnr_db": ridge_db, "mean_colour_psnr_db": colour_db, "ridge_note": reproduce_attack.NOTE}

    def _facts(self, sitting: Sitting) -> Row:
        devices = [*sitting.train.values(), *sitting.test.values()]
        return {
            "images": sum(len(device.worker.samples) for device in sitting.train.values()),
            "test_images": sitting.test_count, "codes_changed": devices[0].codes_changed,
            "frontend_engine": engine_labels(devices),
        }  # fmt: skip

    @property
    def _rates(self) -> dict[str, float]:
        wanted, shipped = self._effort.adaptation, self.folder
        return {
            "backend_lr": shipped.backend_lr if wanted.backend_lr is None else wanted.backend_lr,
            "head_lr": shipped.head_lr if wanted.head_lr is None else wanted.head_lr,
        }

    def _settings(self, cell: Cell) -> Settings:
        assert cell.kappa is not None
        wanted = self._effort.adaptation
        return Settings(
            LABEL_MODE, cell.kappa, wanted.epochs, wanted.runs, wanted.replaced, cell.seed, **self._rates
        )  # fmt: skip

    def _backend(self, cell: Cell, tuning: str) -> backends.Backend:
        """The package's backend behind the filter for this noise, as it ships or as it was before tuning."""
        assert cell.kappa is not None
        if tuning != UNTUNED:
            return backends.load(self.folder, cell.kappa, self._device)
        module = build_backend(self.folder.model, self.folder.model_args, self.folder.cut.index)
        module.load_state_dict(safetensors.torch.load_file(self._world.backend / "backend_original.safetensors"))
        module.requires_grad_(True)
        return backends.Backend(module, backends.front_of(self.folder, cell.kappa), self._device)

    def _pictures(self, device: Device) -> NDArray[np.uint8]:
        return pictures([(sample.path, sample.relative) for sample in device.worker.samples], self._rule)

    # -- images in the clear

    def _images(self, folders: SiteFolders, images: Mapping[str, Path]) -> Images:
        """What the site's devices hold, as they would read it: normalised, each picture once."""
        samples = [
            sample
            for path in images.values()
            for sample in load_dataset(path, folders.classes, bytes(32), self._rule.max_pixels, lambda: None).samples
        ]
        shown = pictures([(sample.path, sample.relative) for sample in samples], self._rule)
        labels = torch.tensor([sample.label for sample in samples])
        return Images(torch.from_numpy(normalise(shown, self._rule)), labels)

    def _tested_images(self, folders: SiteFolders) -> Images:
        key = tuple(folders.test.values())
        if self._test_images is None or self._test_images[0] != key:
            self._test_images = (key, self._images(folders, folders.test))
        return self._test_images[1]

    def _probe_in_the_clear(self, folders: SiteFolders) -> reproduce_risk.Probed:
        """A linear head on the float model's last feature, as the whole model in float32 sees the raw images."""

        def features(images: Images) -> Images:
            model = self._model
            with torch.no_grad():
                parts = [
                    model.forward_head(model.forward_features(batch.to(self._device)), pre_logits=True).float()
                    for batch in images.inputs.split(IMAGES_AT_ONCE)
                ]
            return Images(torch.cat(parts), images.labels.to(self._device))

        train, test = features(self._images(folders, folders.train)), features(self._tested_images(folders))
        return reproduce_risk.probe(train, test, len(folders.classes), self._effort.adaptation.epochs)

    @cached_property
    def _model(self) -> torch.nn.Module:
        model = timm.create_model(self._world.model, **self._world.model_args)
        load_weights(model, read_state(self._world.weights), str(self._world.weights))
        return model.float().eval().to(self._device)

    # -- thieves

    @cached_property
    def _released(self) -> Engine:
        """The frontend as the package has it: INT8, no device's noise."""
        return self._sites.open_frontend(self._world.front / self.folder.cut.onnx)

    def _stolen(self, images: Images, original: bool) -> Images:
        """Clean tokens of the released file, or of the float frontend that it was made of."""
        parts = []
        frontend = split_model(self._model, self.folder.cut.index)[0] if original else None
        for batch in images.inputs.split(IMAGES_AT_ONCE):
            if frontend is None:
                parts.append(torch.from_numpy(self._released.run(batch.numpy())).to(self._device))
            else:
                with torch.no_grad():
                    parts.append(frontend(batch.to(self._device)))
        return Images(torch.cat(parts), images.labels.to(self._device))

    @cached_property
    def _auxiliary(self) -> reproduce_risk.AuxiliaryBackend:
        """A thief's own backend behind the released frontend, from some labelled public images; the same for all."""
        folder = scan(self._world.public, None)
        order = np.random.default_rng(0).permutation(len(folder.images))[: reproduce_risk.PUBLIC_IMAGES]
        files = [folder.images[row] for row in order]
        shown = pictures([(each.path, each.relative) for each in files], self._rule)
        labels = torch.tensor([each.class_index for each in files])
        public = self._stolen(Images(torch.from_numpy(normalise(shown, self._rule)), labels), original=False)
        say(f"   an auxiliary backend on {len(labels)} public images")
        return reproduce_risk.train_auxiliary(
            public, len(folder.classes), self.folder.cut.tokens.dim, AUXILIARY_DEPTH, self._effort.auxiliary_epochs, 0
        )


def mean_by_images(shares: list[tuple[float, int]]) -> float:
    """Mean of devices' accuracies by their number of images."""
    return sum(share * count for share, count in shares) / sum(count for _, count in shares)


def device_label(device: torch.device) -> str:
    """What rows call the device that trained."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
