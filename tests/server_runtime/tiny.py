"""A tiny backend folder, synthetic uploads and enrolled devices, for tests of the server.

Torch is imported inside the functions that need it, so that this module imports anywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from contract import manifest as package
from contract import signature, tokens
from contract.messages import Features
from server_runtime.store import Upload
from tests.golden.samples import MANIFEST

MODEL = "vit_tiny_patch16_224"
MODEL_ARGS = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 0}
LAYOUT = tokens.TokenLayout(prefix=1, grid=(4, 4), dim=24)
CUT = 1
CLASSES = 3
KAPPA = 0.5


def statistics() -> tokens.Statistics:
    """Every channel with a spread of its own."""
    sigma = tuple(float(x) for x in np.linspace(0.5, 2.0, LAYOUT.dim))
    absmax = tuple(4 * x for x in sigma)
    return tokens.Statistics(sigma, sigma, absmax, absmax)


def manifest() -> package.Manifest:
    """The golden sample's manifest, for this model and cut."""
    size = (16, 16)
    cut = replace(
        MANIFEST.cuts[0], index=CUT, depth=3, input_shape=(3, *size), tokens=LAYOUT, statistics=statistics(),
    )  # fmt: skip
    return replace(
        MANIFEST,
        model=MODEL,
        cuts=(cut,),
        image=replace(MANIFEST.image, height=size[0], width=size[1]),
        transforms=package.TransformRules(alpha=0.1, kappa=KAPPA, kappa_max=1.0, weight_noise=True),
        label_modes=("permuted-label", "logit-gradient", "client-head"),
        classes=None,
    )


def write_backend_folder(root: Path, backend_lr: float = 1e-3, head_lr: float = 1e-2) -> Path:
    """A random backend, as export-frontend would leave it."""
    import safetensors.numpy
    import safetensors.torch
    import timm
    import torch

    from exporter.split import backend_state

    root.mkdir(parents=True)
    (root / "manifest.json").write_bytes(package.to_bytes(manifest()))
    (root / "export.json").write_text(json.dumps({"plan": {"model": MODEL, "model_args": list(MODEL_ARGS.items())}}))
    (root / "few_shot.json").write_text(json.dumps({"backend_lr": backend_lr, "head_lr": head_lr, "table": []}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(MODEL, pretrained=False, **MODEL_ARGS)
    safetensors.torch.save_file(backend_state(model, CUT), root / "backend.safetensors")
    sigma = np.array(statistics().sigma_patch, np.float32)
    safetensors.numpy.save_file(
        {
            f"{figure}_{kind}": value
            for kind in ("prefix", "patch")
            for figure, value in (("mean", np.zeros_like(sigma)), ("covariance", np.diag(sigma**2)))
        },
        root / "statistics.safetensors",
    )
    return root


def upload(device: str, count: int, *, seed: int = 0, labels: bool = True, classes: int = CLASSES) -> Upload:
    """`count` samples whose tokens show their class, noised and quantized, with sources among themselves."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, LAYOUT.count, LAYOUT.dim))
    wanted = np.arange(count) % classes
    figures = statistics()
    clean = (centres[wanted] + 0.3 * rng.normal(size=(count, LAYOUT.count, LAYOUT.dim))).astype(np.float32)
    noisy = clean + rng.laplace(size=clean.shape).astype(np.float32) * tokens.noise_scales(figures, KAPPA)[1]
    codes, _ = tokens.quantize(noisy, tokens.wire_steps(figures, KAPPA), LAYOUT.prefix)
    ids = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    sources = tokens.retrieval_sources(clean[:, LAYOUT.prefix :])
    return Upload(device, ids, codes, sources, wanted.astype(np.uint16) if labels else None)


def batches(whole: Upload, ask: str, size: int, split: str = "train") -> list[Features]:
    """An upload as the messages that carry it."""
    total = len(whole.sample_ids)
    return [
        Features(
            ask=ask,
            batch=number,
            total=total,
            split=split,  # type: ignore[arg-type]
            sample_ids=whole.sample_ids[first : first + size],
            codes=whole.codes[first : first + size],
            sources=None if whole.sources is None or split == "infer" else whole.sources[first : first + size],
            labels=None if whole.labels is None or split == "infer" else whole.labels[first : first + size],
        )
        for number, first in enumerate(range(0, total, size))
    ]


def enrol(roster: Path, site: str, device: str) -> signature.PrivateKey:
    """Make a key for a device and put the public half into the roster."""
    private = signature.generate()
    folder = roster / site
    folder.mkdir(parents=True, exist_ok=True)
    signature.save_public(folder / f"{device}.pub", private.public_key())
    return private
