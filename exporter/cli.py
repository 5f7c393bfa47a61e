"""export-frontend: a model and a cut in, a signed device package and the server's backend out.

Flags, environment and cutlayer.toml become one ExportPlan here; the work is exporter.build's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contract.config import REQUIRED, Field, Resolved, find_file, resolve
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.signature import PrivateKey, generate, key_id, load_private, save_private, save_public
from exporter.plan import TUNES, ExportPlan, Limits, ModelArg

FIELDS = (
    Field("model", str, REQUIRED, "timm model name, such as vit_large_patch16_224"),
    Field("model_args", dict, {}, "arguments of timm.create_model, such as img_size and num_classes"),
    Field("split", int, None, "blocks on the device; default: two thirds of the depth"),
    Field("int8", bool, False, "quantize the frontend to INT8"),
    Field("calibration", Path, None, "folder of public images, one folder per class if the backend is to be tuned"),
    Field("weights", Path, None, "safetensors file or torch state dict"),
    Field("pretrained", bool, False, "take timm's own weights from its hub"),
    Field("output", Path, REQUIRED, "folder of the package; the backend goes beside it as <output>.backend"),
    Field("tune", str, "noise-aware", "noise-aware: tune the backend for the noise that devices add; none: do not"),
    Field("opset", int, 20, "ONNX operator set, 17 or more"),
    Field("alpha", float, 0.1, "relative strength of the devices' weight noise"),
    Field("kappa", float, 0.25, "default strength of the feature noise, in standard deviations per channel"),
    Field("kappa_max", float, 1.0, "strongest feature noise that the backend is tuned for"),
    Field("name", str, None, "name of the package; default: model and split"),
    Field("version", int, None, "version of the package; default: one more than the package that is replaced"),
    Field("seed", int, 0, "seed of everything random"),
    Field("limit_tuning", int, 2000, "most images that the backend is tuned on"),
    Field("signing_key", Path, None, "private key (PEM); default: signing-key.pem beside the output, made if missing"),
)
_MODEL_ARG_HELP = "an argument of timm.create_model, as a Python literal or text; may be given several times"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    flags = {**vars(arguments), "model_args": _model_args(arguments.model_arg)}
    file = find_file(arguments.config, Path.cwd())
    settings = resolve("export", FIELDS, {field.name: flags[field.name] for field in FIELDS}, os.environ, file)
    if arguments.show_config:
        print(settings.show())
        return 0
    plan = make_plan(settings, arguments.force)
    signal.signal(signal.SIGTERM, _leave)
    report = _export(plan)
    if arguments.format == "json":
        print_document("export", asdict(report))
    else:
        _say_report(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="export-frontend", description=__doc__.splitlines()[0])
    for field in FIELDS:
        if field.name == "model_args":
            parser.add_argument("--model-arg", action="append", default=[], metavar="KEY=VALUE", help=_MODEL_ARG_HELP)
        elif field.type is bool:
            parser.add_argument(_flag(field), action="store_true", default=None, help=field.help)
        else:
            names = ("-o", _flag(field)) if field.name == "output" else (_flag(field),)
            choices = TUNES if field.name == "tune" else None
            metavar = None if choices else field.type.__name__.upper()
            parser.add_argument(*names, default=None, choices=choices, metavar=metavar, help=_help(field))
    parser.add_argument("--force", action="store_true", help="publish although INT8 is outside its limits; recorded")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: cutlayer.toml in this folder")
    parser.add_argument("--show-config", action="store_true", help="print every setting and where it came from")
    return parser


def _flag(field: Field) -> str:
    return "--" + field.name.replace("_", "-")


def _help(field: Field) -> str:
    shown = field.default is not None and field.default is not REQUIRED
    return f"{field.help} (default: {field.default})" if shown else field.help


def _model_args(given: Sequence[str]) -> dict[str, ModelArg] | None:
    """KEY=VALUE texts as a table, None where there is none. Raises UsageError for a text without a key."""
    table: dict[str, ModelArg] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(
                f"--model-arg should be KEY=VALUE, found {text!r}", "write for example: --model-arg img_size=32"
            )
        try:
            table[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            table[key] = value
        try:
            json.dumps(table[key])  # it is stored with the backend, and a server builds the model from it
        except TypeError as error:
            raise UsageError(
                f"--model-arg {key} should be numbers, texts, lists or tables of them, found {value}",
                "write for example: --model-arg img_size=32",
            ) from error
    return table or None


def make_plan(settings: Resolved, force: bool) -> ExportPlan:
    """The plan of settled settings; paths become texts. Raises UsageError when they do not fit together."""
    values: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.values.items()
    }
    values["model_args"] = tuple(sorted(values["model_args"].items()))
    return ExportPlan(**values, force=force)


def _export(plan: ExportPlan):
    # Threads that spin while they wait make small steps eight times slower where another program has a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Torch takes seconds to import: --help and every mistake on the command line are answered before.
    import torch

    from exporter.build import Surroundings, export
    from exporter.few_shot import FewShotSettings
    from exporter.tune import TuneSettings

    surroundings = Surroundings(
        signer=_signer(plan),
        now=lambda: datetime.now(timezone.utc),
        threads=len(os.sched_getaffinity(0)),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    return export(plan, surroundings, Limits(), TuneSettings(), FewShotSettings())


def _signer(plan: ExportPlan) -> PrivateKey:
    """The key that was named, or the one beside the output, which the first export makes."""
    if plan.signing_key is not None:
        return load_private(Path(plan.signing_key))
    path = Path(plan.output).absolute().parent / "signing-key.pem"
    if path.exists():
        return load_private(path)
    key, public_path = generate(), path.with_suffix(".pub.pem")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_private(path, key)
    save_public(public_path, key.public_key())
    say(f"made a signing key {key_id(key.public_key())}: keep {path} secret, give {public_path} to the devices")
    return key


def _say_report(report) -> None:
    top1 = {name: value for name, value in report.figures["top1"].items() if value is not None}
    if top1:
        say("top-1 on held-out public images: " + ", ".join(f"{name} {value:.1%}" for name, value in top1.items()))
    say(f"learning rates for sites: backend {report.figures['backend_lr']:g}, head {report.figures['head_lr']:g}")
    say(
        f"{report.output}: {report.name} version {report.version}, {report.size_bytes / 1e6:.1f} MB, "
        f"signed by {report.signer}, digest {report.package_digest[:16]}, {report.figures['total_s']} s"
    )


def _leave(number: int, frame: object) -> None:
    """SIGTERM unwinds like any error, so that no half-written folder stays behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
