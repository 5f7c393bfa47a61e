"""The wire's benchmark at tiny sizes: it measures what it says; how fast the wire is, is no test's business."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="the benchmark writes a small frontend with onnx")

from contract.errors import UsageError
from tests.over_loopback.deployment import wait_until
from tools import bench_wire, bench_wire_peers, peers
from tools.bench_wire_peers import Peer

ROOT = Path(__file__).parents[2]
TINY = ("--turns", "2", "--exchanges", "5", "--exchange-bytes", "8000", "--devices", "2", "--round-bytes", "3000000")


def run(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.bench_wire", "--format", "json", *TINY, "--rounds", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


SIZE_BYTES = 40_000_000  # so that a device that held an upload in memory would stand out


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return run("--round-bytes", str(SIZE_BYTES))


def test_every_figure_is_measured_beside_its_peer(document: dict[str, Any]) -> None:
    assert (document["schema_version"], document["kind"]) == (1, "bench-wire")
    exchange = dict(document["exchange"])
    assert exchange.pop("exchanges") == 10
    spans = {"exchange", "bare", "with_pipe"}
    ratios = {"ratio_p50", "ratio_p99", "with_pipe_ratio_p50", "with_pipe_ratio_p99"}
    assert exchange.keys() == {f"{span}_{share}_s" for span in spans for share in ("p50", "p99")} | ratios
    assert all(value > 0 for value in exchange.values())
    assert exchange["with_pipe_p50_s"] > exchange["exchange_p50_s"]  # it contains it
    assert document["round"].keys() == {"bare_s", "ours_s", "ratio_to_bare"}
    assert document["upload"].keys() == {"bare_s", "bare_fsync_s", "ours_s", "ratio_to_bare", "ratio_to_bare_fsync"}
    assert all(value > 0 for part in ("round", "upload") for value in document[part].values())


def test_a_peer_whose_python_is_not_given_is_left_out_with_the_reason(document: dict[str, Any]) -> None:
    assert document["peers"] == {
        name: {"left_out": f"no --{name} PYTHON was given, an interpreter that has {package}"}
        for name, package in (("flower", "flwr"), ("nvflare", "nvflare"))
    }


@pytest.mark.parametrize("name", ["flower", "nvflare"])
def test_an_interpreter_that_lacks_a_peer_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=f"is no Python with {peers.PACKAGES[name]}") as error:
        peers.version_of(name, sys.executable)
    assert "pip install" in error.value.cure
    with pytest.raises(UsageError, match="cannot be run"):
        peers.version_of(name, "/nonexistent")


def test_a_peers_figures_are_made_within_a_turn() -> None:
    found = {"flower": Peer("1.0", "as it runs", "client", None, None)}  # type: ignore[arg-type]
    exchanges = {  # the machine became ten times slower after the first turn
        "flower": [{"whole_s": [6.0, 8.0]}, {"whole_s": [70.0, 70.0]}],
        "ours": [{"whole_s": [1.0, 1.0, 5.0]}, {"whole_s": [10.0]}],
    }
    rounds = {"flower": [{"whole_s": [12.0]}, {"whole_s": [60.0]}], "ours": [{"whole_s": [3.0]}, {"whole_s": [20.0]}]}
    figures = bench_wire_peers.figures(
        found, {"flower": "python"}, exchanges, rounds, {"flower": 5}, bench_wire.percentile
    )
    assert figures["flower"] == {
        "version": "1.0", "runs": "as it runs", "client_idle_bytes": 5, "exchanges": 4,
        "exchange_p50_s": 70.0, "exchange_p99_s": 70.0, "exchange_times_ours": 7.0,
        "rounds": 2, "round_s": 36.0, "round_times_ours": 3.5,
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="descendants are found in /proc")
def test_a_deployment_ends_what_its_programs_started(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "launcher"
    launcher.write_text("#!/bin/sh\nsleep 300 &\necho $! > child\nwait\n")
    launcher.chmod(0o755)
    deployment = peers.Deployment(tmp_path / "peer", str(tmp_path / "bin" / "python"), {})
    deployment.start("it", "launcher")
    child = tmp_path / "peer" / "child"
    wait_until(lambda: child.exists() and child.read_text().endswith("\n"), "the program's child")
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    deployment.close()
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z", "the child's end")  # Z: not reaped


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_is_counted_in_bytes_of_whole_processes(document: dict[str, Any]) -> None:
    memory = document["memory"]
    for name in ("bare_idle_bytes", "idle_bytes", "engine_bytes"):
        assert 10e6 < memory[name] < 1e9, name
    assert memory["engine_model_bytes"] > 1_000_000
    assert memory["engine_bytes"] > memory["idle_bytes"]
    for name in ("upload", "round"):
        over = memory[f"peak_{name}_bytes"] - memory["idle_bytes"]
        assert memory[f"peak_{name}_over_idle_in_payloads"] == pytest.approx(over / SIZE_BYTES)
    # An upload goes through the spool batch by batch: what the device holds must not grow with it.
    assert memory["peak_upload_over_idle_in_payloads"] < 0.5


def test_the_profile_names_shares_of_both_processes() -> None:
    profile = run("--profile")["profile"]
    assert profile["exchanges"] == 10
    for side in ("device", "server"):
        assert profile[side]["codec: decode"] > 0
        assert profile[side]["TLS"] > 0
    assert profile["device"]["hand-off to the worker's thread"] > 0


@pytest.mark.parametrize("flag", ["--turns", "--exchanges", "--devices", "--round-bytes", "--peer-exchanges"])
def test_sizes_below_one_are_a_usage_error(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} 0 is too few"):
        bench_wire.parse([flag, "0"])


def test_an_interpreter_that_cannot_run_a_device_is_a_usage_error(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("no program\n")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # a Python without a single package
    bare.chmod(0o755)
    for python, said in (
        ("/nonexistent", "No such file"),
        (tmp_path, "Permission denied"),
        (plain, "Permission denied"),
        ("/bin/true", "it is no Python"),
        ("/bin/echo", "it is no Python"),
        (bare, "No module named"),
    ):
        with pytest.raises(UsageError, match=said) as error:
            bench_wire.version_of(str(python))
        assert str(python) in error.value.cause and "\n" not in error.value.cause
    assert bench_wire.version_of(sys.executable) == platform.python_version()


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert bench_wire.percentile(values, 0.5) == 51
    assert bench_wire.percentile(values, 0.99) == 100
    assert bench_wire.percentile([3.0], 0.99) == 3.0


def test_ratios_are_made_within_a_turn() -> None:
    # The machine became ten times slower after the first turn; both sides alike.
    assert bench_wire.ratio_of([2.0, 20.0, 20.0], [1.0, 10.0, 10.0]) == 2.0


def test_turns_alternate_their_order() -> None:
    order: list[str] = []

    def call(name: str) -> bench_wire.Call:
        return lambda: order.append(name) or {}  # type: ignore[func-returns-value]

    answers = bench_wire.take_turns({"bare": call("bare"), "ours": call("ours")}, 2)
    assert order == ["bare", "ours", "ours", "bare"]
    assert [len(each) for each in answers.values()] == [2, 2]
