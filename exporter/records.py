"""What a package and its backend say about themselves: manifest, figures, and the backend's own documents.

The values come from the steps before; moving the finished folders into place is exporter.package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np

from contract.images import ImageRule
from contract.manifest import FORMAT, Cut, EngineNeeds, FileRecord, LabelMode, Manifest, Quantization, TransformRules
from contract.preview import Decoder
from exporter.backend_tuning import Bench, PreparedBackend
from exporter.onnx_graph import INPUT_NAME, IR_VERSION, OUTPUT_NAME
from exporter.package import ONNX_NAME, golden_bytes, write_arrays, write_document, write_table, write_tensors
from exporter.plan import ExportPlan
from exporter.runtime import open_session, run_tokens

_ONNXRUNTIME_MIN = "1.19"  # the first that loads IR 10
PART_LABEL_MODES: tuple[LabelMode, ...] = ("raw-label", "permuted-label", "logit-gradient", "client-head")
# Where devices train the whole model, no message carries a label. But the head's rows stand in the order of the class
# list, and how a row moved tells how often its class occurred: no mode that promises more than raw-label would be true.
WHOLE_MODEL_LABEL_MODES: tuple[LabelMode, ...] = ("raw-label",)


def figures_of(
    bench: Bench, prepared: PreparedBackend, decoders: tuple[Decoder, ...], frontend_s: float, total_s: float
) -> dict[str, object]:
    """Every figure of the export, for export.json and for the command's own report."""
    int8 = {} if bench.file.figures is None else asdict(bench.file.figures)
    return {
        **int8,
        "forced": bench.file.forced,
        "float32_differences": list(bench.file.differences),
        "top1": asdict(prepared.accuracies),
        "top1_at": [
            {"kappa": kappa, "top1": top1} for kappa, top1 in zip(bench.strengths, prepared.by_strength, strict=False)
        ],
        "server_head": prepared.head_origin,
        "backend_lr": prepared.rates.backend_lr,
        "head_lr": prepared.rates.head_lr,
        "calibration_images": len(bench.parts.calibration),
        "tuning_images": len(bench.parts.tuning) if bench.plan.tune != "none" else 0,
        "evaluation_images": len(bench.parts.evaluation),
        "macs": bench.file.macs,
        "preview": [asdict(each) for each in decoders],
        "frontend_s": round(frontend_s, 1),
        "total_s": round(total_s, 1),
    }


def manifest_of(
    bench: Bench, prepared: PreparedBackend, family: str, files: tuple[FileRecord, ...], signer: str,
    now: Callable[[], datetime],
) -> Manifest:  # fmt: skip
    """The manifest of a package with one cut; the plan's name, version and split are settled by now."""
    plan, facts = bench.plan, bench.facts
    cut = Cut(
        index=plan.split, depth=facts.depth, onnx=ONNX_NAME, input_name=INPUT_NAME, output_name=OUTPUT_NAME,
        input_shape=facts.input_shape, macs=bench.file.macs, tokens=facts.layout,
        statistics=prepared.public_tokens.statistics, weights=bench.file.records, sent=plan.sent,
    )  # fmt: skip
    return Manifest(
        format=FORMAT, name=plan.name, version=plan.version, model=plan.model, family=family, cuts=(cut,),
        image=bench.public.rule, quantization=_quantization(bench),
        engine=EngineNeeds(plan.opset, IR_VERSION, _ONNXRUNTIME_MIN),
        transforms=TransformRules(plan.alpha, plan.kappa, plan.kappa_max, weight_noise=bool(bench.file.records)),
        label_modes=("permuted-label", "client-head", "logit-gradient"), classes=None, files=files,
        signer=signer, created=now().isoformat(timespec="seconds"),
    )  # fmt: skip


def training_manifest_of(
    plan: ExportPlan, family: str, image: ImageRule, files: tuple[FileRecord, ...], signer: str,
    now: Callable[[], datetime],
) -> Manifest:  # fmt: skip
    """The manifest of a package of parts that devices train: no frontend, so no cuts, no noise and no INT8."""
    modes = WHOLE_MODEL_LABEL_MODES if plan.training.whole_model else PART_LABEL_MODES
    return Manifest(
        format=FORMAT, name=plan.name, version=plan.version, model=plan.model, family=family, cuts=(), image=image,
        quantization=Quantization("float32", ("trained on devices in float32",), 0.0, (), None, 1.0, False),
        engine=EngineNeeds(plan.opset, IR_VERSION, _ONNXRUNTIME_MIN),
        transforms=TransformRules(0.0, 0.0, 0.0, weight_noise=False), label_modes=modes, classes=None, files=files,
        signer=signer, created=now().isoformat(timespec="seconds"),
    )  # fmt: skip


def _quantization(bench: Bench) -> Quantization:
    measured = bench.file.figures
    calibrated_on = "measured on a folder of images" if bench.public.folder else "measured on synthetic pictures"
    if measured is None:
        return Quantization("float32", (calibrated_on,), 0.0, (), None, 1.0, False)
    return Quantization(
        scheme="w8a8", recipe=(*bench.file.recipe, calibrated_on), int8_share=measured.int8_share,
        float_weights=measured.float_weights, snr_db=measured.snr_db, cosine=measured.cosine, forced=bench.file.forced,
    )  # fmt: skip


def golden_of(bench: Bench) -> bytes:
    """Pictures and what onnxruntime makes of them with the very bytes that are shipped, one picture a run."""
    indices = bench.parts.calibration[: bench.limits.golden_images]
    session = open_session(bench.file.data, bench.threads)
    tokens = [run_tokens(session, batch) for batch in bench.public.batches(indices, 1)]
    return golden_bytes(bench.public.pixels(indices), np.concatenate(tokens))


def write_backend(
    folder: Path, bench: Bench, prepared: PreparedBackend, figures: dict[str, object], package_digest: str
) -> None:
    """The tuned half and everything the server needs beside it."""
    write_tensors(folder / "backend.safetensors", prepared.state)
    if prepared.head is not None:
        write_tensors(folder / "server_head.safetensors", prepared.head.state_dict())
    write_arrays(folder / "statistics.safetensors", prepared.public_tokens.arrays())
    write_document(folder / "few_shot.json", prepared.rates.document())
    write_document(folder / "export.json", export_document(bench.plan, figures, package_digest))
    write_table(folder / "public.toml", _public_table(bench))


def export_document(plan: ExportPlan, figures: dict[str, object], package_digest: str) -> dict[str, object]:
    """export.json: what was chosen, what came of it, and which package the backend belongs to."""
    return {"schema_version": 1, "package_digest": package_digest, "plan": plan.document(), "figures": figures}


def _public_table(bench: Bench) -> dict[str, object]:
    """Which public set was used, so that the server can find it again; the images themselves are not copied."""
    folder = bench.public.folder
    tuned = folder is not None and bench.plan.tune != "none"
    return {
        "path": "" if folder is None else str(folder.root.resolve()),
        "digest": bench.public.digest(),
        "classes": [] if folder is None else list(folder.classes),
        "tuned_on": [folder.images[index].relative for index in bench.parts.tuning] if tuned else [],
        "held_out": [] if folder is None else [folder.images[index].relative for index in bench.parts.evaluation],
    }
