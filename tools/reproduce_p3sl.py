"""Run P3SL beside ASL, ARES, SSL and PSL on a modelled fleet: one row for each model, method, noise and seed.

Each baseline runs twice: with sigma 2.5 everywhere, as published, and with P3SL's own noise table. A finished row is
kept in DIR/rows and not computed again. Several commands may work on one DIR: each takes rows (with `--leak` splits of
the leakage tables) that no other is at, and `--table` puts together what is there. What a row is is
`reproduce_p3sl_rows`' part. All joules and seconds of an epoch are modelled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.console import say
from contract.errors import UsageError
from contract.leakage import Table
from tools.fleet_file import PAPER, environments_of, load_fleet
from tools.kept_rows import Row, claimed
from tools.reproduce_options import (
    add_place,
    add_seeds,
    add_test_images,
    add_time_limit,
    check_counts,
    check_known,
    check_rate,
    check_test_images,
    read_only,
    refuse_with_quick,
    study_parser,
    take_defaults,
    texts,
    world_of,
)
from tools.reproduce_p3sl_rows import COPY, METHODS, NOISES, TABLE, P3slCell, P3slLaboratory, P3slRates
from tools.reproduce_p3sl_table import compare, results_of, summarise
from tools.reproduce_p3sl_world import P3slWorld, full_p3sl_world, leakage_table, quick_p3sl_world
from tools.reproduce_report import document_head, gather, open_study, report
from tools.reproduce_split_rows import LABEL_MODE, SCHEDULE
from tools.reproduce_split_world import ARCHIVE, FULL_CLASSES
from tools.reproduce_world import ROOT, alone, digest_of

ROW_SCHEMA = 2
MODELS = {"quick": ("resnet18",), "full": ("vgg16_bn", "resnet18")}
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {
        "models": list(MODELS["quick"]), "seeds": [0], "epochs": 10, "learning_rate": 0.15, "batch": 8,
        "engine": "onnxruntime",
    },
    "full": {
        "models": list(MODELS["full"]), "seeds": [0, 1, 2], "epochs": 10, "learning_rate": 0.01, "batch": 64,
        "engine": "torch",
    },
}  # fmt: skip
TEST_IMAGES = 2000
USUAL = [method for method in METHODS if method != COPY]


def main(argv: Sequence[str]) -> int:
    started_s, options = time.monotonic(), parse(argv)
    root = open_study(options)
    fleets = {name: load_fleet(options.fleet, name) for name in options.environments}
    devices = tuple(device.name for device in fleets[options.environments[0]].devices)
    world = prepare(options, (options.world or root / "scratch" / f"p3sl-{world_of(options)}").resolve(), devices)
    cells = cells_of(options)
    if options.prepare:
        for model in options.models:
            world.package(model)
        say(f"{world.split.root} is ready for {len(cells)} rows")
        return 0
    if options.leak:
        done = [model for model in options.models if leakage_table(world, model, options.threads) is not None]
        say(f"leakage tables of {', '.join(done) or 'no model'} are whole")
        return 0
    rates = P3slRates(
        options.epochs, options.batch, options.learning_rate, options.aggregate_every, options.fsim_threshold,
    )  # fmt: skip
    laboratory = P3slLaboratory(world, fleets, options.engine, rates, options.threads)
    tables: dict[str, Table] = {}

    def find(cell: P3slCell, may_compute: bool, which: str) -> Row | None:
        return row_of(options, world, cell, root / "rows", laboratory if may_compute else None, tables, which)

    rows = gather(options, root, cells, started_s, find, line_of)
    document = document_of(options, world, rows, len(cells))
    report(options, root, document, results_of(document), tables=3)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study_parser("p3sl", __doc__)
    parser.add_argument("--models", type=texts, help="default: " + ",".join(MODELS["full"]))
    parser.add_argument("--methods", type=texts, default=USUAL, help=f"default: {','.join(USUAL)}; also: {COPY}")
    parser.add_argument("--noises", type=texts, default=list(NOISES), help="of the baselines (default: 2.5,table)")
    parser.add_argument("--environments", type=texts, default=["A"], help="of the fleet, such as A,B (default: A)")
    add_seeds(parser)
    parser.add_argument("--only", metavar="MODEL/METHOD/NOISE/ENVIRONMENT/SEED", help="one row")
    parser.add_argument("--epochs", type=int, help="default: 10")
    parser.add_argument("--aggregate-every", type=int, default=5, help="epochs, R (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="images of a batch (default: 8 with --quick, else 64)")
    parser.add_argument("--learning-rate", type=float, help="highest of the cosine (default: 0.15 with --quick, 0.01)")
    parser.add_argument(
        "--fsim-threshold",
        type=float,
        default=0.0,
        metavar="T",
        help="T_FSIM where the leakage table has none (default: what its splits show least of without noise)",
    )
    parser.add_argument("--fleet", type=Path, default=PAPER, metavar="FILE", help="devices (default: the paper's)")
    add_test_images(parser, TEST_IMAGES)
    add_time_limit(parser)
    action = add_place(parser, ARCHIVE)
    action.add_argument("--leak", action="store_true", help="attack parts for their leakage tables, and stop")
    options = parser.parse_args(argv)
    take_defaults(options, DEFAULTS[world_of(options)])
    if options.only is not None:
        form = "MODEL/METHOD/NOISE/ENVIRONMENT/SEED"
        model, method, noise, environment, seed = read_only(options.only, form, "vgg16_bn/ssl/2.5/A/0")
        options.models, options.methods, options.noises = [model], [method], [noise]
        options.environments, options.seeds = [environment], [int(seed)]
    check(options)
    options.test_images = options.test_images or TEST_IMAGES
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option; ConfigError for a fleet that is none."""
    check_known("model", options.models, MODELS[world_of(options)])
    check_known("method", options.methods, tuple(METHODS))
    check_known("noise", options.noises, NOISES)
    check_known("environment", options.environments, environments_of(options.fleet))
    refuse_with_quick(options, "--shared", "--test-images")
    check_counts(options, {"epochs": 1, "aggregate-every": 1, "batch": 1, "threads": 1, "seeds": 0})
    check_rate(options)
    check_test_images(options.test_images, FULL_CLASSES)
    if not 0.0 <= options.fsim_threshold < 1.0:
        raise UsageError(f"--fsim-threshold should be between 0 and 1, found {options.fsim_threshold}", "correct it")


def prepare(options: argparse.Namespace, root: Path, devices: tuple[str, ...]) -> P3slWorld:
    """The world with its images; whoever comes second waits until they are there."""
    with alone(root):
        if options.quick:
            world = quick_p3sl_world(root, devices)
        else:
            world = full_p3sl_world(root, options.shared or ROOT.parent / "shared", options.test_images, devices)
        _ = world.split.test_folder(), world.public_folder
        for seed in [] if options.table or options.leak else options.seeds:
            for device in devices:
                world.split.train_folder(device, seed)
    return world


def cells_of(options: argparse.Namespace) -> list[P3slCell]:
    """All cells, the first seed's first; P3SL has its own noise alone."""
    return [
        P3slCell(model, method, noise, environment, seed)
        for seed in options.seeds
        for environment in options.environments
        for model in options.models
        for method in options.methods
        for noise in (options.noises if METHODS[method] != "p3sl" else [TABLE])
    ]


def row_of(
    options: argparse.Namespace, world: P3slWorld, cell: P3slCell, folder: Path, laboratory: P3slLaboratory | None,
    tables: dict[str, Table], which: str,
) -> Row | None:  # fmt: skip
    """A cell's row: from `folder` where it is finished, else computed and kept; None where it may not be (without a
    laboratory), or another command is at it."""
    path = path_of(folder, options, world, cell)
    if laboratory is None and not path.exists():
        return None
    head = head_of(options, world, cell, digest_of(world.package(cell.model)))
    if laboratory is None:
        return claimed(path, head, None)

    def compute() -> Row:
        say(f"== row {which}: {path.stem}")
        return laboratory.row(cell, table_of(world, cell.model, options.threads, tables))

    return claimed(path, head, compute)


def path_of(folder: Path, options: argparse.Namespace, world: P3slWorld, cell: P3slCell) -> Path:
    name = f"{cell.model}-{cell.method}-{cell.noise}-{cell.environment}-seed{cell.seed}"
    return folder / f"p3sl-{world.split.name}-{options.engine}-{name}.json"


def head_of(options: argparse.Namespace, world: P3slWorld, cell: P3slCell, digest: str) -> Row:
    """What a row answers: another question is another row."""
    settings = ("epochs", "batch", "learning_rate", "aggregate_every", "fsim_threshold")
    return {
        "row_schema": ROW_SCHEMA, "study": "p3sl", "world": world.split.name, "engine": options.engine,
        "package_digest": digest, "test_images": len(world.split.names("test")), **asdict(cell),
        **{name: getattr(options, name) for name in settings},
    }  # fmt: skip


def table_of(world: P3slWorld, model: str, threads: int, known: dict[str, Table]) -> Table:
    """Raises: UsageError where another command is still measuring."""
    if model not in known:
        with alone(world.split.root / "leaking"):
            table = leakage_table(world, model, threads)
        if table is None:
            raise UsageError(f"another command still measures the leakage table of {model}", "wait for its end")
        known[model] = table
    return known[model]


def line_of(row: Row) -> str:
    """One row in one line."""
    splits = " ".join(str(each["split"]) for each in row["devices"].values())
    return (
        f"{row['method']}, {row['setting']}, seed {row['seed']}: {100 * row['accuracy']:.2f} %; splits {splits}; FSIM "
        f"{row['fsim_total']:.2f}; {row['energy_j']:.0f} J and {row['epoch_s']:.0f} s an epoch (modelled); "
        f"{row['bytes'] / 1e6:.0f} MB; {row['seconds']} s"
    )


def document_of(options: argparse.Namespace, world: P3slWorld, rows: Sequence[Row], asked: int) -> Row:
    """What --format json prints."""
    cells = summarise(rows)
    return {
        **document_head("p3sl", world.split.name, world.split.note, options, "epochs", "batch", "aggregate_every"),
        "learning_rate": f"{options.learning_rate:g}, {SCHEDULE}", "label_mode": LABEL_MODE,
        "rows_missing": asked - len(rows), "cells": cells, "pairs": compare(cells), "rows": list(rows),
    }  # fmt: skip
