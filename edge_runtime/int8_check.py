"""Did the layers that were quantized really run as int8? From what a runtime says of one run, without running anything.

A file that loses int8 gives the right tokens, only slowly, so nothing but the executed kernels can tell. Running the
model and reading the runtime's own report is left to `engines`; whom to tell, to `equip`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# onnxruntime's operators that multiply int8 by int8; QLinearConv is a convolution's.
INT8_PRODUCTS = frozenset(
    {"QLinearMatMul", "MatMulIntegerToFloat", "QGemm", "MatMulInteger", "DynamicQuantizeMatMul", "QLinearConv"}
)
FLOAT_TAIL = ".tail"  # ends the name of a thin layer that is stored as int8 and meant to run in float
X86 = frozenset({"x86_64", "AMD64", "amd64", "i686", "x86"})
PLAN_TYPES = (("int8", ("int8",)), ("float16", ("fp16", "half", "float16")), ("float32", ("fp32", "float")))
OPENVINO_PRODUCTS = frozenset({"FullyConnected", "Convolution"})  # its MatMul is attention's, with no stored weight


@dataclass(frozen=True)
class Kernels:
    """Products of one run: in int8, in int8 on a kernel slower than float, and weights made float again in the run."""

    int8: int
    scalar: tuple[str, ...]
    dequantized: tuple[str, ...]


def of_onnxruntime(events: Iterable[Mapping[str, object]], machine: str) -> Kernels:
    """From the events of onnxruntime's profile of one run; `machine` is platform.machine()."""
    int8, scalar, dequantized = 0, [], []
    for event in events:
        name, arguments = str(event.get("name")), event.get("args")
        if event.get("cat") != "Node" or not name.endswith("_kernel_time") or not isinstance(arguments, dict):
            continue
        name, operator = name.removesuffix("_kernel_time"), arguments.get("op_name")
        dtype, dimensions = _first_input(arguments)
        if operator in INT8_PRODUCTS:
            # x86 has no kernel for signed inputs: the portable one is 20 times slower (int8.md 2).
            if dtype == "int8" and machine in X86:
                scalar.append(name)
            else:
                int8 += 1
        elif operator == "DequantizeLinear" and dimensions == 2 and FLOAT_TAIL not in name:
            dequantized.append(name)
    return Kernels(int8, tuple(scalar), tuple(dequantized))


def _first_input(arguments: Mapping[str, object]) -> tuple[str | None, int]:
    """dtype and number of dimensions of a node's first input."""
    inputs = arguments.get("input_type_shape")
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    if not isinstance(first, dict) or len(first) != 1:
        return None, 0
    ((dtype, shape),) = first.items()
    return str(dtype), len(shape) if isinstance(shape, list) else 0


def of_openvino(layers: Iterable[tuple[str, str, str, str]]) -> Kernels:
    """From (name, layer type, precision, kernel) of each node of OpenVINO's runtime model."""
    int8, scalar = 0, []
    for name, kind, precision, kernel in layers:
        if kind not in OPENVINO_PRODUCTS or precision not in ("i8", "u8"):
            continue
        if kernel.startswith("ref"):
            scalar.append(name)
        elif kernel.endswith(("_i8", "_u8")):  # a stored int8 weight multiplied as float says i8 and an f32 kernel
            int8 += 1
    return Kernels(int8, tuple(scalar), ())


@dataclass(frozen=True)
class PlanLayers:
    """Layers of a TensorRT plan by the type of what they read, as its inspector tells; None in `kernels` where a layer
    is many of the model's in one, of which the inspector does not tell the types."""

    by_type: dict[str, int]
    kernels: Kernels | None


def layers_of_plan(report: str | None) -> PlanLayers | None:
    """From the JSON of TensorRT's engine inspector; None where it says nothing that can be counted."""
    try:
        layers = json.loads(report or "")["Layers"]
        detailed = [layer for layer in layers if isinstance(layer, dict)]  # names alone, where details were not kept
    except (ValueError, KeyError, TypeError):
        return None
    if not detailed:
        return None
    counted, products, merged = Counter[str](), 0, False
    for layer in detailed:
        reads = {_plan_type(each) for each in layer.get("Inputs") or () if isinstance(each, dict)}
        counted["int8" if "int8" in reads else min(reads, default="none")] += 1
        kind = str(layer.get("LayerType", "")).casefold()
        products += "int8" in reads and ("gemm" in kind or "matrix" in kind or "conv" in kind)
        merged |= "ForeignNode" in str(layer.get("Name", ""))
    unknown = merged or (counted["int8"] > 0 and products == 0)  # in words of a version that nobody has read yet
    return PlanLayers(dict(sorted((+counted).items())), None if unknown else Kernels(products, (), ()))


def _plan_type(end: Mapping[str, object]) -> str:
    """The type of a tensor: of its own in TensorRT 11, at the end of "Row major Int8 format" before."""
    text = str(end.get("Datatype") or end.get("DataType") or end.get("Format/Datatype") or end.get("Format") or "")
    folded = text.casefold()
    for name, words in PLAN_TYPES:
        if any(word in folded for word in words):
            return name
    return "other"


def quantized_layers(stored: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """How many of the stored int8 weights, by name and shape, belong to linear layers that should run as int8.

    A convolution's may be stored so and run in float.
    """
    return sum(len(shape) == 2 and not name.endswith(FLOAT_TAIL) for name, shape in stored)


def int8_lost(kernels: Kernels | None, quantized: int) -> str | None:
    """One sentence when fewer layers ran as int8 than were quantized; None when none was lost, or none can tell."""
    if kernels is None or kernels.int8 >= quantized:
        return None
    text = f"{kernels.int8} of {quantized} quantized layers ran as int8: tokens are right, but slow to come"
    for names, what in (
        (kernels.scalar, "in int8 on a kernel that is slower than float"),
        (kernels.dequantized, "with weights turned to float in every run"),
    ):
        if names:
            text += f"; {len(names)} {what} ({names[0]}{', ...' if len(names) > 1 else ''})"
    return text + "; use another version of the engine, or another engine"
