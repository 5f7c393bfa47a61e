"""The torch half: wire codes -> filtered tokens -> features -> logits, the optimiser, and their state as plain tensors.

What is trained, on what and in which order is left to the strategies; checking the backend folder to `backend_folder`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional

from contract.errors import PackageError
from contract.tokens import kept_patches, wire_steps
from contract.wiener import SpatialFilter, SpatialStatistics, release_variance, spatial_filter, wiener_matrices
from exporter.split import build_backend

from .backend_folder import BackendFolder

SMALLEST_SPREAD = 1e-6  # of a feature over images: below it there is nothing but rounding
RESIDENT_SHARE = 0.25  # of a GPU's free memory that a site's codes may take


@dataclass(frozen=True)
class Front:
    """What stands between the wire and the backend, per token type (row 0 prefix, row 1 patches), all float32:
    wire steps (2,d), and the Wiener filter x_hat = z @ matrix.T + offset as matrices (2,d,d) and offsets (2,d).

    `patches` counts those that are sent. Where `spatial` is there, it filters them instead of row 1, and fills in the
    others."""

    prefix: int
    patches: int
    steps: np.ndarray
    matrices: np.ndarray
    offsets: np.ndarray
    spatial: SpatialFilter | None = None


def front_of(folder: BackendFolder, kappa: float) -> Front:
    """Wire steps and Wiener filter for noise of strength kappa (noise.md, W), from public statistics alone.

    Raises:
        PackageError: the statistics do not fit the cut.
    """
    layout, statistics, sent = folder.cut.tokens, folder.cut.statistics, folder.cut.sent
    steps = wire_steps(statistics, kappa, sent.prefix_share)  # (2,d)
    try:
        public = safetensors.numpy.load_file(folder.root / "statistics.safetensors")
        filters, variances = [], []
        for row, sigma in enumerate((statistics.sigma_prefix, statistics.sigma_patch)):
            kind = "prefix" if row == 0 and layout.prefix else "patch"  # without prefix tokens row 0 is never used
            variances.append(release_variance(sigma, kappa * (sent.prefix_share if row == 0 else 1.0), steps[row]))
            filters.append(wiener_matrices(public[f"mean_{kind}"], public[f"covariance_{kind}"], variances[row]))
        spatial = None
        if "positions" in public:
            known = SpatialStatistics(*(public[name] for name in ("mean_positions", "basis", "values", "positions")))
            kept = kept_patches(layout.grid, sent.kept)
            spatial = spatial_filter(known, statistics.sigma_patch, variances[1], kept)
        elif sent.kept != "all":
            raise KeyError("positions")
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise _unfit(folder.root / "statistics.safetensors", error) from error
    matrices, offsets = (np.stack(parts) for parts in zip(*filters, strict=True))
    return Front(layout.prefix, folder.layout.patches, steps, matrices, offsets, spatial)


def load(folder: BackendFolder, kappa: float, device: torch.device) -> Backend:
    """The shipped backend behind its front.

    Raises:
        PackageError: weights or statistics do not fit the model and cut.
        ExportError: timm cannot build the model.
    """
    module = build_backend(folder.model, folder.model_args, folder.cut.index)
    path = folder.root / "backend.safetensors"
    try:
        module.load_state_dict(safetensors.torch.load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise _unfit(path, error) from error
    module.requires_grad_(True)
    return Backend(module, front_of(folder, kappa), device)


def _unfit(path: Path, error: Exception) -> PackageError:
    lines = str(error).splitlines() or [repr(error)]
    return PackageError(
        f"{path} does not fit the model and cut of its export.json: {' '.join(lines)[:300]}",
        "export again, with the versions of torch and timm that are installed here",
    )


def choose_device(threads: int) -> torch.device:
    """Fix what could change a result: threads and, on the CPU, deterministic kernels. A GPU is used where one is."""
    torch.set_num_threads(threads)
    on_gpu = torch.cuda.is_available()
    # On a GPU attention's fast backward kernels have no deterministic twin: bit equality is promised on the CPU only,
    # and TF32, three times as fast there, costs nothing more.
    torch.use_deterministic_algorithms(not on_gpu)
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    # Filling new buffers first costs 3 % of a step; every one is written here before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cuda" if on_gpu else "cpu")


class CodeTable:
    """The wire codes of all tokens of a site's uploads, lying where its batches are gathered: on the device where they
    take at most `budget_bytes`, else where they are in host memory. The batches are the same either way."""

    def __init__(self, uploads: Sequence[np.ndarray], device: torch.device, budget_bytes: int) -> None:
        """Codes (n,T,d) i8 of each upload."""
        self._device = device
        self._parts = [torch.from_numpy(codes).flatten(0, 1) for codes in uploads]  # (n T,d) each
        if sum(part.nbytes for part in self._parts) <= budget_bytes:
            sizes = [len(part) for part in self._parts]
            whole = torch.empty((sum(sizes), self._parts[0].shape[1]), dtype=torch.int8, device=device)
            for target, part in zip(whole.split(sizes), self._parts, strict=True):
                target.copy_(part)
            self._parts = [whole]

    def take(self, where: np.ndarray) -> torch.Tensor:
        """Codes (R,T,d) i8 on the device of the tokens at places (R,T) i64, counted through all uploads."""
        index = place(torch.from_numpy(where).flatten(), self._parts[0].device)  # (R T,)
        if len(self._parts) == 1:
            codes = self._parts[0].index_select(0, index)
        else:
            codes = torch.empty((len(index), self._parts[0].shape[1]), dtype=torch.int8)
            first = 0
            for part in self._parts:
                mine = ((index >= first) & (index < first + len(part))).nonzero().squeeze(1)
                codes.index_copy_(0, mine, part.index_select(0, index[mine] - first))
                first += len(part)
        return place(codes.unflatten(0, where.shape), self._device)


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device; from pinned memory, so that the next batch is made while a GPU works on this one."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Backend:
    """One backend behind its fixed front."""

    def __init__(self, module: nn.Module, front: Front, device: torch.device) -> None:
        # Inference mode throughout: no dropout, no drop path, and normalisation on stored statistics, so that a batch
        # of one trains like any other (SE-03).
        self.module = module.to(device).eval()
        self.front = front
        self.device = device
        laws = (front.steps, front.matrices, front.offsets)
        # (step, matrix, offset) of prefix and patch tokens
        self._filters = [*zip(*(torch.from_numpy(law).to(device).unbind() for law in laws), strict=True)]
        spatial = front.spatial
        self._spatial = None if spatial is None else spatial.converted(lambda law: torch.from_numpy(law).to(device))

    def copy(self) -> Backend:
        """A backend with weights of its own."""
        return Backend(copy.deepcopy(self.module), self.front, self.device)

    def table(self, uploads: Sequence[np.ndarray]) -> CodeTable:
        """The codes (n,T,d) i8 of a site's uploads, ready for many batches."""
        free_bytes = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        return CodeTable(uploads, self.device, int(RESIDENT_SHARE * free_bytes))

    @torch.no_grad()
    def tokens(self, codes: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Wire codes (B,S,d) i8 of the tokens that are sent -> filtered tokens (B,T,d) f32 on the device."""
        z = place(codes if isinstance(codes, torch.Tensor) else torch.from_numpy(codes), self.device).float()
        parts = z[:, : self.front.prefix], z[:, self.front.prefix :]
        filtered = [
            functional.linear(part * step, matrix, offset)
            for part, (step, matrix, offset) in zip(parts, self._filters, strict=True)
        ]
        if self._spatial is not None:
            filtered[1] = self._spatial.restore(parts[1] * self._filters[1][0])
        return torch.cat(filtered, dim=1)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Filtered tokens (B,T,d) -> features (B,f)."""
        features: torch.Tensor = self.module(tokens)
        return features

    @torch.no_grad()
    def features_of(self, codes: np.ndarray, batch: int = 32) -> torch.Tensor:
        """Wire codes (n,T,d) i8 -> features (n,f), in pieces, without a graph."""
        pieces = [self.features(self.tokens(codes[first : first + batch])) for first in range(0, len(codes), batch)]
        return torch.cat(pieces)

    @property
    def width(self) -> int:
        """f, the features of one image."""
        empty = np.zeros((1, self.front.prefix + self.front.patches, self.front.steps.shape[1]), np.int8)
        return int(self.features_of(empty).shape[1])


def new_head(width: int, classes: int, seed: int, site: str, device: torch.device) -> nn.Linear:
    """A random linear head (f -> C), the same for the same seed and site."""
    key = hashlib.sha256(b"cutlayer-head-v1\0%d\0" % seed + site.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    head = nn.Linear(width, classes)
    bound = width**-0.5
    with torch.no_grad():
        head.weight.copy_(torch.empty(classes, width).uniform_(-bound, bound, generator=generator))
        head.bias.zero_()
    return head.to(device)


def zero_head(width: int, classes: int, device: torch.device) -> nn.Linear:
    """A linear head (f -> C) that knows nothing and says so: a random one bends the backend with noise before it has
    learnt anything itself (docs/results.md)."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(device)


def standard_of(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and spread (f,) of features (n,f); the spread is 1 where all images have the same value."""
    spread = features.std(dim=0, correction=0)
    return features.mean(dim=0), torch.where(spread > SMALLEST_SPREAD, spread, 1.0)


def adam(groups: Iterable[tuple[Iterable[nn.Parameter], float]]) -> torch.optim.Adam:
    """Adam with one learning rate per group; the fused kernel, because small models spend their time in Python."""
    listed = [{"params": [p for p in parameters if p.requires_grad], "lr": rate} for parameters, rate in groups]
    return torch.optim.Adam([group for group in listed if group["params"]], fused=True)


# -- state as plain tensors: nothing is pickled


def module_state(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers as `NAME.<key>`, copied off the device."""
    return {f"{name}.{key}": value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()}


def load_module(name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `module_state`; every weight must be there."""
    start = name + "."
    module.load_state_dict({key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)})


def optimiser_state(optimiser: torch.optim.Adam) -> dict[str, torch.Tensor]:
    """Adam's moments and step counts as `adam.<parameter>.<key>`, copied off the device."""
    state = optimiser.state_dict()["state"]
    return {
        f"adam.{index}.{key}": value.detach().to("cpu", copy=True)
        for index, entry in state.items()
        for key, value in entry.items()
    }


def load_optimiser(optimiser: torch.optim.Adam, tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `optimiser_state`, for an optimiser made over the same parameters in the same order."""
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("adam."):
            _, index, key = name.split(".", 2)
            entries.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": entries, "param_groups": optimiser.state_dict()["param_groups"]})
