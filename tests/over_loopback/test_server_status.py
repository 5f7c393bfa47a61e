"""What a running server shows of itself: over HTTP, in its file, and as server-status says it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from contract.console import run_command
from contract.messages import Heartbeat
from server_runtime import pipe, status_cli
from server_runtime.pipe import PipeFrame
from tests.over_loopback.test_server_connections import Bench, on_server


def show_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a bench show how they stand, on a free port that they say."""
    real = Bench.__init__

    def with_metrics(self: Bench, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self.server._job = replace(self.server._job, metrics=("127.0.0.1", 0))

    monkeypatch.setattr(Bench, "__init__", with_metrics)


def port_of(bench: Bench) -> int:
    return int(next(said for said in bench.said if said.startswith("status page")).rsplit(":", 1)[1])


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    assert text.startswith("HTTP/1.1 200 OK\r\n"), text
    return text.partition("\r\n\r\n")[2]


def test_metrics_status_and_page_say_who_is_here_and_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"site": "clinic", "epoch": 3, "loss": 0.5, "accuracy": 0.75, "quarantined": None}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + '\n{"site": "cli')

    async def story(bench: Bench) -> None:
        port = port_of(bench)
        async with bench.device() as device:
            await device.send(Heartbeat(4, True, "", 0.0))
            waits = PipeFrame(pipe.STATUS, "clinic", text="paused: waiting for jetson", values={"busy": False})
            bench.child.says.put_nowait(waits)
            while (found := json.loads(await get(port, "/status")))["devices"][1]["step"] != 4 or not found["sites"][0][
                "waiting_for"
            ]:
                await asyncio.sleep(0.01)
            site, (jetson, pi) = found["sites"][0], found["devices"]
            assert (site["state"], site["waiting_for"], site["busy"]) == (
                "running",
                "paused: waiting for jetson",
                False,
            )
            assert site["metrics"]["accuracy"] == 0.75
            assert (jetson["state"], jetson["since_s"], jetson["step"]) == ("away", None, None)
            assert (pi["state"], pi["busy"], pi["connections"]) == ("connected", True, 1)
            assert pi["received_bytes"] > 200 < pi["sent_bytes"]
            metrics = await get(port, "/metrics")
            assert 'cutlayer_device_connected{site="clinic",device="pi"} 1' in metrics
            assert 'cutlayer_device_connected{site="clinic",device="jetson"} 0' in metrics
            assert 'cutlayer_site_accuracy{site="clinic"} 0.75' in metrics
            assert "joule" not in metrics
            assert "Cutlayer" in await get(port, "/")

    show_metrics(monkeypatch)
    on_server(story, tmp_path, monkeypatch)
    assert run_command(lambda: status_cli._main(["--runs", str(tmp_path), "--format", "json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["run"], told["state"]) == ("server-status", "run", "stopped")
    pi = told["devices"][1]  # as the last words have it, after its connection ended
    assert (pi["state"], pi["connections"]) == ("away", 1) and pi["received_bytes"] > 200
    assert status_cli._main(["--runs", str(tmp_path)]) == 0
    words = capsys.readouterr().out
    assert "device    pi (clinic): away" in words and "B in, " in words and "0.0 MB" not in words
    assert run_command(lambda: status_cli._main(["--runs", str(tmp_path / "none")])) == 2
