"""Prompts, LoRA, biases and heads: what the baselines of EFTViT train."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from contract.errors import ExportError, UsageError
from exporter.models._masked import masked_whole
from exporter.models._peft import PROMPTS, RANK, add_peft, is_trained
from exporter.plan import TrainingChoices, optimiser_rule, read_augment

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **SIZES).eval()


def trained(model: nn.Module, peft: str) -> dict[str, int]:
    return {name: each.numel() for name, each in model.named_parameters() if is_trained(name, peft, "head")}


def test_lora_starts_as_the_model_itself_and_moves_queries_and_values_only() -> None:
    model, images = vit(), torch.randn(2, 3, 16, 16)
    before, names = model(images), set(model.state_dict())
    add_peft(model, "lora")
    torch.testing.assert_close(model(images), before)
    qkv = model.blocks[0].attn.qkv
    assert set(model.state_dict()) - names == {
        f"blocks.{block}.attn.qkv.lora_{part}_{way}" for block in (0, 1) for part in "qv" for way in ("down", "up")
    }
    x = torch.randn(5, 24)
    plain = qkv(x)
    for part in "qv":
        nn.init.ones_(getattr(qkv, f"lora_{part}_up"))
    moved = (qkv(x) - plain).abs().amax(0).split(24)
    assert moved[0].max() > 0 and moved[2].max() > 0 and moved[1].max() == 0  # keys stay
    assert sum(trained(model, "lora").values()) == 2 * 4 * RANK * 24 + 24 * 3 + 3


def test_prompts_are_tokens_that_the_class_token_sees() -> None:
    model, images = vit(), torch.randn(2, 3, 16, 16)
    before = model(images)
    add_peft(model, "prompt")
    tokens = model.norm_pre(torch.zeros(2, 17, 24))
    assert tokens.shape == (2, 17 + PROMPTS, 24) and tokens[:, :17].abs().max() == 0
    assert (model(images) - before).abs().max() > 1e-4
    assert trained(model, "prompt") == {"norm_pre.prompts": PROMPTS * 24, "head.weight": 72, "head.bias": 3}


def test_heads_and_biases_add_nothing() -> None:
    model = vit()
    names = set(model.state_dict())
    for peft in ("all", "head", "bias"):
        add_peft(model, peft)
    assert set(model.state_dict()) == names
    assert set(trained(model, "head")) == {"head.weight", "head.bias"}
    assert set(trained(model, "bias")) == {name for name in names if name.endswith("bias")} | {"head.weight"}
    assert set(trained(model, "all")) == names


def test_models_without_tokens_are_refused() -> None:
    for peft in ("prompt", "lora"):
        with pytest.raises(ExportError, match="no tokens to tune"):
            add_peft(nn.Linear(2, 2), peft)
    with pytest.raises(ExportError, match="cannot leave out patches"):
        masked_whole(nn.Linear(2, 2))


def choices(strategy: str, **changes: object) -> TrainingChoices:
    fields = {
        "strategy": strategy, "cuts": (), "release_whole_model": True, "classes": 3,
        "optimiser": optimiser_rule("adamw", None, None), "augment": read_augment("none"), "gradient": "float32",
        "activations": "float32", "freeze": (), "recompute": False,
    }  # fmt: skip
    return TrainingChoices(**{**fields, **changes})  # type: ignore[arg-type]


def test_choices_that_do_not_fit_the_strategy_are_refused() -> None:
    assert choices("eft_vit", cuts=(2,), keep_patches=0.25, activations="int8").whole_model
    assert choices("fed_avg", keep_patches=0.25).keep_patches == 0.25
    for strategy, changes, cause in (
        ("fed_avg", {"activations": "int8"}, "--activations int8 belongs to eft_vit"),
        ("fed_avg", {"keep_patches": 0.5, "peft": "lora"}, "the whole model was asked for"),
        ("fed_bfpt", {"keep_patches": 0.5}, "the whole model was asked for"),
        ("eft_vit", {"cuts": (2, 3)}, "has one local module"),
        ("eft_vit", {"peft": "lora"}, "it belongs to fed_avg"),
        ("fed_avg", {"peft": "adapter"}, "peft must be one of"),
        ("eft_vit", {"release_whole_model": False}, "would give every layer away"),
    ):
        with pytest.raises(UsageError, match=cause):
            choices(strategy, **changes)  # type: ignore[arg-type]
