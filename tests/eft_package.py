"""The signed package of a tiny ViT for EFTViT: `tests.make_package` makes it, older deployments lack it."""

from __future__ import annotations

from pathlib import Path

NAME, CLASSES = "eft", 3
SIDE_PX, PATCH_PX, DIM, LOCAL, DEPTH = 16, 4, 24, 1, 2
PATCHES = (SIDE_PX // PATCH_PX) ** 2
KEPT = PATCHES // 4
_SIZES = {"img_size": SIDE_PX, "patch_size": PATCH_PX, "embed_dim": DIM, "depth": DEPTH, "num_heads": 3}
WORDS = (
    *("--model", "vit_tiny_patch16_224"),
    *(word for name, value in _SIZES.items() for word in ("--model-arg", f"{name}={value}")),
    *("--for", "eft_vit", "--split", LOCAL, "--classes", CLASSES, "--release-whole-model"),
    *("--optimiser", "adamw", "--weight-decay", "0.05", "--augment", "crop=1"),
    *("--activations", "float16", "--gradient", "float16"),
)


def front_of(package: Path, folder: Path) -> Path:
    """The package in a deployment, or made in `folder` with that one's key; its backend lies beside it."""
    if (package / NAME).exists():
        return package / NAME
    from exporter import cli

    words = (*WORDS, "--signing-key", package / "keys" / "publisher.key", "-o", folder / NAME)
    assert cli.main([str(word) for word in words]) == 0
    return folder / NAME
