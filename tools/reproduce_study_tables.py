"""The tables of the studies beside the main one: ablation, risk, one draw or many, accuracy against noise. Pure.

Rows are `reproduce_rows`', what their cases mean `reproduce_cells`'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from server_runtime.report import Table
from tools.reproduce_cells import VARIANTS

THEFTS = {
    "quantized_frontend": "linear probe on tokens of the released INT8 frontend, the best of three poolings",
    "original_frontend": "the same on the float frontend, were it leaked",
    "auxiliary_backend": "a small backend of the thief's own, from labelled public images, tuned on the shots",
}
MARGIN = 0.20  # how far below linear probing in the clear a theft should stay

Row = dict[str, Any]


def study_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each study that has rows."""
    makers = {"ablation": ablation_table, "risk": risk_table, "keying": keying_table, "noise": noise_table}
    found = {study: [row for row in rows if row["study"] == study] for study in makers}
    return [make(found[study]) for study, make in makers.items() if found[study]]


def spread_text(values: Iterable[float]) -> str:
    """Shares in per cent: mean, and sample deviation where there are two or more; - where there is none."""
    shares = [100 * value for value in values]
    if not shares:
        return "-"
    mean = f"{statistics.fmean(shares):.2f}"
    return mean if len(shares) < 2 else f"{mean} +- {statistics.stdev(shares):.2f}"


def differences(rows: Sequence[Row], others: Sequence[Row], value: Callable[[Row], float]) -> list[float]:
    """value(row) - value(other) for rows of the same dataset, shots, kappa and seed."""
    there = {paired_by(other): value(other) for other in others}
    return [value(row) - there[paired_by(row)] for row in rows if paired_by(row) in there]


def paired_by(row: Row) -> tuple[Any, ...]:
    return row["dataset"], row["shots"], row["kappa"], row["seed"]


def settings_of(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """(dataset, shots, kappa) of some rows, in rising order."""
    return sorted({paired_by(row)[:3] for row in rows}, key=lambda each: (each[0], each[1], each[2] or 0.0))


def named(setting: tuple[Any, ...]) -> str:
    dataset, shots, kappa = setting
    return f"{dataset}, {shots} shots" + ("" if kappa is None else f", kappa {kappa:g}")


def of(rows: Sequence[Row], setting: tuple[Any, ...], case: str | None = None) -> list[Row]:
    return [row for row in rows if paired_by(row)[:3] == setting and case in (None, row["case"])]


def accuracy(row: Row) -> float:
    return float(row["accuracy"])


def ablation_table(rows: Sequence[Row]) -> Table:
    """Each variant's accuracy, and what it gains on split adaptation as it is, paired by seed."""
    settings = settings_of(rows)
    lines = []
    for case in (name for name in VARIANTS if any(row["case"] == name for row in rows)):
        cells: list[str] = []
        for setting in settings:
            mine = of(rows, setting, case)
            gains = differences(mine, of(rows, setting, "sa"), accuracy)
            gain = "" if case == "sa" or not gains else f" ({100 * statistics.fmean(gains):+.2f})"
            cells.append(spread_text(map(accuracy, mine)) + gain)
        lines.append((case, VARIANTS[case].text, *cells))
    return Table(
        "Ablation, accuracy in % (difference to sa on the same seeds)",
        ("case", "what is changed", *map(named, settings)), tuple(lines),
    )  # fmt: skip


def risk_table(rows: Sequence[Row]) -> Table:
    """Each theft beside linear probing in the clear."""
    lines = []
    for setting in settings_of(rows):
        mine = of(rows, setting)
        cells = []
        for theft in THEFTS:
            below = [row["accuracy"]["lp_clean"] - row["accuracy"][theft] for row in mine]
            mean = statistics.fmean(below)
            stays = "" if mean >= MARGIN else ", not 20 below"
            cells.append(f"{spread_text(row['accuracy'][theft] for row in mine)} ({100 * -mean:+.1f}{stays})")
        lines.append((named(setting), spread_text(row["accuracy"]["lp_clean"] for row in mine), *cells))
    return Table(
        "Theft of the frontend, accuracy in % (difference to linear probing in the clear)",
        ("setting", "lp_clean", *THEFTS), tuple(lines),
        note="; ".join(f"{name}: {text}" for name, text in THEFTS.items()),
    )  # fmt: skip


def keying_table(rows: Sequence[Row]) -> Table:
    """One draw copied, against a draw for each copy."""
    lines = []
    for setting in settings_of(rows):
        keyed, fresh = of(rows, setting, "keyed"), of(rows, setting, "fresh")
        gains = differences(keyed, fresh, accuracy)
        shares = spread_text(map(accuracy, keyed)), spread_text(map(accuracy, fresh))
        ahead = f", ahead in {sum(gain > 0 for gain in gains)} of {len(gains)}"
        lines.append((named(setting), *shares, f"{100 * statistics.fmean(gains):+.2f}{ahead}" if gains else "-"))
    return Table(
        "One keyed draw of noise or a fresh one per copy, accuracy in %",
        ("setting", "keyed", "fresh", "keyed - fresh"), tuple(lines),
        note="All copies of an image in every epoch; a device never makes fresh draws of one image.",
    )  # fmt: skip


def noise_table(rows: Sequence[Row]) -> Table:
    """Accuracy against what a ridge attack reads, by noise and tuning."""
    lines = []
    for setting in settings_of(rows):
        for case in dict.fromkeys(row["case"] for row in rows):
            mine = of(rows, setting, case)
            if mine:
                psnr = statistics.fmean(row["ridge_psnr_db"] for row in mine)
                colour = statistics.fmean(row["mean_colour_psnr_db"] for row in mine)
                lines.append((
                    named(setting), case, f"{psnr:.2f}", f"{colour:.2f}",
                    spread_text(row["noise_free_accuracy"] for row in mine), spread_text(map(accuracy, mine)),
                ))  # fmt: skip
    return Table(
        "Accuracy in % against reconstruction: noise in training, without and with noise in inference",
        ("setting", "tuning", "ridge dB", "mean colour dB", "noise-free inference", "noisy inference"), tuple(lines),
        note="Noise-free inference is simulated: a device whose floor is kappa refuses it.",
    )  # fmt: skip
