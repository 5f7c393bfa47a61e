"""The socket process over real sockets, with a scripted torch process: who gets in, what is stored and acknowledged."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from contract import signature
from contract.errors import ConfigError, TrainingError
from contract.messages import Ask, Bye, Features, Gradient, Heartbeat, Hello, Scores
from server_runtime import pipe, server
from server_runtime.acceptance import Expected
from server_runtime.admission import Terms
from server_runtime.pipe import PipeFrame, carry
from server_runtime.plan import Listen
from server_runtime.roster import read_roster
from server_runtime.server import Job, Outcome, Server
from server_runtime.store import Store
from tests.server_runtime import tiny
from tests.server_runtime.scripted_device import Refused, ScriptedDevice, make_certificate

DIGEST = "ab" * 32
LIMIT_S = 30.0


class FakeChild:
    """The torch process's place, played by the test."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[PipeFrame] = asyncio.Queue()
        self.says: asyncio.Queue[PipeFrame | Exception | None] = asyncio.Queue()
        self.says.put_nowait(PipeFrame(pipe.READY))

    async def send(self, frame: PipeFrame) -> None:
        self.heard.put_nowait(frame)

    async def frames(self) -> AsyncIterator[PipeFrame]:
        while (said := await self.says.get()) is not None:
            if isinstance(said, Exception):
                raise said
            for frame in pipe.Unpacker().feed(pipe.pack(said)):  # as it comes out of a pipe
                yield frame

    async def stop(self) -> None:
        self.says.put_nowait(None)

    async def next(self, kind: str) -> PipeFrame:
        """The next frame of this kind that the server hands over."""
        while (frame := await self.heard.get()).kind != kind:
            pass
        return frame


class Bench:
    """A server in this process, its roster, and devices to come."""

    def __init__(self, root: Path, tls: bool, exit_when_done: bool) -> None:
        self.keys = {name: tiny.enrol(root / "roster", "clinic", name) for name in ("pi", "jetson")}
        self.certificate, key = make_certificate(root) if tls else (None, None)
        self.store = Store(root / "run")
        self.said: list[str] = []
        job = Job(
            root=root / "run",
            listen=Listen("127.0.0.1", 0, self.certificate, key),
            roster=read_roster(root / "roster"),
            terms=Terms("run", "split_adaptation", "permuted-label", DIGEST, tiny.KAPPA, 7),
            expected=Expected(tiny.LAYOUT, "permuted-label"),
            start=PipeFrame(pipe.START),
            threads=1,
            exit_when_done=exit_when_done,
        )
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.server = Server(job, self.store, self.listening.set_result, self.said.append)
        self.child = FakeChild()

    def hello(self, device: str = "pi", purpose: str = "adapt", session: str | None = None) -> Hello:
        key_id = signature.key_id(self.keys[device].public_key())
        return Hello(device, key_id, 1, 1, (), DIGEST, 3, "cd" * 32, purpose, session, 0)  # type: ignore[arg-type]

    def device(self, hello: Hello | None = None, **more: object) -> ScriptedDevice:
        hello = hello or self.hello()
        key = more.pop("key", None) or self.keys.get(hello.device) or self.keys["pi"]
        return ScriptedDevice(self.url, hello, key, certificate=self.certificate, **more)  # type: ignore[arg-type]


def on_server(
    story: Callable[[Bench], Awaitable[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tls: bool = True,
    exit_when_done: bool = False,
) -> tuple[Outcome, Bench]:
    """Run a story against a server, then stop the server cleanly."""

    async def run() -> tuple[Outcome, Bench]:
        bench = Bench(tmp_path, tls, exit_when_done)

        class Start:
            @staticmethod
            async def start(frame: PipeFrame, threads: int) -> FakeChild:
                return bench.child

        monkeypatch.setattr(server, "TorchChild", Start)
        serving = asyncio.create_task(bench.server.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait({serving, bench.listening}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    bench.url = bench.listening.result().removeprefix("listening on ")
                    await story(bench)
                if not exit_when_done:
                    bench.server._on_signal()
                return await serving, bench
        finally:
            serving.cancel()
            bench.store.close()

    return asyncio.run(run())


def batches(count: int = 10, size: int = 4) -> list[Features]:
    return tiny.batches(tiny.upload("pi", count), "run.features", size)


@pytest.mark.parametrize("tls", [True, False])
def test_features_are_stored_before_they_are_acknowledged(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        assert bench.url.startswith("wss://127.0.0.1:" if tls else "ws://127.0.0.1:")
        async with bench.device() as device:
            assert (device.welcome.site, device.welcome.run) == ("clinic", "run")
            joined = await bench.child.next(pipe.JOINED)
            assert joined.values == {"purpose": "adapt", "class_count": 3}
            bench.child.says.put_nowait(
                carry("clinic", "pi", Ask("run.features", "collect_features", {"kappa": 0.5, "seed": 7}, 60.0))
            )
            assert isinstance(await device.receive(), Ask)
            for number, message in enumerate(batches(), start=1):
                await device.send(message)
                await device.wait_for_ack(number)
                assert len(bench.store.records("clinic", "train")) == number
            stored = [await bench.child.next(pipe.STORED) for _ in range(3)]
            assert [frame.values["complete"] for frame in stored] == [False, False, True]
            bench.child.says.put_nowait(carry("clinic", "pi", Bye("collected", True)))
            assert await device.receive() == Bye("collected", True)
        await bench.child.next(pipe.LEFT)

    on_server(story, tmp_path, monkeypatch, tls=tls)


def test_wi_04_a_replay_in_a_new_connection_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            session = device.welcome.session
            for message in batches()[:2]:
                await device.send(message)
            await device.wait_for_ack(2)
        async with bench.device(bench.hello(session=session), next_seq=3) as device:
            assert (device.welcome.session, device.welcome.last_seq) == (session, 2)
            number = await device.send(batches()[2])
            assert number == 3
            await device.wait_for_ack(3)
        async with bench.device() as device:  # its spool was lost: everything again in a new session
            assert device.welcome.session != session
            for message in batches():
                await device.send(message)
            await device.wait_for_ack(3)
        records = bench.store.records("clinic", "train")
        assert [(record.batch, record.rows) for record in records] == [(0, 4), (1, 4), (2, 2)]

    on_server(story, tmp_path, monkeypatch)


def test_wi_03_a_newer_session_replaces_the_stale_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as stale, bench.device() as fresh:
            with pytest.raises(ConnectionClosed) as closed:
                await stale.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4000
            await fresh.send(batches()[0])
            await fresh.wait_for_ack(1)
        kinds = []
        while not kinds.count(pipe.LEFT):
            kinds.append((await bench.child.heard.get()).kind)
        assert kinds.count(pipe.JOINED) == 2

    on_server(story, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"device": "mallory"}, "unknown-device"),
        ({"key_id": "0" * 16}, "wrong-key"),
        ({"protocol_min": 7, "protocol_max": 9}, "upgrade-required"),
        ({"package_digest": "ef" * 32}, "package"),
    ],
)
def test_se_04_a_refusal_names_its_code_and_the_others_go_on(
    change: dict[str, object], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device(bench.hello("jetson")) as other:
            with pytest.raises(Refused) as refusal:
                async with bench.device(replace(bench.hello(), **change)):  # type: ignore[arg-type]
                    pass
            assert refusal.value.code == code
            with pytest.raises(Refused) as refusal:
                async with bench.device(key=signature.generate()):
                    pass
            assert refusal.value.code == "wrong-key"
            with pytest.raises(Refused) as refusal:
                async with bench.device(replace(bench.hello(), class_count=4)):
                    pass
            assert refusal.value.code == "class-list"
            await other.send(Heartbeat(1, True, "", 0.0))

    on_server(story, tmp_path, monkeypatch)


@pytest.mark.parametrize("frame", ["text", b"", b"\xff" * 100, b"\x05\0\0\0{}   "])
def test_attack_bytes_that_are_no_message_close_the_connection_only(
    frame: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device(bench.hello("jetson")) as other:
            async with connect(bench.url) as stranger:
                await stranger.send(frame)
                with pytest.raises(ConnectionClosed):
                    while True:
                        await stranger.recv()
            await other.send(batches()[0])
            await other.wait_for_ack(1)

    on_server(story, tmp_path, monkeypatch, tls=False)


@pytest.mark.parametrize(
    "wrong", [replace(batches()[0], labels=None), replace(batches()[0], codes=np.zeros((4, 3, 24), np.int8))]
)
def test_attack_features_that_do_not_fit_are_refused_and_not_stored(
    wrong: Features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            await device.send(wrong)
            with pytest.raises(Refused) as refusal:
                await device.receive()
            assert refusal.value.code == "protocol"
        assert bench.store.records("clinic", "train") == []

    on_server(story, tmp_path, monkeypatch)


def test_features_of_an_earlier_run_are_acknowledged_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            await device.send(replace(batches()[0], ask="older.features"))
            await device.wait_for_ack(1)
        assert bench.store.records("clinic", "train") == []
        assert bench.store.received_seq("pi", device.welcome.session) == 1

    on_server(story, tmp_path, monkeypatch)


def test_wi_02_messages_larger_than_a_frame_pass_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9.7 MB of scores to a device that takes frames of 256 kB, 4 MB of gradient back."""
    values = np.arange(64 * 37824, dtype=np.float32).reshape(64, 37824)

    async def story(bench: Bench) -> None:
        hello = replace(bench.hello(), frame_bytes=256 << 10)
        async with bench.device(hello, frame_bytes=256 << 10) as device:
            bench.child.says.put_nowait(carry("clinic", "pi", Scores("infer-1", 0, values)))
            scores = await device.receive()
            assert isinstance(scores, Scores)
            assert np.array_equal(scores.values, values)
            number = await device.send(Gradient("run.step-1", 0.5, 1, 4, values[:32, :32768].copy()))
            await device.wait_for_ack(number)
            carried = pipe.carried(await bench.child.next(pipe.MESSAGE))
            assert isinstance(carried, Gradient)
            assert np.array_equal(carried.gradient, values[:32, :32768])

    on_server(story, tmp_path, monkeypatch)


def test_heartbeats_tell_what_the_site_is_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            text = "training, epoch 12 of 100"
            bench.child.says.put_nowait(PipeFrame(pipe.STATUS, "clinic", text=text, values={"busy": True}))
            for number, message in enumerate(batches(24, 2), start=1):  # each acknowledgement is a heartbeat
                await device.send(message)
                await device.wait_for_ack(number)
            assert device.statuses[-1] == text
            assert any(text in line for line in bench.said)
            await device.send(Heartbeat(5, True, "", 0.0))
            assert (await bench.child.next(pipe.PROGRESS)).device == "pi"

    on_server(story, tmp_path, monkeypatch)


def test_inference_is_stored_handed_over_answered_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = tiny.upload("pi", 6)

    async def story(bench: Bench) -> None:
        async with bench.device(bench.hello(purpose="infer")) as device:
            for message in tiny.batches(upload, "infer-1", 3, "infer"):
                await device.send(message)
            await device.wait_for_ack(2)
        # Gone before its scores: it sends again what it has no scores for, under a new session.
        async with bench.device(bench.hello(purpose="infer")) as device:
            for _ in range(2):
                await bench.child.next(pipe.JOINED)
            assert bench.store.records("clinic", "infer", unanswered=True) == []
            again = tiny.batches(upload, "infer-1", 3, "infer")[1]
            await device.send(again)
            assert (await bench.child.next(pipe.STORED)).values["batch"] == 1
            scores = Scores("infer-1", 1, np.zeros((3, 3), np.float32))
            bench.child.says.put_nowait(carry("clinic", "pi", scores))
            assert isinstance(await device.receive(), Scores)
            bench.child.says.put_nowait(PipeFrame(pipe.ENDED, "clinic", values={"epoch": 3}))
            await device.send(Bye("done", True))

    outcome, bench = on_server(story, tmp_path, monkeypatch, exit_when_done=True)
    assert outcome.ended == {"clinic": {"epoch": 3}}
    again = Store(tmp_path / "run")
    assert again.records("clinic", "infer", unanswered=True) == []
    again.close()


def test_messages_wait_for_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device(bench.hello(purpose="infer")) as device:
            count = device.welcome.credit + 20
            for batch in range(count):
                scores = Scores("infer-1", batch, np.zeros((1, 3), np.float32))
                bench.child.says.put_nowait(carry("clinic", "pi", scores))
            received = [await device.receive() for _ in range(count)]
            assert [message.batch for message in received if isinstance(message, Scores)] == list(range(count))

    on_server(story, tmp_path, monkeypatch)


@pytest.mark.slow
def test_wi_02_connections_leave_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident: list[int] = []

    async def story(bench: Bench) -> None:
        for number in range(300):
            async with bench.device():
                pass
            if number in (20, 299):
                resident.append(psutil.Process().memory_info().rss)
        assert len(bench.server._open) <= 1

    on_server(story, tmp_path, monkeypatch)
    assert resident[1] - resident[0] < 10_000_000


def test_the_end_of_the_torch_process_ends_the_server_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        async with bench.device() as device:
            bench.child.says.put_nowait(TrainingError("the training process ended by signal SIGKILL", "restart"))
            with pytest.raises(ConnectionClosed):
                await device.receive()

    with pytest.raises(TrainingError, match="SIGKILL"):
        on_server(story, tmp_path, monkeypatch, exit_when_done=True)


def test_a_disk_that_takes_no_receipt_ends_the_server_with_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its devices would be dropped without a word, come back, and be dropped again."""

    def refuse(device: str, session: str, seq: int) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def story(bench: Bench) -> None:
        bench.store.note_received = refuse  # type: ignore[method-assign]
        async with bench.device() as device:
            await device.send(Gradient("run.step-1", 0.5, 1, 1, np.zeros((1, 3), np.float32)))
            with pytest.raises(ConnectionClosed):
                await device.receive()

    with pytest.raises(TrainingError, match="disk is full"):
        on_server(story, tmp_path, monkeypatch, exit_when_done=True)


def test_a_site_that_failed_ends_the_server_when_no_other_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        values: dict[str, pipe.Value] = {"cause": "training broke in epoch 3", "cure": "lower it"}
        bench.child.says.put_nowait(PipeFrame(pipe.FAILED, "clinic", values=values))

    with pytest.raises(TrainingError, match="epoch 3"):
        on_server(story, tmp_path, monkeypatch, exit_when_done=True)


def test_the_first_signal_to_a_server_that_ends_by_itself_changes_nothing_and_the_second_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(server.os, "_exit", ended.append)

    async def story(bench: Bench) -> None:
        bench.server._stop.set()  # as when all is done
        bench.server._on_signal()
        assert not ended and not any("stopping" in each for each in bench.said)
        bench.server._on_signal()
        assert ended == [1]

    on_server(story, tmp_path, monkeypatch, exit_when_done=True)


def test_a_port_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        blocker = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = blocker.sockets[0].getsockname()[1]
        bench = Bench(tmp_path, tls=False, exit_when_done=False)
        job = replace(bench.server._job, listen=Listen("127.0.0.1", port, None, None))
        try:
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
                await Server(job, bench.store, print, print).run()
        finally:
            blocker.close()
            bench.store.close()

    asyncio.run(run())


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        bench = Bench(tmp_path, tls=True, exit_when_done=False)
        (tmp_path / "server.pem").write_text("no certificate")
        try:
            with pytest.raises(ConfigError, match=r"server\.pem"):
                await bench.server.run()
        finally:
            bench.store.close()

    asyncio.run(run())
