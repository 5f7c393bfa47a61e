"""Cut a model between two of its layers: frontend then backend equals the whole.

What a family's halves consist of is left to exporter.models; weights and files to exporter.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from contract.errors import ExportError, UsageError
from exporter.architecture import create
from exporter.models import family_of


def default_cut(depth: int) -> int:
    """Two thirds of the layers on the device (SA 1.1, K = round(2/3 L))."""
    return max(1, min(depth - 1, round(depth * 2 / 3)))


def check_cut(k: int, depth: int) -> None:
    """Raises UsageError unless both halves get at least one layer."""
    if not 1 <= k < depth:
        raise UsageError(
            f"--split {k} leaves one half empty: this model has {depth} layers, so the cut lies in 1..{depth - 1}",
            f"choose a layer from 1 to {depth - 1}; two thirds of the depth is {default_cut(depth)}",
        )


def split_model(model: nn.Module, k: int) -> tuple[nn.Module, nn.Module]:
    """Halves of a whole model, sharing its parameters; the model itself is not changed.

    Frontend: images (B, 3, h, w) -> tokens (B, T, d), or features (B, C, h', w') of a convolutional network. Backend:
    from there to the pooled features (B, f) that the head receives.

    Raises UsageError for an impossible cut, ExportError for a model of no known family.
    """
    _, family = family_of(model)
    check_cut(k, family.facts(model).depth)
    frontend, backend = family.cut(model, k)
    return frontend, backend


def backend_state(model: nn.Module, k: int) -> dict[str, Tensor]:
    """The part of the whole model's state that the backend owns, under timm's names, detached on the CPU."""
    _, backend = split_model(model, k)
    return {name: value.detach().cpu().contiguous() for name, value in backend.state_dict().items()}


def build_backend(model_name: str, model_args: Mapping[str, object], k: int) -> nn.Module:
    """An empty backend to load a state dict into, built without ever allocating the frontend.

    Its parameters hold no meaningful values until `load_state_dict(state)` has filled every one of them.

    Raises ExportError when the model cannot be created or has tensors that no state dict carries.
    """
    try:
        with torch.device("meta"):
            model = create(model_name, False, model_args)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ExportError(
            f"timm could not build {model_name} with {dict(model_args)}: {error}",
            "use the timm version that made this package, or export it again",
        ) from error
    _, backend = split_model(model, k)
    missing = {name for name, _ in backend.named_buffers()} - set(backend.state_dict())
    if missing:
        raise ExportError(
            f"the backend of {model_name} keeps tensors outside its state dict: {', '.join(sorted(missing))}",
            "choose a model whose buffers are all persistent",
        )
    return backend.to_empty(device="cpu").eval()
