"""Run EEFT beside what it is compared to: one row for each scenario, method and seed; curves, tables, pictures.

A finished row is kept in DIR/rows and not computed again. Several commands may work on one DIR: each takes rows that no
other is at (or with `--only` one), and `--table` puts together what is there. What a row is is `reproduce_eeft_rows`'.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract import manifest as manifests
from contract.console import ArgumentParser, print_document, say
from contract.errors import UsageError
from contract.output import open_output
from server_runtime.files import write_atomic
from server_runtime.report import to_html, to_text
from server_runtime.similarity import AUTOMATIC, CLOSE
from tools.kept_rows import claimed, finished
from tools.reproduce_eeft_rows import ABLATED, COMPARED, METHODS, VARIANTS, EeftCell, EeftLaboratory, EeftRates
from tools.reproduce_eeft_table import Row, compare, results_of, summarise
from tools.reproduce_eeft_world import CIFAR, PACS, WEIGHTS, EeftWorld, export_modules, full_world, quick_world
from tools.reproduce_options import (
    add_place,
    check_counts,
    check_known,
    check_rate,
    numbers,
    read_only,
    refuse_with_quick,
    take_defaults,
    texts,
    world_of,
)
from tools.reproduce_world import ROOT, alone

ROW_SCHEMA = 1
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
    root = open_output(options.output)
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
    rows = []
    for number, cell in enumerate(cells, start=1):
        late = options.stop_after_s is not None and time.monotonic() - started_s > options.stop_after_s
        which = f"{number} of {len(cells)}"
        row = finish(root / "rows", options, world, cell, None if late or options.table else laboratory, which)
        rows += [] if row is None else [row]
    if not rows:
        raise UsageError(f"{root} holds no finished row of these", "run the same command without --table first")
    report(options, root, document_of(options, world, rows))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce eeft", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits and a very small model: minutes, no archive")
    parser.add_argument(
        "--scenarios", type=texts, help="default: task with --quick, else all of " + ",".join(SCENARIOS["full"])
    )
    parser.add_argument(
        "--methods", type=texts, help=f"default: {','.join(COMPARED)} (fewer with --quick); known: {','.join(METHODS)}"
    )
    parser.add_argument("--ablations", action="store_true", help=f"add {','.join(ABLATED)} (scenario task, first seed)")
    parser.add_argument("--seeds", type=numbers, help="default: 0 with --quick, else 0,1,2")
    parser.add_argument("--only", metavar="SCENARIO/METHOD/SEED", help="one row instead of the lists' product")
    parser.add_argument("--rounds", type=int, help="default: 10 with --quick, else 10")
    parser.add_argument(
        "--local-epochs", type=int, help="epochs of a device in one round (default: the scenario's, 1 or 3)"
    )
    parser.add_argument("--batch", type=int, help="images of a batch (default: 16 with --quick, else 32)")
    parser.add_argument("--learning-rate", type=float, help="of the modules, sgd with momentum 0.5 (default: 0.1)")
    parser.add_argument("--body-learning-rate", type=float, help="where the whole model is trained (default: 0.01)")
    parser.add_argument("--alone", type=int, default=3, help="rounds before EEFT averages (default: %(default)s)")
    parser.add_argument("--stop-after-s", type=float, metavar="S", help="begin no further row then")
    add_place(parser, f"{CIFAR}, {PACS} and {WEIGHTS}")
    options = parser.parse_args(argv)
    take_defaults(options, DEFAULTS)
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
    path = folder / f"eeft-{world.name}-{options.engine}-{cell.scenario}-{cell.method}-seed{cell.seed}.json"
    if laboratory is None and not path.exists():
        return None
    front = export_modules(world, METHODS[cell.method].modules)
    digest = manifests.digest((front / manifests.MANIFEST_NAME).read_bytes()).hex()
    head: Row = {
        "row_schema": ROW_SCHEMA, "study": "eeft", "world": world.name, "engine": options.engine,
        "rounds": options.rounds, "batch": options.batch,
        "local_epochs": options.local_epochs or world.scenarios[cell.scenario].local_epochs,
        "learning_rate": options.body_learning_rate if METHODS[cell.method].modules is None else options.learning_rate,
        "alone": options.alone, "package_digest": digest, **vars(cell),
    }  # fmt: skip
    if METHODS[cell.method].strategy == "eeft" and METHODS[cell.method].threshold == AUTOMATIC:
        head["close"] = CLOSE  # rows that were computed by another rule are others
    if laboratory is None:
        row = finished(path, head)
    else:

        def compute() -> Row:
            say(f"== row {which}: {cell.scenario}, {cell.method}, seed {cell.seed}")
            make_folders(world, [cell])
            return laboratory.row(cell).document()

        row = claimed(path, head, compute)
    if row is not None:
        say(line_of(row))
    return row


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
    return {
        "study": "eeft", "world": world.name, "data": "; ".join(each.note for each in world.scenarios.values()),
        "engine": options.engine, "rounds": options.rounds, "local_epochs": options.local_epochs or "the scenario's",
        "batch": options.batch, "learning_rate": options.learning_rate,
        "body_learning_rate": options.body_learning_rate, "alone": options.alone,
        "cells": summarise(rows), "pairs": compare(rows), "rows": list(rows),
    }  # fmt: skip


def report(options: argparse.Namespace, root: Path, document: Row) -> None:
    """rows.jsonl, the page, and the document or the tables on stdout."""
    page = results_of(document)
    write_atomic(root / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in document["rows"]).encode())
    write_atomic(root / "eeft.html", to_html(page).encode())
    if options.format == "json":
        print_document("reproduce", {**document, "report": str(root / "eeft.html")})
        return
    print("\n\n".join(map(to_text, page.tables[:2])))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))
    print(f"report: {root / 'eeft.html'}")
