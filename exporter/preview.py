"""The decoders of the owner's preview: trained by the server's own attack as a command, checked, put into a package.

What a decoder is and learns is server_runtime.leakage.decoders', which nothing here imports; what the manifest says of
it is contract.preview's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from contract.canonical import CanonicalError, decode, from_json
from contract.child import run_child
from contract.console import say
from contract.errors import ExportError, why
from contract.manifest import MANIFEST_NAME, Manifest, to_bytes
from contract.preview import CODES_NAME, PICTURE_NAME, RECORDS_NAME, Decoder, Decoders
from contract.tokens import CODE_MAX, sent_layout
from exporter.onnx_graph import drop_unused_initializers, name_nodes, strip_metadata
from exporter.package import Staging, write_file, write_package
from exporter.plan import ExportPlan
from exporter.runtime import open_session

_TRAINER = "server_runtime.leakage.decoders_cli"
_RECORDS_BYTES = 1 << 20
_CURE = "see the lines above; without --preview the package is made all the same"


def with_preview(manifest: Manifest, plan: ExportPlan, staged: Staging, threads: int) -> Manifest:
    """Train decoders for the staged package and write them into it; the manifest with them in it.

    One for the strength that is the default, one for the strongest. The package must hold its other files by now.
    Raises ExportError when the training fails or leaves what is no decoder.
    """
    write_file(staged.package / MANIFEST_NAME, to_bytes(manifest))  # for the trainer; not yet the one that is signed
    folder = staged.scratch / "preview"
    folder.mkdir()
    decoders = _train(plan, staged.package, folder)
    files: dict[str, bytes] = {}
    for decoder in decoders:
        files[decoder.onnx] = plain_graph((folder / decoder.onnx).read_bytes(), manifest, threads)
    records = sorted((*manifest.files, *write_package(staged.package, files)), key=lambda record: record.name)
    return replace(manifest, files=tuple(records), preview=decoders)


def _train(plan: ExportPlan, package: Path, folder: Path) -> tuple[Decoder, ...]:
    strengths = dict.fromkeys((plan.kappa, plan.kappa_max))
    say(f"training decoders for the owner's preview, in at most {plan.preview_minutes:g} minutes")
    words = [
        "--package", package, "--public", plan.calibration, "--kappa", *strengths,
        "--steps", plan.preview_steps, "--minutes", plan.preview_minutes, "--learn", plan.limit_tuning,
        "--opset", plan.opset, "--seed", plan.seed, "-o", folder,
    ]  # fmt: skip
    code = run_child(_TRAINER, [str(word) for word in words], stdout=2)
    if code:
        raise ExportError(f"the training of the preview's decoders ended with exit code {code}", _CURE)
    try:
        return decode(Decoders, from_json((folder / RECORDS_NAME).read_bytes(), _RECORDS_BYTES)).decoders
    except (OSError, CanonicalError) as error:
        raise ExportError(
            f"the training of the preview's decoders left no {RECORDS_NAME}: {why(error)}", _CURE
        ) from error


def plain_graph(data: bytes, manifest: Manifest, threads: int) -> bytes:
    """A decoder's graph without traces of the machine that wrote it; it must draw the same picture as before.

    Raises ExportError when it does not, or when the picture is not of the model's size.
    """
    model = onnx.load_from_string(data)
    strip_metadata(model)
    model.graph.name = "decoder"
    drop_unused_initializers(model)
    name_nodes(model)
    plain = model.SerializeToString(deterministic=True)
    cut, image = manifest.cuts[0], manifest.image
    layout = sent_layout(cut.tokens, cut.sent.kept)
    codes = np.random.default_rng(0).integers(-CODE_MAX, CODE_MAX + 1, (1, layout.count, layout.dim), np.int8)
    before, after = (open_session(each, threads).run([PICTURE_NAME], {CODES_NAME: codes})[0] for each in (data, plain))
    expected = (1, 3, image.height, image.width)
    if after.shape != expected or not np.array_equal(before, after) or not (0 <= after.min() <= after.max() <= 1):
        raise ExportError(
            f"a decoder should draw {expected} in [0, 1], the same before and after its graph was cleaned; found "
            f"{after.shape} from {after.min()} to {after.max()}",
            _CURE,
        )
    return plain
