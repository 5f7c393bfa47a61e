"""From an image file to the frontend's input: the one rule for devices, calibration, tuning and attacks.

Finding the files is `contract.image_folder`'s part, and what to do about a bad one is the caller's.

Files become upright 8-bit RGB on white (`load_pixels`); these pixels are what digests and noise keys name. `resize`
repeats timm's evaluation transform with Pillow's filters, and `normalise` its ToTensor and Normalize.
"""

from __future__ import annotations

import hashlib
import io
import math
import stat
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from contract.errors import DataError

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others may run programs (EPS) or need plugins
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}
CROP_MODES = ("center", "squash")
ALPHA_RULES = ("white",)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageRule:
    """How pictures become model input, as stated in the manifest; the first six fields are timm's data config.

    crop_mode "center" scales the shorter side to floor(size / crop_fraction) and cuts out the middle; "squash" scales
    both sides so, without keeping their ratio. crop_fraction is in (0, 1]. mean and std are for values in [0, 1].
    """

    height: int
    width: int
    interpolation: str
    crop_fraction: float
    crop_mode: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    alpha: str
    max_pixels: int


def load_pixels(source: Path | bytes, name: str, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode an image as it is meant to be seen: upright, first frame, transparent parts white.

    Args:
        source: the file's path or its content.
        name: what errors call it.
        max_pixels: limit on width times height, checked before anything is decoded.

    Returns:
        (H, W, 3).

    Raises:
        DataError: the file is missing, unreadable, empty, damaged, too large, or of a kind without a defined white.
    """
    try:
        # Pillow warns of what is settled here: its size limit (ours is lower), damaged metadata (ignored), palettes
        # with transparency (composited). Two threads in here at once may leave the filter in place: no harm.
        with warnings.catch_warnings(), _open(source, name) as file:
            warnings.filterwarnings("ignore", module=r"PIL\.")
            return _decode(file, name, max_pixels)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise _unusable(name, f"is not an image in a known format ({', '.join(FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise _too_large(name, max_pixels) from error
    except OSError as error:
        raise _unusable(name, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # Pillow's decoders raise nearly anything on a damaged file
        raise _unusable(name, f"cannot be decoded: {error or type(error).__name__}") from error


def _open(source: Path | bytes, name: str) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not stat.S_ISREG(source.stat().st_mode):  # a pipe would block, a folder fails with a text of the platform
        raise _unusable(name, "is not a file")
    return source.open("rb")


def _decode(file: BinaryIO, name: str, max_pixels: int) -> Pixels:
    head = file.read(25)
    if not head:
        raise _unusable(name, "is empty")
    file.seek(0)
    with Image.open(file, formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise _too_large(name, max_pixels, image.size)
        image.load()
        png_bits = head[24] if image.format == "PNG" else 8  # IHDR always comes first
        flatten = _FLATTEN.get(image.mode)
        if flatten is None or (image.mode == "I" and image.format == "TIFF"):  # 32-bit integers
            raise _unusable(name, f"has pixels of kind {image.mode}, which have no defined white")
        upright = _UPRIGHT.get(_orientation(image), np.asarray)
        return np.ascontiguousarray(upright(flatten(image, png_bits)))


def _unusable(name: str, reason: str) -> DataError:
    return DataError(f"{name} {reason}", "remove the file, or save it again as JPEG or PNG with 8 bits per channel")


def _too_large(name: str, max_pixels: int, size: tuple[int, int] | None = None) -> DataError:
    found = f"{size[0]} x {size[1]}" if size is not None else "far more"
    return DataError(f"{name} must have at most {max_pixels} pixels, found {found}", "scale the image down")


def _orientation(image: Image.Image) -> object:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged metadata around sound pixels; viewers show these as they are stored
        return None


# Keys are EXIF orientations; each puts the stored (H, W, 3) upright.
_UPRIGHT: dict[object, Callable[[Pixels], Pixels]] = {
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored, 1),
}


# One function per kind of image: (image, PNG bits per sample) -> (H, W, 3) on white. A PNG may name one colour
# transparent ("transparency", in units of its own bits); Pillow's convert knows it for 8 bits only.


def _flatten_grey(image: Image.Image, png_bits: int) -> Pixels:
    grey = np.array(image.convert("L"))
    key = image.info.get("transparency")
    if isinstance(key, int):
        if image.mode == "1":
            key = 255 if key else 0
        grey[grey == key * {2: 85, 4: 17}.get(png_bits, 1)] = 255
    return _repeat_grey(grey)


def _flatten_deep_grey(image: Image.Image, png_bits: int) -> Pixels:
    samples = np.asarray(image).astype(np.uint32)  # 0..65535
    grey = ((samples + 128) // 257).astype(np.uint8)  # round(255 v / 65535)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[samples == key] = 255
    return _repeat_grey(grey)


def _repeat_grey(grey: Pixels) -> Pixels:
    return np.repeat(grey[:, :, np.newaxis], 3, axis=2)


def _flatten_rgb(image: Image.Image, png_bits: int) -> Pixels:
    rgb = np.array(image)
    key = image.info.get("transparency")
    if isinstance(key, tuple):
        # Pillow keeps the upper byte of 16-bit colours, so of these near neighbours of the key turn white as well.
        rgb[(rgb == [part >> (png_bits - 8) for part in key]).all(axis=2)] = 255
    return rgb


def _flatten_alpha(image: Image.Image, png_bits: int) -> Pixels:
    rgba = np.asarray(image.convert("RGBA"))
    rgb = np.empty((*rgba.shape[:2], 3), np.uint8)
    for top in range(0, len(rgba), 64):  # in strips: the 16-bit copies stay small
        colour, alpha = rgba[top : top + 64, :, :3], rgba[top : top + 64, :, 3:].astype(np.uint16)
        rgb[top : top + 64] = (colour * alpha + 255 * (255 - alpha) + 127) // 255
    return rgb


def _flatten_other(image: Image.Image, png_bits: int) -> Pixels:
    return np.array(image.convert("RGB"))


_FLATTEN: dict[str, Callable[[Image.Image, int], Pixels]] = {
    **dict.fromkeys(("1", "L"), _flatten_grey),
    **dict.fromkeys(("I;16", "I;16B", "I;16L", "I;16N", "I"), _flatten_deep_grey),
    **dict.fromkeys(("P", "PA", "LA", "RGBA", "RGBa"), _flatten_alpha),
    **dict.fromkeys(("CMYK", "YCbCr"), _flatten_other),
    "RGB": _flatten_rgb,
}


def pixel_digest(pixels: Pixels) -> bytes:
    """32 bytes that name the decoded picture: SHA-256 over the shape and the pixels (H, W, 3)."""
    digest = hashlib.sha256(struct.pack("<3I", *pixels.shape))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def resize(pixels: Pixels, rule: ImageRule) -> Pixels:
    """Scale and crop upright pixels (H, W, 3) to (rule.height, rule.width, 3) as timm's evaluation transform does."""
    image = Image.fromarray(pixels)
    scaled_height, scaled_width = _scaled_size(image.height, image.width, rule)
    top = round((scaled_height - rule.height) / 2.0)
    left = round((scaled_width - rule.width) / 2.0)
    crop = (left, top, left + rule.width, top + rule.height)
    resampling = INTERPOLATIONS[rule.interpolation]
    if scaled_height * scaled_width <= rule.max_pixels:
        return np.array(image.resize((scaled_width, scaled_height), resampling).crop(crop))
    # A strip so long that it would not fit into memory once its short side is scaled up: scale the middle alone.
    across, down = image.width / scaled_width, image.height / scaled_height
    right, bottom = min(crop[2] * across, image.width), min(crop[3] * down, image.height)
    box = (left * across, top * down, right, bottom)
    return np.array(image.resize((rule.width, rule.height), resampling, box=box))


def _scaled_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """(height, width) before the crop; the rounding of each case is that of timm and torchvision."""
    target_height = math.floor(rule.height / rule.crop_fraction)
    target_width = math.floor(rule.width / rule.crop_fraction)
    if rule.crop_mode == "squash":
        return target_height, target_width
    if target_height != target_width:
        ratio = min(height / target_height, width / target_width)
        return round(height / ratio), round(width / ratio)
    if width <= height:
        return int(target_width * height / width), target_width
    return target_height, int(target_height * width / height)


def normalise(pixels: Pixels | Sequence[Pixels], rule: ImageRule) -> npt.NDArray[np.float32]:
    """(x / 255 - mean) / std of pictures (B, h, w, 3) as (B, 3, h, w), in float32 from end to end."""
    planes = np.asarray(pixels).transpose(0, 3, 1, 2)
    normalised = np.empty(planes.shape, np.float32)
    np.divide(planes, np.float32(255.0), out=normalised)
    normalised -= _per_channel(rule.mean)
    normalised /= _per_channel(rule.std)
    return normalised


def _per_channel(values: tuple[float, float, float]) -> npt.NDArray[Any]:
    return np.array(values, np.float32).reshape(3, 1, 1)
