"""Every message that may cross the wire, as frozen dataclasses that cannot be built with values outside their rules.

Their bytes are `contract.codec`'s part, their legal order is `contract.session`'s. Whoever breaks a rule here gets a
`LocalProtocolError`; the codec, the one door for foreign bytes, turns it into a `RemoteProtocolError`.

Fields annotated with an array type travel in the body of a frame, the others in its header. Arrays of a received
message are views of the received bytes and read-only. Shapes: B samples in this message, T tokens, N patches, d
channels, C classes.

The file is long because every message is in it, and it is meant to be read as one list. Kinds of asks are in
`contract.asks`.

No message has a field for energy, power ceilings or the strength of weight noise: these never leave the device.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from contract.asks import ASK_KINDS, SAMPLE_IDS, TensorRule
from contract.canonical import INT_MAX, shown
from contract.errors import LocalProtocolError, ProtocolError, suggest
from contract.manifest import LabelMode
from contract.names import is_name

PROTOCOL_MIN = 1
PROTOCOL = 1
UPGRADE_REQUIRED = "upgrade-required"
PIECE_BYTES = 512 << 10  # of a package's file that come at once
UPDATES = "updates"  # a hello's feature: this device takes packages that are offered
# Which check a package did not pass on a device.
Reason = Literal[
    "", "engine", "parity", "not-finite", "same-tokens", "slower", "stopped", "signature", "older", "kind",
    "weaker", "name",
    "quarantined", "damaged", "no-pictures", "device",
]  # fmt: skip

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class FieldLimits:
    """Largest sizes of single fields."""

    tensor_characters: int = 128
    text_characters: int = 1000
    features: int = 32
    nonce_bytes: int = 32
    signature_bytes: int = 64
    public_key_bytes: int = 32
    credit: int = 1024
    checkpoints: int = 8
    classes: int = 4096  # with prototypes of their own in one message
    heartbeat_s: float = 3600.0
    frame_bytes_min: int = 64 << 10
    frame_bytes: int = 1 << 20


LIMITS = FieldLimits()

_TENSOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # as a manifest may list it
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_CURE = "one of the two programs has a fault: update both to one version; if it stays, report this text"


def choose_protocol(lowest: int, highest: int) -> int:
    """Highest protocol version that this server shares with a device that speaks `lowest` to `highest`.

    Raises: ProtocolError naming both ranges, to be sent as a `Refuse` of code `UPGRADE_REQUIRED`.
    """
    shared = min(highest, PROTOCOL)
    if shared >= max(lowest, PROTOCOL_MIN):
        return shared
    raise ProtocolError(
        f"no protocol version in common: the device speaks {lowest} to {highest}, "
        f"the server speaks {PROTOCOL_MIN} to {PROTOCOL}",
        f"upgrade Cutlayer on the {'device' if highest < PROTOCOL_MIN else 'server'}",
    )


# --- arrays ------------------------------------------------------------------------------------------------------

# Arrays by type of message; those of an ask depend on its kind. A type that is not here has no body.
TENSORS: Mapping[str, Mapping[str, TensorRule]] = {
    "features": {
        "sample_ids": SAMPLE_IDS,
        "codes": TensorRule(np.int8, ("B", "T", "d")),
        "sources": TensorRule(np.uint16, ("B", "N"), optional=True),
        "labels": TensorRule(np.uint16, ("B",), optional=True),
    },
    "scores": {"values": TensorRule(np.float32, ("B", "C"))},
    "gradient": {"gradient": TensorRule(np.float32, ("B", "C"))},
    "activations": {
        "values": TensorRule((np.float32, np.float16), ("B", "n")),
        "labels": TensorRule(np.uint16, ("B",), optional=True),
    },
    "patch_features": {
        "values": TensorRule((np.float32, np.float16, np.int8), ("B", "T", "d"), optional=True),
        "scales": TensorRule(np.float32, ("d",), optional=True),  # with int8 only
        "labels": TensorRule(np.uint16, ("B",), optional=True),
    },
    "prototypes": {"values": TensorRule(np.float32, ("K", "d"), optional=True)},
    "piece": {"data": TensorRule(np.uint8, ("n",))},
    "chunk": {"data": TensorRule(np.uint8, ("n",))},
}


def tensors_of(message: Message) -> dict[str, Array]:
    """Arrays that travel in the body, by name; an optional array that is None does not travel."""
    if isinstance(message, Ask | Update):
        return dict(message.tensors)
    arrays = {name: getattr(message, name) for name in TENSORS.get(message.TYPE, ())}
    return {name: array for name, array in arrays.items() if array is not None}


# --- messages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Device: who I am, what I speak and carry, which session I resume and what I received in it."""

    TYPE: ClassVar[str] = "hello"

    device: str
    key_id: str
    protocol_min: int
    protocol_max: int
    features: tuple[str, ...]
    package_digest: str | None
    class_count: int
    class_list_hash: str | None
    purpose: Literal["adapt", "infer", "update"]
    session: str | None
    last_seq: int
    frame_bytes: int = LIMITS.frame_bytes  # the largest frame that the device takes

    def __post_init__(self) -> None:
        _require_name(self, "device")
        _require(self, "key_id", _KEY_ID.fullmatch(self.key_id) is not None, "16 hex digits")
        _require(self, "protocol_min", 1 <= self.protocol_min <= self.protocol_max, f"1 to {self.protocol_max}")
        _require(self, "features", len(self.features) <= LIMITS.features, f"at most {LIMITS.features} names")
        _require(self, "features", all(is_name(each) for each in self.features), "names")
        _require_digest(self, "package_digest")
        _require_count(self, "class_count")
        _require_digest(self, "class_list_hash")
        _require_count(self, "last_seq")
        _require(self, "last_seq", self.session is not None or self.last_seq == 0, "0, as no session is resumed")
        if self.session is not None:
            _require_name(self, "session")
        _require_frame_bytes(self)


@dataclass(frozen=True)
class Challenge:
    """Server: prove that you hold your key, over this nonce (32 random bytes)."""

    TYPE: ClassVar[str] = "challenge"

    nonce: bytes

    def __post_init__(self) -> None:
        _require(self, "nonce", len(self.nonce) == LIMITS.nonce_bytes, f"{LIMITS.nonce_bytes} bytes")


@dataclass(frozen=True)
class Proof:
    """Device: my Ed25519 signature over `contract.signature.proof_payload`."""

    TYPE: ClassVar[str] = "proof"

    signature: bytes

    def __post_init__(self) -> None:
        valid = len(self.signature) == LIMITS.signature_bytes
        _require(self, "signature", valid, f"{LIMITS.signature_bytes} bytes")


@dataclass(frozen=True)
class Enrol:
    """Device: let this be my key (32 raw bytes of Ed25519) from now on; the key `by` vouches for it, which is that of a
    one-time claim, or the one that I have had until now."""

    TYPE: ClassVar[str] = "enrol"

    device: str
    by: str
    public_key: bytes

    def __post_init__(self) -> None:
        _require_name(self, "device")
        _require(self, "by", _KEY_ID.fullmatch(self.by) is not None, "16 hex digits")
        valid = len(self.public_key) == LIMITS.public_key_bytes
        _require(self, "public_key", valid, f"{LIMITS.public_key_bytes} bytes")


@dataclass(frozen=True)
class Vouch:
    """Device: signatures over `contract.signature.enrol_payload`, by the key that vouches and by the new key itself."""

    TYPE: ClassVar[str] = "vouch"

    signature: bytes
    own_signature: bytes

    def __post_init__(self) -> None:
        for name in ("signature", "own_signature"):
            valid = len(getattr(self, name)) == LIMITS.signature_bytes
            _require(self, name, valid, f"{LIMITS.signature_bytes} bytes")


@dataclass(frozen=True)
class Enrolled:
    """Server: this key is yours from now on, at this site; connect anew with it."""

    TYPE: ClassVar[str] = "enrolled"

    site: str
    key_id: str

    def __post_init__(self) -> None:
        _require_name(self, "site")
        _require(self, "key_id", _KEY_ID.fullmatch(self.key_id) is not None, "16 hex digits")


@dataclass(frozen=True)
class Welcome:
    """Server: you are in; this is the session, the terms of the run, and what is stored of yours."""

    TYPE: ClassVar[str] = "welcome"

    session: str
    run: str
    site: str
    strategy: str
    label_mode: LabelMode
    class_count: int
    class_list_hash: str | None
    package_digest: str
    kappa: float
    seed: int
    credit: int
    heartbeat_s: float
    last_seq: int
    frame_bytes: int = LIMITS.frame_bytes  # the largest frame that the server takes

    def __post_init__(self) -> None:
        for name in ("session", "run", "site", "strategy"):
            _require_name(self, name)
        _require_digest(self, "class_list_hash")
        _require_digest(self, "package_digest")
        for name in ("class_count", "seed", "last_seq"):
            _require_count(self, name)
        _require(self, "kappa", 0 <= self.kappa < float("inf"), "0 or more")
        _require(self, "credit", 1 <= self.credit <= LIMITS.credit, f"1 to {LIMITS.credit}")
        in_range = 0 < self.heartbeat_s <= LIMITS.heartbeat_s
        _require(self, "heartbeat_s", in_range, f"more than 0, at most {LIMITS.heartbeat_s}")
        _require_frame_bytes(self)


@dataclass(frozen=True)
class Refuse:
    """Server: no, why, and what to do; `retry_after_s` None means that asking again is of no use."""

    TYPE: ClassVar[str] = "refuse"

    code: str
    cause: str
    cure: str
    retry_after_s: float | None

    def __post_init__(self) -> None:
        _require_name(self, "code")
        _require_text(self, "cause")
        _require_text(self, "cure")
        later = self.retry_after_s
        _require(self, "retry_after_s", later is None or 0 <= later < float("inf"), "null, or 0 or more")


@dataclass(frozen=True, eq=False)
class Ask:
    """Server: do this work; the same `ask` id always gets the same answer. What it holds is `ASK_KINDS[kind]`."""

    TYPE: ClassVar[str] = "ask"

    ask: str
    kind: str
    parameters: dict[str, int | float | str]
    idle_progress_s: float
    tensors: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        known = self.kind in ASK_KINDS
        _require(self, "kind", known, "a known kind" + ("" if known else suggest(self.kind, ASK_KINDS)))
        _require(self, "idle_progress_s", 0 < self.idle_progress_s < float("inf"), "more than 0")
        rule = ASK_KINDS[self.kind]
        _require_keys(f"ask.parameters of {self.kind}", self.parameters, rule.parameters, rule.parameters)
        for name, kind in rule.parameters.items():
            value = self.parameters[name]
            if type(value) is not kind:
                raise _broken(f"ask.parameters.{name}", kind.__name__, f"{type(value).__name__} {value!r}")
            if isinstance(value, int) and not 0 <= value <= INT_MAX:
                raise _broken(f"ask.parameters.{name}", "0 or more, 63 bits", shown(value))
        if rule.tensors is None:
            _require_parameters(f"ask {self.kind}", self.tensors, rule.types)
        else:
            _require_tensors(f"ask {self.kind}", self.tensors, rule.tensors)


@dataclass(frozen=True, eq=False)
class Features:
    """Device: tokens of B samples at the cut, noised and quantized to codes; one batch of an answer of `total` samples.

    `sources[i, p]` is the sample, counted in upload order, whose patch p is nearest to patch p of sample i.
    """

    TYPE: ClassVar[str] = "features"

    ask: str
    batch: int
    total: int
    split: Literal["train", "infer"]
    sample_ids: UInt8
    codes: Int8
    sources: UInt16 | None
    labels: UInt16 | None

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "batch")
        _require_count(self, "total")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])
        _require(self, "total", self.total >= len(self.codes), f"at least the {len(self.codes)} samples of this batch")


@dataclass(frozen=True, eq=False)
class Scores:
    """Server: the answer to inference features: (B, C) logits, or (B, d) features where the head is the device's."""

    TYPE: ClassVar[str] = "scores"

    ask: str
    batch: int
    values: Float32

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "batch")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])


@dataclass(frozen=True, eq=False)
class Gradient:
    """Device: d loss / d logits (B, C), or / d features (B, d), with the mean loss and hits of `count` samples."""

    TYPE: ClassVar[str] = "gradient"

    ask: str
    mean_loss: float
    correct: int
    count: int
    gradient: Float32

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require(self, "mean_loss", abs(self.mean_loss) < float("inf"), "a finite loss")
        _require(self, "count", self.count >= 1, "1 or more")
        _require(self, "correct", 0 <= self.correct <= self.count, f"0 to {self.count}")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])


@dataclass(frozen=True)
class Checkpoints:
    """Device: I cannot take this step; here is where I hold my part of the model. 0 is the beginning, always there."""

    TYPE: ClassVar[str] = "checkpoints"

    ask: str
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require(self, "steps", 1 <= len(self.steps) <= LIMITS.checkpoints, f"1 to {LIMITS.checkpoints} steps")
        _require(self, "steps", self.steps[0] == 0, "0 first")
        rising = all(low < high <= INT_MAX for low, high in zip(self.steps, self.steps[1:], strict=False))
        _require(self, "steps", rising, "rising steps of 63 bits")


@dataclass(frozen=True)
class Settled:
    """Device: my part stands where the ask puts it, durably; I train on `samples` images."""

    TYPE: ClassVar[str] = "settled"

    ask: str
    samples: int

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "samples")


@dataclass(frozen=True)
class Choice:
    """Device: the split that I choose for now; 0: of those that were offered I accept none."""

    TYPE: ClassVar[str] = "choice"

    ask: str
    split: int

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "split")


@dataclass(frozen=True, eq=False)
class Activations:
    """Device: the client part's output on B images, n values each, as the cut has them; `batch` of a prediction's
    `total` images, or the batch that a forward ask names of the device's `total` training images.

    Labels travel in training only: as they are in raw-label mode, under the site's permutation in permuted-label mode.
    """

    TYPE: ClassVar[str] = "activations"

    ask: str
    batch: int
    total: int
    split: Literal["train", "infer"]
    values: Array
    labels: UInt16 | None

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "batch")
        _require_count(self, "total")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])
        _require(self, "total", self.total >= len(self.values), f"at least the {len(self.values)} images of this batch")


@dataclass(frozen=True, eq=False)
class Update:
    """Device: parameters by the model's own names, and what training them on `count` images of `samples` cost."""

    TYPE: ClassVar[str] = "update"

    ask: str
    samples: int
    count: int
    mean_loss: float
    correct: int
    tensors: dict[str, Array]

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "samples")
        _require_count(self, "count")
        _require(self, "mean_loss", abs(self.mean_loss) < float("inf"), "a finite loss")
        _require(self, "correct", 0 <= self.correct <= self.count, f"0 to {self.count}")
        _require_parameters(self.TYPE, self.tensors, finite=False)  # the server's gates leave it out, and say why


@dataclass(frozen=True, eq=False)
class PatchFeatures:
    """Device: features of a balanced set of its `samples` images, T tokens each at the cut (EFTViT), and what training
    on `count` images cost. All arrays are absent where there is no image; `scales` come with int8 codes."""

    TYPE: ClassVar[str] = "patch_features"

    ask: str
    samples: int
    count: int
    mean_loss: float
    correct: int
    values: Array | None
    scales: Float32 | None
    labels: UInt16 | None

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require_count(self, "samples")
        _require_count(self, "count")
        _require(self, "mean_loss", abs(self.mean_loss) < float("inf"), "a finite loss")
        _require(self, "correct", 0 <= self.correct <= self.count, f"0 to {self.count}")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])
        whole = (self.values is None) == (self.labels is None) and (self.values is not None or self.scales is None)
        _require(self, "values", whole, "values with labels, or no array at all")


@dataclass(frozen=True, eq=False)
class Prototypes:
    """Device: of each class that I have, the mean (d,) of my images' embeddings, and how many they are; K classes.

    What it says is about classes as a whole: no field has an entry for an image.
    """

    TYPE: ClassVar[str] = "prototypes"

    ask: str
    classes: tuple[int, ...]
    counts: tuple[int, ...]  # rounded where the package says so
    values: Float32 | None  # None where there is no class

    def __post_init__(self) -> None:
        _require_name(self, "ask")
        _require(self, "classes", len(self.classes) <= LIMITS.classes, f"at most {LIMITS.classes}")
        rising = all(low < high for low, high in zip(self.classes, self.classes[1:], strict=False))
        in_range = all(0 <= each <= 0xFFFF for each in self.classes)
        _require(self, "classes", rising and in_range, "rising numbers of 16 bits")
        _require(self, "counts", len(self.counts) == len(self.classes), f"one for each of {len(self.classes)} classes")
        _require(self, "counts", all(1 <= each <= INT_MAX for each in self.counts), "1 or more, 63 bits")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])
        rows = 0 if self.values is None else len(self.values)
        _require(self, "classes", len(self.classes) == rows, f"as many as the {rows} rows of values")


@dataclass(frozen=True)
class Offer:
    """Server: this package (SHA-256 of its manifest) is there for you, so many bytes of files; None: there is none, and
    `later` says that there will be one once others have tried it."""

    TYPE: ClassVar[str] = "offer"

    package: str | None
    version: int
    size_bytes: int
    later: bool

    def __post_init__(self) -> None:
        _require_digest(self, "package")
        _require_count(self, "version")
        _require_count(self, "size_bytes")


@dataclass(frozen=True)
class Fetch:
    """Device: give me the bytes of this file of the package that was offered, from here on."""

    TYPE: ClassVar[str] = "fetch"

    package: str
    file: str
    offset: int

    def __post_init__(self) -> None:
        _require_digest(self, "package")
        _require_file(self)
        _require_count(self, "offset")


@dataclass(frozen=True, eq=False)
class Piece:
    """Server: bytes of a package's file, which has `size_bytes` in all."""

    TYPE: ClassVar[str] = "piece"

    package: str
    file: str
    offset: int
    size_bytes: int
    data: UInt8

    def __post_init__(self) -> None:
        _require_digest(self, "package")
        _require_file(self)
        _require_count(self, "offset")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])
        most = self.size_bytes - len(self.data)
        _require(self, "offset", self.offset <= most, f"at most {most}, as the bytes end inside the file")


@dataclass(frozen=True)
class Verdict:
    """Device: what became of a package here, and by which check; what was measured stays on the device."""

    TYPE: ClassVar[str] = "verdict"

    package: str
    verdict: Literal["ok", "rolled-back", "refused", "not-tried"]
    reason: Reason

    def __post_init__(self) -> None:
        _require_digest(self, "package")
        _require(self, "reason", (self.verdict == "ok") == (self.reason == ""), "a reason, or none where it is ok")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Both: piece `index` of `total` of an encoded message of `size` bytes, named by its SHA-256 in hex."""

    TYPE: ClassVar[str] = "chunk"

    object: str
    index: int
    total: int
    size: int
    data: UInt8

    def __post_init__(self) -> None:
        _require_digest(self, "object")
        _require(self, "total", 1 <= self.total <= self.size, f"1 to size ({self.size})")
        _require(self, "index", 0 <= self.index < self.total, f"0 to {self.total - 1}")
        _require_tensors(self.TYPE, tensors_of(self), TENSORS[self.TYPE])


@dataclass(frozen=True)
class Heartbeat:
    """Both: alive at step `step`; busy, or waiting for something since so many seconds."""

    TYPE: ClassVar[str] = "heartbeat"

    step: int
    busy: bool
    waiting_for: str
    since_s: float

    def __post_init__(self) -> None:
        _require_count(self, "step")
        _require_text(self, "waiting_for")
        _require(self, "since_s", 0 <= self.since_s < float("inf"), "0 or more")


@dataclass(frozen=True)
class Bye:
    """Both: I close now, for this reason; `may_return` says whether coming back makes sense."""

    TYPE: ClassVar[str] = "bye"

    reason: str
    may_return: bool

    def __post_init__(self) -> None:
        _require_text(self, "reason")


Message = (
    Hello | Challenge | Proof | Welcome | Refuse | Enrol | Vouch | Enrolled
    | Ask | Features | Scores | Gradient | Checkpoints | Settled | Choice | Activations | Update
    | PatchFeatures | Prototypes | Offer | Fetch | Piece | Verdict | Chunk
    | Heartbeat | Bye
)  # fmt: skip

MESSAGES: Mapping[str, type[Message]] = {
    message.TYPE: message
    for message in (
        *(Hello, Challenge, Proof, Welcome, Refuse, Enrol, Vouch, Enrolled),  # the handshake
        # the work: numbered, acknowledged
        *(Ask, Features, Scores, Gradient, Checkpoints, Settled, Choice, Activations, Update),
        *(PatchFeatures, Prototypes, Offer, Fetch, Piece, Verdict, Chunk),
        *(Heartbeat, Bye),
    )
}


# --- checks ------------------------------------------------------------------------------------------------------


def _require(message: Message, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise _broken(f"{message.TYPE}.{name}", expected, repr(getattr(message, name)))


def _require_name(message: Message, name: str) -> None:
    # Names become parts of paths (roster, run directory): no separators, no leading dot.
    _require(message, name, is_name(getattr(message, name)), "a name: letters, digits, '.', '_', '-', at most 64")


def _require_text(message: Message, name: str) -> None:
    # The peer's texts are shown on terminals: no control characters but the end of a line.
    text = getattr(message, name)
    valid = len(text) <= LIMITS.text_characters and text.replace("\n", "").isprintable()
    _require(message, name, valid, f"at most {LIMITS.text_characters} printable characters")


def _require_digest(message: Message, name: str) -> None:
    value = getattr(message, name)
    _require(message, name, value is None or _DIGEST.fullmatch(value) is not None, "64 lower-case hex digits")


def _require_file(message: Fetch | Piece) -> None:
    _require(message, "file", _FILE.fullmatch(message.file) is not None, "a plain file name without separators")


def _require_count(message: Message, name: str) -> None:
    _require(message, name, 0 <= getattr(message, name) <= INT_MAX, "0 or more, 63 bits")


def _require_frame_bytes(message: Hello | Welcome) -> None:
    lowest = LIMITS.frame_bytes_min
    valid = lowest <= message.frame_bytes <= LIMITS.frame_bytes
    _require(message, "frame_bytes", valid, f"{lowest} to {LIMITS.frame_bytes}")


def _require_keys(where: str, found: Collection[str], needed: Collection[str], allowed: Collection[str]) -> None:
    for name in needed:
        if name not in found:
            raise _broken(where, repr(name), "none")
    for name in found:
        if name not in allowed:
            raise _broken(where, f"only {', '.join(allowed) or 'nothing'}", repr(name))


def _require_tensors(where: str, tensors: Mapping[str, Array], rules: Mapping[str, TensorRule]) -> None:
    needed = [name for name, rule in rules.items() if not rule.optional]
    _require_keys(f"{where}: tensors", tensors, needed, rules)
    sizes: dict[str, int] = {}
    for name, array in tensors.items():
        rule = rules[name]
        fits = array.dtype in rule.dtypes and len(array.shape) == len(rule.shape)
        for size, expected in zip(array.shape, rule.shape, strict=False):
            if isinstance(expected, str):
                fits = fits and size == sizes.setdefault(expected, size) >= 1
            else:
                fits = fits and size == expected
        if not fits:
            shape = "x".join(str(sizes.get(str(each), each)) for each in rule.shape)
            found = f"{array.dtype} {'x'.join(map(str, array.shape))}"
            kinds = " or ".join(str(np.dtype(each)) for each in rule.dtypes)
            raise _broken(f"{where}: tensor {name}", f"{kinds} {shape}", found)
        _require_finite(where, name, array)


def _require_parameters(
    where: str,
    tensors: Mapping[str, Array],
    types: tuple[type[np.generic], ...] = (np.float32,),
    finite: bool = True,
) -> None:
    for name, array in tensors.items():
        named = 0 < len(name) <= LIMITS.tensor_characters and _TENSOR.fullmatch(name) is not None
        if not named:
            raise _broken(f"{where}: tensors", "names of a model's tensors", repr(name))
        if array.dtype not in types or array.size == 0:
            shape = "x".join(map(str, array.shape))
            kinds = " or ".join(str(np.dtype(each)) for each in types)
            raise _broken(f"{where}: tensor {name}", f"{kinds} of one value or more", f"{array.dtype} {shape}")
        if finite:
            _require_finite(where, name, array)


def _require_finite(where: str, name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _broken(f"{where}: tensor {name}", "finite values", "NaN or infinity")


def _broken(where: str, expected: str, found: str) -> LocalProtocolError:
    return LocalProtocolError(f"{where}: expected {expected}, found {found[:100]}", _CURE)
