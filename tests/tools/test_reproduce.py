"""tools/reproduce: which rows are asked for, that finished ones are kept, how verdicts are reckoned, and a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from contract.errors import DataError, UsageError
from tools.reproduce import (
    BaselineCell,
    asked_of,
    baselines_of,
    cells_of,
    finished,
    parse,
    run_baselines,
    run_rows,
)
from tools.reproduce_baselines import CHOOSE, QUICK_BUDGET, Budget
from tools.reproduce_rows import Cell, Found, mean_by_images
from tools.reproduce_table import BASELINES, budget_text, cell_of, results_of, spread, summarise
from tools.reproduce_world import ARCHIVES, draw_shots, full_world, made, unpack

ROOT = Path(__file__).parents[2]
ASKED = asked_of(parse(["sa", "--quick"]), "quick", "aa")


def figures(sa: float, clean: float = 0.5, released: float = 0.3, tuned: float = 0.4) -> dict[str, Any]:
    return {
        "accuracy": {"sa": sa, "lp_clean": clean, "lp_released": released, "lp_tuned": tuned},
        "ridge_psnr_db": 16.0, "mean_colour_psnr_db": 11.0, "ridge_note": "flatters", "images": 50,
        "test_images": 100, "frontend_engine": "torch 2 on cpu", "training_device": "torch 2 on cpu", "seconds": 1.0,
    }  # fmt: skip


def row(shots: int, kappa: float, seed: int, sa: float, **probes: float) -> dict[str, Any]:
    return {"shots": shots, "kappa": kappa, "seed": seed, **figures(sa, **probes)}


def baseline(name: str, shots: int, seed: int, share: float, emulator: float | None = None) -> dict[str, Any]:
    return {
        "baseline": name, "shots": shots, "seed": seed, "accuracy": share, "emulator_accuracy": emulator, "lr": 1e-4,
        "held_out_accuracy": 0.5, "images": 50, "test_images": 100, "training_device": "torch 2 on cpu", "seconds": 1.0,
    }  # fmt: skip


# -- what is asked


def test_full_asks_for_every_published_setting() -> None:
    options = parse(["sa"])
    assert (options.engine, options.test_images) == ("torch", None)
    cells = cells_of(options.shots, options.kappas, options.seeds)
    assert len(cells) == len(set(cells)) == 12
    assert {(cell.shots, cell.kappa, cell.seed) for cell in cells} == {
        (shots, kappa, seed) for shots in (5, 10) for kappa in (0.25, 1.0) for seed in (1, 42, 215)
    }


def test_quick_is_small_and_runs_the_devices_own_engine() -> None:
    options = parse(["sa", "--quick"])
    assert options.engine == "onnxruntime"
    assert cells_of(options.shots, options.kappas, options.seeds) == [Cell(5, 0.25, 1), Cell(5, 1.0, 1)]


def test_baselines_in_the_clear_are_all_asked_for_unless_it_must_be_quick() -> None:
    assert parse(["sa"]).baselines == list(CHOOSE) == list(BASELINES)
    assert parse(["sa", "--quick"]).baselines == [] == parse(["sa", "--baselines", "none"]).baselines
    chosen = parse(["sa", "--quick", "--baselines", "ln_tuning,split_learning,ln_tuning"]).baselines
    assert chosen == ["ln_tuning", "split_learning"]


def test_a_baseline_is_asked_for_once_whatever_the_noise() -> None:
    assert baselines_of(["ln_tuning"], [5, 10], [1, 42]) == [
        BaselineCell("ln_tuning", shots, seed) for seed in (1, 42) for shots in (5, 10)
    ]


def test_rows_are_chosen_and_named_once() -> None:
    options = parse(["sa", "--seeds", "3,1,3", "--shots", "2", "--kappas", "0.5"])
    assert cells_of(options.shots, options.kappas, options.seeds) == [Cell(2, 0.5, 3), Cell(2, 0.5, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sa", "--seeds", "1,x"], "--seeds"),
        (["sa", "--seeds", "1,-3"], "--seeds has -3"),
        (["sa", "--seeds", "99999999999999999999"], "--seeds has 9"),
        (["sa", "--shots", "5,0"], "--shots has 0"),
        (["sa", "--kappas", "1.5"], "--kappas has 1.5"),
        (["sa", "--kappas", "nan"], "--kappas has nan"),
        (["sa", "--engine", "fake"], "fake"),
        (["sa", "--baselines", "ln_tuning,lora"], "--baselines.*'lora'"),
        (["sa", "--test-images", "0"], "--test-images"),
        (["sa", "--quick", "--test-images", "10"], "--test-images belongs"),
        (["sa", "--quick", "--shared", "x"], "--shared belongs"),
        (["p3sl"], "p3sl"),
        ([], "study"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        parse(words)
    others = {"--seeds", "--shots", "--kappas", "--shared", "--test-images", "--baselines"} - set(words)
    assert not [flag for flag in others if flag in error.value.cause]


# -- data


def test_fewer_shots_are_a_part_of_more_and_seeds_differ() -> None:
    names = [f"cifar10/train/{label}/{number:03}.jpg" for label in "ab" for number in range(50)]
    five, ten, other = draw_shots(names, 5, 1), draw_shots(names, 10, 1), draw_shots(names, 10, 42)
    assert len(five) == 10 and len(ten) == len(set(ten)) == 20
    assert set(five) < set(ten) and set(ten) != set(other)
    assert sum(name.split("/")[2] == "a" for name in ten) == 10


def test_an_archive_of_the_drawn_files_alone_gives_the_same_draw() -> None:
    names = [f"x/train/{label}/{number:03}.jpg" for label in "ab" for number in range(50)]
    kept = set(draw_shots(names, 10, 1)) | set(draw_shots(names, 10, 42))
    assert draw_shots(sorted(kept), 5, 42) == draw_shots(names, 5, 42)


def test_too_few_images_are_an_error_not_fewer_shots() -> None:
    with pytest.raises(DataError, match="expected 3 training images in each class, found 2"):
        draw_shots(["t/a/1", "t/a/2", "t/a/3", "t/b/1", "t/b/2"], 3, 1)


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar10\.zip") as error:
        full_world(tmp_path / "work", tmp_path / "nowhere", None)
    assert all(name in error.value.cure for name in ARCHIVES)


def test_what_was_interrupted_is_made_anew_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("c/1.jpg", b"one")
    (tmp_path / "partial-out").mkdir()
    (tmp_path / "partial-out" / "torn").write_text("x")
    out = made(tmp_path / "out", lambda path: unpack(archive, path, ["c/1.jpg"]))
    assert sorted(path.name for path in out.rglob("*")) == ["1.jpg", "c"]
    assert made(out, lambda path: pytest.fail("made twice")) == out


# -- resuming


def test_finished_rows_are_not_computed_again(tmp_path: Path) -> None:
    computed: list[Cell] = []

    def compute(cell: Cell) -> dict[str, Any]:
        computed.append(cell)
        return figures(0.6)

    cells = [Cell(5, 0.25, 1), Cell(5, 1.0, 1)]
    first = run_rows(tmp_path, ASKED, cells[:1], compute)
    again = run_rows(tmp_path, ASKED, cells, compute)
    assert computed == cells and again[0] == first[0]
    assert again[1] == {**ASKED, **vars(cells[1]), **figures(0.6)}


def test_finished_baselines_are_kept_whatever_the_engine_but_not_for_another_budget(tmp_path: Path) -> None:
    computed: list[BaselineCell] = []

    def compute(cell: BaselineCell) -> dict[str, Any]:
        computed.append(cell)
        return baseline(cell.baseline, cell.shots, cell.seed, 0.6)

    cells = baselines_of(["ln_tuning", "split_learning"], [5], [1])
    first = run_baselines(tmp_path, ASKED, cells[:1], QUICK_BUDGET, compute)
    again = run_baselines(tmp_path, {**ASKED, "engine": "torch"}, cells, QUICK_BUDGET, compute)
    assert computed == cells and again[0] == first[0]
    assert first[0]["budget"] == json.loads(json.dumps(QUICK_BUDGET.document()))
    run_baselines(tmp_path, ASKED, cells[:1], Budget(), compute)
    assert computed == [*cells, cells[0]]


def test_a_figure_never_takes_the_place_of_what_was_asked() -> None:
    """A row once stored its number of test images over the number asked for, and was computed again for ever."""
    assert not {field.name for field in fields(Found)} & {*ASKED, *vars(Cell(5, 1.0, 1))}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"aa"', '"another package"'),
        lambda text: text.replace('"accuracy"', '"something else"'),
        lambda text: "[]",
    ],
)
def test_a_row_that_is_torn_or_of_another_package_is_computed_again(tmp_path: Path, spoil: Any) -> None:
    cells, computed = [Cell(5, 1.0, 1)], list[Cell]()
    run_rows(tmp_path, ASKED, cells, lambda cell: figures(0.6))
    (path,) = tmp_path.glob("*.json")
    path.write_text(spoil(path.read_text()))
    assert finished(path, {**ASKED, **vars(cells[0])}) is None
    run_rows(tmp_path, ASKED, cells, lambda cell: computed.append(cell) or figures(0.6))
    assert computed == cells


# -- arithmetic


def test_spread_is_mean_and_sample_deviation_and_unknown_for_one_seed() -> None:
    assert spread([0.4, 0.5, 0.6]) == {"mean": pytest.approx(0.5), "std": pytest.approx(0.1)}
    assert spread([0.4]) == {"mean": 0.4, "std": None}


def test_margins_are_paired_by_seed() -> None:
    cell = cell_of([row(5, 1.0, 1, 0.60, clean=0.50), row(5, 1.0, 42, 0.70, clean=0.60)])
    assert cell["margins"]["lp_clean"] == {"mean": pytest.approx(0.1), "std": pytest.approx(0.0), "ahead": 2}
    assert cell["sa_beats_all"] is True
    assert cell["verdict"] == (
        "SA beats all three linear probes; the nearest is lp_clean (+10.0 points, ahead in 2 of 2 seeds)"
    )


def test_a_probe_that_is_ahead_or_level_is_named_with_its_lead() -> None:
    cell = cell_of([row(5, 1.0, 1, 0.5, clean=0.53, tuned=0.25), row(5, 1.0, 42, 0.75, clean=0.78, tuned=1.0)])
    assert cell["sa_beats_all"] is False
    assert cell["verdict"] == (
        "SA does not beat lp_clean (-3.0 points, ahead in 0 of 2 seeds), lp_tuned (+0.0 points, ahead in 1 of 2 seeds)"
    )


def test_cells_are_by_shots_and_kappa() -> None:
    rows = [row(10, 1.0, 1, 0.7), row(5, 1.0, 42, 0.5), row(5, 0.25, 1, 0.8), row(5, 1.0, 1, 0.6)]
    cells = summarise(rows)
    assert [(cell["shots"], cell["kappa"], cell["seeds"]) for cell in cells] == [
        (5, 0.25, [1]), (5, 1.0, [1, 42]), (10, 1.0, [1])
    ]  # fmt: skip
    assert cells[1]["accuracy"]["sa"]["mean"] == pytest.approx(0.55)


def test_baselines_stand_beside_every_cell_of_their_shots_paired_by_seed() -> None:
    rows = [row(5, kappa, seed, 0.6 + 0.1 * place) for kappa in (0.25, 1.0) for place, seed in enumerate((1, 42))]
    others = [baseline("ln_tuning", 5, 42, 0.8), baseline("ln_tuning", 5, 1, 0.5), baseline("ln_tuning", 10, 1, 0.0)]
    for cell in summarise(rows, others):
        assert set(cell["baselines"]) == {"ln_tuning"}
        compared = cell["baselines"]["ln_tuning"]
        assert compared["seeds"] == [1, 42] and compared["emulator_accuracy"] is None
        assert compared["accuracy"]["mean"] == pytest.approx(0.65)
        assert compared["lead"] == {"mean": pytest.approx(0.0), "std": pytest.approx(0.1414, abs=1e-4), "ahead": 1}


def document(rows: list[dict[str, Any]], baselines: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data": "digits", "package_digest": "ab" * 32, "backend_lr": 1e-5, "head_lr": 1e-3, "alpha": 0.1, "rows": rows,
        "cells": summarise(rows, baselines), "baselines": baselines, "baselines_budget": Budget().document(),
    }  # fmt: skip


def test_the_report_says_engine_and_verdict_of_every_row() -> None:
    page = results_of(document([row(5, 1.0, 1, 0.6)], []))
    verdicts, listed = page.tables[1].rows, page.tables[2].rows
    assert verdicts[0][1].startswith("SA beats all three")
    assert "torch 2 on cpu" in listed[0]
    assert len(page.tables) == 3


def test_the_report_says_grid_and_budget_and_the_emulators_accuracy() -> None:
    page = results_of(document([row(5, 1.0, 1, 0.6)], [baseline("offsite_tuning", 5, 1, 0.55, 0.4)]))
    table, said = page.tables[3], str(dict(page.facts)["baselines in the clear"])
    (line,) = table.rows
    cells = dict(zip(table.columns, line, strict=True))
    assert cells["offsite_tuning"] == "55.00 (emulator 40.00; SA +5.0, ahead in 1 of 1)"
    assert (cells["sa"], cells["fine_tuning"]) == ("60.00", "-")
    assert "100 epochs (offsite tuning 50)" in said and "1e-05, 0.0001, 0.001, 0.01" in said
    assert "too short" not in said and "too short to compare with" in budget_text(QUICK_BUDGET.document())


def test_devices_count_by_their_images() -> None:
    assert mean_by_images([(1.0, 30), (0.0, 10)]) == 0.75


@pytest.mark.slow
def test_a_quick_run_ends_with_a_table_and_goes_on_from_its_rows(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "tools.reproduce",
        "sa",
        "--quick",
        "--shots",
        "2",
        "--kappas",
        "0.25",
        "--baselines",
        "offsite_tuning,split_learning",
        "-o",
        tmp_path,
    ]
    runs = [
        subprocess.run([*map(str, words), "--format", "json"], cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:]
    document = json.loads(runs[0].stdout)
    assert document == json.loads(runs[1].stdout)
    assert "== row" in runs[0].stderr and "== row" not in runs[1].stderr
    (only,) = document["rows"]
    assert only["images"] == 10 and only["frontend_engine"].startswith("onnxruntime ")
    assert only["mean_colour_psnr_db"] < only["ridge_psnr_db"] < 40
    assert all(0.3 < share <= 1 for share in only["accuracy"].values())  # chance is 0.2 +- 0.014
    assert document["cells"][0]["verdict"].startswith("SA ")
    assert [each["baseline"] for each in document["baselines"]] == ["offsite_tuning", "split_learning"]
    assert all(each["images"] == 10 and 0 < each["accuracy"] <= 1 for each in document["baselines"])
    assert 0 < document["baselines"][0]["emulator_accuracy"] <= 1
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
