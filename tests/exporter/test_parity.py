from dataclasses import replace

import numpy as np
import pytest

from contract.errors import GateError
from exporter.parity import (
    FloatRule,
    Int8Figures,
    channel_bias,
    count_int8_layers,
    gate_float,
    gate_int8,
    gate_top1,
    measure,
    snr_db,
)
from exporter.plan import Limits

RNG = np.random.default_rng(0)
TOKENS = RNG.normal(size=(4, 17, 48)).astype(np.float32)
GOOD = Int8Figures(31.0, 0.999, 3, 0.8, 1.0, (), 8, 8)


def test_rounding_errors_pass_the_float_gate() -> None:
    gate_float(
        [measure("tokens", TOKENS, TOKENS + 1e-6 * RNG.normal(size=TOKENS.shape).astype(np.float32))], FloatRule()
    )


@pytest.mark.parametrize("amount", [0.1, 0.01, np.nan])
def test_ex_04_one_channel_that_is_off_trips_the_gate_with_its_figure(amount: float) -> None:
    wrong = TOKENS.copy()
    wrong[..., 7] += amount
    with pytest.raises(GateError, match="tokens at batch 2") as caught:
        gate_float(
            [measure("tokens at batch 1", TOKENS, TOKENS), measure("tokens at batch 2", TOKENS, wrong)], FloatRule()
        )
    assert "largest error" in caught.value.cause and "tokens at batch 1:" in caught.value.cause


def test_another_shape_trips_the_gate() -> None:
    with pytest.raises(GateError, match="tokens"):
        gate_float([measure("tokens", TOKENS, TOKENS[:1])], FloatRule())


def test_snr_is_ten_decibel_for_a_tenth_of_the_energy() -> None:
    assert snr_db(TOKENS, TOKENS * (1 + np.sqrt(0.1))) == pytest.approx(10.0, abs=1e-3)
    assert snr_db(TOKENS, TOKENS) > 200


def test_a_biased_channel_stands_out_and_honest_noise_does_not() -> None:
    noisy = TOKENS + 0.02 * RNG.normal(size=TOKENS.shape).astype(np.float32)
    assert channel_bias(TOKENS, noisy)[1] < 1
    noisy[..., 11] += 0.5
    worst, bias = channel_bias(TOKENS, noisy)
    assert worst == 11 and bias > 4


def test_good_int8_passes_unforced() -> None:
    assert gate_int8(GOOD, Limits(), force=False) is False
    assert gate_int8(GOOD, Limits(), force=True) is False


@pytest.mark.parametrize("bad", [{"snr_db": 19.0}, {"snr_db": float("nan")}, {"channel_bias": 9.0}])
def test_qu_03_poor_int8_is_refused_with_figures_unless_forced(bad: dict[str, float]) -> None:
    figures = replace(GOOD, **bad)
    with pytest.raises(GateError, match="SNR"):
        gate_int8(figures, Limits(), force=False)
    assert gate_int8(figures, Limits(), force=True) is True


@pytest.mark.parametrize("bad", [{"int8_kernels": 7}, {"int8_share": 0.9}])
def test_layers_that_silently_run_in_float_are_never_forced(bad: dict[str, float]) -> None:
    with pytest.raises(GateError, match="INT8 kernels"):
        gate_int8(replace(GOOD, **bad), Limits(), force=True)


def test_only_int8_kernels_are_counted() -> None:
    kernels = {"MatMulIntegerToFloat": 6, "QGemm": 1, "QLinearConv": 2, "MatMul": 4, "FusedConv": 1}
    assert count_int8_layers(kernels) == 9


def test_equal_answers_pass_and_what_was_not_measured_is_not_judged() -> None:
    assert gate_top1(0.8, 0.8, 0.7, 500, Limits(), force=False) is False
    assert gate_top1(None, None, None, 0, Limits(), force=False) is False
    assert gate_top1(0.8, 0.79, None, 500, Limits(), force=False) is False


@pytest.mark.parametrize(
    ("int8", "noisy", "said"),
    [(0.75, 0.7, "INT8 answers 75.0%"), (float("nan"), 0.7, "INT8 answers"), (0.8, 0.1, "with noise 10.0%")],
)
def test_qu_03_lost_answers_are_refused_with_figures_unless_forced(int8: float, noisy: float, said: str) -> None:
    with pytest.raises(GateError, match=said) as caught:
        gate_top1(0.8, int8, noisy, 500, Limits(), force=False)
    assert "of 500 held-out images float32 answers 80.0%" in caught.value.cause and "--force" in caught.value.cure
    assert gate_top1(0.8, int8, noisy, 500, Limits(), force=True) is True


def test_two_of_few_images_may_be_lost() -> None:
    assert gate_top1(0.8, 0.6, None, 10, Limits(), force=False) is False
    with pytest.raises(GateError):
        gate_top1(0.8, 0.5, None, 10, Limits(), force=False)
