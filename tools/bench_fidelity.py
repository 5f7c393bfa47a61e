"""Measures what each step of INT8 is worth: SNR and cosine of the tokens at the cut, as onnxruntime computes them.

Steps are added one by one, from plain min-max to the exporter's own recipe; the last row is the published form. With
--outliers some channels and hidden units are made to stand out, as in large trained models.
With --top1 the first, the recipe's and the published row are also judged by the model's own head on a labelled folder.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

from contract.console import ArgumentParser, print_document, progress, run_command, say
from contract.errors import UsageError
from exporter.architecture import create
from exporter.checkpoint import image_rule, load_weights, own_head, read_state
from exporter.models import FoldSites, family_of
from exporter.models._inference import inference_mode
from exporter.onnx_graph import export_float
from exporter.options import read_model_args
from exporter.parity import measure, snr_db
from exporter.public_set import PublicSet, draw_synthetic, open_folder
from exporter.quantize import QUANTIZERS, ChosenScales, Quantizer
from exporter.quantize_frontend import Prepared, calibration_batches, prepare, quantized, search
from exporter.runtime import open_session, run_tokens
from exporter.split import split_tokens

NAIVE = Quantizer(per_channel=False, smooth=False, centre=False, tail_units=0, correct_bias=False)
STEPS = (  # what each adds to the one before
    ("min-max, one weight scale a layer", NAIVE),
    ("weight scales per channel", replace(NAIVE, per_channel=True)),
    ("bias corrected", replace(NAIVE, per_channel=True, correct_bias=True)),
    ("LayerNorm and V smoothed", Quantizer(centre=False, tail_units=0)),
    ("activation shifted", Quantizer(tail_units=0)),
    ("16 hidden units in float", Quantizer(tail_units=16)),
    ("32 hidden units in float (default)", QUANTIZERS["default"]),
    ("scales searched", QUANTIZERS["searched"]),
    ("as published: per tensor, searched", QUANTIZERS["paper"]),
)
_RECIPE = 6  # place of the exporter's default


@dataclass(frozen=True)
class Case:
    """A model cut in two, its pictures, and which of them calibrate and which are measured."""

    frontend: nn.Module
    backend: nn.Module
    head: tuple[torch.Tensor, torch.Tensor] | None
    sites: FoldSites
    input_shape: tuple[int, int, int]
    public: PublicSet
    calibration: np.ndarray
    measured: np.ndarray


@torch.no_grad()
def like_trained(model: nn.Module, rng: np.random.Generator) -> None:
    """Random weights spread as in trained models: uneven LayerNorm gains, peaky attention, wide activations."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.copy_(torch.from_numpy(rng.lognormal(0.0, 0.5, len(module.weight))))
            module.bias.copy_(torch.from_numpy(rng.normal(0.0, 0.3, len(module.bias))))
        elif isinstance(module, nn.Linear):
            module.weight.mul_(2.0 if name.endswith(("qkv", "fc1")) else 1.0)


@torch.no_grad()
def add_outliers(frontend: nn.Module, sites: FoldSites, rng: np.random.Generator) -> None:
    """Six channels of each LayerNorm 20 to 50 times stronger, the next weights as much weaker, which changes nothing;
    eight hidden units of each MLP six times wider, which does."""
    for norm_name, linear_name in sites.normed:
        norm, linear = frontend.get_submodule(norm_name), frontend.get_submodule(linear_name)
        channels = torch.from_numpy(rng.choice(len(norm.weight), 6, replace=False))
        gain = torch.from_numpy(rng.uniform(20.0, 50.0, 6).astype(np.float32))
        norm.weight[channels] *= gain
        norm.bias[channels] *= gain
        linear.weight[:, channels] /= gain
        if linear_name.endswith("fc1"):
            linear.weight[torch.from_numpy(rng.choice(linear.out_features, 8, replace=False))] *= 6.0


def tensors(case: Case, indices: np.ndarray, batch: int = 4) -> Iterator[torch.Tensor]:
    for images in calibration_batches(case.public, indices, batch):
        yield torch.from_numpy(images)


def run(session: onnxruntime.InferenceSession, case: Case) -> np.ndarray:
    return np.concatenate([run_tokens(session, images) for images in case.public.batches(case.measured, 1)])


def int8_bytes(case: Case, quantizer: Quantizer) -> bytes:
    """The INT8 file of a copy of the case's frontend."""
    frontend = copy.deepcopy(case.frontend)
    with inference_mode(frontend):
        prepared = prepare(frontend, case.sites, quantizer, tensors(case, case.calibration))
    model = export_float(frontend, case.input_shape, 20)
    return quantized(model, prepared, scales_of(case, prepared)).SerializeToString()


def scales_of(case: Case, prepared: Prepared) -> dict[str, ChosenScales]:
    if prepared.quantizer.search is None:
        return prepared.min_max()
    labels, head = case.public.labels, case.head
    fits = head is not None and labels is not None and len(case.public.folder.classes) == len(head[1])

    def labelled() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        place = 0
        for images in tensors(case, case.calibration):
            part = case.calibration[place : place + len(images)]
            place += len(images)
            yield images, torch.from_numpy(labels[part]) if fits else None

    answer = None if head is None else lambda tokens: nn.functional.linear(case.backend(tokens), *head)
    with inference_mode(prepared.frontend), inference_mode(case.backend):
        return search(prepared, labelled(), len(case.calibration), answer, np.random.default_rng(0))


def top1(session: onnxruntime.InferenceSession, case: Case, folder: PublicSet, count: int, description: str) -> float:
    """Share of `count` of the folder's images that backend and head answer rightly, the same images at every call."""
    right, indices = 0, np.random.default_rng(0).permutation(len(folder))[:count]
    with progress(total=len(indices), description=description, unit="images") as bar, torch.inference_mode():
        for start in range(0, len(indices), 32):
            part = indices[start : start + 32]
            tokens = np.concatenate([run_tokens(session, images) for images in folder.batches(part, 4)])
            logits = nn.functional.linear(case.backend(torch.from_numpy(tokens)), *case.head)
            right += int((logits.argmax(1).numpy() == folder.labels[part]).sum())
            bar.update(len(part))
    return right / len(indices)


def make_case(arguments: argparse.Namespace) -> Case:
    rng = np.random.default_rng(arguments.seed)
    torch.manual_seed(arguments.seed)
    model = create(arguments.model, False, read_model_args(arguments.model_arg) or {}).float().eval()
    if arguments.weights is None:
        like_trained(model, rng)
    else:
        load_weights(model, read_state(arguments.weights), str(arguments.weights))
    family = family_of(model)[1]
    frontend, backend, _ = split_tokens(model, arguments.split)
    sites, shape = family.fold_sites(frontend), family.facts(model).input_shape
    if arguments.outliers:
        add_outliers(frontend, sites, rng)
    rule = image_rule(model, shape)
    count = arguments.images + arguments.measured
    folder = arguments.calibration
    public = draw_synthetic(count, rule, rng) if folder is None else open_folder(folder, rule)
    if len(public) < count:
        raise UsageError(f"--calibration needs {count} images, found {len(public)}", "lower --images or --measured")
    order = rng.permutation(len(public))[:count]
    return Case(frontend, backend, own_head(model), sites, shape, public, order[: arguments.images],
                order[arguments.images :])  # fmt: skip


def bench(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    case = make_case(arguments)
    if arguments.top1 is not None and case.head is None:
        raise UsageError("--top1 needs a model with a head of its own", "leave it out")
    judged = None if arguments.top1 is None else open_folder(arguments.top1, case.public.rule)
    model = export_float(copy.deepcopy(case.frontend), case.input_shape, 20)
    session = open_session(model.SerializeToString(), arguments.threads)
    exact = run(session, case)
    rows: list[dict[str, object]] = []
    if judged is not None:
        rows.append({"step": "float32", "top1": top1(session, case, judged, arguments.top1_images, "float32")})
    del session, model
    for place, (name, quantizer) in enumerate(STEPS):
        if arguments.without_search and quantizer.search is not None:
            continue
        started_s = time.monotonic()
        data = int8_bytes(case, quantizer)
        made_s = time.monotonic() - started_s
        session = open_session(data, arguments.threads)
        found = run(session, case)
        row = {"step": name, "snr_db": round(snr_db(exact, found), 2), "cosine": measure("", exact, found).cosine,
               "made_s": round(made_s, 1)}  # fmt: skip
        if judged is not None and place in (0, _RECIPE, len(STEPS) - 1):
            row["top1"] = top1(session, case, judged, arguments.top1_images, name)
        rows.append(row)
        say("  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.format == "json":
        print_document("bench_fidelity", {"rows": rows})
        return 0
    for row in rows:
        figures = f"{row['snr_db']:6.2f} dB  cosine {row['cosine']:.5f}" if "snr_db" in row else " " * 26
        print(f"{row['step']:40s} {figures}" + (f"  top-1 {row['top1']:.2%}" if "top1" in row else ""))
    return 0


def parser() -> argparse.ArgumentParser:
    made = ArgumentParser(prog="bench_fidelity", description=__doc__)
    made.add_argument("--model", default="vit_base_patch16_224", help="timm model name (default: %(default)s)")
    made.add_argument("--model-arg", action="append", default=[], metavar="KEY=VALUE", help="as of export-frontend")
    made.add_argument("--split", type=int, default=8, help="layers on the device (default: %(default)s)")
    made.add_argument("--weights", type=Path, help="state dict; default: random weights, spread as trained ones")
    made.add_argument("--calibration", type=Path, metavar="DIR", help="folder of images; default: drawn pictures")
    made.add_argument("--images", type=int, default=32, help="to calibrate on (default: %(default)s)")
    made.add_argument("--measured", type=int, default=16, help="others, to measure on (default: %(default)s)")
    made.add_argument("--without-search", action="store_true", help="leave out the rows that search, which takes long")
    made.add_argument("--outliers", action="store_true", help="make channels and hidden units stand out")
    made.add_argument("--top1", type=Path, metavar="DIR", help="labelled folder to compare top-1 on")
    made.add_argument("--top1-images", type=int, default=5000, help="of that folder, at most (default: %(default)s)")
    made.add_argument("--threads", type=int, default=1, help="of onnxruntime and torch (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of weights and choice of images (default: %(default)s)")
    made.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    return made


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: bench(parser().parse_args())))
