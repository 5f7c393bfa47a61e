"""Where stored arrays lie in a serialized ONNX file, by walking the protobuf wire format.

Which of them a device may patch is left to the manifest's records, made here from the names that onnx_qdq gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from contract.errors import ExportError
from contract.manifest import WeightRecord

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.dims, .name, .raw_data
_GRAPH, _INITIALIZER, _DIMS, _NAME, _RAW_DATA = 7, 5, 1, 8, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class StoredArray:
    """One initializer's raw bytes: data[offset : offset + size_bytes]."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]


def stored_arrays(data: bytes | memoryview) -> dict[str, StoredArray]:
    """Every initializer with raw data, by name."""
    view = memoryview(data)
    found: dict[str, StoredArray] = {}
    for number, start, end in _fields(view, 0, len(view)):
        if number == _GRAPH:
            for inner, tensor_start, tensor_end in _fields(view, start, end):
                if inner == _INITIALIZER:
                    name, array = _tensor(view, tensor_start, tensor_end)
                    if array is not None:
                        found[name] = array
    return found


def weight_records(data: bytes | memoryview, shifts: Mapping[str, str | None]) -> tuple[WeightRecord, ...]:
    """Records of all INT8 weights of a file in file order.

    `shifts` maps a shifted layer to the stored array that holds its shift (K,).

    Raises ExportError when an array that a record needs is not stored raw.
    """
    arrays = stored_arrays(data)
    records = []
    for name, codes in arrays.items():
        if not name.endswith(".weight_codes"):
            continue
        layer = name.removesuffix(".weight_codes")
        shift = shifts.get(layer)
        records.append(
            WeightRecord(
                name=layer,
                shape=codes.shape,
                channel_axis=1 if len(codes.shape) == 2 else 0,
                codes_offset=codes.offset,
                scales_offset=_offset(arrays, f"{layer}.weight_scales"),
                shift_offset=None if shift is None else _offset(arrays, shift),
                bias_offset=None if shift is None else _offset(arrays, f"{layer}.bias"),
            )
        )
    return tuple(records)


def _offset(arrays: Mapping[str, StoredArray], name: str) -> int:
    if name not in arrays:
        raise ExportError(f"expected the array {name} as raw data in the ONNX file, found none", "report this model")
    return arrays[name].offset


def _tensor(view: memoryview, start: int, end: int) -> tuple[str, StoredArray | None]:
    name, array, shape = "", None, []
    for number, value_start, value_end in _fields(view, start, end):
        if number == _NAME:
            name = bytes(view[value_start:value_end]).decode()
        elif number == _RAW_DATA:
            array = (value_start, value_end - value_start)
        elif number == _DIMS:
            shape.extend(_dims(view, value_start, value_end))
    return name, None if array is None else StoredArray(*array, tuple(shape))


def _dims(view: memoryview, start: int, end: int) -> Iterator[int]:
    """Dims come one by one or packed; both are varints in [start, end)."""
    while start < end:
        value, start = _varint(view, start)
        yield value


def _fields(view: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of each field's value in a message."""
    while start < end:
        tag, start = _varint(view, start)
        kind = tag & 7
        if kind == _BYTES:
            size, start = _varint(view, start)
        elif kind == _VARINT:
            size = _varint(view, start)[1] - start
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ExportError(f"expected a protobuf field, found wire type {kind}", "the ONNX file is damaged")
        yield tag >> 3, start, start + size
        start += size


def _varint(view: memoryview, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[start]
        value |= (byte & 0x7F) << shift
        start += 1
        if byte < 0x80:
            return value, start
        shift += 7
