"""Joules of a split: from a table that edge-profile wrote, from a profile's watts, or unknown with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.tokens import TokenLayout
from edge_runtime.profiling.measuring import Plan
from edge_runtime.profiling.measuring import Point as Measured
from edge_runtime.profiling.rows import Energy, Estimate, Row
from edge_runtime.profiling.table import KIND, MeterFacts, Table, to_document
from exporter.gate_energy import energy_of, load_profile, read_energy

MODEL = "vit_tiny_patch16_224"
LAYOUT = TokenLayout(1, (4, 4), 48)
POINT = Measured(MODEL, "front", "0" * 64, 2, 3, "w8a8", "onnxruntime 1", 1, 1, 17 * 48 + 2 * 16, 0)
TWO_MS = Estimate(0.002, 0.0001, 5)
JOULES = Energy(Estimate(0.03, 0.001, 5), Estimate(0.02, 0.001, 5), 0.01, 0.001, 2.0, 2.0, None)
ROW = Row(POINT, TWO_MS, (), JOULES, None, None, "no link", None, None, 1.0, 1.0, None, None, (), ())
UNMEASURED = replace(ROW, point=replace(POINT, precision="float32"), energy=None, energy_reason="no meter is there")
METER = MeterFacts("ina3221", "the board", "measured", 0.1, None, ())
TABLE = Table(
    "frontend", "raspberry_pi_4", "not run", {}, "/", METER, Plan(3, 1.0, 1.0, 1.0, 1.0, 0), 2, (ROW, UNMEASURED)
)


def write(path: Path, table: Table = TABLE) -> Path:
    path.write_text(json.dumps({"schema_version": 1, "kind": KIND, **to_document(table)}))
    return path


def test_measured_joules_come_from_the_row_of_split_and_precision(tmp_path: Path) -> None:
    table = read_energy(write(tmp_path / "t.json"), MODEL)
    found = energy_of(2, "int8", LAYOUT, table, None)
    assert (found.joules, found.kind) == (0.03, "measured") and "ina3221 on raspberry_pi_4" in found.source
    assert energy_of(1, "int8", LAYOUT, table, None).joules is None
    assert "has no row of split 1 in int8" in energy_of(1, "int8", LAYOUT, table, None).source


def test_a_table_of_modelled_joules_says_so(tmp_path: Path) -> None:
    modelled = replace(TABLE, meter=replace(METER, name="modelled", quality="modelled"))
    assert (
        energy_of(2, "int8", LAYOUT, read_energy(write(tmp_path / "t.json", modelled), MODEL), None).kind == "modelled"
    )


def test_without_a_meter_the_profiles_watts_and_the_tables_time_make_a_model(tmp_path: Path) -> None:
    table, profile = read_energy(write(tmp_path / "t.json"), MODEL), load_profile("raspberry_pi_4")
    found = energy_of(2, "float32", LAYOUT, table, profile)
    assert found.kind == "modelled" and found.joules == pytest.approx(profile.power.busy_w * 0.002)
    assert "W of profile raspberry_pi_4" in found.source


def test_what_cannot_be_known_is_unknown_with_its_reason(tmp_path: Path) -> None:
    table = read_energy(write(tmp_path / "t.json"), MODEL)
    for found, said in (
        (energy_of(2, "float32", LAYOUT, table, None), "no meter is there; no --profile"),
        (
            energy_of(2, "float32", LAYOUT, table, load_profile("raspberry_pi_5")),
            "profile raspberry_pi_5 gives no watts",
        ),
        (energy_of(2, "int8", LAYOUT, None, load_profile("raspberry_pi_4")), "no table of edge-profile was given"),
    ):
        assert (found.joules, found.kind) == (None, "unknown") and said in found.source


def test_a_row_of_images_of_another_size_says_nothing(tmp_path: Path) -> None:
    table = read_energy(write(tmp_path / "t.json"), MODEL)
    larger = energy_of(2, "int8", TokenLayout(1, (14, 14), 48), table, None)
    assert larger.joules is None and "images of another size" in larger.source
    half = replace(POINT, sent_bytes_per_image=9 * 48 + 2 * 8)  # the checkerboard of the same tokens
    table = read_energy(write(tmp_path / "h.json", replace(TABLE, rows=(replace(ROW, point=half),))), MODEL)
    assert energy_of(2, "int8", LAYOUT, table, None).joules == 0.03


def test_files_that_are_no_such_table_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ("", "[]", '{"kind":"edge-profile","schema_version":2}', '{"kind":"edge-profile","schema_version":1}'):
        other.write_text(text)
        with pytest.raises(ConfigError, match="is no table of edge-profile"):
            read_energy(other, MODEL)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_energy(tmp_path / "none.json", MODEL)
    with pytest.raises(ConfigError, match="no row of a frontend of resnet18"):
        read_energy(write(tmp_path / "t.json"), "resnet18")
    with pytest.raises(ConfigError, match="no row of a frontend"):
        read_energy(write(tmp_path / "t.json", replace(TABLE, work="training")), MODEL)
    with pytest.raises(ConfigError, match="no profile 'pi'"):
        load_profile("pi")
