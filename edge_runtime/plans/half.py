"""The float16-typed form of a parsed network: half precision wherever nothing overflows, from the very same scales.

TensorRT 11 has no flags for precision: the types in the network decide. Rather than a second ONNX file, whose weights
would need the noise of this device a second time, the network that was parsed from the float32-typed one gets its casts
here. LayerNorm and softmax stay float32 (EN-04), and so do the scales of Q and DQ, which half precision would round;
what DQ gives is float16. Inputs and outputs keep their types, so that both plans are run alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXACT = ("NORMALIZATION", "SOFTMAX")  # sums over a token: these overflow first
_UNTYPED = ("CONSTANT", "SHAPE", "CAST", "QUANTIZE")  # read no float, or take any


def to_half(library: Any, network: Any) -> list[NDArray[np.float16]]:
    """Change `network` in place; the arrays returned must live until it is built."""
    half, single = library.float16, library.float32
    casts: dict[tuple[str, str], Any] = {}
    kept: list[NDArray[np.float16]] = []

    def cast(tensor: Any, dtype: Any) -> Any:
        place = (tensor.name, str(dtype))
        if place not in casts:
            casts[place] = network.add_cast(tensor, dtype).get_output(0)
        return casts[place]

    for number in range(network.num_layers):  # of the layers before: casts are added behind them
        layer = network.get_layer(number)
        kind = layer.type.name
        if kind in _UNTYPED:
            continue
        if kind == "DEQUANTIZE":
            layer.__class__ = library.IDequantizeLayer  # the binding's way to a layer's own attributes
            layer.to_type = half
            continue
        wanted = single if kind in _EXACT else half
        for end in range(layer.num_inputs):
            tensor = layer.get_input(end)
            if tensor is not None and tensor.dtype in (half, single) and tensor.dtype != wanted:
                layer.set_input(end, cast(tensor, wanted))
        if kind == "CONVOLUTION":
            layer.__class__ = library.IConvolutionLayer
            kept += _halve_stored(library, layer)
    for number in range(network.num_outputs):
        _give_single(library, network, network.get_output(number))
    return kept


def _halve_stored(library: Any, layer: Any) -> list[NDArray[np.float16]]:
    """A convolution keeps bias and float weights as arrays of its own, not as tensors."""
    kept = []
    for field in ("kernel", "bias"):
        stored = getattr(layer, field)
        values = np.asarray(stored if isinstance(stored, np.ndarray) else stored.numpy())
        if values.size and values.dtype == np.float32:
            kept.append(np.ascontiguousarray(values, np.float16))
            setattr(layer, field, library.Weights(kept[-1]))
    return kept


def _give_single(library: Any, network: Any, tensor: Any) -> None:
    if tensor.dtype != library.float16:
        return
    name = tensor.name
    network.unmark_output(tensor)
    tensor.name = f"{name}.half"
    single = network.add_cast(tensor, library.float32).get_output(0)
    single.name = name
    network.mark_output(single)
