"""Measure split adaptation's training steps against a plain torch loop, in one process on one device.

The server's side is the real strategy over a backend of random weights, driven as the conductor drives it: one made-up
upload, labels under a permutation, so that nothing is asked after it. The plain side is the least that anyone would
write: the same batches as filtered float tokens, made before and waiting on the device, the same model, head, optimiser
and precision. Both take turns; a round's share is the ratio of its two times, and the result is the rounds' median.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import timm
import torch
from torch import nn
from torch.nn import functional

from contract import tokens
from contract.console import ArgumentParser, print_document, progress, run_command, say
from contract.errors import UsageError
from contract.wiener import release_variance, wiener_matrices
from exporter.models import family_of
from exporter.split import default_cut, split_model
from server_runtime import epochs, strategies
from server_runtime.backend import Backend, Front, adam, choose_device, new_head
from server_runtime.store import Upload
from server_runtime.strategies import Progress, Replies, Settings, Site
from server_runtime.strategies.split_adaptation import BATCH

GPU_MODEL: tuple[str, dict[str, Any]] = ("vit_large_patch16_224", {})
CPU_MODEL: tuple[str, dict[str, Any]] = ("vit_tiny_patch16_224", {"img_size": 64, "patch_size": 8})
GPU_STEPS, CPU_STEPS = 60, 8  # steps of a round: the whole takes about a minute
ROUNDS = 7
BACKEND_LR, HEAD_LR = 1e-5, 1e-3
KAPPA, AUGMENTATIONS, REPLACED = 0.25, 64, 0.25  # server-run's defaults, and the demo's noise


@dataclass
class Loop:
    """One side: an endless row of training steps, and what was measured of it."""

    steps: Iterator[None]
    resident_bytes: int = 0  # GPU memory that it holds between steps
    peak_bytes: int = 0  # GPU memory at most, without the other side's
    steps_per_s: list[float] = field(default_factory=list)


def main() -> int:
    options = parse(sys.argv[1:])
    document = measure(options)
    if options.format == "json":
        print_document("bench_backend", document)
    else:
        print("\n".join(lines_of(document)))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_backend", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="a timm VisionTransformer (default: ViT-L/16 on a GPU, else a small ViT)")
    parser.add_argument(
        "--model-arg", action="append", default=[], metavar="KEY=VALUE", help="passed to timm (repeatable)"
    )
    parser.add_argument("--split", type=int, help="block at which the backend starts (default: two thirds)")
    parser.add_argument("--images", type=int, default=96, help="images of the upload (default %(default)s)")
    parser.add_argument("--classes", type=int, default=10, help="classes of the head (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, help=f"training steps per side and round (default {GPU_STEPS} on a GPU, else {CPU_STEPS})"
    )
    parser.add_argument(
        "--precision", choices=["highest", "high"], help="of torch's float32 products (default: what the server sets)"
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    for name, least in (("images", 2), ("classes", 1), ("steps", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} {value} is too few", f"give at least {least}")
    if options.model and not timm.is_model(options.model):
        raise UsageError(f"timm knows no model {options.model!r}", "see timm.list_models('vit_*')")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(len(os.sched_getaffinity(0)))
    on_gpu = device.type == "cuda"
    if options.precision:
        torch.set_float32_matmul_precision(options.precision)
    name, arguments = GPU_MODEL if on_gpu else CPU_MODEL
    name, arguments = (options.model, {}) if options.model else (name, arguments)
    arguments = arguments | model_arguments(options.model_arg)
    theta_b, split = random_backend(name, arguments, options.split, device)
    upload = made_up_upload(theta_b.front, options.images, options.classes)
    site = Site("bench", (upload.device,), options.classes)

    steps = options.steps or (GPU_STEPS if on_gpu else CPU_STEPS)
    say(f"warming up: {name}, blocks from {split}, {options.images} images, on {device}")
    settings = Settings(
        "permuted-label", KAPPA, sys.maxsize, AUGMENTATIONS, REPLACED, 0, BACKEND_LR, HEAD_LR,
    )  # fmt: skip
    strategy = strategies.find("split_adaptation").build(theta_b, settings)
    server, plain = Loop(server_steps(strategy, site, upload)), Loop(plain_steps(theta_b, site, upload, settings))
    advance(server, steps, device)
    server.resident_bytes = allocated_bytes(device)  # the shipped backend, too: a server keeps it for the next site
    advance(plain, steps, device)
    plain.resident_bytes = allocated_bytes(device) - server.resident_bytes
    with progress(range(ROUNDS), total=ROUNDS, description="measuring", unit="rounds") as rounds:
        for number in rounds:
            # Who goes first changes, so that a clock that falls with the heat is nobody's gain.
            turns = [(server, plain), (plain, server)]
            for loop, other in turns if number % 2 == 0 else turns[::-1]:
                run_round(loop, other, steps, device)
    shares = [ours / theirs for ours, theirs in zip(server.steps_per_s, plain.steps_per_s, strict=True)]
    return {
        "model": name,
        "model_args": arguments,
        "split": split,
        "tokens": [theta_b.front.prefix + theta_b.front.patches, int(theta_b.front.steps.shape[1])],
        "images": options.images,
        "classes": options.classes,
        "batch": BATCH,
        "steps": steps,
        "rounds": ROUNDS,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "precision": torch.get_float32_matmul_precision(),
        "versions": {"torch": torch.__version__, "timm": timm.__version__, "numpy": np.__version__},
        "server": figures(server, on_gpu),
        "plain": figures(plain, on_gpu),
        "share": statistics.median(shares),
        "share_range": [min(shares), max(shares)],
    }


def model_arguments(given: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in given:
        key, separator, value = text.partition("=")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
        if not separator:
            raise UsageError(f"--model-arg {text!r} is not KEY=VALUE", "as in --model-arg img_size=64")
    return arguments


def random_backend(
    name: str, arguments: dict[str, Any], split: int | None, device: torch.device
) -> tuple[Backend, int]:
    """A backend of random weights behind a front for tokens of unit spread, and the block where it starts."""
    torch.manual_seed(0)
    with device:
        model = timm.create_model(name, pretrained=False, **{"num_classes": 0, **arguments})
    facts = family_of(model)[1].facts(model)
    split = split or default_cut(facts.depth)
    _, module = split_model(model, split)
    ones = (1.0,) * facts.layout.dim
    fours = (4.0,) * facts.layout.dim
    steps = tokens.wire_steps(tokens.Statistics(ones, ones, fours, fours), KAPPA)  # (2,d)
    matrix, offset = wiener_matrices(np.zeros(len(ones)), np.eye(len(ones)), release_variance(ones, KAPPA, steps[0]))
    front = Front(
        facts.layout.prefix, facts.layout.patches, steps, np.stack([matrix, matrix]), np.stack([offset, offset])
    )
    return Backend(module, front, device), split


def made_up_upload(front: Front, images: int, classes: int) -> Upload:
    """Random codes, sources and labels, of the shapes that a device sends."""
    rng = np.random.default_rng(0)
    return Upload(
        device="device",
        sample_ids=rng.integers(0, 256, (images, 16), dtype=np.uint8),
        codes=rng.integers(-127, 128, (images, front.prefix + front.patches, front.steps.shape[1]), dtype=np.int8),
        sources=rng.integers(0, images, (images, front.patches), dtype=np.uint16),
        labels=rng.integers(0, classes, images, dtype=np.uint16),
    )


def server_steps(strategy: strategies.Strategy, site: Site, upload: Upload) -> Iterator[None]:
    """Training steps of the strategy: the conductor's part in it, without its pipe and files."""
    conduct = strategy.run(site)
    next(conduct)  # it asks for features
    replies: Replies = {upload.device: upload}
    while True:
        if isinstance(conduct.send(replies), Progress):
            yield
        replies = {}


def plain_steps(theta_b: Backend, site: Site, upload: Upload, settings: Settings) -> Iterator[None]:
    """Training steps of a plain loop over one epoch's batches, again and again."""
    module: nn.Module = copy.deepcopy(theta_b.module)
    head = new_head(theta_b.width, site.classes, settings.seed, site.name, theta_b.device)
    optimiser = adam([(module.parameters(), settings.backend_lr), (head.parameters(), settings.head_lr)])
    for x, y in itertools.cycle(ready_batches(theta_b, upload, settings)):
        optimiser.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(head(module(x)), y)
        loss.backward()
        optimiser.step()
        yield


def ready_batches(theta_b: Backend, upload: Upload, settings: Settings) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Filtered tokens (B,T,d) and labels (B,) of an epoch's batches, augmented rows among them, on the device."""
    front, codes = theta_b.front, theta_b.table([upload.codes])
    replaced = round(settings.replaced * front.patches)
    recipe = epochs.Augmentation(settings.seed, settings.augmentations, front.patches, replaced, front.prefix)
    return [
        (
            theta_b.tokens(codes.take(epochs.token_rows([upload], rows, recipe))),
            torch.from_numpy(epochs.labels_of([upload], rows)).to(theta_b.device),
        )
        for rows in epochs.epoch_batches([upload], recipe, 1, BATCH)
    ]


def run_round(loop: Loop, other: Loop, steps: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started_s = time.perf_counter()
    advance(loop, steps, device)
    loop.steps_per_s.append(steps / (time.perf_counter() - started_s))
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device) - other.resident_bytes
        loop.peak_bytes = max(loop.peak_bytes, peak_bytes)


def advance(loop: Loop, steps: int, device: torch.device) -> None:
    for _ in range(steps):
        next(loop.steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def figures(loop: Loop, on_gpu: bool) -> dict[str, Any]:
    memory: dict[str, Any] = {"peak_gpu_bytes": loop.peak_bytes} if on_gpu else {
        "peak_gpu_bytes": None, "peak_gpu_reason": "no GPU",
    }  # fmt: skip
    rates = loop.steps_per_s
    return {"steps_per_s": statistics.median(rates), "steps_per_s_range": [min(rates), max(rates)], **memory}


def lines_of(document: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    count, width = document["tokens"]
    lines = [
        f"{document['model']} from block {document['split']}, {count} tokens of {width}, batch {document['batch']}, "
        f"{document['images']} images; {document['rounds']} rounds of {document['steps']} steps",
        f"{document['device']}, float32 products {document['precision']!r}, {versions}",
    ]
    for name in ("server", "plain"):
        side = document[name]
        low, high = side["steps_per_s_range"]
        peak = side["peak_gpu_bytes"]
        memory = side["peak_gpu_reason"] if peak is None else f"{peak / 2**20:.0f} MiB of GPU memory at most"
        lines.append(f"{name:7} {side['steps_per_s']:8.3f} steps/s ({low:.3f} to {high:.3f}), {memory}")
    low, high = document["share_range"]
    lines.append(f"share   {document['share']:8.3f} ({low:.3f} to {high:.3f})")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
