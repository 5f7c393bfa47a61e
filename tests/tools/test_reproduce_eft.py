"""The command that sets EFTViT beside its baselines: its cells, its deals of images, its tables."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from contract.asks import EVERY_IMAGE
from contract.errors import DataError, UsageError
from tools import reproduce_eft
from tools.reproduce_eft import RATES, best_rates, cells_of, parse
from tools.reproduce_eft_table import named, reach, results_of, summarise, with_result
from tools.reproduce_eft_world import (
    DOMAINS,
    METHODS,
    PACS_TEST,
    EftWorld,
    Variant,
    full_eft_world,
    pack_domains,
)
from tools.share import share_of

DEVICES = tuple(f"device-{number:02}" for number in range(1, 6))


@pytest.fixture
def world(tmp_path: Path) -> EftWorld:
    """Names of images, without what would be in them."""
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for part, count in (("train", 40), ("test", 5)):
            for label in "abc":
                for number in range(count):
                    archive.writestr(f"x/{part}/{label}/{number}.png", b"")
    return EftWorld("quick", tmp_path, "vit", {}, tmp_path / "w", DEVICES, "")


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_deal_gives_every_image_once_and_every_device_some(world: EftWorld, beta: float) -> None:
    dealt = world.deal(beta, 0)
    assert sorted(name for own in dealt.values() for name in own) == world.names("train")
    assert tuple(dealt) == DEVICES and min(map(len, dealt.values())) >= 2
    assert world.deal(beta, 0) == dealt != world.deal(beta, 1)


def test_a_small_beta_leaves_devices_fewer_classes(world: EftWorld) -> None:
    def classes(beta: float) -> float:
        deals = [world.deal(beta, seed) for seed in range(5)]
        return sum(len({name.split("/")[-2] for name in own}) for dealt in deals for own in dealt.values()) / 25

    assert classes(0.1) < classes(10.0) == 3.0


def test_each_domain_of_pacs_is_on_devices_of_its_own(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pacs64.zip", "w") as archive:
        for domain in DOMAINS:
            for label in ("dog", "house"):
                for number in range(80):
                    archive.writestr(f"pacs64/{domain}/{label}/pic_{number}.jpg", b"")
    pack_domains(tmp_path / "pacs64.zip", tmp_path / "images.zip")
    devices = tuple(f"{domain}-{number}" for domain in DOMAINS for number in (1, 2))
    world = EftWorld("pacs", tmp_path, "vit", {}, tmp_path / "w", devices, "", DOMAINS)
    assert world.classes == ("dog", "house") and len(world.names("test")) == 4 * 2 * PACS_TEST
    dealt = world.deal(1.0, 0)
    assert sorted(name for own in dealt.values() for name in own) == world.names("train")
    for device, own in dealt.items():
        assert own and {name.split("/")[-1].partition("-")[0] for name in own} == {device.rpartition("-")[0]}


def test_a_world_without_archives_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs .*cifar10.zip, which does not exist"):
        full_eft_world(tmp_path / "world", tmp_path, 10, 5)


def test_cells_are_seed_by_seed_and_shares_divide_them() -> None:
    options = parse(["--quick", "--betas", "0.1,1", "--seeds", "0,1"])
    cells = cells_of(options, RATES)
    assert len(cells) == 2 * 2 * len(METHODS) and [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    shares = [share_of(cells, (number, 3), repr) for number in (1, 2, 3)]
    assert sorted(map(repr, sum(shares, []))) == sorted(map(repr, cells))
    first = cells[0]
    assert (first.ratio, first.local, first.threshold, first.rate) == (0.75, 2, 1.0, RATES["eft_vit"][0])


def test_studies_vary_one_thing_at_a_time() -> None:
    for study, name in (("mask", "ratio"), ("blocks", "local"), ("threshold", "threshold")):
        cells = cells_of(parse(["--quick", "--studies", study]), RATES)
        assert len({getattr(cell, name) for cell in cells}) == len(cells) > 2
        assert {cell.method for cell in cells} == {"eft_vit"}
    every = cells_of(parse(["--quick", "--studies", "every", "--betas", "0.1,1"]), RATES)
    assert [(cell.beta, cell.ratio) for cell in every] == [(0.1, 0.75), (0.1, 0.5), (1.0, 0.75), (1.0, 0.5)]
    assert {cell.threshold for cell in every} == {EVERY_IMAGE} and "every image" in named(asdict(every[0]))
    full = cells_of(parse(["--quick", "--studies", "full"]), RATES)
    assert [(cell.method, cell.ratio) for cell in full] == [("fed_full", 0.0), ("fed_full", 0.75)]
    rates = cells_of(parse(["--quick", "--studies", "rates"]), RATES)
    for method in METHODS:
        assert len({(cell.rate, cell.server_rate) for cell in rates if cell.method == method}) >= 3


def test_packages_are_told_apart_by_what_is_in_them() -> None:
    assert Variant("eft_vit", 0.5, 3).name != Variant("eft_vit", 0.75, 3).name != Variant("eft_vit", 0.75, 2).name
    words = Variant("eft_vit", 0.75, 3).words
    assert words[words.index("--keep-patches") + 1] == "0.25" and words[words.index("--split") + 1] == "3"
    assert Variant("fed_lora", 0.0, 0).words == ("--for", "fed_avg", "--peft", "lora")
    masked = Variant("fed_full", 0.75, 0)
    assert masked.name != Variant("fed_full", 0.0, 0).name and masked.words[-2:] == ("--keep-patches", "0.25")
    assert Variant("fed_bfpt", 0.0, 0).words == ("--for", "fed_bfpt")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--methods", "fed_lor"], "there is no method 'fed_lor'"),
        (["--studies", "masks"], "there is no study 'masks'"),
        (["--quick", "--shared", "x"], "--shared belongs to the full reproduction"),
        (["--quick", "--dataset", "pacs"], "--dataset pacs has its own images"),
        (["--rounds", "0"], "--rounds should be 1 or more"),
        (["--fraction", "0"], "--fraction should be more than 0"),
        (["--betas", "0"], "--betas should be more than 0"),
        (["--only", "eft_vit/0.1"], "--only should be METHOD/BETA/SEED"),
        (["--rates", "eft_vit=0"], "a rate above 0"),
        (["--share", "4/3"], "I from 1 to N"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        parse(words)


def row(method: str, seed: int, accuracies: list[float], rate: float = 1e-3) -> dict[str, Any]:
    curve = [
        {"round": place, "accuracy": value if value >= 0 else None, "own_accuracy": value, "loss": 1.0,
         "bytes_up": 10, "bytes_down": 90, "macs_devices": 5.0, "largest_local_s": 2.0,
         "longest_total_s": 1.5, "local_s": 3.0, "seconds": 4.0}
        for place, value in enumerate(accuracies, start=1)
    ]  # fmt: skip
    local = 2 if method == "eft_vit" else 0
    return {
        "method": method, "beta": 0.1, "ratio": 0.75 if local else 0.0, "local": local, "threshold": 1.0, "rate": rate,
        "server_rate": 0.0, "seed": seed, "curve": curve, "seconds": 9.0, "engine": "torch", "rounds": 3,
    }  # fmt: skip


def test_what_a_common_accuracy_costs_is_counted_to_the_first_judged_round_that_has_it() -> None:
    assert reach(row("eft_vit", 0, [0.1, -1, 0.5]), 0.4) == {"round": 3, "bytes": 300, "longest_total_s": 1.5}
    assert reach(row("eft_vit", 0, [0.1, -1, 0.5]), 0.6) is None
    rows = [row("eft_vit", 0, [0.2, 0.6, 0.8]), row("eft_vit", 1, [0.2, 0.5, 0.6]), row("fed_head", 0, [0.3, 0.5, 0.4])]
    eft, head = summarise(rows, None)
    assert eft["target"] == head["target"] == 0.5  # what the weakest reaches
    assert (eft["rounds_to_target"], eft["bytes_to_target"], eft["reached"]) == (2.0, 200.0, 2)
    assert head["rounds_to_target"] == 2.0 and head["last"]["mean"] == pytest.approx(0.4)
    (harder, _) = summarise(rows, 0.7)
    assert harder["reached"] == 1 and harder["rounds_to_target"] == 3.0


def test_a_row_tells_its_setting_and_its_result() -> None:
    told = with_result(row("eft_vit", 3, [0.2, 0.6, -1]))
    assert (told["method"], told["seed"], told["accuracy"], told["bytes"]) == ("eft_vit", 3, 0.6, 300)
    assert told["setting"] == "eft_vit, beta 0.1, lr 0.001 / 0, r 0.75, M_l 2, 1 x median"


def test_tables_show_every_cell_and_every_row() -> None:
    rows = [row("eft_vit", 0, [0.2, 0.6]), row("fed_head", 0, [0.3, 0.5])]
    facts = ("data", "rounds", "local_epochs", "fraction", "batch", "schedule", "engine", "label_mode")
    page = results_of({"cells": summarise(rows, None), "rows": rows, **dict.fromkeys(facts, "x")})
    assert [len(table.rows) for table in page.tables] == [2, 2, 2]
    assert "r 0.75, M_l 2, 1 x median" in page.tables[0].rows[0][0]


def test_the_best_rates_are_those_that_came_furthest(tmp_path: Path) -> None:
    options = parse(["--quick", "--methods", "fed_head", "--engine", "torch", "--rounds", "3"])
    with pytest.raises(UsageError, match="no finished row of fed_head"):
        best_rates(tmp_path, options)
    for rate, last in ((1e-3, 0.4), (3e-3, 0.6), (9e-3, 0.5)):
        found = row("fed_head", 0, [0.9, last], rate)
        (tmp_path / f"eft-quick-torch-{rate}.json").write_text(json.dumps(found))
    assert best_rates(tmp_path, options) == {"fed_head": (3e-3, 0.0)}


@pytest.mark.slow
def test_the_quick_form_prints_a_row_for_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--methods", "eft_vit,fed_head", "--rounds", "2", "--format", "json", "-o", str(tmp_path)]
    assert reproduce_eft.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in document["rows"]] == ["eft_vit", "fed_head"]
    for each in document["rows"]:
        told = {"method", "setting", "seed", "accuracy", "bytes", "seconds", "energy_j", "energy_quality"}
        assert told <= set(each) and each["accuracy"] > 0
        assert each["energy_j"] is not None or each["energy_reason"]
