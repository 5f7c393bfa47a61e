"""One ask in, its answer out, message by message: features for training or prediction, gradients, steps of the head.

It opens no socket and keeps no queue: `delivery` takes what it yields into the spool, and may stop it at any image.
What may be asked of it is decided by `terms`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from contract.console import Progress
from contract.manifest import Cut
from contract.messages import Ask, Features, Message
from contract.tokens import TokenLayout, check_source_count, kept_patches, sent_layout
from edge_runtime.data import Dataset, Sample
from edge_runtime.label_keeper import LabelKeeper
from edge_runtime.local_answers import Learner
from edge_runtime.pipeline import Frontend, extract, read_features, release_batches, samples_per_batch
from edge_runtime.release_ledger import Release, ReleaseLedger
from edge_runtime.released_patches import to_text
from edge_runtime.stages import Stages
from edge_runtime.terms import Terms
from edge_runtime.transforms.laplace import FeatureNoise, NoiseKeying, noise_kind
from edge_runtime.transforms.patch_retrieval import retrieve

FEATURES_NAME = "clean.f16"


@dataclass(frozen=True)
class Bench:
    """What the worker works on and with."""

    frontend: Frontend
    cut: Cut
    dataset: Dataset
    terms: Terms
    secret: bytes
    package_digest: bytes
    wire_labels: NDArray[np.int64]  # (C,): entry c is what class c is called on the wire
    max_releases: int
    features: Path  # folder of the clean features
    retrieves_patches: bool = True  # as the manifest says; never where no patch is sent
    max_patch_share: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """Who is told of progress, and who may interrupt."""

    open_progress: Callable[[int, str, str], Progress[None]]  # total, description, unit
    check_stop: Callable[[], None]  # raises to interrupt


@dataclass(frozen=True)
class Upload:
    """One upload of the samples' features: what it answers, how it is drawn and cut, where a resumed one goes on."""

    ask: str
    split: Literal["train", "infer"]
    kappa: float
    frame_bytes: int
    first_batch: int = 0
    fresh: str | None = None  # names a draw of its own (noise = "fresh"); None: the keyed draw, always the same
    run: str = ""  # whose trained part predicts


@dataclass
class Counters:
    """What was done so far. Payload is features and sources; ids, labels and framing count as bytes on the wire."""

    steps: int = 0
    images: int = 0
    payload_bytes: int = 0
    codes: int = 0
    saturated: int = 0
    sigma: float = 0.0  # of the noise at the cut of a part, when something left last


class Worker:
    """Answers one ask at a time."""

    def __init__(
        self,
        bench: Bench,
        ledger: ReleaseLedger,
        keeper: LabelKeeper,
        stages: Stages,
        around: Surroundings,
        learner: Learner | None = None,
    ) -> None:
        """`learner` sees the tokens of the bench's frontend, and learns when it has seen all."""
        self.counters = Counters()
        self._bench, self._ledger, self._keeper, self._stages, self._around = bench, ledger, keeper, stages, around
        self._learner = learner

    @property
    def _sent(self) -> TokenLayout:
        return sent_layout(self._bench.cut.tokens, self._bench.cut.sent.kept)

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples in upload order."""
        return self._bench.dataset.samples

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        """The messages that answer an ask which `terms.check_ask` let pass; `upload` is for a collect_features.

        Raises: RemoteProtocolError for samples this device never sent; DataError, EngineError, DeviceError.
        """
        if ask.kind == "collect_features":
            yield from self.collect(upload)
            return
        with self._stages.measure("train"):
            reply = self._keeper.score(ask) if ask.kind == "score_batch" else self._keeper.step_head(ask, run)
        yield reply

    @property
    def _retrieves(self) -> bool:
        return self._bench.retrieves_patches and self._bench.cut.sent.kept != "none"

    def batch_size(self, upload: Upload) -> int:
        """Samples per message."""
        with_sources = upload.split == "train" and self._retrieves
        return samples_per_batch(self._sent, with_sources, upload.frame_bytes)

    def fingerprint(self, upload: Upload) -> str:
        """What an upload consists of: two with the same fingerprint have the same batches, bit for bit."""
        ids = (sample.sample_id.hex() for sample in self.samples)
        text = "\n".join([self._release(upload).text(), upload.split, str(self.batch_size(upload)), *ids])
        return hashlib.sha256(text.encode()).hexdigest()

    def collect(self, upload: Upload) -> Iterator[Features]:
        """Training features: clean ones to a file, each patch's source where patches are retrieved, then noisy batches.

        Where `first_batch` says that all is in the spool already, nothing is computed.
        """
        total, layout = len(self.samples), self._bench.cut.tokens
        if upload.first_batch * self.batch_size(upload) >= total:
            return
        if self._retrieves:
            check_source_count(total)  # before hours of extraction, not after
        self._check_releases(upload)
        path = self._bench.features / FEATURES_NAME
        try:
            with self._stages.measure("extract"), self._around.open_progress(total, "features", "images") as bar:
                extract(self._bench.frontend, self.samples, path, self._ticking(bar))
            if self._learner is not None:
                with self._stages.measure("learn"):
                    self._learner.learn()
            sources = self._retrieve(path, total, layout) if self._retrieves else None

            def tokens_of(start: int, count: int) -> NDArray[np.float16]:
                tokens = read_features(path, layout, start, count)
                if start + count == total:  # gone before the last batch is: with it the server may let this device go
                    path.unlink()
                return tokens

            self._stages.begin("upload")  # ended by the caller, when the server has it all
            yield from self._batches(upload, tokens_of, sources)
        finally:
            path.unlink(missing_ok=True)  # clean features show the images: they stay no longer than they are needed

    def _retrieve(self, path: Path, total: int, layout: TokenLayout) -> NDArray[np.uint16]:
        with (
            self._stages.measure("retrieve"),
            self._around.open_progress(self._sent.patches, "retrieval", "positions") as bar,
        ):
            return retrieve(path, total, layout, self._ticking(bar), self._bench.cut.sent.kept)

    def look_at(self, samples: Sequence[Sample]) -> None:
        """Let the frontend run for what sees its tokens; nothing is released."""
        step = self._bench.frontend.engine.threads
        if not samples:
            return
        with (
            self._stages.measure("extract"),
            self._around.open_progress(len(samples), "features", "images") as bar,
        ):
            tick = self._ticking(bar)
            for start in range(0, len(samples), step):
                tick(len(self._bench.frontend.tokens(samples[start : start + step])))

    def infer(self, upload: Upload) -> Iterator[Features]:
        """Features for prediction, straight from the engine: the same release as in training, bit for bit."""
        self._check_releases(upload)
        self._stages.begin("predict")  # ended by the caller, when it has all scores
        with self._around.open_progress(len(self.samples), "features", "images") as bar:
            tick = self._ticking(bar)

            def tokens_of(start: int, count: int) -> NDArray[np.float16]:
                return self._bench.frontend.tokens_in_steps(self.samples[start : start + count], tick)

            yield from self._batches(upload, tokens_of, None)

    def _batches(
        self, upload: Upload, tokens_of: Callable[[int, int], NDArray[np.float16]], sources: NDArray[np.uint16] | None
    ) -> Iterator[Features]:
        bench, release = self._bench, self._release(upload)
        keying = NoiseKeying(bench.secret, bench.package_digest, release.cut, release.kind, release.scale)
        noise = FeatureNoise(bench.cut, keying)
        for batch in release_batches(tokens_of, self.samples, noise, self.batch_size(upload), upload.first_batch):
            self._around.check_stop()
            chosen = slice(batch.start, batch.start + len(batch.codes))
            ids = [sample.sample_id for sample in self.samples[chosen]]
            message = Features(
                ask=upload.ask,
                batch=batch.number,
                total=len(self.samples),
                split=upload.split,
                sample_ids=np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16),
                codes=batch.codes,
                sources=None if sources is None else sources[chosen],
                labels=self._labels_on_wire(upload, chosen),
            )
            self._ledger.record(ids, release)
            self._count(message, batch.saturated)
            yield message

    def _labels_on_wire(self, upload: Upload, chosen: slice) -> NDArray[np.uint16] | None:
        """Permuted class numbers, in permuted-label mode for training, and in no other case."""
        if upload.split == "infer" or self._bench.terms.label_mode != "permuted-label":
            return None
        labels = [sample.label for sample in self.samples[chosen] if sample.label is not None]
        return self._bench.wire_labels[labels].astype(np.uint16)

    def _release(self, upload: Upload) -> Release:
        bench = self._bench
        layout, kind = bench.cut.tokens, noise_kind(bench.terms.alpha, upload.fresh)
        patches = to_text(layout.grid, kept_patches(layout.grid, bench.cut.sent.kept))
        return Release(bench.package_digest.hex(), bench.cut.index, kind, upload.kappa, patches)

    def _check_releases(self, upload: Upload) -> None:
        ids = [sample.sample_id for sample in self.samples]
        self._ledger.check(ids, self._release(upload), self._bench.max_releases, self._bench.max_patch_share)

    def _count(self, message: Features, saturated: int) -> None:
        sources_bytes = 0 if message.sources is None else message.sources.nbytes
        self.counters.steps += 1
        self.counters.images += len(message.codes)
        self.counters.payload_bytes += message.codes.nbytes + sources_bytes
        self.counters.codes += message.codes.size
        self.counters.saturated += saturated

    def _ticking(self, bar: Progress[None]) -> Callable[[int], None]:
        def tick(step: int) -> None:
            self.counters.steps += step
            bar.update(step)
            self._stages.sample()
            self._around.check_stop()

        return tick
