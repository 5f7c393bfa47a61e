"""The reproduction of EEFT: how images are dealt, what rows become, and one row from end to end (slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import UsageError
from server_runtime.report import to_html
from tools import reproduce_eeft as command
from tools.kept_rows import claim
from tools.reproduce_eeft_rows import ABLATED, COMPARED, METHODS, EeftCell
from tools.reproduce_eeft_table import agreement, compare, results_of, summarise, with_result
from tools.reproduce_eeft_world import Group, deal, parts_of

ROOT = Path(__file__).parents[2]
GROUP = Group("type-1", "pool", ("a", "b"), 3, 6)
NAMES = [f"pool/train/{label}/{number}.png" for label in "ab" for number in range(8)]


def test_devices_of_a_group_share_nothing_and_have_as_many_of_every_class() -> None:
    dealt = deal(NAMES, GROUP, 0)
    everything = [name for own in dealt.values() for name in own]
    assert len(everything) == len(set(everything)) == 12
    for own in dealt.values():
        assert [sum(name.split("/")[2] == label for name in own) for label in "ab"] == [2, 2]
    assert deal(NAMES, GROUP, 0) == dealt and deal(NAMES, GROUP, 1) != dealt


@pytest.mark.parametrize("split", [True, False])
def test_no_packed_image_is_both_trained_and_tested_on(split: bool) -> None:
    folders = ("x/train/a", "x/test/a") if split else ("x/a",)
    names = [f"{folder}/{number}.png" for folder in folders for number in range(5)]
    parts = parts_of(names, (3, 4))
    assert not set(parts["train"]) & set(parts["test"]) and len(parts["train"]) == 3
    assert len(parts["test"]) == (4 if split else 2)  # half of what there is
    if split:
        assert all("/test/" in name for name in parts["test"])


def row(method: str, seed: int, accuracy: float, groups: dict[str, int] | None = None) -> dict[str, Any]:
    alphas = {"a-1": [0.1, 0.2], "a-2": [0.1, 0.3], "b-1": [0.9, 0.2]} if method == "eeft" else None
    each = {
        "epoch": 1, "loss": 0.5, "accuracy": {"a": accuracy, "b": accuracy}, "groups": groups, "bytes_up": 12_000_000,
        "bytes_down": 12_000_000, "masked_bytes_up": None,
    }  # fmt: skip
    return {
        "scenario": "task", "method": method, "seed": seed, "accuracy": accuracy, "trained_accuracy": accuracy,
        "accuracy_by_group": {"a": accuracy, "b": accuracy}, "curve": [each], "alphas": alphas,
        "devices": {"a-1": "a", "a-2": "a", "b-1": "b"}, "bytes_up_device_round": 4e6, "bytes_down_device_round": 4e6,
        "parameters": 10, "seconds": 1.0, "local_epochs": 3, "learning_rate": 0.1,
    }  # fmt: skip


FOUND = {"a-1": 0, "a-2": 0, "b-1": 1}
ROWS = [row("eeft", 0, 0.8, FOUND), row("eeft", 1, 0.7, dict.fromkeys(FOUND, 0)), row("fedavg", 0, 0.5)]


def test_agreement_counts_pairs_that_groups_and_tasks_put_alike() -> None:
    assert [agreement(each) for each in ROWS] == [1.0, pytest.approx(1 / 3), None]


def test_rows_become_cells_and_leads_on_common_seeds() -> None:
    eeft, fedavg = summarise(ROWS)
    assert eeft["seeds"] == [0, 1] and eeft["accuracy"]["mean"] == pytest.approx(0.75)
    assert eeft["groups"] == pytest.approx(2 / 3) and fedavg["groups"] is None
    (pair,) = compare(ROWS)
    assert pair["other"] == "fedavg" and pair["seeds"] == 1 and pair["lead"]["mean"] == pytest.approx(0.3)


def test_a_row_tells_its_setting_and_the_bytes_of_all_rounds_and_devices() -> None:
    told = with_result(ROWS[0])
    assert (told["setting"], told["bytes"]) == ("task, rounds 1, epochs of each 3, rate 0.1", 24_000_000)
    masked = {**ROWS[0], "curve": [{**each, "masked_bytes_up": 2_000_000} for each in ROWS[0]["curve"] * 2]}
    assert with_result(masked)["bytes"] == 28_000_000  # what the masks would have let through


def test_the_page_shows_distances_and_alpha_as_pictures() -> None:
    document = {
        "data": "<b>", "rounds": 1, "local_epochs": 1, "batch": 1, "learning_rate": 0.1, "body_learning_rate": 0.1,
        "alone": 0, "engine": "torch", "cells": summarise(ROWS), "pairs": compare(ROWS), "rows": ROWS,
    }  # fmt: skip
    page = to_html(results_of(document))
    assert page.count("<svg") == 2 and "<b>" not in page
    assert "a-1, b-1: 0.8000" in page and page.count("<polyline") == 2


def test_a_row_is_chosen_by_its_name_and_unknown_ones_are_named() -> None:
    options = command.parse(["--quick", "--only", "task/eeft/3"])
    assert command.cells_of(options) == [EeftCell("task", "eeft", 3)]
    cells = command.cells_of(command.parse(["--shared", "x", "--seeds", "0,1", "--ablations"]))
    assert len(cells) == len(set(cells)) == 2 * 3 * len(COMPARED) + len(ABLATED)
    for words, said in (
        (["--methods", "eft"], "did you mean 'eeft'"), (["--quick", "--scenarios", "environment"], "no scenario"),
        (["--rounds", "0"], "--rounds should be 1"), (["--quick", "--shared", "x"], "--shared belongs"),
        (["--learning-rate", "0"], "more than 0"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            command.parse(words)
    for only, said in (("task/none/0", "no method 'none'"), ("task/eeft", "SCENARIO/METHOD/SEED")):
        with pytest.raises(UsageError, match=said):
            command.parse(["--only", only])


def test_every_method_is_compared_or_an_ablation() -> None:
    assert {*COMPARED, *ABLATED} == set(METHODS)


def test_a_row_that_another_command_is_at_is_left_to_it(tmp_path: Path) -> None:
    with claim(tmp_path / "row.json") as first, claim(tmp_path / "row.json") as second:
        assert first and not second
    with claim(tmp_path / "row.json") as again:
        assert again


@pytest.mark.slow
def test_quick_rows_have_accuracy_bytes_and_energy_with_its_quality(tmp_path: Path) -> None:
    words = ["--quick", "--scenarios", "task", "--methods", "eeft,fedavg", "--rounds", "2", "--alone", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.reproduce", "eeft", *words, "--format", "json", "-o", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    eeft, fedavg = document["rows"]
    for row in (eeft, fedavg):
        assert {"method", "setting", "seed", "accuracy", "bytes", "seconds", "energy_j", "energy_quality"} <= set(row)
    assert eeft["bytes_up_device_round"] < fedavg["bytes_up_device_round"] / 4
    assert (eeft["energy_j"] is None) == (eeft["energy_bound_j"] is None) and eeft["energy_quality"]
    assert set(eeft["curve"][-1]["groups"]) == set(eeft["devices"]) and len(eeft["curve"]) == 2
    assert 0 <= eeft["accuracy"] <= 1 and Path(document["report"]).read_text().count("<svg") == 2
