"""Decoders for the data owner's preview: at each strength of noise an attack is trained, measured, and written as ONNX.

The attack is `attacks.inverse_net`, smaller and shorter than at its full size: the known law of the noise, the filter,
the ridge and a transformer on top of it. What it learns from and attacks is `profiler`'s, files are `decoders_cli`'s.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from contract.errors import ExportError, UsageError
from contract.preview import CODES_NAME, PICTURE_NAME, Decoder, psnr_db, ssim

from ..attacks import Effort, Seen
from ..attacks._release import Release
from ..attacks.inverse_net import InverseNet, Size
from .package import Package
from .profiler import Profiler
from .public import Progress, Public

SMALL = Size(batch=32, width=128, blocks=2, heads=4, checks=15)
CHECKED = 4  # pictures whose graph's answer is compared with the attack's
TOLERANCE = 0.02  # 5 of 255: a GPU draws them in bfloat16, which a CPU repeats to the last bits


@dataclass(frozen=True)
class Training:
    """Of each decoder: at most so many steps, and an equal share of the time for all."""

    steps: int
    seed: int
    opset: int
    budget_s: float
    clock: Callable[[], float]


@dataclass(frozen=True)
class Trained:
    """One decoder: what the manifest will say of it, and its graph."""

    record: Decoder
    graph: bytes


def train_decoders(
    package: Package, public: Public, profiler: Profiler, strengths: Sequence[float], training: Training,
    progress: Progress,
) -> Iterator[Trained]:  # fmt: skip
    """One decoder for each strength, of the package's first frontend.

    Raises: UsageError for a package without a frontend; ExportError when torch cannot write the graph.
    """
    split = package.splits[0]
    if split.unit != "kappa":
        raise UsageError(
            "parts that devices train send their activations without noise: there are no settings to preview",
            "leave --preview out; leakage-profile measures what such parts show",
        )
    world = profiler.open(split, True)
    truth = _pictures(profiler.truth)
    colour = np.broadcast_to(_pictures(world.learn.images.mean(dim=(0, 2, 3))[None, :, None, None])[0], truth[0].shape)
    for place, strength in enumerate(strengths):
        known, seen = profiler.meet(world, strength)
        with progress(f"decoder {place + 1} of {len(strengths)}, kappa {strength:g}", training.steps, "steps") as tell:
            time_is_over = _over_after(training.budget_s / len(strengths), training.clock)
            attack = InverseNet(Effort(training.steps, training.seed, tell, time_is_over), SMALL)
            attack.fit(known)
        found, linear = (_pictures(each.reconstruct(seen)) for each in (attack, attack.ridge))
        record = Decoder(
            onnx="decoder.onnx" if place == 0 else f"decoder.kappa-{strength:g}.onnx",
            cut=split.index,
            kappa=strength,
            alpha=package.alpha,
            steps=attack.steps,
            learnt_images=len(world.learn.images),
            images=len(truth),
            psnr_db=_mean(psnr_db, truth, found),
            ssim=_mean(ssim, truth, found),
            ridge_psnr_db=_mean(psnr_db, truth, linear),
            colour_psnr_db=_mean(psnr_db, truth, [colour] * len(truth)),
            colour_ssim=_mean(ssim, truth, [colour] * len(truth)),
        )
        reader, codes = attack.as_module(), _codes(known.release, seen)
        graph = to_onnx(reader, codes[:1], training.opset)
        check_graph(graph, codes.cpu().numpy(), found[: len(codes)])
        yield Trained(record, graph)


def _over_after(budget_s: float, clock: Callable[[], float]) -> Callable[[], bool]:
    started_s = clock()
    return lambda: clock() - started_s > budget_s


def _codes(release: Release, seen: Seen) -> Tensor:
    """What the server received of a few pictures, as codes (n, S, d) int8."""
    assert release.steps is not None
    return torch.round(seen.uploads[-1].received[:CHECKED] / release.steps).to(torch.int8)


def _pictures(images: Tensor) -> np.ndarray:
    """(n, 3, h, w) -> (n, h, w, 3) on the CPU."""
    return images.permute(0, 2, 3, 1).cpu().numpy()


def _mean(figure: Callable[..., float], true: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    return float(np.mean([figure(a, b) for a, b in zip(true, found, strict=True)]))


def to_onnx(decoder: nn.Module, codes: Tensor, opset: int) -> bytes:
    """The graph of one image: codes (1, S, d) int8 -> picture (1, 3, h, w) float32. Raises: ExportError, UsageError."""
    data = io.BytesIO()
    with _plain_attention(), warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                decoder.eval(), (codes,), dynamo=True, opset_version=opset, verbose=False,
                input_names=[CODES_NAME], output_names=[PICTURE_NAME],
            )  # fmt: skip
            data.write(program.model_proto.SerializeToString(deterministic=True))
        except ImportError as error:
            raise UsageError(f"writing ONNX needs {error.name}", "pip install 'cutlayer[export]'") from error
        except (RuntimeError, TypeError, ValueError, torch.onnx.errors.OnnxExporterError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ExportError(
                f"torch could not write the decoder in ONNX opset {opset}: {said[:300]}", "leave --preview out"
            ) from error
    return data.getvalue()


def check_graph(graph: bytes, codes: np.ndarray, expected: np.ndarray) -> None:
    """Codes (n, S, d) must give the pictures (n, h, w, 3) that the attack itself drew. Raises: ExportError."""
    try:
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        found = [session.run([PICTURE_NAME], {CODES_NAME: each[None]})[0] for each in codes]
    except Exception as error:  # onnxruntime's classes share no base but Exception
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} refuses the decoder: {str(error).splitlines()[0][:300]}",
            "choose another --opset, or leave --preview out",
        ) from error
    error = float(np.abs(np.concatenate(found).transpose(0, 2, 3, 1) - expected).max())
    if not error <= TOLERANCE:
        raise ExportError(
            f"the decoder's graph should draw what the attack drew, the largest difference is {error:.3g}",
            "leave --preview out, and report the model",
        )


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without torch's fused kernel for inference, which has no form in ONNX."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Keep notes about opset conversion off the terminal: the finished graph is checked by the exporter."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in loggers]
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
