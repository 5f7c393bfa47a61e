"""Frontends of packages as work to be measured: pictures in, noised wire codes out, as a device does it for an upload.

Every package is verified and checked as for a run, in a folder of its own that is thrown away. What is measured when is
left to `measuring`. Left out of the work, as they are not done image by image: weight noise, which changes values
alone, and patch retrieval, which is done once for all images together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.errors import PackageError, UsageError
from contract.images import normalise
from contract.manifest import Cut
from contract.signature import PublicKey
from edge_runtime.data import Sample, load_dataset
from edge_runtime.engines import Engine, open_engine
from edge_runtime.engines.tensorrt import load_library
from edge_runtime.equip_engine import installing_engine, open_plan
from edge_runtime.install import Installed, install
from edge_runtime.package_choice import PLANNED_ENGINE, PackageChoice, choose_package
from edge_runtime.pipeline import Frontend
from edge_runtime.profiling.measuring import Candidate, Phase, Point
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind

SECRET = bytes(32)  # nothing leaves: the draws need only cost what they cost
DRAWN = 16  # pictures that are drawn where no folder is given


@dataclass(frozen=True)
class Images:
    """What is worked on: the images of a folder, decoded each time, or `drawn` pictures of noise, already decoded."""

    folder: Path | None
    drawn: int = DRAWN


@dataclass(frozen=True)
class Verified:
    """A package that passed every check; `engine` is what runs its frontends, None where it has none."""

    choice: PackageChoice
    installed: Installed
    engine: str | None
    say: Callable[[str], None]


def verify(
    specs: Sequence[str],
    trusted: Mapping[str, PublicKey],
    workplace: Path,
    threads: int,
    say: Callable[[str], None],
) -> list[Verified]:
    """Every package, checked as for a run; `workplace` holds the copies that are run.

    Raises: PackageError and the other errors of `install`; ConfigError; UsageError for a package that is there twice.
    """
    found: list[Verified] = []
    for number, spec in enumerate(specs):
        choice = choose_package(spec)
        installing = installing_engine(choice.engine)
        if choice.fallback_reason:
            say(choice.fallback_reason)
        folder = workplace / str(number)  # packages of one name and several splits would refuse each other as rollbacks
        folder.mkdir()
        opened: list[str] = []

        def open_frontend(path: Path, engine: str = installing, opened: list[str] = opened) -> Engine:
            frontend = open_engine(engine, path, threads)
            opened.append(f"{frontend.name} {frontend.version}")
            return frontend

        installed = install(choice.folder, folder, trusted, open_frontend, say)
        if any(other.installed.digest == installed.digest for other in found):
            raise UsageError(f"the package {choice.folder} is given twice", "name each package once")
        ran = opened[0] if opened else None
        if choice.engine == PLANNED_ENGINE and ran is not None:
            ran = f"{PLANNED_ENGINE} {load_library().__version__}"
        found.append(Verified(choice, installed, ran, say))
    return found


def frontends(packages: Sequence[Verified], images: Images, threads: int, seed: int) -> list[Candidate]:
    """A candidate for each cut of each package. Raises: PackageError for a package of parts; DataError."""
    candidates = []
    for package in packages:
        if package.engine is None:
            raise PackageError(
                f"{package.choice.folder} holds parts to be trained and no frontend",
                "give --train, or a package that was exported without --for",
            )
        manifest = package.installed.manifest
        samples = None if images.folder is None else folder_samples(images.folder, manifest.image.max_pixels)
        for cut in manifest.cuts:
            candidates.append(_candidate(package, package.engine, cut, samples or images.drawn, threads, seed))
    return candidates


Shown = int | tuple[Sample, ...]  # so many drawn pictures, or a folder's


def _candidate(package: Verified, engine: str, cut: Cut, shown: Shown, threads: int, seed: int) -> Candidate:
    installed, manifest = package.installed, package.installed.manifest
    point = Point(
        manifest.model, manifest.name, installed.digest.hex(), cut.index, cut.depth, manifest.quantization.scheme,
        engine, threads, threads, manifest.sent_bytes(cut), 0,
    )  # fmt: skip

    def open_phases() -> Sequence[Phase]:
        opened = open_cut(package, cut, threads)
        frontend = Frontend(opened, manifest.image, cut.tokens)
        kind, kappa = noise_kind(manifest.transforms.alpha, None), manifest.transforms.kappa
        noise = FeatureNoise(cut, NoiseKeying(SECRET, installed.digest, cut.index, kind, kappa))
        steps = _steps(frontend, shown, seed)

        def run() -> int:
            tokens, digests = next(steps)
            for row, digest in zip(tokens, digests, strict=True):
                noise.release(row.astype(np.float32), digest)
            return len(tokens)

        return (Phase("frontend", run),)

    return Candidate(point, ("frontend",), open_phases)


def open_cut(package: Verified, cut: Cut, threads: int) -> Engine:
    """The engine of one cut; a TensorRT plan is built for it beside the package's copy. Raises: EngineError."""
    installed = package.installed
    if package.choice.engine != PLANNED_ENGINE:
        return open_engine(package.choice.engine, installed.folder / cut.onnx, threads)
    plans = installed.folder.parent / f"plans-{cut.index}"
    plans.mkdir(mode=0o700, exist_ok=True)
    engine, _ = open_plan(installed.folder / cut.onnx, installed, SECRET, threads, plans, lambda: None, package.say)
    return engine


Step = tuple[NDArray[np.float16], Sequence[bytes]]  # tokens (B, T, d), and what keys the noise of each image


def _steps(frontend: Frontend, shown: Shown, seed: int) -> Iterator[Step]:
    """As many images at once as the engine runs side by side, for ever."""
    at_once = frontend.engine.threads
    if isinstance(shown, int):
        pictures = drawn_pictures(shown, frontend.image.height, frontend.image.width, seed)
        rounds = cycle(range(shown))
        while True:
            rows = list(islice(rounds, at_once))
            tokens = frontend.engine.run(normalise(pictures[rows], frontend.image)).astype(np.float16)
            yield tokens, [row.to_bytes(32, "big") for row in rows]
    samples = cycle(shown)
    while True:
        batch = list(islice(samples, at_once))
        yield frontend.tokens(batch), [sample.pixel_digest for sample in batch]


def folder_samples(folder: Path, max_pixels: int) -> tuple[Sample, ...]:
    """The images of a folder, with or without class folders. Raises: DataError."""
    return load_dataset(folder, None, SECRET, max_pixels, lambda: None).samples


def drawn_pictures(count: int, height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Pictures (n, h, w, 3) of noise: work takes the same time whatever they show."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
