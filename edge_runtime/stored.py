"""What was made while there was no server: features in a spool of their own, with a record of what they are.

`offline` makes them, `edge-run sync` sends them, from this folder or from a copy of it on another machine; neither
images nor an engine nor a package are needed for that. The folder holds what is going to be sent, and no more: noised
codes, opaque ids, permuted class numbers. Making and sending are left to the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from contract.canonical import CanonicalError, decode, encode, from_json, to_json
from contract.codec import LIMITS
from contract.codec import decode as decode_frame
from contract.errors import ConfigError, DeviceError, RefusedError, why
from contract.messages import Ask, Features, Message
from edge_runtime.spool import Spool, SpoolLimits
from edge_runtime.state import write_durably
from edge_runtime.terms import Terms

if TYPE_CHECKING:
    from edge_runtime.worker import Upload

RECORD_FILE = "record.json"
RECORD_BYTES = 1 << 16
FOLDER = "offline"  # in the state
SESSION = "offline"  # of a spool that no server has seen


@dataclass(frozen=True)
class Record:
    """What lies beside it: whose features, under which terms, and how many batches all images make."""

    device: str
    package_digest: str
    class_count: int
    class_list_hash: str
    label_mode: str
    kappa: float
    alpha: float
    images: int
    batch_size: int
    fingerprint: str

    @property
    def batches(self) -> int:
        """Messages in all."""
        return -(-self.images // self.batch_size)

    @property
    def terms(self) -> Terms:
        """What the sender agrees to: nothing but what was agreed when the features were made."""
        return Terms(
            self.package_digest, self.class_count, self.class_list_hash, self.label_mode, self.kappa, self.kappa,
            self.alpha, frozenset({"collect_features"}),
        )  # fmt: skip


def write_record(folder: Path, record: Record) -> None:
    """Durably, before the first batch lies beside it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / RECORD_FILE, to_json(encode(record)))


def read_record(folder: Path) -> Record:
    """Raises: ConfigError where there is none, or it is damaged."""
    path = folder / RECORD_FILE
    try:
        return decode(Record, from_json(path.read_bytes(), RECORD_BYTES))
    except FileNotFoundError as error:
        raise ConfigError(
            f"nothing was made offline: there is no {path}",
            "run edge-run --offline first, or give --spool the folder that it wrote (STATE/offline), or a whole copy",
        ) from error
    except (OSError, CanonicalError) as error:
        raise ConfigError(
            f"{path} cannot be read: {why(error, path)}", "copy the folder again, or make it again"
        ) from error


def open_spool(folder: Path, say: Callable[[str], None], limit_bytes: int) -> Spool:
    """The batches of the folder; nothing here waits for acknowledgements."""
    return Spool(folder, say, replace(SpoolLimits(), pending_bytes=limit_bytes))


@dataclass
class SentCounters:
    """As the worker's, as far as a sender has them."""

    steps: int = 0
    images: int = 0
    payload_bytes: int = 0


class StoredWorker:
    """Answers the one ask that there are features for, as `worker.Worker` would, out of the folder."""

    def __init__(self, record: Record, spool: Spool) -> None:
        self.counters = SentCounters()
        self._record, self._spool = record, spool
        first = spool.acknowledged + 1  # what was dropped to keep within the cap lay in front
        self.present = range(first, spool.next_seq)

    @property
    def samples(self) -> range:
        """Stands for the samples that are here."""
        return range(min(len(self.present) * self._record.batch_size, self._record.images))

    @property
    def missing(self) -> int:
        """Batches that were dropped, or are still to be made."""
        return self._record.batches - len(self.present)

    def batch_size(self, upload: Upload) -> int:
        """Samples per message."""
        return self._record.batch_size

    def fingerprint(self, upload: Upload) -> str:
        """What the upload consists of.

        Raises: RefusedError when the server wants other noise than these features have.
        """
        if upload.kappa != self._record.kappa:
            raise RefusedError(
                f"the server asks for kappa {upload.kappa:g}, the features were made with {self._record.kappa:g}",
                "set --kappa of server-run to that, or let edge-run make them anew, which is another release",
                "terms",
            )
        first = self.present.start
        return self._record.fingerprint if first == 1 else f"{self._record.fingerprint}-{first}"

    def answer(self, ask: Ask, run: str, upload: Upload) -> Iterator[Message]:
        """The batches that are here, under this ask.

        Raises: DeviceError when the disk no longer gives what was written.
        """
        self.fingerprint(upload)
        for seq in self.present[upload.first_batch :]:
            message = decode_frame(self._spool.read(seq), LIMITS.object_bytes).message
            if not isinstance(message, Features):
                raise DeviceError(f"record {seq} is no batch of features", "make the folder again: edge-run --offline")
            self.counters.steps += 1
            self.counters.images += len(message.codes)
            self.counters.payload_bytes += message.codes.nbytes
            yield replace(message, ask=upload.ask)

    def infer(self, upload: Upload) -> Iterator[Features]:
        """Predictions need images. Raises: ConfigError."""
        raise ConfigError("only features for training were stored", "predict with edge-run --infer")
