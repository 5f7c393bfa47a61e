"""A package under attack: its splits, and the tokens that devices and attackers get out of it.

The shipped ONNX runs as it is, noise on the weights included; drawing noise on tokens is `attacks._release`'s part for
an attacker, and here, by the contract's keyed law, for the device that is attacked. A part that sees some patches in
training is attacked as it predicts, with all of them. What is attacked with what is left to `profiler`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from contract import manifest as manifests
from contract import training as trainings
from contract.errors import EngineError, PackageError, UsageError, why
from contract.images import ImageRule, normalise
from contract.keyed_noise import derive_key, laplace, noise_key
from contract.leakage import subject_digest
from contract.manifest import Cut, Manifest
from contract.onnx_weights import noised_onnx
from contract.tokens import SentRule, TokenLayout, add_noise, dequantize, keep_tokens, quantize
from contract.training import PARAMETERS_NAME, TRAINING_NAME, TrainingCut
from exporter.models import family_of
from exporter.split import create

from ..attacks import Upload
from ..attacks._release import Law
from ..backend_folder import BackendFolder, TrainingFolder

AT_ONCE = 32  # images through the engine
_CURE = "give the folder that export-frontend wrote, as it wrote it"


@dataclass(frozen=True)
class Split:
    """One frontend or part: where it ends, and how its tokens leave. `unit` is what a strength of noise counts in."""

    index: int
    depth: int
    unit: Literal["kappa", "sigma"]
    law: Law
    cut: Cut | TrainingCut


@dataclass(frozen=True)
class Package:
    """A package whose files are those that its manifest lists."""

    root: Path
    manifest: Manifest
    digest: bytes  # of what it sends: a table is of that, whatever is added to the package later
    splits: tuple[Split, ...]

    @property
    def image(self) -> ImageRule:
        """How its pictures are made."""
        return self.manifest.image

    @property
    def alpha(self) -> float:
        """Strength of the noise on its weights; parts that devices train have none."""
        rules = self.manifest.transforms
        return rules.alpha if rules.weight_noise and self.manifest.cuts else 0.0


def read_package(root: Path) -> Package:
    """Open a package and compare its files with the manifest; who signed it matters to devices only.

    Raises: PackageError for one that is damaged; UsageError for none, or for splits that cannot be attacked.
    """
    if not (root / manifests.MANIFEST_NAME).is_file():
        raise UsageError(f"{root} is no package: it has no {manifests.MANIFEST_NAME}", _CURE)
    data = _read(root / manifests.MANIFEST_NAME)
    manifest = manifests.from_bytes(data)
    for record in manifest.files:
        path = root / record.name
        if not path.is_file():
            raise PackageError(f"{root} lacks {record.name}, which its manifest lists", _CURE)
        if hashlib.sha256(_read(path)).hexdigest() != record.sha256:
            raise PackageError(f"{path} is not the file that the manifest lists", _CURE)
    size = (manifest.image.height, manifest.image.width)
    splits = [Split(cut.index, cut.depth, "kappa", _law(cut.tokens, size, cut), cut) for cut in manifest.cuts]
    if any(record.name == TRAINING_NAME for record in manifest.files):
        plan = trainings.from_bytes(_read(root / TRAINING_NAME), manifest)
        parts = [cut for cut in plan.cuts if cut.loss == "none"]
        splits += [Split(cut.index, cut.depth, "sigma", _law(_layout(cut, size), size, None), cut) for cut in parts]
    if not splits:
        raise UsageError(
            f"{root} sends no features: devices train its whole model",
            "give a package of a frontend or of parts; what updates leak is measured by the attacks on updates",
        )
    return Package(root, manifest, subject_digest(manifest), tuple(splits))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error.strerror}", _CURE) from error


def _law(layout: TokenLayout, size: tuple[int, int], cut: Cut | None) -> Law:
    try:
        return Law(layout, size, None, SentRule()) if cut is None else Law(layout, size, cut.statistics, cut.sent)
    except ValueError as error:
        raise UsageError(
            f"this package cannot be attacked: {error}", "export it for a size of picture that its tokens divide"
        ) from error


def _layout(cut: TrainingCut, size: tuple[int, int]) -> TokenLayout:
    """What the values at a cut are: a map (C, h, w), or tokens (T, d), the last of them a grid like the picture."""
    shape = cut.evaluated_shape
    if len(shape) == 3:
        return TokenLayout(0, (shape[1], shape[2]), shape[0])
    tokens, dim = shape
    patches = tokens if cut.patches is None else cut.patches
    rows = math.isqrt(patches * size[0] // size[1])
    columns = rows * size[1] // size[0]
    return TokenLayout(tokens - rows * columns, (rows, columns), dim)


class Runner:
    """Tokens of one split, float16 as devices have them."""

    def __init__(self, package: Package, split: Split, alpha: float, key: bytes) -> None:
        """`key` draws the weight noise, `alpha` 0 is the frontend as shipped. Raises: EngineError."""
        self._package, self._split = package, split
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.x64quantprecision", "1")  # exact on every processor
        self._feed: dict[str, np.ndarray] = {}
        if isinstance(split.cut, Cut):
            shipped = _read(package.root / split.cut.onnx)
            data, _, _ = noised_onnx(shipped, split.cut.weights, alpha, lambda layer: derive_key(key, layer))
            graph, self._input = bytes(data), split.cut.input_name
        else:
            graph, self._input = _read(package.root / split.cut.evaluate), "x"
            try:
                tensors = safetensors.numpy.load_file(package.root / PARAMETERS_NAME)
                self._feed = {name: tensors[name] for name in split.cut.tensors}
            except (SafetensorError, KeyError) as error:
                path = package.root / PARAMETERS_NAME
                raise PackageError(f"{path} does not fit its parts: {error}", _CURE) from error
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's classes share no base but Exception
            raise _engine_error("cannot run the package", error) from error
        patches = self._session.get_modelmeta().custom_metadata_map.get("patches")  # of a frontend that takes a choice
        self._keep = None if patches is None else np.arange(int(patches), dtype=np.int64)
        wanted = {each.name for each in self._session.get_inputs()}
        self._feed = {name: value for name, value in self._feed.items() if name in wanted}

    def tokens(self, pictures: np.ndarray, on_images: Callable[[int], object]) -> np.ndarray:
        """(n, T, d) of pictures (n, h, w, 3) uint8. Raises: EngineError."""
        parts = []
        for start in range(0, len(pictures), AT_ONCE):
            images = normalise(pictures[start : start + AT_ONCE], self._package.image)
            chosen = {} if self._keep is None else {"keep": np.tile(self._keep, (len(images), 1))}
            try:
                found = self._session.run(None, {self._input: images, **self._feed, **chosen})[0]
            except Exception as error:  # see above
                raise _engine_error("failed", error) from error
            if found.ndim == 4:
                found = found.reshape(*found.shape[:2], -1).transpose(0, 2, 1)
            parts.append(found.astype(np.float16))
            on_images(len(images))
        return np.concatenate(parts)


def _engine_error(what: str, error: Exception) -> EngineError:
    return EngineError(f"onnxruntime {what}: {str(error).splitlines()[0][:300]}", _CURE)


def release(
    package: Package, split: Split, law: Law, strength: float, alpha: float, tokens: np.ndarray,
    digests: Sequence[bytes], secret: bytes,
) -> Upload:  # fmt: skip
    """What a server decodes of a device's upload: noise keyed as devices key it, each image its own draw."""
    prefix, sent = split.law.layout.prefix, keep_tokens(tokens.astype(np.float32), law.layout, law.sent.kept)
    scales, steps = law.rows(strength)
    kind = f"laplace alpha={alpha!r}"
    noisy = np.empty_like(sent)
    for row, digest in enumerate(digests):
        key = noise_key(secret, digest, package.digest, split.index, kind, strength)
        noisy[row] = add_noise(sent[row], laplace(key, sent[row].shape), scales, prefix) if strength else sent[row]
    if steps is not None:
        codes, _ = quantize(noisy, steps, prefix)
        noisy = dequantize(codes, steps, prefix)
    return Upload(torch.from_numpy(noisy), strength)


class Client(nn.Module):
    """A split's float module as the server has it: images in [0, 1] -> tokens (n, T, d)."""

    mean: Tensor
    std: Tensor

    def __init__(self, part: nn.Module, rule: ImageRule) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("mean", torch.tensor(rule.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(rule.std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        out: Any = self.part((images - self.mean) / self.std)
        return out if out.ndim == 3 else out.flatten(2).transpose(1, 2)


def client_of(package: Package, split: Split, folder: BackendFolder | TrainingFolder) -> nn.Module:
    """The client's part with the weights that the server handed out, from the folder beside the package.

    Raises: PackageError when the folder belongs to another package or lacks the weights.
    """
    if subject_digest(folder.manifest) != package.digest:
        raise PackageError(
            f"{folder.root} belongs to another package than {package.root}", "give the .backend folder of this package"
        )
    model = create(folder.model, False, {**folder.model_args, "num_classes": 0})
    part, _ = family_of(model)[1].cut(model, split.index)
    path = folder.root / ("frontend.safetensors" if isinstance(folder, BackendFolder) else "model.safetensors")
    try:
        state = safetensors.torch.load_file(path)
        whole = part if isinstance(folder, BackendFolder) else model
        whole.load_state_dict({name: value.float() for name, value in state.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise PackageError(f"{path} does not fit the model: {why(error, path)[:300]}", _CURE) from error
    return Client(part, package.image).eval().requires_grad_(False)
