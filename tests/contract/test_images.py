"""Decoding and preprocessing: every kind of file, every orientation, and equality with timm's evaluation transform."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile

from contract.errors import DataError
from contract.images import ImageRule, load_pixels, normalise, pixel_digest, resize

UPRIGHT = np.repeat(
    np.repeat(np.array([[[250, 0, 0], [0, 250, 0], [0, 0, 250]], [[90, 90, 90], [250, 250, 0], [0, 250, 250]]]), 16, 0),
    16,
    1,
).astype(np.uint8)  # 32 x 48, six blocks of different colours: each orientation gives another picture
STORED_BY = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def rule(height: int = 224, width: int = 224, **changes: Any) -> ImageRule:
    fields: dict[str, Any] = {
        "interpolation": "bicubic",
        "crop_fraction": 0.9,
        "crop_mode": "center",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "alpha": "white",
        "max_pixels": 64_000_000,
    }
    return ImageRule(height, width, **{**fields, **changes})


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, bits: int, colour: int, row: bytes, transparent: tuple[int, ...] = ()) -> bytes:
    """A PNG of equal rows, for the kinds that Pillow reads but does not write."""
    key = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress((b"\0" + row) * height)) if row else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + key + data + chunk(b"IEND", b"")


def row_of(data: bytes) -> Any:
    """The pixels of a one-row image."""
    pixels = load_pixels(data, "x")
    assert pixels.dtype == np.uint8 and pixels.shape[0] == 1 and pixels.flags.c_contiguous
    return pixels[0].tolist()


def grey(*values: int) -> list[list[int]]:
    return [[value] * 3 for value in values]


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}), ("TIFF", {})])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_ed_01_all_orientations_load_upright(orientation: int, kind: str, options: dict[str, Any]) -> None:
    stored = Image.fromarray(UPRIGHT)
    if orientation in STORED_BY:
        stored = stored.transpose(STORED_BY[orientation])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    loaded = load_pixels(encode(stored, kind, exif=exif, **options), "x")
    assert loaded.shape == UPRIGHT.shape and loaded.flags.c_contiguous
    assert np.abs(loaded.astype(int) - UPRIGHT).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_ed_01_an_undefined_orientation_is_none(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert np.array_equal(load_pixels(encode(Image.fromarray(UPRIGHT), "PNG", exif=exif), "x"), UPRIGHT)


def test_ed_01_damaged_metadata_around_sound_pixels_is_ignored() -> None:
    data = encode(Image.fromarray(UPRIGHT), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0\x01")
    assert np.array_equal(load_pixels(data, "x"), UPRIGHT)


def test_ed_03_rgba_is_composited_on_white() -> None:
    colours = np.array([[[200, 100, 0, a] for a in (0, 1, 128, 254, 255)]], np.uint8)
    expected = [[round((c * a + 255 * (255 - a)) / 255) for c in (200, 100, 0)] for a in (0, 1, 128, 254, 255)]
    assert row_of(encode(Image.fromarray(colours), "PNG")) == expected
    assert row_of(encode(Image.fromarray(colours), "TIFF")) == expected
    assert row_of(encode(Image.fromarray(colours), "WEBP", lossless=True, exact=True)) == expected


def test_ed_03_tall_transparent_images_are_composited_to_the_end() -> None:
    rgba = np.zeros((200, 2, 4), np.uint8)
    assert (load_pixels(encode(Image.fromarray(rgba), "PNG"), "x") == 255).all()


def test_ed_03_grey_with_alpha() -> None:
    image = Image.fromarray(np.array([[[10, 255], [10, 0]]], np.uint8))
    assert image.mode == "LA"
    assert row_of(encode(image, "PNG")) == grey(10, 255)


def palette_image() -> Image.Image:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    return image


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[10, 20, 30], [40, 50, 60], [70, 80, 90]]),
        ({"transparency": 1}, [[10, 20, 30], [255, 255, 255], [70, 80, 90]]),
        ({"transparency": b"\x00\xff\x80"}, [[255, 255, 255], [40, 50, 60], [162, 167, 172]]),
    ],
    ids=["opaque", "index", "bytes"],
)
def test_ed_03_palettes(options: dict[str, Any], expected: list[list[int]]) -> None:
    assert row_of(encode(palette_image(), "PNG", **options)) == expected


def test_ed_03_a_transparent_gif_is_white_there() -> None:
    assert row_of(encode(palette_image(), "GIF", transparency=2)) == [[10, 20, 30], [40, 50, 60], [255, 255, 255]]


@pytest.mark.parametrize("transparent", [(), (1,)])
@pytest.mark.parametrize(
    ("bits", "row", "values"),
    [
        (1, 0b01000000, (0, 255)),
        (2, 0b00011011, (0, 85, 170, 255)),
        (4, 0x1F, (17, 255)),
        (8, 0x01, (1,)),
    ],
)
def test_ed_03_grey_of_every_depth(bits: int, row: int, values: tuple[int, ...], transparent: tuple[int]) -> None:
    expected = list(values)
    if transparent:
        expected[1 if bits < 4 else 0] = 255
    assert row_of(png(len(values), 1, bits, 0, bytes([row]), transparent)) == grey(*expected)


def test_ed_03_one_bit_images() -> None:
    image = Image.fromarray(np.array([[True, False]]))
    assert image.mode == "1"
    for kind in ("PNG", "TIFF", "BMP"):
        assert row_of(encode(image, kind)) == grey(255, 0)


DEEP = (0, 128, 129, 300, 32768, 65278, 65535)


def test_ed_03_grey_of_16_bits_is_scaled_not_clipped() -> None:
    expected = grey(*(round(value / 257) for value in DEEP))
    row = struct.pack(">7H", *DEEP)
    assert row_of(png(7, 1, 16, 0, row)) == expected
    assert row_of(b"P5 7 1 65535\n" + row) == expected
    assert row_of(encode(Image.fromarray(np.array([DEEP], np.uint16)), "TIFF")) == expected


def test_ed_03_a_transparent_grey_of_16_bits() -> None:
    assert row_of(png(7, 1, 16, 0, struct.pack(">7H", *DEEP), (300,)))[3] == [255, 255, 255]
    assert row_of(png(7, 1, 16, 0, struct.pack(">7H", *DEEP), (301,)))[3] == [1, 1, 1]


def test_ed_03_a_transparent_colour() -> None:
    assert row_of(png(2, 1, 8, 2, bytes((1, 2, 3, 1, 2, 4)), (1, 2, 3))) == [[255, 255, 255], [1, 2, 4]]
    deep = struct.pack(">6H", 257, 600, 800, 65535, 0, 0)
    assert row_of(png(2, 1, 16, 2, deep, (257, 600, 800))) == [[255, 255, 255], [255, 0, 0]]


def test_ed_03_cmyk() -> None:
    data = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(load_pixels(data, "x").astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_ed_03_an_animated_image_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)
    assert load_pixels(data, "x").tolist() == [[[255, 0, 0]] * 4] * 4


@pytest.mark.parametrize("kind", ["I", "F"])
def test_ed_03_pixels_without_a_defined_white_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match="deep.tif has pixels of kind"):
        load_pixels(encode(Image.new(kind, (2, 2)), "TIFF"), "deep.tif")


BROKEN = {
    "empty": (b"", "is empty"),
    "text": (b"not an image at all", "is not an image in a known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not an image in a known format"),
    "truncated PNG": (encode(Image.effect_noise((64, 64), 50), "PNG")[:-800], "cannot be"),
    "truncated JPEG": (encode(Image.effect_noise((64, 64), 50), "JPEG")[:-800], "truncated"),
    "PNG without pixels": (png(8, 8, 8, 2, b""), "cannot be"),
    "header alone": (png(8, 8, 8, 2, b"")[:20], "c"),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("in_file", [True, False])
def test_ed_02_a_broken_file_is_named(data: bytes, reason: str, in_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with warnings.catch_warnings(), pytest.raises(DataError) as error:
        warnings.simplefilter("error")
        load_pixels(path if in_file else data, "cats/7.jpg")
    assert error.value.cause.startswith("cats/7.jpg ") and reason in error.value.cause
    assert "object at" not in error.value.cause and error.value.cure
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_ed_02_what_is_no_readable_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for a writer
    for path, reason in [(tmp_path, "is not a file"), (tmp_path / "pipe.png", "is not a file"), (tmp_path / "no", "")]:
        with pytest.raises(DataError, match=f"cats/7.jpg .*{reason}"):
            load_pixels(path, "cats/7.jpg")


@pytest.mark.parametrize(("width", "height"), [(8001, 8000), (12000, 10000), (40000, 40000)])
def test_ed_02_a_decompression_bomb_is_refused_from_its_header(width: int, height: int) -> None:
    with warnings.catch_warnings(), pytest.raises(DataError, match="big.png must have at most 64000000 pixels"):
        warnings.simplefilter("error")
        load_pixels(png(width, height, 8, 2, b""), "big.png")


def test_the_pixel_limit_is_inclusive() -> None:
    data = encode(Image.new("RGB", (10, 10)), "PNG")
    assert load_pixels(data, "x", max_pixels=100).shape == (10, 10, 3)
    with pytest.raises(DataError, match="found 10 x 10"):
        load_pixels(data, "x", max_pixels=99)


SEEDS = [encode(palette_image(), kind) for kind in ("PNG", "GIF", "BMP", "TIFF", "WEBP")] + [
    encode(Image.fromarray(UPRIGHT), "JPEG")
]


@settings(max_examples=300, deadline=None)
@given(data=st.sampled_from(SEEDS), changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8))
@example(data=b"", changes=[])
def test_any_bytes_are_pixels_or_a_data_error(data: bytes, changes: list[tuple[int, int]]) -> None:
    altered = bytearray(data)
    for place, value in changes:
        if altered:
            altered[place % len(altered)] = value
    try:
        pixels = load_pixels(bytes(altered), "x", max_pixels=1_000_000)
    except DataError:
        return
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def test_the_digest_names_shape_and_pixels() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert pixel_digest(pixels).hex() == "6daedb83bf773b5abc6fd835596af46c2bf628012b1d6fa6079d11f0a5506d60"
    assert pixel_digest(pixels[:, ::-1][:, ::-1]) == pixel_digest(pixels)
    others = [pixels.reshape(4, 2, 3), pixels[::-1], (pixels ^ 1).astype(np.uint8)]
    assert len({pixel_digest(each) for each in [pixels, *others]}) == 4


ODD_SIZES = [(37, 501), (500, 333), (224, 224), (641, 427), (65, 64), (1023, 770)]  # (height, width)
RULES = [  # as published for ViT-L/16, DeiT-III and SigLIP-like models, and two awkward ones
    rule(224, 224, interpolation="bicubic", crop_fraction=0.9),
    rule(224, 224, interpolation="bilinear", crop_fraction=0.875),
    rule(384, 384, interpolation="bicubic", crop_fraction=1.0, crop_mode="squash", mean=(0.5,) * 3, std=(0.5,) * 3),
    rule(96, 160, interpolation="lanczos", crop_fraction=0.95),
    rule(61, 61, interpolation="nearest", crop_fraction=0.93, crop_mode="squash"),
]


def smooth_noise(height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng(height * 10000 + width)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8))
    fine = rng.integers(-20, 21, (height, width, 3))
    return np.clip(np.asarray(coarse.resize((width, height))) + fine, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("each", RULES, ids=lambda each: f"{each.height}x{each.width}-{each.crop_mode}")
@pytest.mark.parametrize("size", ODD_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_ed_06_resize_equals_timm(size: tuple[int, int], each: ImageRule) -> None:
    timm_data = pytest.importorskip("timm.data")
    pixels = load_pixels(encode(Image.fromarray(smooth_noise(*size)), "PNG"), "x")
    settings: dict[str, Any] = {
        "input_size": (3, each.height, each.width),
        "is_training": False,
        "interpolation": each.interpolation,
        "crop_pct": each.crop_fraction,
        "crop_mode": each.crop_mode,
    }
    transform = timm_data.create_transform(**settings, mean=(0.0,) * 3, std=(1.0,) * 3)
    theirs = transform(Image.fromarray(pixels)).numpy().transpose(1, 2, 0)
    ours = resize(pixels, each)
    assert ours.shape == (each.height, each.width, 3) and ours.dtype == np.uint8
    assert np.abs(ours / 255 - theirs).max() <= 1 / 255 + 1e-6

    normalising = timm_data.create_transform(**settings, mean=each.mean, std=each.std)
    difference = normalise(ours[np.newaxis], each)[0] - normalising(Image.fromarray(pixels)).numpy()
    assert np.abs(difference).max() <= 1e-5 + 1 / 255 / min(each.std)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_ed_06_stripes_become_flat_grey(interpolation: str) -> None:
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    resized = resize(stripes, rule(interpolation=interpolation))
    assert np.abs(resized.astype(int) - 127.5).max() < 16  # without anti-aliasing it would be 127.5


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("shape", [(2, 3000), (3000, 2), (1, 1)])
def test_a_strip_is_cropped_before_it_fills_the_memory(shape: tuple[int, int], crop_mode: str) -> None:
    pixels = smooth_noise(*shape)
    whole = resize(pixels, rule(32, 32, crop_mode=crop_mode))
    frugal = resize(pixels, rule(32, 32, crop_mode=crop_mode, max_pixels=1))
    assert frugal.shape == whole.shape == (32, 32, 3)
    assert np.abs(whole.astype(int) - frugal).max() <= 1


def test_normalise_is_channels_first_float32() -> None:
    pixels = np.zeros((2, 4, 5, 3), np.uint8)
    pixels[1] = (255, 0, 51)
    values = normalise(pixels, rule(4, 5, mean=(0.5, 0.25, 0.2), std=(0.5, 0.25, 0.1)))
    assert values.shape == (2, 3, 4, 5) and values.dtype == np.float32 and values.flags.c_contiguous
    assert np.allclose(values[0, :, 0, 0], [-1.0, -1.0, -2.0]) and np.allclose(values[1, :, 3, 4], [1.0, -1.0, 0.0])
    assert np.array_equal(normalise(list(pixels), rule(4, 5, mean=(0.5, 0.25, 0.2), std=(0.5, 0.25, 0.1))), values)
