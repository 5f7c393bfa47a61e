from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from contract.errors import GateError
from exporter.onnx_check import Expected, check_file
from exporter.quantize import linear_layers
from tests.exporter import tiny
from tests.exporter.conftest import Graphs


def _expected(graphs: Graphs, opset: int = 20) -> Expected:
    return Expected(opset, tiny.SHAPE, (17, 48), 4, tuple(linear_layers(graphs.frontend)))


def test_sound_files_pass(graphs: Graphs) -> None:
    check_file(graphs.int8_model.SerializeToString(), _expected(graphs))
    check_file(graphs.float_model.SerializeToString(), Expected(20, tiny.SHAPE, (17, 48), 4, ()))


def test_qu_02_every_zero_point_is_int8_and_zero(graphs: Graphs) -> None:
    arrays = {each.name: numpy_helper.to_array(each) for each in graphs.int8_model.graph.initializer}
    pairs = [node for node in graphs.int8_model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(pairs) == 3 * 8 + 1
    for node in pairs:
        zero = arrays[node.input[2]]
        assert zero.dtype == np.int8 and not zero.any()


def _array(model: ModelProto, name: str) -> TensorProto:
    return next(each for each in model.graph.initializer if each.name == name)


def _node(model: ModelProto, name: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.name == name)


def _unsigned(model: ModelProto) -> None:
    _array(model, "blocks.0.mlp.fc2.input_zero_point").CopyFrom(
        numpy_helper.from_array(np.array(128, np.uint8), "blocks.0.mlp.fc2.input_zero_point")
    )


def _asymmetric(model: ModelProto) -> None:
    _array(model, "blocks.0.mlp.fc2.input_zero_point").raw_data = b"\x05"


def _no_zero_point(model: ModelProto) -> None:
    del _node(model, "blocks.1.attn.qkv.quantize_input").input[2]
    del _node(model, "blocks.1.attn.qkv.dequantize_input").input[2]


def _shared(model: ModelProto) -> None:
    """The pair of fc1 also feeds qkv: onnxruntime would run both in float."""
    _node(model, "blocks.1.attn.qkv").input[0] = "blocks.0.attn.qkv.input"


def _float_layer(model: ModelProto) -> None:
    weight = numpy_helper.from_array(np.zeros((48, 144), np.float32), "plain")
    model.graph.initializer.append(weight)
    _node(model, "blocks.0.attn.qkv").input[1] = "plain"


def _fixed_batch(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def _second_file(model: ModelProto) -> None:
    array = _array(model, "pos_embed")
    array.ClearField("raw_data")
    array.data_location = TensorProto.EXTERNAL
    array.external_data.add(key="location", value="front.onnx.data")


def _infinite_scale(model: ModelProto) -> None:
    _array(model, "blocks.0.attn.qkv.input_scale").raw_data = np.float32(np.inf).tobytes()


def _zero_scale(model: ModelProto) -> None:
    _array(model, "blocks.0.attn.qkv.weight_scales").raw_data = np.zeros(144, np.float32).tobytes()


def _decomposed_norm(model: ModelProto) -> None:
    node = next(each for each in model.graph.node if each.op_type == "LayerNormalization")
    place = list(model.graph.node).index(node)
    source, output = node.input[0], node.output[0]
    model.graph.node.insert(place, helper.make_node("ReduceMean", [source], ["mean"], name="mean_of_norm"))
    model.graph.node.insert(place + 1, helper.make_node("Sub", [source, "mean"], [output], name="centre"))
    model.graph.node.remove(node)


def _foreign_operator(model: ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


FAULTS: dict[str, tuple[Callable[[ModelProto], None], str]] = {
    "unsigned": (_unsigned, "zero point|UINT8|tensor"),
    "asymmetric": (_asymmetric, r"zero point of blocks\.0\.mlp\.fc2\.\w+ must be int8 and 0"),
    "no zero point": (_no_zero_point, r"blocks\.1\.attn\.qkv\.quantize_input must have a stored zero point"),
    "shared pair": (_shared, r"blocks\.0\.attn\.qkv\.dequantize_input must have one user, found 2"),
    "float layer": (_float_layer, r"blocks\.0\.attn\.qkv must multiply INT8 by INT8"),
    "fixed batch": (_fixed_batch, "batch size of images is fixed"),
    "second file": (_second_file, "another file|should be stored in front.onnx.data"),
    "infinite scale": (_infinite_scale, "scales of blocks.0.attn.qkv"),
    "zero scale": (_zero_scale, "scales of blocks.0.attn.qkv"),
    "decomposed norm": (_decomposed_norm, "expected 4 LayerNormalization nodes, found 3"),
    "foreign operator": (_foreign_operator, "expected opset 20 alone"),
}


@pytest.mark.parametrize(("break_it", "said"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_refused_by_name(graphs: Graphs, break_it: Callable[[ModelProto], None], said: str) -> None:
    model = ModelProto()
    model.CopyFrom(graphs.int8_model)
    break_it(model)
    with pytest.raises(GateError, match=said):
        check_file(model.SerializeToString(), _expected(graphs))


def test_another_opset_than_asked_for_is_refused(graphs: Graphs) -> None:
    with pytest.raises(GateError, match="expected opset 19"):
        check_file(graphs.int8_model.SerializeToString(), _expected(graphs, opset=19))
