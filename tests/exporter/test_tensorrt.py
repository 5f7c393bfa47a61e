"""TensorRT parses the exported INT8 files and builds plans of them; without a GPU, a plan can be built but not run."""

from __future__ import annotations

import pytest

from exporter.models import family_of
from exporter.models._inference import inference_mode
from exporter.onnx_graph import export_float
from exporter.quantize import Quantizer
from exporter.quantize_frontend import prepare, quantized
from exporter.split import split_tokens
from tests.exporter.test_quantize_frontend import SIZE, small_images, whole_model

trt = pytest.importorskip(
    "tensorrt_rtx", reason="needs tensorrt_rtx (pip install tensorrt-rtx-cu13), which builds plans without a GPU"
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "swin", "resnet", "vgg"])
def test_tensorrt_builds_the_int8_file_of_every_family(family: str) -> None:
    model, k = whole_model(family)
    frontend, _, _ = split_tokens(model, k)
    with inference_mode(frontend):
        prepared = prepare(frontend, family_of(model)[1].fold_sites(frontend), Quantizer(), small_images(4).split(2))
    data = quantized(export_float(frontend, SIZE, 20), prepared, prepared.min_max()).SerializeToString()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(data), [str(parser.get_error(place)) for place in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    profile = builder.create_optimization_profile()
    profile.set_shape("images", (1, *SIZE), (1, *SIZE), (4, *SIZE))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None and plan.nbytes > 0.5 * len(data)
