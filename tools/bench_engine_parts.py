"""What tools/bench_engine measures: packages of random weights, float files, and the same frontend in torch.

    python -m tools.bench_engine_parts write NAME FOLDER
    python -m tools.bench_engine_parts torch NAME FOLDER BUDGET_S float32|bfloat16 dense|masked BATCH,...

The INT8 files are those of packages that the exporter publishes, with its folds and through its gates. Random weights
run as fast as trained ones and say nothing of accuracy. `torch` prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from PIL import Image
from torch import Tensor, nn

from contract.manifest import MANIFEST_NAME, from_bytes
from contract.signature import generate
from exporter.architecture import create
from exporter.build import Surroundings, export
from exporter.few_shot import FewShotSettings
from exporter.macs import count_macs
from exporter.masked_frontend import MaskedFrontend, masked_frontend
from exporter.models.vit import Frontend
from exporter.onnx_graph import add_initializer, export_float
from exporter.onnx_qdq import quantize_graph
from exporter.package import write_file
from exporter.plan import ExportPlan, Limits
from exporter.public_set import draw_synthetic
from exporter.quantize import QuantizedLinear, weight_codes
from exporter.split import split_model
from exporter.tune import settings_for
from tools.bench_engine_device import timed
from tools.bench_training_device import peak_bytes

MASKED_SHARE = 0.75
LARGEST_BATCH = 8
SYNTHETIC_IMAGES = 3  # speed does not depend on calibration
OPSET = 20


@dataclass(frozen=True)
class Case:
    """A model and its cut."""

    model: str
    split: int
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "vit_base_8": Case("vit_base_patch16_224", 8),
    "vit_large_16": Case("vit_large_patch16_224", 16),
    "tiny": Case("vit_tiny_patch16_224", 1, {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2,
                                             "num_heads": 3}),
}  # fmt: skip


class Chosen(nn.Module):
    """A masked frontend with its choice made, for counting."""

    def __init__(self, masked: MaskedFrontend, kept: int) -> None:
        super().__init__()
        self.masked, self.kept = masked, kept

    def forward(self, images: Tensor) -> Tensor:
        return self.masked(images, torch.arange(self.kept, device=images.device).expand(len(images), -1))


def frontend_of(case: Case) -> Frontend:
    torch.manual_seed(0)
    frontend = split_model(create(case.model, False, {"num_classes": 0, **case.arguments}).eval(), case.split)[0]
    assert isinstance(frontend, Frontend)
    return frontend


def write(case: Case, folder: Path) -> None:
    """Into FOLDER: int8/, int8_masked/ (packages), float/, float_masked/ (front.onnx alone), gemm-*.onnx, batch.npz.

    What an earlier run made that was cut short is kept.
    """
    frontend = frontend_of(case)
    shape = (3, *frontend.patch_embed.img_size)
    masked = masked_frontend(frontend)
    for name, module in (("float", frontend), ("float_masked", masked)):
        path = folder / name / "front.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_file(path.with_suffix(".partial"), export_float(module, shape, OPSET).SerializeToString())
            path.with_suffix(".partial").rename(path)
    patches, width = masked.patches, int(frontend.patch_embed.proj.out_channels)
    prefix, kept = int(frontend.num_prefix_tokens), round(patches * (1 - MASKED_SHARE))
    facts = {
        "model": case.model, "split": case.split, "tokens": prefix + patches, "kept_tokens": prefix + kept,
        "macs": count_macs(frontend, shape), "kept_macs": count_macs(Chosen(masked, kept), shape),
        "linear_layers": sum(isinstance(each, nn.Linear) for each in frontend.modules()),
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts))
    for rows, which in ((prefix + patches, "dense"), (prefix + kept, "masked")):
        write_products(folder, which, (rows, width, 4 * width))
    del frontend, masked
    for name in ("int8", "int8_masked"):
        if not (folder / name / MANIFEST_NAME).is_file():
            publish(case, folder / name, masked=name.endswith("masked"))
    write_images(folder, patches, kept)


def write_images(folder: Path, patches: int, kept: int) -> None:
    """Pictures of the kind that the packages were calibrated on, others than those; which patches are kept; a JPEG."""
    rng = np.random.default_rng(1)
    rule = from_bytes((folder / "int8" / MANIFEST_NAME).read_bytes()).image
    pictures = draw_synthetic(LARGEST_BATCH, rule, rng)
    (images,) = pictures.batches(np.arange(LARGEST_BATCH), LARGEST_BATCH)
    keep = np.stack([rng.permutation(patches)[:kept] for _ in range(LARGEST_BATCH)])
    np.savez(folder / "batch.npz", images=images, keep=keep)
    picture = Image.fromarray(pictures.pixels(np.arange(1))[0]).resize((640, 480), Image.Resampling.BICUBIC)
    picture.save(folder / "picture.jpg", quality=90)


def publish(case: Case, output: Path, masked: bool) -> None:
    plan = ExportPlan(
        model=case.model, model_args=tuple({"num_classes": 0, **case.arguments}.items()), split=case.split, int8=True,
        calibration=None, weights=None, pretrained=False, tune="none", opset=OPSET, alpha=0.1, kappa=0.25,
        kappa_max=1.0, name=None, version=None, seed=0, limit_tuning=1, signing_key=None, force=False,
        output=str(output), masked=masked,
    )  # fmt: skip
    around = Surroundings(generate, lambda: datetime.now(timezone.utc), torch.get_num_threads(), "cpu")
    limits = Limits(synthetic_images=SYNTHETIC_IMAGES, compared_images=2, golden_images=1)
    export(plan, around, limits, settings_for(plan.tune, plan.tuning_subsets), FewShotSettings())


def write_products(folder: Path, which: str, shape: tuple[int, int, int]) -> None:
    """One linear layer (M, K) x (K, N) in float32 and as the exporter quantizes it."""
    rows, inputs, outputs = shape
    weight = np.random.default_rng(0).standard_normal((inputs, outputs)).astype(np.float32) / 32
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["rows", "product.weight"], ["products"], name="product"),
            helper.make_node("Add", ["products", "product.bias"], ["sums"], name="sum"),
        ],
        "product",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", rows, inputs])],
        [helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["batch", rows, outputs])],
    )
    bias = np.zeros(outputs, np.float32)
    add_initializer(graph, "product.weight", weight)
    add_initializer(graph, "product.bias", bias)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    layer = QuantizedLinear("product", *weight_codes(weight, channel_axis=1), 1 / 127, bias, None)
    size = "x".join(map(str, shape))
    for kind, each in (("float", model), ("int8", quantize_graph(model, {"product": layer}))):
        onnx.save(each, folder / f"gemm-{which}-{kind}-{size}.onnx")


@torch.inference_mode()
def run_torch(case: Case, folder: Path, budget_s: float, precision: str, which: str, batches: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    frontend = frontend_of(case)
    load_s = time.perf_counter() - started_s
    stored = np.load(folder / "batch.npz")
    names = ("images", "keep") if which == "masked" else ("images",)
    rows, peak = {}, None
    narrow = torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
    with narrow:
        for count in map(int, batches.split(",")):
            feed = [torch.from_numpy(stored[name][:count]) for name in names]
            cpu_s, wall_s = timed(lambda feed=feed: frontend(*feed), budget_s)
            peak = peak or peak_bytes()
            rows[str(count)] = {
                "image_s": statistics.median(cpu_s) / count, "wall_s": statistics.median(wall_s) / count,
            }  # fmt: skip
        tokens = frontend(*(torch.from_numpy(stored[name][:2]) for name in names)).double().numpy()
    np.save(folder / f"tokens-torch_{precision}-{which}.npy", tokens)
    return {"version": torch.__version__, "int8_layers": None, "load_s": load_s, "peak_bytes": peak, "batches": rows}


def main() -> None:
    verb, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if verb == "write":
        write(CASES[name], folder)
    else:
        precision, which, batches = sys.argv[5:]
        print(json.dumps(run_torch(CASES[name], folder, float(sys.argv[4]), precision, which, batches)))


if __name__ == "__main__":
    main()
