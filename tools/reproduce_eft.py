"""Run EFTViT beside Fed-Head, Fed-Bias, Fed-Prompt, Fed-LoRA, Fed-Full and FEDBFPT: one row for each setting and seed.

Studies: main (all methods), every (EFTViT that sends every image's features once), mask (EFTViT over mask ratios),
blocks (over M_l), threshold (over the sampling threshold), full (Fed-Full on masked images), rates (all methods over
learning rates, at the first seed and beta; `--rates best` then takes the best of them).
A finished row is kept in DIR/rows and not computed again; several commands may work on one DIR, each on a share of its
own (`--share 3/16`), and `--table` puts together what is there. What a row is is `reproduce_eft_rows`' part.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from contract.asks import EVERY_IMAGE
from contract.console import print_document, say
from contract.errors import UsageError
from server_runtime import split_model
from server_runtime.report import to_text
from server_runtime.training_macs import sizes_of
from tools.kept_rows import Row, claimed
from tools.reproduce_devices import training_folder
from tools.reproduce_eft_cost import COST_RATIOS, measured
from tools.reproduce_eft_cost import results_of as cost_of
from tools.reproduce_eft_leaks import AFTER, leaks, table_of
from tools.reproduce_eft_rows import EftCell, EftLaboratory, EftRates
from tools.reproduce_eft_table import named, results_of, summarise, with_result
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
from tools.reproduce_options import (
    add_place,
    add_seeds,
    add_share,
    add_test_images,
    check_counts,
    check_known,
    check_test_images,
    read_only,
    refuse_with_quick,
    study_parser,
    take_defaults,
    texts,
)
from tools.reproduce_report import document_head, gather, open_study, report
from tools.reproduce_split_rows import LABEL_MODE
from tools.reproduce_split_world import ARCHIVE, FULL_CLASSES
from tools.reproduce_world import FULL_WEIGHTS, ROOT, alone, digest_of
from tools.share import WHOLE, share_of

ROW_SCHEMA = 1
STUDIES = ("main", "every", "mask", "blocks", "threshold", "full", "rates")
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
EVERY_RATIOS = (RATIO, 0.5)
FACTORS = (1 / 3, 3.0, 9.0)  # of the others' rates
TEST_IMAGES, DEVICES, COST_BATCHES = 1000, 20, (8, 32)


def main(argv: Sequence[str]) -> int:
    started_s, options = time.monotonic(), parse(argv)
    root = open_study(options)
    rates = {**RATES, **(best_rates(root / "rows", options) if options.rates is None else options.rates)}
    cells = cells_of(options, rates)
    mine = share_of(cells, options.share, lambda cell: cell)
    world = prepare(options, root / "scratch" / f"eft-{world_of(options)}", mine)
    if options.prepare:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda v: export_variant(world, v), dict.fromkeys(cell.variant for cell in mine)))
        say(f"{world.root}: {len(world.names('train'))} training and {len(world.names('test'))} test images")
        return 0
    if options.cost:
        show_cost(options, world)
        return 0
    effort = EftRates(
        options.rounds, options.local_epochs, options.fraction, options.batch, options.judge_every, SCHEDULE, WARMUP,
    )  # fmt: skip
    meter = open_meter() if options.share == WHOLE else None
    laboratory = EftLaboratory(world, options.engine, effort, options.threads, meter)
    if options.leaks:
        show_leaks(options, world, laboratory, cells[0])
        return 0

    def find(cell: EftCell, may_compute: bool, which: str) -> Row | None:
        return finish(root / "rows", options, world, cell, laboratory if may_compute and cell in mine else None, which)

    document = document_of(options, world, gather(options, root, cells, started_s, find, line_of))
    report(options, root, document, results_of(document))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study_parser("eft_vit", __doc__)
    parser.add_argument("--dataset", choices=["cifar10", "pacs"], default="cifar10", help="(default: %(default)s)")
    parser.add_argument("--studies", type=texts, default=["main"], help="of: " + ",".join(STUDIES))
    parser.add_argument("--methods", type=texts, default=list(METHODS), help="default: " + ",".join(METHODS))
    parser.add_argument("--betas", type=reals, help="Dirichlet (default: 0.1 with --quick, else 0.1,1)")
    add_seeds(parser)
    parser.add_argument("--only", metavar="METHOD/BETA/SEED", help="one row of the main study")
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
    add_test_images(parser, TEST_IMAGES)
    parser.add_argument("--jobs", type=int, default=1, help="exports at a time with --prepare (default: %(default)s)")
    add_share(parser)
    action = add_place(parser, f"{ARCHIVE} and {FULL_WEIGHTS}")
    action.add_argument(
        "--cost",
        action="store_true",
        help="what a step costs on the device, by mask ratio or (--studies blocks) by local blocks, and stop",
    )
    action.add_argument("--leaks", action="store_true", help="what the server reads back from features, and stop")
    options = parser.parse_args(argv)
    if options.leaks:
        options.methods, options.rounds = ["eft_vit"], options.rounds or AFTER[-1]
    take_defaults(options, DEFAULTS[world_of(options)])
    if options.only is not None:
        method, beta, seed = read_only(options.only, "METHOD/BETA/SEED", "eft_vit/0.1/0")
        options.studies, options.methods = ["main"], [method]
        options.betas, options.seeds = only_beta(beta), [int(seed)]
    check(options)
    options.test_images = options.test_images or TEST_IMAGES
    return options


def world_of(options: argparse.Namespace) -> str:
    return "quick" if options.quick else {"cifar10": "full", "pacs": "pacs"}[options.dataset]


def only_beta(text: str) -> list[float]:
    """Raises: UsageError."""
    try:
        return [float(text)]
    except ValueError as error:
        raise UsageError(f"--only should have a number as BETA, found {text!r}", "as in eft_vit/0.1/0") from error


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
    check_known("study", options.studies, STUDIES)
    check_known("method", options.methods, tuple(METHODS))
    refuse_with_quick(options, "--shared", "--test-images")
    if options.dataset != "cifar10" and (options.quick or options.test_images is not None):
        raise UsageError("--dataset pacs has its own images and test images", "leave out --quick and --test-images")
    lowest = dict.fromkeys(("rounds", "local-epochs", "batch", "judge-every", "threads", "jobs"), 1)
    check_counts(options, {**lowest, "seeds": 0})
    if not 0 < options.fraction <= 1:
        raise UsageError(f"--fraction should be more than 0 and at most 1, found {options.fraction}", "correct it")
    if min(options.betas) <= 0:
        raise UsageError(f"--betas should be more than 0, found {min(options.betas)}", "as in --betas 0.1,1")
    check_test_images(options.test_images, FULL_CLASSES)


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
        for beta in options.betas if "every" in options.studies else ():
            found += [eft(beta, seed, threshold=EVERY_IMAGE, ratio=ratio) for ratio in EVERY_RATIOS]
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
    folder: Path, options: argparse.Namespace, world: EftWorld, cell: EftCell, laboratory: EftLaboratory | None,
    which: str,
) -> Row | None:  # fmt: skip
    """A cell's row: from `folder` where it is finished, else computed and kept; None where it may not be (without a
    laboratory), or another command is at it. What is only read is taken of whatever package."""
    path = path_of(folder, options, world, cell)
    if laboratory is None:
        return claimed(path, head_of(options, world, cell, None), None)

    def compute() -> Row:
        say(f"== row {which}: {named(asdict(cell))}, seed {cell.seed}")
        return laboratory.row_of(cell)

    return claimed(path, head_of(options, world, cell, digest_of(export_variant(world, cell.variant))), compute)


def path_of(folder: Path, options: argparse.Namespace, world: EftWorld, cell: EftCell) -> Path:
    rates = f"lr{cell.rate:.3g}-{cell.server_rate:.3g}"
    name = f"{cell.variant.name}-beta{cell.beta:g}-t{cell.threshold:g}-{rates}-seed{cell.seed}"
    return folder / f"eft-{world.name}-{options.engine}-{name}.json"


def head_of(options: argparse.Namespace, world: EftWorld, cell: EftCell, digest: str | None) -> Row:
    """What a row answers: another question is another row."""
    head: Row = {
        "row_schema": ROW_SCHEMA, "study": "eft_vit", "world": world.name, "engine": options.engine,
        "rounds": options.rounds, "local_epochs": options.local_epochs, "fraction": options.fraction,
        "batch": options.batch, "test_images": len(world.names("test")), **asdict(cell),
    }  # fmt: skip
    return head if digest is None else {**head, "package_digest": digest}


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
    """Measured here, on onnxruntime, beside the counter: over mask ratios, or (study blocks) over local blocks."""
    cells = [(LOCAL, ratio) for ratio in COST_RATIOS]
    if "blocks" in options.studies:
        cells = [(local, RATIO) for local in sorted({LOCAL, *BLOCKS})]
    fronts = {local: export_variant(world, Variant("eft_vit", RATIO, local)) for local, _ in cells}
    sizes = sizes_of(split_model.load(training_folder(fronts[cells[0][0]]), torch.device("cpu")).module)
    rows = [measured(fronts[local], sizes, local, ratio, batch) for batch in COST_BATCHES for local, ratio in cells]
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
        **document_head("eft_vit", world.name, world.note, options, "rounds", "local_epochs", "fraction", "batch"),
        "label_mode": LABEL_MODE, "schedule": f"{SCHEDULE}, {WARMUP} round of warm-up",
        "cells": summarise(rows, options.target), "rows": list(map(with_result, rows)),
    }  # fmt: skip
