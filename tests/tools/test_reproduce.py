"""tools/reproduce: which rows are asked for, that finished ones are kept, how verdicts are reckoned, and a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from contract.errors import DataError, UsageError
from exporter import cli as exporter_cli
from exporter import plan as exporter_plan
from tools.kept_rows import finished
from tools.reproduce import (
    QUICK_EFFORT,
    Bench,
    asked_of,
    available,
    listed_from,
    missing,
    parse,
    run_rows,
)
from tools.reproduce_baselines import CHOOSE, QUICK_BUDGET, Budget
from tools.reproduce_cells import STUDIES, VARIANTS, Asked, Cell, cells_of, codes_shared_by
from tools.reproduce_rows import Adaptation, Effort, mean_by_images
from tools.reproduce_table import BASELINES, budget_text, cell_of, results_of, spread, summarise
from tools.reproduce_world import ARCHIVES, SiteFolders, World, draw_shots, full_world, halves, made, open_task, unpack
from tools.share import WHOLE, share_of

ROOT = Path(__file__).parents[2]


def figures(sa: float, clean: float = 0.5, released: float = 0.3, tuned: float = 0.4) -> dict[str, Any]:
    return {
        "accuracy": {"sa": sa, "lp_clean": clean, "lp_released": released, "lp_tuned": tuned},
        "ridge_psnr_db": 16.0, "mean_colour_psnr_db": 11.0, "ridge_note": "flatters", "images": 50,
        "test_images": 100, "frontend_engine": "torch 2 on cpu", "training_device": "torch 2 on cpu", "seconds": 1.0,
        "command": "tools/reproduce sa --this-row",
    }  # fmt: skip


def row(shots: int, kappa: float, seed: int, sa: float, **probes: float) -> dict[str, Any]:
    return {**vars(Cell("main", "digits", shots, kappa, seed)), **figures(sa, **probes)}


def baseline(name: str, shots: int, seed: int, share: float, emulator: float | None = None) -> dict[str, Any]:
    return {
        **vars(Cell("baselines", "digits", shots, None, seed, name)), "accuracy": share, "emulator_accuracy": emulator,
        "lr": 1e-4, "held_out_accuracy": 0.5, "images": 50, "test_images": 100, "training_device": "torch 2 on cpu",
        "seconds": 1.0, "command": "tools/reproduce sa --this-baseline",
    }  # fmt: skip


# -- what is asked


def cells_for(words: list[str]) -> list[Cell]:
    return cells_of(asked_of(parse(words)))


def test_full_asks_for_every_published_setting() -> None:
    options = parse(["sa"])
    assert (options.engine, options.test_images) == ("torch", None)
    cells = cells_for(["sa"])
    main = [cell for cell in cells if cell.study == "main"]
    assert len(main) == len(set(main)) == 36
    assert {(cell.dataset, cell.shots, cell.kappa, cell.seed) for cell in main} == {
        (dataset, shots, kappa, seed) for dataset in ("cifar10", "pacs-photo") for shots in (3, 5, 10)
        for kappa in (0.25, 1.0) for seed in (1, 42, 215)
    }  # fmt: skip
    assert len(cells) - len(main) == len(CHOOSE) * 2 * 3 * 3


def test_quick_is_small_and_runs_the_devices_own_engine() -> None:
    assert parse(["sa", "--quick"]).engine == "onnxruntime"
    assert cells_for(["sa", "--quick"]) == [Cell("main", "digits", 5, kappa, 1) for kappa in (0.25, 1.0)]


def test_baselines_in_the_clear_are_named_alike_and_asked_for_once_whatever_the_noise() -> None:
    assert tuple(BASELINES) == tuple(CHOOSE) == STUDIES["baselines"].cases
    words = ["sa", "--quick", "--studies", "baselines", "--cases", "ln_tuning", "--shots", "5,10", "--seeds", "1,42"]
    assert cells_for([*words, "--kappas", "0.5,1"]) == [
        Cell("baselines", "digits", shots, None, seed, "ln_tuning") for seed in (1, 42) for shots in (5, 10)
    ]


def test_all_studies_are_asked_for_by_one_word_and_rows_once() -> None:
    cells = cells_for(["sa", "--studies", "all"])
    assert {cell.study for cell in cells} == set(STUDIES) and len(cells) == len(set(cells))
    assert {cell.case for cell in cells if cell.study == "ablation"} == set(VARIANTS)
    assert len({cell.name for cell in cells}) == len(cells)


def test_rows_are_chosen_and_named_once() -> None:
    words = ["sa", "--studies", "main", "--datasets", "cifar10", "--seeds", "3,1,3", "--shots", "2", "--kappas", "0.5"]
    assert cells_for(words) == [Cell("main", "cifar10", 2, 0.5, seed) for seed in (3, 1)]


def test_shares_hold_every_row_once_and_leave_rows_with_the_same_test_codes_together() -> None:
    cells = cells_for(["sa", "--studies", "all"])
    shares = [share_of(cells, (part, 7), codes_shared_by) for part in range(1, 8)]
    assert sorted(cell.name for share in shares for cell in share) == sorted(cell.name for cell in cells)
    for setting in {(cell.study, cell.package, cell.dataset, cell.kappa, cell.seed) for cell in cells} - {None}:
        if setting[0] != "baselines":
            holders = [
                place for place, share in enumerate(shares)
                if any((each.study, each.package, each.dataset, each.kappa, each.seed) == setting for each in share)
            ]  # fmt: skip
            assert len(holders) == 1
    whole = share_of(cells, WHOLE, codes_shared_by)
    assert sorted(cell.name for cell in whole) == sorted(cell.name for cell in cells)


def test_what_the_exporter_does_not_know_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(("ablation",), ("cifar10",), (1,), cases=("sa", "paper_tuning", "paper_without_hilbert"))
    monkeypatch.setattr(exporter_plan, "TUNES", ("noise-aware", "none"))
    there, left = available(cells_of(asked))
    assert [cell.case for cell in there] == ["sa"]
    assert [reason for _, reason in left] == ["export-frontend knows no --tune paper"] * 2
    monkeypatch.setattr(exporter_plan, "TUNES", ("noise-aware", "none", "paper"))
    hilbert = [field for field in exporter_cli.FIELDS if field.name == "no_hilbert"]
    there, left = available(cells_of(asked))
    assert [(cell.case, cell.package) for cell in there][:2] == [("sa", "shipped"), ("paper_tuning", "paper")]
    assert [reason for _, reason in left] == ([] if hilbert else ["export-frontend knows no --no-hilbert"])


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
        (["sa", "--studies", "main,lora"], "--studies.*'lora'"),
        (["sa", "--studies", "baselines", "--cases", "ln_tunin"], "--cases has 'ln_tunin'.*ln_tuning"),
        (["sa", "--studies", "risk", "--cases", "keyed"], "--cases has 'keyed'"),
        (["sa", "--share", "0/4"], "--share"),
        (["sa", "--share", "5/4"], "--share"),
        (["sa", "--test-images", "0"], "--test-images"),
        (["sa", "--quick", "--test-images", "10"], "--test-images belongs"),
        (["sa", "--quick", "--shared", "x"], "--shared belongs"),
        (["sa", "--quick", "--datasets", "cifar10"], "--datasets belongs"),
        (["p3sl"], "p3sl"),
        ([], "study"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        parse(words)
    others = {"--seeds", "--shots", "--kappas", "--shared", "--test-images", "--datasets", "--share"} - set(words)
    assert not [flag for flag in others if flag in error.value.cause.split()]


def test_names_are_listed_once_and_none_is_a_choice() -> None:
    names = listed_from(("a", "b"))
    assert (names("b,a,b"), names("all"), names("none")) == (["b", "a"], ["a", "b"], [])


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
    with pytest.raises(DataError, match=r"pacs64\.zip"):
        full_world(tmp_path / "work", tmp_path / "nowhere", None, ["pacs-photo"])


def test_half_of_a_class_is_tested_and_no_shot_is_drawn_from_it(tmp_path: Path) -> None:
    names = [f"pacs64/photo/{label}/{number:02}.jpg" for label in ("dog", "house") for number in range(9)]
    train, test = halves(names)
    assert sorted([*train, *test]) == sorted(names) and not set(train) & set(test)
    assert sum("dog" in name for name in test) == sum("house" in name for name in test) == 4
    archive = tmp_path / "pacs64.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for name in [*names, "pacs64/sketch/dog/1.jpg"]:
            opened.writestr(name, name)
    site = open_task(tmp_path, "pacs-photo", archive, None).site(3, 1)
    shown = {part: {path.name for path in folder.rglob("*.jpg")} for part, folder in
             (("train", site.train["device-a"]), ("test", site.test["device-a"]))}  # fmt: skip
    assert site.classes == ("dog", "house")
    assert (
        len(list(site.train["device-a"].rglob("*.jpg"))) == 6 and len(list(site.test["device-a"].rglob("*.jpg"))) == 8
    )
    assert {path.relative_to(site.train["device-a"]) for path in site.train["device-a"].rglob("*.jpg")}.isdisjoint(
        path.relative_to(site.test["device-a"]) for path in site.test["device-a"].rglob("*.jpg")
    )
    assert shown["train"] and shown["test"]
    assert open_task(tmp_path, "pacs-photo", archive, 3).test_count == 3


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


class Counting:
    """A laboratory that counts what it is asked for."""

    def __init__(self, computed: list[Cell]) -> None:
        self._computed = computed

    def row(self, cell: Cell) -> dict[str, Any]:
        self._computed.append(cell)
        return figures(0.6) if cell.study == "main" else {**baseline(cell.case, 5, 1, 0.6), **vars(cell)}


def no_site(dataset: str, shots: int, seed: int) -> SiteFolders:
    raise AssertionError("no site is drawn here")


def bench_of(
    root: Path, words: list[str], computed: list[Cell], effort: Effort = QUICK_EFFORT, weights: bytes = b"w"
) -> Bench:
    (root / "front").mkdir(exist_ok=True)
    if not (root / "front" / "manifest.json").exists():
        (root / "front" / "manifest.json").write_bytes(b"a package")
    (root / "weights").write_bytes(weights)
    world = World("quick", root, "vit", {}, root / "weights", root, {"digits": "digits"}, no_site)
    options = parse(["sa", "--quick", *words])
    return Bench(options, world, root / "rows", effort, lambda world, engine, effort: Counting(computed))


MAIN = [Cell("main", "digits", 5, 0.25, 1), Cell("main", "digits", 5, 1.0, 1)]
CLEAR = [Cell("baselines", "digits", 5, None, 1, name) for name in ("ln_tuning", "split_learning")]


def never() -> float:
    return 0.0


def test_finished_rows_are_not_computed_again_and_bear_their_command(tmp_path: Path) -> None:
    computed: list[Cell] = []
    bench = bench_of(tmp_path, [], computed)
    first = run_rows(bench, MAIN[:1], never)
    again = run_rows(bench, MAIN, never)
    assert computed == MAIN and again[0] == first[0]
    assert again[1]["accuracy"] == figures(0.6)["accuracy"] and again[1]["kappa"] == 1.0
    assert again[1]["command"] == (
        "tools/reproduce sa --quick --studies main --shots 5 --seeds 1 --kappas 1 --engine onnxruntime"
    )
    words = again[1]["command"].split()[1:]
    assert cells_for(words) == [MAIN[1]]


def test_every_rows_command_asks_for_that_row_alone() -> None:
    for cell in cells_for(["sa", "--studies", "all"]):
        assert cells_for(["sa", "--datasets", cell.dataset, *cell.words()]) == [cell]


def test_a_share_computes_its_rows_and_reports_all_that_are_there(tmp_path: Path) -> None:
    computed: list[Cell] = []
    run_rows(bench_of(tmp_path, ["--share", "1/2"], computed), MAIN, never)
    assert computed == MAIN[:1]
    rows = run_rows(bench_of(tmp_path, ["--share", "2/2"], computed), MAIN, never)
    assert computed == MAIN and len(rows) == 2


def test_no_row_is_begun_when_the_time_is_over_and_what_lacks_is_named(tmp_path: Path) -> None:
    computed: list[Cell] = []
    ticks = iter((0.0, 9.0, 11.0))
    rows = run_rows(bench_of(tmp_path, ["--stop-after-s", "10"], computed), MAIN, lambda: next(ticks))
    assert computed == MAIN[:1] and len(rows) == 1
    assert missing(MAIN, rows) == [(MAIN[1], "not computed yet")]


def test_baselines_are_kept_whatever_engine_and_package_but_not_for_another_budget_or_model(tmp_path: Path) -> None:
    computed: list[Cell] = []
    run_rows(bench_of(tmp_path, [], computed), CLEAR[:1], never)
    (tmp_path / "front" / "manifest.json").write_bytes(b"another package")
    rows = run_rows(bench_of(tmp_path, ["--engine", "torch"], computed), CLEAR, never)
    assert computed == CLEAR
    assert rows[0]["budget"] == json.loads(json.dumps(QUICK_BUDGET.document()))
    run_rows(bench_of(tmp_path, [], computed, Effort(Budget())), CLEAR[:1], never)
    assert computed == [*CLEAR, CLEAR[0]]
    run_rows(bench_of(tmp_path, [], computed, weights=b"other"), CLEAR[:1], never)
    assert computed == [*CLEAR, CLEAR[0], CLEAR[0]]


def test_another_way_to_adapt_makes_other_rows(tmp_path: Path) -> None:
    computed: list[Cell] = []
    run_rows(bench_of(tmp_path, [], computed), MAIN[:1], never)
    run_rows(bench_of(tmp_path, [], computed, Effort(QUICK_BUDGET, 5, Adaptation(alpha=0.01))), MAIN[:1], never)
    assert computed == [MAIN[0], MAIN[0]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"package_digest": "', '"package_digest": "0'),
        lambda text: text.replace('"accuracy"', '"something else"'),
        lambda text: "[]",
    ],
)
def test_a_row_that_is_torn_or_of_another_package_is_computed_again(tmp_path: Path, spoil: Any) -> None:
    computed: list[Cell] = []
    bench = bench_of(tmp_path, [], computed)
    run_rows(bench, MAIN[1:], never)
    (path,) = (tmp_path / "rows").glob("*.json")
    path.write_text(spoil(path.read_text()))
    assert finished(path, bench.head(MAIN[1]), "accuracy") is None
    run_rows(bench, MAIN[1:], never)
    assert computed == [MAIN[1], MAIN[1]]


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
    for cell in summarise([*rows, *others]):
        assert set(cell["baselines"]) == {"ln_tuning"}
        compared = cell["baselines"]["ln_tuning"]
        assert compared["seeds"] == [1, 42] and compared["emulator_accuracy"] is None
        assert compared["accuracy"]["mean"] == pytest.approx(0.65)
        assert compared["lead"] == {"mean": pytest.approx(0.0), "std": pytest.approx(0.1414, abs=1e-4), "ahead": 1}


def document(rows: list[dict[str, Any]], lacking: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {
        "data": {"digits": "scikit-learn's"}, "package_digest": "ab" * 32, "backend_lr": 1e-5, "head_lr": 1e-3,
        "alpha": 0.1, "rows": rows, "baselines_budget": Budget().document(), "missing": lacking or [],
    }  # fmt: skip


def tables_of(rows: list[dict[str, Any]], lacking: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {table.title: table for table in results_of(document(rows, lacking)).tables}


def test_the_report_says_engine_command_and_verdict_of_every_row() -> None:
    tables = tables_of([row(5, 1.0, 1, 0.6)])
    assert tables["Verdicts"].rows[0][1].startswith("SA beats all three")
    (line,) = tables["Rows"].rows
    assert line[0] == "tools/reproduce sa --this-row" and "torch 2 on cpu" in line
    assert len(tables) == 3


def test_the_report_names_rows_that_are_not_there_with_the_reason() -> None:
    lacking = [{"row": "main, 5 shots", "reason": "not computed yet"}]
    assert tables_of([], lacking)["Rows that are not there"].rows == (("main, 5 shots", "not computed yet"),)


def test_the_report_says_grid_and_budget_and_the_emulators_accuracy() -> None:
    rows = [row(5, 1.0, 1, 0.6), baseline("offsite_tuning", 5, 1, 0.55, 0.4)]
    table = tables_of(rows)["Baselines that train in the clear, accuracy in %"]
    said = str(dict(results_of(document(rows)).facts)["baselines in the clear"])
    (line,) = table.rows
    cells = dict(zip(table.columns, line, strict=True))
    assert cells["offsite_tuning"] == "55.00 (emulator 40.00; SA +5.0, ahead in 1 of 1)"
    assert (cells["sa"], cells["fine_tuning"]) == ("60.00", "-")
    assert "100 epochs (offsite tuning 50)" in said and "1e-05, 0.0001, 0.001, 0.01" in said
    assert "too short" not in said and "too short to compare with" in budget_text(QUICK_BUDGET.document())


def test_devices_count_by_their_images() -> None:
    assert mean_by_images([(1.0, 30), (0.0, 10)]) == 0.75


@pytest.mark.slow
def test_a_quick_run_of_every_study_ends_with_tables_and_goes_on_from_its_rows(tmp_path: Path) -> None:
    cases = "offsite_tuning,split_learning,sa,without_tuning,without_retrieval,keyed,fresh,shipped"
    words = ["sa", "--quick", "--studies", "all", "--cases", cases, "--shots", "2", "--kappas", "0.25"]
    runs = [
        subprocess.run(
            [sys.executable, "-m", "tools.reproduce", *words, "--format", "json", "-o", tmp_path],
            cwd=ROOT, capture_output=True, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:]
    document = json.loads(runs[0].stdout)
    assert document == json.loads(runs[1].stdout)
    assert "== row" in runs[0].stderr and "== row" not in runs[1].stderr
    rows = {(each["study"], each["case"]): each for each in document["rows"]}
    assert len(rows) == 10 and not document["missing"]
    main = rows["main", ""]
    assert main["images"] == 10 and main["frontend_engine"].startswith("onnxruntime ")
    assert main["mean_colour_psnr_db"] < main["ridge_psnr_db"] < 40
    assert all(0.3 < share <= 1 for share in main["accuracy"].values())  # chance is 0.2 +- 0.014
    assert rows["ablation", "sa"]["accuracy"] == main["accuracy"]["sa"]
    assert rows["noise", "shipped"]["accuracy"] == main["accuracy"]["sa"]
    assert rows["noise", "shipped"]["ridge_psnr_db"] == main["ridge_psnr_db"]
    assert rows["risk", ""]["accuracy"]["lp_clean"] == main["accuracy"]["lp_clean"]
    assert all(0.2 < share <= 1 for share in rows["risk", ""]["accuracy"].values())
    assert 0.3 < rows["keying", "keyed"]["accuracy"] != rows["keying", "fresh"]["accuracy"] > 0.3
    assert 0 < rows["baselines", "offsite_tuning"]["emulator_accuracy"] <= 1
    assert all(each["command"].startswith("tools/reproduce sa --quick") for each in document["rows"])
    assert {table["title"].split(",")[0] for table in document["tables"]} >= {"Ablation", "Theft of the frontend"}
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == document["rows"]
    assert "Theft of the frontend" in (tmp_path / "report.txt").read_text()
