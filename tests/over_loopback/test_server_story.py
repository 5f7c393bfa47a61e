"""server-run as its user runs it: two processes, TLS, scripted devices; and a kill in the middle of training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract import manifest as package  # noqa: E402
from contract import signature  # noqa: E402
from contract.messages import Ask, Bye, Gradient, Hello, Scores  # noqa: E402
from server_runtime.store import Upload  # noqa: E402
from tests.server_runtime import tiny  # noqa: E402
from tests.server_runtime.scripted_device import ScriptedDevice, make_certificate  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 50.0


class Site:
    """Everything on the server's side, and the keys of its devices."""

    def __init__(self, root: Path, devices: tuple[str, ...]) -> None:
        self.root = root
        self.keys = {name: tiny.enrol(root / "roster", "clinic", name) for name in devices}
        self.backend = tiny.write_backend_folder(root / "front.backend")
        self.digest = package.digest((self.backend / "manifest.json").read_bytes()).hex()
        self.certificate, self.certificate_key = make_certificate(root)

    @contextmanager
    def server(self, *extra: object) -> Iterator[Running]:
        """server-run until the block ends."""
        words = [
            sys.executable, "-m", "server_runtime.cli", "--strategy", "split_adaptation", "--backend", self.backend,
            "--listen", "127.0.0.1:0", "--roster", self.root / "roster", "--certificate", self.certificate,
            "--certificate-key", self.certificate_key, "--runs", self.root / "runs", "--threads", 1, *extra,
        ]  # fmt: skip
        environment = dict(os.environ) | {"PYTHONPATH": str(REPOSITORY)}
        errors = open(self.root / "server.log", "a")  # noqa: SIM115
        running = subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            cwd=self.root,
        )  # fmt: skip
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line.startswith("listening on wss://127.0.0.1:"), (self.root / "server.log").read_text()
            yield Running(running, line.split()[-1])
        finally:
            errors.close()
            running.kill()
            running.communicate()

    def device(
        self, url: str, name: str, purpose: str = "adapt", session: str | None = None, next_seq: int = 1
    ) -> ScriptedDevice:
        key = self.keys[name]
        key_id = signature.key_id(key.public_key())
        hello = Hello(name, key_id, 1, 1, (), self.digest, 3, "cd" * 32, purpose, session, 0)  # type: ignore[arg-type]
        return ScriptedDevice(url, hello, key, certificate=self.certificate, next_seq=next_seq)


class Running:
    """A started server."""

    def __init__(self, running: subprocess.Popen[str], url: str) -> None:
        self.running, self.url = running, url

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Wait for its end, after a signal if one is given; (exit code, the rest of stdout)."""
        if number is not None:
            self.running.send_signal(number)
        output, _ = self.running.communicate(timeout=LIMIT_S)
        return self.running.returncode, output


async def upload_all(device: ScriptedDevice, upload: Upload) -> None:
    ask = await device.receive()
    assert isinstance(ask, Ask)
    assert ask.kind == "collect_features"
    assert ask.parameters["kappa"] == tiny.KAPPA
    for message in tiny.batches(upload, ask.ask, 4):
        await device.send(message)


def weights(root: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = {}
    for part in ("backend", "features", "head"):
        path = root / "models" / "clinic" / f"{part}.safetensors"
        found |= {f"{part}.{name}": tensor for name, tensor in load_file(path).items()} if path.exists() else {}
    return found


def assert_same_weights(state: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    ours = {name: tensor for name, tensor in state.items() if not name.startswith("adam.")}
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_site_is_adapted_over_tls_and_answered(killed: bool, tmp_path: Path) -> None:
    """One device uploads, the other half; the server is killed, or not; the rest follows; then inference; then SIGTERM
    (DE-03). The weights equal those of training in one go in this process, bit for bit."""
    from tests.server_runtime.test_strategies import SETTINGS, drive, shipped_backend

    site = Site(tmp_path, ("jetson", "pi"))
    uploads = {"pi": tiny.upload("pi", 9), "jetson": tiny.upload("jetson", 7, seed=1)}
    options = ("--epochs", 30, "--seed", 7, "--augmentations", 4)

    async def upload_half(url: str) -> tuple[str, str]:
        async with asyncio.timeout(LIMIT_S), site.device(url, "jetson") as jetson, site.device(url, "pi") as pi:
            await upload_all(jetson, uploads["jetson"])
            assert await jetson.receive() == Bye("collected", True)
            ask = await pi.receive()
            assert isinstance(ask, Ask)
            for message in tiny.batches(uploads["pi"], ask.ask, 4)[:2]:
                await pi.send(message)
            await pi.wait_for_ack(2)
            return pi.welcome.session, ask.ask

    async def upload_rest(url: str, session: str, asked: str) -> None:
        async with asyncio.timeout(LIMIT_S), site.device(url, "pi", session=session, next_seq=3) as pi:
            assert pi.welcome.last_seq == 2  # nothing that was acknowledged is lost
            ask = await pi.receive()
            assert isinstance(ask, Ask)
            assert ask.ask == asked
            await pi.send(tiny.batches(uploads["pi"], ask.ask, 4)[2])
            assert await pi.receive() == Bye("collected", True)

    async def infer(url: str) -> np.ndarray:
        async with asyncio.timeout(LIMIT_S), site.device(url, "pi", "infer") as device:
            for message in tiny.batches(uploads["pi"], "infer-1", 5, "infer"):
                await device.send(message)
            answers = [await device.receive() for _ in range(2)]
            assert all(isinstance(answer, Scores) for answer in answers)
            await device.send(Bye("done", True))
            return np.concatenate([answer.values for answer in sorted(answers, key=lambda answer: answer.batch)])

    def finish(server: Running) -> np.ndarray:
        asyncio.run(upload_rest(server.url, session, asked))
        scores = asyncio.run(infer(server.url))
        code, _ = server.end(signal.SIGTERM)
        assert code == 0, (tmp_path / "server.log").read_text()
        return scores

    with site.server("--run", "first", *options) as server:
        session, asked = asyncio.run(upload_half(server.url))
        if killed:
            torch_process = psutil.Process(server.running.pid).children()
            server.end(signal.SIGKILL)
            assert len(torch_process) == 1
            assert psutil.wait_procs(torch_process, timeout=LIMIT_S)[1] == []  # it ends with its parent
        else:
            scores = finish(server)
    if killed:
        with site.server("--run", "first") as server:  # the run keeps its own settings
            scores = finish(server)
    run = tmp_path / "runs" / "first"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in metrics if "epoch" in line] == list(range(1, 31))
    assert metrics[29]["loss"] < metrics[0]["loss"]

    strategy = shipped_backend(site.backend, replace(SETTINGS, epochs=30))
    drive(strategy, uploads)
    assert_same_weights(strategy.state().tensors, weights(run))
    codes = uploads["pi"].codes
    assert np.array_equal(scores, np.concatenate([strategy.predict(codes[:5]), strategy.predict(codes[5:])]))


@pytest.mark.slow
def test_a_killed_server_goes_on_and_ends_bit_identical(tmp_path: Path) -> None:
    """logit-gradient: the server is killed between two steps, comes back, and the device answers on; the weights equal
    those of training in one go in this process."""
    from tests.server_runtime.test_strategies import SETTINGS, answer_as_device, drive, shipped_backend

    site = Site(tmp_path, ("pi",))
    labelled = tiny.upload("pi", 9)
    upload = replace(labelled, labels=None)
    options = ("--label-mode", "logit-gradient", "--epochs", 12, "--seed", 7, "--augmentations", 4)

    async def work(device: ScriptedDevice, steps: int | None) -> int:
        """Answer gradients until the end, or until `steps` were answered."""
        done = 0
        while steps is None or done < steps:
            message = await device.receive()
            if isinstance(message, Bye):
                assert message == Bye("done", True)
                return done
            assert isinstance(message, Ask)
            if message.kind == "collect_features":
                for batch in tiny.batches(upload, message.ask, 4):
                    await device.send(batch)
                continue
            question = _Question(message)
            answer = answer_as_device(question, "pi", upload, labelled.labels)  # type: ignore[arg-type]
            assert isinstance(answer, Gradient)
            await device.send(replace(answer, ask=message.ask))
            done += 1
        return done

    async def first(url: str) -> str:
        async with asyncio.timeout(LIMIT_S), site.device(url, "pi") as device:
            await work(device, 5)
            await device.receive()  # the question that the kill leaves open
            return device.welcome.session

    async def second(url: str, session: str) -> int:
        async with asyncio.timeout(LIMIT_S), site.device(url, "pi", session=session, next_seq=1 << 40) as device:
            assert device.welcome.session == session
            return await work(device, None)

    with site.server(*options) as server:
        session = asyncio.run(first(server.url))
        code, _ = server.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
    with site.server("--exit-when-done", *options) as server:
        answered = asyncio.run(second(server.url, session))
        code, _ = server.end()
    assert code == 0, (tmp_path / "server.log").read_text()
    assert answered == 12 - 5  # one step an epoch: nothing was asked twice, nothing was lost

    strategy = shipped_backend(site.backend, replace(SETTINGS, label_mode="logit-gradient", epochs=12))
    drive(strategy, {"pi": upload}, lambda ask, device, given: answer_as_device(ask, device, given, labelled.labels))
    [run] = (tmp_path / "runs").iterdir()
    assert_same_weights(strategy.state().tensors, weights(run))


class _Question:
    """An Ask of the wire as a strategy's Ask, for the one who answers."""

    def __init__(self, message: Ask) -> None:
        self.name, self.kind, self.tensors = message.ask, message.kind, {"pi": message.tensors}
