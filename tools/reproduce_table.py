"""From rows to cells: mean and spread over seeds, and whether split adaptation beat each probe. Pure.

Computing rows is left to `reproduce_rows`, files and printing to `reproduce`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from server_runtime.report import Results, Table

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


def summarise(rows: Sequence[Row], baselines: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """One cell for each (shots, kappa), in rising order; a spread over one seed is unknown."""
    settings = sorted({(row["shots"], row["kappa"]) for row in rows})
    return [
        cell_of(
            sorted((row for row in rows if (row["shots"], row["kappa"]) == setting), key=lambda row: row["seed"]),
            baselines,
        )
        for setting in settings
    ]


def cell_of(rows: Sequence[Row], baselines: Sequence[Row] = ()) -> dict[str, Any]:
    """The figures of one cell's rows, which differ in their seeds alone, beside the baselines of the same shots."""
    beaten = {probe: margin([row["accuracy"]["sa"] - row["accuracy"][probe] for row in rows]) for probe in PROBES}
    return {
        "shots": rows[0]["shots"],
        "kappa": rows[0]["kappa"],
        "seeds": [row["seed"] for row in rows],
        "accuracy": {method: spread([row["accuracy"][method] for row in rows]) for method in METHODS},
        "margins": beaten,
        "sa_beats_all": all(each["mean"] > 0 for each in beaten.values()),
        "verdict": verdict(beaten, len(rows)),
        "baselines": {
            name: compared
            for name in BASELINES
            if (compared := compare(rows, [each for each in baselines if each["baseline"] == name]))
        },
        "ridge_psnr_db": spread([row["ridge_psnr_db"] for row in rows]),
        "mean_colour_psnr_db": spread([row["mean_colour_psnr_db"] for row in rows]),
        "engines": sorted({f"{row['frontend_engine']}; trained by {row['training_device']}" for row in rows}),
    }


def compare(rows: Sequence[Row], baseline: Sequence[Row]) -> dict[str, Any]:
    """One baseline's spread, and split adaptation's lead over it on the same draws; empty where there is none."""
    shares = {each["seed"]: each for each in baseline if each["shots"] == rows[0]["shots"]}
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


def baselines_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Split adaptation beside the baselines that train in the clear."""
    rows = tuple(
        (
            f"{cell['shots']} shots, kappa {cell['kappa']:g}", with_spread(cell["accuracy"]["sa"]),
            *(baseline_text(cell["baselines"].get(name)) for name in BASELINES),
        )
        for cell in cells
    )  # fmt: skip
    return Table(
        "Baselines that train in the clear, accuracy in %", ("setting", "sa", *BASELINES), rows,
        note="Raw images, no noise, so the same at every kappa; "
        + "; ".join(f"{name}: {text}" for name, text in BASELINES.items()),
    )  # fmt: skip


def results_of(document: dict[str, Any]) -> Results:
    """The page of a finished reproduction."""
    cells = document["cells"]
    accuracy = tuple(
        (f"{cell['shots']} shots, kappa {cell['kappa']:g}", *(with_spread(cell["accuracy"][name]) for name in METHODS))
        for cell in cells
    )
    rows = tuple(
        (
            f"{row['shots']} shots, kappa {row['kappa']:g}, seed {row['seed']}",
            *(row["accuracy"][name] for name in METHODS), row["ridge_psnr_db"], row["mean_colour_psnr_db"],
            row["frontend_engine"], row["training_device"], row["seconds"],
        )
        for row in document["rows"]
    )  # fmt: skip
    return Results(
        title="Split adaptation against linear probing",
        facts=(
            ("data", document["data"]),
            ("package", document["package_digest"][:16]),
            ("learning rates of sites", f"backend {document['backend_lr']:g}, head {document['head_lr']:g}"),
            ("weight noise alpha", document["alpha"]),
            *([("baselines in the clear", budget_text(document["baselines_budget"]))] if document["baselines"] else []),
        ),
        tables=(
            Table(
                "Accuracy in %, mean and standard deviation over seeds",
                ("setting", *METHODS),
                accuracy,
                note="; ".join(f"{name}: {text}" for name, text in METHODS.items()),
            ),
            Table(
                "Verdicts",
                ("setting", "verdict"),
                tuple((f"{cell['shots']} shots, kappa {cell['kappa']:g}", cell["verdict"]) for cell in cells),
            ),
            Table(
                "Rows",
                ("row", *METHODS, "ridge dB", "mean colour dB", "frontend", "trained on", "seconds"),
                rows,
                shares=tuple(METHODS),
                note=document["rows"][0]["ridge_note"] if document["rows"] else "",
            ),
            *([baselines_table(cells)] if document["baselines"] else []),
        ),
        notes=("kappa is the Laplace scale in standard deviations per channel, in training and in inference alike.",),
    )
