"""Gates: does the exported file compute what torch computes, within limits stated here, and in INT8 kernels?

Running models is left to exporter.build; a gate gets arrays and answers with figures or a GateError that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import GateError
from exporter.plan import Limits
from exporter.runtime import INT8_KERNELS

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class FloatRule:
    """What "the same" means between two float32 runtimes: every limit must hold on every tensor."""

    max_abs: float = 1e-3  # times the tensor's rms where that is above 1
    relative: float = 1e-4  # |error|_2 / |reference|_2
    cosine: float = 0.99999


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from its reference."""

    tensor: str
    max_abs: float
    relative: float
    cosine: float
    rms: float  # of the reference

    def __str__(self) -> str:
        return (
            f"{self.tensor}: largest error {self.max_abs:.2e}, relative error {self.relative:.2e}, "
            f"cosine {self.cosine:.7f}"
        )


def measure(tensor: str, reference: Floats, found: Floats) -> Difference:
    """Figures of one tensor; a shape that differs is infinitely far away."""
    if reference.shape != found.shape:
        return Difference(f"{tensor} {found.shape} for {reference.shape}", np.inf, np.inf, 0.0, 1.0)
    exact, other = reference.astype(np.float64), found.astype(np.float64)
    error = other - exact
    norm, other_norm = float(np.linalg.norm(exact)), float(np.linalg.norm(other))
    return Difference(
        tensor,
        max_abs=float(np.abs(error).max()),
        relative=float(np.linalg.norm(error)) / max(norm, 1e-30),
        cosine=float((exact * other).sum()) / max(norm * other_norm, 1e-30),
        rms=norm / np.sqrt(exact.size),
    )


def gate_float(differences: Sequence[Difference], rule: FloatRule) -> None:
    """Raises GateError with the figures of every tensor when one breaks the rule."""

    def fails(each: Difference) -> bool:  # written so that NaN fails
        return not (
            each.max_abs <= rule.max_abs * max(1.0, each.rms)
            and each.relative <= rule.relative
            and each.cosine >= rule.cosine
        )

    failed = [each.tensor for each in differences if fails(each)]
    if failed:
        raise GateError(
            f"the export differs from torch in {', '.join(failed)} (limits: error {rule.max_abs:.0e} times rms or 1, "
            f"relative {rule.relative:.0e}, cosine {rule.cosine}). " + ". ".join(map(str, differences)),
            "nothing was written; report the model with these figures",
        )


@dataclass(frozen=True)
class Int8Figures:
    """What INT8 cost at the cut, and whether it really ran."""

    snr_db: float
    cosine: float
    worst_channel: int
    channel_bias: float  # mean error of the worst channel, in units of its ordinary error
    int8_share: float  # of matrix weights
    float_weights: tuple[str, ...]
    linear_layers: int  # and convolutions, that are quantized
    int8_kernels: int  # of these, how many onnxruntime executed as INT8

    def __str__(self) -> str:
        return (
            f"INT8 at the cut: SNR {self.snr_db:.1f} dB, cosine {self.cosine:.5f}, worst channel {self.worst_channel} "
            f"with bias {self.channel_bias:.2f}, {self.int8_kernels} of {self.linear_layers} layers in INT8 "
            f"kernels, {100 * self.int8_share:.1f} % of matrix weights INT8"
        )


_CHANNEL_BIAS_LIMIT = 4.0  # about 1 on sound models; a channel that is off as a whole goes far above


def snr_db(reference: Floats, found: Floats) -> float:
    """10 log10 of signal energy over error energy."""
    exact = reference.astype(np.float64)
    error = float(np.square(found - exact).sum())
    return float(10 * np.log10(max(float(np.square(exact).sum()), 1e-300) / max(error, 1e-300)))


def channel_bias(reference: Floats, found: Floats) -> tuple[int, float]:
    """The channel whose mean error stands out most, and by how much: |mean e_c| / (ordinary error + 1 % of rms_c)."""
    exact = reference.reshape(-1, reference.shape[-1]).astype(np.float64)
    error = found.reshape(-1, found.shape[-1]) - exact
    ordinary = np.maximum(error.std(axis=0), np.sqrt(np.median(np.square(error).mean(axis=0))))
    standing = np.abs(error.mean(axis=0)) / (ordinary + 0.01 * np.sqrt(np.square(exact).mean(axis=0)) + 1e-12)
    worst = int(np.argmax(standing))
    return worst, float(standing[worst])


def count_int8_layers(kernels: Mapping[str, int]) -> int:
    """Linear layers and convolutions that ran as INT8, from the operators that onnxruntime executed."""
    return sum(count for name, count in kernels.items() if name in (*INT8_KERNELS, "QLinearConv"))


def gate_int8(figures: Int8Figures, limits: Limits, force: bool) -> bool:
    """True when a quality limit was broken and forced. A layer outside INT8 kernels is never forced.

    Raises GateError with all figures.
    """
    if figures.int8_kernels < figures.linear_layers or not figures.int8_share >= limits.int8_share:
        raise GateError(
            f"expected all quantized layers in INT8 kernels, {limits.int8_share:.0%} of matrix weights INT8. {figures}",
            "nothing was written; export without --int8, or report the model",
        )
    good = figures.snr_db >= limits.int8_snr_db and figures.channel_bias <= _CHANNEL_BIAS_LIMIT
    if not good and not force:
        raise GateError(
            f"INT8 tokens are too far from float (limits: SNR {limits.int8_snr_db} dB, channel bias "
            f"{_CHANNEL_BIAS_LIMIT}). {figures}",
            "give more and typical images with --calibration, export without --int8, or accept it with --force",
        )
    return not good


def gate_top1(float32: float | None, int8: float | None, noisy: float | None, images: int, limits: Limits,
              force: bool) -> bool:  # fmt: skip
    """True when INT8, or INT8 under the planned noise, lost too many right answers and that was forced.

    Shares of right answers on the same held-out images; what was not measured (None) is not judged. Up to two images
    may always be lost: on few of them a limit in percent means nothing.

    Raises GateError with all figures.
    """
    if float32 is None:
        return False
    faults = []
    allowed = max(limits.int8_top1_loss * images, 2.0)
    if int8 is not None and not (float32 - int8) * images <= allowed + 1e-6:
        faults.append(f"INT8 answers {int8:.1%} (at most {limits.int8_top1_loss:.1%} less is allowed)")
    if noisy is not None and not noisy >= limits.noisy_top1_share * float32 - 2.0 / max(images, 1):
        faults.append(f"INT8 with noise {noisy:.1%} (at least {limits.noisy_top1_share:.0%} of float32's is asked for)")
    if faults and not force:
        raise GateError(
            f"of {images} held-out images float32 answers {float32:.1%} rightly, " + ", ".join(faults),
            "give more and typical images with --calibration, lower --kappa or --alpha, export without --int8, or "
            "accept it with --force",
        )
    return bool(faults)
