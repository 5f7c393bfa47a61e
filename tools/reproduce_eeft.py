"""Run EEFT beside what it is compared to: one row for each scenario, method and seed; curves, tables, pictures.

A finished row is kept in DIR/rows and not computed again. Several commands may work on one DIR: each takes rows that no
other is at (or with `--only` one), and `--table` puts together what is there. What a row is is `reproduce_eeft_rows`'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.console import say
from server_runtime.similarity import AUTOMATIC, CLEAR, CLOSE, REACH
from tools.kept_rows import Row, claimed
from tools.reproduce_eeft_rows import ABLATED, COMPARED, METHODS, VARIANTS, EeftCell, EeftLaboratory, EeftRates
from tools.reproduce_eeft_table import compare, results_of, summarise, with_result
from tools.reproduce_eeft_world import CIFAR, PACS, WEIGHTS, EeftWorld, export_modules, full_world, quick_world
from tools.reproduce_options import (
    add_place,
    add_seeds,
    add_time_limit,
    check_counts,
    check_known,
    check_rate,
    read_only,
    refuse_with_quick,
    study_parser,
    take_defaults,
    texts,
    world_of,
)
from tools.reproduce_report import document_head, gather, open_study, report
from tools.reproduce_world import ROOT, alone, digest_of

ROW_SCHEMA = 2
SCENARIOS = {"quick": ("user", "task"), "full": ("task", "user", "environment")}
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {
        "seeds": [0],
        "rounds": 10,
        "batch": 16,
        "learning_rate": 0.1,
        "body_learning_rate": 0.02,
        "engine": "onnxruntime",
    },
    "full": {
        "seeds": [0, 1, 2],
        "rounds": 10,
        "batch": 32,
        "learning_rate": 0.1,
        "body_learning_rate": 0.01,
        "engine": "torch",
    },
}


def main(argv: Sequence[str]) -> int:
    started_s = time.monotonic()
    options = parse(argv)
    root = open_study(options)
    world = make_world(options, (options.world or root / "scratch" / f"eeft-{world_of(options)}").resolve())
    cells = cells_of(options)
    if options.prepare:
        prepare(world, cells)
        return 0
    rates = EeftRates(
        options.rounds, options.local_epochs, options.batch, options.learning_rate, options.body_learning_rate,
        options.alone,
    )  # fmt: skip
    laboratory = EeftLaboratory(world, options.engine, rates, options.threads)

    def find(cell: EeftCell, may_compute: bool, which: str) -> Row | None:
        return finish(root / "rows", options, world, cell, laboratory if may_compute else None, which)

    document = document_of(options, world, gather(options, root, cells, started_s, find, line_of))
    report(options, root, document, results_of(document), tables=2)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study_parser("eeft", __doc__)
    parser.add_argument(
        "--scenarios", type=texts, help="default: task with --quick, else all of " + ",".join(SCENARIOS["full"])
    )
    parser.add_argument(
        "--methods", type=texts, help=f"default: {','.join(COMPARED)} (fewer with --quick); known: {','.join(METHODS)}"
    )
    parser.add_argument("--ablations", action="store_true", help=f"add {','.join(ABLATED)} (scenario task, first seed)")
    add_seeds(parser)
    parser.add_argument("--only", metavar="SCENARIO/METHOD/SEED", help="one row instead of the lists' product")
    parser.add_argument("--rounds", type=int, help="default: 10 with --quick, else 10")
    parser.add_argument(
        "--local-epochs", type=int, help="epochs of a device in one round (default: the scenario's, 1 or 3)"
    )
    parser.add_argument("--batch", type=int, help="images of a batch (default: 16 with --quick, else 32)")
    parser.add_argument("--learning-rate", type=float, help="of the modules, sgd with momentum 0.5 (default: 0.1)")
    parser.add_argument("--body-learning-rate", type=float, help="where the whole model is trained (default: 0.01)")
    parser.add_argument("--alone", type=int, default=3, help="rounds before EEFT averages (default: %(default)s)")
    add_time_limit(parser)
    add_place(parser, f"{CIFAR}, {PACS} and {WEIGHTS}")
    options = parser.parse_args(argv)
    take_defaults(options, DEFAULTS[world_of(options)])
    options.scenarios = options.scenarios or (["task"] if options.quick else list(SCENARIOS["full"]))
    options.methods = options.methods or [name for name in COMPARED if not (options.quick and name in VARIANTS)]
    if options.only is not None:
        scenario, method, seed = read_only(options.only, "SCENARIO/METHOD/SEED", "task/eeft/0")
        options.scenarios, options.methods, options.seeds, options.ablations = [scenario], [method], [int(seed)], False
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    check_known("scenario", options.scenarios, SCENARIOS[world_of(options)])
    check_known("method", options.methods, tuple(METHODS))
    refuse_with_quick(options, "--shared")
    check_counts(options, {"rounds": 1, "batch": 1, "threads": 1, "alone": 0, "local-epochs": 1, "seeds": 0})
    check_rate(options)
    check_rate(options, "--body-learning-rate")


def cells_of(options: argparse.Namespace) -> list[EeftCell]:
    """All cells, the first seed's first."""
    compared = [
        EeftCell(scenario, method, seed)
        for seed in options.seeds
        for scenario in options.scenarios
        for method in options.methods
    ]
    ablated = [EeftCell("task", method, options.seeds[0]) for method in ABLATED] if options.ablations else []
    return list(dict.fromkeys([*compared, *ablated]))


def make_world(options: argparse.Namespace, root: Path) -> EeftWorld:
    """The world with its images; whoever comes second waits until they are there."""
    with alone(root):
        if options.quick:
            return quick_world(root)
        return full_world(root, options.shared or ROOT.parent / "shared")


def prepare(world: EeftWorld, cells: Sequence[EeftCell]) -> None:
    """Packages and images of these cells."""
    for modules in dict.fromkeys(METHODS[cell.method].modules for cell in cells):
        export_modules(world, modules)
    make_folders(world, cells)
    say(f"{world.root} is ready for {len(cells)} rows")


def make_folders(world: EeftWorld, cells: Sequence[EeftCell]) -> None:
    """Each device's images as a folder, once."""
    with alone(world.root):
        for name, seed in dict.fromkeys((cell.scenario, cell.seed) for cell in cells):
            scenario = world.scenarios[name]
            for device, group in scenario.devices.items():
                world.train_folder(scenario, device, seed)
                world.test_folder(scenario, group)


def finish(
    folder: Path, options: argparse.Namespace, world: EeftWorld, cell: EeftCell, laboratory: EeftLaboratory | None,
    which: str,
) -> Row | None:  # fmt: skip
    """A cell's row: from `folder` where it is finished, else computed and kept; None where it may not be (without a
    laboratory), or another command is at it."""
    path = path_of(folder, options, world, cell)
    if laboratory is None and not path.exists():
        return None
    head = head_of(options, world, cell, digest_of(export_modules(world, METHODS[cell.method].modules)))
    if laboratory is None:
        return claimed(path, head, None)

    def compute() -> Row:
        say(f"== row {which}: {cell.scenario}, {cell.method}, seed {cell.seed}")
        make_folders(world, [cell])
        return laboratory.row(cell).document()

    return claimed(path, head, compute)


def path_of(folder: Path, options: argparse.Namespace, world: EeftWorld, cell: EeftCell) -> Path:
    return folder / f"eeft-{world.name}-{options.engine}-{cell.scenario}-{cell.method}-seed{cell.seed}.json"


def head_of(options: argparse.Namespace, world: EeftWorld, cell: EeftCell, digest: str) -> Row:
    """What a row answers: another question is another row."""
    head: Row = {
        "row_schema": ROW_SCHEMA, "study": "eeft", "world": world.name, "engine": options.engine,
        "rounds": options.rounds, "batch": options.batch,
        "local_epochs": options.local_epochs or world.scenarios[cell.scenario].local_epochs,
        "learning_rate": options.body_learning_rate if METHODS[cell.method].modules is None else options.learning_rate,
        "alone": options.alone, "package_digest": digest, **vars(cell),
    }  # fmt: skip
    if METHODS[cell.method].strategy == "eeft" and METHODS[cell.method].threshold == AUTOMATIC:
        head["near"] = [CLOSE, REACH, CLEAR]  # rows that were computed by another rule are others
    return head


def line_of(row: Row) -> str:
    """One row in one line."""
    groups = ", ".join(f"{name} {100 * value:.1f}" for name, value in row["accuracy_by_group"].items())
    return (
        f"{row['scenario']}, {row['method']}, seed {row['seed']}: {100 * row['accuracy']:.2f} % ({groups}), before "
        f"averaging {100 * row['trained_accuracy']:.2f} %; {row['bytes_up_device_round'] / 1e6:.3f} MB up a device and "
        f"round; {row['images']} images on {len(row['devices'])} devices; {row['seconds']} s"
    )


def document_of(options: argparse.Namespace, world: EeftWorld, rows: Sequence[Row]) -> Row:
    """What --format json prints."""
    settings = ("rounds", "batch", "learning_rate", "body_learning_rate", "alone")
    data = "; ".join(each.note for each in world.scenarios.values())
    return {
        **document_head("eeft", world.name, data, options, *settings),
        "local_epochs": options.local_epochs or "the scenario's",
        "cells": summarise(rows), "pairs": compare(rows), "rows": list(map(with_result, rows)),
    }  # fmt: skip
