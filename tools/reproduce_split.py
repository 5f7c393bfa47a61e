"""Run the strategies of split training side by side: one row for each model, strategy and seed; curves and a table.

A finished row is kept in DIR/rows and not computed again; several commands may work on one DIR, each on rows of its own
(`--only`, or lists), and `--table` puts together what is there. What a row is is `reproduce_split_rows`' part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.console import say
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
from tools.reproduce_report import document_head, gather, open_study, report
from tools.reproduce_split_rows import LABEL_MODE, SCHEDULE, SplitCell, SplitLaboratory, SplitRates
from tools.reproduce_split_table import compare, results_of, summarise
from tools.reproduce_split_world import (
    ARCHIVE,
    FULL_CLASSES,
    SplitWorld,
    export_part_package,
    full_split_world,
    quick_split_world,
)
from tools.reproduce_world import ROOT, alone, digest_of

ROW_SCHEMA = 1
STRATEGIES = ("sequential_split", "parallel_split", "split_fed", "fed_avg", "centralised")
MODELS = {"quick": ("resnet18",), "full": ("resnet18", "vgg16_bn")}
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {"seeds": [0], "epochs": 2, "cut": 3, "learning_rate": 0.05, "batch": 16, "engine": "onnxruntime"},
    "full": {"seeds": [0, 1, 2], "epochs": 10, "cut": 6, "learning_rate": 0.05, "batch": 64, "engine": "torch"},
}
TEST_IMAGES = 2000


def main(argv: Sequence[str]) -> int:
    started_s, options = time.monotonic(), parse(argv)
    root = open_study(options)
    world = prepare(options, root / "scratch" / f"split-{world_of(options)}")
    cells = cells_of(options)
    if options.prepare:
        for model, strategy in dict.fromkeys((cell.model, cell.strategy) for cell in cells):
            export_part_package(world, model, strategy)
        say(f"{world.root}: {len(world.names('train'))} training and {len(world.names('test'))} test images")
        return 0
    rates = SplitRates(options.epochs, options.batch, options.learning_rate)
    laboratory = SplitLaboratory(world, options.engine, rates, options.threads)

    def find(cell: SplitCell, may_compute: bool, which: str) -> Row | None:
        return finish(root / "rows", options, world, cell, laboratory if may_compute else None, which)

    document = document_of(options, world, gather(options, root, cells, started_s, find, line_of))
    report(options, root, document, results_of(document), tables=2)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study_parser("split", __doc__, "seconds")
    parser.add_argument("--models", type=texts, help="default: " + ",".join(MODELS["full"]))
    parser.add_argument("--strategies", type=texts, default=list(STRATEGIES), help="default: " + ",".join(STRATEGIES))
    add_seeds(parser)
    parser.add_argument("--only", metavar="MODEL/STRATEGY/SEED", help="one row instead of the lists' product")
    parser.add_argument("--epochs", type=int, help="default: 2 with --quick, else 10")
    parser.add_argument("--batch", type=int, help="images of a batch (default: 16 with --quick, else 64)")
    parser.add_argument("--learning-rate", type=float, help="highest rate of the cosine (default: 0.05)")
    parser.add_argument("--cut", type=int, help="layers on the device (default: 3 with --quick, else 6)")
    add_test_images(parser, TEST_IMAGES)
    add_time_limit(parser)
    add_place(parser, ARCHIVE)
    options = parser.parse_args(argv)
    take_defaults(options, DEFAULTS[world_of(options)])
    options.models = options.models or list(MODELS[world_of(options)])
    if options.only is not None:
        model, strategy, seed = read_only(options.only, "MODEL/STRATEGY/SEED", "resnet18/split_fed/0")
        options.models, options.strategies, options.seeds = [model], [strategy], [int(seed)]
    check(options)
    options.test_images = options.test_images or TEST_IMAGES
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    check_known("model", options.models, MODELS[world_of(options)])
    check_known("strategy", options.strategies, STRATEGIES)
    refuse_with_quick(options, "--shared", "--test-images")
    check_counts(options, {"epochs": 1, "batch": 1, "cut": 1, "threads": 1, "seeds": 0})
    check_rate(options)
    check_test_images(options.test_images, FULL_CLASSES)


def prepare(options: argparse.Namespace, default: Path) -> SplitWorld:
    """The world with its images; whoever comes second waits until they are there."""
    root = (options.world or default).resolve()
    with alone(root):
        if options.quick:
            world = quick_split_world(root, str(options.cut))
        else:
            shared = options.shared or ROOT.parent / "shared"
            world = full_split_world(root, shared, str(options.cut), options.test_images)
        world.test_folder()
        for cell in [] if options.table else cells_of(options):
            for device in world.devices_of(cell.strategy):
                world.train_folder(device, cell.seed)
    return world


def cells_of(options: argparse.Namespace) -> list[SplitCell]:
    """All cells, those that share a package one after another."""
    return [
        SplitCell(model, strategy, seed)
        for model in options.models
        for strategy in options.strategies
        for seed in options.seeds
    ]


def finish(
    folder: Path, options: argparse.Namespace, world: SplitWorld, cell: SplitCell, laboratory: SplitLaboratory | None,
    which: str,
) -> Row | None:  # fmt: skip
    """A cell's row: from `folder` where it is finished, else computed and kept; None where it may not be (without a
    laboratory), or another command is at it."""
    path = path_of(folder, options, world, cell)
    if laboratory is None and not path.exists():
        return None
    head = head_of(options, world, cell, digest_of(export_part_package(world, cell.model, cell.strategy)))
    if laboratory is None:
        return claimed(path, head, None)

    def compute() -> Row:
        say(f"== row {which}: {cell.model}, {cell.strategy}, seed {cell.seed}")
        return laboratory.row(cell).document()

    return claimed(path, head, compute)


def path_of(folder: Path, options: argparse.Namespace, world: SplitWorld, cell: SplitCell) -> Path:
    return folder / f"split-{world.name}-{options.engine}-{cell.model}-{cell.strategy}-seed{cell.seed}.json"


def head_of(options: argparse.Namespace, world: SplitWorld, cell: SplitCell, digest: str) -> Row:
    """What a row answers: another question is another row."""
    return {
        "row_schema": ROW_SCHEMA, "study": "split", "world": world.name, "engine": options.engine,
        "epochs": options.epochs, "batch": options.batch, "learning_rate": options.learning_rate, "cut": options.cut,
        "test_images": len(world.names("test")), "package_digest": digest, **vars(cell),
    }  # fmt: skip


def line_of(row: Row) -> str:
    """One row in one line."""
    last = row["curve"][-1]
    return (
        f"{row['model']}, {row['strategy']}, seed {row['seed']}: epoch {last['epoch']}: loss {last['loss']:.4f}, "
        f"test {100 * last['test_accuracy']:.2f} %; {last['bytes_up'] / 1e6:.1f} MB up, "
        f"{last['bytes_down'] / 1e6:.1f} MB down; {row['images']} images on {row['devices']} devices; "
        f"{row['training_device']}; {row['seconds']} s"
    )


def document_of(options: argparse.Namespace, world: SplitWorld, rows: Sequence[Row]) -> Row:
    """What --format json prints."""
    return {
        **document_head("split", world.name, world.note, options, "epochs", "batch", "cut"),
        "learning_rate": f"{options.learning_rate:g}, {SCHEDULE}",
        "label_mode": LABEL_MODE, "initial_weights": "of a model the same for all seeds, the head's apart",
        "cells": summarise(rows), "pairs": compare(rows), "rows": list(rows),
    }  # fmt: skip
