"""The live page in a real browser: what a person sees, and that no text from outside becomes markup."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from contract.messages import Heartbeat
from server_runtime import pipe
from server_runtime.pipe import PipeFrame
from tests.over_loopback.test_server_connections import Bench, on_server
from tests.over_loopback.test_server_status import port_of, show_metrics

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("CUTLAYER_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
HOSTILE = "paused: waiting for <img src=x onerror=\"document.title='owned'\"> jetson"


async def read_page(url: str, profile: Path) -> str:
    """The document as the browser has it, two looks at the server later."""
    assert BROWSER is not None
    running = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--virtual-time-budget=3000", "--dump-dom", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    output, _ = await running.communicate()
    return output.decode()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; CUTLAYER_TEST_BROWSER names one")
def test_the_page_shows_the_run_and_takes_texts_as_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"site": "clinic", "epoch": 3, "loss": 0.5, "accuracy": 0.8125, "bytes_up": 2_500_000, "bytes_down": 1000}
    line["quarantined"] = "pi: not finite: <b>w</b>"  # type: ignore[assignment]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            await device.send(Heartbeat(4, True, "", 0.0))
            bench.child.says.put_nowait(PipeFrame(pipe.STATUS, "clinic", text=HOSTILE, values={"busy": False}))
            while not bench.server._status["clinic"].text:
                await asyncio.sleep(0.01)
            page = await read_page(f"http://127.0.0.1:{port_of(bench)}/", tmp_path / "profile")
        assert "<title>Cutlayer: run</title>" in page
        assert "Run run</h1>" in page and "split_adaptation, permuted-label" in page
        rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page) if "<td>" in row]
        site, jetson, pi = rows
        assert site[:2] == ["clinic", "running"] and site[4:8] == ["0.8125", "0.5", "3", "2.5 MB, 0.0 MB"]
        assert site[2].startswith("paused: waiting for &lt;img") and site[8] == "pi: not finite: &lt;b&gt;w&lt;/b&gt;"
        assert jetson[:4] == ["jetson", "clinic", "away", "unknown"]
        assert pi[:3] == ["pi", "clinic", "connected"] and pi[4] == "works"

    show_metrics(monkeypatch)
    on_server(story, tmp_path, monkeypatch)
