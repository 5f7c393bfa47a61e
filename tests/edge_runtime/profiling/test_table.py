"""The table of edge-profile: written and read back, merged or refused, as text, charts, page and picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from contract.console import print_document
from contract.errors import ConfigError, UsageError
from edge_runtime.profiling.charts import COMMUNICATION, COMPUTE, IDLE, cost_chart, power_curves, ticks
from edge_runtime.profiling.measuring import Plan, measure
from edge_runtime.profiling.page import to_html
from edge_runtime.profiling.plot import to_picture
from edge_runtime.profiling.rows import Away, AwayPart, Link, Row, make_row
from edge_runtime.profiling.table import KIND, MeterFacts, Table, grid, merge, ordered, read_table, to_document, to_text
from tests.edge_runtime.profiling.virtual_device import VirtualDevice

PLAN = Plan(5, 10.0, 30.0, 30.0, 20.0, 7)
METER = MeterFacts("ina", "module input (VDD_IN)", "measured", 0.007, "leaves out the fan", ("rapl: none",))
NO_METER = "no meter: ina: none"


def row(split: int, watts: float = 6.0, metered: bool = True, link: Link | None = None, name: str = "frontend") -> Row:
    device = VirtualDevice()
    candidate = device.candidate(split, [(name, 0.125 * split, watts)])
    measured = measure(candidate, PLAN, device.bench())
    trace = device.trace if metered else None
    return make_row(candidate.point, (name,), measured, trace, NO_METER, link or Link())


def table(*rows: Row, **changes: Any) -> Table:
    whole = Table(
        "frontend", "raspberry_pi_5", "untested: no hardware", {"fan": "on"}, "/", METER, PLAN, len(rows), rows
    )
    return dataclasses.replace(whole, **changes)


def written(path: Path, whole: Table, capsys: pytest.CaptureFixture[str]) -> Path:
    capsys.readouterr()
    print_document(KIND, to_document(whole))
    path.write_text(capsys.readouterr().out)
    return path


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = table(row(2), row(1, metered=False), row(3, link=Link(1e-6, None, "a plug")))
    path = written(tmp_path / "t.json", whole, capsys)
    assert read_table(path) == whole
    document = json.loads(path.read_text())
    assert (document["schema_version"], document["kind"]) == (1, "edge-profile")
    assert document["rows"][1]["energy"] is None and document["rows"][1]["energy_reason"] == NO_METER


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda each: each.update(kind="edge-run"), "kind edge-profile"),
        (lambda each: each.update(schema_version=2), "version 1"),
        (lambda each: each.update(more=1), "more"),
        (lambda each: each["rows"][0].update(coverage="all"), "coverage"),
        (lambda each: each.pop("plan"), "plan"),
    ],
)
def test_a_table_of_another_form_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, cause: str
) -> None:
    path = written(tmp_path / "t.json", table(row(1)), capsys)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=cause):
        read_table(path)


def test_no_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no table"):
        read_table(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path / "none.json")


def test_tables_of_one_place_are_merged() -> None:
    both = merge([table(row(1)), table(row(2))])
    assert [each.point.split for each in ordered(both)] == [1, 2] and both.planned == 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"environment": {"fan": "off"}}, "environment"),
        ({"environment": {}}, "environment"),
        ({"profile": None}, "device"),
        ({"root": "tree"}, "device"),
        ({"meter": dataclasses.replace(METER, scope="wall")}, "meter"),
        ({"work": "training"}, "work"),
    ],
)
def test_tables_of_two_environments_are_never_merged(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"same {what}"):
        merge([table(row(1)), table(row(2), **changes)])


def test_the_text_shows_figures_and_says_why_others_are_unknown() -> None:
    text = to_text(table(row(2), row(1, metered=False)))
    lines = text.splitlines()
    first, second = (next(line for line in lines if line.strip().startswith(f"{split}/4")) for split in (1, 2))
    assert lines.index(first) < lines.index(second)
    assert first.count("?") == 9 and "62.5 +- 0" in first
    assert "750 +- 0" in second and "500 +- 0" in second and "6.00" in second and "100.0%" in second
    assert f"split 1 int8: energy unknown: {NO_METER}" in text
    assert "communication unknown: no link was measured" in text
    assert "fan=on" in text and "raspberry_pi_5 (untested" in text and "averages over 0.007 s" in text
    assert "leaves out the fan" in text


def test_the_text_says_what_is_not_the_device_itself_and_what_was_left_undone() -> None:
    text = to_text(table(row(1), root="recorded", planned=3, environment={}))
    assert "not the energy of this machine" in text and "stopped after 1 of 3" in text and "no label" in text


def test_phases_of_training_have_columns_of_their_own() -> None:
    text = to_text(table(row(1, name="forward"), work="training"))
    assert "forward ms" in text and "time away from the work: unknown, no run was joined" in text
    seconds_j = {"upload": (0.0025, 0.007), "wait": (0.008, None), "download": (0.002, None)}
    parts = tuple(AwayPart(name, *figures, None) for name, figures in seconds_j.items())
    away = Away("r7", 36, 0.0125, None, None, "no meter", parts)
    joined = dataclasses.replace(row(1, name="forward"), away=away)
    text, (head, line) = to_text(table(joined, work="training")), grid(table(joined, work="training"))
    shown = dict(zip(head, line, strict=True))
    assert [shown[f"{name} ms"] for name in seconds_j] == ["2.5", "8", "2"]
    assert (shown["upload mJ"], shown["download mJ"]) == ("7", "?")
    assert "energy while away unknown: no meter" in text and "no run was joined" not in text
    modelled = dataclasses.replace(
        joined, away=dataclasses.replace(away, energy_j=0.02, bound_j=0.01, reason="modelled, not measured")
    )
    assert "energy while away: modelled, not measured" in to_text(table(modelled, work="training"))


def test_bars_hold_what_an_image_costs() -> None:
    chart = cost_chart(table(row(1, link=Link(1e-3, None, "a plug")), row(2, metered=False)))
    assert chart.names == (COMPUTE, IDLE, COMMUNICATION) and chart.unit == "mJ"
    assert dict(chart.bars[0].parts) == pytest.approx({COMPUTE: 250.0, IDLE: 125.0, COMMUNICATION: 100.0})
    assert chart.bars[0].middle == pytest.approx(375.0)
    assert chart.bars[1].parts == () and chart.bars[1].middle is None
    assert "not the energy of this machine" not in chart.note
    assert "not the energy of this machine" in cost_chart(table(row(1), root="recorded")).note


def test_without_any_energy_the_bars_are_times_and_say_so() -> None:
    chart = cost_chart(table(row(1, metered=False)))
    assert chart.unit == "ms" and chart.bars[0].middle == pytest.approx(62.5) and NO_METER in chart.note
    assert power_curves(table(row(1, metered=False))) == ()


def test_curves_rise_from_nothing_to_all() -> None:
    (curve,) = power_curves(table(row(1)))
    assert curve.points[0] == (6.0, 0.0) and curve.points[-1] == (6.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.0, 375.0, [0, 100, 200, 300, 400]),
        (-0.2, 0.7, [-0.2, 0, 0.2, 0.4, 0.6, 0.8]),
        (0.0, 0.0, [0, 1]),
        (0.0, 0.0035, [0, 0.001, 0.002, 0.003, 0.004]),
    ],
)
def test_ticks_are_round_and_hold_everything(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_the_page_is_whole_and_trusts_nobody() -> None:
    evil = "<script>alert(1)</script>"
    page = to_html(table(row(1), row(2, watts=1.5), row(3, metered=False), environment={"fan": evil}))
    assert page.startswith("<!doctype html>") and page.count("<svg") == 2
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "unknown" in page and "http://www.w3.org" in page and page.count("http") == 2  # the name spaces of SVG
    assert 'height="-' not in page


def test_a_page_without_energy_has_times_and_the_reason() -> None:
    page = to_html(table(row(1, metered=False)))
    assert page.count("<svg") == 1 and "Time per image" in page and NO_METER in page


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match="matplotlib") as error:
        to_picture(table(row(1)), "png")
    assert "cutlayer[plot]" in error.value.cure and ".html" in error.value.cure


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the extra plot is not installed")
@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
@pytest.mark.filterwarnings("ignore")
def test_a_picture_is_drawn(form: str, begins: bytes) -> None:
    assert to_picture(table(row(1), row(2, watts=1.5), row(3, metered=False)), form).startswith(begins)
    assert to_picture(table(row(1, metered=False)), form).startswith(begins)
