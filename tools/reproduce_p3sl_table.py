"""From rows of P3SL's reproduction to tables: mean and spread over seeds, P3SL beside each baseline, its devices. Pure.

Computing rows is left to `reproduce_p3sl_rows`, files and printing to `reproduce_p3sl`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from server_runtime.pictures import line_chart
from server_runtime.report import Drawing, Results, Table
from tools.reproduce_table import spread, with_spread

Row = dict[str, Any]
AIMS = {"asl": 0.70, "ares": 0.70, "ssl": 0.55}  # energy of P3SL over theirs, at most
POINTS = 0.03  # of accuracy over the best baseline, at least
_SETTING = ("model", "environment", "method", "noise")


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One cell for each (model, environment, method, noise), in the order of coming."""
    settings = dict.fromkeys(_setting_of(row) for row in rows)
    return [_cell([row for row in rows if _setting_of(row) == each]) for each in settings]


def _setting_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _SETTING)


def _cell(rows: Sequence[Row]) -> Row:
    retaken = [row["retaken_accuracy"] for row in rows if "retaken_accuracy" in row]  # rows that were kept long ago
    chains = [each["chain"] for row in rows for each in row["devices"].values() if each["chain"] is not None]
    return {
        **{name: rows[0][name] for name in _SETTING},
        "seeds": sorted(row["seed"] for row in rows),
        "accuracy": spread([row["accuracy"] for row in rows]),
        "retaken": spread(retaken) if retaken else None,
        "chain": statistics.fmean(chains) if chains else None,
        "own": spread([row["own_accuracy"] for row in rows]),
        "fsim_total": statistics.fmean(row["fsim_total"] for row in rows),
        "fsim_baselines": {
            name: statistics.fmean(row["fsim_baselines"][name] for row in rows) for name in rows[0]["fsim_baselines"]
        },
        "joules": {name: statistics.fmean(row["joules"][name] for row in rows) for name in rows[0]["joules"]},
        "awake_share": statistics.fmean(each["awake_share"] for row in rows for each in row["devices"].values()),
        "epoch_s": statistics.fmean(row["epoch_s"] for row in rows),
        "bytes": statistics.fmean(row["bytes"] / len(row["curve"]) for row in rows),
    }


def compare(cells: Sequence[Row]) -> list[Row]:
    """P3SL beside each baseline of its model and environment: points ahead, and its share of their energy."""
    pairs = []
    for cell in cells:
        own = next(
            (
                each
                for each in cells
                if each["method"] == "p3sl" and each["model"] == cell["model"]
                and each["environment"] == cell["environment"]
            ),
            None,
        )  # fmt: skip
        if own is None or cell["method"] == "p3sl":
            continue
        pairs.append(
            {
                **{name: cell[name] for name in _SETTING},
                "points": own["accuracy"]["mean"] - cell["accuracy"]["mean"],
                "fsim": own["fsim_total"] - cell["fsim_total"],
                "energy": {name: own["joules"][name] / cell["joules"][name] for name in own["joules"]},
                "energy_aim": AIMS.get(cell["method"]),
            }
        )
    return pairs


def results_of(document: Row) -> Results:
    """The page of a reproduction."""
    cells, pairs = document["cells"], document["pairs"]
    facts = ("data", "epochs", "batch", "learning_rate", "aggregate_every", "engine", "label_mode", "rows_missing")
    return Results(
        title="P3SL and what it is compared to",
        facts=tuple((name.replace("_", " "), document[name]) for name in facts),
        tables=(
            _main_table(cells),
            _pairs_table(pairs),
            _device_table(document["rows"]),
            Table(
                "Epochs",
                ("row", "training loss", "test accuracy in %"),
                tuple(
                    (
                        f"{row['method']}, {row['setting']}, seed {row['seed']}",
                        " ".join(f"{each['loss']:.3f}" for each in row["curve"]),
                        " ".join(f"{100 * each['test_accuracy']:.1f}" for each in row["curve"]),
                    )
                    for row in document["rows"]
                ),
            ),
        ),
        drawings=tuple(_drawings(document["rows"])),
    )


def _main_table(cells: Sequence[Row]) -> Table:
    return Table(
        "Test accuracy in %, mean and standard deviation over seeds; FSIM of all devices together; modelled joules and "
        "seconds of an epoch; MB",
        ("method, noise", "model, environment", "seeds", "accuracy", "retaken", "at devices", "chains", "FSIM",
         "no noise", "mean colour", "unrelated", "J work", "J awake", "J whole", "J whole, all sleep", "awake",
         "seconds", "MB"),
        tuple(
            (
                f"{cell['method']}, {cell['noise']}", f"{cell['model']}, {cell['environment']}", len(cell["seeds"]),
                with_spread(cell["accuracy"]), None if cell["retaken"] is None else with_spread(cell["retaken"]),
                with_spread(cell["own"]),
                None if cell["chain"] is None else f"{100 * cell['chain']:.1f}",
                f"{cell['fsim_total']:.2f}", f"{cell['fsim_baselines']['no_protection']:.2f}",
                f"{cell['fsim_baselines']['mean_colour']:.2f}", f"{cell['fsim_baselines']['unrelated']:.2f}",
                *(f"{cell['joules'][name]:.0f}" for name in ("work", "awake", "whole", "could_sleep")),
                f"{100 * cell['awake_share']:.0f} %", f"{cell['epoch_s']:.0f}", f"{cell['bytes'] / 1e6:.0f}",
            )
            for cell in cells
        ),
        note="Accuracy: of W without noise. Retaken: after W's norms took their statistics anew from public "
        "images, without noise. At devices: what each holds in the end, with its noise on what it sends. "
        "Chains: a device's own part with the server's rest, without noise. Work: computing and the link. "
        "Awake: with waiting in one's turn. Whole: all the time between turns, too, asleep where the method tells "
        "devices when they are wanted. All sleep: as if every method did. All joules and seconds are modelled.",
    )  # fmt: skip


def _pairs_table(pairs: Sequence[Row]) -> Table:
    return Table(
        "P3SL ahead by, and its share of their energy (aims: 3 points; 0.70 of ASL and ARES, 0.55 of SSL)",
        ("over", "model, environment", "points", "FSIM", "awake", "whole", "whole, all sleep", "aim"),
        tuple(
            (
                f"{pair['method']}, {pair['noise']}", f"{pair['model']}, {pair['environment']}",
                f"{100 * pair['points']:+.1f}", f"{pair['fsim']:+.2f}",
                *(f"{pair['energy'][name]:.2f}" for name in ("awake", "whole", "could_sleep")),
                "-" if pair["energy_aim"] is None else f"{pair['energy_aim']:.2f}",
            )
            for pair in pairs
        ),
    )  # fmt: skip


def _device_table(rows: Sequence[Row]) -> Table:
    """P3SL's first seed of each model and environment."""
    shown, seen = [], set()
    for row in rows:
        place = (row["model"], row["environment"])
        if row["method"] != "p3sl" or place in seen:
            continue
        seen.add(place)
        for name, each in row["devices"].items():
            chain = "-" if each["chain"] is None else f"{100 * each['chain']:.1f}"
            shown.append(
                (
                    name, ", ".join(place), each["split"], f"{each['alpha']:g}", f"{each['sigma']:.2f}",
                    f"{each['fsim_clean']:.2f}", f"{each['fsim']:.2f}", chain, f"{100 * each['own_accuracy']:.1f}",
                    f"{100 * each['awake_share']:.0f} %",
                    f"{each['joules']['whole']:.1f}",
                )
            )  # fmt: skip
    return Table(
        "P3SL's devices: what each chose, what leaks, and its own chain",
        ("device", "model, environment", "split", "alpha", "sigma", "FSIM before", "after", "chain in %", "with noise",
         "awake", "J an epoch"),
        tuple(shown),
    )  # fmt: skip


def _drawings(rows: Sequence[Row]) -> list[Drawing]:
    """Accuracy by epoch of each method, first seed."""
    lines: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        title = f"{row['model']}, environment {row['environment']}"
        name = f"{row['method']}, {row['noise']}"
        lines.setdefault(title, {}).setdefault(name, [100 * each["test_accuracy"] for each in row["curve"]])
    return [Drawing(f"Test accuracy in %: {title}", line_chart(each, "epoch")) for title, each in lines.items()]
