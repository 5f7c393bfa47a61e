"""The torch half: wire codes -> filtered tokens -> features -> logits, the optimiser, and their state as plain tensors.

What is trained, on what and in which order is left to the strategies; checking the backend folder to `backend_folder`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
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
from contract.tokens import wire_steps
from contract.wiener import release_variance, wiener_matrices
from exporter.split import build_backend

from .backend_folder import BackendFolder


@dataclass(frozen=True)
class Front:
    """What stands between the wire and the backend, per token type (row 0 prefix, row 1 patches), all float32:
    wire steps (2,d), and the Wiener filter x_hat = z @ matrix.T + offset as matrices (2,d,d) and offsets (2,d)."""

    prefix: int
    patches: int
    steps: np.ndarray
    matrices: np.ndarray
    offsets: np.ndarray


def front_of(folder: BackendFolder, kappa: float) -> Front:
    """Wire steps and Wiener filter for noise of strength kappa (noise.md, W-tok), from public statistics alone.

    Raises:
        PackageError: the statistics do not fit the cut.
    """
    layout, statistics = folder.cut.tokens, folder.cut.statistics
    steps = wire_steps(statistics, kappa)  # (2,d)
    try:
        public = safetensors.numpy.load_file(folder.root / "statistics.safetensors")
        filters = []
        for row, sigma in enumerate((statistics.sigma_prefix, statistics.sigma_patch)):
            kind = "prefix" if row == 0 and layout.prefix else "patch"  # without prefix tokens row 0 is never used
            noise = release_variance(sigma, kappa, steps[row])
            filters.append(wiener_matrices(public[f"mean_{kind}"], public[f"covariance_{kind}"], noise))
    except (SafetensorError, KeyError, ValueError) as error:
        raise _unfit(folder.root / "statistics.safetensors", error) from error
    matrices, offsets = (np.stack(parts) for parts in zip(*filters, strict=True))
    return Front(layout.prefix, layout.patches, steps, matrices, offsets)


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


class Backend:
    """One backend behind its fixed front."""

    def __init__(self, module: nn.Module, front: Front, device: torch.device) -> None:
        # Inference mode throughout: no dropout, no drop path, and normalisation on stored statistics, so that a batch
        # of one trains like any other (SE-03).
        self.module = module.to(device).eval()
        self.front = front
        self.device = device
        self._steps = torch.from_numpy(front.steps).to(device)
        self._matrices = torch.from_numpy(front.matrices).to(device)
        self._offsets = torch.from_numpy(front.offsets).to(device)

    def copy(self) -> Backend:
        """A backend with weights of its own."""
        return Backend(copy.deepcopy(self.module), self.front, self.device)

    @torch.no_grad()
    def tokens(self, codes: np.ndarray) -> torch.Tensor:
        """Wire codes (B,T,d) i8 -> filtered tokens (B,T,d) f32 on the device's dtype and place."""
        z = self.place(codes).to(torch.float32)  # (B,T,d)
        parts = []
        for row, part in enumerate((z[:, : self.front.prefix], z[:, self.front.prefix :])):
            parts.append(functional.linear(part * self._steps[row], self._matrices[row], self._offsets[row]))
        return torch.cat(parts, dim=1)

    def place(self, array: np.ndarray) -> torch.Tensor:
        """An array on the device; from pinned memory, so that the next batch is made while a GPU works on this one."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

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
