import numpy as np
import pytest

from contract.errors import ExportError
from contract.keyed_noise import derive_key
from contract.onnx_weights import noised_onnx
from exporter.onnx_offsets import stored_arrays, weight_records
from exporter.parity import count_int8_layers, snr_db
from exporter.runtime import executed_kernels, open_session, run_tokens
from tests.exporter.conftest import Graphs

SHIFTS = {f"blocks.{i}.mlp.fc2": f"blocks.{i}.mlp.act.1.shift" for i in (0, 1)}


def test_every_stored_array_is_found_where_it_lies(graphs: Graphs) -> None:
    data = graphs.int8_model.SerializeToString()
    arrays = stored_arrays(data)
    assert set(arrays) == {each.name for each in graphs.int8_model.graph.initializer if each.raw_data}
    for each in graphs.int8_model.graph.initializer:
        if each.raw_data:
            found = arrays[each.name]
            assert data[found.offset : found.offset + found.size_bytes] == each.raw_data
            assert found.shape == tuple(each.dims)


def test_records_cover_every_int8_weight(graphs: Graphs) -> None:
    data = graphs.int8_model.SerializeToString()
    records = {each.name: each for each in weight_records(data, SHIFTS)}
    assert len(records) == 8 + 1
    assert records["patch_embed.proj"].shape == (48, 3, 8, 8) and records["patch_embed.proj"].channel_axis == 0
    fc2 = records["blocks.1.mlp.fc2"]
    assert fc2.shape == (192, 48) and fc2.channel_axis == 1
    shift = np.frombuffer(data, "<f4", 192, fc2.shift_offset)
    np.testing.assert_array_equal(shift, graphs.folded.shifts["blocks.1.mlp.fc2"])
    assert records["blocks.1.attn.qkv"].shift_offset is None


def test_a_shift_that_is_not_stored_is_an_error(graphs: Graphs) -> None:
    with pytest.raises(ExportError, match="nowhere"):
        weight_records(graphs.int8_model.SerializeToString(), {"blocks.0.mlp.fc2": "nowhere"})


def test_a_noised_file_runs_in_int8_kernels_and_keeps_its_meaning(graphs: Graphs, tmp_path: object) -> None:
    data = graphs.int8_model.SerializeToString()
    records = weight_records(data, SHIFTS)
    noised, share, _ = noised_onnx(data, records, 0.1, lambda name: derive_key(b"d" * 32, "weights", name))
    assert len(noised) == len(data) and share > 0.5
    assert count_int8_layers(executed_kernels(bytes(noised), graphs.inputs[:1], tmp_path)) == 8
    plain, noisy = (run_tokens(open_session(bytes(each), 1), graphs.inputs) for each in (data, noised))
    assert 5 < snr_db(plain, noisy) < 40


def test_without_the_bias_correction_noise_would_multiply_the_shift(graphs: Graphs) -> None:
    data = graphs.int8_model.SerializeToString()
    plain = run_tokens(open_session(data, 1), graphs.inputs)

    def figure(shifts: dict[str, str]) -> float:
        noised, _, _ = noised_onnx(data, weight_records(data, shifts), 0.1, lambda name: derive_key(b"e" * 32, name))
        return snr_db(plain, run_tokens(open_session(bytes(noised), 1), graphs.inputs))

    assert figure(SHIFTS) > figure({}) + 1
