"""What a device answers when it is asked for its split, and what of its tables is in the answer: nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.codec import encode
from contract.errors import ConfigError, RemoteProtocolError
from contract.messages import Ask, Choice
from contract.privacy_table import PrivacyTable
from edge_runtime.choose_split import Preferences, SplitCost
from edge_runtime.own_choice import OwnChoice, Spent, read_costs
from edge_runtime.profiling.measuring import Plan, Point
from edge_runtime.profiling.output import keep
from edge_runtime.profiling.rows import Energy, Estimate, PowerFacts, Row
from edge_runtime.profiling.table import MeterFacts, Table

HOT = frozenset({"throttled"})
COSTS = (SplitCost(1, 1.0, 5.0, 1.0), SplitCost(2, 2.0, 6.0, 1.5), SplitCost(3, 4.0, 7.0, 2.0))


def question(number: int = 1, rule: str = "p3sl", **changes: Any) -> Ask:
    tensors = {
        "splits": np.array([1, 2, 3], np.uint16),
        "sigma": np.array([1.0, 0.5, 0.25], np.float32),
        "strengths": np.array([0.0, 2.0], np.float32),
        "leakage": np.array([[0.5, 0.3], [0.45, 0.25], [0.4, 0.2]], np.float32),
    }
    return Ask(f"choose-{number}-{rule}", "choose_split", {"rule": rule, "round": number}, 60.0, tensors | changes)


def chooser(wishes: Preferences, said: list[str] | None = None, **more: Any) -> OwnChoice:
    costs = more.pop("costs", COSTS)
    return OwnChoice(costs, wishes, (said if said is not None else []).append, **more)


def test_the_answer_is_the_split() -> None:
    assert chooser(Preferences(0.0)).answer(question()) == Choice("choose-1-p3sl", 1)
    assert chooser(Preferences(1.0)).answer(question()) == Choice("choose-1-p3sl", 3)
    assert chooser(Preferences(split=2), costs=()).answer(question()) == Choice("choose-1-p3sl", 2)


def test_invariant_8_alpha_energy_and_cap_are_in_no_byte_of_the_answer() -> None:
    """Devices of other tables, weights and caps that choose the same split say the very same."""
    frames = set()
    for alpha, cap_w, scale in ((0.0, None, 1.0), (0.1, 5.5, 1e-3), (0.2, 5.0, 777.0)):
        costs = tuple(SplitCost(c.split, (c.energy_j or 0) * scale, c.peak_w, c.time_s) for c in COSTS)
        answer = chooser(Preferences(alpha, cap_w), costs=costs).answer(question())
        frames.add(encode(answer, seq=1, ack=0))
    assert len(frames) == 1


def test_what_rules_every_split_out_stays_on_the_device() -> None:
    said: list[str] = []
    assert chooser(Preferences(0.5, 1.0), said).answer(question()) == Choice("choose-1-p3sl", 0)
    assert "power cap of 1 W" in said[-1]


def test_a_device_without_a_table_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="no energy table") as raised:
        chooser(Preferences(), costs=()).answer(question())
    assert "edge-profile" in raised.value.cure


def test_tables_that_are_none_and_rules_that_nobody_knows_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="no leakage table"):
        chooser(Preferences()).answer(question(strengths=np.array([2.0, 0.0], np.float32)))
    with pytest.raises(RemoteProtocolError, match="no rule 'best'"):
        chooser(Preferences()).answer(question(rule="best"))


def test_a_server_cannot_play_down_what_the_package_says_leaks() -> None:
    signed = PrivacyTable((1, 2, 3), (0.0, 2.0), ((0.5, 0.3), (0.45, 0.25), (0.4, 0.2)))
    assert chooser(Preferences(1.0), signed=signed).answer(question()).split == 3
    milder = np.array([[0.1, 0.1], [0.45, 0.25], [0.4, 0.2]], np.float32)
    with pytest.raises(RemoteProtocolError, match="not the one that is signed"):
        chooser(Preferences(1.0), signed=signed).answer(question(leakage=milder))


def test_a_turn_that_took_more_than_the_table_says_changes_the_choice() -> None:
    said: list[str] = []
    spent = [Spent(0.0), Spent(0.0), Spent(105.0, 0.0, 100), Spent(305.0, 0.0, 200)]
    own = chooser(Preferences(0.0), said, spent=lambda: spent.pop(0))
    assert own.answer(question(1)).split == 1
    assert own.answer(question(2)).split == 1  # 1.05 J where the table says 1
    assert own.answer(question(3)).split == 1 and len(said) == 2  # 2 J, as much as split 2 takes: fewer layers
    assert "was not as the energy table says" in said[-1]


def test_a_meter_that_cannot_tell_the_difference_corrects_nothing() -> None:
    said: list[str] = []
    spent = [Spent(0.0), Spent(0.0), Spent(200.0, 150.0, 100)]
    own = chooser(Preferences(0.0), said, spent=lambda: spent.pop(0))
    own.answer(question(1)), own.answer(question(2))
    assert len(said) == 1  # the choice itself


def test_a_device_that_slowed_down_goes_to_a_split_with_a_lower_peak() -> None:
    spent = [Spent(), Spent(), Spent(None, 0.0, 100, HOT), Spent(None, 0.0, 200, HOT)]
    own = chooser(Preferences(1.0), spent=lambda: spent.pop(0))
    assert own.answer(question(1)).split == 3
    assert own.answer(question(2)).split == 2
    assert own.answer(question(3)).split == 2  # it happened once


def test_the_baselines_choose_by_the_same_tables() -> None:
    own = chooser(Preferences())
    chosen = [own.answer(question(number, "asl")).split for number in range(1, 13)]
    assert chosen[0] == 1 and chooser(Preferences()).answer(question(1, "ares")).split == 1


MODEL, DIGEST = "vgg16_bn", "0" * 64


def row(split: int, joules: float | None) -> Row:
    one = Estimate(0.01 * split, 0.0, 5)
    energy = None
    if joules is not None:
        of = Estimate(joules, 0.0, 5)
        energy = Energy(of, of, 0.0, None, 3.0, 3.0, PowerFacts(5.0, 6.0 + split, 0.1, (5.0,)))
    point = Point(MODEL, "parts", DIGEST, split, 9, "float32", "onnxruntime", 1, 8, 4, 4)
    return Row(
        point, one, (), energy, None if energy else "no meter", None, "unknown", None, None, None, 0.0, None, None,
        (), (),
    )  # fmt: skip


def write_table(path: Path, *rows: Row) -> Path:
    meter = MeterFacts("none", "nothing", "unknown", None, None, ())
    plan = Plan(5, 1.0, 1.0, 1.0, 1.0, 0)
    table = Table("training", None, "", {}, "/", meter, plan, len(rows), rows)
    keep(table, path)
    return path


def test_costs_are_read_from_the_table_that_edge_profile_wrote(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.json", row(2, 0.5), row(1, None))
    costs = read_costs(path, MODEL, DIGEST)
    assert costs == (SplitCost(1, None, None, 0.01), SplitCost(2, 0.5, 8.0, 0.02))
    assert read_costs(path, MODEL, "another package") == costs
    with pytest.raises(ConfigError, match="no row of a trained part of resnet50"):
        read_costs(path, "resnet50", DIGEST)


def test_what_the_link_takes_is_in_the_choice_and_in_no_turns_training(tmp_path: Path) -> None:
    """A meter that is read while the part computes sees 0.5 J of the 0.7 that the table has: that is no drift."""
    rows = [replace(row(split, joules), total_j=total_j) for split, joules, total_j in ((1, 0.5, 0.7), (2, 0.6, 0.9))]
    costs = read_costs(write_table(tmp_path / "table.json", *rows), MODEL, DIGEST)
    assert [cost.energy_j for cost in costs] == [0.7, 0.9]
    assert [cost.link_j for cost in costs] == pytest.approx([0.2, 0.3])
    said: list[str] = []
    spent = [Spent(0.0), Spent(0.0), Spent(50.0, 0.0, 100), Spent(130.0, 0.0, 200)]
    own = chooser(Preferences(0.0), said, costs=costs, spent=lambda: spent.pop(0))
    tables = {"splits": np.array([1, 2], np.uint16), "sigma": np.ones(2, np.float32)}
    tables["leakage"] = np.array([[0.5, 0.3], [0.45, 0.25]], np.float32)
    assert [own.answer(question(number, **tables)).split for number in (1, 2)] == [1, 1] and len(said) == 1
    assert own.answer(question(3, **tables)).split == 2  # 0.8 J and the link's 0.2: more than split 2
