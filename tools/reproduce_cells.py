"""Which rows a reproduction of split adaptation consists of: its studies, their cases and settings. Pure.

Computing a row is left to `reproduce_rows`, keeping it to `reproduce`, tables to `reproduce_table` and
`reproduce_study_tables`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from exporter import cli as exporter_cli
from exporter import plan as exporter_plan
from tools.reproduce_baselines import CHOOSE
from tools.reproduce_world import SHIPPED

UNTUNED = "untuned"  # the shipped package's backend as it was before tuning
PAPER_TUNE = "paper"


@dataclass(frozen=True)
class Study:
    """One table: the settings it has where none are asked for, and its cases."""

    text: str
    shots: tuple[int, ...]
    kappas: tuple[float | None, ...]  # None: no noise is in it
    cases: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Variant:
    """Split adaptation with one thing changed: whose backend, N^Aug runs, N^P as a share of the patches."""

    text: str
    tuning: str = SHIPPED
    runs: int | None = None  # None: what server-run does when it is told nothing
    replaced: float | None = None


PACKAGES = {  # beside the shipped one: what export-frontend is told; --tune paper has M = 3 subsets and HT
    PAPER_TUNE: ("--tune", PAPER_TUNE),
    "paper_without_hilbert": ("--tune", PAPER_TUNE, "--no-hilbert"),
    "paper_one_frontend": ("--tune", PAPER_TUNE, "--tuning-subsets", "0"),
}
VARIANTS = {
    "sa": Variant("split adaptation as it is shipped"),
    "without_tuning": Variant("w/o OOD QAT: the backend before step 4", UNTUNED),
    "paper_tuning": Variant("step 4 as published", PAPER_TUNE),
    "paper_without_hilbert": Variant("the same w/o HT", "paper_without_hilbert"),
    "paper_one_frontend": Variant("the same w/o QAT: the sent frontend alone", "paper_one_frontend"),
    "without_retrieval": Variant("w/o patch retrieval", runs=0),
    **{f"replaced_{name}": Variant(f"N^P {name.replace('_', '/')} of the patches", replaced=share) for name, share in
       (("1_16", 1 / 16), ("1_8", 1 / 8), ("1_2", 0.5), ("3_4", 0.75), ("all", 1.0))},
    **{f"runs_{runs}": Variant(f"N^Aug {runs}", runs=runs) for runs in (1, 2, 4, 8, 16, 32)},
}  # fmt: skip
STUDIES = {
    "main": Study("split adaptation against linear probing", (3, 5, 10), (0.25, 1.0)),
    "baselines": Study("baselines that train in the clear", (3, 5, 10), (None,), tuple(CHOOSE)),
    "ablation": Study("split adaptation with one thing changed", (5,), (1.0,), tuple(VARIANTS)),
    "risk": Study("what the released frontend is worth to a thief", (5, 10), (None,)),
    "keying": Study("one keyed draw of noise against a fresh one per copy", (5, 10), (1.0,), ("keyed", "fresh")),
    "noise": Study(
        "accuracy against reconstruction", (10,), (0.0, 0.1, 0.25, 0.5, 1.0), (SHIPPED, UNTUNED, PAPER_TUNE)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One row: a study's case in one setting with one seed."""

    study: str
    dataset: str
    shots: int
    kappa: float | None
    seed: int
    case: str = ""

    @property
    def name(self) -> str:
        """Within a world, as part of a file's name."""
        noise = "" if self.kappa is None else f"-kappa{self.kappa:g}"
        case = f"-{self.case}" if self.case else ""
        return f"{self.study}-{self.dataset}{case}-{self.shots}shot{noise}-seed{self.seed}"

    @property
    def title(self) -> str:
        """In words."""
        noise = "" if self.kappa is None else f", kappa {self.kappa:g}"
        case = f", {self.case}" if self.case else ""
        return f"{self.study}, {self.dataset}{case}, {self.shots} shots{noise}, seed {self.seed}"

    def words(self) -> list[str]:
        """What `tools/reproduce sa` is told for this row alone, beside its world."""
        words = ["--studies", self.study, "--shots", str(self.shots), "--seeds", str(self.seed)]
        words += [] if self.kappa is None else ["--kappas", f"{self.kappa:g}"]
        return [*words, "--cases", self.case] if self.case else words

    @property
    def package(self) -> str | None:
        """The package it is about; None: what trains in the clear needs none."""
        if self.study == "baselines":
            return None
        case = VARIANTS[self.case].tuning if self.study == "ablation" else self.case
        return case if case in PACKAGES else SHIPPED


@dataclass(frozen=True)
class Asked:
    """What is chosen of all rows; None takes each study's own."""

    studies: tuple[str, ...]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...]
    shots: tuple[int, ...] | None = None
    kappas: tuple[float, ...] | None = None
    cases: tuple[str, ...] | None = None


def cells_of(asked: Asked) -> list[Cell]:
    """All rows, study after study; those that share test codes one after another."""
    return [cell for name in asked.studies for cell in _cells_of_study(name, asked)]


def _cells_of_study(name: str, asked: Asked) -> list[Cell]:
    study = STUDIES[name]
    chosen = asked.cases is None or study.cases == ("",)
    cases = study.cases if chosen else [case for case in study.cases if case in (asked.cases or ())]
    kappas = study.kappas if asked.kappas is None or study.kappas == (None,) else asked.kappas
    return [
        Cell(name, dataset, shots, kappa, seed, case)
        for dataset in asked.datasets for kappa in kappas for seed in asked.seeds
        for shots in asked.shots or study.shots for case in cases
    ]  # fmt: skip


def missing_reason(cell: Cell) -> str | None:
    """Why this installation cannot compute a row; None where it can."""
    return None if cell.package in (None, SHIPPED) else unknown_word(PACKAGES[cell.package])


def unknown_word(words: Sequence[str]) -> str | None:
    """The first of an export's words that export-frontend does not know, in words; None where it knows all."""
    known = {field.name for field in exporter_cli.FIELDS}
    for word, value in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("--") and word[2:].replace("-", "_") not in known:
            return f"export-frontend knows no {word}"
        if word == "--tune" and value not in exporter_plan.TUNES:
            return f"export-frontend knows no --tune {value}"
    return None


def codes_shared_by(cell: Cell) -> Hashable:
    """Rows of which this is the same share test codes, and are best made by one command."""
    alone = (cell.shots, cell.case) if cell.study == "baselines" else ()
    return cell.study, cell.package, cell.dataset, cell.kappa, cell.seed, alone
