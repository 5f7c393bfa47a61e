"""From rows to the main table: mean and spread over seeds, and whether split adaptation beat each probe. Pure.

The other studies' tables are `reproduce_study_tables`'; computing rows is left to `reproduce_rows`, files and printing
to `reproduce`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from server_runtime.report import Results, Table
from tools.reproduce_study_tables import study_tables

PROBES = {
    "lp_clean": "linear probe, clean float model and images",
    "lp_released": "linear probe, same uploads, original backend",
    "lp_tuned": "linear probe, same uploads, tuned backend",
}
BASELINES = {
    "split_learning": "frontend and head, backend frozen",
    "offsite_tuning": "first and last two blocks and head, plugged in",
    "fine_tuning": "whole model and head",
    "ln_tuning": "LayerNorms and head",
}
METHODS = {"sa": "split adaptation", **PROBES}

PUBLISHED_EPOCHS = 100

Row = dict[str, Any]


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One cell for each (dataset, shots, kappa) of the main study, rising; a spread over one seed is unknown."""
    main, baselines = ([row for row in rows if row["study"] == study] for study in ("main", "baselines"))
    settings = sorted({setting_of(row) for row in main})
    return [
        cell_of(
            sorted((row for row in main if setting_of(row) == setting), key=lambda row: int(row["seed"])), baselines
        )
        for setting in settings
    ]


def setting_of(row: Row) -> tuple[str, int, float]:
    return row["dataset"], row["shots"], row["kappa"]


def cell_of(rows: Sequence[Row], baselines: Sequence[Row] = ()) -> dict[str, Any]:
    """The figures of one cell's rows, which differ in their seeds alone, beside the baselines of the same shots."""
    beaten = {probe: margin([row["accuracy"]["sa"] - row["accuracy"][probe] for row in rows]) for probe in PROBES}
    dataset, shots, kappa = setting_of(rows[0])
    return {
        "dataset": dataset,
        "shots": shots,
        "kappa": kappa,
        "seeds": [row["seed"] for row in rows],
        "accuracy": {method: spread([row["accuracy"][method] for row in rows]) for method in METHODS},
        "margins": beaten,
        "sa_beats_all": all(each["mean"] > 0 for each in beaten.values()),
        "verdict": verdict(beaten, len(rows)),
        "baselines": {
            name: compared
            for name in BASELINES
            if (compared := compare(rows, [each for each in baselines if each["case"] == name]))
        },
        "ridge_psnr_db": spread([row["ridge_psnr_db"] for row in rows]),
        "mean_colour_psnr_db": spread([row["mean_colour_psnr_db"] for row in rows]),
        "engines": sorted({f"{row['frontend_engine']}; trained by {row['training_device']}" for row in rows}),
    }


def compare(rows: Sequence[Row], baseline: Sequence[Row]) -> dict[str, Any]:
    """One baseline's spread, and split adaptation's lead over it on the same draws; empty where there is none."""
    setting = rows[0]["dataset"], rows[0]["shots"]
    shares = {each["seed"]: each for each in baseline if (each["dataset"], each["shots"]) == setting}
    pairs = [(row, shares[row["seed"]]) for row in rows if row["seed"] in shares]
    if not pairs:
        return {}
    emulated = [each["emulator_accuracy"] for _, each in pairs]
    return {
        "seeds": [row["seed"] for row, _ in pairs],
        "accuracy": spread([each["accuracy"] for _, each in pairs]),
        "emulator_accuracy": None if None in emulated else spread(emulated),
        "lead": margin([row["accuracy"]["sa"] - each["accuracy"] for row, each in pairs]),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and sample standard deviation where there are two values or more."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def margin(differences: Sequence[float]) -> dict[str, Any]:
    """Split adaptation's lead over one probe on the same seeds; a tie is no lead."""
    return {**spread(differences), "ahead": sum(each > 0 for each in differences)}


def verdict(beaten: dict[str, dict[str, Any]], seeds: int) -> str:
    """In words, with the figures that it rests on; by the means, and with the seeds that agree."""

    def figures(probe: str) -> str:
        each = beaten[probe]
        return f"{probe} ({100 * each['mean']:+.1f} points, ahead in {each['ahead']} of {seeds} seeds)"

    lost = [probe for probe in PROBES if not beaten[probe]["mean"] > 0]
    if lost:
        return "SA does not beat " + ", ".join(map(figures, lost))
    nearest = min(PROBES, key=lambda probe: beaten[probe]["mean"])
    return "SA beats all three linear probes; the nearest is " + figures(nearest)


def with_spread(value: dict[str, float | None]) -> str:
    """A share in per cent."""
    mean, std = value["mean"], value["std"]
    assert mean is not None
    return f"{100 * mean:.2f}" if std is None else f"{100 * mean:.2f} +- {100 * std:.2f}"


def baseline_text(compared: dict[str, Any] | None) -> str:
    """Accuracy of one baseline, of its emulator where it has one, and split adaptation's lead, in per cent."""
    if compared is None:
        return "-"
    emulated, lead = compared["emulator_accuracy"], compared["lead"]
    inside = "" if emulated is None else f"emulator {with_spread(emulated)}; "
    ahead = f"SA {100 * lead['mean']:+.1f}, ahead in {lead['ahead']} of {len(compared['seeds'])}"
    return f"{with_spread(compared['accuracy'])} ({inside}{ahead})"


def budget_text(budget: dict[str, Any]) -> str:
    """What each baseline that trains in the clear could spend, in words."""
    rates = ", ".join(f"{rate:g}" for rate in budget["rates"])
    short = "" if budget["epochs"] >= PUBLISHED_EPOCHS else "; too short to compare with"
    return (
        f"{budget['epochs']} epochs (offsite tuning {budget['offsite_epochs']}), batch {budget['batch']}, Adam with a "
        f"cosine, learning rate the best of {rates} on held-out shots in {budget['folds']} folds (of offsite tuning in "
        f"the plugged-in form){short}"
    )


def setting_text(cell: dict[str, Any]) -> str:
    return f"{cell['dataset']}, {cell['shots']} shots, kappa {cell['kappa']:g}"


def baselines_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Split adaptation beside the baselines that train in the clear."""
    rows = tuple(
        (
            setting_text(cell), with_spread(cell["accuracy"]["sa"]),
            *(baseline_text(cell["baselines"].get(name)) for name in BASELINES),
        )
        for cell in cells
    )  # fmt: skip
    return Table(
        "Baselines that train in the clear, accuracy in %", ("setting", "sa", *BASELINES), rows,
        note="Raw images, no noise, so the same at every kappa; "
        + "; ".join(f"{name}: {text}" for name, text in BASELINES.items()),
    )  # fmt: skip


def main_tables(cells: Sequence[dict[str, Any]], with_baselines: bool) -> list[Table]:
    """Accuracies and verdicts; none without a row."""
    if not cells:
        return []
    accuracy = tuple(
        (
            setting_text(cell), *(with_spread(cell["accuracy"][name]) for name in METHODS),
            f"{cell['ridge_psnr_db']['mean']:.1f}", f"{cell['mean_colour_psnr_db']['mean']:.1f}", len(cell["seeds"]),
        )
        for cell in cells
    )  # fmt: skip
    note = "; ".join(f"{name}: {text}" for name, text in METHODS.items())
    columns = ("setting", *METHODS, "ridge dB", "mean colour dB", "seeds")
    verdicts = tuple((setting_text(cell), cell["verdict"]) for cell in cells)
    return [
        Table("Accuracy in %, mean and standard deviation over seeds", columns, accuracy, note=note),
        Table("Verdicts", ("setting", "verdict"), verdicts),
        *([baselines_table(cells)] if with_baselines else []),
    ]


def commands_table(rows: Sequence[Row]) -> Table:
    """Every row with the command that makes it."""

    def found(row: Row) -> str:
        accuracy = row["accuracy"]
        shares = accuracy if isinstance(accuracy, dict) else {row["case"]: accuracy}
        return ", ".join(f"{name} {100 * value:.2f}" for name, value in shares.items())

    lines = tuple(
        (row["command"], found(row), row.get("frontend_engine", "-"), row["training_device"], row["seconds"])
        for row in rows
    )
    return Table("Rows", ("command", "accuracy in %", "frontend", "trained on", "seconds"), lines)


def results_of(document: dict[str, Any]) -> Results:
    """The page of a reproduction, as far as its rows are there."""
    rows = document["rows"]
    cells = summarise(rows)
    in_the_clear = any(row["study"] == "baselines" for row in rows)
    lacking = tuple((each["row"], each["reason"]) for each in document["missing"])
    attacked = next((row["ridge_note"] for row in rows if "ridge_note" in row), None)
    return Results(
        title="Split adaptation against linear probing",
        facts=(
            *((f"data, {name}", text) for name, text in document["data"].items()),
            ("package", document["package_digest"]),
            ("learning rates of sites, backend", document["backend_lr"]),
            ("learning rates of sites, head", document["head_lr"]),
            ("weight noise alpha", document["alpha"]),
            *([("baselines in the clear", budget_text(document["baselines_budget"]))] if in_the_clear else []),
            *([("ridge", attacked)] if attacked else []),
        ),
        tables=(
            *main_tables(cells, in_the_clear), *study_tables(rows), *([commands_table(rows)] if rows else []),
            *([Table("Rows that are not there", ("row", "reason"), lacking)] if lacking else []),
        ),
        notes=("kappa is the Laplace scale in standard deviations per channel, in training and in inference alike.",),
    )  # fmt: skip
