"""The backend's side of an export: statistics at the cut, the server's head, tuning, learning rates, accuracies.

Each step's law is in statistics, tune, few_shot and channel; this file runs the shipped frontend file and puts them in
order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.console import progress, say
from contract.images import normalise
from contract.keyed_noise import derive_key
from contract.manifest import WeightRecord
from contract.onnx_weights import noised_onnx
from exporter.channel import WireChannel
from exporter.few_shot import FewShotRates, FewShotSettings, choose_rates, default_rates, hold_out, turned
from exporter.frontend_file import FrontendFile
from exporter.hilbert import transformed_pixels
from exporter.models import Facts
from exporter.plan import ExportPlan, Limits
from exporter.public_set import Parts, PublicSet
from exporter.runtime import open_session, run_tokens
from exporter.statistics import PublicTokens, measure_tokens
from exporter.token_store import extract
from exporter.tune import Classifier, TokenSet, TuneSettings, backend_features, fit_head, linear_head, top1, tune
from exporter.tuning_frontends import TuningFrontend

_LEVELS = 8  # noise strengths that tuning picks from


@dataclass(frozen=True)
class Bench:
    """What every step here needs: the shipped file, the images, and where to work."""

    plan: ExportPlan
    file: FrontendFile
    facts: Facts
    public: PublicSet
    parts: Parts
    limits: Limits
    threads: int
    scratch: Path
    device: str
    tuning: TuneSettings
    few_shot: FewShotSettings | None  # None: rates are not chosen
    tuning_frontends: tuple[TuningFrontend, ...] = ()
    strengths: tuple[float, ...] = ()  # at which top-1 is measured besides the planned one


@dataclass(frozen=True)
class Accuracies:
    """Top-1 on held-out public images; None: not measured. `noisy` is weight noise and feature noise as planned."""

    float32: float | None = None
    int8: float | None = None
    untuned_noisy: float | None = None
    tuned_clean: float | None = None
    tuned_noisy: float | None = None


@dataclass(frozen=True)
class PreparedBackend:
    """What goes into the backend directory beside the original weights."""

    public_tokens: PublicTokens
    state: dict[str, Tensor]
    head: nn.Linear | None
    head_origin: str
    rates: FewShotRates
    accuracies: Accuracies
    by_strength: tuple[float | None, ...] = ()  # top-1 under weight noise and each of the bench's strengths


def prepare_untuned(
    bench: Bench, backend: nn.Module, head: tuple[Tensor, Tensor] | None, rng: np.random.Generator
) -> PreparedBackend:
    """Statistics and default rates; accuracies where the model's own head answers the public set's classes."""
    session = open_session(bench.file.data, bench.threads)
    images = bench.parts.tuning[: bench.limits.statistics_images]
    public_tokens = _statistics(bench, _extract(bench, session, images, "to measure"))
    accuracies, by_strength = Accuracies(), ()
    if _could_answer(bench, head):
        held = _Held(bench, session)
        model = Classifier(backend, linear_head(*head))
        accuracies = Accuracies(held.top1(model, held.exact), held.top1(model, held.coded))
        if bench.strengths:
            held.add_noisy(rng)
            by_strength = _by_strength(bench, model, held, public_tokens)
    layer = None if head is None else linear_head(*head)
    origin = "none" if head is None else "the model's own"
    rates = default_rates("no tuning was asked for")
    return PreparedBackend(public_tokens, _state(backend), layer, origin, rates, accuracies, by_strength)


def prepare_tuned(
    bench: Bench, backend: nn.Module, head: tuple[Tensor, Tensor] | None, rng: np.random.Generator
) -> PreparedBackend:
    """Everything: tokens from the sent and from tuning's frontends, head, learning rates, tuning, accuracies."""
    session = open_session(bench.file.data, bench.threads)
    plain = _extract_union(bench, session, "plain")
    public_tokens = _statistics(bench, plain[: len(bench.parts.tuning)])
    held = _Held(bench, session)
    del session
    tokens = _tuning_tokens(bench, plain, rng)
    head_layer, origin = _server_head(bench, backend, head, tokens, held)
    kappas = tuple(np.linspace(0.0, bench.plan.kappa_max, _LEVELS)) + (bench.plan.kappa,)
    rule = bench.plan.sent
    channel = WireChannel(public_tokens, bench.facts.layout, kappas[:_LEVELS], bench.device, rule)
    release = WireChannel(public_tokens, bench.facts.layout, kappas[_LEVELS:], bench.device, rule)
    untuned = Classifier(backend, head_layer)
    before = _accuracies_before(bench, untuned, held, release, rng)
    rates_rng = copy.deepcopy(rng) if bench.strengths else rng  # with or without rates, a sweep tunes alike
    rates = _choose_rates(bench, untuned, tokens, channel, release, rates_rng)
    tuned = copy.deepcopy(untuned)
    rows, classes = np.arange(len(tokens.labels)), np.arange(head_layer.out_features)
    tune(
        tuned, tokens, rows, classes, _tuning_channel(bench, channel), bench.tuning, rng, bench.device,
        "Tuning the backend",
    )  # fmt: skip
    after = Accuracies(
        **{**vars(before),
           "tuned_clean": held.top1(tuned, held.coded, _through(bench, channel, 0)),
           "tuned_noisy": held.top1(tuned, held.noisy, _through(bench, release, 0))}
    )  # fmt: skip
    by_strength = _by_strength(bench, tuned, held, public_tokens)
    tuned.cpu()
    return PreparedBackend(public_tokens, _state(tuned.backend), tuned.head, origin, rates, after, by_strength)


class _Held:
    """Tokens of the held-out images: float, INT8 and, made when first asked for, from one noisy frontend."""

    def __init__(self, bench: Bench, session: onnxruntime.InferenceSession) -> None:
        self._bench = bench
        self.labels = None if bench.public.labels is None else bench.public.labels[bench.parts.evaluation]
        exact = open_session(str(bench.file.float_path), bench.threads)
        self.exact = _extract(bench, exact, bench.parts.evaluation, "held-out float32")
        self.coded = _extract(bench, session, bench.parts.evaluation, "held-out plain")
        self.noisy = self.coded

    def add_noisy(self, rng: np.random.Generator) -> None:
        if _has_weight_noise(self._bench):
            self.noisy = _extract_noisy(self._bench, self._bench.parts.evaluation, 99, rng)

    def top1(
        self, model: Classifier, tokens: NDArray[np.float16], through: Callable[[Tensor], Tensor] | None = None
    ) -> float | None:
        if not len(self.labels):
            return None
        return top1(model, tokens, self.labels, through, self._bench.device)


def _accuracies_before(
    bench: Bench, untuned: Classifier, held: _Held, release: WireChannel, rng: np.random.Generator
) -> Accuracies:
    held.add_noisy(rng)
    return Accuracies(
        float32=held.top1(untuned, held.exact),
        int8=held.top1(untuned, held.coded),
        untuned_noisy=held.top1(untuned, held.noisy, _through(bench, release, 0)),
    )


def _by_strength(bench: Bench, model: Classifier, held: _Held, public_tokens: PublicTokens) -> tuple[float | None, ...]:
    channel = WireChannel(public_tokens, bench.facts.layout, bench.strengths, bench.device, bench.plan.sent)
    return tuple(held.top1(model, held.noisy, _through(bench, channel, level)) for level in range(len(bench.strengths)))


def _through(bench: Bench, channel: WireChannel, level: int) -> Callable[[Tensor], Tensor]:
    """The wire and the filter as one function, with noise that is the same at every call of this command."""
    generator = torch.Generator(device=bench.device).manual_seed(bench.plan.seed)
    return lambda tokens: channel.restore(channel.release(tokens, level, generator), level)


def _extract(
    bench: Bench, session: onnxruntime.InferenceSession, indices: NDArray[np.int64], name: str
) -> NDArray[np.float16]:
    layout = bench.facts.layout
    path = bench.scratch / f"tokens {name} {len(indices)}.npy"
    batches = bench.public.batches(indices, bench.limits.batch)
    return extract(session, batches, (len(indices), layout.count, layout.dim), path, f"Tokens, {name}")


def _extract_union(bench: Bench, session: onnxruntime.InferenceSession, name: str) -> NDArray[np.float16]:
    """Tokens (2 n, T, d) of the tuning images and, behind them, of their Hilbert transforms; or (n, T, d) without."""
    layout, indices, size = bench.facts.layout, bench.parts.tuning, bench.limits.batch
    transforms = indices if bench.public.hilbert else indices[:0]

    def batches() -> Iterator[NDArray[np.float32]]:
        yield from bench.public.batches(indices, size)
        for start in range(0, len(transforms), size):
            pixels = transformed_pixels(bench.public.pixels(transforms[start : start + size]))
            yield normalise(pixels, bench.public.rule)

    count = len(indices) + len(transforms)
    path = bench.scratch / f"tokens {name} {count}.npy"
    return extract(session, batches(), (count, layout.count, layout.dim), path, f"Tokens, {name}")


def _tuning_tokens(bench: Bench, plain: NDArray[np.float16], rng: np.random.Generator) -> TokenSet:
    """Published: the float frontend's tokens, then those of the sent one and of the subsets'. Else the sent one's, then
    those of the subsets' with the weight noise of some device."""
    labels, frontends = bench.public.labels[bench.parts.tuning], []
    if bench.tuning.published:
        exact = _extract_union(bench, open_session(str(bench.file.float_path), bench.threads), "float32")
        frontends = [exact, plain]
    else:
        frontends = [plain]
    for number, each in enumerate(bench.tuning_frontends):
        data = each.path.read_bytes()
        if not bench.tuning.published and bench.plan.alpha > 0:
            data = _noised(bench, data, each.records, rng)
        frontends.append(_extract_union(bench, open_session(data, bench.threads), f"tuning frontend {number + 1}"))
    return TokenSet(tuple(frontends), labels)


def _tuning_channel(bench: Bench, channel: WireChannel) -> WireChannel | None:
    return None if bench.tuning.published else channel


def _extract_noisy(
    bench: Bench, indices: NDArray[np.int64], number: int, rng: np.random.Generator
) -> NDArray[np.float16]:
    """Tokens from a frontend with the weight noise of some device: one more random secret."""
    data = _noised(bench, bench.file.data, bench.file.records, rng)
    return _extract(bench, open_session(data, bench.threads), indices, f"noisy frontend {number}")


def _noised(bench: Bench, data: bytes, records: tuple[WeightRecord, ...], rng: np.random.Generator) -> bytes:
    secret = rng.bytes(32)
    noised, _, _ = noised_onnx(data, records, bench.plan.alpha, lambda name: derive_key(secret, "weights", name))
    return bytes(noised)


def _has_weight_noise(bench: Bench) -> bool:
    return bool(bench.file.records) and bench.plan.alpha > 0


def _statistics(bench: Bench, tokens: NDArray[np.float16]) -> PublicTokens:
    """Of at most `statistics_images` rows."""
    count, step = min(len(tokens), bench.limits.statistics_images), bench.limits.batch
    return measure_tokens(
        bench.facts.layout, lambda: (tokens[start : min(start + step, count)] for start in range(0, count, step))
    )


def _could_answer(bench: Bench, head: tuple[Tensor, Tensor] | None) -> bool:
    """True when the model's own head has one output per class of the public set and there are images to try it on."""
    labels = bench.public.labels
    return (
        head is not None and labels is not None and len(bench.parts.evaluation) > 0
        and len(head[1]) == len(bench.public.folder.classes)
    )  # fmt: skip


def _server_head(
    bench: Bench, backend: nn.Module, head: tuple[Tensor, Tensor] | None, tokens: TokenSet, held: _Held
) -> tuple[nn.Linear, str]:
    """The model's own head if it answers the public classes clearly above chance, else one fitted to their features."""
    classes = len(bench.public.folder.classes)
    if _could_answer(bench, head):
        own = linear_head(*head)
        accuracy = held.top1(Classifier(backend, own), held.exact)
        if accuracy > min(3 / classes, 0.5 + 0.5 / classes):
            return own, "the model's own"
        say(f"the model's own head scores {accuracy:.1%} on {classes} classes, near chance: fitting a new one")
    rows = np.arange(len(tokens.labels))
    features = backend_features(backend, tokens, rows, bench.device, "Features for the server's head")
    backend.cpu()
    return fit_head(features, tokens.labels, classes), "fitted to the public set"


def _choose_rates(
    bench: Bench, untuned: Classifier, tokens: TokenSet, channel: WireChannel, release: WireChannel,
    rng: np.random.Generator,
) -> FewShotRates:  # fmt: skip
    if bench.few_shot is None:
        return default_rates("this export was made to be measured")
    held = hold_out(tokens.labels, bench.few_shot, rng)
    if not len(held):
        reason = (
            f"fewer than {bench.few_shot.least_classes} public classes with more than {bench.few_shot.shots} images"
        )
        say(f"learning rates: defaults, {reason}")
        return default_rates(reason)
    kept = np.setdiff1d(np.unique(tokens.labels), held)
    head = untuned.head
    model = Classifier(copy.deepcopy(untuned.backend), linear_head(head.weight[kept], head.bias[kept]))
    inside = np.isin(tokens.labels, kept)
    rows = np.flatnonzero(inside)
    tune(
        model, tokens, rows, kept, _tuning_channel(bench, channel), bench.tuning, rng, bench.device,
        "Tuning without the held-out classes",
    )  # fmt: skip
    tasks = _turned_tokens(bench, np.flatnonzero(~inside), rng)
    return choose_rates(model.backend, tasks, release, 0, bench.few_shot, rng, bench.device)


def _turned_tokens(bench: Bench, rows: NDArray[np.int64], rng: np.random.Generator) -> TokenSet:
    """Tokens of held-out images (rows of the tuning part) in every turn, from a frontend noised as on some device.

    Class and turn together make a label.
    """
    indices = bench.parts.tuning[rows]
    labels = bench.public.labels[indices]
    most = bench.few_shot.shots + bench.few_shot.queries
    chosen = np.concatenate([rng.permutation(indices[labels == label])[:most] for label in np.unique(labels)])
    data = bench.file.data
    if _has_weight_noise(bench):
        data = _noised(bench, data, bench.file.records, rng)
    session = open_session(data, bench.threads)
    parts: list[list[NDArray[np.float16]]] = []
    with progress(total=len(chosen), description="Tokens of turned held-out images", unit="images") as bar:
        for batch in bench.public.batches(chosen, bench.limits.batch):
            parts.append([run_tokens(session, images).astype(np.float16) for images in turned(batch)])
            bar.update(len(batch))
    turns = [np.concatenate(turn) for turn in zip(*parts, strict=True)]  # each (n, T, d)
    numbers = [bench.public.labels[chosen] * len(turns) + turn for turn in range(len(turns))]
    return TokenSet((np.concatenate(turns),), np.concatenate(numbers))


def _state(backend: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in backend.state_dict().items()}
