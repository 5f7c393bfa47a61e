"""Previews as a command: package verified, images read, pairs and page written; no socket, no trace in the state.

The package is verified as an installer does, in a folder of its own: a preview installs nothing, so that an owner may
look first and refuse. Of the state it reads the device secret alone, which it makes where the device has none yet. The
figures are `pairs`', flags are `edge_runtime.cli`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.console import progress
from contract.errors import DeviceError, UsageError, why
from contract.images import pixel_digest, resize
from contract.keyed_noise import wire_id
from contract.output import check_output, open_output
from contract.scratch import scratch_folder
from contract.signature import key_id, load_public
from edge_runtime.config import PreviewConfig
from edge_runtime.cpus import allowed_affinity, usable_cpus
from edge_runtime.data import Sample, load_image
from edge_runtime.engines import open_engine
from edge_runtime.equip_engine import installing_engine, open_noised
from edge_runtime.install import Installed, install
from edge_runtime.package_choice import choose_package
from edge_runtime.pipeline import Frontend
from edge_runtime.preview.decoder import open_decoder
from edge_runtime.preview.page import to_html, to_png
from edge_runtime.preview.pairs import Pair, Settings, figures, make_pair, remarks, settings_of
from edge_runtime.state import open_secret, open_state, read_secret, write_durably
from edge_runtime.terms import protection
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind

PAGE_NAME = "preview.html"


@dataclass(frozen=True)
class Preview:
    """All pairs, where each one's picture lies, and what they show."""

    package: str
    settings: Settings
    pairs: tuple[Pair, ...]
    pictures: tuple[Path, ...]
    page: Path


def preview(config: PreviewConfig, images: Sequence[Path], output: Path, say: Callable[[str], None]) -> Preview:
    """Make the pairs of `images` and write them into the folder `output`.

    Raises: PackageError for a package without a decoder, and what is wrong with package, images, settings or disk.
    """
    pictures = picture_paths(images, output)
    (open_output if output.exists() else check_output)(output)  # made later, for this user's eyes only
    publisher = load_public(config.trust)
    choice = choose_package(config.engine)
    name = installing_engine(choice.engine)  # no plan is built to look at some pictures
    secret = device_secret(config.state)
    threads = config.threads or usable_cpus(allowed_affinity())
    with workplace(config.state) as folder:
        installed = install(
            choice.folder, folder / "packages", {key_id(publisher): publisher},
            lambda path: open_engine(name, path, threads), say,
        )  # fmt: skip
        kappa_floor, alpha = protection(config.kappa_floor, config.alpha, installed.manifest)
        settings = settings_of(installed.manifest, kappa_floor, alpha, config.noise == "fresh")
        engine, _ = open_noised(name, installed, alpha, secret, threads, folder / "engines", say)
        frontend = Frontend(engine, installed.manifest.image, installed.cut.tokens)
        pairs = tuple(make_pairs(installed, frontend, settings, secret, images, threads))
    title = f"{installed.manifest.name} version {installed.manifest.version} ({installed.digest.hex()[:12]})"
    shown = Preview(title, settings, pairs, pictures, output / PAGE_NAME)
    write(shown, output)
    return shown


def make_pairs(
    installed: Installed, frontend: Frontend, settings: Settings, secret: bytes, images: Sequence[Path], threads: int
) -> Iterator[Pair]:
    """One pair for each image, by the codes that an upload of it has. Raises: DataError, EngineError."""
    cut, rule = installed.cut, installed.manifest.image
    decode = open_decoder(installed.folder / settings.decoder.onnx, rule, threads)
    kind = noise_kind(settings.alpha, None)
    noise = FeatureNoise(cut, NoiseKeying(secret, installed.digest, cut.index, kind, settings.kappa))
    for path in progress(images, total=len(images), description="preview", unit="images"):
        pixels = load_image(path, str(path), rule.max_pixels)
        digest = pixel_digest(pixels)
        tokens = frontend.tokens([Sample(path, str(path), wire_id(secret, digest), digest, None)])[0]
        codes, _ = noise.release(tokens.astype("float32"), digest)
        yield make_pair(str(path), resize(pixels, rule), codes, decode)


def device_secret(state: Path) -> bytes:
    """The device's secret, without the state's lock where it exists: an edge-run may be at work.

    Raises: DeviceError.
    """
    path = state / "identity" / "device_secret"
    if path.exists():
        return read_secret(path, "device secret")
    opened = open_state(state)
    try:
        return open_secret(opened.device_secret, "device secret")[0]
    finally:
        opened.close()


@contextmanager
def workplace(state: Path) -> Iterator[Path]:
    """A folder with `packages` and `engines` in it, on the disk of the state, that is gone afterwards.

    Those that killed previews left are removed. Raises: DeviceError when the disk refuses.
    """
    try:
        with scratch_folder(".preview-", parent=state) as folder:
            for name in ("packages", "engines"):
                (folder / name).mkdir()
            yield folder
    except OSError as error:
        raise DeviceError(
            f"{state} cannot be written: {why(error, state)}", "make room on the disk and start again"
        ) from error


def picture_paths(images: Sequence[Path], output: Path) -> tuple[Path, ...]:
    """Where each pair goes; images of one name are numbered. Raises: UsageError when `output` is a file."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o should name a folder for the previews, {str(output)!r} is a file", "correct -o")
    paths: dict[Path, None] = {}
    for image in images:
        names = (image.stem, *(f"{image.stem}-{number}" for number in range(2, len(images) + 2)))
        paths[next(path for name in names if (path := output / f"{name}.preview.png") not in paths)] = None
    return tuple(paths)


def write(shown: Preview, output: Path) -> None:
    """Pictures and page, for this user's eyes only. Raises: DeviceError when the disk refuses."""
    try:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"{output} cannot be made: {error.strerror}", "give another -o") from error
    drawn = [to_png(pair) for pair in shown.pairs]
    page = to_html(list(zip(shown.pairs, drawn, strict=True)), shown.settings, shown.package)
    for path, data in zip(shown.pictures, drawn, strict=True):
        write_durably(path, data)
    write_durably(shown.page, page.encode(errors="backslashreplace"))  # names of files need be no text


def document(shown: Preview) -> dict[str, object]:
    """The fields of the JSON document."""
    settings = shown.settings
    return {
        "package": shown.package,
        "kappa": settings.kappa,
        "kappa_floor": settings.kappa_floor,
        "alpha": settings.alpha,
        "patches_sent": settings.patches_sent,
        "patches": settings.patches,
        "page": str(shown.page),
        "remarks": list(remarks(settings)),
        "pairs": [
            {
                "file": pair.name,
                "picture": str(path),
                "ssim": pair.ssim,
                "psnr_db": pair.psnr_db,
                "flat_ssim": pair.flat_ssim,
                "flat_psnr_db": pair.flat_psnr_db,
                "words": pair.words,
            }
            for pair, path in zip(shown.pairs, shown.pictures, strict=True)
        ],
    }


def in_words(shown: Preview) -> str:
    """For a person on a terminal."""
    lines = [f"package {shown.package}"]
    for pair, path in zip(shown.pairs, shown.pictures, strict=True):
        lines += [f"{pair.name}: {path}", *(f"    {line}" for line in figures(pair))]
    return "\n".join([*lines, f"all of them: {shown.page}", *remarks(shown.settings)])
