"""Run EFTViT beside Fed-Head, Fed-Bias, Fed-Prompt, Fed-LoRA, Fed-Full and FEDBFPT: one row for each setting and seed.

Studies: main (all methods), mask (EFTViT over mask ratios), blocks (over M_l), threshold (over the sampling threshold),
full (Fed-Full on masked images), rates (all methods over learning rates, at the first seed and beta; `--rates best`
then takes the best of them).
A finished row is kept in DIR/rows and not computed again; several commands may work on one DIR, each on a share of its
own (`--share 3/16`), and `--table` puts together what is there. What a row is is `reproduce_eft_rows`' part.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from contract import manifest as manifests
from contract.canonical import INT_MAX
from contract.console import ArgumentParser, print_document, say
from contract.errors import UsageError, suggest
from contract.output import open_output
from server_runtime import backend_folder, split_model
from server_runtime.files import write_atomic
from server_runtime.report import to_html, to_text
from server_runtime.training_macs import sizes_of
from tools.kept_rows import finished
from tools.reproduce_eft_cost import measure_all
from tools.reproduce_eft_cost import results_of as cost_of
from tools.reproduce_eft_leaks import AFTER, leaks, table_of
from tools.reproduce_eft_rows import EftCell, EftLaboratory, EftRates
from tools.reproduce_eft_table import Row, named, results_of, summarise, with_result
from tools.reproduce_eft_world import (
    METHODS,
    EftWorld,
    Variant,
    export_variant,
    folders_of,
    full_eft_world,
    pacs_eft_world,
    quick_eft_world,
)
from tools.reproduce_energy import open_meter
from tools.reproduce_options import numbers, texts
from tools.reproduce_split_rows import LABEL_MODE
from tools.reproduce_split_world import ARCHIVE, FULL_CLASSES
from tools.reproduce_world import FULL_WEIGHTS, ROOT, alone
from tools.share import WHOLE, read_share, share_of

ROW_SCHEMA = 1
STUDIES = ("main", "mask", "blocks", "threshold", "full", "rates")
RATIO, LOCAL, THRESHOLD = 0.75, 2, 1.0
RATIOS, BLOCKS, THRESHOLDS = (0.0, 0.25, 0.5, 0.85, 0.95), (1, 3, 4, 6), (1.5, 2.0, 0.0)
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {"seeds": [0], "rounds": 6, "local_epochs": 2, "batch": 16, "engine": "onnxruntime", "betas": [0.1]},
    "full": {"seeds": [0, 1, 2], "rounds": 10, "local_epochs": 2, "batch": 64, "engine": "torch", "betas": [0.1, 1.0]},
    "pacs": {"seeds": [0, 1, 2], "rounds": 10, "local_epochs": 2, "batch": 64, "engine": "torch", "betas": [0.1]},
}
FRACTION, JUDGE_EVERY, WARMUP, SCHEDULE = 0.5, 2, 1, "cosine"
RATES = {  # highest learning rate of AdamW, on devices and on the server
    "eft_vit": (3e-5, 5e-4), "fed_head": (5e-3, 0.0), "fed_bias": (2e-3, 0.0), "fed_prompt": (5e-3, 0.0),
    "fed_lora": (1e-3, 0.0), "fed_full": (2e-4, 0.0), "fed_bfpt": (5e-4, 0.0),
}  # fmt: skip
EFT_RATES = (
    (3e-5, 2e-4), (3e-5, 1e-3), (1e-4, 2e-4), (1e-4, 5e-4), (1e-5, 5e-4), (1e-5, 1e-3), (3e-6, 5e-4), (3e-6, 1e-3),
)  # fmt: skip
FACTORS = (1 / 3, 3.0, 9.0)  # of the others' rates
TEST_IMAGES, DEVICES, COST_BATCHES = 1000, 20, (8, 32)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    root = open_output(options.output)
    rates = {**RATES, **(best_rates(root / "rows", options) if options.rates is None else options.rates)}
    cells = share_of(cells_of(options, rates), options.share or WHOLE, lambda cell: cell)
    world = prepare(options, root / "scratch" / f"eft-{world_of(options)}", cells)
    if options.prepare:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda v: export_variant(world, v), dict.fromkeys(cell.variant for cell in cells)))
        say(f"{world.root}: {len(world.names('train'))} training and {len(world.names('test'))} test images")
        return 0
    if options.cost:
        show_cost(options, world)
        return 0
    effort = EftRates(
        options.rounds, options.local_epochs, options.fraction, options.batch, options.judge_every, SCHEDULE, WARMUP,
    )  # fmt: skip
    meter = open_meter() if options.share is None else None
    laboratory = EftLaboratory(world, options.engine, effort, options.threads, meter)
    if options.leaks:
        show_leaks(options, world, laboratory, cells[0])
        return 0
    rows, started_s = [], time.monotonic()
    for number, cell in enumerate(cells, start=1):
        if time.monotonic() - started_s > options.stop_after_s:
            say(f"{len(cells) - number + 1} rows are left, as --stop-after-s says")
            break
        row = finish(root / "rows", options, world, cell, laboratory, f"{number} of {len(cells)}")
        rows += [] if row is None else [row]
    if options.share is not None:
        return 0
    if not rows:
        raise UsageError(f"{root} holds no finished row of these", "run the same command without --table first")
    report(options, root, document_of(options, world, rows))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce eft_vit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits and a small model: minutes, no archive")
    parser.add_argument("--dataset", choices=["cifar10", "pacs"], default="cifar10", help="(default: %(default)s)")
    parser.add_argument("--studies", type=texts, default=["main"], help="of: " + ",".join(STUDIES))
    parser.add_argument("--methods", type=texts, default=list(METHODS), help="default: " + ",".join(METHODS))
    parser.add_argument("--betas", type=reals, help="Dirichlet (default: 0.1 with --quick, else 0.1,1)")
    parser.add_argument("--seeds", type=numbers, help="default: 0 with --quick, else 0,1,2")
    parser.add_argument("--only", metavar="METHOD/BETA/SEED", help="one row of the main study")
    parser.add_argument(
        "--share", type=read_share, metavar="I/N", help="every N-th row from the I-th on, and no tables"
    )
    parser.add_argument("--stop-after-s", type=float, default=math.inf, metavar="S", help="begin no row after that")
    parser.add_argument("--rounds", type=int, help="default: 6 with --quick, else 10")
    parser.add_argument("--local-epochs", type=int, help="epochs of a device in a round (default: 2)")
    parser.add_argument("--fraction", type=float, default=FRACTION, help="devices of a round (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="images of a batch (default: 16 with --quick, else 64)")
    parser.add_argument(
        "--rates", type=rates_of, default={}, metavar="METHOD=RATE,...",
        help="highest learning rates, such as eft_vit=3e-5:5e-4 (device:server); best: of the rows of --studies rates",
    )  # fmt: skip
    parser.add_argument("--judge-every", type=int, default=JUDGE_EVERY, help="rounds (default: %(default)s)")
    parser.add_argument("--target", type=float, help="accuracy to reach, 0 to 1 (default: what every method reaches)")
    parser.add_argument("--engine", choices=["torch", "onnxruntime"], help="default: onnxruntime with --quick")
    parser.add_argument("--test-images", type=int, metavar="N", help=f"default: {TEST_IMAGES}")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="exports at a time with --prepare (default: %(default)s)")
    parser.add_argument("--shared", type=Path, metavar="DIR", help=f"holds {ARCHIVE} and {FULL_WEIGHTS}")
    parser.add_argument("--world", type=Path, metavar="DIR", help="images and packages; made where missing")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--prepare", action="store_true", help="make images and packages, and stop")
    action.add_argument("--cost", action="store_true", help="what a step costs on the device, by mask ratio, and stop")
    action.add_argument("--leaks", action="store_true", help="what the server reads back from features, and stop")
    action.add_argument("--table", action="store_true", help="compute nothing: the rows that are finished")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-reproduce"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="DIR", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.leaks:
        options.methods, options.rounds = ["eft_vit"], options.rounds or AFTER[-1]
    for name, value in DEFAULTS[world_of(options)].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.only is not None:
        options.methods, options.betas, options.seeds = read_only(options.only)
        options.studies = ["main"]
    check(options)
    options.test_images = options.test_images or TEST_IMAGES
    return options


def world_of(options: argparse.Namespace) -> str:
    return "quick" if options.quick else {"cifar10": "full", "pacs": "pacs"}[options.dataset]


def read_only(text: str) -> tuple[list[str], list[float], list[int]]:
    """Raises: UsageError."""
    parts = text.split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise UsageError(f"--only should be METHOD/BETA/SEED, found {text!r}", "as in --only eft_vit/0.1/0")
    return [parts[0]], reals(parts[1]), [int(parts[2])]


def reals(text: str) -> list[float]:
    """Comma-separated numbers, each once."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from error


def rates_of(text: str) -> dict[str, tuple[float, float]] | None:
    """METHOD=RATE or METHOD=DEVICE:SERVER, separated by commas; None for `best`."""
    found: dict[str, tuple[float, float]] = {}
    for part in [] if text == "best" else text.split(","):
        name, _, value = part.partition("=")
        device, _, server = value.partition(":")
        try:
            found[name] = (float(device), float(server or 0.0))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected METHOD=RATE, found {part!r}") from error
        if name not in METHODS or not all(math.isfinite(each) for each in found[name]) or found[name][0] <= 0:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(METHODS)} = a rate above 0, found {part!r}")
    return None if text == "best" else found


def best_rates(folder: Path, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The rates with which each method came furthest at the first seed and beta, for PACS on CIFAR-10. Test images
    decide, so that these rows flatter every method alike. Raises: UsageError when a method has no row."""
    first = {"seed": options.seeds[0], "beta": options.betas[0], "engine": options.engine, "rounds": options.rounds}
    tuned = "quick" if options.quick else "full"
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob(f"eft-{tuned}-*.json"))]
    rows = [row for row in rows if all(row[name] == value for name, value in first.items())]
    found = {}
    for method in options.methods:
        own = [row for row in rows if row["method"] == method and is_usual(row)]
        if not own:
            raise UsageError(f"there is no finished row of {method} to choose rates by", "run --studies rates first")
        best = max(own, key=lambda row: row["curve"][-1]["accuracy"])
        found[method] = (best["rate"], best["server_rate"])
    return found


def is_usual(row: Row) -> bool:
    """Whether nothing but rates is varied."""
    if row["method"] != "eft_vit":
        return not row["ratio"]
    return (row["ratio"], row["local"], row["threshold"]) == (RATIO, LOCAL, THRESHOLD)


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    for what, given, known in (("study", options.studies, STUDIES), ("method", options.methods, METHODS)):
        for name in given:
            if name not in known:
                raise UsageError(f"there is no {what} {name!r}{suggest(name, known)}", f"known: {', '.join(known)}")
    for flag, value in (("--shared", options.shared), ("--test-images", options.test_images)):
        if options.quick and value is not None:
            raise UsageError(f"{flag} belongs to the full reproduction", f"leave out --quick, or {flag}")
    if options.dataset != "cifar10" and (options.quick or options.test_images is not None):
        raise UsageError("--dataset pacs has its own images and test images", "leave out --quick and --test-images")
    lowest = ("rounds", "local_epochs", "batch", "judge_every", "threads", "jobs")
    for flag, value, least in [(name, getattr(options, name), 1) for name in lowest] + [
        ("seeds", seed, 0) for seed in options.seeds
    ]:
        if not least <= value <= INT_MAX:
            raise UsageError(f"--{flag.replace('_', '-')} should be {least} or more, found {value}", "correct it")
    if not 0 < options.fraction <= 1:
        raise UsageError(f"--fraction should be more than 0 and at most 1, found {options.fraction}", "correct it")
    if min(options.betas) <= 0:
        raise UsageError(f"--betas should be more than 0, found {min(options.betas)}", "as in --betas 0.1,1")
    if options.test_images is not None and (options.test_images < 1 or options.test_images % FULL_CLASSES):
        raise UsageError(
            f"--test-images should be a multiple of {FULL_CLASSES}, found {options.test_images}",
            "the same number is drawn of each class",
        )


def cells_of(options: argparse.Namespace, rates: Mapping[str, tuple[float, float]]) -> list[EftCell]:
    """All cells, the first seed and the most uneven deal first: what is cut off at the end is a repetition."""

    def eft(beta: float, seed: int, **other: Any) -> EftCell:
        usual = EftCell("eft_vit", beta, RATIO, LOCAL, THRESHOLD, *rates["eft_vit"], seed)
        return replace(usual, **other)

    def cell(method: str, beta: float, seed: int) -> EftCell:
        return eft(beta, seed) if method == "eft_vit" else EftCell(method, beta, 0.0, 0, 1.0, *rates[method], seed)

    found, first = [], options.betas[0]
    for seed in options.seeds:
        for beta in options.betas if "main" in options.studies else ():
            found += [cell(method, beta, seed) for method in options.methods]
        if "rates" in options.studies and seed == options.seeds[0]:
            for method in options.methods:
                usual = cell(method, first, seed)
                pairs = [(usual.rate, usual.server_rate)]
                pairs += EFT_RATES if method == "eft_vit" else [(usual.rate * factor, 0.0) for factor in FACTORS]
                found += [replace(usual, rate=rate, server_rate=server) for rate, server in pairs]
        if "mask" in options.studies:
            found += [eft(first, seed, ratio=ratio) for ratio in RATIOS]
        if "blocks" in options.studies:
            found += [eft(first, seed, local=local) for local in BLOCKS]
        if "threshold" in options.studies:
            found += [eft(first, seed, threshold=threshold) for threshold in THRESHOLDS]
        if "full" in options.studies:
            found += [replace(cell("fed_full", first, seed), ratio=ratio) for ratio in (0.0, RATIO)]
    return list(dict.fromkeys(found))


def prepare(options: argparse.Namespace, default: Path, cells: Sequence[EftCell]) -> EftWorld:
    """The world with its images; whoever comes second waits until they are there."""
    root = (options.world or default).resolve()
    with alone(root):
        if options.quick:
            world = quick_eft_world(root)
        elif options.dataset == "pacs":
            world = pacs_eft_world(root, options.shared or ROOT.parent / "shared", DEVICES)
        else:
            world = full_eft_world(root, options.shared or ROOT.parent / "shared", options.test_images, DEVICES)
        if not options.table:
            folders_of(world, list(dict.fromkeys((cell.beta, cell.seed) for cell in cells)))
    return world


def finish(
    folder: Path, options: argparse.Namespace, world: EftWorld, cell: EftCell, laboratory: EftLaboratory, which: str
) -> Row | None:
    """A cell's row: from `folder` where it is finished, else computed and kept; with --table None instead."""
    rates = f"lr{cell.rate:.3g}-{cell.server_rate:.3g}"
    name = f"{cell.variant.name}-beta{cell.beta:g}-t{cell.threshold:g}-{rates}-seed{cell.seed}"
    path = folder / f"eft-{world.name}-{options.engine}-{name}.json"
    if options.table and not path.exists():
        return None
    head: Row = {
        "row_schema": ROW_SCHEMA, "study": "eft_vit", "world": world.name, "engine": options.engine,
        "rounds": options.rounds, "local_epochs": options.local_epochs, "fraction": options.fraction,
        "batch": options.batch, "test_images": len(world.names("test")), **asdict(cell),
    }  # fmt: skip
    if not options.table:
        front = export_variant(world, cell.variant)
        head["package_digest"] = manifests.digest((front / manifests.MANIFEST_NAME).read_bytes()).hex()
    row = finished(path, head)
    if row is None and not options.table:
        say(f"== row {which}: {named(head)}, seed {cell.seed}")
        row = {**head, **laboratory.row_of(cell)}
        write_atomic(path, (json.dumps(row, indent=2, allow_nan=False) + "\n").encode())
        row = json.loads(path.read_text())  # a row that was kept looks the same as one that was not
    if row is not None:
        say(line_of(row))
    return row


def line_of(row: Row) -> str:
    """One row in one line."""
    last, curve = row["curve"][-1], row["curve"]
    up, down = (sum(each[name] for each in curve) / 1e6 for name in ("bytes_up", "bytes_down"))
    return (
        f"{named(row)}, seed {row['seed']}: round {last['round']}: test {100 * last['accuracy']:.2f} %, own classes "
        f"{100 * last['own_accuracy']:.2f} %; {up:.1f} MB up, {down:.1f} MB down; {row['training_device']}; "
        f"{row['seconds']} s"
    )


def show_cost(options: argparse.Namespace, world: EftWorld) -> None:
    """Measured here, on onnxruntime, beside the counter."""
    front = export_variant(world, Variant("eft_vit", RATIO, LOCAL))
    folder = backend_folder.read(front.with_name(f"{front.name}.backend"))
    assert isinstance(folder, backend_folder.TrainingFolder)
    sizes = sizes_of(split_model.load(folder, torch.device("cpu")).module)
    rows = [row for batch in COST_BATCHES for row in measure_all(front, sizes, LOCAL, batch)]
    if options.format == "json":
        print_document("reproduce", {"study": "eft_vit-cost", "world": world.name, "rows": rows})
        return
    page = cost_of(rows, world.model)
    print("\n\n".join(map(to_text, page.tables)))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))


def show_leaks(options: argparse.Namespace, world: EftWorld, laboratory: EftLaboratory, cell: EftCell) -> None:
    """By the ridge, from what EFTViT's devices sent."""
    found = leaks(laboratory, cell, world.deal(cell.beta, cell.seed), len(world.classes))
    if options.format == "json":
        rows = [asdict(each) for each in found]
        print_document("reproduce", {"study": "eft_vit-leaks", "world": world.name, "data": world.note, "rows": rows})
        return
    print(to_text(table_of(found)))


def document_of(options: argparse.Namespace, world: EftWorld, rows: Sequence[Row]) -> Row:
    """What --format json prints."""
    return {
        "study": "eft_vit", "world": world.name, "data": world.note, "engine": options.engine,
        "rounds": options.rounds, "local_epochs": options.local_epochs, "fraction": options.fraction,
        "batch": options.batch, "label_mode": LABEL_MODE,
        "schedule": f"{SCHEDULE}, {WARMUP} round of warm-up",
        "cells": summarise(rows, options.target), "rows": list(map(with_result, rows)),
    }  # fmt: skip


def report(options: argparse.Namespace, root: Path, document: Row) -> None:
    """rows.jsonl, the page, and the document or the tables on stdout."""
    page = results_of(document)
    lines = "".join(json.dumps(row) + "\n" for row in document["rows"])
    write_atomic(root / "rows.jsonl", lines.encode())
    write_atomic(root / "eft_vit.html", to_html(page).encode())
    if options.format == "json":
        print_document("reproduce", {**document, "report": str(root / "eft_vit.html")})
        return
    print("\n\n".join(map(to_text, page.tables)))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))
    print(f"report: {root / 'eft_vit.html'}")
