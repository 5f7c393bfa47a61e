"""Make the torch model that is to be exported: timm by name, weights from a file, from timm's hub, or random.

How it is cut is left to exporter.split.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import timm
import timm.data
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from contract.errors import ExportError, UsageError, suggest, why
from contract.images import INTERPOLATIONS, MAX_PIXELS, ImageRule
from exporter.architecture import create
from exporter.models.vit import has_two_heads
from exporter.plan import ExportPlan

ModelArgs = Mapping[str, object]


def create_model(plan: ExportPlan) -> nn.Module:
    """The whole model in inference mode, float32, seeded where it stays random.

    Raises UsageError for a name timm does not know, ExportError when timm or the weights refuse.
    """
    torch.manual_seed(plan.seed)
    model = create_named(plan.model, plan.pretrained, dict(plan.model_args))
    if plan.weights is not None:
        load_weights(model, read_state(Path(plan.weights)), plan.weights)
    return model.float().eval()


def create_named(name: str, pretrained: bool, arguments: ModelArgs) -> nn.Module:
    """timm's model on torch's current device.

    Raises UsageError for a name timm does not know, ExportError when timm refuses.
    """
    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        raise UsageError(
            f"timm {timm.__version__} has no model {name!r}{suggest(architecture, timm.list_models())}",
            "choose a name from timm.list_models(); vit_*, deit_*, swin_*, resnet* and vgg* can be split",
        )
    try:
        return create(name, pretrained, arguments)
    except ExportError:
        raise
    except Exception as error:  # timm, torch and the hub client raise anything here
        raise ExportError(
            f"timm could not make {name} with {dict(arguments)}: {_first_line(error)}",
            "check --model-arg against timm.create_model; --pretrained needs access to timm's model hub",
        ) from error


def read_state(path: Path) -> dict[str, Tensor]:
    """State dict of a safetensors file or of a torch file, which is read without running anything in it, as float32.

    Raises ExportError when it is neither.
    """
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state.get("model", state)) if isinstance(state, dict) else state
    except FileNotFoundError as error:  # safetensors' own says so without an errno
        raise UsageError(f"there is no file of weights {path}", "check the path after --weights") from error
    except OSError as error:
        raise ExportError(
            f"the weights {path} cannot be read: {why(error, path)}", "check the path after --weights"
        ) from error
    except (safetensors.SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise _no_state(path, _first_line(error)) from error
    except Exception as error:  # the restricted unpickler has an error class of its own that is not exported here
        raise _no_state(path, _first_line(error)) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise _no_state(path, "it holds other things than named tensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def _no_state(path: Path, reason: str) -> ExportError:
    return ExportError(
        f"{path} should hold a state dict (safetensors, or torch.save of tensors alone): {reason}",
        "save the model with safetensors.torch.save_file(model.state_dict(), FILE)",
    )


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Fill every parameter of `model`. Raises ExportError that names the first tensor that does not fit."""
    own = model.state_dict()
    for name, value in own.items():
        if name not in state:
            raise _mismatch(source, f"the model needs {name} {tuple(value.shape)}, the file has no such tensor")
        if state[name].shape != value.shape:
            raise _mismatch(source, f"{name} should be {tuple(value.shape)}, found {tuple(state[name].shape)}")
    extra = sorted(set(state) - set(own))
    if extra:
        raise _mismatch(source, f"the file has {extra[0]}{suggest(extra[0], own)}, which the model does not")
    model.load_state_dict(dict(state))


def _mismatch(source: str, what: str) -> ExportError:
    return ExportError(
        f"the weights {source} do not fit the model: {what}",
        "give the model's own arguments with --model-arg (img_size, patch_size, num_classes, ...)",
    )


def image_rule(model: nn.Module, input_shape: tuple[int, int, int]) -> ImageRule:
    """How images become this model's input, from timm's data config.

    A model built for another size than its pre-trained one takes the whole picture (crop 1.0), unless
    `pretrained_cfg_overlay` says how it was trained.

    Raises ExportError for an interpolation or crop that devices do not have.
    """
    config = timm.data.resolve_model_data_config(model)
    trained_size = tuple(config["input_size"][1:])
    crop_fraction = float(config["crop_pct"]) if trained_size == input_shape[1:] else 1.0
    if config["interpolation"] not in INTERPOLATIONS or config["crop_mode"] not in ("center", "squash"):
        raise ExportError(
            f"devices cannot repeat timm's {config['interpolation']} scaling with {config['crop_mode']} crop",
            "override it: --model-arg \"pretrained_cfg_overlay={'interpolation': 'bicubic', 'crop_mode': 'center'}\"",
        )
    return ImageRule(
        height=input_shape[1], width=input_shape[2], interpolation=config["interpolation"],
        crop_fraction=crop_fraction, crop_mode=config["crop_mode"],
        mean=tuple(float(each) for each in config["mean"]), std=tuple(float(each) for each in config["std"]),
        alpha="white", max_pixels=MAX_PIXELS,
    )  # fmt: skip


def own_head(model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Weight (C, d) and bias (C,) of a head that is one linear layer over the backend's features, else None.

    A distilled model's two heads, whose mean is the answer, are one over the features of both tokens.
    """
    head = getattr(model, "head", None) or getattr(model, "fc", None)
    head = getattr(head, "fc", head)
    if not isinstance(head, nn.Linear):
        return None
    if has_two_heads(model):
        heads = (head, model.head_dist)
        weight = torch.cat([each.weight.detach() for each in heads], dim=1) / 2
        return weight, torch.stack([_bias_of(each) for each in heads]).mean(dim=0)
    return head.weight.detach().clone(), _bias_of(head)


def _bias_of(head: nn.Linear) -> Tensor:
    return torch.zeros(head.out_features) if head.bias is None else head.bias.detach().clone()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
