"""The whole story on this machine: pre-train, export, serve, adapt on two devices, predict, compare, report.

Every part is the real one: the commands export-frontend, server-run and edge-run as processes, TLS on loopback. Only
the data, the pre-training and the yardstick in the clear are the demo's own.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from contract import manifest as manifests
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.image_folder import scan
from contract.images import ImageRule
from contract.output import open_output
from exporter.checkpoint import image_rule, load_weights, read_state
from exporter.models import family_of
from server_runtime.report import Picture, Results, Table, to_html, to_text
from tools import demo_commands as commands
from tools import demo_data, demo_model

DIGITS_MODEL = "vit_tiny_patch16_224"
DIGITS_ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 6, "num_heads": 2}
PRETRAIN_STEPS = 700  # about a minute on two cores
PRETRAIN_LIMIT_S = 120.0
DEFAULT_KAPPA = 0.25
STRONG_KAPPA = 1.0
PREVIEW_STEPS, PREVIEW_MINUTES = 300, 2  # of each attacker's decoder: a demonstration, not an attacker's best
PREVIEWED = 3  # private images
LEAST_PUBLIC = 20  # images that an attacker is trained on at least
STRATEGIES = ("split_adaptation", "linear_probe")


@dataclass
class Story:
    """What is chosen, and what has been measured so far."""

    options: argparse.Namespace
    root: Path
    folders: demo_data.DemoFolders
    stages_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        say(f"== {name}")
        started_s = time.monotonic()
        yield
        self.stages_s[name] = round(time.monotonic() - started_s, 2)


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    if not (root / "demo.json").exists() and any(root.iterdir()):
        raise UsageError(f"{root} is not empty and holds no demo", "choose another folder with -o")
    shutil.rmtree(root)
    root.mkdir()
    (root / "demo.json").write_text("{}\n")  # marks the folder as ours, should we be stopped half-way
    started_s = time.monotonic()
    say("== data")
    folders = make_folders(options, root / "data")
    story = Story(options, root, folders, {"data": round(time.monotonic() - started_s, 2)})
    document = run(story)
    document["stages_s"]["total"] = round(time.monotonic() - started_s, 2)
    (root / "demo.json").write_text(json.dumps(document, indent=2) + "\n")
    if options.format == "json":
        print_document("demo", document)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/demo", description="Adapt a classifier to private images, all on this machine.")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything drawn (default %(default)s)")
    parser.add_argument("--shots", type=int, default=5, help="private training images per class (default %(default)s)")
    parser.add_argument("--data", type=Path, help="your image folder, one subfolder per class (default: digits)")
    parser.add_argument("--model", help="a timm VisionTransformer (default: a small one for the digits)")
    parser.add_argument(
        "--model-arg", action="append", default=[], metavar="KEY=VALUE", help="passed to timm (repeatable)"
    )
    parser.add_argument("--weights", type=Path, help="weights of --model (default: pre-train it for a minute or two)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-demo"
    parser.add_argument("-o", "--output", type=Path, default=default, help="folder of the run (default %(default)s)")
    options = parser.parse_args(argv)
    if options.weights and not options.model:
        raise UsageError("--weights without --model", "name the timm model that the weights belong to")
    if options.data and not options.data.is_dir():
        raise UsageError(f"--data {options.data} is no folder", "give a folder with one subfolder per class")
    if options.model and not timm.is_model(options.model):
        raise UsageError(f"timm knows no model {options.model!r}", "see timm.list_models('vit_*')")
    return options


def make_folders(options: argparse.Namespace, root: Path) -> demo_data.DemoFolders:
    if options.data:
        return demo_data.user_folder(root, options.data, options.shots, options.seed)
    return demo_data.digits(root, options.shots, options.seed)


def run(story: Story) -> dict[str, Any]:
    arguments = model_arguments(story.options)
    name = story.options.model or DIGITS_MODEL
    weights = story.options.weights or story.root / "pretrained.safetensors"
    if not story.options.weights:
        with story.stage("pre-train"):
            arguments = {**arguments, "num_classes": len(scan(story.folders.public, None).classes)}
            pretraining = demo_model.Pretraining(PRETRAIN_STEPS, PRETRAIN_LIMIT_S, story.options.seed)
            torch.manual_seed(story.options.seed)
            model = create(name, arguments)
            demo_model.make_weights(weights, model, story.folders.public, rule_of(model), pretraining)
    with story.stage("keys"):
        devices = [word for device in demo_data.DEVICES for word in ("--device", device)]
        commands.command(sys.executable, "-m", "tools.make_keys", "-o", story.root / "keys", "--site", "demo", *devices)
    with story.stage("export"):
        export(story, name, arguments, weights)
    rows = [
        adapt(story, strategy, kappa)
        for kappa in (DEFAULT_KAPPA, STRONG_KAPPA)
        for strategy in ("split_adaptation", "linear_probe")
    ]
    with story.stage("linear probe in the clear"):
        clean = clean_accuracy(story, create(name, arguments), weights)
    with story.stage("what an attacker gets"):
        pictures = preview_pictures(story)
    return summarise(story, rows, clean, pictures)


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for text in options.model_arg:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--model-arg {text!r} is not KEY=VALUE", "as in --model-arg img_size=64")
        try:
            given[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            given[key] = value
    return given if options.model else {**DIGITS_ARGS, **given}


def export(story: Story, name: str, arguments: dict[str, object], weights: Path) -> None:
    model_args = [word for key, value in arguments.items() for word in ("--model-arg", f"{key}={value}")]
    commands.command(
        commands.BIN / "export-frontend", "--model", name, *model_args, "--weights", weights, "--int8",
        "--calibration", story.folders.public, "--signing-key", story.root / "keys" / "publisher.key",
        "--seed", story.options.seed, "-o", story.root / "front", *preview_flags(story),
    )  # fmt: skip


def preview_flags(story: Story) -> list[object]:
    """Decoders for the owner's preview, where there are public images enough to train them on."""
    if len(scan(story.folders.public, None).images) < LEAST_PUBLIC:
        return []
    return ["--preview", "--preview-steps", PREVIEW_STEPS, "--preview-minutes", PREVIEW_MINUTES]


def preview_pictures(story: Story) -> tuple[Picture, ...]:
    """Private images of the first device beside what an attacker gets of them, under either noise."""
    if not preview_flags(story):
        return ()
    site, folder = commands.Site(story.root, story.folders.classes, DEFAULT_KAPPA), story.folders.test[0]
    images = [next(iter(sorted(each.iterdir()))) for each in sorted(folder.iterdir())][:PREVIEWED]
    pictures = []
    for kappa in (DEFAULT_KAPPA, STRONG_KAPPA):
        shown = commands.preview(site, demo_data.DEVICES[0], images, kappa)
        for place, pair in enumerate(shown["pairs"]):
            line = (
                f"likeness {pair['ssim']:.2f} (SSIM), {pair['psnr_db']:.1f} dB: {pair['words']}, for this attacker; "
                f"one flat colour {pair['flat_ssim']:.2f}, {pair['flat_psnr_db']:.1f} dB"
            )
            title = f"An image of the site, and what an attacker gets at kappa {shown['kappa']:g}"
            lines = (line, *shown["remarks"]) if place + 1 == len(shown["pairs"]) else (line,)
            pictures.append(Picture(title, Path(pair["picture"]).read_bytes(), lines))
    return tuple(pictures)


def adapt(story: Story, strategy: str, kappa: float) -> dict[str, Any]:
    """One server run with both devices: upload, train, predict. The devices keep their state from run to run."""
    label = f"{strategy} kappa {kappa:g}"
    site = commands.Site(story.root, story.folders.classes, kappa_floor=min(kappa, DEFAULT_KAPPA))
    with commands.server(story.root, strategy, kappa, story.options.seed) as url:
        with story.stage(f"{label}: upload"):
            uploads = commands.devices(site, url, story.folders.train)
        with story.stage(f"{label}: train and predict"):
            answers = commands.devices(site, url, story.folders.test, "--infer")
    right = sum(answer["accuracy"] * answer["images"] for answer in answers)
    return {
        "strategy": strategy,
        "kappa": kappa,
        "accuracy": right / sum(answer["images"] for answer in answers),
        "bytes_per_image": uploads[0]["bytes_per_image"],
        "uploads": uploads,
    }


def create(name: str, arguments: dict[str, Any]) -> nn.Module:
    """timm's model with random weights. Raises: UsageError when timm cannot build it."""
    try:
        return timm.create_model(name, **arguments)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"timm could not build {name} with {arguments}: {error}", "correct --model-arg") from error


def clean_accuracy(story: Story, model: nn.Module, weights: Path) -> float:
    load_weights(model, read_state(weights), str(weights))
    folders = story.folders
    train, test = (
        demo_model.load_folders(part, folders.classes, rule_of(model)) for part in (folders.train, folders.test)
    )
    return demo_model.linear_probe_in_the_clear(model.eval(), train, test, story.options.seed)


def rule_of(model: nn.Module) -> ImageRule:
    return image_rule(model, family_of(model)[1].facts(model).input_shape)


def summarise(story: Story, rows: list[dict[str, Any]], clean: float, pictures: tuple[Picture, ...]) -> dict[str, Any]:
    """The document of the run; prints the table and writes the page."""
    uploads = rows[0].pop("uploads")
    for row in rows[1:]:
        row.pop("uploads")
    energies = [upload["energy_j"] for upload in uploads]
    manifest = manifests.from_bytes((story.root / "front" / "manifest.json").read_bytes())
    document = {
        "seed": story.options.seed,
        "shots": story.options.shots,
        "data": story.folders.note,
        "model": manifest.model,
        "split": manifest.cuts[0].index,
        "depth": manifest.cuts[0].depth,
        "kappa": DEFAULT_KAPPA,
        "sa_accuracy": rows[0]["accuracy"],
        "linear_probe_accuracy": rows[1]["accuracy"],
        "linear_probe_clean_accuracy": clean,
        "rows": rows,
        "bytes_per_image": rows[0]["bytes_per_image"],
        "codes_changed": uploads[0]["codes_changed"],
        "energy_j": None if None in energies else sum(energies),
        "energy_reason": next((upload["energy_reason"] for upload in uploads if upload["energy_j"] is None), None),
        "engine": uploads[0]["engine"],
        "devices": uploads,
        "stages_s": story.stages_s,
        "report": str(story.root / "report.html"),
    }
    page = replace(results(document), pictures=pictures)
    (story.root / "report.html").write_text(to_html(page))
    if story.options.format == "table":
        print("\n\n".join(map(to_text, page.tables)))
        print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))
        print(f"report: {document['report']}")
    return document


def results(document: dict[str, Any]) -> Results:
    names = {"split_adaptation": "split adaptation", "linear_probe": "linear probe, same uploads"}
    accuracy = [
        (names[row["strategy"]], row["kappa"], row["accuracy"], row["bytes_per_image"]) for row in document["rows"]
    ]
    accuracy.append(("linear probe in the clear, float model", None, document["linear_probe_clean_accuracy"], None))
    energy = document["energy_j"]
    return Results(
        title="Split adaptation demo",
        facts=(
            ("data", document["data"]),
            ("model", f"{document['model']}, cut after block {document['split']} of {document['depth']}"),
            ("few shots", f"{document['shots']} per class, seed {document['seed']}"),
            ("engine", document["engine"]),
            ("weight codes changed by noise", f"{100 * document['codes_changed']:.1f} %"),
            (
                "energy of the uploads",
                f"{energy:.1f} J" if energy is not None else f"unknown: {document['energy_reason']}",
            ),
        ),
        tables=(
            Table(
                "Accuracy on the site's test images, noise in training and inference",
                ("method", "kappa", "accuracy", "bytes per image"),
                tuple(accuracy),
                shares=("accuracy",),
                note="The row in the clear protects nothing: its distance is the price of protection.",
            ),
            Table("Seconds per stage", ("stage", "seconds"), tuple(document["stages_s"].items())),
        ),
        notes=("kappa is the feature noise in standard deviations per channel.",),
    )


if __name__ == "__main__":
    sys.exit(run_command(partial(main)))
