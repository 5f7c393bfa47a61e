"""The durable outbox: what was promised to the server survives kill -9 and power loss until it is acknowledged.

It numbers and keeps frames on an append-only log; their meaning, and when to send them, is left to `conduct`.

A segment is a file of records  u32 payload length | u32 crc32 | u8 kind | u64 seq | payload  (little-endian, the CRC
over kind, seq and payload). It opens with a HEAD record: whose frames these are, and in `seq` the number of the first
frame that may follow. Segments go once all their frames are acknowledged, oldest first, so the first segment on the
disk also says what was acknowledged. A torn or altered record ends the log: it and all behind it is cut off, said, and
made again.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from contract.codec import Payload, reopen
from contract.errors import DeviceError
from edge_runtime.state import PARTIAL_SUFFIX, sync_folder

PREFIX = struct.Struct("<IIBQ")
HEAD, MESSAGE = 1, 2


@dataclass(frozen=True)
class SpoolLimits:
    """What the spool may hold."""

    segment_bytes: int = 8 << 20
    record_bytes: int = 64 << 20
    pending_bytes: int = 256 << 20  # the worker waits for acknowledgements above this


@dataclass(frozen=True)
class Head:
    """Whose frames these are; `note` is opaque here: the upload that the owner has in hand."""

    session: str
    run: str
    note: str
    generation: int  # counts `begin`, so that frames of an abandoned session are never taken for this one's


@dataclass(frozen=True)
class Place:
    """Where a pending frame lies: in a segment, or in memory only, as it was given."""

    size: int
    segment: Path | None = None
    offset: int = 0  # of the record's payload
    frame: bytes | Payload = b""


@dataclass(frozen=True)
class Record:
    """One sound record of a segment; offset and size are the payload's."""

    kind: int
    seq: int
    offset: int
    size: int


def pack_record(kind: int, seq: int, payload: bytes) -> bytes:
    """One record, CRC included."""
    checked = struct.pack("<BQ", kind, seq) + payload
    return struct.pack("<II", len(payload), zlib.crc32(checked)) + checked


def scan_records(data: memoryview, limit_bytes: int) -> tuple[list[Record], int]:
    """The sound records from the front, and the offset at which the sound part ends."""
    records: list[Record] = []
    offset = 0
    while offset + PREFIX.size <= len(data):
        size, crc, kind, seq = PREFIX.unpack_from(data, offset)
        end = offset + PREFIX.size + size
        if size > limit_bytes or end > len(data) or zlib.crc32(data[offset + 8 : end]) != crc:
            break
        records.append(Record(kind, seq, offset + PREFIX.size, size))
        offset = end
    return records, offset


def parse_head(payload: bytes) -> Head:
    """Raises: ValueError when the fields are not those of a HEAD record."""
    fields = json.loads(payload)
    if not isinstance(fields, dict) or set(fields) != {"session", "run", "note", "generation"}:
        raise ValueError("not a HEAD record")
    return Head(**fields)


def _frame_of(frame: bytes | Payload) -> bytes:
    return frame.frame(seq=0, ack=0) if isinstance(frame, Payload) else frame


class Spool:
    """Frames by sequence number, from `append` to `acknowledge`; safe to use from the worker and the socket thread."""

    def __init__(self, folder: Path, say: Callable[[str], None], limits: SpoolLimits | None = None) -> None:
        """Recover what is there; `say` is told of anything that had to be cut off."""
        self.limits = limits or SpoolLimits()
        self.head: Head | None = None
        self.acknowledged = 0
        self.next_seq = 1
        self.pending_bytes = 0
        self._folder, self._say = folder, say
        self._places: dict[int, Place] = {}
        self._segment: Path | None = None
        self._segment_bytes = 0
        self._lock = threading.Condition(threading.RLock())
        self._recover()

    @property
    def pending(self) -> int:
        """Frames that are not acknowledged."""
        return len(self._places)

    @property
    def largest_bytes(self) -> int:
        """Of the frames that are not acknowledged; 0 where there is none."""
        with self._lock:
            return max((place.size for place in self._places.values()), default=0)

    def payload(self, seq: int) -> Payload:
        """What was kept under `seq`, ready to be sent under any numbers.

        Raises: as `read`.
        """
        kept = self._places[seq].frame
        return kept if isinstance(kept, Payload) else reopen(self.read(seq))

    def read(self, seq: int) -> bytes:
        """The frame kept under `seq`, with numbers 0.

        Raises: DeviceError when the disk no longer gives what was written.
        """
        with self._lock:
            place = self._places[seq]
            if place.segment is None:
                return _frame_of(place.frame)
            with place.segment.open("rb") as stream:
                stream.seek(place.offset - PREFIX.size)
                record = stream.read(PREFIX.size + place.size)
        if len(scan_records(memoryview(record), self.limits.record_bytes)[0]) != 1:
            raise DeviceError(
                f"spool segment {place.segment.name} changed on the disk after it was written",
                "check the disk and start again: the lost frames are made again",
            )
        return record[PREFIX.size :]

    def append(self, frame: bytes | Payload, *, durable: bool) -> int:
        """Keep a frame under the next number, which is returned; a durable one is on the disk (fsync) by then.

        A payload that is kept in memory only is not copied: its arrays must not change until it is acknowledged.
        Raises: DeviceError when the frame is over the limit or the disk refuses.
        """
        size_bytes = frame.size_bytes if isinstance(frame, Payload) else len(frame)
        if size_bytes > self.limits.record_bytes:
            raise DeviceError(
                f"a frame has {size_bytes} bytes, the spool takes {self.limits.record_bytes}", "report this fault"
            )
        with self._lock:
            seq = self.next_seq
            place = self._store(seq, _frame_of(frame)) if durable else Place(size_bytes, frame=frame)
            self._places[seq] = place
            self.pending_bytes += place.size
            self.next_seq = seq + 1
            return seq

    def acknowledge(self, seq: int) -> None:
        """The server holds everything up to `seq`: forget it, and delete the segments that are done."""
        with self._lock:
            known = [number for number in self._places if number <= seq]  # never by counting up to a number given
            done = [self._places.pop(number) for number in known]
            self.pending_bytes -= sum(place.size for place in done)
            self.acknowledged = max(self.acknowledged, seq)
            self.next_seq = max(self.next_seq, seq + 1)
            if any(place.segment for place in done):
                self._drop_finished_segments()
            self._lock.notify_all()

    def drop_oldest_beyond_limit(self) -> int:
        """Where nobody acknowledges: whole segments go, oldest first, until the limit is kept; how many frames went.

        What went counts as acknowledged from then on, also after a restart; the newest segment always stays.
        """
        dropped = 0
        with self._lock:
            while self.pending_bytes > self.limits.pending_bytes:
                oldest = self._places[min(self._places)].segment
                if oldest is None or oldest == self._segment:
                    break
                gone = [seq for seq, place in self._places.items() if place.segment == oldest]
                self.acknowledge(max(gone))
                dropped += len(gone)
        return dropped

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until what is pending is within the limit; False when it still is not after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: self.pending_bytes <= self.limits.pending_bytes, timeout_s)

    def begin(self, session: str, run: str, acknowledged: int) -> None:
        """A new session, or one of which the server holds less than it once did: everything kept so far goes."""
        with self._lock:
            self._places.clear()
            self.pending_bytes = 0
            self.acknowledged, self.next_seq = acknowledged, acknowledged + 1
            self._open_segment(Head(session, run, "", self.head.generation + 1 if self.head else 1))

    def annotate(self, note: str) -> None:
        """Keep the owner's note durably, beside the frames it speaks of. Call `begin` first."""
        with self._lock:
            assert self.head is not None, "begin() names the session first"
            self._open_segment(Head(self.head.session, self.head.run, note, self.head.generation))

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob("*.segment"))

    def _open_segment(self, head: Head) -> None:
        """The next segment appears whole, HEAD included, by rename; only then do finished ones go."""
        segments = self._segments()
        path = self._folder / f"{int(segments[-1].stem) + 1 if segments else 1:012d}.segment"
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        record = pack_record(HEAD, self.next_seq, json.dumps(asdict(head)).encode())
        try:
            with partial.open("wb") as stream:
                stream.write(record)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
            sync_folder(self._folder)
        except OSError as error:
            raise self._refusal(error) from error
        self.head, self._segment, self._segment_bytes = head, path, len(record)
        self._drop_finished_segments()

    def _store(self, seq: int, frame: bytes) -> Place:
        assert self.head is not None, "begin() names the session first"
        if self._segment is None or self._segment_bytes >= self.limits.segment_bytes:
            self._open_segment(self.head)
        assert self._segment is not None
        record = pack_record(MESSAGE, seq, frame)
        place = Place(len(frame), self._segment, self._segment_bytes + PREFIX.size)
        try:
            # Opened anew for each record: that costs little beside the fsync, and no descriptor outlives its file.
            with self._segment.open("r+b") as stream:
                stream.seek(self._segment_bytes)
                stream.write(record)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise self._refusal(error) from error
        self._segment_bytes += len(record)
        return place

    def _refusal(self, error: OSError) -> DeviceError:
        return DeviceError(
            f"the spool {self._folder} cannot be written: {error.strerror}", "make room on the disk and start again"
        )

    def _drop_finished_segments(self) -> None:
        wanted = {place.segment for place in self._places.values()} | {self._segment}
        for path in self._segments():
            if path in wanted:
                return  # oldest first: the log stays a suffix of what was written
            path.unlink(missing_ok=True)

    def _recover(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for partial in self._folder.glob(f"*{PARTIAL_SUFFIX}"):
            partial.unlink(missing_ok=True)
        segments = self._segments()
        for position, path in enumerate(segments):
            if not self._recover_segment(path):
                for later in segments[position + 1 :]:
                    later.unlink(missing_ok=True)
                break
        # Frames that were kept in memory only leave a gap: what follows it is made again.
        while self.next_seq in self._places:
            self.next_seq += 1
        self._places = {seq: place for seq, place in self._places.items() if seq < self.next_seq}
        self.pending_bytes = sum(place.size for place in self._places.values())

    def _recover_segment(self, path: Path) -> bool:
        """Take in one segment; False when the log ends inside it."""
        data = path.read_bytes()
        records, sound_bytes = scan_records(memoryview(data), self.limits.record_bytes)
        try:
            if not records or records[0].kind != HEAD:
                raise ValueError("no HEAD record")
            head = parse_head(data[records[0].offset : records[0].offset + records[0].size])
        except ValueError as error:
            self._say(f"spool segment {path.name} was unreadable ({error}) and is set aside; its frames are made again")
            os.replace(path, path.with_suffix(".bad"))
            return False
        if self.head is None or head.generation != self.head.generation:
            self._places.clear()
            self.acknowledged, self.next_seq = records[0].seq - 1, records[0].seq
        for record in records[1:]:
            self._places[record.seq] = Place(record.size, path, record.offset)
        self.head, self._segment, self._segment_bytes = head, path, sound_bytes
        if sound_bytes == len(data):
            return True
        self._say(
            f"spool segment {path.name}: {len(data) - sound_bytes} bytes behind the last sound record are cut off "
            "and made again"
        )
        with path.open("r+b") as stream:
            stream.truncate(sound_bytes)
            os.fsync(stream.fileno())
        return False
