from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.codec import encode, prepare
from contract.errors import DeviceError
from edge_runtime.spool import Spool, SpoolLimits
from tests.golden.samples import MESSAGES

ROOT = Path(__file__).parents[2]
SMALL = SpoolLimits(segment_bytes=200, pending_bytes=100)


def open_spool(folder: Path, said: list[str] | None = None, limits: SpoolLimits = SMALL) -> Spool:
    return Spool(folder, (said if said is not None else []).append, limits)


def begun(folder: Path) -> Spool:
    spool = open_spool(folder)
    spool.begin("s1", "run-1", 0)
    return spool


def contents(spool: Spool) -> dict[int, bytes]:
    return {seq: spool.read(seq) for seq in range(spool.acknowledged + 1, spool.next_seq)}


def test_a_payload_is_ready_to_be_sent_wherever_it_was_kept(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    messages = [MESSAGES["features"], MESSAGES["gradient"]]
    for message in messages:
        spool.append(prepare(message), durable=message.TYPE == "features")
    for seq, message in enumerate(messages, 1):
        assert spool.payload(seq).frame(seq, 0) == encode(message, seq=seq, ack=0)
        assert spool.read(seq) == encode(message, seq=0, ack=0)
    assert open_spool(tmp_path).payload(1).frame(1, 0) == encode(messages[0], seq=1, ack=0)


def test_frames_come_back_after_a_restart_until_they_are_acknowledged(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    frames = [bytes([number]) * 60 for number in range(10)]
    assert [spool.append(frame, durable=True) for frame in frames] == list(range(1, 11))
    spool.acknowledge(4)
    again = open_spool(tmp_path)
    assert again.head == spool.head and again.next_seq == 11
    assert all(again.read(seq) == frames[seq - 1] for seq in range(5, 11))
    again.acknowledge(10)
    assert again.pending_bytes == 0
    last = open_spool(tmp_path)
    assert last.next_seq == 11  # numbers are never given twice


def test_segments_of_acknowledged_frames_are_deleted(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    for _ in range(50):
        spool.acknowledge(spool.append(bytes(60), durable=True))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_new_session_clears_what_an_older_one_kept(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"old", durable=True)
    spool.begin("s2", "run-2", 0)
    assert spool.append(b"new", durable=True) == 1
    again = open_spool(tmp_path)
    assert again.head is not None and again.head.session == "s2" and contents(again) == {1: b"new"}


def test_a_crash_between_the_new_session_and_the_old_segments_end_is_no_confusion(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"old", durable=True)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    spool.begin("s2", "run-2", 7)
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)  # as if the deletion had not reached the disk
    again = open_spool(tmp_path)
    assert contents(again) == {} and again.next_seq == 8


def test_the_note_lasts(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"one", durable=True)
    spool.annotate("upload in hand")
    spool.append(b"two", durable=True)
    again = open_spool(tmp_path)
    assert again.head is not None and again.head.note == "upload in hand"
    assert contents(again) == {1: b"one", 2: b"two"}


def test_frames_kept_in_memory_are_lost_with_the_process_and_leave_no_gap(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"kept", durable=True)
    spool.append(b"replayable", durable=False)
    spool.append(b"after it", durable=True)
    assert spool.read(2) == b"replayable"
    assert contents(open_spool(tmp_path)) == {1: b"kept"}


def test_there_is_no_room_above_the_limit_until_acknowledged(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(bytes(101), durable=True)
    assert not spool.wait_for_room(0.01)
    spool.acknowledge(1)
    assert spool.wait_for_room(0.01)


def test_a_server_that_holds_more_than_the_spool_sets_the_numbers(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"x", durable=True)
    spool.acknowledge(5)
    assert spool.append(b"y", durable=True) == 6 and contents(spool) == {6: b"y"}


def test_a_frame_changed_on_the_disk_is_never_sent(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(b"features", durable=True)
    segment = next(tmp_path.iterdir())
    segment.write_bytes(segment.read_bytes().replace(b"features", b"FEATURES"))
    with pytest.raises(DeviceError, match="changed on the disk"):
        spool.read(1)


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1), noise=st.binary(max_size=40), flip=st.booleans())
def test_de_04_a_torn_or_altered_tail_costs_no_more_than_itself(
    tmp_path_factory: pytest.TempPathFactory, cut: float, noise: bytes, flip: bool
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, lambda text: None, SpoolLimits())
    spool.begin("s1", "run-1", 0)
    frames = [bytes([number]) * 30 for number in range(1, 6)]
    for frame in frames:
        spool.append(frame, durable=True)
    segment = next(folder.iterdir())
    data = segment.read_bytes()
    keep = round(cut * len(data))
    spoiled = bytearray(data[:keep] + noise)
    if flip and keep > 1:
        spoiled[keep - 1] ^= 0x40
    segment.write_bytes(spoiled)
    said: list[str] = []
    again = Spool(folder, said.append, SpoolLimits())
    found = contents(again)
    assert list(found.values()) == frames[: len(found)]
    if again.head is None:
        again.begin("s2", "run-1", 0)
    seq = again.append(b"goes on", durable=True)
    assert contents(open_spool(folder))[seq] == b"goes on"


@pytest.mark.parametrize("size", [0, 7])
def test_de_04_a_segment_without_its_head_is_set_aside(tmp_path: Path, size: int) -> None:
    begun(tmp_path)
    segment = next(tmp_path.iterdir())
    segment.write_bytes(segment.read_bytes()[:size])
    said: list[str] = []
    assert open_spool(tmp_path, said).head is None
    assert "set aside" in said[0] and [path.suffix for path in tmp_path.iterdir()] == [".bad"]


def test_kill_9_a_hundred_times_never_leaves_an_unreadable_state(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.edge_runtime.kill_spool_writers", str(tmp_path), "100"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "100 kills" in done.stdout


def test_a_huge_number_from_a_hostile_server_takes_no_time(tmp_path: Path) -> None:
    spool = begun(tmp_path)
    spool.append(bytes(60), durable=True)
    spool.acknowledge(2**62)  # counting up to it would never end
    assert spool.pending_bytes == 0
