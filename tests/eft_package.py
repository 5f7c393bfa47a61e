"""The signed package of a tiny ViT for EFTViT, exported once for all tests that need it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.make_package import PRIVATE_CLASSES

NAME = "eft"
SIDE_PX, PATCH_PX, DIM, LOCAL, DEPTH = 16, 4, 24, 1, 2
PATCHES = (SIDE_PX // PATCH_PX) ** 2
KEPT = PATCHES // 4


def export(output: Path, signing_key: Path) -> Path:
    """The package, with its backend beside it as eft.backend."""
    from exporter import cli

    arguments = {"img_size": SIDE_PX, "patch_size": PATCH_PX, "embed_dim": DIM, "depth": DEPTH, "num_heads": 3}
    words = [word for name, value in arguments.items() for word in ("--model-arg", f"{name}={value}")]
    code = cli.main(
        ["--model", "vit_tiny_patch16_224", *words, "--for", "eft_vit", "--split", str(LOCAL),
         "--classes", str(len(PRIVATE_CLASSES)), "--release-whole-model", "--optimiser", "adamw",
         "--weight-decay", "0.05", "--augment", "crop=1", "--activations", "float16", "--gradient", "float16",
         "--signing-key", str(signing_key), "-o", str(output)]
    )  # fmt: skip
    if code:
        sys.exit(code)
    return output
