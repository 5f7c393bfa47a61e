"""The reproduction of shift-aware prototypes: worlds, rows that repeat, differences with their interval."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import DataError, UsageError
from server_runtime import strategies
from server_runtime.strategies import Ask, Settings, Site
from tools import reproduce_prototypes
from tools.reproduce_prototypes import STUDIES, cells_of, parse
from tools.reproduce_prototypes_leaks import Decoder, apart, purity
from tools.reproduce_prototypes_rows import METHODS, RUN, SITE, Away, PrototypeCell, PrototypeLaboratory, PrototypeRates
from tools.reproduce_prototypes_table import AVERAGE, WORST, compare, paired, summarise, verdict
from tools.reproduce_prototypes_world import DOMAINS, QUICK_DOMAINS, DomainWorld, full_domains, quick_domains
from tools.simulation import Answers, Terms, adapt


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> DomainWorld:
    return quick_domains(tmp_path_factory.mktemp("prototypes"), 40, 50)


# -- worlds


def test_domains_show_different_digits_and_public_ones_are_of_none(world: DomainWorld) -> None:
    names = {domain: {name.split("/")[-1] for name in world.names(domain)} for domain in QUICK_DOMAINS}
    assert all(len(each) == 200 for each in names.values())
    assert not names["plain"] & names["noisy"] and world.classes == ("0", "1", "2", "3", "4")
    assert {path.parent.name for path in world.public.rglob("*.png")} == {"5", "6", "7", "8", "9"}


def test_a_seed_draws_its_images_and_the_tested_ones_are_always_the_same(world: DomainWorld, tmp_path: Path) -> None:
    def drawn(folder: Path) -> set[str]:
        return {path.name for path in folder.rglob("*.png")}

    first, again, other = (
        drawn(world.train_folder(tmp_path / each, "plain", seed)) for each, seed in (("a", 0), ("b", 0), ("b", 1))
    )
    assert len(first) == 40 and first == again != other
    assert len(drawn(world.test_folder(tmp_path / "a", "noisy"))) == 50
    few = world.train_folder(tmp_path / "a", "plain", 0, ("0",))
    assert {path.name for path in few.iterdir()} == {"0"} and drawn(few) < first
    assert world.devices("plain") == ("noisy", "tinted", "outlined")


def test_the_full_world_is_made_of_the_archive_and_needs_it_no_more(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "pacs64.zip", "w") as archive:
        for domain in DOMAINS:
            for number in range(6):
                archive.writestr(f"pacs64/{domain}/dog/{number}.jpg", f"{domain}{number}")
    made = full_domains(tmp_path / "world", tmp_path, 2, 2, pool=4)
    assert [len(made.names(domain)) for domain in DOMAINS] == [4] * 4
    again = full_domains(tmp_path / "world", tmp_path / "nowhere", 2, 2)
    assert again.devices("photo") == ("art-painting", "cartoon", "sketch")
    assert len(list(again.train_folder(tmp_path / "x", "art-painting", 0).rglob("*.jpg"))) == 2
    with pytest.raises(DataError, match=r"data/pacs64\.zip"):
        full_domains(tmp_path / "other", tmp_path / "nowhere", 2, 2)


# -- the command


def test_studies_have_the_methods_that_they_are_about() -> None:
    assert len(cells_of(parse([]))) == 10 * 4 * (5 + 3)
    everything = cells_of(parse(["--studies", ",".join(STUDIES), "--seeds", "0"]))
    assert len(set(everything)) == len(everything) == 4 * (5 + 3 + 5 + 3 + 9)
    assert cells_of(parse(["--quick", "--only", "ours/tinted/3"])) == [PrototypeCell("ours", "tinted", 3)]
    assert {cell.package.distance for cell in everything if not METHODS[cell.method].strength} == {"cosine"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "our"], "did you mean"),
        (["--domains", "plain"], "no domain 'plain'"),
        (["--studies", "all"], "no study 'all'"),
        (["--only", "ours/sketch"], "METHOD/DOMAIN/SEED"),
        (["--seeds", "-1"], "--seeds"),
        (["--rounds", "0"], "--rounds"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--quick", "--pool", "10"], "--pool"),
        (["--table", "--prepare"], "not allowed"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(words)
    assert said in f"{error.value.cause} {error.value.cure}"


# -- tables


def row(method: str, domain: str, seed: int, *tested: float) -> dict[str, Any]:
    curve = [
        {"test_accuracy": each, "loss": 1.0, "strength": None, "bytes_up": 6, "bytes_down": 4, "seconds": 2.0}
        for each in tested
    ]
    return {
        "method": method, "held_out": domain, "seed": seed, "curve": curve, "accuracy": tested[-1],
        "best_accuracy": max(tested), "distance": "cosine", "cut": "layer3", "copies": "each", "case": "all",
    }  # fmt: skip


def test_cells_have_each_domain_the_average_and_the_worst() -> None:
    rows = [row("a", "x", 0, 0.5, 0.4), row("a", "y", 0, 0.6, 0.8), row("a", "x", 1, 0.6, 0.6)]
    found = {cell["held_out"]: cell for cell in summarise(rows)}
    assert found["x"]["seeds"] == [0, 1] and found["x"]["last"]["mean"] == pytest.approx(0.5)
    assert found["x"]["best"]["mean"] == pytest.approx(0.55)
    assert found[AVERAGE]["seeds"] == found[WORST]["seeds"] == [0]  # the other seed lacks a domain
    assert found[AVERAGE]["last"]["mean"] == pytest.approx(0.6) and found[WORST]["last"]["mean"] == pytest.approx(0.4)
    assert found["y"]["bytes_round"] == 10 and found["y"]["round_s"] == 2.0


def test_differences_are_of_pairs_with_students_interval() -> None:
    rows = [row("a", "x", seed, 0.5 + 0.1 * seed) for seed in range(4)]
    rows += [row("b", "x", seed, 0.5 + 0.1 * seed + lead) for seed, lead in enumerate((0.02, 0.04, 0.03, 0.03))]
    rows.append(row("b", "x", 9, 0.1))  # without a partner
    last, best = compare(rows)
    assert (last["method"], last["over"], last["pairs"], last["ahead"]) == ("b", "a", 4, 4)
    spread = float(np.std([0.02, 0.04, 0.03, 0.03], ddof=1))
    assert last["lead"] == pytest.approx(0.03) and last["half_width"] == pytest.approx(3.182 * spread / 2)
    assert last["exceeds_noise"] and verdict(last) == "more than seed noise"
    assert best["lead"] == pytest.approx(last["lead"])
    assert verdict(paired([0.1, -0.1, 0.02])) == "within seed noise"
    assert verdict(paired([0.1])).startswith("one seed")


# -- what leaks


def test_measures_of_leaks() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    assert purity(torch.tensor([5, 5, 6, 6, 6]), labels) == pytest.approx(0.8)
    assert apart(np.array([1, 1]), np.array([4, 0])) == 0.5 and apart(np.array([2, 4]), np.array([1, 2])) == 0.0


def test_the_decoder_finds_a_linear_law() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 12, generator=generator)
    law = 0.02 * torch.randn(12, 9, generator=generator)
    wanted = (x @ law + 0.5).clamp(0, 1)
    assert float((Decoder(x, wanted)(x) - wanted).abs().max()) < 0.02


# -- rows


def laboratory(world: DomainWorld, engine: str, rounds: int = 3) -> PrototypeLaboratory:
    return PrototypeLaboratory(world, engine, PrototypeRates(rounds, 16, 0.05, "constant"), 2, None)


@pytest.mark.slow
def test_both_engines_tell_the_same_story_and_a_row_repeats(world: DomainWorld) -> None:
    cell = PrototypeCell("ours", "outlined", 0)
    real, again, ours = (laboratory(world, engine).row(cell) for engine in ("onnxruntime", "onnxruntime", "torch"))
    assert [vars(each) | {"seconds": 0} for each in real.curve] == [vars(each) | {"seconds": 0} for each in again.curve]
    for one, other in zip(ours.curve, real.curve, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=2e-3)
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert one.strength == pytest.approx(other.strength, abs=1e-3)
    assert real.curve[0].strength == 0.0 and 0 < (real.curve[-1].strength or 0) <= 1
    assert real.energy_j is None and real.energy_reason


@pytest.mark.slow
def test_invariant_5_with_real_devices_vanilla_is_split_fed_bit_for_bit(world: DomainWorld) -> None:
    cell = PrototypeCell("vanilla", "outlined", 0)
    states = []
    for name in ("prototypes", "split_fed"):
        lab = laboratory(world, "onnxruntime")
        shipped, devices = lab.devices(cell)
        settings: Settings = lab.settings(cell, len(devices))
        strategy = strategies.find(name).build(shipped, settings)
        answers = Answers(devices, Terms(RUN, SITE, name, "logit-gradient", 0.0, 0))
        adapt(strategy, answers, Site(SITE, tuple(sorted(devices)), len(world.classes)))
        states.append(strategy.state().tensors)
    ours, theirs = states
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lacking", "single", "vanishing"])
def test_devices_that_lack_something_take_part(world: DomainWorld, case: str) -> None:
    found = laboratory(world, "onnxruntime", 6).row(PrototypeCell("ours", "outlined", 0, case=case))
    devices = [each.devices for each in found.curve]
    assert devices == ([3, 2, 2, 2, 2, 3] if case == "vanishing" else [3] * 6)
    assert found.images < 120 or case == "vanishing"
    assert all(math.isfinite(each.loss) for each in found.curve)


def test_a_device_that_is_away_is_asked_nothing_but_what_all_are() -> None:
    class Everyone:
        def answer(self, ask: Ask) -> dict[str, Any]:
            return dict.fromkeys(ask.tensors, ask.kind)

        def note_checkpoint(self) -> None:
            """Nothing."""

    away = Away(Everyone(), "pi", (2, 3))
    both: dict[str, dict[str, np.ndarray]] = {"pi": {}, "jetson": {}}
    attended = [set(away.answer(Ask("a", "attend", both, {"epoch": epoch}))) for epoch in range(1, 5)]
    assert attended == [{"pi", "jetson"}, {"jetson"}, {"jetson"}, {"pi", "jetson"}]
    assert set(away.answer(Ask("b", "load_part", both))) == {"pi", "jetson"}


@pytest.mark.slow
def test_the_command_keeps_its_rows(
    world: DomainWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--engine", "torch", "--world", str(world.root), "-o", str(tmp_path), "--rounds", "2"]
    words += ["--methods", "vanilla,proto", "--train-images", "40", "--test-images", "50"]
    assert reproduce_prototypes.main([*words, "--format", "json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in first["rows"]] == ["vanilla", "proto"]
    for each in first["rows"]:
        assert {"method", "setting", "seed", "accuracy", "bytes", "seconds", "energy_j", "energy_quality"} <= set(each)
    monkeypatch.setattr(PrototypeLaboratory, "row", lambda self, cell: pytest.fail("computed twice"))
    assert reproduce_prototypes.main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert reproduce_prototypes.main([*words, "--table"]) == 0
    assert "proto over vanilla, tinted, last round" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no finished row"):
        reproduce_prototypes.main([*words, "--seeds", "7", "--table"])


@pytest.mark.slow
def test_gradients_at_the_logits_show_every_label(
    world: DomainWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("piq", reason="decoded images are measured with it")
    words = ["--quick", "--engine", "torch", "--world", str(world.root), "-o", str(tmp_path), "--rounds", "2"]
    words += ["--train-images", "40", "--test-images", "50", "--leaks", "--format", "json"]
    assert reproduce_prototypes.main(words) == 0
    found = {(each["what"], each["option"]): each for each in json.loads(capsys.readouterr().out)["leaks"]}
    assert found["label of an image", "logit-gradient"]["found"] == 1.0
    assert found["class histogram", "exact counts"]["found"] == 0.0
    assert found["class histogram", "counts rounded up to multiples of 10"]["found"] > 0.0
