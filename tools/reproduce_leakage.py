"""Measures what each split of a model leaks while the model is trained: random and pre-trained start, epoch by epoch.

A model learns CIFAR-10 (5,000 training images) in one piece, as split training without noise does too; at the asked
epochs its weights go through `export-frontend --cuts` and `leakage-profile`, which attack features of other images.
The pre-trained start is the same model after some epochs on the public Tiny-ImageNet subset. A finished table is kept,
so that an interrupted run goes on where it was, and several commands may work on one folder (`--only`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from contract.console import ArgumentParser, print_document, progress, run_command, say
from contract.errors import DataError, ExportError, UsageError
from contract.image_folder import scan
from contract.images import ImageRule
from contract.output import open_output
from exporter.architecture import create
from exporter.checkpoint import image_rule
from server_runtime.files import write_atomic
from server_runtime.report import Results, Table, to_text
from tools.demo_model import load_folders
from tools.reproduce_options import numbers, texts
from tools.reproduce_split_world import DRAW, FULL_CLASSES, FULL_SHOTS, SMALL
from tools.reproduce_world import ROOT, TASKS, alone, draw_shots, listing, made, members, unpack

ARCHIVE = TASKS["cifar10"].archive
PUBLIC_ARCHIVE = "data/tinyimagenet_server.zip"
STARTS = ("random", "pretrained")
ATTACKED_A_CLASS = 600  # of the test images: a fifth or fewer is attacked, the attacker learns from the others
SIDE = 32
BATCH = 64
PRETRAINING_EPOCHS = 30
RATE = 0.02


@dataclass(frozen=True)
class Task:
    """Images (n, 3, h, w) on the CPU and labels (n,)."""

    images: Tensor
    labels: Tensor
    classes: int


@dataclass(frozen=True)
class Training:
    """What is trained, for how many epochs, and after which of them the weights are kept."""

    model: str
    epochs: int
    at: Sequence[int]


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    shared = options.shared or ROOT.parent / "shared"
    with alone(root / "scratch"):
        folders = unpack_images(root / "scratch", shared)
    done = {}
    for start in options.starts:
        with alone(root / "scratch" / f"training-{start}"):
            weights = train_all(Training(options.model, options.epochs, options.at), root / "scratch", folders, start)
        for epoch in options.at:
            if options.only is None or options.only == f"{start}/{epoch}":
                profile(options, root, folders["attacked"], weights[epoch], f"{start}-{epoch}")
            table = root / f"{start}-{epoch}.json"
            if table.exists():
                done[f"{start}, epoch {epoch}"] = json.loads(table.read_text())
    page = results_of(done)
    write_atomic(root / "report.txt", ("\n\n".join(map(to_text, page.tables)) + "\n").encode())
    if options.format == "json":
        print_document("reproduce-leakage", {"model": options.model, "tables": done})
    else:
        print("\n\n".join(map(to_text, page.tables)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce_leakage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="vgg16_bn", help="a timm model of pictures of any size (default: %(default)s)"
    )
    parser.add_argument("--cuts", default="1-10", help="as export-frontend has them (default: %(default)s)")
    parser.add_argument("--starts", type=texts, default=list(STARTS), help="default: random,pretrained")
    parser.add_argument("--epochs", type=int, default=100, help="of the whole training (default: 100)")
    parser.add_argument("--at", type=numbers, default=[0, 30, 60], help="epochs to look at (default: 0,30,60)")
    parser.add_argument("--only", metavar="START/EPOCH", help="profile this one alone")
    parser.add_argument("--noise", default="0", help="strengths, as leakage-profile has them (default: 0)")
    parser.add_argument("--steps", type=int, default=20_000, help="of the trained attack (default: 20000)")
    parser.add_argument("--images", type=int, default=1000, help="to attack (default: 1000)")
    parser.add_argument("--shared", type=Path, metavar="DIR", help=f"holds {listing([ARCHIVE, PUBLIC_ARCHIVE])}")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-reproduce-leakage"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="DIR", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    options.at = sorted(options.at)
    unknown = [start for start in options.starts if start not in STARTS]
    if unknown or options.epochs < 1 or not all(0 <= each <= options.epochs for each in options.at):
        raise UsageError(
            f"expected starts of {listing(STARTS)} and epochs from 0 to --epochs", "correct --starts, --at or --epochs"
        )
    return options


def unpack_images(scratch: Path, shared: Path) -> dict[str, Path]:
    """Folders of class folders: the devices' training images, those of the attacks, and public ones.

    Raises: DataError when an archive is missing."""
    for name in (ARCHIVE, PUBLIC_ARCHIVE):
        if not (shared / name).is_file():
            raise DataError(f"this needs {shared / name}, which does not exist", "give --shared DIR that holds it")
    archive, public = shared / ARCHIVE, shared / PUBLIC_ARCHIVE
    train = draw_shots(members(archive, "cifar10/train/"), FULL_SHOTS, DRAW)
    attacked = draw_shots(members(archive, "cifar10/test/"), ATTACKED_A_CLASS, DRAW)
    return {
        "train": made(scratch / "train", lambda path: unpack(archive, path, train)) / "cifar10" / "train",
        "attacked": made(scratch / "attacked", lambda path: unpack(archive, path, attacked)) / "cifar10" / "test",
        "public": made(scratch / "public", lambda path: unpack(public, path, members(public, "tinyimagenet/train/")))
        / "tinyimagenet" / "train",
    }  # fmt: skip


def train_all(training: Training, scratch: Path, folders: dict[str, Path], start: str) -> dict[int, Path]:
    """Weights at the asked epochs, made once."""
    paths = {epoch: scratch / f"{training.model}-{start}-{epoch}.safetensors" for epoch in training.at}
    if all(path.exists() for path in paths.values()):
        return paths
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = create(training.model, False, {"small_images": True, "num_classes": FULL_CLASSES})
    rule = image_rule(model, (3, SIDE, SIDE))
    if start == "pretrained":
        public = read(folders["public"], rule)
        model.reset_classifier(public.classes)
        learn(model.to(device), public, PRETRAINING_EPOCHS, "pre-training", device)
        model.reset_classifier(FULL_CLASSES)
    task = read(folders["train"], rule)
    model.to(device)
    taken = {0: paths[0]} if 0 in paths else {}
    for path in taken.values():
        keep(model, path)
    learn(model, task, training.epochs, f"training, {start}", device, {k: v for k, v in paths.items() if k})
    return paths


def read(folder: Path, rule: ImageRule) -> Task:
    classes = scan(folder, None).classes
    images, labels = load_folders((folder,), classes, rule)
    return Task(images, labels, len(classes))


def learn(
    model: nn.Module, task: Task, epochs: int, title: str, device: torch.device, kept: dict[int, Path] | None = None
) -> None:
    """SGD with momentum on a cosine, mirrored at random; weights after an epoch of `kept` are stored under its path."""
    images, labels = task.images.to(device), task.labels.to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    last = epochs if kept is None else max(kept, default=0)
    model.train()
    with progress(total=last, description=title, unit="epochs") as bar:
        for epoch in range(1, last + 1):
            for group in optimiser.param_groups:
                group["lr"] = RATE * (1.0 + math.cos(math.pi * (epoch - 1) / epochs)) / 2.0
            for rows in torch.randperm(len(labels), device=device).split(BATCH):
                batch = images[rows]
                mirrored = torch.rand(len(rows), 1, 1, 1, device=device) < 0.5
                batch = torch.where(mirrored, batch.flip(3), batch)
                loss = functional.cross_entropy(model(batch), labels[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
            if kept is not None and epoch in kept:
                keep(model, kept[epoch])
            bar.update(1)


def keep(model: nn.Module, path: Path) -> None:
    partial = path.with_suffix(".partial")
    save_file({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, partial)
    assert load_file(partial)
    partial.replace(path)


def profile(options: argparse.Namespace, root: Path, attacked: Path, weights: Path, name: str) -> None:
    """Export the parts and attack them, once. Raises: ExportError."""
    if (root / f"{name}.json").exists():
        return
    front = root / "scratch" / f"front-{name}"
    exporting = [
        "exporter.cli", "--model", options.model, "--model-arg", f"num_classes={FULL_CLASSES}", "--model-arg", SMALL,
        "--for", "sequential_split",
        "--cuts", options.cuts, "--weights", weights, "-o", front,
    ]  # fmt: skip
    attacking = [
        "server_runtime.leakage.cli", "--package", front, "--public", attacked, "--noise", options.noise, "--images",
        options.images, "--steps", options.steps, "-o", root / f"{name}.json",
    ]  # fmt: skip
    for words in ([] if (front / "manifest.json").exists() else [exporting]) + [attacking]:
        say(f"== {name}: {words[0]}")
        code = subprocess.run([sys.executable, "-m", *map(str, words)], stdout=2, cwd=ROOT).returncode
        if code:
            raise ExportError(f"{words[0]} ended with exit code {code}", "see the lines above")


def results_of(tables: dict[str, dict]) -> Results:
    """By split: what the strongest attack reads, at the least noise that was asked for."""
    names = list(tables)
    found = {name: by_split(table) for name, table in tables.items()}
    splits = sorted({split for rows in found.values() for split in rows})
    lines = tuple((str(split), *(found[name].get(split, "-") for name in names)) for split in splits)
    return Results("Leakage while training", (), (Table("PSNR in dB / SSIM / FSIM", ("split", *names), lines),))


def by_split(table: dict) -> dict[int, str]:
    shown: dict[int, str] = {}
    for row in table["rows"]:
        best = max(row["attacks"], key=lambda each: each["figures"]["ssim"])["figures"]
        shown.setdefault(row["split"], f"{best['psnr_db']:.1f} / {best['ssim']:.2f} / {best['fsim']:.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(run_command(main))
