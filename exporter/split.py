"""Cut a model between two of its layers: frontend then backend equals the whole.

What a family's halves consist of is left to exporter.models; weights and files to exporter.checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from contract.errors import ExportError, UsageError
from contract.tokens import TokenLayout
from exporter.architecture import create
from exporter.models import Facts, family_of
from exporter.models._maps import MapBackend, MapFrontend


def default_cut(depth: int) -> int:
    """Two thirds of the layers on the device (SA 1.1, K = round(2/3 L))."""
    return max(1, min(depth - 1, round(depth * 2 / 3)))


def usual_cut(facts: Facts) -> int:
    """Where a model is cut when nobody says where: its family's place, else two thirds of the layers."""
    return facts.usual_cut or default_cut(facts.depth)


def check_cut(k: int, depth: int) -> None:
    """Raises UsageError unless both halves get at least one layer."""
    if not 1 <= k < depth:
        raise UsageError(
            f"--split {k} leaves one half empty: this model has {depth} layers, so the cut lies in 1..{depth - 1}",
            f"choose a layer from 1 to {depth - 1}; two thirds of the depth is {default_cut(depth)}",
        )


def split_model(model: nn.Module, k: int) -> tuple[nn.Module, nn.Module]:
    """Halves of a whole model, sharing its parameters; the model itself is not changed.

    Frontend: images (B, 3, h, w) -> tokens (B, T, d), or features (B, C, h', w') of a convolutional network, which is
    what parts that devices train are made of. Backend: from there to the pooled features (B, f) that the head receives.

    Raises UsageError for an impossible cut, ExportError for a model of no known family.
    """
    _, family = family_of(model)
    check_cut(k, family.facts(model).depth)
    frontend, backend = family.cut(model, k)
    return frontend, backend


def split_tokens(model: nn.Module, k: int) -> tuple[nn.Module, nn.Module, TokenLayout]:
    """Halves that meet in tokens (B, T, d) whatever the family, and what these are: what frozen frontends send.

    Features (B, C, h, w) of a convolutional network are a grid of tokens (B, h w, C) here.

    Raises UsageError for an impossible cut, ExportError for a model of no known family.
    """
    frontend, backend = split_model(model, k)
    layout = family_of(model)[1].layouts(model)[k - 1]
    if isinstance(frontend, MapFrontend) and isinstance(backend, MapBackend):
        frontend.as_tokens, backend.grid = True, layout.grid
    return frontend, backend, layout


def backend_state(model: nn.Module, k: int) -> dict[str, Tensor]:
    """The part of the whole model's state that the backend owns, under timm's names, detached on the CPU."""
    _, backend = split_model(model, k)
    return {name: value.detach().cpu().contiguous() for name, value in backend.state_dict().items()}


def build_backend(model_name: str, model_args: Mapping[str, object], k: int) -> nn.Module:
    """An empty backend for tokens to load a state dict into, built without ever allocating the frontend.

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
    _, backend, _ = split_tokens(model, k)
    backend = backend.to_empty(device="cpu").eval()
    filled = family_of(model)[1].fill_buffers(backend)
    missing = {name for name, _ in backend.named_buffers()} - set(backend.state_dict()) - filled
    if missing:
        raise ExportError(
            f"the backend of {model_name} keeps tensors outside its state dict: {', '.join(sorted(missing))}",
            "choose a model whose buffers are all persistent",
        )
    return backend
