"""Attacks on the codec: each frame is refused with a named error, and none makes the reader allocate what it claims."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from contract.codec import LIMITS, Assembler, Limits, decode, encode, split
from contract.errors import RemoteProtocolError
from contract.messages import Chunk, Update
from tests.contract.attacks.frames import body_of, frame_of, opened
from tests.golden.samples import MESSAGES

HEADER, ENTRIES, DATA = opened(MESSAGES["ask_score_batch"], seq=1)  # logits (2, 3) float32, sample_ids (2, 16) uint8


def refused(frame: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode(frame)
    assert text in raised.value.cause and len(raised.value.cause) < 500
    assert raised.value.cure


def test_the_unchanged_frame_is_taken() -> None:
    decode(frame_of(HEADER, body_of(ENTRIES, DATA)))


# --- the frame and its header ------------------------------------------------------------------------------------


def test_frame_too_big() -> None:
    refused(bytes(LIMITS.frame_bytes + 1), "frame: expected at most 1048576 bytes, found 1048577")


def test_header_too_big() -> None:
    text = b'{"v":1' + b" " * LIMITS.header_bytes + b"}"
    refused(frame_of(text), "header length: expected at most 65536")


@pytest.mark.parametrize("length", [100, 2**31, 2**32 - 1])
def test_header_longer_than_its_frame(length: int) -> None:
    refused(struct.pack("<I", length) + b"{}  ", "header length: expected at most 4")


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x02\x00\x00"])
def test_frame_shorter_than_its_length_field(frame: bytes) -> None:
    refused(frame, "header length: expected 4 bytes")


def test_body_that_begins_unaligned() -> None:
    refused(struct.pack("<I", 2) + b"{}", "expected a body that begins at a multiple of 8, found one at 6")


@pytest.mark.parametrize("header", [b"[]", b"null", b'"x"', b"7"])
def test_header_that_is_no_object(header: bytes) -> None:
    refused(frame_of(header), "header: expected an object")


@pytest.mark.parametrize(
    "header", [b"", b"{", b"\xff\xfe", b'{"v":1,"v":1}', b'{"v":NaN}', b'{"v":1e999}', b"[" * 60000, b"9" * 60000]
)
def test_header_that_is_no_strict_json(header: bytes) -> None:
    refused(frame_of(header), "header: ")


@pytest.mark.parametrize("kind", [None, 1, "", "Hello", "__class__", "ask\x00", ["ask"], {"a": 1}, "x" * 60000])
def test_unknown_message_type(kind: object) -> None:
    refused(frame_of({**HEADER, "type": kind}), "header.type: expected one of hello, challenge")


@pytest.mark.parametrize("name", ["v", "seq", "ack"])
@pytest.mark.parametrize("value", [None, -1, 1.0, True, "1", 2**63, 10**4000, []])
def test_numbers_that_are_none(name: str, value: object) -> None:
    refused(frame_of({**HEADER, name: value}), f"header.{name}: expected an int of 63 bits")


def test_unknown_header_field() -> None:
    refused(frame_of({**HEADER, "alpha": 0.0}, body_of(ENTRIES, DATA)), "no other fields of Ask, found 'alpha'")


def test_array_smuggled_through_the_header() -> None:
    refused(frame_of({**HEADER, "tensors": {}}, body_of(ENTRIES, DATA)), "no other fields of Ask, found 'tensors'")


def test_values_that_the_message_refuses_are_the_peer_s_fault() -> None:
    header, _, _ = opened(MESSAGES["hello"])
    refused(frame_of({**header, "device": "../../root"}), "hello.device: expected a name")
    header, _, _ = opened(MESSAGES["welcome"])
    refused(frame_of({**header, "kappa": -1.0}), "welcome.kappa: expected 0 or more")
    refused(frame_of(b'{"kappa":1e400}'), "expected a finite number, found 1e400")


# --- the body ----------------------------------------------------------------------------------------------------

LOGITS, IDS = ENTRIES["logits"], ENTRIES["sample_ids"]
assert (LOGITS["data_offsets"], IDS["data_offsets"]) == ([0, 24], [24, 56])


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**ENTRIES, name: {**ENTRIES[name], **fields}}


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (changed("sample_ids", data_offsets=[0, 32]), "tensor 'sample_ids'.data_offsets: expected 32 bytes at 24"),
        (changed("sample_ids", data_offsets=[23, 55]), "tensor 'sample_ids'.data_offsets: expected 32 bytes at 24"),
        (changed("logits", data_offsets=[24, 48]), "expected"),
        ({name: {**entry, "data_offsets": [0, 24]} for name, entry in ENTRIES.items()}, "expected"),
    ],
)
def test_overlapping_tensors(entries: dict[str, Any], text: str) -> None:
    refused(frame_of(HEADER, body_of(entries, DATA)), text)


def test_gap_between_tensors() -> None:
    entries = changed("sample_ids", data_offsets=[32, 64])
    refused(frame_of(HEADER, body_of(entries, DATA + bytes(8))), "expected 32 bytes at 24")


def test_uncovered_bytes_behind_the_last_tensor() -> None:
    refused(frame_of(HEADER, body_of(ENTRIES, DATA + b"secret")), "body: expected tensors that cover it to its end")


@pytest.mark.parametrize("offsets", [[24, 57], [24, 2**62], [-32, 0], [56, 24], [2**62, 2**62 + 32]])
def test_tensor_outside_the_body(offsets: list[int]) -> None:
    refused(frame_of(HEADER, body_of(changed("sample_ids", data_offsets=offsets), DATA)), "data_offsets: expected")


def test_truncated_tensor() -> None:
    refused(frame_of(HEADER, body_of(ENTRIES, DATA[:-1])), "expected 32 bytes at 24, inside the body")


@pytest.mark.parametrize(
    "shape", [[2**62, 2**62], [10**18] * 8, [1] * 9, [1] * 20000, [0, 16], [-2, -16], [2, 15], [], [32]]
)
def test_shape_that_does_not_fit_its_bytes(shape: list[int]) -> None:
    refused(frame_of(HEADER, body_of(changed("sample_ids", shape=shape), DATA)), "tensor")


@pytest.mark.parametrize("dtype", ["F64", "I64", "BOOL", "F8_E4M3", "f32", "", "O", None, 1])
def test_dtype_that_no_message_has(dtype: object) -> None:
    refused(
        frame_of(HEADER, body_of(changed("logits", dtype=dtype), DATA)), "dtype: expected one of I8, U8, U16, F16, F32"
    )


def test_dtype_of_another_field() -> None:
    entries = changed("sample_ids", dtype="I8")
    refused(frame_of(HEADER, body_of(entries, DATA)), "tensor sample_ids: expected uint8 2x16, found int8 2x16")


def test_misaligned_tensor() -> None:
    entries = {
        "sample_ids": {**IDS, "shape": [1, 33], "data_offsets": [0, 33]},
        "logits": {**LOGITS, "data_offsets": [33, 57]},
    }
    refused(frame_of(HEADER, body_of(entries, DATA + b"x")), "tensor 'logits'.data_offsets: expected a multiple of 4")


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({}, "body header: expected an object that describes tensors"),
        ([], "body header: expected an object that describes tensors"),
        (b"nonsense", "expected JSON text"),
        (b"[" * 60000, "expected JSON text"),
        (b'{"logits":1,"logits":2}', "expected every key once"),
        ({"logits": 1}, "tensor 'logits': expected an object"),
        ({"logits": {**LOGITS, "extra": 0}}, "tensor 'logits': expected an object of"),
        ({"__metadata__": {"format": "pt"}, **ENTRIES}, "tensor '__metadata__': expected an object of"),
        ({"logits": {**LOGITS, "data_offsets": [0, 24, 48]}}, "data_offsets: expected two counts"),
        ({"logits": {**LOGITS, "shape": [2.0, 3.0]}}, "shape: expected at most 8 sizes"),
    ],
)
def test_description_of_tensors_that_is_none(entries: object, text: str) -> None:
    refused(frame_of(HEADER, body_of(entries, DATA)), text)


@pytest.mark.parametrize("length", [10**4, 2**40, 2**64 - 1])
def test_body_header_longer_than_its_frame(length: int) -> None:
    refused(frame_of(HEADER, struct.pack("<Q", length) + b"{}"), "body header length: expected at most 2")


def test_body_header_too_big() -> None:
    refused(frame_of(HEADER, body_of(b"{" + b" " * 270000 + b"}")), "body header length: expected at most 262144")


def test_body_shorter_than_its_length_field() -> None:
    refused(frame_of(HEADER, b"\x01\x02"), "body header length: expected 8 bytes, found 2")


def test_missing_tensor() -> None:
    refused(frame_of(HEADER), "ask score_batch: tensors: expected 'logits', found none")
    header, _, _ = opened(MESSAGES["features"])
    refused(frame_of(header), "features: tensors: expected 'sample_ids', found none")


def test_unexpected_tensor() -> None:
    header, entries, data = opened(MESSAGES["scores"])
    assert entries["values"]["data_offsets"] == [0, 12]
    entries = {"values": entries["values"], "__init__": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}
    refused(frame_of(header, body_of(entries, data + bytes(4))), "scores: expected no tensors but values")


def test_tensor_in_a_message_that_has_none() -> None:
    header, _, _ = opened(MESSAGES["heartbeat"])
    refused(frame_of(header, body_of(ENTRIES, DATA)), "heartbeat: expected no tensors but none, found 'logits'")


@pytest.mark.parametrize(
    "name",
    [
        *("scores", "gradient", "ask_score_batch", "ask_head_step", "ask_load_part", "ask_batch_loss"),
        *("ask_local_round", "ask_forward", "activations"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(name: str, value: float) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    poisoned = struct.pack("<f", value) + data[4:]  # floats come first: they are the widest
    refused(frame_of(header, body_of(entries, poisoned)), "expected finite values, found NaN or infinity")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_passes_for_the_server_s_gates_to_name_its_device(value: float) -> None:
    header, entries, data = opened(MESSAGES["update"], seq=1)
    poisoned = struct.pack("<f", value) + data[4:]
    message = decode(frame_of(header, body_of(entries, poisoned))).message
    assert isinstance(message, Update)


@pytest.mark.parametrize("name", ["activations_bare", "ask_settle"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_halves_that_are_not_finite(name: str, value: float) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    refused(frame_of(header, body_of(entries, struct.pack("<e", value) + data[2:])), "expected finite values")


PARTS = ("update", "ask_load_part")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "tensor",
    ["", "..", ".weight", "a/b", "a b", "a-b", "\u00e9", "w\u0000", "w\n", "__metadata__/x", "$(x)", "x" * 129],
)
def test_parameters_by_names_that_no_model_has(name: str, tensor: str) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    entries = {tensor if each == "scale" else each: entry for each, entry in entries.items()}
    refused(frame_of(header, body_of(entries, data)), "expected names of a model's tensors")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("dtype", "shape"), [("I8", [4]), ("U8", [2, 2]), ("U16", [2]), ("F16", [2])])
def test_parameters_of_another_type(name: str, dtype: str, shape: list[int]) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    entries["scale"] |= {"dtype": dtype, "shape": shape}
    refused(frame_of(header, body_of(entries, data)), "tensor scale: expected float32 of one value or more")


@pytest.mark.parametrize("name", PARTS)
def test_parameters_of_no_value_or_too_many_axes(name: str) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    for shape in ([0], [2, 0], [1] * 9, [-1]):
        forged = {**entries, "scale": {**entries["scale"], "shape": shape}}
        refused(frame_of(header, body_of(forged, data)), "tensor 'scale'.shape: expected at most 8 sizes of 1 or more")


def test_parameters_smuggled_through_the_header_of_an_update() -> None:
    header, entries, data = opened(MESSAGES["update"], seq=1)
    refused(frame_of({**header, "tensors": {}}, body_of(entries, data)), "no other fields of Update, found 'tensors'")


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("settled", {"samples": -1}, "settled.samples: expected 0 or more"),
        ("settled", {"samples": 2**63}, "expected an int of 64 bits"),
        ("settled", {"samples": 1.0}, "expected int"),
        ("activations", {"split": "test"}, "expected one of train, infer"),
        ("activations", {"total": 1}, "activations.total: expected at least the 2 images of this batch"),
        ("update", {"correct": 129}, "update.correct: expected 0 to 128"),
        ("ask_forward", {"parameters": {}}, "ask.parameters of forward: expected 'after', found none"),
        ("ask_upload_part", {"parameters": {"after": -1}}, "ask.parameters.after: expected 0 or more"),
        ("ask_upload_part", {"parameters": {"after": 1.5}}, "ask.parameters.after: expected int, found float"),
    ],
)
def test_header_fields_of_a_training_message_that_break_a_rule(name: str, change: dict[str, Any], text: str) -> None:
    header, entries, data = opened(MESSAGES[name], seq=1)
    refused(frame_of({**header, **change}, body_of(entries, data) if entries else b""), text)


def test_labels_of_more_images_than_there_are() -> None:
    header, entries, data = opened(MESSAGES["activations"], seq=1)
    entries["labels"] |= {"shape": [3], "data_offsets": [48, 54]}
    refused(frame_of(header, body_of(entries, data + bytes(2))), "tensor labels: expected uint16 2, found uint16 3")


def test_claimed_sizes_allocate_nothing() -> None:
    claims = [
        struct.pack("<I", 2**32 - 1) + b"{}  ",
        frame_of(HEADER, struct.pack("<Q", 2**40) + b"{}"),
        frame_of(HEADER, body_of(changed("sample_ids", shape=[2**31, 2**31], data_offsets=[24, 2**62]), DATA)),
    ]
    tracemalloc.start()
    try:
        for frame in claims:
            refused(frame, "expected")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# --- chunks ------------------------------------------------------------------------------------------------------

WHOLE = encode(MESSAGES["features"], seq=0, ack=0)


def chunk(index: int, **fields: Any) -> Chunk:
    """Chunk `index` of four of an object, with some fields forged."""
    honest = vars(list(split([WHOLE], 1024 + -(-len(WHOLE) // 4)))[index])
    return Chunk(**{**honest, **fields})


def test_chunk_bomb() -> None:
    # A size that was only claimed costs nothing; one above the limit is refused at once.
    with pytest.raises(RemoteProtocolError, match=f"chunk.size: expected at most {LIMITS.object_bytes}"):
        Assembler().add(chunk(0, size=LIMITS.object_bytes + 1))
    tracemalloc.start()
    try:
        assembler = Assembler()
        assembler.add(chunk(0, size=LIMITS.object_bytes, total=LIMITS.object_bytes))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_chunk_bomb_of_many_small_chunks_costs_no_more_than_its_bytes() -> None:
    count = 20000
    data = np.zeros(1, np.uint8)
    assembler = Assembler()
    tracemalloc.start()
    try:
        for index in range(count - 1):
            assembler.add(Chunk("0" * 64, index, count, count, data))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * count + 10000


def test_more_data_than_the_claimed_size() -> None:
    assembler = Assembler(Limits(object_bytes=1000))
    assembler.add(chunk(0, size=150))
    with pytest.raises(RemoteProtocolError, match="chunk: expected 150 bytes in all, found 226 by number 1"):
        assembler.add(chunk(1, size=150))


def test_less_data_than_the_claimed_size() -> None:
    assembler = Assembler()
    for index in range(3):
        assembler.add(chunk(index, size=900))
    with pytest.raises(RemoteProtocolError, match=f"chunk: expected 900 bytes in all, found {len(WHOLE)}"):
        assembler.add(chunk(3, size=900))


@pytest.mark.parametrize("index", [0, 2, 3])
def test_chunk_out_of_order(index: int) -> None:
    assembler = Assembler()
    assembler.add(chunk(0))
    with pytest.raises(RemoteProtocolError, match=f"chunk: expected number 1 of object .*, found number {index} of"):
        assembler.add(chunk(index))


@pytest.mark.parametrize("forged", [{"object": "1" * 64}, {"total": 5}, {"size": 999}])
def test_chunk_of_another_object(forged: dict[str, Any]) -> None:
    assembler = Assembler()
    assembler.add(chunk(0))
    with pytest.raises(RemoteProtocolError, match="chunk: expected number 1 of object"):
        assembler.add(chunk(1, **forged))


def test_chunk_of_the_middle_first() -> None:
    with pytest.raises(RemoteProtocolError, match="chunk: expected number 0"):
        Assembler().add(chunk(1))


def test_object_with_another_digest() -> None:
    assembler = Assembler()
    for index in range(3):
        assembler.add(chunk(index))
    altered = chunk(3).data.copy()
    altered[0] ^= 1
    with pytest.raises(RemoteProtocolError, match="chunk: expected an object with SHA-256"):
        assembler.add(chunk(3, data=altered))
