"""Fork a process that writes into a spool, kill it at a random moment, look at what is left; again and again.

python -m tests.edge_runtime.kill_spool_writers FOLDER TIMES
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from edge_runtime.spool import Spool, SpoolLimits

LIMITS = SpoolLimits(segment_bytes=5000)


def frame_of(seq: int) -> bytes:
    return seq.to_bytes(8, "little") * (1 + seq % 90)


def open_spool(folder: Path) -> Spool:
    spool = Spool(folder, lambda text: None, LIMITS)
    if spool.head is None:
        assert not list(folder.glob("*.bad")), "a segment was unreadable"
        spool.begin("s1", "run-1", 0)
    return spool


def write_for_ever(folder: Path, promises: int) -> None:
    """Append, acknowledge, annotate; each number goes down the pipe once its frame is durable."""
    spool = open_spool(folder)
    while True:
        seq = spool.next_seq
        spool.append(frame_of(seq), durable=True)
        os.write(promises, seq.to_bytes(8, "little"))
        if seq % 3 == 0:
            spool.acknowledge(seq - 2)
        if seq % 20 == 0:
            spool.annotate(f"note {seq}")


def kill_one(folder: Path, rng: random.Random) -> int:
    """The highest number that the killed writer promised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        write_for_ever(folder, writer)
    os.close(writer)
    first = os.read(reader, 8)
    time.sleep(rng.uniform(0.0, 0.02))  # the moment of death is what is tried
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = first
    while more := os.read(reader, 1 << 16):
        told += more
    os.close(reader)
    return int.from_bytes(told[len(told) // 8 * 8 - 8 : len(told) // 8 * 8], "little")


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(7)
    for _ in range(times):
        promised = kill_one(folder, rng)
        spool = open_spool(folder)
        assert spool.next_seq > promised, f"{promised} was promised, the spool ends at {spool.next_seq - 1}"
        for seq in range(spool.acknowledged + 1, spool.next_seq):
            assert spool.read(seq) == frame_of(seq)
    print(f"{times} kills, {spool.next_seq - 1} frames")


if __name__ == "__main__":
    main()
