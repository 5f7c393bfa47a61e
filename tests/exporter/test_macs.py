"""Against numbers worked out by hand."""

from __future__ import annotations

import timm
import torch
from timm.layers import Attention
from torch import nn

from exporter.macs import count_macs
from tests.exporter import tiny


def test_a_convolution_counts_its_kernel_for_every_output_value() -> None:
    plain = nn.Conv2d(3, 8, 3, stride=2, padding=1)  # 3 x 8 x 8 -> 8 x 4 x 4
    assert count_macs(plain, (3, 8, 8)) == 8 * 4 * 4 * (3 * 3 * 3)
    grouped = nn.Sequential(nn.Conv2d(3, 6, (1, 5), groups=3), nn.BatchNorm2d(6), nn.ReLU())  # -> 6 x 8 x 4
    assert count_macs(grouped, (3, 8, 8)) == 6 * 8 * 4 * (1 * 1 * 5)


def test_a_linear_layer_counts_for_every_row() -> None:
    assert count_macs(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2)) == 12 * 5
    assert count_macs(nn.Linear(4, 7), (3, 2, 4)) == 3 * 2 * 4 * 7


def test_attention_counts_both_products_and_its_linear_layers() -> None:
    class Rows(nn.Module):
        """The image's 3 channels as 3 tokens of 16 values."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(16, num_heads=2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.attention(images.flatten(2))

    qkv, products, projection = 3 * 16 * 48, 2 * 2 * (3 * 3 * 8), 3 * 16 * 16
    assert count_macs(Rows(), (3, 4, 4)) == qkv + products + projection


def test_a_whole_vit_is_the_sum_of_its_layers() -> None:
    model = tiny.tiny_model()  # 16 patches of 8 x 8 and a class token, 48 wide, 3 blocks, 4 classes
    block = 17 * 48 * 144 + 2 * 17 * 17 * 48 + 17 * 48 * 48 + 2 * (17 * 48 * 192)
    assert count_macs(model, tiny.SHAPE) == 16 * 48 * (3 * 8 * 8) + 3 * block + 48 * 4
    model.train()
    count_macs(model, tiny.SHAPE)
    assert model.training and not any(each._forward_hooks for each in model.modules())


def test_windows_attend_within_themselves() -> None:
    args = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (1, 2)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **args)
    # 8 x 8 tokens 24 wide in 4 windows of 16, two blocks; merged to 4 x 4 of 48 in one window
    first = 64 * (4 * 24 * 24 + 8 * 24 * 24) + 4 * 2 * 16 * 16 * 24
    second = 16 * 96 * 48 + 16 * (4 * 48 * 48 + 8 * 48 * 48) + 2 * 16 * 16 * 48
    assert count_macs(model, (3, 32, 32)) == 64 * 24 * 3 * 16 + 2 * first + second
