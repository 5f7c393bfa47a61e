"""The reproduction of P3SL and the simulation of fleets: which rows there are, what they are compared by, and that the
device's own rule chooses by modelled costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import UsageError
from contract.privacy_table import from_leakage
from edge_runtime.transforms.cut_noise import CutNoise
from server_runtime.report import to_html, to_text
from tests.leakage_table import sigma_table
from tools import simulate
from tools.fleet import Work, cost_of, within_cap
from tools.fleet_file import PAPER, load_fleet
from tools.fleet_work import works_of
from tools.reproduce_p3sl import cells_of, document_of, parse, row_of
from tools.reproduce_p3sl_rows import (
    PUBLISHED,
    TABLE,
    P3slCell,
    P3slLaboratory,
    P3slRates,
    baselines_of,
    common_split,
    costs_of,
    noise_of,
    threshold_of,
)
from tools.reproduce_p3sl_table import compare, results_of, summarise
from tools.reproduce_p3sl_world import leakage_table, quick_p3sl_world
from tools.torch_worker import QuickNoise

SPLITS = range(1, 11)
BATCH = 64


@pytest.fixture(scope="module")
def works() -> list[Work]:
    """VGG16-BN's parts."""
    return works_of("vgg16_bn", {"small_images": True}, SPLITS)


def test_baselines_run_with_both_noises_and_p3sl_with_its_own(tmp_path: Path) -> None:
    cells = cells_of(parse(["-o", str(tmp_path)]))
    assert len(cells) == 3 * 2 * (1 + 2 * 4)
    assert [cell.noise for cell in cells if cell.method == "p3sl"] == [TABLE] * 6
    assert {cell.seed for cell in cells[:18]} == {0}
    (copy,) = cells_of(parse(["--methods", "p3sl_copy", "--models", "resnet18", "--seeds", "0"]))
    assert copy.noise == TABLE and "p3sl_copy" not in {cell.method for cell in cells}  # where it is asked for alone
    only = cells_of(parse(["--only", "vgg16_bn/ssl/2.5/B/7"]))
    assert only == [P3slCell("vgg16_bn", "ssl", PUBLISHED, "B", 7)]


def test_environments_are_rows_of_their_own_and_a_default_one_stays_as_it_was(tmp_path: Path) -> None:
    both = cells_of(parse(["-o", str(tmp_path), "--environments", "A,B"]))
    assert [cell for cell in both if cell.environment == "A"] == cells_of(parse(["-o", str(tmp_path)]))
    assert len(both) == len(set(both)) == 2 * 3 * 2 * (1 + 2 * 4)


def test_a_nano_that_is_warm_without_a_fan_splits_elsewhere_than_with_one(works: list[Work]) -> None:
    table, chosen = sigma_table(SPLITS), dict[str, dict[str, int]]()
    for environment in ("A", "B"):
        fleet = load_fleet(PAPER, environment)
        choices = simulate.sweep(fleet, works, table, BATCH)
        chosen[environment] = {
            device.name: choices["devices"][device.name]["splits"][choices["alpha"].index(device.alpha)]
            for device in fleet.devices
        }
    differing = {name for name, split in chosen["A"].items() if split != chosen["B"][name]}
    assert differing == {"nano-1"}  # at 30 degrees in both, with a fan in B alone
    assert max(within_cap(load_fleet(PAPER, "A").devices[0], works, BATCH)) < chosen["B"]["nano-1"]
    noise = noise_of(TABLE, table, from_leakage(table, SPLITS), 0.0)
    assert noise.of(chosen["A"]["nano-1"]) > noise.of(chosen["B"]["nano-1"])
    common = [common_split(load_fleet(PAPER, each), works, BATCH) for each in ("A", "B")]
    assert common[0] < common[1]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--methods", "pssl"], "no method 'pssl'"),
        (["--environments", "C"], "no environment 'C'"),
        (["--noises", "3"], "no noise '3'"),
        (["--quick", "--models", "vgg16_bn"], "no model 'vgg16_bn'"),
        (["--only", "vgg16_bn/ssl/0"], "--only should be MODEL/METHOD"),
        (["--fsim-threshold", "1"], "--fsim-threshold should be between 0 and 1"),
        (["--quick", "--shared", "x"], "--shared belongs to the full"),
        (["--aggregate-every", "0"], "--aggregate-every should be 1 or more"),
    ],
)
def test_wrong_options_are_named(words: list[str], cause: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(words)
    assert cause in error.value.cause


def test_the_threshold_is_the_classifier_s_else_given_else_what_shows_least() -> None:
    found, unknown = sigma_table(SPLITS, 0.3), sigma_table(SPLITS, None)
    assert threshold_of(found, 0.2) == 0.3
    assert threshold_of(unknown, 0.2) == 0.2
    assert threshold_of(unknown, 0.0) == pytest.approx(0.05)  # split 10 without noise
    privacy = from_leakage(unknown, SPLITS)
    table = noise_of(TABLE, unknown, privacy, 0.0)
    assert table.of(10) == 0.0 and table.of(9) == pytest.approx(0.5) and table.of(1) == 2.5
    assert set(noise_of(PUBLISHED, unknown, privacy, 0.0).sigma) == {2.5}


def test_the_common_split_is_one_that_every_device_can_hold(works: list[Work]) -> None:
    fleet = load_fleet(PAPER, "A")
    chosen = common_split(fleet, works, BATCH)
    assert all(chosen in within_cap(device, works, BATCH) for device in fleet.devices)
    cost_j = {work.split: sum(cost_of(each, work, BATCH).energy_j for each in fleet.devices) for work in works}
    assert cost_j[chosen] == min(cost_j[split] for split in within_cap(fleet.devices[0], works, BATCH))


@pytest.mark.parametrize("environment", ["A", "B"])
def test_more_weight_of_privacy_never_leaks_more_nor_costs_less(works: list[Work], environment: str) -> None:
    fleet = load_fleet(PAPER, environment)
    choice = simulate.sweep(fleet, works, sigma_table(SPLITS), BATCH)
    for device in fleet.devices:
        own = choice["devices"][device.name]
        assert simulate.is_monotone(own)
        assert set(own["splits"]) <= set(within_cap(device, works, BATCH))
        costs = {cost.split: cost.energy_j for cost in costs_of(fleet, device.name, works, BATCH)}
        held = [costs[split] for split in within_cap(device, works, BATCH)]
        assert own["joules"][0] == min(held)  # alpha 0: by energy alone
        assert own["fsim"][-1] <= min(own["fsim"])


def test_what_is_not_monotone_is_told() -> None:
    assert not simulate.is_monotone({"joules": [1.0, 0.5], "fsim": [0.4, 0.4]})
    assert not simulate.is_monotone({"joules": [1.0, 1.0], "fsim": [0.3, 0.4]})
    assert simulate.is_monotone({"joules": [1.0, None, 2.0], "fsim": [0.4, None, 0.3]})


def test_quick_noise_has_the_law_and_never_repeats() -> None:
    noise = QuickNoise(CutNoise(b"s" * 32, b"d" * 32))
    z = np.zeros((1, 64, 32, 32), np.float32)
    first, second = (noise.add(z, [b"a" * 16], 1, 2.0, "x").astype(np.float64) for _ in range(2))
    assert first.std() == pytest.approx(2.0, rel=0.02) and abs(first.mean()) < 0.05
    assert (first**4).mean() / first.var() ** 2 == pytest.approx(6.0, rel=0.1)  # Laplace's kurtosis
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def made_row(method: str, noise: str, accuracy: float, whole_j: float, seed: int = 0) -> dict[str, Any]:
    device = {
        "split": 3, "splits": [3], "alpha": 0.4, "sigma": 1.0, "fsim_clean": 0.5, "fsim": 0.4,
        "chain": 0.5 if method == "p3sl" else None, "own_accuracy": 0.4, "awake_share": 0.5,
        "joules": {"whole": whole_j},
    }  # fmt: skip
    names = ("work", "awake", "whole", "could_sleep", "never_asleep")
    return {
        "model": "vgg16_bn", "environment": "A", "method": method, "noise": noise, "seed": seed, "accuracy": accuracy,
        "setting": "a test", "own_accuracy": 0.4, "retaken_accuracy": accuracy + 0.02,
        "fsim_total": 2.8, "bytes": 10, "epoch_s": 5.0, "joules": dict.fromkeys(names, whole_j),
        "fsim_baselines": {"mean_colour": 2.0, "unrelated": 3.0, "no_protection": 3.5}, "devices": {"nano-1": device},
        "curve": [{"loss": 1.0, "test_accuracy": accuracy}],
    }  # fmt: skip


def test_p3sl_is_compared_with_each_baseline_on_points_and_joules() -> None:
    rows = [
        made_row("p3sl", TABLE, 0.5, 6.0), made_row("p3sl", TABLE, 0.6, 8.0, 1), made_row("asl", PUBLISHED, 0.5, 10.0),
        made_row("ssl", TABLE, 0.6, 10.0),
    ]  # fmt: skip
    cells = summarise(rows)
    assert [cell["seeds"] for cell in cells] == [[0, 1], [0], [0]]
    asl, ssl = compare(cells)
    assert (asl["method"], asl["points"], asl["energy"]["whole"]) == ("asl", pytest.approx(0.05), pytest.approx(0.7))
    assert asl["energy_aim"] == 0.70 and ssl["energy_aim"] == 0.55
    assert ssl["points"] == pytest.approx(-0.05)
    facts = dict.fromkeys(
        (
            "data",
            "epochs",
            "batch",
            "learning_rate",
            "aggregate_every",
            "engine",
            "label_mode",
            "rows_missing",
        ),
        "a test",
    )
    page = results_of({**facts, "cells": cells, "pairs": compare(cells), "rows": rows})
    assert "modelled" in to_text(page.tables[0]) and "nano-1" in to_text(page.tables[2])
    assert "<svg" in to_html(page)


def test_guesses_that_see_nothing_are_summed_over_the_devices() -> None:
    table = sigma_table(SPLITS)
    found = baselines_of(table, {})
    assert found == {"mean_colour": 0.0, "unrelated": 0.0, "no_protection": 0}


@pytest.mark.slow
def test_a_row_is_the_product_s_own_session_under_the_model_s_clock(tmp_path: Path) -> None:
    fleet = load_fleet(PAPER, "A")
    world = quick_p3sl_world(tmp_path / "world", tuple(device.name for device in fleet.devices))
    rates = P3slRates(4, 8, 0.02, 2, 0.0)
    table = sigma_table(range(1, 5))
    rows = {
        method: P3slLaboratory(world, {"A": fleet}, "onnxruntime", rates, 1).row(
            P3slCell("resnet18", method, TABLE, "A", 0), table
        )
        for method in ("p3sl", "ares")
    }
    for row in rows.values():
        assert len(row["curve"]) == 4 and row["energy_quality"].startswith("modelled")
        assert row["joules"]["work"] <= row["joules"]["awake"] <= row["joules"]["whole"]
        assert sum(row["curve"][0][name] for name in ("bytes_up", "bytes_down")) > 0
    own = rows["p3sl"]
    assert min(each["awake_share"] for each in own["devices"].values()) < 1.0
    assert own["joules"]["whole"] < own["joules"]["never_asleep"]
    assert all(each["chain"] is not None for each in own["devices"].values())
    assert own["epoch_s"] > rows["ares"]["epoch_s"]  # one after another


@pytest.mark.slow
def test_rows_are_kept_and_shown(tmp_path: Path) -> None:
    words = ["--quick", "--methods", "p3sl", "--epochs", "1", "--aggregate-every", "1", "-o", str(tmp_path)]
    options = parse([*words, "--format", "json"])
    fleet = load_fleet(PAPER, "A")
    world = quick_p3sl_world(tmp_path / "world", tuple(device.name for device in fleet.devices))
    table = leakage_table(world, "resnet18", 1)
    assert table is not None and table.unit == "sigma"
    laboratory = P3slLaboratory(world, {"A": fleet}, "onnxruntime", P3slRates(1, 8, 0.02, 1, 0.0), 1)
    (cell,) = cells_of(options)
    row = row_of(options, world, cell, tmp_path / "rows", laboratory, {}, "1 of 1")
    assert row is not None
    assert row_of(options, world, cell, tmp_path / "rows", None, {}, "1 of 1") == row
    document = document_of(options, world, [row], 1)
    assert {"method", "setting", "seed", "accuracy", "bytes", "seconds", "energy_j", "energy_quality"} <= row.keys()
    assert json.dumps(document)
