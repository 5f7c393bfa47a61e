"""Run split adaptation against its baselines: one row for each setting, case and seed; tables, verdicts, commands.

Studies: main (split adaptation and three linear probes), baselines (in the clear), ablation, risk, keying, noise. A
finished row is kept in DIR/rows and not computed again, so an interrupted reproduction goes on where it was; several
commands may work on one DIR (`--share`). Which rows there are is `reproduce_cells`' part, what they are
`reproduce_rows`'; the paper's own setting, `--paper`, is `reproduce_paper`'s.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from contract import manifest as manifests
from contract.canonical import INT_MAX
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError, suggest
from contract.output import open_output
from edge_runtime.engines import offered_engines
from server_runtime.files import write_atomic
from server_runtime.report import to_html, to_text
from tools.kept_rows import Row, finished, keep
from tools.reproduce_baselines import QUICK_BUDGET
from tools.reproduce_cells import PACKAGES, STUDIES, Asked, Cell, cells_of, codes_shared_by, missing_reason
from tools.reproduce_options import add_output, add_share
from tools.reproduce_rows import Adaptation, Effort, Laboratory
from tools.reproduce_table import results_of
from tools.reproduce_world import (
    ARCHIVES,
    ROOT,
    SHIPPED,
    TASKS,
    World,
    alone,
    export_package,
    full_world,
    listing,
    quick_world,
)
from tools.reproduce_world import digest_of as package_digest
from tools.share import share_of

ROW_SCHEMA = 2
OTHERS = {
    "split": "reproduce_split", "eeft": "reproduce_eeft", "eft_vit": "reproduce_eft", "eftvit": "reproduce_eft",
    "p3sl": "reproduce_p3sl",
    "prototypes": "reproduce_prototypes",
}  # fmt: skip
QUICK_EFFORT = Effort(QUICK_BUDGET, auxiliary_epochs=5)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in OTHERS:  # each has options of its own
        other: Any = importlib.import_module(f"tools.{OTHERS[sys.argv[1]]}")
        return int(other.main(sys.argv[2:]))
    if sys.argv[1:2] == ["sa"] and "--paper" in sys.argv:
        from tools import reproduce_paper

        return reproduce_paper.main([word for word in sys.argv[2:] if word != "--paper"])
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    effort = QUICK_EFFORT if options.quick else Effort()
    scratch = root / "scratch" / ("quick" if options.quick else "full")
    reproduce(options, root, scratch, lambda: make_world(options, scratch), effort)
    return 0


def reproduce(
    options: argparse.Namespace, root: Path, scratch: Path, make: Callable[[], World], effort: Effort
) -> None:
    """Compute the rows that are asked for and missing, as far as share and time allow, and report all that are there.

    Raises: what making a world, exporting its packages and computing rows raise.
    """
    cells, unavailable = available(cells_of(asked_of(options)))
    with alone(scratch):
        world = make()
        for dataset, shots, seed in sorted({(cell.dataset, cell.shots, cell.seed) for cell in cells}):
            world.site(dataset, shots, seed)
    for name in dict.fromkeys(cell.package for cell in cells if cell.package is not None):
        with alone(scratch / "locks" / name):
            export_package(with_package(world, name))
    rows = run_rows(Bench(options, world, root / "rows", effort), cells, time.monotonic)
    report(options, root, document_of(options, world, rows, effort, [*unavailable, *missing(cells, rows)]))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=["sa"], help=f"sa: split adaptation ({', '.join(OTHERS)} have own --help)")
    parser.add_argument(
        "--quick", action="store_true", help="digits and a small model: minutes on two cores, no archives"
    )
    parser.add_argument(
        "--studies", type=listed_from(tuple(STUDIES)),
        help=f"of {','.join(STUDIES)}, or all (default: main with --quick, else main,baselines)",
    )  # fmt: skip
    parser.add_argument("--datasets", type=listed_from(tuple(TASKS)), help=f"of {','.join(TASKS)} (default: all)")
    parser.add_argument("--seeds", type=listed(int), help="default: 1 with --quick, else 1,42,215")
    parser.add_argument("--shots", type=listed(int), help="images per class; default: 5 with --quick, else the study's")
    parser.add_argument("--kappas", type=listed(float), help="feature noise (default: the study's)")
    parser.add_argument("--cases", type=listed(str), help="of the studies that have cases (default: all)")
    engines = ["torch", *(name for name in offered_engines() if name != "tensorrt")]
    parser.add_argument(
        "--engine", choices=engines, help="of the devices; default: onnxruntime with --quick, else torch"
    )
    parser.add_argument("--test-images", type=int, metavar="N", help="sample of the test images (default: all)")
    add_share(parser)
    add_output(parser)
    parser.add_argument(
        "--shared", type=Path, metavar="DIR", help=f"holds {listing(ARCHIVES)} (default: ../shared of the checkout)"
    )
    parser.add_argument("--paper", action="store_true", help="the paper's own models and data: see sa --paper --help")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or ([1] if options.quick else [1, 42, 215])
    options.shots = options.shots or ([5] if options.quick else None)
    options.studies = options.studies or (["main"] if options.quick else ["main", "baselines"])
    options.engine = options.engine or ("onnxruntime" if options.quick else "torch")
    check(options)
    options.datasets = ["digits"] if options.quick else options.datasets or list(TASKS)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises: UsageError that names the option."""
    for flag in ("--shared", "--test-images", "--datasets"):
        if options.quick and getattr(options, flag[2:].replace("-", "_")) is not None:
            raise UsageError(f"{flag} belongs to the full reproduction", f"leave out --quick, or {flag}")
    for flag, values, lowest, highest in (
        ("--shots", options.shots, 1, INT_MAX),
        ("--seeds", options.seeds, 0, INT_MAX),
        ("--kappas", options.kappas, 0, 1),
    ):
        for value in values or ():
            if not lowest <= value <= highest:
                raise UsageError(f"{flag} has {value}, expected {lowest} to {highest}", f"correct {flag}")
    if options.test_images is not None and options.test_images < 1:
        raise UsageError(f"--test-images must be 1 or more, found {options.test_images}", "leave it out to take all")
    known = [case for study in options.studies for case in STUDIES[study].cases if case]
    for case in options.cases or ():
        if case not in known:
            raise UsageError(
                f"--cases has {case!r}, which no chosen study has{suggest(case, known)}",
                f"choose of {', '.join(known)}" if known else "leave it out: main and risk have no cases",
            )


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of comma-separated values, each once, in the order given."""

    def parse_list(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from error
        return list(dict.fromkeys(values))

    return parse_list


def listed_from(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of some known names, each once; "all" and "none" stand for themselves."""

    def parse_names(text: str) -> list[str]:
        names = {"all": list(known), "none": []}.get(text, list(dict.fromkeys(text.split(","))))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, all or none, found {unknown[0]!r}")
        return names

    return parse_names


def asked_of(options: argparse.Namespace) -> Asked:
    """The rows that are chosen."""

    def values(given: list[Any] | None) -> Any:
        return None if given is None else tuple(given)

    return Asked(
        tuple(options.studies), tuple(options.datasets), tuple(options.seeds), values(options.shots),
        values(options.kappas), values(options.cases),
    )  # fmt: skip


def available(cells: Sequence[Cell]) -> tuple[list[Cell], list[tuple[Cell, str]]]:
    """The rows that this installation can compute, and the others with the reason."""
    reasons = [(cell, missing_reason(cell)) for cell in cells]
    return [cell for cell, reason in reasons if reason is None], [(cell, why) for cell, why in reasons if why]


def make_world(options: argparse.Namespace, root: Path) -> World:
    """Digits, or what lies in the archives. Raises: DataError."""
    if options.quick:
        return quick_world(root)
    return full_world(root, options.shared or ROOT.parent / "shared", options.test_images, options.datasets)


def with_package(world: World, name: str) -> World:
    """The same world about another of its packages."""
    return world if name == SHIPPED else replace(world, package=name, words=PACKAGES[name])


def digest_of(world: World) -> str | None:
    """The package that rows are about, in hex; None before it is made."""
    return package_digest(world.front) if (world.front / manifests.MANIFEST_NAME).exists() else None


class Bench:
    """What rows are computed with and kept in: a laboratory for each package, opened for its first unfinished row."""

    def __init__(
        self, options: argparse.Namespace, world: World, folder: Path, effort: Effort,
        open_laboratory: Callable[[World, str, Effort], Any] = Laboratory,
    ) -> None:  # fmt: skip
        self.options, self.folder = options, folder
        self._world, self._effort = world, effort
        self._open = open_laboratory
        self._laboratories: dict[str, Any] = {}

    def head(self, cell: Cell) -> Row:
        """What a row's figures depend on; a stored row counts only if all of it is the same. Neither package nor engine
        have a part in what trains in the clear."""
        head: Row = {
            "row_schema": ROW_SCHEMA, "world": self._world.name, "test_images_asked": self.options.test_images,
            **vars(cell),
        }  # fmt: skip
        if cell.study in ("baselines", "risk"):
            head["budget"] = self._effort.baselines.document()
        if self._effort.adaptation != Adaptation():
            head["adaptation"] = vars(self._effort.adaptation)
        if cell.package is None:
            return {**head, "weights_sha256": self._weights_sha256}
        return {**head, "engine": self.options.engine, "package_digest": digest_of(self._about(cell))}

    @cached_property
    def _weights_sha256(self) -> str:
        return hashlib.sha256(self._world.weights.read_bytes()).hexdigest()

    def _about(self, cell: Cell) -> World:
        return with_package(self._world, cell.package or SHIPPED)

    def path(self, cell: Cell) -> Path:
        engine = "" if cell.package is None else f"-{self.options.engine}"
        return self.folder / f"sa-{self._world.name}{engine}-{cell.name}.json"

    def compute(self, cell: Cell) -> Row:
        """Raises: TrainingError, DeviceError, DataError, ConfigError, PackageError."""
        name = cell.package or SHIPPED
        if name not in self._laboratories:
            self._laboratories[name] = self._open(self._about(cell), self.options.engine, self._effort)
        row: Row = self._laboratories[name].row(cell)
        return row

    def command(self, cell: Cell) -> str:
        """The command that makes this row alone."""
        options = self.options
        place = ["--quick"] if options.quick else ["--datasets", cell.dataset]
        place += ["--paper", "--models", self._world.model] if options.paper else []
        words = ["tools/reproduce", "sa", *place, *cell.words()]
        words += [] if options.test_images is None else ["--test-images", str(options.test_images)]
        return shlex.join([*words, *([] if cell.package is None else ["--engine", options.engine])])


def run_rows(bench: Bench, cells: Sequence[Cell], clock: Callable[[], float]) -> list[Row]:
    """The finished rows: read where they are kept, else computed and kept, but for those of another's share."""
    mine = set(share_of(cells, bench.options.share, codes_shared_by))
    limit_s = bench.options.stop_after_s
    started_s, rows = clock(), []
    for number, cell in enumerate(cells, start=1):
        head, path = bench.head(cell), bench.path(cell)
        row = finished(path, head, "accuracy")
        in_time = limit_s is None or clock() - started_s < limit_s
        if row is None and cell in mine and in_time:
            say(f"== row {number} of {len(cells)}: {cell.title}")
            row = keep(path, {**head, **bench.compute(cell), "command": bench.command(cell)})
            say(line_of(cell, row))
        rows += [] if row is None else [row]
    return rows


def missing(cells: Sequence[Cell], rows: Sequence[Row]) -> list[tuple[Cell, str]]:
    """Rows that are not there yet, for whatever reason."""
    there = {Cell(*(row[name] for name in vars(cells[0]))) for row in rows} if cells else set()
    return [(cell, "not computed yet") for cell in cells if cell not in there]


def line_of(cell: Cell, row: Row) -> str:
    """One row in one line."""
    found = row["accuracy"]
    shares = found if isinstance(found, dict) else {cell.case or cell.study: found}
    said = ", ".join(f"{name} {100 * value:.2f} %" for name, value in shares.items())
    attacked = f"; ridge {row['ridge_psnr_db']:.2f} dB" if "ridge_psnr_db" in row else ""
    return f"{cell.title}: {said}{attacked}; {row['images']} images, {row['test_images']} tested; {row['seconds']} s"


def document_of(
    options: argparse.Namespace, world: World, rows: Sequence[Row], effort: Effort, left: Sequence[tuple[Cell, str]]
) -> Row:
    """What --format json prints; `left` are rows that are not there, with the reason."""
    path = world.backend / "few_shot.json"
    few_shot = json.loads(path.read_text()) if path.exists() else {}
    rates = {name: few_shot.get(name) for name in ("backend_lr", "head_lr")}
    return {
        "study": options.study, "world": world.name, "data": dict(world.notes), "engine": options.engine,
        "alpha": effort.adaptation.alpha, "package_digest": digest_of(world),
        **rates, "rates_reason": few_shot.get("reason"),
        "baselines_budget": effort.baselines.document(), "rows": list(rows),
        "missing": [{"row": cell.title, "reason": reason} for cell, reason in left],
    }  # fmt: skip


def report(options: argparse.Namespace, root: Path, document: Row) -> None:
    """Page, tables and document as files, and the document or the tables on stdout."""
    page = results_of(document)
    document = {**document, "tables": [vars(table) for table in page.tables]}
    text = "\n\n".join(map(to_text, page.tables)) + "\n\n" + "\n".join(f"{name}: {value}" for name, value in page.facts)
    write_atomic(root / "report.html", to_html(page).encode())
    write_atomic(root / "report.txt", (text + "\n").encode())
    write_atomic(root / "report.json", (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    if options.format == "json":
        print_document("reproduce", {**document, "report": str(root / "report.html")})
        return
    print(text)
    print(f"report: {root / 'report.html'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
