"""Laws of a modelled fleet: what must rise or fall, units, the published figures; and its accounts of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ConfigError
from contract.messages import Activations, Settled
from edge_runtime.profiling.measuring import Plan, measure
from edge_runtime.profiling.rows import Link, make_row
from edge_runtime.profiling.table import KIND as TABLE_KIND
from edge_runtime.profiling.table import MeterFacts, Table, to_document
from server_runtime.strategies import Ask, Reply
from tests.edge_runtime.profiling.virtual_device import VirtualDevice
from tools.fleet import SLOWEST, Fleet, FleetDevice, Kind, Work, asleep_j, cost_of, within_cap
from tools.fleet_file import PAPER, environments_of, load_fleet
from tools.fleet_ledger import Ledger
from tools.fleet_work import works_of

KIND = Kind(
    "board", macs_per_s=1e9, values_per_s=1e8, idle_w=2.0, link_w=3.0, busy_w=6.0, sleep_w=0.5, wake_s=4.0,
    sent_bytes_per_s=1e6, received_bytes_per_s=2e6, window_s=1.0, limit_c=80.0, rise_c_per_w=10.0, fan_rise_c_per_w=5.0,
    source="a test",
)  # fmt: skip
WORK = Work(1, forward_macs=10**6, backward_macs=2 * 10**6, values=10**5, sent_bytes=10**4, received_bytes=10**4,
            rest_macs=10**6)  # fmt: skip
PUBLISHED_IMAGES, PUBLISHED_BATCH = 7142, 256
PUBLISHED_J, PUBLISHED_W = {1: 903.0, 2: 951.0, 10: 633.0}, {1: 4.311, 10: 6.297}


def device(ambient_c: float = 20.0, has_fan: bool = True, kind: Kind = KIND) -> FleetDevice:
    return FleetDevice("one", kind, ambient_c, has_fan, 0.5)


def test_a_step_takes_what_its_parts_take() -> None:
    cost = cost_of(device(), WORK, 32)
    assert cost.forward_s == pytest.approx(1e-3 + 0.5e-3)
    assert cost.backward_s == pytest.approx(2e-3 + 0.5e-3)
    assert (cost.sent_s, cost.received_s) == pytest.approx((10e-3, 5e-3))
    assert cost.seconds == pytest.approx(19e-3)
    assert cost.energy_j == pytest.approx(4e-3 * 6.0 + 15e-3 * 3.0)


def test_more_work_or_more_bytes_never_cost_less() -> None:
    for name in ("forward_macs", "backward_macs", "values", "sent_bytes", "received_bytes"):
        costs = [cost_of(device(), replace(WORK, **{name: getattr(WORK, name) * factor}), 32) for factor in (1, 2, 8)]
        assert [each.energy_j for each in costs] == sorted(each.energy_j for each in costs)
        assert costs[0].seconds < costs[1].seconds < costs[2].seconds
        assert costs[0].peak_w <= costs[1].peak_w <= costs[2].peak_w <= KIND.busy_w


def test_warmth_lowers_the_cap_and_a_fan_raises_it() -> None:
    assert device(15.0).cap_w > device(30.0).cap_w
    assert device(30.0, has_fan=True).cap_w == pytest.approx(2 * device(30.0, has_fan=False).cap_w)


def test_a_device_over_its_cap_slows_down_and_stays_below() -> None:
    heavy = replace(WORK, backward_macs=10**9)
    cool, hot = device(20.0), device(40.0, has_fan=False)
    assert not cost_of(cool, heavy, 32).is_slowed
    slowed = cost_of(hot, heavy, 32)
    assert slowed.is_slowed and slowed.compute_w <= hot.cap_w + 1e-9
    assert slowed.seconds > cost_of(cool, heavy, 32).seconds
    assert within_cap(hot, [WORK, replace(heavy, split=2)], 32) == [1]
    assert cost_of(device(79.0, False), heavy, 32).backward_s == pytest.approx(
        cost_of(cool, heavy, 32).backward_s / SLOWEST
    )


def test_sleeping_between_turns_never_costs_more_than_waiting() -> None:
    for gap_s in (0.0, 1.0, 3.9, 4.0, 6.0, 100.0):
        assert asleep_j(KIND, gap_s) <= KIND.idle_w * gap_s
    assert asleep_j(KIND, 100.0) == pytest.approx(96.0 * 0.5 + 4.0 * 3.0)
    assert asleep_j(KIND, 5.0) == pytest.approx(10.0)  # waking up would take more than it saves


def test_the_model_of_a_nano_gives_the_published_energies_and_peaks() -> None:
    (nano,) = (each for each in load_fleet(PAPER, "A").devices if each.name == "nano-4")
    works = {work.split: work for work in works_of("vgg16_bn", {"small_images": True}, range(1, 11))}
    for split, published_j in PUBLISHED_J.items():
        assert cost_of(nano, works[split], 64).energy_j * PUBLISHED_IMAGES == pytest.approx(published_j, rel=0.01)
    for split, published_w in PUBLISHED_W.items():
        assert cost_of(nano, works[split], PUBLISHED_BATCH).peak_w == pytest.approx(published_w, rel=0.02)


def test_a_part_s_work_is_that_of_its_layers() -> None:
    first, second, third = works_of("vgg16_bn", {"small_images": True}, (1, 2, 5))
    convolution = 3 * 9 * 64 * 32 * 32
    assert (first.forward_macs, first.backward_macs, first.values) == (convolution, convolution, 0)
    assert second.forward_macs == convolution and second.values == 2 * 64 * 32 * 32
    assert third.received_bytes == 4 * 64 * 16 * 16 and third.sent_bytes == third.received_bytes + 2
    assert first.rest_macs > third.rest_macs


def test_the_paper_s_fleet_has_its_places_and_any_number_of_devices() -> None:
    assert environments_of(PAPER) == ("A", "B")
    places = {env: [(each.ambient_c, each.has_fan) for each in load_fleet(PAPER, env).devices] for env in "AB"}
    assert places["A"][:4] == [(30, False), (30, True), (20, False), (20, True)]
    assert places["B"][:4] == [(30, True), (20, False), (15, False), (15, True)]
    assert places["A"][4:] == places["B"][4:] == [(20, False), (20, True), (20, True)]
    assert [each.alpha for each in load_fleet(PAPER, "A").devices] == [0.4, 0.2, 0.5, 0.9, 0.7, 0.3, 0.8]
    many = load_fleet(PAPER, "A", 16)
    assert len({each.name for each in many.devices}) == 16 and many.devices[7].name == "nano-1-2"


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("macs_per_s = 35.1e9", "", "macs_per_s is missing"),
        ("sleep_w = 0.5", "sleep_w = 9.5", "expected sleep_w <= idle_w"),
        ("alpha = 0.4", "alpha = 1.4", "alpha from 0 to 1"),
        ('kind = "laptop"', 'kind = "lap"', "no kind 'lap'"),
        ("window_s = 1.0", "windows = 1.0", "unknown key windows"),
        ('name = "nano-2"', 'name = "nano-1"', "a name of its own"),
    ],
)
def test_a_faulty_fleet_is_refused(tmp_path: Path, old: str, new: str, cause: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(PAPER.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_fleet(path, "A")
    assert cause in error.value.cause


class Echo:
    """Answers as two devices would, with so many rows."""

    def answer(self, ask: Ask) -> Mapping[str, Reply]:
        def reply(name: str) -> Reply:
            if ask.kind != "forward":
                return Settled(ask.name, 100)
            values = np.zeros((10, 250), np.float32)
            return Activations(ask.name, 0, 100, "train", values, np.zeros(10, np.uint16))

        return {name: reply(name) for name in ask.tensors}

    def note_checkpoint(self) -> None:
        pass


def ledger() -> Ledger:
    fast = replace(KIND, name="fast", macs_per_s=1e12, values_per_s=1e12)
    devices = (FleetDevice("a", KIND, 20.0, True, 0.5), FleetDevice("b", fast, 20.0, True, 0.5))
    return Ledger(Echo(), Fleet("test", devices, 1e12, "a test"), {1: WORK}, 10)


def load(*names: str) -> Ask:
    return Ask("load-0-1", "load_part", {name: {} for name in names}, own={name: {"cut": 1} for name in names})


def forward(*names: str) -> Ask:
    return Ask("forward-1-1", "forward", {name: {} for name in names})


def test_who_is_asked_together_waits_for_the_slowest() -> None:
    book = ledger()
    book.answer(load("a", "b"))
    book.answer(forward("a", "b"))
    spent = book.spent()
    own_s = 10 * 1.5e-3 + (10 * 1000 + 10 * 2) / 1e6
    assert spent["a"].seconds == spent["b"].seconds == pytest.approx(own_s)
    assert book.times["a"].waiting_s == 0.0
    assert book.times["b"].waiting_s == pytest.approx(10 * 1.5e-3, rel=1e-3)
    assert spent["b"].awake_j - spent["b"].work_j == pytest.approx(book.times["b"].waiting_s * KIND.idle_w)


def test_a_gradient_is_computed_with_and_the_server_takes_its_time() -> None:
    book = ledger()
    book.answer(load("a"))
    book.answer(forward("a"))
    before_s = book.clock()
    gradient = np.zeros((10, 250), np.float32)
    book.answer(Ask("settle-1-2", "settle", {"a": {"gradient": gradient}}))
    server_s, link_s = 10 * WORK.rest_macs / 1e12, gradient.nbytes / 2e6
    assert book.clock() - before_s == pytest.approx(server_s + link_s + 10 * 2.5e-3)
    assert book.spent()["a"].bytes_down == gradient.nbytes


def test_time_of_other_turns_is_told_apart_and_sleep_saves() -> None:
    book = ledger()
    book.answer(load("a"))
    book.answer(Ask("sleep", "sleep", {"b": {}}, {"wake_s": 10.0}))
    for _ in range(1000):
        book.answer(forward("a"))
    assert book.clock() > 15.0
    book.answer(forward("b"))
    spent, b = book.spent(), book.times["b"]
    assert b.asleep_s == pytest.approx(10.0 - KIND.wake_s) and b.waking_s == KIND.wake_s
    assert spent["b"].awake_s == pytest.approx(spent["b"].seconds - b.asleep_s)
    assert spent["b"].could_sleep_j < spent["b"].whole_j  # it woke up too early
    assert spent["a"].awake_s == spent["a"].seconds


def test_who_needs_a_sleeping_device_waits_for_it() -> None:
    book = ledger()
    book.answer(Ask("sleep", "sleep", {"b": {}}, {"wake_s": 10.0}))
    book.answer(load("a", "b"))
    assert book.clock() == pytest.approx(10.0)


def test_a_device_with_a_table_of_its_own_computes_as_it_was_measured(tmp_path: Path) -> None:
    device_under_test = VirtualDevice()
    phases = [("forward", 0.1, 4.0), ("backward", 0.2, 4.0), ("optimiser", 0.3, 5.0)]  # each with those before it
    candidate = device_under_test.candidate(3, phases)
    plan = Plan(5, 10.0, 30.0, 30.0, 20.0, 7)
    measured = measure(candidate, plan, device_under_test.bench())
    row = make_row(candidate.point, ("forward", "backward", "optimiser"), measured, device_under_test.trace, "", Link())
    meter = MeterFacts("ina", "module input (VDD_IN)", "measured", 0.007, None, ())
    table = Table("training", "jetson_nano", "a test", {"fan": "on"}, "/", meter, plan, 1, (row,))
    head = {"schema_version": 1, "kind": TABLE_KIND}
    (tmp_path / "nano.json").write_text(json.dumps({**head, **to_document(table)}))
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(PAPER.read_text().replace('name = "nano-1"', 'name = "nano-1"\ntable = "nano.json"'))
    nano = load_fleet(fleet, "A").devices[0]
    (recorded,) = nano.recorded.values()
    cost = cost_of(nano, replace(WORK, split=3), 64)
    assert (cost.forward_s, cost.backward_s) == (recorded.forward_s, recorded.backward_s)
    assert cost.forward_s + cost.backward_s == pytest.approx(row.seconds_per_image.mean)
    assert row.energy is not None
    assert cost.energy_j == pytest.approx(row.energy.measured_j.mean + (cost.sent_s + cost.received_s) * cost.link_w)
    assert cost_of(nano, replace(WORK, split=4), 64) != cost  # not measured: modelled
