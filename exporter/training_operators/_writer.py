"""ONNX nodes in the making, and the table that says how each operator of torch becomes some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch.fx import Node

TYPES = {
    torch.float32: (TensorProto.FLOAT, np.float32), torch.int64: (TensorProto.INT64, np.int64),
    torch.bool: (TensorProto.BOOL, np.bool_), torch.int32: (TensorProto.INT32, np.int32),
    torch.float64: (TensorProto.DOUBLE, np.float64),
}  # fmt: skip


class Writer:
    """ONNX nodes and small constants in the making; `names` says what an fx node's results are called."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], TensorProto] = {}
        self.names: dict[Node, Any] = {}
        self._count = 0

    def emit(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: object) -> Any:
        """Append a node; its one output's name, or a tuple of names."""
        names = []
        for _ in range(outputs):
            names.append(f"v{self._count}")
            self._count += 1
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def constant(self, values: object, dtype: Any = np.int64) -> str:
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, f"c{len(self.constants)}")
        return self.constants[key].name

    def of(self, node: Node) -> str:
        return self.names[node]

    def as_tensor(self, value: object, dtype: torch.dtype) -> str:
        """A tensor, a number or a size as an operand of the given type."""
        code, kind = TYPES[dtype]
        if not isinstance(value, Node):
            return self.constant(value, kind)
        name = self.of(value)
        found = value.meta["val"]
        if not isinstance(found, torch.Tensor):  # a size: one-dimensional here
            name = self.emit("Squeeze", [name, self.constant([0])])
            found_dtype = torch.int64
        else:
            found_dtype = found.dtype
        return name if found_dtype == dtype else self.emit("Cast", [name], to=code)

    def sizes(self, sizes: Sequence[object]) -> str:
        """A shape as one int64 tensor."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        parts = [self.of(size) if isinstance(size, Node) else self.constant([size]) for size in sizes]
        return self.emit("Concat", parts, axis=0) if len(parts) > 1 else parts[0]


Rule = Callable[[Writer, Node], Any]
RULES: dict[object, Rule] = {}


def rule(*targets: object) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return add


def value_of(node: Node) -> torch.Tensor:
    return node.meta["val"]


def argument(node: Node, place: int, default: object = None) -> Any:
    return node.args[place] if len(node.args) > place else default


def axes_of(axes: object, rank: int) -> list[int]:
    return [axis % rank for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]


def backwards(w: Writer, name: str, axes: Sequence[int]) -> str:
    """A tensor read from its ends along these axes."""
    ends = [[-1] * len(axes), [np.iinfo(np.int64).min] * len(axes), list(axes), [-1] * len(axes)]
    return w.emit("Slice", [name, *map(w.constant, ends)]) if axes else name
