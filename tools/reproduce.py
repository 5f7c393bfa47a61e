"""Run split adaptation against its baselines: one row for each shots, noise strength and seed; a table and verdicts.

Baselines that train in the clear have rows of their own, one for each shots and seed. A finished row is kept in
DIR/rows and not computed again, so an interrupted reproduction goes on where it was; several commands may work on one
DIR, each on rows of its own. What a row is is the part of `reproduce_rows` and `reproduce_baselines`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import manifest as manifests
from contract.canonical import INT_MAX
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from edge_runtime.engines import engine_names
from server_runtime.files import write_atomic
from server_runtime.report import to_html, to_text
from tools.output import open_output
from tools.reproduce_baselines import CHOOSE, QUICK_BUDGET, Budget
from tools.reproduce_rows import ALPHA, Cell, Laboratory
from tools.reproduce_table import METHODS, Row, results_of, summarise
from tools.reproduce_world import ARCHIVES, ROOT, World, alone, export_package, full_world, listing, quick_world

ROW_SCHEMA = 1


def main() -> int:
    if sys.argv[1:2] == ["split"]:
        from tools import reproduce_split  # it has options of its own

        return reproduce_split.main(sys.argv[2:])
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    world = prepare(options, root / "scratch" / ("quick" if options.quick else "full"))
    laboratory: list[Laboratory] = []  # opened for the first row that is not finished

    def opened() -> Laboratory:
        if not laboratory:
            laboratory.append(Laboratory(world, options.engine))
        return laboratory[0]

    asked = asked_of(options, world.name, digest_of(world))
    cells = cells_of(options.shots, options.kappas, options.seeds)
    rows = run_rows(root / "rows", asked, cells, lambda cell: opened().row(cell).document())
    budget = QUICK_BUDGET if options.quick else Budget()
    baselines = run_baselines(
        root / "rows", asked, baselines_of(options.baselines, options.shots, options.seeds), budget,
        lambda each: opened().baseline(each.baseline, each.shots, each.seed, budget),
    )  # fmt: skip
    report(options, root, document_of(world, asked, rows, baselines, budget))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=["sa"], help="sa: split adaptation (split: see split --help)")
    parser.add_argument(
        "--quick", action="store_true", help="digits and a small model: minutes on two cores, no archives"
    )
    parser.add_argument("--seeds", type=listed(int), help="default: 1 with --quick, else 1,42,215")
    parser.add_argument(
        "--shots", type=listed(int), help="training images per class; default: 5 with --quick, else 5,10"
    )
    parser.add_argument("--kappas", type=listed(float), default=[0.25, 1.0], help="feature noise (default: 0.25,1)")
    parser.add_argument(
        "--baselines", type=listed_baselines, metavar="NAMES",
        help=f"that train in the clear: {','.join(CHOOSE)}, or none (default: none with --quick, else all)",
    )  # fmt: skip
    engines = ["torch", *(name for name in engine_names() if name != "fake")]
    parser.add_argument(
        "--engine", choices=engines, help="of the devices; default: onnxruntime with --quick, else torch"
    )
    parser.add_argument("--test-images", type=int, metavar="N", help="sample of the test images (default: all)")
    parser.add_argument(
        "--shared", type=Path, metavar="DIR", help=f"holds {listing(ARCHIVES)} (default: ../shared of the checkout)"
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-reproduce"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="DIR", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or ([1] if options.quick else [1, 42, 215])
    options.shots = options.shots or ([5] if options.quick else [5, 10])
    if options.baselines is None:
        options.baselines = [] if options.quick else list(CHOOSE)
    options.engine = options.engine or ("onnxruntime" if options.quick else "torch")
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    for flag, given in (("--shared", options.shared), ("--test-images", options.test_images)):
        if options.quick and given is not None:
            raise UsageError(f"{flag} belongs to the full reproduction", f"leave out --quick, or {flag}")
    for flag, values, lowest, highest in (
        ("--shots", options.shots, 1, INT_MAX),
        ("--seeds", options.seeds, 0, INT_MAX),
        ("--kappas", options.kappas, 0, 1),
    ):
        for value in values:
            if not lowest <= value <= highest:
                raise UsageError(f"{flag} has {value}, expected {lowest} to {highest}", f"correct {flag}")
    if options.test_images is not None and options.test_images < 1:
        raise UsageError(f"--test-images must be 1 or more, found {options.test_images}", "leave it out to take all")


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of comma-separated values, each once, in the order given."""

    def parse_list(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from error
        return list(dict.fromkeys(values))

    return parse_list


def listed_baselines(text: str) -> list[str]:
    """Names of baselines, each once; none of them for "none"."""
    names = [] if text == "none" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in CHOOSE]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected {', '.join(CHOOSE)} or none, found {unknown[0]!r}")
    return names


def prepare(options: argparse.Namespace, root: Path) -> World:
    """The world with its package; whoever comes second waits until it is made."""
    with alone(root):
        if options.quick:
            world = quick_world(root)
        else:
            world = full_world(root, options.shared or ROOT.parent / "shared", options.test_images)
        export_package(world)
        for shots in options.shots:
            for seed in options.seeds:
                world.site(shots, seed)
    return world


def asked_of(options: argparse.Namespace, world: str, package_digest: str) -> Row:
    """What a row's figures depend on beside its cell; a stored row counts only if all of it is the same."""
    return {
        "row_schema": ROW_SCHEMA, "study": options.study, "world": world, "engine": options.engine,
        "test_images_asked": options.test_images, "package_digest": package_digest,
    }  # fmt: skip


def digest_of(world: World) -> str:
    """The package that the rows are about, in hex."""
    return manifests.digest((world.front / manifests.MANIFEST_NAME).read_bytes()).hex()


def cells_of(shots: Sequence[int], kappas: Sequence[float], seeds: Sequence[int]) -> list[Cell]:
    """All cells, those that share test codes one after another."""
    return [Cell(count, kappa, seed) for kappa in kappas for seed in seeds for count in shots]


@dataclass(frozen=True)
class BaselineCell:
    """One baseline on one draw of shots."""

    baseline: str
    shots: int
    seed: int


def baselines_of(names: Sequence[str], shots: Sequence[int], seeds: Sequence[int]) -> list[BaselineCell]:
    """All that are asked for; noise is no part of them."""
    return [BaselineCell(name, count, seed) for seed in seeds for count in shots for name in names]


def run_rows(folder: Path, asked: Row, cells: Sequence[Cell], compute: Callable[[Cell], Row]) -> list[Row]:
    """Every cell's row: from `folder` where it is finished, else computed and kept."""
    rows = []
    for number, cell in enumerate(cells, start=1):
        name = (
            f"{asked['study']}-{asked['world']}-{asked['engine']}-{cell.shots}shot-kappa{cell.kappa:g}-seed{cell.seed}"
        )
        title = f"row {number} of {len(cells)}: {cell.shots} shots, kappa {cell.kappa:g}, seed {cell.seed}"
        row = kept_row(folder / f"{name}.json", {**asked, **vars(cell)}, title, lambda cell=cell: compute(cell))
        say(line_of(row))
        rows.append(row)
    return rows


def run_baselines(
    folder: Path, asked: Row, cells: Sequence[BaselineCell], budget: Budget, compute: Callable[[BaselineCell], Row]
) -> list[Row]:
    """The same of baselines, on which the devices' engine has no influence."""
    about = {name: value for name, value in asked.items() if name != "engine"} | {"budget": budget.document()}
    rows = []
    for number, cell in enumerate(cells, start=1):
        name = f"{asked['study']}-{asked['world']}-{cell.baseline}-{cell.shots}shot-seed{cell.seed}"
        title = f"baseline {number} of {len(cells)}: {cell.baseline}, {cell.shots} shots, seed {cell.seed}"
        row = kept_row(folder / f"{name}.json", {**about, **vars(cell)}, title, lambda cell=cell: compute(cell))
        say(baseline_line_of(row))
        rows.append(row)
    return rows


def kept_row(path: Path, head: Row, title: str, compute: Callable[[], Row]) -> Row:
    """The row at `path` if it is finished, else computed and kept there."""
    row = finished(path, head)
    if row is None:
        say(f"== {title}")
        row = {**head, **compute()}
        write_atomic(path, (json.dumps(row, indent=2, allow_nan=False) + "\n").encode())
    return row


def finished(path: Path, head: Row) -> Row | None:
    """The stored row, if it is whole and answers the same question."""
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(row, dict) and all(row.get(name) == value for name, value in head.items())
    return row if same and "accuracy" in row else None


def line_of(row: Row) -> str:
    """One row in one line."""
    shares = ", ".join(f"{method} {100 * row['accuracy'][method]:.2f} %" for method in METHODS)
    return (
        f"{row['shots']} shots, kappa {row['kappa']:g}, seed {row['seed']}: {shares}; "
        f"ridge {row['ridge_psnr_db']:.2f} dB (mean colour {row['mean_colour_psnr_db']:.2f}); "
        f"{row['images']} uploads, {row['test_images']} test images; frontend {row['frontend_engine']}; "
        f"trained by {row['training_device']}; {row['seconds']} s"
    )


def baseline_line_of(row: Row) -> str:
    """One baseline's row in one line."""
    held, emulated = row["held_out_accuracy"], row["emulator_accuracy"]
    return (
        f"{row['baseline']}, {row['shots']} shots, seed {row['seed']}: {100 * row['accuracy']:.2f} %"
        + ("" if emulated is None else f" (emulator {100 * emulated:.2f} %)")
        + f"; learning rate {row['lr']:g}"
        + ("" if held is None else f", held out {100 * held:.2f} %")
        + f"; trained by {row['training_device']}; {row['seconds']} s"
    )


def document_of(world: World, asked: Row, rows: Sequence[Row], baselines: Sequence[Row], budget: Budget) -> Row:
    """What --format json prints."""
    few_shot = json.loads((world.backend / "few_shot.json").read_text())
    return {
        "study": asked["study"], "world": world.name, "data": world.note, "engine": asked["engine"], "alpha": ALPHA,
        "package_digest": asked["package_digest"], "backend_lr": few_shot["backend_lr"],
        "head_lr": few_shot["head_lr"], "rates_reason": few_shot["reason"], "cells": summarise(rows, baselines),
        "rows": list(rows), "baselines": list(baselines), "baselines_budget": budget.document(),
    }  # fmt: skip


def report(options: argparse.Namespace, root: Path, document: Row) -> None:
    """The page, and the document or the tables on stdout."""
    page = results_of(document)
    write_atomic(root / "report.html", to_html(page).encode())
    if options.format == "json":
        print_document("reproduce", {**document, "report": str(root / "report.html")})
        return
    print("\n\n".join(map(to_text, page.tables)))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in page.facts))
    print(f"report: {root / 'report.html'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
