"""Attacks on the session by a peer whose frames are well-formed: each breaks the session with a named error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from contract.codec import encode, split
from contract.errors import RemoteProtocolError
from contract.messages import Chunk, Message
from contract.session import Acknowledged, Role, State
from tests.contract.session_line import ASK, RESUME, features
from tests.contract.session_pair import WELCOME, Pair, pair
from tests.golden.samples import MESSAGES


def broken(joined: Pair, role: Role, message: Message, seq: int, ack: int, text: str) -> None:
    session = joined.side(role)
    with pytest.raises(RemoteProtocolError) as raised:
        session.receive(encode(message, seq=seq, ack=ack), 0.0)
    assert text in raised.value.cause
    assert session.state is State.BROKEN


def test_replayed_sequence() -> None:
    joined = pair()
    joined.device.send(features())
    (frame,) = joined.device.frames_to_send()
    assert len(joined.server.receive(frame, 0.0)) == 1
    joined.server.stored(1)
    joined.server.frames_to_send()
    for _ in range(3):
        assert joined.server.receive(frame, 0.0) == []
        assert joined.server.pending_ack()  # the acknowledgement may have been lost
        assert joined.server.frames_to_send()


def test_replay_of_what_an_earlier_connection_stored() -> None:
    joined = pair(hello=RESUME, welcome=dataclasses.replace(WELCOME, last_seq=4), device_next_seq=5)
    assert joined.server.receive(encode(features(), seq=4, ack=0), 0.0) == []
    assert joined.server.pending_ack()


@pytest.mark.parametrize("seq", [0, 2, 2**63 - 1])
def test_number_left_out(seq: int) -> None:
    broken(pair(), Role.SERVER, features(), seq, 0, f"expected features with number 1, found {seq}")


@pytest.mark.parametrize("name", ["heartbeat", "bye"])
def test_number_on_what_has_none(name: str) -> None:
    broken(pair(), Role.SERVER, MESSAGES[name], 1, 0, f"expected {name} with number 0, found 1")


def test_number_or_acknowledgement_in_the_handshake() -> None:
    broken(pair(State.START), Role.SERVER, MESSAGES["hello"], 1, 0, "expected hello with number 0, found 1")
    broken(pair(State.START), Role.SERVER, MESSAGES["hello"], 0, 1, "expected hello with acknowledgement 0, found 1")


def test_acknowledgement_of_what_was_never_sent() -> None:
    joined = pair()
    joined.device.send(features())  # queued, not yet written out
    broken(joined, Role.DEVICE, MESSAGES["heartbeat"], 0, 1, "expected an acknowledgement of 0 to 0, found 1")


def test_acknowledgement_taken_back() -> None:
    joined = pair()
    joined.device.send(features())
    joined.device.send(features(1))
    joined.device.frames_to_send()
    assert Acknowledged(2) in joined.device.receive(encode(MESSAGES["heartbeat"], seq=0, ack=2), 0.0)
    broken(joined, Role.DEVICE, MESSAGES["heartbeat"], 0, 1, "expected an acknowledgement of 2 to 2, found 1")


def test_flood_beyond_credit() -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, credit=3))
    for seq in (1, 2, 3):
        joined.server.receive(encode(features(), seq=seq, ack=0), 0.0)
        joined.server.stored(seq)  # stored, but the peer has not been told
    text = "expected at most 3 messages beyond acknowledgement 0, found number 4"
    broken(joined, Role.SERVER, features(), 4, 0, text)


def test_server_that_claims_to_have_stored_what_was_never_made() -> None:
    joined = pair(State.PROVEN, hello=RESUME, device_next_seq=5)
    welcome = dataclasses.replace(WELCOME, last_seq=5)
    broken(joined, Role.DEVICE, welcome, 0, 0, "expected last_seq of at most 4, the last given out, found 5")


def test_welcome_without_a_proof() -> None:
    broken(pair(State.GREETED), Role.DEVICE, WELCOME, 0, 0, "expected to receive challenge or refuse, found welcome")


def test_work_before_the_proof_was_accepted() -> None:
    for state in (State.START, State.GREETED, State.CHALLENGED, State.PROVEN):
        broken(pair(state), Role.SERVER, features(), 1, 0, "found features")


def test_second_hello() -> None:
    broken(pair(), Role.SERVER, MESSAGES["hello_first"], 0, 0, "found hello")


def test_message_of_the_wrong_side() -> None:
    broken(pair(), Role.SERVER, ASK, 1, 0, "found ask")
    broken(pair(), Role.DEVICE, features(), 1, 0, "found features")


def test_words_after_bye() -> None:
    joined = pair()
    joined.say(Role.DEVICE, MESSAGES["bye"])
    broken(joined, Role.SERVER, features(), 1, 0, "expected to receive nothing, found features")


def test_frame_larger_than_this_side_takes() -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, frame_bytes=65536))
    broken(joined, Role.SERVER, features(0, dim=20000), 1, 0, "frame: expected at most 65536 bytes")


# --- chunks ------------------------------------------------------------------------------------------------------


def chunks(message: Message, seq: int = 0, ack: int = 0) -> list[Chunk]:
    return list(split([encode(message, seq=seq, ack=ack)], 1024 + 100))


def send_chunks(joined: Pair, role: Role, message: Message, seq: int, ack: int, text: str) -> None:
    *first, last = chunks(message, seq, ack)
    for part in first:
        assert joined.side(role).receive(encode(part, seq=1, ack=0), 0.0) == []
    broken(joined, role, last, 1, 0, text)


def test_chunk_in_a_chunk() -> None:
    inner = Chunk("0" * 64, 0, 1, 500, np.zeros(500, np.uint8))
    send_chunks(pair(), Role.SERVER, inner, 0, 0, "expected chunks of a message of the work")


@pytest.mark.parametrize("name", ["heartbeat", "bye"])
def test_unnumbered_message_in_chunks(name: str) -> None:
    send_chunks(pair(), Role.SERVER, MESSAGES[name], 0, 0, "expected chunks of a message of the work")


@pytest.mark.parametrize(("role", "name"), [(Role.SERVER, "welcome"), (Role.SERVER, "ask"), (Role.DEVICE, "features")])
def test_illegal_message_in_chunks(role: Role, name: str) -> None:
    send_chunks(pair(), role, MESSAGES[name], 0, 0, f"found {MESSAGES[name].TYPE}")


@pytest.mark.parametrize("numbers", [(5, 0), (0, 5)])
def test_numbers_inside_chunks(numbers: tuple[int, int]) -> None:
    send_chunks(pair(), Role.SERVER, features(), *numbers, "expected chunks of a message of the work, without numbers")


def test_message_between_the_chunks_of_another() -> None:
    joined = pair()
    joined.server.receive(encode(chunks(features())[0], seq=1, ack=0), 0.0)
    broken(joined, Role.SERVER, features(), 1, 0, "expected the other chunks of message 1, found features")


def test_chunks_of_one_message_under_two_numbers() -> None:
    joined = pair()
    first, second, *_ = chunks(features())
    joined.server.receive(encode(first, seq=1, ack=0), 0.0)
    broken(joined, Role.SERVER, second, 2, 0, "expected chunk with number 1, found 2")


def test_chunks_of_a_message_already_received_are_dropped() -> None:
    joined = pair()
    for part in chunks(features()):
        joined.server.receive(encode(part, seq=1, ack=0), 0.0)
    for part in chunks(features()):
        assert joined.server.receive(encode(part, seq=1, ack=0), 0.0) == []
