from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.canonical import CanonicalError, decode, decode_fields, encode, from_json, shown, to_json

LARGEST = 1 << 16


@dataclass(frozen=True)
class Inner:
    steps: tuple[float, ...]
    grid: tuple[int, int]


@dataclass(frozen=True)
class Outer:
    count: int
    scale: float
    forced: bool
    name: str
    nonce: bytes
    mode: Literal["center", "squash"]
    limit: float | None
    inner: Inner
    parts: tuple[Inner, ...]
    parameters: dict[str, int | float | str]


VALUE = Outer(
    count=3,
    scale=0.1,
    forced=True,
    name="äpfel",
    nonce=b"\x00\xff",
    mode="center",
    limit=None,
    inner=Inner((1.0, 2.5), (2, 3)),
    parts=(Inner((), (0, 0)),),
    parameters={"seed": 1, "kappa": 1.0, "split": "train"},
)


def test_dataclass_survives_text() -> None:
    assert decode(Outer, from_json(to_json(encode(VALUE)), LARGEST)) == VALUE


def test_canonical_text_is_sorted_dense_utf8() -> None:
    assert to_json({"b": 1, "a": [True, None, "ä", 1e22, 0.1]}) == '{"a":[true,null,"ä",1e+22,0.1],"b":1}'.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_reading_canonical_text_and_writing_it_again_changes_nothing(value: object) -> None:
    try:
        text = to_json(value)
    except CanonicalError:  # st.text() may hold half a surrogate pair
        return
    assert to_json(from_json(text, 1 << 20)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_to_the_same_bits(value: float) -> None:
    again = from_json(to_json(value), LARGEST)
    assert isinstance(again, float)
    assert math.copysign(1, again) == math.copysign(1, value) and again == value


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise_canonical_error(data: bytes) -> None:
    with contextlib.suppress(CanonicalError):
        from_json(data, LARGEST)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"a":1,"a":2}', "'a' more than once"),
        (b'{"a":{"b":1,"b":1}}', "'b' more than once"),
        (b"NaN", "finite number, found NaN"),
        (b"[-Infinity]", "finite number, found -Infinity"),
        (b"1e999", "finite number, found 1e999"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'{"\\udfff":1}', "surrogates not allowed"),
        (b'"\xff"', "JSON text"),
        (b"\xef\xbb\xbf{}", "JSON text"),
        (b"{} {}", "JSON text"),
        (b"", "JSON text"),
        (b"{'a':1}", "JSON text"),
        (b"[" * 60000, "JSON text"),
        (b"1" * 5000, "JSON text"),
        (b" " * (LARGEST + 1), f"at most {LARGEST} bytes"),
    ],
)
def test_text_that_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        from_json(data, LARGEST)
    assert text in str(raised.value)
    assert len(str(raised.value)) < 400


def test_escaped_surrogate_pair_is_one_character() -> None:
    assert from_json(b'"\\ud83d\\ude00"', LARGEST) == "\U0001f600"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"raw", "\ud800"])
def test_values_without_a_text_are_refused(value: object) -> None:
    with pytest.raises(CanonicalError, match="that JSON can hold"):
        to_json(value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"count": 3.0}, "count: expected int, found float 3.0"),
        ({"count": True}, "count: expected int, found bool True"),
        ({"count": 2**63}, "count: expected an int of 64 bits"),
        ({"scale": 1}, "scale: expected a finite float, found int 1"),
        ({"scale": "1.0"}, "scale: expected a finite float, found str '1.0'"),
        ({"forced": 1}, "forced: expected bool, found int 1"),
        ({"name": None}, "name: expected str, found NoneType None"),
        ({"nonce": "0"}, "nonce: expected bytes in lower-case hex, found str '0'"),
        ({"nonce": "AB"}, "nonce: expected bytes in lower-case hex"),
        ({"mode": "stretch"}, "mode: expected one of center, squash, found str 'stretch'"),
        ({"mode": []}, "mode: expected one of center, squash"),
        ({"limit": "no"}, "limit: expected a finite float"),
        ({"inner": 1}, "inner: expected an object (Inner), found int 1"),
        ({"inner": {"steps": [1], "grid": [1, 2]}}, "inner.steps[0]: expected a finite float, found int 1"),
        ({"inner": {"steps": [], "grid": [1]}}, "inner.grid: expected 2 values, found list of 1 items"),
        ({"inner": {"steps": []}}, "inner: expected the field 'grid' of Inner, found none"),
        ({"parts": {}}, "parts: expected list, found dict of 0 items"),
        ({"parts": [{"steps": [], "grid": [1, 2], "x": 0}]}, "parts[0]: expected no other fields of Inner, found 'x'"),
        ({"parameters": {"a": None}}, "parameters.a: expected int or float or str, found NoneType None"),
        ({"parameters": {"a": True}}, "parameters.a: expected int or float or str, found bool True"),
        ({"parameters": []}, "parameters: expected an object"),
        ({"extra": 1}, "expected no other fields of Outer, found 'extra'"),
        ({"name": "x" * 1000, "count": "y" * 100000}, "count: expected int, found str 'yyy"),
    ],
)
def test_document_that_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CanonicalError) as raised:
        decode(Outer, {**encode(VALUE), **change})
    assert text in str(raised.value)
    assert len(str(raised.value)) < 200


def test_missing_field_is_refused_even_where_it_has_a_default() -> None:
    @dataclass(frozen=True)
    class Defaulted:
        count: int = 1

    with pytest.raises(CanonicalError, match="expected the field 'count'"):
        decode(Defaulted, {})


@pytest.mark.parametrize(
    "change",
    [
        {"count": np.int64(3)},
        {"count": 2**70},
        {"scale": float("nan")},
        {"scale": True},
        {"scale": 10**400},
        {"parts": [VALUE.inner]},
        {"nonce": bytearray(2)},
        {"inner": None},
        {"parameters": {1: 1}},
        {"mode": "other"},
    ],
)
def test_value_that_breaks_its_own_annotation_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(CanonicalError):
        encode(dataclasses.replace(VALUE, **change))


def test_whole_numbers_in_float_fields_are_written_as_floats() -> None:
    written = to_json(encode(dataclasses.replace(VALUE, scale=1, limit=np.float64(2))))
    assert json.loads(written)["scale"] == 1.0 and b'"scale":1.0' in written and b'"limit":2.0' in written


def test_omitted_fields_are_neither_written_nor_expected() -> None:
    fields = encode(VALUE, omit=("inner", "parts"))
    assert "inner" not in fields
    assert decode_fields(Outer, fields, omit=("inner", "parts"))["count"] == 3


def test_annotation_without_a_form_is_a_fault_of_the_program() -> None:
    @dataclass(frozen=True)
    class Wrong:
        values: list[int]

    with pytest.raises(TypeError, match="no canonical form"):
        encode(Wrong([1]))


def test_shown_values_are_short() -> None:
    deep: list[Any] = []
    for _ in range(10000):
        deep = [deep]
    assert shown(deep) == "of 1 items"
    assert shown(10**100) == "of more than 64 bits"
    assert len(shown("x" * 10**6)) < 70
