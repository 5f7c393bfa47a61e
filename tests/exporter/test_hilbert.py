import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.images import ImageRule
from exporter.hilbert import transform, transformed_pixels
from exporter.public_set import draw_synthetic

SIZES = st.integers(1, 12)


def _picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((3, height, width))


@settings(max_examples=60, deadline=None)
@given(height=SIZES, width=SIZES, seed=st.integers(0, 99))
def test_the_transform_is_real_and_keeps_amplitude_mean_and_energy(height: int, width: int, seed: int) -> None:
    """Invariant 1 of split adaptation, for sizes of either parity."""
    picture = _picture(height, width, seed)
    found = transform(picture)
    assert found.shape == picture.shape and found.dtype == np.float64
    # An imaginary part that `transform` dropped would be missing here.
    np.testing.assert_allclose(np.abs(np.fft.fft2(found)), np.abs(np.fft.fft2(picture)), atol=1e-9)
    np.testing.assert_allclose(found.mean((1, 2)), picture.mean((1, 2)), atol=1e-12)
    np.testing.assert_allclose(np.square(found).sum(), np.square(picture).sum(), rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(height=SIZES.map(lambda n: 2 * n - 1), width=SIZES.map(lambda n: 2 * n - 1), seed=st.integers(0, 99))
def test_twice_is_the_picture_turned_about_its_mean_for_odd_sizes(height: int, width: int, seed: int) -> None:
    picture = _picture(height, width, seed)
    expected = 2 * picture.mean((1, 2), keepdims=True) - picture
    np.testing.assert_allclose(transform(transform(picture)), expected, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (4, 6), (5, 7)])
def test_a_constant_stays(size: tuple[int, int]) -> None:
    np.testing.assert_allclose(transform(np.full((3, *size), 0.3)), 0.3, atol=1e-15)


def test_a_wave_moves_by_a_quarter_of_its_length() -> None:
    """cos becomes sin along either axis: the law itself, computed without a Fourier transform."""
    phase = 2 * np.pi * 3 * np.arange(16) / 16
    for axis in (-1, -2):
        wave = np.broadcast_to(np.cos(phase) if axis == -1 else np.cos(phase)[:, None], (1, 16, 16))
        turned = np.broadcast_to(np.sin(phase) if axis == -1 else np.sin(phase)[:, None], (1, 16, 16))
        np.testing.assert_allclose(transform(wave.copy()), turned, atol=1e-12)


def test_pictures_become_unlike_themselves() -> None:
    """Coarse drawn pictures, as photographs have most of their energy in coarse structure."""
    rule = ImageRule(64, 64, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 10**6)
    public = draw_synthetic(8, rule, np.random.default_rng(0))
    pictures = public.pixels(range(8))
    found = transformed_pixels(pictures)
    assert found.shape == pictures.shape and found.dtype == np.uint8
    correlations = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(pictures, found, strict=True)]
    assert np.abs(np.mean(correlations)) < 0.35
    assert (np.mean((found == 0) | (found == 255))) < 0.25  # few pixels are clipped


def test_each_channel_and_each_picture_is_on_its_own() -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (3, 9, 8, 3), dtype=np.uint8)
    whole = transformed_pixels(pictures)
    for index, picture in enumerate(pictures):
        for channel in range(3):
            alone = np.repeat(picture[None, :, :, channel : channel + 1], 3, axis=3)
            np.testing.assert_array_equal(transformed_pixels(alone)[0, :, :, 0], whole[index, :, :, channel])
