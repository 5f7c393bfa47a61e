"""edge-run --infer with and without a server: every answer says who gave it, and both accuracies are told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.messages import Features, Message, Scores
from contract.signature import load_public
from edge_runtime import pipeline
from edge_runtime.config import DeviceConfig
from tests.edge_runtime.fake_package import Package, write_device
from tests.edge_runtime.memory_server import MemoryServer
from tests.edge_runtime.test_local_answers import COLOURS, GREEN, write_colours
from tests.over_loopback.socket_server import SocketServer
from tests.over_loopback.test_edge_client import Done, Run, memory_server, package, plain, run, welcome_of

__all__ = ["package", "plain", "run"]

NOWHERE = "ws://127.0.0.1:9"


@pytest.fixture
def config(tmp_path: Path, package: Package, plain: SocketServer, run: Run) -> DeviceConfig:
    """A device that has adapted, and is to be asked about eight new pictures."""
    made = write_device(tmp_path, package, write_colours(tmp_path / "images", COLOURS, 6), plain.url)
    plain.memory = memory_server(tmp_path, package, class_count=2)
    done = run(made, "--format", "json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["local"]["held_out_accuracy"] == 1.0
    plain.memory = MemoryServer(load_public(tmp_path / "device.pub"), welcome_of(package, session="s2", class_count=2))
    plain.memory.on_message = lambda server, message: server.score(message, 2)  # always the last class on the wire
    return replace(made, data=write_colours(tmp_path / "test", COLOURS, 4, seed=9))


def alone(run: Run, config: DeviceConfig, *words: str) -> Done:
    """Work that asks no server, which takes none of its flags."""
    return run(config, *words, names=("engine", "trust", "state", "data"))


def answered(document: dict[str, Any]) -> Counter[str]:
    return Counter(each["answered_by"] for each in document["predictions"])


def test_with_a_link_the_server_answers_and_both_are_compared(
    config: DeviceConfig, plain: SocketServer, run: Run
) -> None:
    done = run(config, "--infer", "--format", "json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert answered(document) == {"server": 8} and document["link_down"] is None
    compared = document["local"]["compared"]
    assert compared == {"images": 8, "server": 0.5, "local": 1.0} and document["accuracy"] == 0.5

    alone = run(replace(config, server=NOWHERE), "--infer", "--once", "--format", "json")
    assert json.loads(alone.stdout)["local"]["compared"] == compared  # as it was when the server was asked last


@pytest.mark.parametrize("more", [("--once",), ()], ids=["once", "after some tries"])
def test_without_a_link_this_device_answers(config: DeviceConfig, run: Run, more: tuple[str, ...]) -> None:
    done = run(replace(config, server=NOWHERE), "--infer", *more, "--format", "json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert answered(document) == {"local": 8} and document["outcome"] == "link-down"
    assert "cannot be reached" in document["link_down"] and "the head on this device answers instead" in done.stderr
    assert document["accuracy"] == 1.0 and document["local"]["compared"] is None
    assert all(each["file"].startswith(each["class_name"]) for each in document["predictions"])
    assert done.stderr.count("trying again in") == (0 if more else 2)


def test_a_link_that_is_lost_midway_leaves_the_rest_to_this_device(
    tmp_path: Path, config: DeviceConfig, plain: SocketServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one batch came, and not the one before it: scores have their place by the batch's number."""
    monkeypatch.setattr(pipeline, "BATCH_SAMPLES_MAX", 3)
    assert plain.memory is not None

    def answer_the_second(server: MemoryServer, message: Message) -> None:
        if isinstance(message, Features) and message.batch == 1:
            server.score(message, 2)

    plain.memory.on_message = answer_the_second
    plain.close_code = 1001
    plain.closed_after = lambda frames: plain.memory is not None and len(plain.memory.stored) == 2
    done = run(config, "--infer", "--once", "--format", "json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert answered(document) == {"server": 3, "local": 5} and document["link_down"] is not None
    ids = [sample.tobytes() for _, batch in sorted(plain.memory.stored.items()) for sample in batch.sample_ids]
    assert len(ids) == 6 and plain.memory.images == 6
    ledger = (config.state / "release_ledger").read_text()
    assert all(each.hex() in ledger for each in ids)
    by_server = {each["file"] for each in document["predictions"] if each["answered_by"] == "server"}
    right = all(
        each["file"].startswith(each["class_name"]) for each in document["predictions"] if each["file"] not in by_server
    )
    assert right and document["local"]["compared"]["images"] == 3


def test_scores_of_another_number_of_images_are_refused(config: DeviceConfig, plain: SocketServer, run: Run) -> None:
    assert plain.memory is not None

    def answer_short(server: MemoryServer, message: Message) -> None:
        if isinstance(message, Features):
            server.session.send(Scores(message.ask, message.batch, np.zeros((len(message.codes) - 1, 2), np.float32)))

    plain.memory.on_message = answer_short
    done = run(config, "--infer", "--once")
    assert done.code == 6 and "expected scores of 8 samples, found 7" in done.stderr


def test_a_class_that_only_this_device_knows(
    tmp_path: Path, config: DeviceConfig, plain: SocketServer, run: Run
) -> None:
    """The server answers with the classes of its run, and is judged by all."""
    write_colours(tmp_path / "images", GREEN, 6)
    assert alone(run, replace(config, data=tmp_path / "images"), "--learn").code == 0
    write_colours(config.data, GREEN, 4, seed=9)
    done = run(config, "--infer", "--format", "json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert answered(document) == {"server": 12} and "a green" not in {p["class_name"] for p in document["predictions"]}
    assert document["local"]["compared"] == {"images": 12, "server": pytest.approx(4 / 12), "local": 1.0}
    assert plain.memory is not None and plain.memory.hello is not None and plain.memory.hello.class_count == 2


def test_local_asks_nobody(config: DeviceConfig, plain: SocketServer, run: Run) -> None:
    before = plain.connections
    releases = (config.state / "release_ledger").read_bytes()
    done = alone(run, config, "--infer", "--local", "--format", "csv")
    assert done.code == 0 and plain.connections == before, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "file,class,probability,answered_by" and all(line.endswith(",local") for line in lines[1:])
    assert (config.state / "release_ledger").read_bytes() == releases
    done = run(config, "--local")
    assert done.code == 2 and "--local means nothing without --infer" in done.stderr


def test_without_a_head_once_still_gives_up(config: DeviceConfig, run: Run) -> None:
    (config.state / "checkpoints" / "local_head").unlink()
    done = run(replace(config, server=NOWHERE), "--infer", "--once")
    assert done.code == 8 and done.stdout == "", done.stderr
