from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.codec import decode, encode, prepare
from contract.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from contract.messages import MESSAGES, Ask, Bye, Features, Gradient, Heartbeat, Refuse
from contract.session import TRANSITIONS, Acknowledged, Direction, Received, Role, Session, SessionLimits, State
from tests.contract.session_line import ASK, RESUME, features, run
from tests.contract.session_pair import HANDSHAKE, HELLO, LIMITS, WELCOME, fresh, pair
from tests.golden.samples import MESSAGES as SAMPLES

DEVICE, SERVER = Role.DEVICE, Role.SERVER


def received(events: list[Any]) -> list[int]:
    """Numbers of the messages among events."""
    return [event.seq for event in events if isinstance(event, Received)]


# --- the table ---------------------------------------------------------------------------------------------------


def test_handshake_opens_both_sides() -> None:
    joined = fresh()
    states = []
    for sender, message in HANDSHAKE:
        assert joined.say(sender, message) == [Received(0, message)]
        states.append((joined.device.state, joined.server.state))
    assert states == [(state, state) for state in (State.GREETED, State.CHALLENGED, State.PROVEN, State.OPEN)]


def test_table_speaks_of_existing_messages_only() -> None:
    assert {kind for _, _, _, kind in TRANSITIONS} == set(MESSAGES)


def test_what_one_side_may_send_the_other_may_receive() -> None:
    for role, state, direction, kind in TRANSITIONS:
        if direction is Direction.SEND and state is not State.BROKEN:
            other = SERVER if role is DEVICE else DEVICE
            assert (other, state, Direction.RECEIVE, kind) in TRANSITIONS


def test_nothing_leads_out_of_closed() -> None:
    assert not [key for key in TRANSITIONS if key[1] is State.CLOSED]


def test_every_state_is_reached() -> None:
    assert set(State) - set(TRANSITIONS.values()) == {State.START, State.BROKEN}  # where one begins; where errors lead


STATES = [State.START, State.GREETED, State.CHALLENGED, State.PROVEN, State.OPEN]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", SAMPLES)
def test_only_what_the_table_allows_is_sent(role: Role, state: State, name: str) -> None:
    message = SAMPLES[name]
    session = pair(state).side(role)
    legal = (role, state, Direction.SEND, message.TYPE) in TRANSITIONS and message.TYPE != "chunk"
    try:
        session.send(message)
    except LocalProtocolError:
        assert session.state is state and session.frames_to_send() == []
        # Greetings are refused for what they say, too: see the tests of resuming and of limits.
        assert not legal or message.TYPE in ("hello", "welcome")
    else:
        assert legal
        assert session.state is TRANSITIONS[role, state, Direction.SEND, message.TYPE]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", SAMPLES)
def test_only_what_the_table_allows_is_received(role: Role, state: State, name: str) -> None:
    message = SAMPLES[name]
    session = pair(state).side(role)
    greetings = ("hello", "challenge", "proof", "welcome", "enrol", "vouch", "enrolled")
    plain = (*greetings, "refuse", "heartbeat", "bye")
    numbered = message.TYPE not in plain
    frame = encode(message, seq=int(numbered), ack=0)
    legal = (role, state, Direction.RECEIVE, message.TYPE) in TRANSITIONS
    try:
        session.receive(frame, 0.0)
    except RemoteProtocolError:
        assert session.state is State.BROKEN
        assert not legal or message.TYPE in ("hello", "welcome")
    else:
        assert legal
        assert session.state is TRANSITIONS[role, state, Direction.RECEIVE, message.TYPE]


def test_illegal_order_is_told_with_role_state_and_what_was_expected() -> None:
    with pytest.raises(LocalProtocolError) as ours:
        pair(State.GREETED).device.send(features())
    assert ours.value.cause == "device in state greeted: expected to send nothing, found features"
    with pytest.raises(RemoteProtocolError) as theirs:
        pair(State.GREETED).device.receive(encode(ASK, seq=1, ack=0), 0.0)
    assert theirs.value.cause == "device in state greeted: expected to receive challenge or refuse, found ask"


def test_broken_session_takes_nothing_more_but_the_server_may_say_why() -> None:
    for role in Role:
        session = pair().side(role)
        session.send(SAMPLES["heartbeat"])
        with pytest.raises(RemoteProtocolError):
            session.receive(b"garbage", 0.0)
        assert session.frames_to_send() == [] and session.credit == 0
        with pytest.raises(RemoteProtocolError):
            session.receive(encode(SAMPLES["heartbeat"], seq=0, ack=0), 0.0)
        with pytest.raises(LocalProtocolError):
            session.send(SAMPLES["bye"])
        if role is SERVER:
            session.send(SAMPLES["refuse"])
            assert [decode(frame).message for frame in session.frames_to_send()] == [SAMPLES["refuse"]]
            assert session.state is State.CLOSED


@pytest.mark.parametrize("state", STATES)
def test_server_may_refuse_at_any_time(state: State) -> None:
    joined = pair(state)
    refusal = Refuse("busy", "1000 devices are connected", "wait", 30.0)
    assert joined.say(SERVER, refusal) == [Received(0, refusal)]
    assert joined.device.state is joined.server.state is State.CLOSED


# --- bye ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_bye_closes_the_other_side(role: Role) -> None:
    joined = pair()
    assert joined.say(role, Bye("collected", True)) == [Received(0, Bye("collected", True))]
    assert joined.side(role).state is State.LEAVING
    assert joined.side(SERVER if role is DEVICE else DEVICE).state is State.CLOSED
    with pytest.raises(LocalProtocolError, match="expected to send nothing, found heartbeat"):
        joined.side(role).send(SAMPLES["heartbeat"])


def test_nothing_is_written_after_the_peer_s_bye() -> None:
    joined = pair()
    joined.device.send(features())
    joined.say(SERVER, Bye("collected", True))
    assert joined.device.frames_to_send() == []


def test_bye_that_crosses_another_closes_both() -> None:
    joined = pair()
    joined.device.send(Bye("stopping", True))
    joined.server.send(Bye("done", False))
    (from_device,), (from_server,) = joined.device.frames_to_send(), joined.server.frames_to_send()
    assert joined.device.receive(from_server, 0.0) == [Received(0, Bye("done", False))]
    assert joined.server.receive(from_device, 0.0) == [Received(0, Bye("stopping", True))]
    assert joined.device.state is joined.server.state is State.CLOSED


def test_messages_that_cross_our_bye_are_dropped_unacknowledged_and_their_acks_count() -> None:
    joined = pair()
    joined.say(DEVICE, features())
    joined.server.stored(1)
    joined.server.send(ASK)
    joined.device.send(Bye("stopping", True))
    assert joined.deliver(SERVER) == [Acknowledged(1)]
    assert not joined.device.pending_ack() and joined.device.state is State.LEAVING


def test_bye_carries_the_last_acknowledgement() -> None:
    joined = pair()
    joined.say(DEVICE, features())
    joined.server.stored(1)
    bye = Bye("collected", True)
    assert joined.say(SERVER, bye) == [Acknowledged(1), Received(0, bye)]


# --- numbers and acknowledgements --------------------------------------------------------------------------------


def test_numbers_of_both_directions_begin_at_one_and_go_on() -> None:
    joined = pair()
    assert [joined.device.send(features(batch)) for batch in range(3)] == [1, 2, 3]
    assert [joined.server.send(ASK) for _ in range(2)] == [1, 2]
    assert received(joined.deliver(DEVICE)) == [1, 2, 3]
    assert received(joined.deliver(SERVER)) == [1, 2]
    assert joined.device.send(Heartbeat(0, False, "", 0.0)) == 0


def test_nothing_is_acknowledged_before_it_is_stored() -> None:
    joined = pair()
    joined.say(DEVICE, features())
    assert not joined.server.pending_ack()
    joined.say(SERVER, ASK)
    assert joined.device.credit == WELCOME.credit - 1
    joined.server.stored(1)
    assert joined.server.pending_ack()
    assert Acknowledged(1) in joined.deliver(SERVER)
    assert not joined.server.pending_ack()


def test_heartbeat_carries_an_acknowledgement_that_nothing_else_carries() -> None:
    joined = pair()
    joined.server.status = Heartbeat(3, True, "training", 1.5)
    joined.say(DEVICE, features())
    joined.server.stored(1)
    assert joined.deliver(SERVER) == [Acknowledged(1), Received(0, joined.server.status)]
    assert joined.server.frames_to_send() == []


def test_what_can_be_made_again_is_acknowledged_by_the_answer_or_a_later_heartbeat() -> None:
    joined = pair()
    joined.say(SERVER, ASK)
    joined.device.stored(1)
    assert joined.device.pending_ack() and joined.device.frames_to_send() == []
    joined.device.tick(LIMITS.ack_wait_s / 2)
    assert not joined.device.has_frames
    joined.device.tick(LIMITS.ack_wait_s)
    assert joined.device.has_frames
    assert joined.deliver(DEVICE)[0] == Acknowledged(1)
    joined.say(SERVER, ASK)
    joined.device.stored(2)
    assert joined.say(DEVICE, features())[0] == Acknowledged(2)  # no heartbeat was needed
    assert not joined.device.pending_ack()


def test_half_of_the_credit_is_acknowledged_at_once() -> None:
    joined = pair()
    half = WELCOME.credit // 2
    for number in range(1, half + 1):
        joined.say(SERVER, ASK)
        joined.device.stored(number)
        assert joined.device.has_frames == (number == half)
    assert joined.deliver(DEVICE)[0] == Acknowledged(half)


def test_frames_of_a_large_message_are_made_a_few_at_a_time() -> None:
    joined = pair()
    gradient = Gradient("a-1", 0.5, 1, 64, np.zeros((64, 40000), np.float32))  # 10 MB
    joined.device.send(gradient)
    joined.device.send(features())
    frames: list[bytes] = []
    while burst := joined.device.frames_to_send():
        assert sum(map(len, burst)) < LIMITS.burst_bytes + LIMITS.frame_bytes
        frames += burst
    assert [decode(frame).seq for frame in frames] == [1] * (len(frames) - 1) + [2]
    events = [event for frame in frames for event in joined.server.receive(frame, 0.0)]
    assert received(events) == [1, 2]


def test_a_prepared_message_is_sent_as_the_message_itself() -> None:
    plain, prepared = pair(), pair()
    assert plain.device.send(features()) == prepared.device.send(prepare(features())) == 1
    assert plain.device.frames_to_send() == prepared.device.frames_to_send()
    with pytest.raises(LocalProtocolError, match="to send"):
        prepared.device.send(prepare(ASK))
    with pytest.raises(LocalProtocolError, match="a whole message"):
        prepared.device.send(prepare(SAMPLES["chunk"]))


def test_a_received_message_comes_with_its_bytes() -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, frame_bytes=64 << 10))
    for message in (features(), features(1, dim=40000)):  # in one frame, in chunks
        [event] = joined.say(DEVICE, message)
        assert isinstance(event, Received)
        again = decode(event.frame, 1 << 20).message
        assert isinstance(again, Features) and isinstance(message, Features)
        assert np.array_equal(again.codes, message.codes) and again.batch == message.batch


def test_one_acknowledgement_covers_all_before_it() -> None:
    joined = pair()
    for batch in range(4):
        joined.say(DEVICE, features(batch))
    joined.server.stored(3)
    joined.server.stored(2)  # late news: nothing new
    assert joined.deliver(SERVER)[0] == Acknowledged(3)
    assert joined.device.credit == WELCOME.credit - 1


def test_storing_what_was_not_received_is_our_error() -> None:
    joined = pair()
    joined.say(DEVICE, features())
    with pytest.raises(LocalProtocolError, match="expected to store up to 1, found 2"):
        joined.server.stored(2)


def test_credit_is_what_may_be_on_its_way() -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, credit=2))
    assert joined.device.credit == joined.server.credit == 2
    joined.say(DEVICE, features(0))
    joined.say(DEVICE, features(1))
    assert joined.device.credit == 0
    with pytest.raises(LocalProtocolError, match="expected an acknowledgement before the next message, found features"):
        joined.device.send(features(2))
    joined.say(DEVICE, SAMPLES["heartbeat"])  # not counted
    joined.server.stored(1)
    joined.deliver(SERVER)
    assert joined.device.credit == 1
    assert joined.device.send(features(2)) == 3


def test_no_credit_before_the_session_is_open() -> None:
    assert fresh().device.credit == 0 and pair(State.PROVEN).server.credit == 0


# --- resuming ----------------------------------------------------------------------------------------------------


def test_device_goes_on_after_what_the_server_has_stored() -> None:
    joined = pair(
        hello=dataclasses.replace(RESUME, last_seq=9),
        welcome=dataclasses.replace(WELCOME, last_seq=4),
        device_next_seq=7,
    )
    assert [joined.device.send(features(seq), seq) for seq in (5, 6)] == [5, 6]  # again, from the spool
    assert joined.device.send(features(7)) == 7
    assert received(joined.deliver(DEVICE)) == [5, 6, 7]
    assert joined.server.send(ASK) == 10  # after the device's last_seq
    assert received(joined.deliver(SERVER)) == [10]


def test_welcome_tells_what_need_not_be_sent_again() -> None:
    joined = pair(State.PROVEN, hello=RESUME, device_next_seq=7)
    welcome = dataclasses.replace(WELCOME, last_seq=6)
    assert joined.say(SERVER, welcome) == [Received(0, welcome), Acknowledged(6)]


def test_replay_with_a_gap_is_our_error() -> None:
    joined = pair(hello=RESUME, welcome=dataclasses.replace(WELCOME, last_seq=4), device_next_seq=7)
    for seq in (4, 6):
        with pytest.raises(LocalProtocolError, match=f"expected features with number 5, found {seq}"):
            joined.device.send(features(), seq)


def test_heartbeat_with_a_number_is_our_error() -> None:
    with pytest.raises(LocalProtocolError, match="expected heartbeat with number 0, found 1"):
        pair().device.send(SAMPLES["heartbeat"], 1)


def test_hello_must_repeat_what_the_device_received() -> None:
    session = Session(DEVICE, LIMITS, received_seq=3)
    with pytest.raises(LocalProtocolError, match="expected last_seq 3, found 2"):
        session.send(dataclasses.replace(RESUME, last_seq=2))
    session.send(dataclasses.replace(RESUME, last_seq=3))


def test_new_session_begins_with_nothing_stored() -> None:
    for sender in (DEVICE, SERVER):  # the server's own fault, or what a device thinks of it
        joined = pair(State.PROVEN, hello=dataclasses.replace(HELLO, session="older"), device_next_seq=7)
        wrong = dataclasses.replace(WELCOME, last_seq=5)
        if sender is SERVER:
            with pytest.raises(LocalProtocolError, match="expected last_seq 0, as the session is new, found 5"):
                joined.server.send(wrong)
        else:
            with pytest.raises(RemoteProtocolError, match="expected last_seq 0, as the session is new, found 5"):
                joined.device.receive(encode(wrong, seq=0, ack=0), 0.0)


# --- limits and large messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("server_frame_bytes", [64 << 10, 256 << 10, 1 << 20])
def test_wi_02_large_messages_pass_whatever_the_smaller_frame_limit(server_frame_bytes: int) -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, frame_bytes=server_frame_bytes))
    gradient = Gradient("a-1", 0.5, 1, 64, np.arange(64 * 197 * 192, dtype=np.float32).reshape(64, -1))  # 9.7 MB
    tensors = {"features": gradient.gradient, "sample_ids": np.zeros((64, 16), np.uint8)}
    ask = Ask("a-2", "head_step", {"step": 1, "after": 0, "base": 0}, 60.0, tensors)
    (to_server,), (to_device,) = joined.say(DEVICE, gradient), joined.say(SERVER, ask)
    assert isinstance(to_server, Received) and isinstance(to_device, Received)
    assert isinstance(to_server.message, Gradient) and isinstance(to_device.message, Ask)
    assert np.array_equal(to_server.message.gradient, gradient.gradient)
    assert np.array_equal(to_device.message.tensors["features"], gradient.gradient)
    assert not to_server.message.gradient.flags.writeable
    chunks = joined.frames[len(HANDSHAKE) :]
    up = len(chunks) - 10  # the device takes frames of 1 MiB: ten of them come down
    assert max(map(len, chunks[:up])) <= server_frame_bytes and max(map(len, chunks[up:])) <= 1 << 20


def test_large_message_has_one_number_and_costs_one_credit() -> None:
    joined = pair(welcome=dataclasses.replace(WELCOME, frame_bytes=64 << 10))
    assert joined.device.send(features(0, dim=40000)) == 1
    assert joined.device.send(features(1)) == 2
    assert joined.device.credit == WELCOME.credit - 2
    frames = joined.device.frames_to_send()
    assert [decode(frame).seq for frame in frames] == [1, 1, 1, 1, 2]
    events = [joined.server.receive(frame, 0.0) for frame in frames]
    assert [received(each) for each in events] == [[], [], [], [1], [2]]
    joined.server.stored(2)
    assert Acknowledged(2) in joined.deliver(SERVER)


def test_chunks_are_cut_by_the_session_alone() -> None:
    with pytest.raises(LocalProtocolError, match="expected a whole message"):
        pair().device.send(SAMPLES["chunk"])


def test_greeting_must_name_the_frame_limit_that_is_kept() -> None:
    session = Session(DEVICE, SessionLimits(frame_bytes=65536))
    with pytest.raises(LocalProtocolError, match="expected frame_bytes 65536, found 1048576"):
        session.send(HELLO)


# --- time --------------------------------------------------------------------------------------------------------


def test_wi_01_heartbeat_is_due_after_the_agreed_time_without_frames() -> None:
    joined = pair()
    joined.device.status = Heartbeat(12, True, "training", 3.0)
    joined.device.tick(9.9)
    assert joined.device.frames_to_send() == []
    joined.device.tick(10.0)
    joined.device.tick(10.1)  # one is enough
    assert [decode(frame).message for frame in joined.device.frames_to_send()] == [joined.device.status]
    joined.device.tick(19.9)
    assert joined.device.frames_to_send() == []


def test_work_is_a_sign_of_life_too() -> None:
    joined = pair()
    joined.device.tick(9.0)
    joined.say(DEVICE, features())
    joined.device.tick(11.0)
    assert joined.device.frames_to_send() == []


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", Role)
def test_wi_03_silent_peer_is_noticed_in_every_state(role: Role, state: State) -> None:
    session = pair(state).side(role)
    session.tick(0.0)
    session.tick(LIMITS.silence_s)
    with pytest.raises(ProtocolError, match="expected a sign of life within 45 s, found none"):
        session.tick(LIMITS.silence_s + 0.1)


def test_silence_counts_from_the_first_tick_and_not_from_the_clock_s_zero() -> None:
    session = fresh().server
    session.tick(1e6)
    session.tick(1e6 + LIMITS.silence_s)


def test_any_frame_ends_the_silence() -> None:
    joined = pair()
    joined.now_s = 44.0
    joined.say(DEVICE, SAMPLES["heartbeat"])
    joined.server.tick(80.0)


def test_closed_session_waits_for_nobody() -> None:
    joined = pair()
    joined.say(SERVER, SAMPLES["bye"])
    joined.device.tick(1e9)
    assert joined.device.frames_to_send() == []


def test_heartbeats_must_come_often_enough_to_keep_the_peer() -> None:
    rare = dataclasses.replace(WELCOME, heartbeat_s=23.0)
    with pytest.raises(LocalProtocolError, match=r"expected heartbeat_s of at most half of silence_s \(45\), found 23"):
        pair(State.PROVEN).server.send(rare)
    with pytest.raises(RemoteProtocolError, match="found 23"):
        pair(State.PROVEN).device.receive(encode(rare, seq=0, ack=0), 0.0)


# --- law: whatever the connection loses, everything arrives once and in order ------------------------------------


steps = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.sampled_from([4, 4, 4, 30000])),
        st.tuples(st.just("up"), st.integers(1, 5)),
        st.tuples(st.just("up"), st.integers(1, 5)),
        st.tuples(st.just("store"), st.integers(1, 3)),
        st.tuples(st.just("down"), st.integers(0, 3)),
        st.tuples(st.just("ask"), st.just(0)),
        st.tuples(st.just("cut"), st.sampled_from([64 << 10, 1 << 20])),
    ),
    max_size=60,
)


@given(script=steps, credit=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_wi_04_every_message_arrives_once_and_in_order_whatever_is_lost(
    script: list[tuple[str, int]], credit: int
) -> None:
    run(script, credit)


@pytest.mark.slow
@given(script=steps, credit=st.integers(1, 4))
@settings(max_examples=3000, deadline=None)
def test_wi_04_every_message_arrives_once_and_in_order_long(script: list[tuple[str, int]], credit: int) -> None:
    run(script, credit)
