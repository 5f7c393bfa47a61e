"""From a torch frontend of every family to an INT8 graph: what runs as INT8, how close it is, what noise reaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from contract.errors import ExportError
from contract.images import ImageRule, normalise
from contract.keyed_noise import derive_key
from contract.onnx_weights import noised_onnx
from exporter.hilbert import transformed_pixels
from exporter.models import FoldSites, family_of
from exporter.models._inference import inference_mode
from exporter.onnx_graph import export_float
from exporter.onnx_offsets import weight_records
from exporter.onnx_qdq import int8_share
from exporter.parity import count_int8_layers, snr_db
from exporter.public_set import draw_synthetic
from exporter.quantize import QUANTIZERS, Quantizer, SearchSettings, convolutions
from exporter.quantize_frontend import Prepared, calibration_batches, prepare, quantized, search
from exporter.runtime import executed_kernels, open_session, run_tokens
from exporter.split import split_tokens
from tests.exporter import tiny

SIZE = (3, 64, 64)
RULE = ImageRule(64, 64, "bicubic", 1.0, "center", (0.5,) * 3, (0.5,) * 3, "white", 10**6)


def whole_model(name: str) -> tuple[nn.Module, int]:
    """A small model with lively norms, and where it is cut."""
    torch.manual_seed(0)
    if name == "vit":
        return tiny.tiny_model(img_size=64, mlp_ratio=8.0), 2
    if name == "swin":
        model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4,
                                  embed_dim=24, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratio=8.0,
                                  num_classes=4)  # fmt: skip
        return model.eval(), 3
    model = timm.create_model({"resnet": "resnet18", "vgg": "vgg11_bn"}[name], num_classes=4).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model.image_size = (64, 64)
    return model, {"resnet": 6, "vgg": 14}[name]


def small_images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        normalise(draw_synthetic(count, RULE, np.random.default_rng(seed)).pixels(range(count)), RULE)
    )


@dataclass(frozen=True)
class Made:
    prepared: Prepared
    data: bytes
    exact: np.ndarray
    images: np.ndarray


@pytest.fixture(scope="module", params=["vit", "swin", "resnet", "vgg"])
def made(request: pytest.FixtureRequest) -> Made:
    model, k = whole_model(request.param)
    frontend, _, _ = split_tokens(model, k)
    images = small_images(4, seed=1)
    with inference_mode(frontend):
        exact = frontend(images).numpy()
        prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), Quantizer(), small_images(16).split(4))
    graph = quantized(export_float(frontend, SIZE, 20), prepared, prepared.min_max())
    assert int8_share(graph) == (1.0, ())
    return Made(prepared, graph.SerializeToString(), exact, images.numpy())


def test_every_family_runs_in_int8_kernels_and_stays_close(made: Made, tmp_path: Path) -> None:
    layers = len(made.prepared.products()) + len(convolutions(made.prepared.frontend))
    assert layers >= 4
    assert count_int8_layers(executed_kernels(made.data, made.images[:1], tmp_path)) == layers
    assert snr_db(made.exact, run_tokens(open_session(made.data, 1), made.images)) > 27


def test_weight_noise_reaches_every_matrix_and_keeps_the_file_s_meaning(made: Made, tmp_path: Path) -> None:
    records = weight_records(made.data, made.prepared.folded.centred)
    modules = {
        name for name, each in made.prepared.frontend.named_modules() if isinstance(each, (nn.Linear, nn.Conv2d))
    }
    assert {each.name for each in records} == modules and set(made.prepared.folded.tails) <= modules
    noised, share, _ = noised_onnx(made.data, records, 0.1, lambda name: derive_key(b"d" * 32, "weights", name))
    assert len(noised) == len(made.data) and share > 0.5
    plain, noisy = (run_tokens(open_session(bytes(each), 1), made.images) for each in (made.data, noised))
    assert 3 < snr_db(plain, noisy) < 40
    for record in records:
        span = slice(record.codes_offset, record.codes_offset + int(np.prod(record.shape)))
        assert noised[span] != made.data[span]


def test_a_vit_has_its_largest_hidden_units_in_float() -> None:
    model, k = whole_model("vit")
    frontend, _, _ = split_tokens(model, k)
    sites = family_of(model)[1].fold_sites(frontend)
    with torch.no_grad():
        frontend.blocks[0].mlp.fc1.weight[:3] *= 8
        prepared = prepare(frontend, sites, Quantizer(), small_images(8).split(4))
    graph = quantized(export_float(frontend, SIZE, 20), prepared, prepared.min_max())
    products = {node.name: node for node in graph.graph.node if node.op_type == "MatMul"}
    made_by = {name: node.op_type for node in graph.graph.node for name in node.output}
    assert prepared.folded.tails == tuple(f"blocks.{i}.mlp.fc2.tail" for i in (0, 1))
    for tail in prepared.folded.tails:
        assert [made_by[name] for name in products[tail].input] == ["Split", "DequantizeLinear"]
        body = products[tail.replace("tail", "body")]
        assert [made_by[name] for name in body.input] == ["DequantizeLinear", "DequantizeLinear"]


def test_outlier_channels_cost_little_with_the_folds_and_much_without() -> None:
    figures = {}
    for name, quantizer in (("bare", Quantizer(smooth=False, centre=False, tail_units=0)), ("full", Quantizer())):
        model, k = whole_model("vit")
        with torch.no_grad():
            for block in model.blocks:
                for norm, linear in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                    norm.weight[:2] *= 40
                    norm.bias[:2] *= 40
                    linear.weight[:, :2] /= 40
        frontend, _, _ = split_tokens(model, k)
        images = small_images(4, seed=1)
        with inference_mode(frontend):
            exact = frontend(images).numpy()
            prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), quantizer, small_images(16).split(4))
        graph = quantized(export_float(frontend, SIZE, 20), prepared, prepared.min_max())
        figures[name] = snr_db(exact, run_tokens(open_session(graph.SerializeToString(), 1), images.numpy()))
    assert figures["full"] > figures["bare"] + 10


def test_the_published_form_has_one_scale_a_layer_and_three_for_qkv() -> None:
    model, k = whole_model("vit")
    frontend, _, _ = split_tokens(model, k)
    with torch.no_grad():
        prepared = prepare(
            frontend, family_of(model)[1].fold_sites(frontend), QUANTIZERS["paper"], small_images(4).split(4)
        )
    scales = prepared.min_max()
    assert not prepared.folded.shifts and not prepared.folded.tails
    assert {name: len(set(each.weight)) for name, each in scales.items()} == {
        name: 3 if name.endswith("qkv") else 1 for name in scales
    }


def test_a_search_covers_every_int8_product() -> None:
    model, k = whole_model("vit")
    frontend, backend, _ = split_tokens(model, k)
    quantizer = Quantizer(search=SearchSettings(candidates=3, rounds=1, rows=32))
    with inference_mode(frontend), inference_mode(backend):
        prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), quantizer, small_images(4).split(4))
        done: list[None] = []
        found = search(prepared, [(small_images(4), torch.arange(4))], 4, lambda tokens: model.head(backend(tokens)),
                       np.random.default_rng(0), lambda: done.append(None))  # fmt: skip
    assert set(found) == set(prepared.products()) and len(done) == len(found)
    assert all(each.requires_grad for each in backend.parameters())


# Calibration pictures


def test_every_second_picture_is_transformed_whatever_the_batch() -> None:
    public = draw_synthetic(7, RULE, np.random.default_rng(0))
    pixels, indices = public.pixels(range(7)), np.array([6, 1, 3, 0, 5])
    expected = pixels[indices]
    expected[1::2] = transformed_pixels(expected[1::2])
    for size in (1, 2, 3, 5):
        found = np.concatenate(list(calibration_batches(public, indices, size)))
        np.testing.assert_array_equal(found, normalise(expected, RULE))
    np.testing.assert_array_equal(public.pixels(range(7)), pixels)  # the set itself is not written to


def test_no_picture_at_all_is_an_error() -> None:
    with pytest.raises(ExportError, match="found 0"):
        prepare(nn.Sequential(nn.Linear(2, 2)), FoldSites(), Quantizer(), [])
