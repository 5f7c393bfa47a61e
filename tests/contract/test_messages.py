from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from contract.asks import ASK_KINDS
from contract.errors import LocalProtocolError, ProtocolError
from contract.messages import (
    LIMITS,
    MESSAGES,
    PROTOCOL,
    PROTOCOL_MIN,
    TENSORS,
    Activations,
    Ask,
    Chunk,
    Features,
    Gradient,
    Message,
    PatchFeatures,
    Piece,
    Prototypes,
    Scores,
    Update,
    choose_protocol,
    tensors_of,
)
from tests.golden.samples import MESSAGES as SAMPLES

INFINITY = float("inf")


def array_fields(kind: type[Message]) -> set[str]:
    """Fields that are annotated with an array type."""
    arrays = ("Float32", "Int8", "UInt8", "UInt16", "Array")
    return {field.name for field in dataclasses.fields(kind) if any(name in str(field.type) for name in arrays)}


# --- the schema --------------------------------------------------------------------------------------------------


def test_no_message_has_a_field_for_energy_power_or_noise_strength() -> None:
    secret = ("energy", "power", "joule", "watt", "alpha", "ceiling", "_j", "_w", "battery", "image", "pixel")
    named = {f"{kind}.{field.name}" for kind, cls in MESSAGES.items() for field in dataclasses.fields(cls)}
    named |= {
        f"ask.{kind}.{name}" for kind, rule in ASK_KINDS.items() for name in (*rule.parameters, *(rule.tensors or ()))
    }
    found = [name for name in named if any(word in name.split(".")[-1] or name.endswith(word) for word in secret)]
    assert found == []


def test_every_message_has_a_sample() -> None:
    assert {message.TYPE for message in SAMPLES.values()} == set(MESSAGES)
    assert {message.kind for message in SAMPLES.values() if isinstance(message, Ask)} == set(ASK_KINDS)


def test_every_message_is_frozen_and_documented_by_who_sends_it() -> None:
    for cls in MESSAGES.values():
        assert dataclasses.fields(cls) and cls.__dataclass_params__.frozen  # type: ignore[union-attr]
        assert (cls.__doc__ or "").startswith(("Device:", "Server:", "Both:")), cls


def test_tensor_rules_name_exactly_the_array_fields() -> None:
    for kind, cls in MESSAGES.items():
        expected = set(TENSORS.get(kind, ())) if cls not in (Ask, Update) else {"tensors"}
        assert array_fields(cls) == expected, kind


def test_optional_tensors_that_are_none_do_not_travel() -> None:
    assert set(tensors_of(SAMPLES["features"])) == {"sample_ids", "codes", "sources", "labels"}
    assert set(tensors_of(SAMPLES["features_bare"])) == {"sample_ids", "codes"}
    assert set(tensors_of(SAMPLES["activations"])) == {"values", "labels"}
    assert set(tensors_of(SAMPLES["activations_bare"])) == {"values"}
    assert tensors_of(SAMPLES["bye"]) == {}


# --- protocol versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowest", "highest"), [(1, 1), (1, 9), (PROTOCOL_MIN, PROTOCOL)])
def test_highest_shared_protocol_is_chosen(lowest: int, highest: int) -> None:
    assert choose_protocol(lowest, highest) == PROTOCOL


def test_newer_device_is_told_both_ranges_and_whom_to_upgrade() -> None:
    with pytest.raises(ProtocolError) as raised:
        choose_protocol(PROTOCOL + 1, PROTOCOL + 2)
    assert raised.value.cause == (
        f"no protocol version in common: the device speaks {PROTOCOL + 1} to {PROTOCOL + 2}, "
        f"the server speaks {PROTOCOL_MIN} to {PROTOCOL}"
    )
    assert raised.value.cure == "upgrade Cutlayer on the server"


def test_older_device_is_told_to_upgrade() -> None:
    with pytest.raises(ProtocolError) as raised:
        choose_protocol(PROTOCOL_MIN - 1, PROTOCOL_MIN - 1)
    assert raised.value.cure == "upgrade Cutlayer on the device"


# --- rules of single fields --------------------------------------------------------------------------------------

F32 = np.ones((2, 3), np.float32)
U8 = np.zeros((2, 16), np.uint8)
I8 = np.ones((2, 3), np.int8)
NAN = np.float32("nan")

BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("hello", {"device": "../../etc"}, "hello.device: expected a name"),
    ("hello", {"device": ""}, "hello.device: expected a name"),
    ("hello", {"device": ".pi"}, "hello.device: expected a name"),
    ("hello", {"device": "pi/4"}, "hello.device: expected a name"),
    ("hello", {"device": "pi\n"}, "hello.device: expected a name"),
    ("hello", {"device": "p" * 65}, "hello.device: expected a name"),
    ("hello", {"device": "pí"}, "hello.device: expected a name"),
    ("hello", {"key_id": "0123"}, "hello.key_id: expected 16 hex digits"),
    ("hello", {"protocol_min": 2}, "hello.protocol_min: expected 1 to 1, found 2"),
    ("hello", {"protocol_min": 0}, "hello.protocol_min: expected 1 to 1, found 0"),
    ("hello", {"features": ("a",) * 33}, "hello.features: expected at most 32 names"),
    ("hello", {"features": ("a b",)}, "hello.features: expected names"),
    ("hello", {"package_digest": "00"}, "hello.package_digest: expected 64 lower-case hex digits"),
    ("hello", {"class_list_hash": "X" * 64}, "hello.class_list_hash: expected 64 lower-case hex digits"),
    ("hello", {"class_count": -1}, "hello.class_count: expected 0 or more"),
    ("hello", {"last_seq": -1}, "hello.last_seq: expected 0 or more"),
    ("hello", {"last_seq": 2**63}, "hello.last_seq: expected 0 or more"),
    ("hello", {"session": None}, "hello.last_seq: expected 0, as no session is resumed, found 5"),
    ("hello", {"session": "a/b"}, "hello.session: expected a name"),
    ("hello", {"frame_bytes": LIMITS.frame_bytes + 1}, "hello.frame_bytes: expected 65536 to 1048576"),
    ("hello", {"frame_bytes": 100}, "hello.frame_bytes: expected 65536 to 1048576"),
    ("challenge", {"nonce": bytes(31)}, "challenge.nonce: expected 32 bytes"),
    ("proof", {"signature": bytes(65)}, "proof.signature: expected 64 bytes"),
    ("welcome", {"site": "a/../b"}, "welcome.site: expected a name"),
    ("welcome", {"strategy": "os.system('')"}, "welcome.strategy: expected a name"),
    ("welcome", {"kappa": -0.5}, "welcome.kappa: expected 0 or more"),
    ("welcome", {"kappa": INFINITY}, "welcome.kappa: expected 0 or more"),
    ("welcome", {"kappa": float("nan")}, "welcome.kappa: expected 0 or more"),
    ("welcome", {"seed": -1}, "welcome.seed: expected 0 or more"),
    ("welcome", {"credit": 0}, "welcome.credit: expected 1 to 1024"),
    ("welcome", {"credit": 10**9}, "welcome.credit: expected 1 to 1024"),
    ("welcome", {"heartbeat_s": 0.0}, "welcome.heartbeat_s: expected more than 0"),
    ("welcome", {"heartbeat_s": INFINITY}, "welcome.heartbeat_s: expected more than 0"),
    ("welcome", {"frame_bytes": 0}, "welcome.frame_bytes: expected"),
    ("refuse", {"code": "no such code"}, "refuse.code: expected a name"),
    ("refuse", {"cause": "x" * 1001}, "refuse.cause: expected at most 1000 printable characters"),
    ("refuse", {"cause": "\x1b[2Jall is well"}, "refuse.cause: expected at most 1000 printable characters"),
    ("refuse", {"cure": "\r"}, "refuse.cure: expected at most 1000 printable characters"),
    ("refuse", {"retry_after_s": -1.0}, "refuse.retry_after_s: expected null, or 0 or more"),
    ("refuse", {"retry_after_s": float("nan")}, "refuse.retry_after_s: expected null, or 0 or more"),
    ("heartbeat", {"step": -1}, "heartbeat.step: expected 0 or more"),
    ("heartbeat", {"waiting_for": "\x07"}, "heartbeat.waiting_for: expected"),
    ("heartbeat", {"since_s": INFINITY}, "heartbeat.since_s: expected 0 or more"),
    ("bye", {"reason": "x" * 1001}, "bye.reason: expected"),
    ("ask", {"ask": "a b"}, "ask.ask: expected a name"),
    ("ask", {"kind": "collect_feature"}, "ask.kind: expected a known kind (did you mean 'collect_features'?)"),
    ("ask", {"kind": "os.system"}, "ask.kind: expected a known kind (known: attend, batch_loss, "),
    ("ask", {"idle_progress_s": 0.0}, "ask.idle_progress_s: expected more than 0"),
    ("ask", {"parameters": {"kappa": 1.0}}, "ask.parameters of collect_features: expected 'seed', found none"),
    ("ask", {"parameters": {"kappa": 1.0, "seed": 1, "alpha": 0.0}}, "expected only kappa, seed, found 'alpha'"),
    ("ask", {"parameters": {"kappa": 1, "seed": 1}}, "ask.parameters.kappa: expected float, found int 1"),
    ("ask", {"parameters": {"kappa": 1.0, "seed": True}}, "ask.parameters.seed: expected int, found bool True"),
    ("ask", {"tensors": {"logits": F32}}, "ask collect_features: tensors: expected only nothing, found 'logits'"),
    ("ask_score_batch", {"tensors": {"logits": F32}}, "expected 'sample_ids', found none"),
    ("ask_score_batch", {"tensors": {"logits": F32[:1], "sample_ids": U8}}, "tensor sample_ids: expected uint8 1x16"),
    ("ask_score_batch", {"tensors": {"logits": U8, "sample_ids": U8}}, "tensor logits: expected float32 BxC"),
    ("ask_score_batch", {"tensors": {"logits": F32 * INFINITY, "sample_ids": U8}}, "expected finite values"),
    ("ask", {"parameters": {"kappa": 1.0, "seed": -1}}, "ask.parameters.seed: expected 0 or more, 63 bits, found -1"),
    ("ask", {"parameters": {"kappa": 1.0, "seed": 2**63}}, "ask.parameters.seed: expected 0 or more, 63 bits"),
    ("ask_load_part", {"parameters": {"step": 8, "after": 7, "base": 4}}, "of load_part: expected 'cut', found none"),
    ("ask_load_part", {"tensors": {"a b": F32}}, "ask load_part: tensors: expected names of a model's tensors"),
    ("ask_load_part", {"tensors": {"": F32}}, "expected names of a model's tensors, found ''"),
    ("ask_load_part", {"tensors": {".weight": F32}}, "expected names of a model's tensors"),
    ("ask_load_part", {"tensors": {"../weight": F32}}, "expected names of a model's tensors"),
    ("ask_load_part", {"tensors": {"w\n": F32}}, "expected names of a model's tensors"),
    ("ask_load_part", {"tensors": {"gewicht\u00e4": F32}}, "expected names of a model's tensors"),
    ("ask_load_part", {"tensors": {"w" * 129: F32}}, "expected names of a model's tensors"),
    (
        "ask_load_part",
        {"tensors": {"w": F32[:0]}},
        "tensor w: expected float32 of one value or more, found float32 0x3",
    ),
    ("ask_load_part", {"tensors": {"w": F32.astype(np.float64)}}, "tensor w: expected float32 of one value or more"),
    ("ask_load_part", {"tensors": {"w": F32 * NAN}}, "tensor w: expected finite values"),
    ("ask_local_round", {"tensors": {"w": F32 * -INFINITY}}, "ask local_round: tensor w: expected finite values"),
    ("ask_local_round", {"tensors": {"w": F32.astype(np.float16)}}, "float32 of one value or more, found float16 2x3"),
    ("ask_forward", {"tensors": {"grad": F32}}, "ask forward: tensors: expected only gradient, scales, found 'grad'"),
    ("ask_forward", {"tensors": {"gradient": F32[0]}}, "tensor gradient: expected float32 or float16 or int8 Bxn"),
    ("ask_forward", {"tensors": {"gradient": F32.astype(np.uint8)}}, "tensor gradient: expected float32 or float16"),
    ("ask_forward", {"tensors": {"gradient": F32[:, :0]}}, "tensor gradient: expected float32 or float16 or int8 2x0"),
    ("ask_forward", {"tensors": {"gradient": F32 * NAN}}, "tensor gradient: expected finite values"),
    (
        "ask_forward",
        {"tensors": {"gradient": I8, "scales": F32[0]}},
        "tensor scales: expected float32 2, found float32 3",
    ),
    ("ask_forward", {"tensors": {"gradient": I8, "scales": F32[:, 0] * NAN}}, "tensor scales: expected finite values"),
    (
        "ask_forward",
        {"tensors": {"gradient": I8, "scales": np.ones(2)}},
        "tensor scales: expected float32 2, found float64",
    ),
    (
        "ask_settle",
        {"tensors": {"gradient": (F32 * INFINITY).astype(np.float16)}},
        "tensor gradient: expected finite values",
    ),
    ("ask_batch_loss", {"tensors": {}}, "ask batch_loss: tensors: expected 'values', found none"),
    ("ask_batch_loss", {"tensors": {"values": F32.astype(np.float16)}}, "tensor values: expected float32 BxC"),
    ("ask_upload_part", {"tensors": {"w": F32}}, "ask upload_part: tensors: expected only nothing, found 'w'"),
    ("settled", {"ask": ""}, "settled.ask: expected a name"),
    ("settled", {"samples": -1}, "settled.samples: expected 0 or more"),
    ("activations", {"ask": "a/b"}, "activations.ask: expected a name"),
    ("activations", {"batch": -1}, "activations.batch: expected 0 or more"),
    ("activations", {"total": 2**63}, "activations.total: expected 0 or more"),
    ("activations", {"total": 1}, "activations.total: expected at least the 2 images of this batch, found 1"),
    ("activations", {"values": None}, "activations: tensors: expected 'values', found none"),
    ("activations", {"values": I8}, "tensor values: expected float32 or float16 Bxn, found int8 2x3"),
    ("activations", {"values": np.ones((2, 3))}, "tensor values: expected float32 or float16 Bxn, found float64 2x3"),
    ("activations", {"values": F32[:, None]}, "tensor values: expected float32 or float16 Bxn, found float32 2x1x3"),
    ("activations", {"values": F32[:, :0]}, "tensor values: expected float32 or float16 2x0"),
    ("activations", {"values": F32 * NAN}, "tensor values: expected finite values"),
    ("activations", {"values": F32.astype(np.float16) * NAN}, "tensor values: expected finite values"),
    ("activations", {"labels": np.zeros(3, np.uint16)}, "tensor labels: expected uint16 2, found uint16 3"),
    ("activations", {"labels": np.zeros(2, np.int64)}, "tensor labels: expected uint16 2, found int64 2"),
    ("activations", {"labels": np.zeros((2, 1), np.uint16)}, "tensor labels: expected uint16 2, found uint16 2x1"),
    ("update", {"ask": " "}, "update.ask: expected a name"),
    ("update", {"samples": -1}, "update.samples: expected 0 or more"),
    ("update", {"count": -1}, "update.count: expected 0 or more"),
    ("update", {"mean_loss": NAN}, "update.mean_loss: expected a finite loss"),
    ("update", {"mean_loss": INFINITY}, "update.mean_loss: expected a finite loss"),
    ("update", {"correct": 129}, "update.correct: expected 0 to 128, found 129"),
    ("update", {"correct": -1}, "update.correct: expected 0 to 128, found -1"),
    ("update", {"tensors": {"a-b": F32}}, "update: tensors: expected names of a model's tensors, found 'a-b'"),
    (
        "update",
        {"tensors": {"w": F32[:0]}},
        "update: tensor w: expected float32 of one value or more, found float32 0x3",
    ),
    ("update", {"tensors": {"w": F32.astype(">f4")}}, "update: tensor w: expected float32 of one value or more"),
    ("features", {"ask": "x" * 65}, "features.ask: expected a name"),
    ("features", {"batch": -1}, "features.batch: expected 0 or more"),
    ("features", {"total": 1}, "features.total: expected at least the 2 samples of this batch, found 1"),
    ("features", {"sample_ids": U8[:, :15]}, "tensor sample_ids: expected uint8 2x16, found uint8 2x15"),
    ("features", {"sample_ids": U8[:0]}, "tensor sample_ids: expected uint8 0x16"),
    ("features", {"codes": np.zeros((2, 5), np.int8)}, "tensor codes: expected int8 2xTxd"),
    ("features", {"codes": np.zeros((2, 5, 4), np.uint8)}, "tensor codes: expected int8 2xTxd, found uint8 2x5x4"),
    ("features", {"codes": np.zeros((3, 5, 4), np.int8)}, "tensor codes: expected int8 2xTxd, found int8 3x5x4"),
    ("features", {"codes": np.zeros((2, 5, 0), np.int8)}, "tensor codes: expected int8 2x5x0"),
    ("features", {"sources": np.zeros((1, 4), np.uint16)}, "tensor sources: expected uint16 2xN"),
    ("features", {"labels": np.zeros(2, np.int64)}, "tensor labels: expected uint16 2, found int64 2"),
    ("features", {"codes": None}, "features: tensors: expected 'codes', found none"),
    ("scores", {"values": F32.astype(np.float64)}, "tensor values: expected float32 BxC, found float64 2x3"),
    ("scores", {"values": F32[0]}, "tensor values: expected float32 BxC, found float32 3"),
    ("scores", {"values": F32 * np.float32("nan")}, "tensor values: expected finite values, found NaN or infinity"),
    ("scores", {"batch": -1}, "scores.batch: expected 0 or more"),
    ("gradient", {"gradient": F32 * -INFINITY}, "tensor gradient: expected finite values"),
    ("gradient", {"mean_loss": float("nan")}, "gradient.mean_loss: expected a finite loss"),
    ("gradient", {"correct": 3}, "gradient.correct: expected 0 to 2, found 3"),
    ("gradient", {"count": 0}, "gradient.count: expected 1 or more"),
    ("ask_set_prototypes", {"tensors": {"values": F32}}, "tensors: expected 'classes', found none"),
    (
        "ask_set_prototypes",
        {"tensors": {"values": F32, "classes": np.zeros(3, np.uint16)}},
        "tensor classes: expected uint16 2, found uint16 3",
    ),
    ("prototypes", {"classes": (2, 0)}, "prototypes.classes: expected rising numbers of 16 bits"),
    ("prototypes", {"classes": (0, 1 << 16)}, "prototypes.classes: expected rising numbers of 16 bits"),
    ("prototypes", {"counts": (1,)}, "prototypes.counts: expected one for each of 2 classes"),
    ("prototypes", {"counts": (0, 1)}, "prototypes.counts: expected 1 or more"),
    ("prototypes", {"values": F32[:1]}, "prototypes.classes: expected as many as the 1 rows of values"),
    ("prototypes", {"values": F32 * NAN}, "tensor values: expected finite values"),
    ("chunk", {"object": "0"}, "chunk.object: expected 64 lower-case hex digits"),
    ("chunk", {"index": 2}, "chunk.index: expected 0 to 1, found 2"),
    ("chunk", {"total": 10}, "chunk.total: expected 1 to size (9), found 10"),
    ("chunk", {"data": np.zeros(0, np.uint8)}, "tensor data: expected uint8 0"),
]


@pytest.mark.parametrize(("name", "change", "text"), BROKEN)
def test_message_that_breaks_a_rule_cannot_be_built(name: str, change: dict[str, Any], text: str) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        dataclasses.replace(SAMPLES[name], **change)
    assert text in raised.value.cause and len(raised.value.cause) < 320
    assert raised.value.cure


def test_logits_and_features_answer_alike() -> None:
    sample = SAMPLES["gradient"]
    assert isinstance(sample, Gradient)
    assert dataclasses.replace(sample, gradient=np.zeros((2, 384), np.float32)).gradient.shape == (2, 384)


def test_messages_with_arrays_compare_by_identity_and_others_by_value() -> None:
    # An `==` over arrays has no single truth; the generated one would raise.
    with_arrays = (Ask, Features, Scores, Gradient, Activations, Update, PatchFeatures, Prototypes, Piece, Chunk)
    for name, message in SAMPLES.items():
        assert (dataclasses.replace(message) == message) != isinstance(message, with_arrays), name
