"""Run shift-aware prototypes against what they are made of: one row for each method, held-out domain and seed.

Methods: vanilla (split federated learning), proto (prototypes, fixed lambda), g (normalised values at the cut),
g-proto (both, fixed lambda), ours (both, lambda by shift). A finished row is kept in DIR/rows and not computed again;
several commands may work on one DIR, each on rows of its own (`--share`, `--only`), and `--table` puts together what is
there. What a row is is `reproduce_prototypes_rows`' part, tables are `reproduce_prototypes_table`'s, what leaks
`reproduce_prototypes_leaks`'.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.console import print_document, say
from server_runtime.report import to_text
from server_runtime.schedule import SCHEDULES
from tools.kept_rows import Row, claimed
from tools.reproduce_energy import open_meter
from tools.reproduce_options import (
    add_place,
    add_seeds,
    add_share,
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
from tools.reproduce_prototypes_rows import (
    CASES,
    METHODS,
    PrototypeCell,
    PrototypeLaboratory,
    PrototypeRates,
)
from tools.reproduce_prototypes_table import compare, results_of, summarise
from tools.reproduce_prototypes_world import (
    DOMAINS,
    QUICK_DOMAINS,
    DomainWorld,
    export_domain_package,
    full_domains,
    quick_domains,
)
from tools.reproduce_report import document_head, gather, open_study, report
from tools.reproduce_world import ROOT, alone, digest_of

ROW_SCHEMA = 1
STUDIES = ("main", "l2", "layer1", "one-copy", "devices")
WITH_PROTOTYPES = tuple(name for name, method in METHODS.items() if method.strength)
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {
        "seeds": [0], "rounds": 6, "batch": 16, "learning_rate": 0.3, "train_images": 120, "test_images": 120,
        "engine": "onnxruntime", "domains": ["tinted"], "studies": ["main"],
    },
    "full": {
        "seeds": list(range(10)), "rounds": 12, "batch": 32, "learning_rate": 0.01, "train_images": 480,
        "test_images": 1000, "engine": "torch", "domains": list(DOMAINS), "studies": ["main", "l2"],
    },
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    root = open_study(options)
    world = prepare(options, root / "scratch" / f"prototypes-{world_of(options)}")
    cells = cells_of(options)
    if options.prepare:
        for package in dict.fromkeys(cell.package for cell in cells):
            export_domain_package(world, package)
        say(f"{world.root}: {len(cells)} rows can be computed")
        return 0
    if options.leaks:
        print_leaks(options, world)
        return 0
    rows = run_rows(options, world, root, cells)
    document = document_of(options, world, rows, len(cells))
    report(options, root, document, results_of(document), tables=3)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study_parser("prototypes", __doc__)
    parser.add_argument(
        "--studies", type=texts, help=f"of {','.join(STUDIES)}; default: main with --quick, else main,l2"
    )
    parser.add_argument("--methods", type=texts, default=list(METHODS), help="default: " + ",".join(METHODS))
    parser.add_argument("--domains", type=texts, help="held out in turn; default: tinted with --quick, else all")
    add_seeds(parser, "0 to 9")
    parser.add_argument("--only", metavar="METHOD/DOMAIN/SEED", help="one row of the studies instead of the product")
    parser.add_argument("--rounds", type=int, help="default: 6 with --quick, else 12")
    parser.add_argument("--batch", type=int, help="images of a batch (default: 16 with --quick, else 32)")
    parser.add_argument("--learning-rate", type=float, help="default: 0.3 with --quick, else 0.01")
    parser.add_argument("--schedule", choices=SCHEDULES, default="constant", help="(default: %(default)s)")
    parser.add_argument(
        "--train-images", type=int, metavar="N", help="a device's (default: 120 with --quick, else 480)"
    )
    parser.add_argument("--test-images", type=int, metavar="N", help="default: 120 with --quick, else 1000")
    parser.add_argument(
        "--pool", type=int, metavar="N", help="images of a domain that a world is made of (default: all)"
    )
    action = add_place(parser, "the archives")
    action.add_argument(
        "--leaks", action="store_true", help="what a curious server learns, on the first domain and seed"
    )
    add_share(parser)
    options = parser.parse_args(argv)
    take_defaults(options, DEFAULTS[world_of(options)])
    if options.only is not None:
        method, domain, seed = read_only(options.only, "METHOD/DOMAIN/SEED", "ours/sketch/0")
        options.methods, options.domains, options.seeds = [method], [domain], [int(seed)]
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    check_known("method", options.methods, tuple(METHODS))
    check_known("domain", options.domains, QUICK_DOMAINS if options.quick else DOMAINS)
    check_known("study", options.studies, STUDIES)
    refuse_with_quick(options, "--shared", "--pool")
    lowest = {"rounds": 1, "batch": 1, "threads": 1, "train-images": 1, "test-images": 1, "seeds": 0}
    check_counts(options, lowest)
    check_rate(options)


def prepare(options: argparse.Namespace, default: Path) -> DomainWorld:
    """The world with its images; whoever comes second waits until they are there."""
    root = (options.world or default).resolve()
    with alone(root):
        if options.quick:
            return quick_domains(root, options.train_images, options.test_images)
        shared = options.shared or ROOT.parent / "shared"
        return full_domains(root, shared, options.train_images, options.test_images, options.pool)


def cells_of(options: argparse.Namespace) -> list[PrototypeCell]:
    """All cells by study; of one study all methods of a seed before the next seed, as pairs are what counts."""
    cells = []
    for study in options.studies:
        methods = [name for name in options.methods if study in ("main", "layer1") or name in WITH_PROTOTYPES]
        changed: dict[str, list[dict[str, str]]] = {
            "main": [{}], "l2": [{"distance": "l2"}], "layer1": [{"cut": "layer1"}], "one-copy": [{"copies": "one"}],
            "devices": [{"case": case} for case in CASES[1:]],
        }  # fmt: skip
        cells += [
            PrototypeCell(method, domain, seed, **change)
            for change in changed[study]
            for seed in options.seeds
            for domain in options.domains
            for method in methods
        ]
    return list(dict.fromkeys(cells))


def run_rows(options: argparse.Namespace, world: DomainWorld, root: Path, cells: Sequence[PrototypeCell]) -> list[Row]:
    """The finished rows: read where they are kept, else computed and kept, but for those of another's share.

    Raises: UsageError where there is none."""
    part, parts = options.share
    # Neighbours, not every n-th: the methods of one seed and domain then read their images once.
    mine = set(cells[len(cells) * (part - 1) // parts : len(cells) * part // parts])
    meter = open_meter() if parts == 1 else None
    rates = PrototypeRates(options.rounds, options.batch, options.learning_rate, options.schedule)
    laboratory = PrototypeLaboratory(world, options.engine, rates, options.threads, meter)

    def find(cell: PrototypeCell, may_compute: bool, which: str) -> Row | None:
        path = path_of(root / "rows", options, world, cell)
        is_mine = may_compute and cell in mine
        if not is_mine and not path.exists():
            return None

        def compute() -> Row:
            say(f"== row {which}: {cell.name}")
            return {**laboratory.row(cell).document(), "command": command(options, cell)}

        head = head_of(options, world, cell, digest_of(export_domain_package(world, cell.package)))
        return claimed(path, head, compute if is_mine else None)

    return gather(options, root, cells, time.monotonic(), find, line_of)


def print_leaks(options: argparse.Namespace, world: DomainWorld) -> None:
    """What a run of `ours` shows to its server."""
    from tools import reproduce_prototypes_leaks as leaking  # it needs piq

    rates = PrototypeRates(options.rounds, options.batch, options.learning_rate, options.schedule)
    laboratory = PrototypeLaboratory(world, options.engine, rates, options.threads, None)
    cut = "layer1" if options.studies == ["layer1"] else "layer3"
    rows = leaking.leaks(laboratory, PrototypeCell("ours", options.domains[0], options.seeds[0], cut=cut))
    if options.format == "json":
        settings = {name: getattr(options, name) for name in ("rounds", "batch", "train_images", "test_images")}
        document = {"study": "prototypes", "world": world.name, "data": world.note, "cut": cut, **settings}
        print_document("reproduce", {**document, "leaks": rows})
        return
    print(to_text(leaking.table_of(rows)))


def path_of(folder: Path, options: argparse.Namespace, world: DomainWorld, cell: PrototypeCell) -> Path:
    return folder / f"prototypes-{world.name}-{options.engine}-{cell.name.replace('/', '-')}.json"


def head_of(options: argparse.Namespace, world: DomainWorld, cell: PrototypeCell, digest: str) -> Row:
    """What a row answers: another question is another row."""
    names = ("rounds", "batch", "learning_rate", "schedule", "train_images", "test_images", "engine")
    return {
        "row_schema": ROW_SCHEMA, "study": "prototypes", "world": world.name, "package_digest": digest, **vars(cell),
        "setting": f"{cell.held_out}, {cell.distance}, {cell.cut}, {cell.copies}, {cell.case}",
        **{name: getattr(options, name) for name in names},
    }  # fmt: skip


def command(options: argparse.Namespace, cell: PrototypeCell) -> str:
    """What makes this row alone."""
    study = {"distance": "l2", "cut": "layer1", "copies": "one-copy", "case": "devices"}
    plain = PrototypeCell(cell.method, cell.held_out, cell.seed)
    changed = [name for field, name in study.items() if getattr(cell, field) != getattr(plain, field)]
    words = ["tools/reproduce", "prototypes", *(["--quick"] if options.quick else [])]
    words += ["--studies", *(changed or ["main"]), "--only", f"{cell.method}/{cell.held_out}/{cell.seed}"]
    words += ["--engine", options.engine, "--rounds", options.rounds, "--batch", options.batch]
    words += ["--learning-rate", options.learning_rate, "--schedule", options.schedule]
    words += ["--train-images", options.train_images, "--test-images", options.test_images]
    return shlex.join(map(str, words))


def line_of(row: Row) -> str:
    """One row in one line."""
    energy = "unknown" if row["energy_j"] is None else f"{row['energy_j']:.0f} J"
    return (
        f"{row['method']}, {row['setting']}, seed {row['seed']}: last {100 * row['accuracy']:.2f} %, "
        f"best {100 * row['best_accuracy']:.2f} %; {row['bytes'] / 1e6:.1f} MB; {row['seconds']} s; "
        f"energy {energy} ({row['energy_quality']})"
    )


def document_of(options: argparse.Namespace, world: DomainWorld, rows: Sequence[Row], asked: int) -> Row:
    """What --format json prints."""
    return {
        **document_head("prototypes", world.name, world.note, options, "rounds", "batch"),
        "learning_rate": f"{options.learning_rate:g}, {options.schedule}", "label_mode": "logit-gradient",
        "rows_missing": asked - len(rows), "cells": summarise(rows), "pairs": compare(rows), "rows": list(rows),
    }  # fmt: skip
