"""A small quantized ONNX file written by hand, so that the onnxruntime engine is tested where onnx is not installed.

Only as much of protobuf and of ONNX's schema as the file needs.
"""

from __future__ import annotations

import numpy as np

from contract.manifest import WeightRecord

FLOAT, INT8, INT64 = 1, 3, 7
DTYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.int8): INT8, np.dtype(np.int64): INT64}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: np.ndarray) -> bytes:
    dims = b"".join(number(1, size) for size in array.shape)
    return dims + number(2, DTYPES[array.dtype]) + text(8, name) + text(9, array.tobytes())


def value_info(name: str, shape: tuple[int | str, ...], kind: int = FLOAT) -> bytes:
    dims = b"".join(text(1, number(1, size) if isinstance(size, int) else text(2, size)) for size in shape)
    return text(1, name) + text(2, text(1, number(1, kind) + text(2, dims)))


def node(operator: str, inputs: list[str], output: str, axis: int | None = None) -> bytes:
    ends = b"".join(text(1, each) for each in inputs) + text(2, output)
    attribute = b"" if axis is None else text(5, text(1, "axis") + number(3, axis) + number(20, 2))
    return ends + text(3, output) + text(4, operator) + attribute


def linear_decoder(layout: tuple[int, int], weight: np.ndarray, offset: np.ndarray, size: tuple[int, int]) -> bytes:
    """codes (1, S, d) int8 -> picture (1, 3, h, w): clip(codes @ weight + offset), weight (S d, 3 h w)."""
    initializers = {
        "one": np.array(1.0, np.float32),
        "zero": np.array(0, np.int8),  # left out, onnxruntime's own rewriting makes another product of it
        "row": np.array([1, layout[0] * layout[1]], np.int64),
        "weight": weight.astype(np.float32),
        "offset": offset.astype(np.float32),
        "low": np.array(0.0, np.float32),
        "high": np.array(1.0, np.float32),
        "shape": np.array([1, 3, *size], np.int64),
    }
    nodes = [
        node("DequantizeLinear", ["codes", "one", "zero"], "values"),
        node("Reshape", ["values", "row"], "flat"),
        node("MatMul", ["flat", "weight"], "product"),
        node("Add", ["product", "offset"], "sum"),
        node("Clip", ["sum", "low", "high"], "clipped"),
        node("Reshape", ["clipped", "shape"], "picture"),
    ]
    graph = b"".join(text(1, each) for each in nodes) + text(2, "decoder")
    graph += b"".join(text(5, tensor(name, array)) for name, array in initializers.items())
    graph += text(11, value_info("codes", (1, *layout), INT8)) + text(12, value_info("picture", (1, 3, *size)))
    return number(1, 10) + text(7, graph) + text(8, text(1, "") + number(2, 20))


def quantized_model(
    size: int = 16, grid: tuple[int, int] = (2, 2), dim: int = 8, seed: int = 0, masked: bool = False
) -> tuple[bytes, WeightRecord]:
    """images (batch, 3, size, size) -> tokens (batch, N, dim): one int8 linear layer on slices of the picture.

    Masked: of one image, (1, 3, size, size) with keep (1, K) -> (1, K, dim).
    """
    rng = np.random.default_rng(seed)
    patches = grid[0] * grid[1]
    inputs = 3 * size * size // patches
    codes = np.clip(np.rint(rng.normal(0, 40, (inputs, dim))), -127, 127).astype(np.int8)
    scales = rng.uniform(0.005, 0.02, dim).astype(np.float32)
    initializers = {
        "shape": np.array([0, patches, inputs], np.int64),
        "x_scale": np.array(1 / 127, np.float32),
        "x_zero": np.array(0, np.int8),
        "codes": codes,
        "scales": scales,
        "zeros": np.zeros(dim, np.int8),
    }
    if masked:
        initializers["row"] = np.array([-1], np.int64)
        choice = [node("Reshape", ["keep", "row"], "places"), node("Gather", ["slices", "places"], "rows", axis=1)]
    else:
        choice = [node("Identity", ["slices"], "rows")]
    nodes = [
        node("Reshape", ["images", "shape"], "slices"),
        *choice,
        node("QuantizeLinear", ["rows", "x_scale", "x_zero"], "rows_q"),
        node("DequantizeLinear", ["rows_q", "x_scale", "x_zero"], "rows_d"),
        node("DequantizeLinear", ["codes", "scales", "zeros"], "weight", axis=1),
        node("MatMul", ["rows_d", "weight"], "tokens"),
    ]
    graph = b"".join(text(1, each) for each in nodes) + text(2, "front")
    graph += b"".join(text(5, tensor(name, array)) for name, array in initializers.items())
    graph += text(11, value_info("images", ("batch", 3, size, size)))
    if masked:
        graph += text(11, value_info("keep", ("batch", "kept"), INT64))
    graph += text(12, value_info("tokens", ("batch", "kept" if masked else patches, dim)))
    model = number(1, 10) + text(7, graph) + text(8, text(1, "") + number(2, 20))
    if masked:
        model += text(14, text(1, "patches") + text(2, str(patches)))
    offsets = model.index(codes.tobytes()), model.index(scales.tobytes())
    return model, WeightRecord("linear", codes.shape, 1, *offsets, None, None)
