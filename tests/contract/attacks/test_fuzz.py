"""One law for every door: whatever bytes come in, they become a value or a named error of ours, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest
from contract.codec import LIMITS, Assembler, decode, encode, split
from contract.errors import ManifestError, ProtocolError, RemoteProtocolError, SignatureError
from contract.messages import Chunk
from contract.session import Role, State
from contract.signature import PrivateKey, key_id, sign, verify
from tests.contract.attacks.mutations import mutated
from tests.contract.session_pair import WELCOME, pair
from tests.golden.samples import FOLDER, MANIFEST_FILE, MESSAGES

KEY = PrivateKey.from_private_bytes(bytes(range(32)))
TRUSTED = {key_id(KEY.public_key()): KEY.public_key()}
FRAMES = [path.read_bytes() for path in sorted(FOLDER.iterdir())]
# Frames that a session takes in every state, so that fuzzing goes past the first check.
TALK = FRAMES + [encode(message, seq=0, ack=0) for message in MESSAGES.values()]
TALK += [encode(message, seq=1, ack=0) for message in MESSAGES.values()]
TALK += [encode(chunk, seq=1, ack=0) for chunk in split([encode(MESSAGES["features"], seq=0, ack=0)], 1024 + 200)]


def decode_door(data: bytes) -> None:
    try:
        envelope = decode(data)
    except RemoteProtocolError as error:
        assert 0 < len(error.cause) < 1000 and error.cure
    else:
        again = decode(encode(envelope.message, seq=envelope.seq, ack=envelope.ack))
        assert type(again.message) is type(envelope.message)


def manifest_door(data: bytes) -> None:
    try:
        found = manifest.from_bytes(data)
    except ManifestError as error:
        assert 0 < len(error.cause) < 1000 and error.cure
    else:
        assert manifest.to_bytes(found) == data


def signature_door(data: bytes) -> None:
    try:
        verify(b"document", data, TRUSTED)
    except SignatureError as error:
        assert 0 < len(error.cause) < 1000 and error.cure
    else:
        assert data == sign(KEY, b"document")


SESSIONS = [(role, state) for role in Role for state in State if state not in (State.BROKEN, State.CLOSED)]


def session_door(frames: Sequence[bytes], role: Role, state: State) -> None:
    session = pair(State.OPEN if state is State.LEAVING else state).side(role)
    if state is State.LEAVING:
        session.send(MESSAGES["bye"])
    for frame in frames:
        try:
            events = session.receive(frame, 0.0)
        except RemoteProtocolError as error:
            assert 0 < len(error.cause) < 1000 and error.cure
            assert session.state is State.BROKEN and session.frames_to_send() == []
            return
        for event in events:
            if state is State.OPEN:
                session.stored(event.seq if type(event).__name__ == "Received" else 0)
        session.frames_to_send()
        session.tick(0.0)


def chunk_door(chunks: Sequence[Chunk]) -> None:
    assembler = Assembler()
    for chunk in chunks:
        try:
            assembler.add(chunk)
        except ProtocolError:
            return


# --- hypothesis: bytes from nothing ------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_any_bytes_at_every_door(data: bytes) -> None:
    decode_door(data)
    manifest_door(data)
    signature_door(data)
    session_door([data], Role.SERVER, State.START)


@given(st.lists(st.sampled_from(TALK), max_size=6), st.sampled_from(SESSIONS))
def test_any_order_of_honest_frames(frames: list[bytes], where: tuple[Role, State]) -> None:
    session_door(frames, *where)


@given(st.permutations(list(split([encode(MESSAGES["features"], seq=0, ack=0)], 1024 + 60))))
def test_any_order_of_chunks(chunks: list[Chunk]) -> None:
    chunk_door(chunks)


# --- seeded mutations of honest bytes ----------------------------------------------------------------------------


def _codec(rng: random.Random) -> None:
    decode_door(mutated(rng.choice(FRAMES), FRAMES, rng))


def _manifest(rng: random.Random) -> None:
    data = MANIFEST_FILE.read_bytes()
    manifest_door(mutated(data, [data], rng))


def _signature(rng: random.Random) -> None:
    data = sign(KEY, b"document")
    signature_door(mutated(data, [data, data.upper()], rng))


def _session(rng: random.Random) -> None:
    frames = [rng.choice(TALK) for _ in range(rng.randint(1, 4))]
    frames[-1] = mutated(frames[-1], TALK, rng)
    session_door(frames, *rng.choice(SESSIONS))


DOORS: dict[str, tuple[Callable[[random.Random], None], int]] = {
    # door, and its share of the long run
    "codec.decode": (_codec, 50_000),
    "session.receive": (_session, 30_000),
    "manifest.from_bytes": (_manifest, 15_000),
    "signature.verify": (_signature, 5_000),
}


@pytest.mark.parametrize("name", DOORS)
def test_mutated_bytes(name: str) -> None:
    door, _ = DOORS[name]
    for seed in range(500):
        door(random.Random(f"{name} {seed}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_a_hundred_thousand_mutated_bytes(name: str) -> None:
    door, count = DOORS[name]
    for seed in range(count):
        door(random.Random(f"{name} long {seed}"))


def test_the_mutator_reaches_past_the_first_checks() -> None:
    # A fuzzer whose every input dies at the length field proves nothing.
    rng = random.Random(1)
    causes = set()
    taken = 0
    for _ in range(2000):
        try:
            decode(mutated(rng.choice(FRAMES), FRAMES, rng))
            taken += 1
        except RemoteProtocolError as error:
            causes.add(error.cause.split(":")[0].split("'")[0])
    assert taken > 50 and len(causes) > 40
    assert LIMITS.frame_bytes > max(map(len, FRAMES)) and WELCOME.credit > 1
