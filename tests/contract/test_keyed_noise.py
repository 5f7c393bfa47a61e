"""Keyed noise: golden values, the laws of the draws, and what keys must keep apart."""

from __future__ import annotations

import hashlib
import hmac
import math
import statistics
import tracemalloc
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.keyed_noise import (
    CHUNK,
    class_list_hash,
    corrected_bias,
    derive_key,
    laplace,
    natural_log,
    noise_key,
    noisy_weights,
    normal,
    permutation,
    random_bits,
    uniform,
    wire_id,
)

KEY = bytes(range(32))
SECRET = b"s" * 32
PARTS = st.one_of(st.binary(max_size=40), st.text(max_size=20), st.integers(), st.floats(allow_nan=False))


def digest(array: np.ndarray[Any, Any]) -> str:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as in J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), in plain integers."""
    mask = 2**64 - 1
    words = [counter >> shift & mask for shift in (0, 64, 128, 192)]
    for turn in range(10):
        keys = [(key[0] + turn * 0x9E3779B97F4A7C15) & mask, (key[1] + turn * 0xBB67AE8584CAA73B) & mask]
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [
            second >> 64 ^ words[1] ^ keys[0],
            second & mask,
            first >> 64 ^ words[3] ^ keys[1],
            first & mask,
        ]
    return words


def test_the_reference_philox_gives_the_published_answers() -> None:
    assert philox(0, (0, 0)) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = 2**64 - 1
    assert philox(2**256 - 1, (ones, ones)) == [
        *(0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)
    ]


def test_bits_are_philox_from_counter_one() -> None:
    key = (int.from_bytes(KEY[:8], "little"), int.from_bytes(KEY[8:16], "little"))
    assert random_bits(KEY, 12).tolist() == [word for counter in (1, 2, 3) for word in philox(counter, key)]
    assert random_bits(KEY, 2).tolist() == [0xC6B0E3774462A515, 0xF6118BF3E5642A4A]


def test_golden_draws() -> None:
    assert digest(uniform(KEY, 100_000)) == "27781da9d492de1f"
    assert digest(laplace(KEY, (1000, 100))) == "93dc7aa9b496e5b7"
    assert digest(normal(KEY, (1000, 100))) == "e29fe1e4b42e962e"


def test_golden_keys() -> None:
    assert derive_key(SECRET, b"b", "s", -1, 0.5).hex() == (
        "01b273010f98278fa46f6724223192ba214cb8bbd737abf22a4fb06551fd6352"
    )
    assert noise_key(SECRET, b"p" * 32, b"q" * 32, 8, "laplace", 1.0).hex() == (
        "765bedcba1cfa8d6f4ae43a72d301c674631eb821a7f3b0b763e3e54f29efbee"
    )
    assert wire_id(SECRET, b"p" * 32).hex() == "7a70fd0b1a9b2ebdc989c6c0ca1e3233"
    assert permutation(SECRET, 10, "classes", b"p").tolist() == [7, 1, 6, 4, 0, 9, 8, 3, 5, 2]


def test_a_derived_key_is_hmac_of_tagged_parts() -> None:
    message = (
        b"b\x01\0\0\0x" + b"s\x02\0\0\0\xc3\xa4" + b"i\x02\0\0\0\x00\x01" + b"f\x08\0\0\0" + b"\0" * 6 + b"\xf0\x3f"
    )
    assert derive_key(SECRET, b"x", "ä", 256, 1.0) == hmac.new(SECRET, message, hashlib.sha256).digest()


@given(first=st.lists(PARTS, max_size=4), second=st.lists(PARTS, max_size=4))
def test_unlike_parts_give_unlike_keys(first: list[Any], second: list[Any]) -> None:
    alike = repr([(type(part), part) for part in first]) == repr([(type(part), part) for part in second])
    assert (derive_key(SECRET, *first) == derive_key(SECRET, *second)) is alike


def test_parts_do_not_run_into_each_other() -> None:
    keys = [derive_key(SECRET, *parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], [b"abc"], ["", "abc"])]
    assert len(set(keys)) == 5
    assert len({derive_key(SECRET, part) for part in (1, 1.0, "1", b"1", -1, True)}) == 5  # True is 1


def test_a_part_of_another_type_is_a_bug() -> None:
    with pytest.raises(TypeError, match="found NoneType"):
        derive_key(SECRET, None)  # type: ignore[arg-type]


BASE: dict[str, Any] = {
    "secret": SECRET,
    "pixel_digest": b"p" * 32,
    "package_digest": b"q" * 32,
    "cut": 8,
    "kind": "laplace",
    "scale": 1.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("secret", b"t" * 32),
        ("pixel_digest", b"P" * 32),
        ("package_digest", b"Q" * 32),
        ("cut", 9),
        ("kind", "normal"),
        ("scale", 2.0),
        ("scale", math.nextafter(1.0, 2.0)),
    ],
)
def test_keys_that_differ_in_one_thing_draw_independent_noise(name: str, value: object) -> None:
    count = 200_000
    one = laplace(noise_key(**BASE), (count,)).astype(np.float64)
    other = laplace(noise_key(**{**BASE, name: value}), (count,)).astype(np.float64)
    for left, right in [(one, other), (np.abs(one), np.abs(other)), (one[1:], other[:-1])]:
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(count)


def test_the_same_release_is_the_same_draw_bit_for_bit() -> None:
    first, again = (laplace(noise_key(**BASE), (197, 64)) for _ in range(2))
    assert first.tobytes() == again.tobytes()
    assert noise_key(**{**BASE, "scale": 1}) == noise_key(**BASE)  # an integer scale is the same scale
    assert np.array_equal(laplace(noise_key(**BASE), (50, 64)), first[:50])


def test_uniform_draws_are_inside_the_open_interval() -> None:
    draws = uniform(KEY, 1_000_000)
    assert 0.0 < draws.min() < 1e-5 and 1.0 - 1e-5 < draws.max() < 1.0
    counts = np.histogram(draws, 100, (0.0, 1.0))[0]
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 160  # chi-squared, 99 degrees of freedom


@settings(max_examples=500)
@given(st.floats(min_value=2.0**-1022, max_value=2.0**1000))
def test_the_logarithm_is_right_to_1e_13(x: float) -> None:
    exact = math.log(x)
    assert abs(natural_log(np.array([x]))[0] - exact) <= 1e-13 * abs(exact)


def test_the_logarithm_is_right_to_1e_13_near_one_and_where_ranges_meet() -> None:
    steps = 2.0 ** -np.arange(1, 53)
    near = np.concatenate([1 - steps, 1 + steps, [math.sqrt(0.5), math.sqrt(2.0), 0.5, 2.0, 2.0**-52]])
    edges = np.concatenate([near, np.nextafter(near, 0.0), np.nextafter(near, 9.0)])
    edges = edges[edges != 1.0]
    exact = np.array([math.log(x) for x in edges])
    assert (np.abs(natural_log(edges) - exact) <= 1e-13 * np.abs(exact)).all()
    assert natural_log(np.array([1.0]))[0] == 0.0


def test_laplace_noise_has_its_law() -> None:
    noise = laplace(KEY, (1000, 1000)).astype(np.float64)
    assert noise.shape == (1000, 1000) and np.isfinite(noise).all() and (noise != 0).all()
    assert np.abs(noise).mean() == pytest.approx(1.0, abs=0.005)  # b
    assert noise.std() == pytest.approx(math.sqrt(2.0), abs=0.01)  # b sqrt 2
    assert noise.mean() == pytest.approx(0.0, abs=0.006)
    for at in (0.5, 1.0, 2.0, 5.0):
        share = math.exp(-at)  # P(|n| > at)
        assert (np.abs(noise) > at).mean() == pytest.approx(share, abs=5 * math.sqrt(share / 1e6))
        assert (noise > at).mean() == pytest.approx(share / 2, abs=5 * math.sqrt(share / 2e6))


def test_laplace_noise_is_the_inverse_of_its_distribution() -> None:
    draws, noise = uniform(KEY, 10_000), laplace(KEY, (10_000,))
    expected = [math.log(2 * u) if u < 0.5 else -math.log(2 * (1 - u)) for u in draws.tolist()]
    assert np.allclose(noise, expected, rtol=1e-7, atol=0)


def test_normal_noise_has_its_law() -> None:
    noise = normal(KEY, (1_000_000,)).astype(np.float64)
    moments = [(noise**power).mean() for power in range(1, 7)]
    expected = [0, 1, 0, 3, 0, 15]
    errors = [math.sqrt(variance / 1e6) for variance in (1, 2, 15, 96, 945, 10170)]
    assert all(abs(m - e) < 5 * s for m, e, s in zip(moments, expected, errors, strict=True))
    for at in (1.0, 2.0, 3.0, 4.0):
        share = math.erfc(at / math.sqrt(2.0))
        assert (np.abs(noise) > at).mean() == pytest.approx(share, abs=5 * math.sqrt(share / 1e6))


def normal_below(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def test_the_normal_quantile_is_right_to_1e_9() -> None:
    from contract.keyed_noise import _normal_quantile

    tails = 2.0 ** -np.arange(1.0, 54.0)
    edges = np.array([0.075, math.exp(-25.0)])  # where the three ranges of AS 241 meet: |q| = 0.425 and r = 5
    low = np.concatenate([tails, edges, np.nextafter(edges, 0), np.nextafter(edges, 1), uniform(KEY, 5000) / 2])
    quantiles = _normal_quantile(low)
    reference = np.array([statistics.NormalDist().inv_cdf(u) for u in low.tolist()])
    assert np.abs(quantiles - reference).max() < 1e-9
    # An independent check: the slope of the distribution turns an error of the quantile into one of the probability.
    for u, z in zip(low.tolist(), quantiles.tolist(), strict=True):
        slope = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
        assert abs(normal_below(z) - u) < 1e-9 * slope
    high = 1.0 - low
    exact = 1.0 - high == low
    assert np.array_equal(_normal_quantile(high[exact]), -quantiles[exact])


def test_a_draw_does_not_depend_on_how_it_is_cut_into_chunks() -> None:
    long = normal(KEY, (3 * CHUNK + 7,))
    assert np.array_equal(normal(KEY, (CHUNK + 1,)), long[: CHUNK + 1])
    assert laplace(KEY, ()).shape == () and laplace(KEY, (0, 3)).shape == (0, 3)


def layer(rows: int, columns: int, seed: int = 0, rms: float = 33.6) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Codes as of per-channel quantization; a root mean square of 33.6 is that of real weights (ViT-S)."""
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(rng.normal(0, rms, (rows, columns))), -127, 127).astype(np.int8)


SCALES = (np.linspace(0.5, 2.0, 64, dtype=np.float32) / 1000).astype(np.float32)


@pytest.mark.parametrize("alpha", [0.01, 0.1])
def test_golden_weight_noise(alpha: float) -> None:
    codes = (np.arange(255 * 64) % 255 - 127).astype(np.int8).reshape(255, 64)
    noisy = noisy_weights(codes, SCALES, 1, alpha, KEY)
    assert digest(noisy.codes) == {0.01: "19cf1d81c8c7c696", 0.1: "c5b267454e162d90"}[alpha]


def test_alpha_zero_gives_the_same_bytes() -> None:
    codes = np.arange(-128, 128).astype(np.int8).reshape(4, 64)
    noisy = noisy_weights(codes, SCALES, 1, 0.0, KEY)
    assert noisy.codes.tobytes() == codes.tobytes() and (noisy.changed, noisy.saturated) == (0, 0)
    assert noisy.codes is not codes


def test_weight_noise_repeats_with_its_key_and_only_with_it() -> None:
    codes = layer(256, 64)
    before = codes.copy()
    first, again, other = (noisy_weights(codes, SCALES, 1, 0.1, key) for key in (KEY, KEY, KEY[::-1]))
    assert first.codes.tobytes() == again.codes.tobytes() != other.codes.tobytes()
    assert np.array_equal(codes, before)
    assert first.changed == np.count_nonzero(first.codes != codes)
    assert first.codes.dtype == np.int8 and first.codes.min() >= -127


def deviation(codes: Any, scales: Any, alpha: float) -> Any:
    """Standard deviation of n_x w + n_plus in steps, for channel axis 1, written as in the paper."""
    weights = codes * scales.astype(np.float64)
    return np.sqrt((alpha * weights) ** 2 + (alpha * weights.std()) ** 2) / scales


def test_weight_noise_survives_the_grid() -> None:
    """Stochastic rounding: mean zero, and the variance of the noise plus that of the rounding, f (1 - f)."""
    codes, alpha = layer(2048, 64, rms=20.0), 0.05
    moved = np.stack(
        [noisy_weights(codes, SCALES, 1, alpha, derive_key(KEY, run)).codes.astype(float) - codes for run in range(8)]
    )
    spread = deviation(codes, SCALES, alpha)
    fraction = np.random.default_rng(1).normal(0, spread, moved.shape) % 1.0
    expected = spread**2 + (fraction * (1 - fraction)).mean(axis=0)
    assert abs(moved.mean()) < 5 * math.sqrt(expected.mean() / moved.size)
    assert (moved**2).mean() == pytest.approx(expected.mean(), rel=0.01)
    assert np.corrcoef(codes.ravel(), moved.mean(axis=0).ravel())[0, 1] == pytest.approx(0.0, abs=0.02)
    for low, high in [(0, 10), (10, 30), (30, 100)]:  # larger weights are moved more
        group = (np.abs(codes) >= low) & (np.abs(codes) < high)
        assert (moved[:, group] ** 2).mean() == pytest.approx(expected[group].mean(), rel=0.03)


@pytest.mark.parametrize("alpha", [0.003, 0.01, 0.1])
def test_the_share_of_changed_codes_is_the_expected_one(alpha: float) -> None:
    codes = layer(2048, 64)
    noisy = noisy_weights(codes, SCALES, 1, alpha, KEY)
    moves = np.random.default_rng(1).normal(0, deviation(codes, SCALES, alpha))
    assert noisy.changed / codes.size == pytest.approx(np.minimum(np.abs(moves), 1.0).mean(), abs=0.01)
    if alpha == 0.01:  # measured on real weights: 34.1 % (per channel, stochastic)
        assert 0.30 < noisy.changed / codes.size < 0.42


def test_clipped_codes_are_counted() -> None:
    codes = np.full((100, 64), 127, np.int8)
    noisy = noisy_weights(codes, np.ones(64, np.float32), 1, 0.1, KEY)
    assert 0.4 * codes.size < noisy.saturated < 0.6 * codes.size
    assert noisy.codes.max() == 127 and np.count_nonzero(noisy.codes == 127) >= noisy.saturated


@pytest.mark.parametrize("scale", [1e-3, 0.0])
def test_a_layer_of_zeros_stays(scale: float) -> None:
    codes = np.zeros((8, 4), np.int8)
    noisy = noisy_weights(codes, np.full(4, scale, np.float32), 1, 0.1, KEY)
    assert np.array_equal(noisy.codes, codes) and noisy.changed == 0


def test_a_channel_without_a_scale_stays() -> None:
    codes = layer(256, 4)
    codes[:, 2] = 0
    noisy = noisy_weights(codes, np.array([1e-3, 1e-3, 0.0, 1e-3], np.float32), 1, 0.1, KEY)
    assert not noisy.codes[:, 2].any() and noisy.changed > 0


def test_the_channel_axis_may_be_any() -> None:
    kernel = np.random.default_rng(0).integers(-90, 90, (64, 3, 8, 8)).astype(np.int8)
    noisy = noisy_weights(kernel, SCALES, 0, 0.05, KEY)
    moved = (noisy.codes.astype(float) - kernel).std(axis=(1, 2, 3))
    flat = kernel.reshape(64, -1).T
    assert np.allclose(moved, np.sqrt((deviation(flat, SCALES, 0.05) ** 2).mean(axis=0) + 1 / 6), rtol=0.4)
    same_as_rows = noisy_weights(kernel.reshape(64, -1), SCALES, 0, 0.05, KEY)
    assert np.array_equal(same_as_rows.codes, noisy.codes.reshape(64, -1))


def test_weight_noise_needs_little_memory() -> None:
    codes = layer(2048, 512)
    scales = np.full(512, 1e-3, np.float32)
    tracemalloc.start()
    noisy_weights(codes, scales, 1, 0.1, KEY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * codes.size + 4_000_000  # one float32 layer, and the chunks


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), inputs=st.integers(1, 300), outputs=st.integers(1, 200), axis=st.integers(0, 1))
def test_the_corrected_bias_keeps_the_shift_out_of_the_result(seed: int, inputs: int, outputs: int, axis: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    new = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    scales = rng.uniform(1e-4, 1e-2, outputs).astype(np.float32)
    x, shift, bias = (rng.normal(size=n).astype(np.float32) for n in (inputs, inputs, outputs))
    folded = (bias + shift @ (old * scales.astype(np.float64))).astype(np.float32)
    shaped = (old, new) if axis == 1 else (np.ascontiguousarray(old.T), np.ascontiguousarray(new.T))
    corrected = corrected_bias(folded, shift, *shaped, scales, axis)
    weights = new * scales.astype(np.float64)
    assert corrected.dtype == np.float32 and corrected.shape == (outputs,)
    size = 1.0 + np.abs(folded) + np.abs(corrected)
    assert (np.abs((x.astype(float) - shift) @ weights + corrected - (x @ weights + bias)) < 1e-6 * size).all()


def test_a_bias_whose_weights_stay_is_the_same_bytes() -> None:
    bias = np.array([-0.0, 0.0, 1e-8, -3.0], np.float32)
    codes = layer(3000, 4)
    shift = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    assert corrected_bias(bias, shift, codes, codes, np.ones(4, np.float32), 1).tobytes() == bias.tobytes()


@given(count=st.integers(0, 300), secret=st.binary(min_size=32, max_size=32))
def test_a_permutation_is_one(count: int, secret: bytes) -> None:
    numbers = permutation(secret, count, "classes", b"package")
    assert sorted(numbers.tolist()) == list(range(count)) and numbers.dtype == np.int64
    assert np.array_equal(numbers, permutation(secret, count, "classes", b"package"))


def test_permutations_are_even_and_differ_between_sites_and_packages() -> None:
    firsts = [int(permutation(derive_key(SECRET, run), 5, "classes")[0]) for run in range(2000)]
    assert all(abs(firsts.count(number) - 400) < 5 * math.sqrt(400) for number in range(5))
    many = [permutation(secret, 50, "classes", part).tolist() for secret in (SECRET, KEY) for part in (b"p", b"q")]
    assert len({tuple(each) for each in many}) == 4


def test_the_class_list_hash_names_the_ordered_list() -> None:
    names = ["Zebra", "äpfel"]
    hashed = class_list_hash(SECRET, names)
    assert hashed == class_list_hash(SECRET, [unicodedata.normalize("NFD", name) for name in names])
    others = [names[::-1], ["Zebraäpfel"], names[:1], [*names, ""], []]
    assert len({class_list_hash(SECRET, each) for each in others} | {hashed, class_list_hash(KEY, names)}) == 7


def test_wire_ids_are_stable_and_unlinkable_between_secrets() -> None:
    assert wire_id(SECRET, b"p" * 32) == wire_id(SECRET, b"p" * 32) != wire_id(KEY, b"p" * 32)
    assert len(wire_id(SECRET, b"p" * 32)) == 16
