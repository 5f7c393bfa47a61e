"""Keeps what devices sent: SQLite for the ledger, one safetensors file per batch, durable before it is acknowledged.

Which run directory is used is left to `run_directory`; whether features make sense was decided by `acceptance`.

Rules:
* a batch is known by (device, ask, batch): the second copy is ignored, whatever session or seq it comes with;
* the file is written (temp, fsync, rename, fsync of the folder) before its row is committed (WAL, synchronous FULL);
* a file that does not match its digest is set aside and its row removed, so that its device is asked again, or the
  copy that it sends just now is kept;
* an unreadable ledger is set aside and rebuilt from the files, which carry their own record.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from contract.errors import RefusedError, RemoteProtocolError
from contract.messages import Features

from .files import set_aside, sync_directory, write_atomic

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sites (site TEXT PRIMARY KEY, class_count INTEGER NOT NULL, class_list_hash TEXT);
CREATE TABLE IF NOT EXISTS sessions (
    device TEXT NOT NULL, session TEXT NOT NULL, purpose TEXT NOT NULL, received_seq INTEGER NOT NULL,
    PRIMARY KEY (device, session));
CREATE TABLE IF NOT EXISTS uploads (
    site TEXT NOT NULL, device TEXT NOT NULL, session TEXT NOT NULL, seq INTEGER NOT NULL,
    ask TEXT NOT NULL, batch INTEGER NOT NULL, total INTEGER NOT NULL, split TEXT NOT NULL, rows INTEGER NOT NULL,
    file TEXT NOT NULL, sha256 TEXT NOT NULL, answered INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (device, ask, batch));
"""


@dataclass(frozen=True)
class UploadRecord:
    """One stored batch of features; `file` is relative to the run directory."""

    site: str
    device: str
    session: str
    seq: int
    ask: str
    batch: int
    total: int
    split: str
    rows: int
    file: str
    sha256: str


_COLUMNS = ", ".join(field.name for field in fields(UploadRecord))


@dataclass(frozen=True)
class Upload:
    """A device's whole answer to one ask, in the device's own order: codes (n,T,d) i8, sources (n,N) u16 or None,
    labels (n,) u16 or None, sample_ids (n,16) u8."""

    device: str
    sample_ids: np.ndarray
    codes: np.ndarray
    sources: np.ndarray | None
    labels: np.ndarray | None


class Store:
    """The ledger and the tensors of one run; any thread may call it, one at a time."""

    def __init__(self, root: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self._root = root
        self._warn = warn
        self._lock = threading.RLock()  # `keep` reads what is stored of the same batch
        (root / "tensors").mkdir(parents=True, exist_ok=True)
        self._full = self._open()
        # Receipts of replayable messages: they survive kill -9 without an fsync for each training step.
        self._quick = _connect(root / "state.sqlite", "NORMAL")

    def _open(self) -> sqlite3.Connection:
        path, kept = self._root / "state.sqlite", ""
        connection = _open_whole(path)
        if connection is None:
            kept = f"kept as {set_aside(path).name}, "
            for side_file in (path.with_name("state.sqlite-wal"), path.with_name("state.sqlite-shm")):
                if side_file.exists():
                    set_aside(side_file)
            connection = _connect(path, "FULL")
        is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        connection.executescript(_SCHEMA)
        files = sorted(self._root.glob("tensors/*/*/*.safetensors")) if is_new else []
        if files:
            found = sum(self._recover(connection, file) for file in files)
            self._warn(f"state.sqlite was unreadable: {kept}rebuilt from {found} stored batches")
        return connection

    def _recover(self, connection: sqlite3.Connection, path: Path) -> int:
        """Enter a stored batch into a new ledger by the record that its file carries; 0 when the file is damaged."""
        try:
            with safe_open(path, framework="numpy") as stream:
                row = json.loads((stream.metadata() or {})["record"])
            class_count, class_list_hash = row.pop("classes")
            data = path.read_bytes()
            record = UploadRecord(**row, file=str(path.relative_to(self._root)), sha256=_digest(data))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            self._warn(f"{path.name} is unreadable: kept as {set_aside(path).name}")
            return 0
        connection.execute("INSERT OR IGNORE INTO sites VALUES (?, ?, ?)", (record.site, class_count, class_list_hash))
        connection.execute(
            "INSERT INTO sessions VALUES (?, ?, 'adapt', ?) ON CONFLICT (device, session) "
            "DO UPDATE SET received_seq = max(received_seq, excluded.received_seq)",
            (record.device, record.session, record.seq),
        )
        return _insert(connection, record)

    # -- sites and sessions

    def fix_classes(self, site: str, class_count: int, class_list_hash: str | None) -> tuple[int, str | None]:
        """The class list that the site's first joiner fixed: given values are kept only when there is none yet."""
        with self._lock:
            self._full.execute("INSERT OR IGNORE INTO sites VALUES (?, ?, ?)", (site, class_count, class_list_hash))
            return self._fixed_classes(site) or (class_count, class_list_hash)

    def classes(self, site: str) -> tuple[int, str | None] | None:
        """(class count, class-list hash) of a site, or None before its first device joined."""
        with self._lock:
            return self._fixed_classes(site)

    def _fixed_classes(self, site: str) -> tuple[int, str | None] | None:
        row = self._full.execute("SELECT class_count, class_list_hash FROM sites WHERE site = ?", (site,)).fetchone()
        return None if row is None else (int(row[0]), row[1])

    def received_seq(self, device: str, session: str) -> int | None:
        """Highest seq of this session that was received for good; None for an unknown session."""
        with self._lock:
            row = self._full.execute(
                "SELECT received_seq FROM sessions WHERE device = ? AND session = ?", (device, session)
            ).fetchone()
        return None if row is None else int(row[0])

    def open_session(self, device: str, session: str, purpose: str) -> None:
        """Remember a new session, with nothing received yet."""
        with self._lock:
            self._full.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, 0)", (device, session, purpose))

    def note_received(self, device: str, session: str, seq: int) -> None:
        """Count a replayable message as received: kept over kill -9, not over a power cut (it is asked for again)."""
        with self._lock:
            self._quick.execute(
                "UPDATE sessions SET received_seq = max(received_seq, ?) WHERE device = ? AND session = ?",
                (seq, device, session),
            )

    # -- features

    def keep(self, site: str, device: str, session: str, seq: int, features: Features) -> bool:
        """Make a batch durable and count its seq as received; False when the batch was known already.

        Raises:
            RemoteProtocolError: the batch disagrees with the others of its ask (total, split, or more rows than total).
            RefusedError: what is stored of this upload is of other samples: another machine's under this name, or this
                one's before it lost its state. A mixture of the two would train on wrong neighbours.
        """
        rows = int(features.sample_ids.shape[0])
        with self._lock:
            if features.split == "infer":
                self._forget_older(device, session, seq, features)
            known = self._known(device, features, rows)
            record = None if known else self._write(site, device, session, seq, features, rows)
            self._full.execute("BEGIN IMMEDIATE")
            if record is not None:
                _insert(self._full, record)
            self._full.execute(
                "UPDATE sessions SET received_seq = max(received_seq, ?) WHERE device = ? AND session = ?",
                (seq, device, session),
            )
            self._full.execute("COMMIT")
        return not known

    def _forget_older(self, device: str, session: str, seq: int, features: Features) -> None:
        # An inference batch under another seq was sent anew, perhaps about other images: the newest counts.
        stale = self._full.execute(
            "DELETE FROM uploads WHERE device = ? AND ask = ? AND split = 'infer' "
            "AND ((batch = ? AND (session, seq) != (?, ?)) OR total != ?) RETURNING file",
            (device, features.ask, features.batch, session, seq, features.total),
        ).fetchall()
        for (file,) in stale:
            (self._root / file).unlink(missing_ok=True)

    def _known(self, device: str, features: Features, rows: int) -> bool:
        query = f"SELECT {_COLUMNS} FROM uploads WHERE device = ? AND ask = ?"  # noqa: S608  names of our own fields
        stored = [UploadRecord(*row) for row in self._full.execute(query, (device, features.ask)).fetchall()]
        same = next((record for record in stored if record.batch == features.batch), None)
        if same is not None:
            if same.split != "train":
                return True
            tensors = self.read(same)
            if tensors is not None:
                self._check_same_samples(features, same, tensors["sample_ids"])
                return True
            stored.remove(same)  # damaged: the copy that has just come takes its place
        for record in stored:
            if (record.total, record.split) != (features.total, features.split):
                raise RemoteProtocolError(
                    f"batch {features.batch} of ask {features.ask!r} says {features.total} samples of "
                    f"{features.split!r}, earlier batches said {record.total} of {record.split!r}",
                    "restart the device's command with an unchanged image folder",
                )
        if sum(record.rows for record in stored) + rows > features.total:
            raise RemoteProtocolError(
                f"ask {features.ask!r} has more samples than its total of {features.total}",
                "restart the device's command with an unchanged image folder",
            )
        return False

    @staticmethod
    def _check_same_samples(features: Features, record: UploadRecord, sample_ids: np.ndarray) -> None:
        if not np.array_equal(sample_ids, features.sample_ids):
            raise RefusedError(
                f"batch {record.batch} of {record.ask!r} is stored with other samples: {record.device!r} began this "
                "upload on another machine, with other images, or before it lost its state",
                "go on with the state and images of that time, or start a new run (server-run --run NAME); "
                "two machines need two names and keys",
                "upload-mismatch",
            )

    def _write(self, site: str, device: str, session: str, seq: int, features: Features, rows: int) -> UploadRecord:
        folder = self._root / "tensors" / site / device
        new_folder = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if new_folder:
            sync_directory(folder.parent)
            sync_directory(folder.parent.parent)
        row = {
            "site": site, "device": device, "session": session, "seq": seq, "ask": features.ask,
            "batch": features.batch, "total": features.total, "split": features.split, "rows": rows,
        }  # fmt: skip
        tensors: dict[str, np.ndarray] = {"sample_ids": features.sample_ids, "codes": features.codes}
        if features.sources is not None:
            tensors["sources"] = features.sources
        if features.labels is not None:
            tensors["labels"] = features.labels
        carried = {**row, "classes": self._fixed_classes(site) or (0, None)}  # enough to rebuild the ledger from
        data = save_tensors(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"record": json.dumps(carried)}
        )
        path = folder / f"{session}-{seq:08d}.safetensors"
        write_atomic(path, data)
        return UploadRecord(**row, file=str(path.relative_to(self._root)), sha256=_digest(data))  # type: ignore[arg-type]

    def complete(self, device: str, ask: str) -> bool:
        """Whether every sample of the ask is stored."""
        with self._lock:
            row = self._full.execute(
                "SELECT sum(rows), max(total) FROM uploads WHERE device = ? AND ask = ?", (device, ask)
            ).fetchone()
        return row[0] is not None and row[0] == row[1]

    def records(self, site: str, split: str, unanswered: bool = False) -> list[UploadRecord]:
        """The stored batches of a site by device, ask and batch number, never by arrival."""
        query = f"SELECT {_COLUMNS} FROM uploads WHERE site = ? AND split = ?"  # noqa: S608  names of our own fields
        if unanswered:
            query += " AND answered = 0"
        with self._lock:
            rows = self._full.execute(query + " ORDER BY device, ask, batch", (site, split)).fetchall()
        return [UploadRecord(*row) for row in rows]

    def read(self, record: UploadRecord) -> dict[str, np.ndarray] | None:
        """The tensors of a batch; None (with a warning) when the file is missing or altered: then it is forgotten."""
        path = self._root / record.file
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        if _digest(data) == record.sha256:
            return dict(load_tensors(data))
        kept = f"kept as {set_aside(path).name}" if path.exists() else "the file is missing"
        self._warn(f"batch {record.batch} of {record.ask!r} from {record.device!r} was damaged ({kept}): taken anew")
        with self._lock:
            self._full.execute(
                "DELETE FROM uploads WHERE device = ? AND ask = ? AND batch = ?",
                (record.device, record.ask, record.batch),
            )
        return None

    def upload(self, site: str, device: str, ask: str) -> Upload | None:
        """A device's whole answer to one ask, batches in the device's order; None while a part is missing."""
        records = [item for item in self.records(site, "train") if item.device == device and item.ask == ask]
        parts = [self.read(record) for record in records]
        whole = [part for part in parts if part is not None]
        if len(whole) != len(records) or not self.complete(device, ask):
            return None
        joined = {name: np.concatenate([part[name] for part in whole]) for name in whole[0]}
        return Upload(device, joined["sample_ids"], joined["codes"], joined.get("sources"), joined.get("labels"))

    def forget_requests(self, device: str, session: str) -> None:
        """Drop a device's unanswered inference batches of other sessions: it holds them until it has their scores."""
        with self._lock:
            files = self._full.execute(
                "DELETE FROM uploads WHERE device = ? AND session != ? AND split = 'infer' AND answered = 0 "
                "RETURNING file",
                (device, session),
            ).fetchall()
        for (file,) in files:
            (self._root / file).unlink(missing_ok=True)

    def answer(self, device: str, ask: str, batch: int) -> None:
        """The device has the scores of this batch: its file is deleted; its row stays, to know a replay by."""
        with self._lock:
            row = self._full.execute(
                "UPDATE uploads SET answered = 1 WHERE device = ? AND ask = ? AND batch = ? AND answered = 0 "
                "RETURNING file",
                (device, ask, batch),
            ).fetchone()
        if row is not None:
            (self._root / row[0]).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the ledger."""
        with self._lock:
            self._quick.close()
            self._full.close()


def _open_whole(path: Path) -> sqlite3.Connection | None:
    """The ledger, or None when it is damaged."""
    try:
        connection = _connect(path, "FULL")
        if connection.execute("PRAGMA quick_check").fetchone()[0] == "ok":
            return connection
        connection.close()
    except sqlite3.DatabaseError:
        pass
    return None


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    return connection


def _insert(connection: sqlite3.Connection, record: UploadRecord) -> int:
    values = asdict(record)
    marks = ", ".join(f":{name}" for name in values)
    query = f"INSERT OR IGNORE INTO uploads ({_COLUMNS}) VALUES ({marks})"  # noqa: S608  names of our own fields
    return connection.execute(query, values).rowcount


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
