"""What a curious server learns from shift-aware prototypes, with and without the options that keep something back.

It sees gradients at the logits (or at the features, where heads are the devices'), class prototypes with their counts,
and what leaves the parts. It knows the parts, as it averages them, and has images of a domain that no device has, to
learn decoders from (algorithms.md section 5.5). Training is `reproduce_prototypes_rows`' part.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.epoch_order import batch_edges, epoch_order
from contract.images import load_pixels, resize
from contract.messages import Gradient, Prototypes
from contract.training import PROJECTION
from exporter import prototypes
from exporter.models import family_of
from server_runtime import strategies
from server_runtime.attacks import Effort, Seen, label_inference, ridge
from server_runtime.leakage.metrics import measure
from server_runtime.report import Table
from server_runtime.strategies import Ask, Reply, Site, State
from tools.reproduce_prototypes_rows import RUN, SITE, PrototypeCell, PrototypeLaboratory
from tools.reproduce_split_rows import named
from tools.reproduce_table import spread
from tools.simulation import Answers, Terms, adapt
from tools.torch_worker import PartDevice

HELD_SHARE = 0.2  # of the attacker's own images: the ridge's penalty is chosen on these
ATTACKED = 150  # images of each device
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
COUNT_STEPS = (1, 10)  # counts as they are, and rounded up to multiples

Row = dict[str, object]


@dataclass
class Tap:
    """The devices' answers on their way, with the labels that the server does not see."""

    answers: Answers
    devices: Mapping[str, PartDevice]
    gradients: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    told: dict[str, Prototypes] = field(default_factory=dict)
    _batches: dict[str, list[int]] = field(default_factory=dict)

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        replies = self.answers.answer(ask)
        for device, reply in replies.items():
            if ask.kind == "forward":
                self._batches[device] = self._labels_of(device, ask)
            elif isinstance(reply, Gradient):
                self.gradients.append(torch.from_numpy(np.array(reply.gradient)))
                self.labels.append(torch.tensor(self._batches[device]))
            elif isinstance(reply, Prototypes):
                self.told[device] = reply
        return replies

    def note_checkpoint(self) -> None:
        self.answers.note_checkpoint()

    def _labels_of(self, device: str, ask: Ask) -> list[int]:
        samples, numbers = self.devices[device].dataset.samples, ask.parameters
        first, last = batch_edges(len(samples), int(numbers["size"]))[int(numbers["place"])]
        order = epoch_order([each.sample_id for each in samples], int(numbers["seed"]), int(numbers["epoch"]))
        return [int(samples[place].label or 0) for place in order[first:last]]


@dataclass(frozen=True)
class Trained:
    """A run that was watched."""

    tap: Tap
    state: State
    classes: int


def watch(laboratory: PrototypeLaboratory, cell: PrototypeCell, label_mode: str) -> Trained:
    """Train a cell to its end, and keep what the server saw."""
    shipped, devices = laboratory.devices(cell, label_mode)
    strategy = strategies.find("prototypes").build(shipped, laboratory.settings(cell, len(devices), label_mode))
    classes = next(iter(devices.values())).terms.class_count
    tap = Tap(Answers(devices, Terms(RUN, SITE, "prototypes", label_mode, 0.0, cell.seed)), devices)
    adapt(strategy, tap, Site(SITE, tuple(sorted(devices)), classes))
    return Trained(tap, strategy.state(), classes)


def leaks(laboratory: PrototypeLaboratory, cell: PrototypeCell) -> list[Row]:
    """One row for each thing that is learned: what, under which option, how much, and beside it what a guess gives."""
    rows: list[Row] = []
    plain = replace(cell, method="proto")
    runs = {"g": watch(laboratory, cell, "logit-gradient"), "no g": watch(laboratory, plain, "logit-gradient")}
    own_heads = watch(laboratory, cell, "client-head")
    rows += label_rows(runs["g"], own_heads)
    rows += histogram_rows(runs["g"])
    for name, trained, of in (("g", runs["g"], cell), ("no g", runs["no g"], plain)):
        rows += image_rows(laboratory, of, trained, name)
    return rows


# -- labels and counts


def label_rows(logits: Trained, own_heads: Trained) -> list[Row]:
    """Labels read off gradients at the logits; where heads are the devices', which images belong together."""
    labels = torch.cat(logits.tap.labels)
    seen = Seen(logit_gradients=torch.cat(logits.tap.gradients))
    found = label_inference.build(Effort()).reconstruct(seen)
    often = float(torch.bincount(labels, minlength=logits.classes).max()) / len(labels)
    grouped = [
        purity(label_inference.groups(gradients, logits.classes), labels) for gradients, labels in _epochs(own_heads)
    ]
    return [
        {
            "what": "label of an image", "option": "logit-gradient", "unit": "share right",
            "found": float((found == labels).float().mean()), "guess": often,
        },
        {
            "what": "which images share a class", "option": "client-head", "unit": "purity of groups",
            "found": float(np.mean(grouped)), "guess": often,
        },
    ]  # fmt: skip


def _epochs(trained: Trained) -> Sequence[tuple[Tensor, Tensor]]:
    """The last batches' gradients and labels, so many that a group has some of each class."""
    last = list(zip(trained.tap.gradients, trained.tap.labels, strict=True))[-4 * len(trained.tap.devices) :]
    gradients, labels = zip(*last, strict=True)
    return [(torch.cat(gradients), torch.cat(labels))]


def purity(groups: Tensor, labels: Tensor) -> float:
    """Share of images that are of their group's most frequent class."""
    right = sum(int(torch.bincount(labels[groups == each]).max()) for each in groups.unique())
    return right / len(labels)


def histogram_rows(trained: Trained) -> list[Row]:
    """How far the told counts are from a device's own classes: half the sum of absolute differences of the shares."""
    rows: list[Row] = []
    own = {name: _histogram(device, trained.classes) for name, device in trained.tap.devices.items()}
    even = [apart(np.ones(trained.classes), counts) for counts in own.values()]
    for step in COUNT_STEPS:
        found = []
        for name, told in trained.tap.told.items():
            counts = np.zeros(trained.classes)
            counts[list(told.classes)] = -(-np.array(told.counts) // step) * step
            found.append(apart(counts, own[name]))
        option = "exact counts" if step == 1 else f"counts rounded up to multiples of {step}"
        rows.append(
            {
                "what": "class histogram", "option": option, "unit": "distance (0: known)",
                "found": float(np.mean(found)), "guess": float(np.mean(even)),
            }
        )  # fmt: skip
    return rows


def _histogram(device: PartDevice, classes: int) -> NDArray[np.int64]:
    return np.bincount([int(each.label or 0) for each in device.dataset.samples], minlength=classes)


def apart(found: NDArray[np.generic], own: NDArray[np.generic]) -> float:
    """Total variation distance of two histograms."""
    return float(np.abs(found / found.sum() - own / own.sum()).sum() / 2)


# -- images


@torch.no_grad()
def image_rows(laboratory: PrototypeLaboratory, cell: PrototypeCell, trained: Trained, option: str) -> list[Row]:
    """Images from what leaves a part, and class means from prototypes, by ridges learned on the held-out domain."""
    run = _Attacker(laboratory, cell, trained)
    rows: list[Row] = []
    decoder = run.learn(run.public_h)
    psnr, ssim, guess = [], [], []
    for pixels, h in run.attacked:
        figures = measure(pixels, decoder(h).reshape(pixels.shape))
        psnr.append(figures.psnr_db)
        ssim.append(figures.ssim)
        guess.append(measure(pixels, run.mean_picture.expand_as(pixels)).psnr_db)
    head = {"what": f"image at {cell.cut}", "option": option}
    rows.append({**head, "unit": "PSNR in dB", "found": float(np.mean(psnr)), "guess": float(np.mean(guess))})
    rows.append({**head, "unit": "SSIM", "found": float(np.mean(ssim)), "guess": None})
    found, guesses = run.class_means()
    head = {"what": "a device's mean image of a class", "option": f"{option}, prototype decoded"}
    rows.append({**head, "unit": "PSNR in dB", "found": spread(found)["mean"], "guess": spread(guesses)["mean"]})
    return rows


class Decoder:
    """A ridge from inputs (n, k) to pixels (n, p) by its n x n form, as there are fewer images than values: with the
    penalty, of `PENALTIES` times the mean square of an input, that is best on a part that it does not learn from."""

    def __init__(self, inputs: Tensor, pixels: Tensor) -> None:
        held = max(1, int(HELD_SHARE * len(inputs)))
        self._x, self._y = inputs[held:].double(), pixels[held:].double()
        self._mean, self._middle = self._x.mean(dim=0), self._y.mean(dim=0)
        self._x = self._x - self._mean
        products = self._x @ self._x.T
        trials = []
        for penalty in PENALTIES:
            self._solve(products, penalty)
            error = float((self(inputs[:held]) - pixels[:held]).square().mean())
            trials.append((error, penalty))
        self._solve(products, min(trials)[1])

    def _solve(self, products: Tensor, penalty: float) -> None:
        size = float(products.diagonal().mean())
        eye = torch.eye(len(products), dtype=products.dtype)
        self._weights = torch.linalg.solve(products + max(penalty * size, 1e-12) * eye, self._y - self._middle)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Pixels (m, p) of inputs (m, k), in [0, 1]."""
        return ((inputs.double() - self._mean) @ self._x.T @ self._weights + self._middle).clamp(0, 1).float()


class _Attacker:
    """What the server has: the averaged part, and images of its own domain."""

    def __init__(self, laboratory: PrototypeLaboratory, cell: PrototypeCell, trained: Trained) -> None:
        shipped, _ = laboratory.devices(cell)
        (cut,), rule = shipped.plan.cuts, shipped.plan.prototypes
        assert rule is not None
        model = copy.deepcopy(shipped.module)
        model.load_state_dict(named(trained.state, "backend."))
        self._part, self._rule, self._trained = (
            family_of(model)[1].cut(model.eval(), cut.index)[0].eval(),
            rule,
            trained,
        )
        self._projection = [getattr(model, name) for name in PROJECTION]
        self._image = next(iter(trained.tap.devices.values())).installed.manifest.image
        self.mean, self.std = (torch.tensor(each).view(1, 3, 1, 1) for each in (self._image.mean, self._image.std))
        normalised, _ = laboratory.tested(cell.held_out)
        self.public = (normalised.cpu() * self.std + self.mean).clamp(0, 1)
        self.public_h = self._values(self.public)
        self.mean_picture = self.public.mean(dim=0, keepdim=True)
        self.attacked = [(pixels, self._values(pixels)) for pixels in map(self._pictures, trained.tap.devices.values())]

    def _pictures(self, device: PartDevice) -> Tensor:
        """Some of a device's own images (n, 3, h, w) in [0, 1]."""
        samples = device.dataset.samples
        chosen = samples[:: max(1, len(samples) // ATTACKED)][:ATTACKED]
        return self._load([(each.path, each.relative) for each in chosen])

    def _load(self, files: Sequence[tuple[object, str]]) -> Tensor:
        pictures = [resize(load_pixels(path, name, self._image.max_pixels), self._image) for path, name in files]  # type: ignore[arg-type]
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255

    def _values(self, pixels: Tensor) -> Tensor:
        """What leaves the part (n, k)."""
        device = self._projection[0].device
        found = []
        for batch in ((pixels - self.mean) / self.std).split(250):
            h = self._part(batch.to(device))
            found.append((prototypes.normalise(h, self._rule.scale) if self._rule.normalise else h).cpu())
        self._shape = found[0].shape[1:]
        return torch.cat(found).flatten(1)

    def learn(self, inputs: Tensor) -> Decoder:
        """A ridge from inputs (n, k) of the public images to their pixels."""
        return Decoder(inputs, self.public.flatten(1))

    def class_means(self) -> tuple[list[float], list[float]]:
        """PSNR of each device's mean image of a class, decoded from its prototype, and of a guess: the public mean."""
        device = self._projection[0].device
        embedded = prototypes.embed(self.public_h.reshape(-1, *self._shape).to(device), *self._projection).cpu()
        decoder = self.learn(embedded)
        found, guesses = [], []
        for name, told in self._trained.tap.told.items():
            samples = self._trained.tap.devices[name].dataset.samples
            for place, label in enumerate(told.classes):
                own = [(each.path, each.relative) for each in samples if each.label == label]
                true = self._load(own).mean(dim=0, keepdim=True)
                assert told.values is not None
                decoded = decoder(torch.from_numpy(np.array(told.values[place : place + 1]))).reshape(true.shape)
                found.append(float(ridge.image_psnr_db(true, decoded).mean()))
                guesses.append(float(ridge.image_psnr_db(true, self.mean_picture).mean()))
        return found, guesses


def table_of(rows: Sequence[Row]) -> Table:
    """As it is printed."""
    shown = tuple(
        (
            str(row["what"]), str(row["option"]), str(row["unit"]), f"{row['found']:.3f}",
            "-" if row["guess"] is None else f"{row['guess']:.3f}",
        )
        for row in rows
    )  # fmt: skip
    note = "A guess: the most frequent class, even shares, or the mean of the attacker's own images."
    return Table("What a curious server learns", ("what", "with", "unit", "found", "a guess"), shown, note=note)
