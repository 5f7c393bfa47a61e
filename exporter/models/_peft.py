"""Few new parameters in a frozen VisionTransformer: prompt tokens (VPT, shallow) and low-rank changes of queries and
values (LoRA); and which parameters a way of tuning trains.

The baselines of algorithms.md section 7: Fed-Head, Fed-Bias, Fed-Prompt, Fed-LoRA. A fresh model computes what it did
before with LoRA; prompts change it from the start. Weights and shapes of the model itself stay as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from contract.errors import ExportError

PROMPTS, RANK = 10, 8
SCALE = 2.0  # alpha / rank, with alpha = 16


class LoraLinear(nn.Linear):
    """A fused qkv (d -> 3 d) whose queries and values move by B A x of rank 8; B starts at 0."""

    def add_ranks(self) -> None:
        width = self.in_features
        for part in ("q", "v"):
            down = nn.Parameter(torch.empty(RANK, width))
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            self.register_parameter(f"lora_{part}_down", down)
            self.register_parameter(f"lora_{part}_up", nn.Parameter(torch.zeros(width, RANK)))

    def forward(self, x: Tensor) -> Tensor:
        base = super().forward(x)
        moved = [
            nn.functional.linear(nn.functional.linear(x, getattr(self, f"lora_{part}_down")),
                                 getattr(self, f"lora_{part}_up")) * SCALE
            for part in ("q", "v")
        ]  # fmt: skip
        queries, keys, values = base.split(self.in_features, dim=-1)
        return torch.cat([queries + moved[0], keys, values + moved[1]], dim=-1)


class Prompts(nn.Module):
    """Learnt tokens behind all others, which have no position: (B, T, d) -> (B, T + 10, d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.empty(1, PROMPTS, dim))
        nn.init.uniform_(self.prompts, -math.sqrt(3 / dim), math.sqrt(3 / dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, self.prompts.expand(tokens.shape[0], -1, -1)], dim=1)


def add_peft(model: nn.Module, peft: str) -> None:
    """Give the model what this way of tuning trains, in place; nothing for `all`, `head` and `bias`.

    Raises ExportError when the model has no place for it.
    """
    if peft not in ("prompt", "lora"):
        return
    blocks = getattr(model, "blocks", None)
    fits = blocks is not None and hasattr(model, "pos_embed") and getattr(model, "global_pool", "") == "token"
    if not fits:
        raise ExportError(
            f"{type(model).__name__} has no tokens to tune with {peft}", "choose a vit_* model, or another --peft"
        )
    if peft == "prompt":
        if not isinstance(model.norm_pre, nn.Identity):
            raise ExportError(f"{type(model).__name__} has a norm where prompts would go", "choose another --peft")
        model.norm_pre = Prompts(model.embed_dim)
        return
    for block in blocks:
        qkv = block.attn.qkv
        if type(qkv) is not nn.Linear or qkv.out_features != 3 * qkv.in_features:
            raise ExportError(f"{type(model).__name__} has no plain fused qkv for LoRA", "choose another --peft")
        qkv.__class__ = LoraLinear  # the same tensors under the same names, and four more
        qkv.add_ranks()


def is_trained(name: str, peft: str, head: str) -> bool:
    """Whether this way of tuning trains a parameter; the head always is."""
    if peft == "all" or name.startswith(f"{head}."):
        return True
    if peft == "bias":
        return name.endswith("bias")
    return (peft == "prompt" and name == "norm_pre.prompts") or (peft == "lora" and ".lora_" in name)
