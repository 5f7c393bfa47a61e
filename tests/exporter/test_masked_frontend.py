from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("timm")

from safetensors.torch import load_file

from contract.config import resolve
from contract.errors import UsageError
from contract.images import normalise
from contract.manifest import from_bytes
from contract.signature import generate
from edge_runtime.engines import open_engine
from edge_runtime.install import signal_to_noise_db
from exporter.cli import FIELDS, make_plan
from exporter.masked_frontend import KEEP_NAME, MaskedFrontend, masked_frontend
from exporter.onnx_graph import INPUT_NAME, export_float, inference_mode
from exporter.runtime import open_session
from exporter.split import split_model
from tests.exporter import tiny

KINDS = {
    "class token": (tiny.MODEL, {}),
    "no prefix": (tiny.MODEL, {"class_token": False, "global_pool": "avg"}),
    "registers": (tiny.MODEL, {"reg_tokens": 4}),
    "registers, positions of patches only": (tiny.MODEL, {"reg_tokens": 4, "no_embed_class": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "norm before the blocks": (tiny.MODEL, {"pre_norm": True}),
    "not square": (tiny.MODEL, {"img_size": (32, 48)}),
}
OFTEN = ("class token", "distilled", "not square")  # the others run with the slow tests


def chosen(batch: int, kept: int, patches: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(patches)[:kept] for _ in range(batch)])


@pytest.mark.parametrize(
    "kind", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in KINDS]
)
def test_chosen_patches_give_what_the_frontend_gives_for_them(kind: str) -> None:
    name, more = KINDS[kind]
    model = tiny.tiny_model(name, **more)
    frontend, _ = split_model(model, 2)
    masked = masked_frontend(frontend)
    size = model.patch_embed.img_size
    inputs = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0))
    exported = export_float(masked, (3, *size), 20)
    session = open_session(exported.SerializeToString(), 1)
    for batch, kept in ((1, 1), (1, 5), (3, 4), (2, masked.patches)):
        keep = chosen(batch, kept, masked.patches)
        with inference_mode(frontend):
            expected = frontend(inputs[:batch], torch.from_numpy(keep)).numpy()
        found = session.run(None, {INPUT_NAME: inputs[:batch].numpy(), KEEP_NAME: keep})[0]
        assert found.shape == expected.shape == (batch, frontend.num_prefix_tokens + kept, 48)
        assert found == pytest.approx(expected, abs=2e-4)
    with inference_mode(frontend):
        assert masked(inputs).numpy() == pytest.approx(frontend(inputs).numpy(), abs=2e-4)


def test_a_masked_package_runs_as_int8_on_any_choice_of_patches(tmp_path: Path) -> None:
    report = tiny.run(tmp_path / "front", generate(), masked=True)
    manifest = from_bytes((tmp_path / "front" / "manifest.json").read_bytes())
    (cut,) = manifest.cuts
    linear = [each.name for each in cut.weights if len(each.shape) == 2]
    assert len(linear) == len(cut.weights) == 9 and "patch_embed.proj" in linear  # four in each block
    engine = open_engine("onnxruntime", tmp_path / "front" / cut.onnx, 1)
    assert engine.kernels is not None and engine.kernels.int8 == 9 and not engine.kernels.dequantized
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)  # further than calibration saw
    inputs = normalise(pixels, manifest.image)
    whole = engine.run(inputs)
    assert whole.shape == (3, 17, 48) and report.figures["snr_db"] > 20
    frontend, _ = split_model(tiny.tiny_model(), 2)
    frontend.load_state_dict(load_file(tmp_path / "front.backend" / "frontend.safetensors"))
    for kept in (4, 9):
        keep = chosen(3, kept, 16)
        with inference_mode(frontend):
            exact = frontend(torch.from_numpy(inputs), torch.from_numpy(keep)).numpy()
        assert signal_to_noise_db(exact, engine.run(inputs, keep)) > 20


def test_the_same_package_without_int8_takes_a_choice_too(tmp_path: Path) -> None:
    tiny.run(tmp_path / "front", generate(), masked=True, int8=False)
    engine = open_engine("onnxruntime", tmp_path / "front" / "front.onnx", 1)
    assert engine.run(tiny.images(2).numpy(), chosen(2, 3, 16)).shape == (2, 4, 48)


def test_a_model_without_patches_of_its_own_cannot_be_masked() -> None:
    with pytest.raises(UsageError, match="--masked runs a choice") as caught:
        masked_frontend(torch.nn.Linear(2, 2))
    assert "vit_*" in caught.value.cure


def test_training_masks_with_its_own_flag() -> None:
    asked = {"model": "m", "output": "front", "masked": True, "for": "sequential_split"}
    given = {field.name: None for field in FIELDS} | asked
    with pytest.raises(UsageError, match="--keep-patches"):
        make_plan(resolve("export", FIELDS, given, {}, None), force=False)


def test_the_masked_frontend_shares_its_blocks_with_the_frontend_that_is_folded() -> None:
    frontend, _ = split_model(tiny.tiny_model(), 2)
    masked = MaskedFrontend(frontend)
    assert masked.blocks is frontend.blocks
    assert masked.patch_embed.proj.weight.data_ptr() == frontend.patch_embed.proj.weight.data_ptr()
