from dataclasses import dataclass

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import numpy_helper
from torch import nn

from exporter.onnx_check import Expected, check_file
from exporter.onnx_graph import drop_empty_pads, export_float, fold_weight_transposes, inference_mode
from exporter.quantize import linear_layers
from exporter.runtime import open_session, run_tokens
from exporter.split import split_model
from tests.exporter import tiny
from tests.exporter.conftest import Graphs


@pytest.mark.parametrize("kind", ["float_model", "int8_model"])
def test_ex_01_the_batch_size_is_free(graphs: Graphs, kind: str) -> None:
    model = getattr(graphs, kind)
    for end in (*model.graph.input, *model.graph.output):
        assert end.type.tensor_type.shape.dim[0].dim_param
    session = open_session(model.SerializeToString(), 1)
    whole = run_tokens(session, graphs.inputs)
    assert not np.allclose(whole[0], whole[1])  # different pictures, different tokens
    for size in (1, 3, 5):
        tokens = run_tokens(session, graphs.inputs[:size])
        assert tokens.shape == (size, 17, 48)
        if kind == "float_model":
            np.testing.assert_allclose(tokens, graphs.tokens[:size], atol=1e-4)
        else:  # a code at the edge may round either way
            assert np.abs(tokens - whole[:size]).mean() < 0.01


@dataclass(frozen=True)
class Traced:
    """A frontend with equal blocks and live dropout, handed over in training mode, and what came of it."""

    frontend: nn.Module
    model: onnx.ModelProto
    expected: np.ndarray  # of two images, in inference mode


@pytest.fixture(scope="module")
def traced_in_training_mode() -> Traced:
    torch.manual_seed(0)
    rates = {"proj_drop_rate": 0.5, "pos_drop_rate": 0.5, "attn_drop_rate": 0.5, "drop_path_rate": 0.5}
    model = timm.create_model(tiny.MODEL, **{**tiny.ARGS, **rates})
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())
    frontend, _ = split_model(model, 2)
    with inference_mode(frontend):
        expected = frontend(tiny.images(2)).numpy()
    model.train()
    model.blocks[0].mlp.eval()  # one part in another mode than the rest
    return Traced(frontend, export_float(frontend, tiny.SHAPE, 20), expected)


def test_ex_02_a_model_in_training_mode_is_exported_for_inference_and_given_back(
    traced_in_training_mode: Traced,
) -> None:
    frontend = traced_in_training_mode.frontend
    assert frontend.blocks[0].attn.training and not frontend.blocks[0].mlp.training
    assert all(each.fused_attn for each in frontend.modules() if hasattr(each, "fused_attn"))
    session = open_session(traced_in_training_mode.model.SerializeToString(), 1)
    first, second = (run_tokens(session, tiny.images(2).numpy()) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, traced_in_training_mode.expected, atol=1e-4)


def test_equal_layers_do_not_share_storage(traced_in_training_mode: Traced) -> None:
    """A fresh model's biases are all zero, which the tracer stores once; noise must reach one layer alone."""
    names = [each.name for each in traced_in_training_mode.model.graph.initializer]
    assert len(names) == len(set(names))
    layers = linear_layers(traced_in_training_mode.frontend)
    assert {f"{name}.{part}" for name in layers for part in ("weight", "bias")} <= set(names)


def test_modes_come_back_after_an_error_too() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train()
    with pytest.raises(RuntimeError), inference_mode(module):
        raise RuntimeError
    assert module.training and module[0].training


def test_every_linear_layer_owns_its_weight_and_bias(graphs: Graphs) -> None:
    arrays = {each.name: numpy_helper.to_array(each) for each in graphs.float_model.graph.initializer}
    for name, layer in linear_layers(graphs.frontend).items():
        np.testing.assert_array_equal(arrays[f"{name}.weight"], layer.weight.detach().numpy().T)
        np.testing.assert_array_equal(arrays[f"{name}.bias"], layer.bias.detach().numpy())
    users = [name for node in graphs.float_model.graph.node for name in node.input]
    assert all(
        users.count(f"{name}.{part}") == 1 for name in linear_layers(graphs.frontend) for part in ("weight", "bias")
    )


def test_the_file_tells_nothing_of_the_machine_that_made_it(graphs: Graphs) -> None:
    for model in (graphs.float_model, graphs.int8_model):
        data = model.SerializeToString()
        for word in (b"stack_trace", b"/home", b"/tmp", b".py", b"torch", b"timm"):
            assert word not in data
        assert (model.producer_name, model.ir_version) == ("cutlayer", 10)


def test_nodes_have_unique_names_and_linear_layers_their_own(graphs: Graphs) -> None:
    for model in (graphs.float_model, graphs.int8_model):
        names = [node.name for node in model.graph.node]
        assert len(names) == len(set(names)) and all(names)
        products = {node.name for node in model.graph.node if node.op_type == "MatMul"}
        assert set(linear_layers(graphs.frontend)) <= products


@pytest.mark.slow
def test_opset_17_is_loadable_by_older_runtimes() -> None:
    frontend, _ = split_model(tiny.tiny_model(depth=2), 1)
    model = export_float(frontend, tiny.SHAPE, 17)
    check_file(model.SerializeToString(), Expected(17, tiny.SHAPE, (17, 48), 2, ()))
    assert "Gelu" not in {node.op_type for node in model.graph.node}
    assert run_tokens(open_session(model.SerializeToString(), 1), tiny.images(3).numpy()).shape == (3, 17, 48)


def test_large_weights_left_transposed_by_the_tracer_are_folded() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    nodes = [
        onnx.helper.make_node("Transpose", ["w"], ["w_t"], perm=[1, 0]),
        onnx.helper.make_node("MatMul", ["x", "w_t"], ["y"]),
    ]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [None, size]) for name, size in (("x", 3), ("y", 2))]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    )
    fold_weight_transposes(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul"]
    stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    np.testing.assert_array_equal(stored["w_t"], weight.T)


def test_padding_that_adds_nothing_is_taken_out() -> None:
    nodes = [
        onnx.helper.make_node("Pad", ["x", "none"], ["a"]),
        onnx.helper.make_node("Pad", ["a", "some"], ["b"]),
        onnx.helper.make_node("Relu", ["b"], ["y"]),
    ]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [None, None]) for name in ("x", "y")]
    pads = [numpy_helper.from_array(np.array(each, np.int64), name) for name, each in
            (("none", [0, 0, 0, 0]), ("some", [0, 1, 0, 0]))]  # fmt: skip
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], pads))
    drop_empty_pads(model)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [("Pad", ["x", "some"]), ("Relu", ["b"])]
