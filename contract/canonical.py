"""The one text form of structured values: canonical JSON, and frozen dataclasses written to it and read from it.

What the values mean, and which of our errors a bad one is, is left to `manifest` and `codec`: they translate
`CanonicalError`.

Canonical JSON here: UTF-8, keys sorted by code point, no spaces, no escapes but the necessary ones, numbers as
`repr` writes them (the shortest text that reads back to the same float), no NaN and no infinity. Reading is strict:
a field too many, a field too few, a key given twice, `1` for `1.0` or `true` for `1` are all errors. What a field may
hold is said by its annotation alone, so a dataclass is its own schema:

    int (64 bits, signed)   float (finite)   bool   str   bytes (lower-case hex)   None   Literal["a", "b"]
    X | None   int | float | str   tuple[X, ...]   tuple[X, Y]   dict[str, X]   another frozen dataclass
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, Union

T = TypeVar("T")

INT_MAX = 2**63 - 1
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_SHOWN_CHARACTERS = 60  # of a wrong value, in an error's text


class CanonicalError(ValueError):
    """The value or the text does not have the declared form; the text says where, what was expected, what was found."""


# --- JSON text ---------------------------------------------------------------------------------------------------


def to_json(value: object) -> bytes:
    """Canonical bytes of a JSON-able value.

    Raises: CanonicalError if JSON cannot hold the value (NaN, infinity, a lone surrogate, another type).
    """
    try:
        return _ENCODER.encode(value).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CanonicalError(f"expected a value that JSON can hold: {error}") from error


def from_json(data: bytes, max_bytes: int) -> object:
    """The value that JSON bytes hold. Spaces and order of keys are free here; see `to_json` for the one true form.

    Raises: CanonicalError if the bytes are too many, not UTF-8, not JSON, or hold a key twice, NaN or infinity.
    """
    if len(data) > max_bytes:
        raise CanonicalError(f"expected at most {max_bytes} bytes of JSON, found {len(data)}")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except CanonicalError:
        raise
    except (ValueError, RecursionError) as error:
        raise CanonicalError(f"expected JSON text: {error}") from error
    if b"\\u" in data:
        to_json(value)  # an escape can smuggle in half a surrogate pair, which no UTF-8 text can hold
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CanonicalError(f"expected every key once, found {shown(twice)} more than once")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # "1e999" as well as the words NaN and Infinity
        raise CanonicalError(f"expected a finite number, found {text[:_SHOWN_CHARACTERS]}")
    return value


# Made once: building them takes longer than most of what they encode and decode.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


# --- dataclasses -------------------------------------------------------------------------------------------------


def encode(value: object, omit: Collection[str] = ()) -> dict[str, object]:
    """JSON-able form of a frozen dataclass, checked against its annotations; `omit` names fields to leave out.

    Raises: CanonicalError if a field does not hold what it declares.
    """
    return _write_fields(value, type(value), "", omit)


def decode(cls: type[T], value: object, path: str = "") -> T:
    """Instance of the frozen dataclass `cls` from its JSON-able form; `path` says in errors where that stands.

    Raises: CanonicalError; whatever the dataclass itself raises for a value that it refuses.
    """
    return cls(**decode_fields(cls, value, path))


def decode_document(cls: type[T], data: bytes, max_bytes: int, kind: str) -> T:
    """Instance of the frozen dataclass `cls` from a written document of this kind, version 1.

    Raises: CanonicalError; whatever the dataclass itself raises for a value that it refuses.
    """
    found = from_json(data, max_bytes)
    if not isinstance(found, dict) or (found.pop("schema_version", None), found.pop("kind", None)) != (1, kind):
        raise CanonicalError(f"expected a document of kind {kind}, version 1")
    return decode(cls, found)


def decode_fields(cls: Any, value: object, path: str = "", omit: Collection[str] = ()) -> dict[str, Any]:
    """Checked constructor arguments of `cls` from its JSON-able form, all but those in `omit`.

    Raises: CanonicalError.
    """
    if type(value) is not dict:
        raise _mismatch(path, f"an object ({cls.__name__})", value)
    forms = _forms(cls, frozenset(omit))
    if value.keys() != forms.keys():
        unknown = sorted(value.keys() - forms.keys())
        if unknown:
            raise CanonicalError(f"{_at(path)}expected no other fields of {cls.__name__}, found {shown(unknown[0])}")
        missing = min(forms.keys() - value.keys())
        raise CanonicalError(f"{_at(path)}expected the field {missing!r} of {cls.__name__}, found none")
    return {name: form.read(value[name], _join(path, name)) for name, form in forms.items()}


class _Form(NamedTuple):
    """How values of one declared type are written to their JSON-able form and read back; both check."""

    write: Callable[[Any, str], object]
    read: Callable[[Any, str], Any]


@cache
def _forms(cls: Any, omit: frozenset[str]) -> dict[str, _Form]:
    """Form of every field but those in `omit`: one that is always omitted (an array) has none."""
    hints = typing.get_type_hints(cls)
    return {field.name: _form(hints[field.name]) for field in dataclasses.fields(cls) if field.name not in omit}


def _write_fields(value: Any, cls: Any, path: str, omit: Collection[str] = ()) -> dict[str, object]:
    forms = _forms(cls, frozenset(omit))
    if type(value) is not cls:
        raise _mismatch(path, cls.__name__, value)
    return {name: form.write(getattr(value, name), _join(path, name)) for name, form in forms.items()}


@cache
def _form(kind: Any) -> _Form:
    if kind in _SCALARS:
        return _SCALARS[kind]
    if dataclasses.is_dataclass(kind):
        cls: Any = kind
        return _Form(lambda value, path: _write_fields(value, cls, path), lambda value, path: decode(cls, value, path))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is dict and arguments[0] is str:
        return _dict(_form(arguments[1]))
    raise TypeError(f"no canonical form for fields of type {kind!r}")


# --- one form per kind of annotation -----------------------------------------------------------------------------


def _exactly(kind: type[Any]) -> Callable[[Any, str], Any]:
    def check(value: Any, path: str) -> Any:
        if type(value) is not kind:  # not isinstance: True is no 1
            raise _mismatch(path, kind.__name__, value)
        return value

    return check


def _int(value: Any, path: str) -> int:
    if type(value) is not int:
        raise _mismatch(path, "int", value)
    if not -INT_MAX <= value <= INT_MAX:
        raise _mismatch(path, "an int of 64 bits", value)
    return value


def _write_float(value: Any, path: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _mismatch(path, "float", value)
    return _read_float(float(_int(value, path) if isinstance(value, int) else value), path)


def _read_float(value: Any, path: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise _mismatch(path, "a finite float", value)
    return value


def _write_bytes(value: Any, path: str) -> str:
    return typing.cast(bytes, _exactly(bytes)(value, path)).hex()


def _read_bytes(value: Any, path: str) -> bytes:
    if type(value) is not str or not _HEX.fullmatch(value):
        raise _mismatch(path, "bytes in lower-case hex", value)
    return bytes.fromhex(value)


_SCALARS: dict[Any, _Form] = {
    int: _Form(_int, _int),
    float: _Form(_write_float, _read_float),
    bool: _Form(_exactly(bool), _exactly(bool)),
    str: _Form(_exactly(str), _exactly(str)),
    bytes: _Form(_write_bytes, _read_bytes),
    type(None): _Form(_exactly(type(None)), _exactly(type(None))),
}


def _literal(allowed: Sequence[str]) -> _Form:
    def check(value: Any, path: str) -> Any:
        if type(value) is not str or value not in allowed:
            raise _mismatch(path, "one of " + ", ".join(allowed), value)
        return value

    return _Form(check, check)


def _union(options: Sequence[Any]) -> _Form:
    forms = {option: _form(option) for option in options}
    others = [option for option in options if option is not type(None)]
    names = ["null" if option is type(None) else getattr(option, "__name__", str(option)) for option in options]
    expected = " or ".join(names)

    def choose(value: Any, path: str) -> _Form:
        form = forms.get(type(value)) or (forms[others[0]] if len(others) == 1 else None)
        if form is None:
            raise _mismatch(path, expected, value)
        return form

    return _Form(
        lambda value, path: choose(value, path).write(value, path),
        lambda value, path: choose(value, path).read(value, path),
    )


def _tuple(arguments: Sequence[Any]) -> _Form:
    open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
    forms = [_form(argument) for argument in arguments[: 1 if open_ended else None]]

    def pairs(value: Any, kind: type[Any], path: str) -> list[tuple[Any, _Form, str]]:
        if type(value) is not kind:
            raise _mismatch(path, kind.__name__, value)
        if not open_ended and len(value) != len(forms):
            raise _mismatch(path, f"{len(forms)} values", value)
        own = forms * len(value) if open_ended else forms
        return [(item, form, f"{path}[{index}]") for index, (item, form) in enumerate(zip(value, own, strict=True))]

    return _Form(
        lambda value, path: [form.write(item, where) for item, form, where in pairs(value, tuple, path)],
        lambda value, path: tuple(form.read(item, where) for item, form, where in pairs(value, list, path)),
    )


def _dict(item: _Form) -> _Form:
    def walk(value: Any, path: str, step: Callable[[Any, str], Any]) -> dict[str, Any]:
        if type(value) is not dict:
            raise _mismatch(path, "an object", value)
        return {_exactly(str)(key, path): step(value[key], _join(path, key)) for key in value}

    return _Form(
        lambda value, path: walk(value, path, item.write),
        lambda value, path: walk(value, path, item.read),
    )


def _mismatch(path: str, expected: str, found: object) -> CanonicalError:
    return CanonicalError(f"{_at(path)}expected {expected}, found {type(found).__name__} {shown(found)}")


def _at(path: str) -> str:
    return f"{path}: " if path else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shown(value: object) -> str:
    """Short text of a value that may be hostile; a huge int or a deep list never reaches `repr`."""
    if isinstance(value, int) and abs(value) > INT_MAX:
        return "of more than 64 bits"
    if isinstance(value, (str, bytes)):
        value = value[: _SHOWN_CHARACTERS + 1]
    elif isinstance(value, (list, tuple, dict)):
        return f"of {len(value)} items"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
