from __future__ import annotations

import pytest

from edge_runtime.int8_check import Kernels, int8_lost, of_onnxruntime, of_openvino, quantized_layers


def event(name: str, operator: str, *inputs: tuple[str, list[int]]) -> dict[str, object]:
    arguments = {"op_name": operator, "input_type_shape": [{dtype: shape} for dtype, shape in inputs]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "args": arguments}


ROWS, SIGNED, FLOATS = ("uint8", [1, 197, 768]), ("int8", [1, 197, 768]), ("float", [1, 197, 768])
PROFILE = [
    {"cat": "Session", "name": "model_run", "args": {"op_name": "MatMulIntegerToFloat"}},
    {"cat": "Node", "name": "qkv_fence_before", "args": {"op_name": "MatMulIntegerToFloat"}},
    event("patch_embed.proj.dequantize_weight", "DequantizeLinear", ("int8", [768, 3, 16, 16])),
    event("attention", "MatMul", FLOATS, FLOATS),
]


def test_every_kind_of_int8_product_counts_and_nothing_else_does() -> None:
    kinds = ("MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "MatMulInteger", "DynamicQuantizeMatMul", "QLinearConv")
    events = [*PROFILE, *(event(f"layer{number}", kind, ROWS) for number, kind in enumerate(kinds))]
    assert of_onnxruntime(events, "x86_64") == Kernels(6, (), ())


def test_signed_inputs_on_x86_are_the_portable_kernel_and_native_on_arm() -> None:
    events = [*PROFILE, event("qkv", "QGemm", SIGNED), event("proj", "MatMulIntegerToFloat", ROWS)]
    assert of_onnxruntime(events, "x86_64") == Kernels(1, ("qkv",), ())
    assert of_onnxruntime(events, "aarch64") == Kernels(2, (), ())


def test_a_weight_that_is_dequantized_in_every_run_is_named() -> None:
    weight = event("blocks.0.attn.qkv.dequantize_weight", "DequantizeLinear", ("int8", [768, 2304]))
    events = [*PROFILE, weight, event("qkv", "Gemm", FLOATS), event("proj", "MatMulIntegerToFloat", ROWS)]
    assert of_onnxruntime(events, "x86_64") == Kernels(1, (), ("blocks.0.attn.qkv.dequantize_weight",))


@pytest.mark.parametrize("inputs", [None, [], [{}], ["uint8"]])
def test_a_profile_without_shapes_still_counts(inputs: object) -> None:
    events = [{"cat": "Node", "name": "a_kernel_time", "args": {"op_name": "QGemm", "input_type_shape": inputs}}]
    assert of_onnxruntime(events, "x86_64") == Kernels(1, (), ())


def test_openvino_counts_products_by_their_precision() -> None:
    layers = [
        ("qkv", "FullyConnected", "i8", "jit_gemm_i8"),
        ("proj", "FullyConnected", "u8", "brgemm_avx512_u8"),
        ("fc1", "FullyConnected", "f32", "jit_gemm_f32"),
        ("fc2", "FullyConnected", "i8", "ref_any_i8"),
        ("scores", "MatMul", "f32", "brgemm_avx2_f32"),
        ("mixed", "MatMul", "i8", "jit_gemm_i8"),
        ("fc2.tail", "FullyConnected", "i8", "brgemm_avx2_f32"),
        ("weight", "Const", "i8", "unknown_i8"),
    ]
    assert of_openvino(layers) == Kernels(2, ("fc2",), ())


def test_only_linear_layers_with_int8_inputs_should_run_as_int8() -> None:
    stored = [
        ("patch_embed.proj", (768, 3, 16, 16)), ("mlp.fc1", (768, 3072)), ("mlp.fc2.body", (3040, 768)),
        ("mlp.fc2.tail", (32, 768)),
    ]  # fmt: skip
    assert quantized_layers(stored) == 2
    tail = event("mlp.fc2.tail.dequantize_weight", "DequantizeLinear", ("int8", [32, 768]))
    assert of_onnxruntime([tail], "x86_64") == Kernels(0, (), ())


def test_nothing_is_said_where_all_ran_or_nobody_can_tell() -> None:
    assert int8_lost(None, 8) is None
    assert int8_lost(Kernels(8, (), ()), 8) is None
    assert int8_lost(Kernels(0, (), ()), 0) is None


def test_what_was_lost_is_one_line_with_cause_and_cure() -> None:
    text = int8_lost(Kernels(5, ("qkv", "proj"), ("fc1.weight",)), 8)
    assert text is not None and "\n" not in text
    assert "5 of 8 quantized layers ran as int8" in text
    assert "2 in int8 on a kernel that is slower than float (qkv, ...)" in text
    assert "1 with weights turned to float in every run (fc1.weight)" in text
    assert text.endswith("use another version of the engine, or another engine")
