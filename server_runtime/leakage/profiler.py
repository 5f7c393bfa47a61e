"""Leakage of a package: attacks x splits x strengths of noise, row by row, and the table that follows from the rows.

Opening the package is `package`'s part, choosing images `public`'s, figures `metrics`', curves
and thresholds `curve`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from contract.errors import UsageError
from contract.keyed_noise import derive_key
from contract.tokens import SentRule

from .. import attacks
from ..attacks import Effort, Known, Pairs, Seen
from ..attacks._release import STATISTICS_IMAGES, Law, Release
from ..backend_folder import BackendFolder, TrainingFolder
from .classifier import count_right, planned_steps, train_classifier
from .curve import (
    ALLOWED_ABOVE_CHANCE,
    Judged,
    find_threshold,
    fine_grid,
    interpolate,
    least_strength,
    non_increasing,
    upper_bound,
)
from .metrics import Perceptual, measure
from .package import Package, Runner, Split, client_of, release
from .public import LEAST_IMAGES, Pictures, Progress, Public
from .table import Attacked, Baselines, Enough, Point, Row, Settings, Table, Threshold, strongest

TOKENS_BYTES = 2 << 30  # of all that the attacker learns from at one split
FRONTENDS = 2  # weight noises that the attacker draws to learn from
COARSE = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5)


def _ignore(done: int) -> None:
    """Progress of what takes no steps."""


def default_strengths(package: Package) -> tuple[float, ...]:
    """The coarse grid; for a frontend up to the strongest noise that it allows, its usual one among them."""
    if not package.manifest.cuts:
        return COARSE
    rules = package.manifest.transforms
    return tuple(sorted({each for each in COARSE if each <= rules.kappa_max} | {rules.kappa, rules.kappa_max}))


def check_attacks(names: Sequence[str]) -> None:
    """Raises: UsageError for an attack that does not exist, or that no table can be of."""
    for name in names:
        module = attacks.find(name)
        if module.FINDS != "images" or not {"upload", "client"} >= module.NEEDS:
            usable = [each for each in attacks.names() if {"upload", "client"} >= attacks.find(each).NEEDS]
            raise UsageError(
                f"attack {name!r} finds {module.FINDS} and needs {' and '.join(sorted(module.NEEDS))}; "
                "a table is of images, from one upload of each",
                "choose one or more of: " + ", ".join(usable),
            )


class Profiler:
    """Attacks one package; `rows` goes on after those that are done."""

    def __init__(
        self, package: Package, public: Public, settings: Settings, device: torch.device, progress: Progress,
        lpips: Perceptual | None, folder: BackendFolder | TrainingFolder | None,
    ) -> None:  # fmt: skip
        self._package, self._public, self._settings, self._device = package, public, settings, device
        self._progress, self._lpips, self._folder = progress, lpips, folder
        self.truth = public.attacked.images(device)
        self._classifier: nn.Module | None = None
        self._check_needs()

    def _check_needs(self) -> None:
        check_attacks(self._settings.attacks)
        for name in self._settings.attacks:
            if "client" in attacks.find(name).NEEDS and self._folder is None:
                raise UsageError(
                    f"attack {name!r} needs the float weights of the frontend", "give --backend, the package's .backend"
                )

    def planned(self) -> list[tuple[Split, float, bool]]:
        """Rows in their order: split, strength, and whether it is protected at all."""
        plan = []
        for split in self._package.splits:
            if self._settings.alpha or split.law.sent != SentRule():
                plan.append((split, 0.0, False))
            plan += [(split, strength, True) for strength in self._settings.strengths]
        return plan

    def rows(self, done: Sequence[Row]) -> Iterator[Row]:
        """The rows that are missing."""
        finished = {(row.split, row.strength, row.protected) for row in done}
        opened: tuple[int, bool] | None = None
        for split, strength, protected in self.planned():
            if (split.index, strength, protected) in finished:
                continue
            if opened != (split.index, protected):
                world, opened = self.open(split, protected), (split.index, protected)
            yield self._row(world, strength)

    def open(self, split: Split, protected: bool) -> World:
        """Features of one split: what the attacker learns from, what the device that is attacked has."""
        alpha = self._settings.alpha if protected else 0.0
        law = split.law if protected else replace(split.law, sent=SentRule())
        public = self._public
        values = split.law.layout.count * split.law.layout.dim
        frontends = FRONTENDS if alpha else 1
        count = min(len(public.learn.pixels), max(LEAST_IMAGES, TOKENS_BYTES // (2 * values * frontends)))
        chosen = public.learn.first(count), public.held.first(count)
        total = frontends * sum(len(each.pixels) for each in chosen) + len(public.attacked.pixels)
        pairs = [Pairs(each.images(self._device)) for each in chosen]
        with self._progress(f"split {split.index}: features", total, "images") as tell:
            for number in range(frontends):
                runner = Runner(self._package, split, alpha, self._key("attacker", number))
                for place, each in enumerate(chosen):
                    tokens = torch.from_numpy(runner.tokens(each.pixels, tell)).to(self._device)
                    pairs[place] = replace(pairs[place], tokens=(*pairs[place].tokens, tokens))
            victim = Runner(self._package, split, alpha, self._key("device")).tokens(public.attacked.pixels, tell)
        client = None
        if self._folder is not None and any("client" in attacks.find(each).NEEDS for each in self._settings.attacks):
            client = client_of(self._package, split, self._folder).to(self._device)
        return World(split, law, protected, pairs[0], pairs[1], victim, client)

    def _key(self, *parts: str | int) -> bytes:
        return derive_key(b"leakage-profile", self._settings.seed, *parts)

    def meet(self, world: World, strength: float) -> tuple[Known, Seen]:
        """What the attacker knows, and what it receives of the attacked pictures at one strength of noise."""
        settings = self._settings
        public_release = Release(world.law, strength, world.learn.tokens[0][:STATISTICS_IMAGES].float())
        known = Known(world.learn, world.held, public_release, client=world.client)
        alpha = settings.alpha if world.protected else 0.0
        upload = release(
            self._package, world.split, world.law, strength, alpha, world.victim, self._public.attacked.digests,
            self._key("noise"),
        )  # fmt: skip
        return known, Seen(uploads=(replace(upload, received=upload.received.to(self._device)),))

    def _row(self, world: World, strength: float) -> Row:
        settings, (known, seen) = self._settings, self.meet(world, strength)
        title = f"split {world.split.index}, {world.split.unit} {strength:g}"
        found = [self._attack(name, known, seen, title) for name in settings.attacks]
        return Row(world.split.index, strength, world.protected, len(self.truth), len(world.learn.images), tuple(found))

    def _attack(self, name: str, known: Known, seen: Seen, title: str) -> Attacked:
        started_s = time.monotonic()
        module, settings = attacks.find(name), self._settings
        planned = module.planned_steps(settings.steps, len(self.truth))
        shown = self._progress(f"{title}: {name}", planned, "steps") if planned else nullcontext(_ignore)
        with shown as tell:
            attack = module.build(Effort(settings.steps, settings.seed, tell))
            attack.fit(known)
            found = attack.reconstruct(seen)
        time_s = round(time.monotonic() - started_s, 3)
        return Attacked(name, measure(self.truth, found, self._lpips), self._count_right(found), time_s)

    # -- the classifier

    def _labels(self, pictures: Pictures) -> Tensor:
        return torch.from_numpy(pictures.labels).to(self._device)

    def _count_right(self, images: Tensor) -> int | None:
        learn = self._public.learn
        if learn.labels is None or self._public.attacked.labels is None or len(self._public.classes) < 2:
            return None
        if self._classifier is None:
            shown, labels = learn.images(self._device), self._labels(learn)
            with self._progress("classifier", planned_steps(len(shown)), "steps") as tell:
                classes = len(self._public.classes)
                self._classifier = train_classifier(shown, labels, classes, self._settings.seed, tell)
        return count_right(self._classifier, images, self._labels(self._public.attacked))

    # -- the table

    def table(self, rows: Sequence[Row], lpips_unknown: str) -> Table:
        """Everything that follows from the rows, which are put in their order."""
        order = {(split.index, strength, protected): n for n, (split, strength, protected) in enumerate(self.planned())}
        rows = sorted(rows, key=lambda row: order[row.split, row.strength, row.protected])
        threshold = self._threshold(rows)
        curve = [point for split in self._package.splits for point in curve_of(rows, split.index)]
        enough = [
            Enough(split.index, _least([point for point in curve if point.split == split.index], threshold.fsim))
            for split in self._package.splits
        ]
        return Table(
            package=self._package.manifest.name,
            model=self._package.manifest.model,
            unit=self._package.splits[0].unit,
            settings=self._settings,
            lpips_unknown=lpips_unknown,
            baselines=self._baselines(),
            threshold=threshold,
            rows=tuple(rows),
            curve=tuple(curve),
            least_noise=tuple(enough),
            attacks_s=round(sum(each.time_s for row in rows for each in row.attacks), 3),
        )

    def _baselines(self) -> Baselines:
        learn = self._public.learn.images(self._device)
        colour = learn.mean(dim=(0, 2, 3), keepdim=True).expand_as(self.truth)
        others = learn[torch.arange(len(self.truth), device=self._device) % len(learn)]
        classes = len(self._public.classes)
        return Baselines(
            measure(self.truth, colour, self._lpips),
            measure(self.truth, others, self._lpips),
            1.0 / classes if classes > 1 else None,
        )

    def _threshold(self, rows: Sequence[Row]) -> Threshold:
        right = self._count_right(self.truth)
        if right is None:
            return Threshold(None, "the public images have no classes (one folder each) to tell apart", None, None)
        classes = len(self._public.classes)
        points = []
        for split in self._package.splits:
            measured = _protected(rows, split.index)
            levelled = non_increasing([strongest(row).fsim for row in measured])
            for fsim, row in zip(levelled, measured, strict=True):
                points.append(Judged(fsim, max(each.right or 0 for each in row.attacks), row.images))
        accuracy = right / len(self.truth)
        surely = 1.0 - upper_bound(len(self.truth) - right, len(self.truth))
        if surely <= 1.0 / classes + ALLOWED_ABOVE_CHANCE:  # a blind judge finds everything safe
            reason = f"the classifier tells {100 * accuracy:.1f} % of the true pictures, which may be chance"
            return Threshold(None, reason, classes, accuracy)
        found, reason = find_threshold(points, classes)
        return Threshold(found, reason, classes, accuracy)


@dataclass(frozen=True)
class World:
    """One split as attacker and device have it: public pairs, the attacked pictures' tokens (n, T, d)."""

    split: Split
    law: Law
    protected: bool
    learn: Pairs
    held: Pairs
    victim: np.ndarray
    client: nn.Module | None


def _protected(rows: Sequence[Row], split: int) -> list[Row]:
    return sorted((row for row in rows if row.split == split and row.protected), key=lambda row: row.strength)


def curve_of(rows: Sequence[Row], split: int) -> list[Point]:
    """The strongest attack's figures of a split on the fine grid; none of them rises with the noise."""
    measured = _protected(rows, split)
    if not measured:
        return []
    strengths = [row.strength for row in measured]
    figures = [strongest(row) for row in measured]
    levelled = {name: non_increasing([getattr(each, name) for each in figures]) for name in ("psnr_db", "ssim", "fsim")}
    return [
        Point(split, at, **{name: interpolate(strengths, values, at) for name, values in levelled.items()})
        for at in fine_grid(strengths)
    ]


def _least(curve: Sequence[Point], threshold: float | None) -> float | None:
    if threshold is None:
        return None
    return least_strength([point.strength for point in curve], [point.fsim for point in curve], threshold)


def backend_beside(root: Path) -> Path:
    """Where export-frontend leaves what the server keeps."""
    return root.with_name(root.name + ".backend")
