from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from contract.canonical import INT_MAX
from contract.codec import LIMITS, Assembler, Limits, decode, encode, prepare, reopen, split
from contract.errors import LocalProtocolError, RemoteProtocolError
from contract.messages import (
    Activations,
    Ask,
    Challenge,
    Features,
    Heartbeat,
    Hello,
    Message,
    Scores,
    Settled,
    Update,
    choose_protocol,
    tensors_of,
)
from tests.golden.samples import FOLDER, MESSAGES, numbers


def same(one: Message, other: Message) -> bool:
    """Equality of messages by type, plain fields and arrays."""
    mine, theirs = tensors_of(one), tensors_of(other)
    plain = [
        {name: value for name, value in vars(message).items() if name not in (*mine, "tensors")}
        for message in (one, other)
    ]
    return (
        type(one) is type(other)
        and plain[0] == plain[1]
        and mine.keys() == theirs.keys()
        and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        and all(mine[name].dtype == theirs[name].dtype for name in mine)
    )


def batch(samples: int, tokens: int, dim: int) -> Features:
    """Features with codes that are not all alike."""
    codes = np.random.default_rng(0).integers(-127, 128, (samples, tokens, dim), dtype=np.int8)
    return Features("a-1", 0, samples, "train", np.zeros((samples, 16), np.uint8), codes, None, None)


def parts_of(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a frame, read by other means than the codec."""
    (length,) = struct.unpack_from("<I", frame)
    return json.loads(frame[4 : 4 + length]), frame[4 + length :]


def frame_of(header: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    """A frame with this header, right or wrong, padded as it must be."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + body


# --- golden bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_of_protocol_1_still_read(name: str) -> None:
    envelope = decode((FOLDER / f"{name}.bin").read_bytes())
    assert {"seq": envelope.seq, "ack": envelope.ack} == numbers(name)
    assert same(envelope.message, MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_of_protocol_1_are_still_written(name: str) -> None:
    assert encode(MESSAGES[name], **numbers(name)) == (FOLDER / f"{name}.bin").read_bytes()


def test_no_golden_frame_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(MESSAGES)


# --- round trip --------------------------------------------------------------------------------------------------


@given(seq=st.integers(0, INT_MAX), ack=st.integers(0, INT_MAX))
def test_numbers_survive(seq: int, ack: int) -> None:
    envelope = decode(encode(MESSAGES["heartbeat"], seq=seq, ack=ack))
    assert (envelope.seq, envelope.ack) == (seq, ack)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)),
    sources=st.booleans(),
    labels=st.booleans(),
)
def test_features_survive_in_every_shape(shape: tuple[int, int, int], sources: bool, labels: bool) -> None:
    rng = np.random.default_rng(shape)
    message = dataclasses.replace(
        batch(*shape),
        sources=rng.integers(0, 65536, shape[:2]).astype(np.uint16) if sources else None,
        labels=rng.integers(0, 65536, shape[0]).astype(np.uint16) if labels else None,
    )
    frame = encode(message, seq=1, ack=0)
    assert len(frame) <= prepare(message).size_bytes <= len(frame) + 60
    assert same(decode(frame).message, message)


@given(samples=st.integers(0, INT_MAX))
def test_counts_of_settled_survive(samples: int) -> None:
    assert decode(encode(Settled("a", samples), seq=1, ack=0)).message == Settled("a", samples)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    kind=st.sampled_from([np.float16, np.float32]),
    labels=st.booleans(),
    infer=st.booleans(),
)
def test_activations_survive_in_every_shape_and_precision(
    shape: tuple[int, int], kind: type[np.generic], labels: bool, infer: bool
) -> None:
    rng = np.random.default_rng(shape)
    named = rng.integers(0, 65536, shape[0]).astype(np.uint16) if labels else None
    values = rng.normal(size=shape).astype(kind)
    message = Activations("a", 2, 10, "infer" if infer else "train", values, named)
    frame = encode(message, seq=1, ack=0)
    assert len(frame) <= prepare(message).size_bytes <= len(frame) + 60
    assert same(decode(frame).message, message)


TENSOR_NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,127}", fullmatch=True)
SHAPES = st.lists(st.integers(1, 3), max_size=8).map(tuple)


@given(shapes=st.dictionaries(TENSOR_NAMES, SHAPES, max_size=6))
def test_parameters_survive_by_any_name_and_in_any_shape(shapes: dict[str, tuple[int, ...]]) -> None:
    rng = np.random.default_rng(len(shapes))
    tensors = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}
    update = Update("a", 9, 4, -0.5, 3, tensors)
    load = Ask("a", "load_part", {"step": 1, "after": 0, "base": 0, "cut": 1}, 1.0, tensors)
    for message in (update, load):
        found = decode(encode(message, seq=1, ack=0)).message
        assert same(found, message)
        assert {name: each.shape for name, each in tensors_of(found).items()} == shapes


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    kind=st.sampled_from([np.float16, np.float32, np.int8]),
    rate=st.floats(0, 1e6),
)
def test_gradients_survive_in_every_precision(shape: tuple[int, int], kind: type[np.generic], rate: float) -> None:
    rng = np.random.default_rng(shape)
    tensors = {"gradient": rng.integers(-127, 128, shape).astype(kind)}
    if kind is np.int8:
        tensors["scales"] = rng.random(shape[0], np.float32)
    numbers = {"step": 3, "after": 2, "base": 0, "batch": 1, "rate": rate}
    message = Ask("a", "settle", numbers, 1.0, tensors)
    assert same(decode(encode(message, seq=1, ack=0)).message, message)


def test_the_parameters_of_a_model_with_many_layers_fit() -> None:
    # DenseNet-201 has 1,206 tensors of this kind; their description alone has over 100 kB.
    name = "features.denseblock4.denselayer{}.norm2.running_mean"
    message = Update("a", 1, 1, 0.0, 0, {name.format(number): np.ones(1, np.float32) for number in range(1206)})
    assert same(decode(encode(message, seq=1, ack=0)).message, message)


def test_more_tensors_than_a_reader_takes_are_our_error() -> None:
    tensors = {f"layer{number}": np.ones(1, np.float32) for number in range(5000)}
    with pytest.raises(LocalProtocolError, match="update: description of its tensors: expected at most 262144 bytes"):
        encode(Update("a", 1, 1, 0.0, 0, tensors), seq=1, ack=0)


def test_an_update_larger_than_a_frame_goes_in_chunks() -> None:
    values = np.random.default_rng(0).normal(size=700_000).astype(np.float32)
    message = Update("a", 1, 1, 0.0, 0, {"w": values, "scale": np.asarray(2, np.float32)})
    assembler = Assembler()
    *_, whole = [assembler.add(chunk) for chunk in split(prepare(message).parts(0, 0))]
    assert whole is not None and same(decode(whole, LIMITS.object_bytes).message, message)


@given(st.text(max_size=30))
def test_any_printable_text_survives(text: str) -> None:
    try:
        message = Heartbeat(0, False, text, 0.0)
    except LocalProtocolError:
        return
    assert decode(encode(message, seq=0, ack=0)).message == message


def test_arrays_that_are_not_contiguous_survive() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (values.T, values[:, ::2], values[::-1]):
        message = Scores("a", 0, view)
        assert same(decode(encode(message, seq=1, ack=0)).message, message)


def test_decoded_arrays_are_read_only_aligned_views_of_the_frame() -> None:
    frame = encode(MESSAGES["ask_score_batch"], seq=1, ack=0)
    message = decode(frame).message
    assert isinstance(message, Ask)
    for array in message.tensors.values():
        assert not array.flags.writeable and array.flags.aligned and not array.flags.owndata
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        message.tensors["logits"][0] = 0


def test_arrays_of_a_writable_buffer_are_read_only_too() -> None:
    frame = memoryview(bytearray(encode(MESSAGES["scores"], seq=1, ack=0)))
    message = decode(frame).message
    assert isinstance(message, Scores) and not message.values.flags.writeable


# --- the body is safetensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, message in MESSAGES.items() if tensors_of(message)])
def test_safetensors_library_reads_our_bodies(name: str) -> None:
    _, body = parts_of(encode(MESSAGES[name], seq=1, ack=0))
    expected = tensors_of(MESSAGES[name])
    found = load_safetensors(body)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", [name for name, message in MESSAGES.items() if tensors_of(message)])
def test_bodies_of_the_safetensors_library_are_read(name: str) -> None:
    header, _ = parts_of(encode(MESSAGES[name], seq=1, ack=0))
    body = save_safetensors(tensors_of(MESSAGES[name]))
    assert same(decode(frame_of(header, body)).message, MESSAGES[name])


# --- limits, errors of our own -----------------------------------------------------------------------------------


def test_field_that_does_not_hold_what_it_declares_is_our_error() -> None:
    message = dataclasses.replace(MESSAGES["gradient"], count=np.int64(2))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="gradient: count: expected int, found int64"):
        encode(message, seq=1, ack=0)


def test_message_above_the_object_limit_is_refused_with_its_size() -> None:
    codes = np.broadcast_to(np.int8(0), (1, 1, LIMITS.object_bytes + 1))  # takes no memory, and must not be copied
    message = Features("a", 0, 1, "train", np.zeros((1, 16), np.uint8), codes, None, None)
    with pytest.raises(
        LocalProtocolError, match=rf"features: expected at most {LIMITS.object_bytes} bytes, found 2\d+"
    ):
        encode(message, seq=1, ack=0)


def test_frame_above_the_limit_of_the_reader() -> None:
    frame = encode(batch(2, 100, 400), seq=1, ack=0)
    assert same(decode(frame, max_bytes=len(frame)).message, batch(2, 100, 400))
    with pytest.raises(RemoteProtocolError, match=f"frame: expected at most 70000 bytes, found {len(frame)}"):
        decode(frame, max_bytes=70000)


# --- versions ----------------------------------------------------------------------------------------------------


def test_hello_of_a_later_version_is_read_so_that_versions_can_be_compared() -> None:
    header, _ = parts_of(encode(MESSAGES["hello_first"], seq=0, ack=0))
    hello = decode(frame_of({**header, "v": 3, "protocol_min": 2, "protocol_max": 3, "from_the_future": [1]})).message
    assert isinstance(hello, Hello) and (hello.protocol_min, hello.protocol_max) == (2, 3)
    with pytest.raises(Exception, match="device speaks 2 to 3, the server speaks 1 to 1"):
        choose_protocol(hello.protocol_min, hello.protocol_max)


@pytest.mark.parametrize("name", ["ask", "welcome", "bye"])
def test_other_messages_of_a_later_version_are_refused(name: str) -> None:
    header, body = parts_of(encode(MESSAGES[name], seq=0, ack=0))
    with pytest.raises(RemoteProtocolError, match=f"{name}.v: expected protocol 1 to 1, found 2"):
        decode(frame_of({**header, "v": 2}, body))


def test_hello_of_this_version_has_no_extra_fields() -> None:
    header, _ = parts_of(encode(MESSAGES["hello"], seq=0, ack=0))
    with pytest.raises(RemoteProtocolError, match="no other fields of Hello, found 'energy_j'"):
        decode(frame_of({**header, "energy_j": 1.0}))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_reopened_frame_goes_out_under_other_numbers(name: str) -> None:
    message = MESSAGES[name]
    payload = reopen(encode(message, seq=0, ack=0))
    assert payload.kind == message.TYPE
    assert payload.frame(seq=7, ack=INT_MAX) == encode(message, seq=7, ack=INT_MAX)
    with pytest.raises(RemoteProtocolError, match="numbers 0"):
        reopen(encode(message, seq=7, ack=0))


# --- chunks ------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 5000), frame_bytes=st.sampled_from([1025, 1100, 2048, 65536]))
def test_chunks_join_to_what_was_split(size: int, frame_bytes: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assembler = Assembler()
    cuts = sorted({0, size // 3, size // 2, size})  # pieces that meet anywhere in a chunk
    pieces = [memoryview(data)[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    joined = [assembler.add(chunk) for chunk in split(pieces, frame_bytes)]
    assert joined[:-1] == [None] * (len(joined) - 1)
    assert bytes(joined[-1] or b"") == data and not assembler.unfinished


@pytest.mark.parametrize("frame_bytes", [64 << 10, 256 << 10, 1 << 20])
def test_wi_02_chunk_frames_fit_into_the_limit_they_were_cut_for(frame_bytes: int) -> None:
    whole = np.zeros(3 << 20, np.uint8).tobytes()
    for chunk in split([whole], frame_bytes):
        frame = encode(chunk, seq=INT_MAX, ack=INT_MAX)
        assert prepare(chunk).size_bytes <= frame_bytes
        assert same(decode(frame, frame_bytes).message, chunk)


def test_assembler_takes_one_object_after_another() -> None:
    assembler = Assembler(Limits(object_bytes=4000))
    for seed in range(3):
        data = np.random.default_rng(seed).bytes(4000)
        *first, last = split([data], 2000)
        assert [assembler.add(chunk) for chunk in first] == [None] * len(first)
        assert assembler.unfinished
        whole = assembler.add(last)
        assert whole is not None and whole.readonly
        assert hashlib.sha256(whole).hexdigest() == last.object


# --- cost --------------------------------------------------------------------------------------------------------


def full_batch() -> Features:
    """Features that fill a frame: 5 images of a ViT-L."""
    return batch(5, 197, 1024)


def test_encoding_a_frame_copies_its_arrays_once_and_decoding_never() -> None:
    message = full_batch()
    tracemalloc.start()
    try:
        frame = encode(message, seq=1, ack=0)
        _, written = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        decode(frame)
        _, read = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * LIMITS.frame_bytes < len(frame) <= LIMITS.frame_bytes
    assert written < len(frame) + 64 * 1024
    assert read - held < 64 * 1024


def test_a_full_frame_takes_less_time_than_copying_it_a_hundred_times() -> None:
    # A ratio within one run: the machine may be slow or busy.
    message = full_batch()
    frame = encode(message, seq=1, ack=0)

    def best(work: Any) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    copy = best(lambda: bytearray(frame))
    assert best(lambda: encode(message, seq=1, ack=0)) < 100 * copy
    assert best(lambda: decode(frame)) < 100 * copy


def test_challenge_is_bytes_in_hex() -> None:
    header, body = parts_of(encode(Challenge(bytes(range(32))), seq=0, ack=0))
    assert header == {"ack": 0, "seq": 0, "v": 1, "type": "challenge", "nonce": bytes(range(32)).hex()}
    assert body == b""
