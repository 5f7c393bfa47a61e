"""export-frontend: a model and a cut in, a signed device package and the server's backend out.

Flags, environment and cutlayer.toml become one ExportPlan here; the work is exporter.build's for frontends and
exporter.training_package's for parts that devices train.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contract.canonical import encode
from contract.config import REQUIRED, Field, Resolved, find_file, resolve
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.output import check_output
from contract.signature import PrivateKey, generate, key_id, load_private, save_private, save_public
from contract.tokens import KEPT
from contract.training import HOLDS, OWN_HEADS, PrototypeRule
from exporter.gate_cli import GATE_FIELDS, make_gate
from exporter.gate_plan import GatePlan
from exporter.plan import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMISERS,
    PEFTS,
    QUANTIZERS,
    TUNES,
    ExportPlan,
    Limits,
    ModelArg,
    ModuleChoices,
    TrainingChoices,
    holds_of,
    optimiser_rule,
    read_augment,
    read_cuts,
)

FIELDS = (
    Field("model", str, REQUIRED, "timm model name, such as vit_large_patch16_224"),
    Field("model_args", dict, {}, "arguments of timm.create_model, such as img_size and num_classes"),
    Field("split", int, None, "layers on the device; default: two thirds, with Swin all stages but one"),
    Field("int8", bool, False, "quantize the frontend to INT8"),
    Field(
        "quantizer",
        str,
        "default",
        "default: min-max by channel, outliers evened out; searched: with a search for scales, kept where it helps; "
        "paper: as SA published it",
    ),  # fmt: skip
    Field("masked", bool, False, "let devices run any choice of an image's patches, the others at no cost"),
    Field("calibration", Path, None, "folder of public images, one folder per class if the backend is to be tuned"),
    Field("weights", Path, None, "safetensors file or torch state dict"),
    Field("pretrained", bool, False, "take timm's own weights from its hub"),
    Field("output", Path, REQUIRED, "folder of the package; the backend goes beside it as <output>.backend"),
    Field(
        "tune",
        str,
        "noise-aware",
        "noise-aware: tune the backend for devices' noise; paper: as published; none: do not",
    ),
    Field("opset", int, 20, "ONNX operator set, 17 or more"),
    Field("alpha", float, 0.1, "relative strength of the devices' weight noise"),
    Field("kappa", float, 0.25, "default strength of the feature noise, in standard deviations per channel"),
    Field("kappa_max", float, 1.0, "strongest feature noise that the backend is tuned for"),
    Field("sent_patches", str, "all", "patch tokens that devices send; none: the class token alone"),
    Field("prefix_noise", float, 1.0, "noise of the class token, as a share of the patches'"),
    Field("name", str, None, "name of the package; default: model and split"),
    Field("version", int, None, "version of the package; default: one more than the package that is replaced"),
    Field("seed", int, 0, "seed of everything random"),
    Field("no_hilbert", bool, False, "calibrate and tune without the Hilbert transforms of public images"),
    Field("tuning_subsets", int, 3, "parts of the public set, each of which calibrates one more frontend for tuning"),
    Field(
        "played_sites", int, None, "few-shot sites that are played to choose learning rates; default: 2 to 6 by size"
    ),
    Field("limit_tuning", int, 2000, "most images that the backend is tuned on"),
    Field("preview", bool, False, "add an attacker's decoders to the package, for edge-run --preview; takes minutes"),
    Field("preview_steps", int, 1500, "steps of training of each decoder; the more, the nearer to a real attacker's"),
    Field("preview_minutes", float, 15.0, "time after which the training of decoders ends with what it has"),
    Field("signing_key", Path, None, "private key (PEM); default: signing-key.pem beside the output, made if missing"),
    Field("for", str, "split_adaptation", "strategy that the package is for"),
    Field("cuts", str, None, "layers on the device, one part for each cut, such as 1-10 or 2,6,10; default: --split"),
    Field("classes", int, None, "classes of the site, where devices train the whole model"),
    Field("optimiser", str, "sgd", "how training moves the parameters, on devices and on the server"),
    Field("momentum", float, None, "of sgd; default: 0.9, with eeft and its baselines 0.5"),
    Field("weight_decay", float, None, "default: 5e-4 with sgd (0 with eeft), 0.01 with adamw (decoupled)"),
    Field("augment", str, "none", "how devices vary training pictures, such as crop=4,flip,brightness=0.2"),
    Field("gradient", str, "float32", "how the gradient at the cut travels; eft_vit: how the server's changes do"),
    Field("activations", str, "float32", "how the activations at the cut travel"),
    Field("freeze", tuple, (), "beginnings of names of parameters that are not trained, with commas between"),
    Field(
        "keep_patches",
        float,
        None,
        "share of an image's patches that goes through the part in training, the same ones every time; default: all",
    ),  # fmt: skip
    Field("skips", int, 3, "eeft: light skips into each block of the model"),
    Field("complexity", float, 0.3, "eeft: weight of the complexity term of the loss"),
    Field("start_alpha", float, -3.0, "eeft: where the logits of the blocks' utilisation factors start"),
    Field("start_skips", float, 1.0, "eeft: weight of the skips' norms at the start; 0: they are silent until trained"),
    Field(
        "peft",
        str,
        "all",
        "what of the whole model fed_avg trains: all, or the head with nothing else, with the "
        "biases, with 10 prompt tokens, or with LoRA of rank 8 on queries and values",
    ),
    Field("projection", int, None, "prototypes: values of an embedding; default: 128"),
    Field("distance", str, None, "prototypes: from an embedding to its class's prototype; default: cosine"),
    Field("no_normalise", bool, False, "prototypes: leave the values at the cut as long as they are"),
    Field("count_step", int, None, "prototypes: tell counts rounded up to multiples of this; default: 1"),
    Field("recompute", bool, False, "let backward compute the activations again instead of storing them"),
    *GATE_FIELDS,
)
_CHOICES = {"quantizer": QUANTIZERS, "tune": TUNES, "sent_patches": KEPT, "for": tuple(HOLDS), "optimiser": OPTIMISERS,
            "gradient": GRADIENTS, "activations": ACTIVATIONS, "peft": PEFTS, "distance": ("cosine", "l2")}  # fmt: skip
_OF_PROTOTYPES = ("projection", "distance", "no_normalise", "count_step")
_OF_MODULES = ("skips", "complexity", "start_alpha", "start_skips")
_OF_TRAINING = ("classes", "optimiser", "momentum", "weight_decay", "augment", "gradient", "activations", "freeze",
                "recompute", "keep_patches", "peft", *_OF_MODULES, *_OF_PROTOTYPES)  # fmt: skip
_OF_FRONTENDS = ("alpha", "kappa", "kappa_max", "sent_patches", "prefix_noise", "quantizer", "tune", "limit_tuning",
                 "no_hilbert", "tuning_subsets", "played_sites")  # fmt: skip
_RELEASE_HELP = "agree that the package holds every layer of the model; recorded, and only taken from the command line"
_SPLITS_HELP = "print where MODEL, with --model-arg, can be cut and what each cut costs; nothing is exported"
_METAVARS = {"cuts": "CUTS", "freeze": "NAMES", "augment": "RULE", "split": "N|auto", "max_leakage": "LIMIT",
             "gate_attacks": "NAMES"}  # fmt: skip
_ADD_TABLE_HELP = "put a table of leakage-profile into the package DIR that it is of and sign it anew; exports nothing"
_MODEL_ARG_HELP = "an argument of timm.create_model, as a Python literal or text; may be given several times"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.list_splits is not None:
        return _list_splits(arguments.list_splits, _model_args(arguments.model_arg) or {}, arguments.format)
    flags = {**vars(arguments), "model_args": _model_args(arguments.model_arg)}
    is_auto = arguments.split == "auto"
    if is_auto:
        flags["split"] = None
    file = find_file(arguments.config, Path.cwd())
    if arguments.add_table is not None:
        return _add_table(*map(Path, arguments.add_table), _key_alone(flags["signing_key"], file), arguments.format)
    settings = resolve("export", FIELDS, {field.name: flags[field.name] for field in FIELDS}, os.environ, file)
    if is_auto:
        settings = _without_split(settings)
    if arguments.show_config:
        print(settings.show())
        return 0
    gate = make_gate(settings, is_auto, _cuts(settings))
    plan = make_plan(settings, arguments.force, arguments.release_whole_model, gate is not None)
    check_output(Path(plan.output))
    signal.signal(signal.SIGTERM, _leave)
    if gate is not None:
        return _export_gated(plan, gate(plan), arguments.format)
    report = _export(plan)
    if arguments.format == "json":
        print_document("export", asdict(report))
    else:
        _say_report(report)
    return 0


def _list_splits(model: str, model_args: Mapping[str, ModelArg], form: str) -> int:
    from exporter.list_splits import list_splits, table

    found = list_splits(model, model_args)
    if form == "json":
        print_document("splits", asdict(found))
    else:
        print("\n".join(table(found)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="export-frontend", description=__doc__.splitlines()[0])
    for field in FIELDS:
        if field.name == "model_args":
            parser.add_argument("--model-arg", action="append", default=[], metavar="KEY=VALUE", help=_MODEL_ARG_HELP)
        elif field.name == "max_leakage":
            parser.add_argument(_flag(field), action="append", metavar=_METAVARS[field.name], help=field.help)
        elif field.type is bool:
            parser.add_argument(_flag(field), action="store_true", default=None, help=field.help)
        else:
            names = ("-o", _flag(field)) if field.name == "output" else (_flag(field),)
            choices = _CHOICES.get(field.name)
            metavar = None if choices else _METAVARS.get(field.name, field.type.__name__.upper())
            parser.add_argument(*names, default=None, choices=choices, metavar=metavar, help=_help(field))
    parser.add_argument("--list-splits", metavar="MODEL", help=_SPLITS_HELP)
    parser.add_argument("--add-table", nargs=2, metavar=("FILE", "DIR"), help=_ADD_TABLE_HELP)
    parser.add_argument("--force", action="store_true", help="publish although INT8 is outside its limits; recorded")
    parser.add_argument("--release-whole-model", action="store_true", help=_RELEASE_HELP)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: cutlayer.toml in this folder")
    parser.add_argument("--show-config", action="store_true", help="print every setting and where it came from")
    return parser


def _flag(field: Field) -> str:
    return "--" + field.name.replace("_", "-")


def _help(field: Field) -> str:
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    shown = default is not None and default is not REQUIRED and default != ""
    return f"{field.help} (default: {default})" if shown else field.help


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


def make_plan(settings: Resolved, force: bool, release_whole_model: bool = False, is_gated: bool = False) -> ExportPlan:
    """The plan of settled settings; paths become texts. Raises UsageError when they do not fit together."""
    values: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.values.items()
    }
    values["model_args"] = tuple(sorted(values["model_args"].items()))
    chosen = {name: values.pop(name) for name in ("for", "cuts", *_OF_TRAINING)}
    for field in GATE_FIELDS:
        del values[field.name]
    cuts = _cuts(settings)
    if holds_of(chosen["for"]) != "frontend":
        idle = [f"--{name.replace('_', '-')}" for name in _OF_MODULES if settings.origin[name] != "default"]
        if idle and HOLDS[chosen["for"]] != "modules":
            raise UsageError(f"{idle[0]} was given, but {chosen['for']} adds no modules", "it belongs to --for eeft")
        idle = [f"--{name.replace('_', '-')}" for name in _OF_FRONTENDS if settings.origin[name] != "default"]
        if idle:  # whoever asks for protection must not believe that it is there
            raise UsageError(
                f"{idle[0]} is of frontends, and {chosen['for']} trains parts on devices, which send without noise",
                f"leave out {', '.join(idle)}",
            )
        if is_gated:
            raise UsageError(
                f"--max-leakage is for frontends, and {chosen['for']} trains its part on devices without noise",
                "leave it out; leakage-profile measures what such parts show",
            )
        values["split"] = None
        return ExportPlan(**values, force=force, training=_training(chosen, cuts, release_whole_model))
    idle = [f"--{name.replace('_', '-')}" for name in _OF_TRAINING if settings.origin[name] != "default"]
    idle += ["--release-whole-model"] if release_whole_model else []
    if idle:
        raise UsageError(
            f"{idle[0]} was given, but {chosen['for']} trains nothing on devices",
            f"leave it out, or choose --for {' or '.join(name for name in HOLDS if HOLDS[name] != 'frontend')}",
        )
    if len(cuts) > 1 and not is_gated:
        raise UsageError(
            f"--cuts names {len(cuts)} cuts, and a package for {chosen['for']} holds one frontend",
            f"name one cut, such as --cuts {cuts[-1]}, and export once for each",
        )
    values["split"] = cuts[0] if cuts else None
    return ExportPlan(**values, force=force)


def _without_split(settings: Resolved) -> Resolved:
    """A cut of a file or the environment gives way to --split auto."""
    return replace(
        settings, values={**settings.values, "split": None}, origin={**settings.origin, "split": "--split auto"}
    )


def _cuts(settings: Resolved) -> tuple[int, ...]:
    """From --cuts or --split; of both, the one on the command line. Raises UsageError when both are there."""
    texts = {name: settings.values[name] for name in ("cuts", "split") if settings.values[name] is not None}
    if len(texts) > 1:
        flagged = [name for name in texts if settings.origin[name].startswith("--")]
        if len(flagged) != 1:
            raise UsageError("expected --split or --cuts, found both", "leave one of them out")
        texts = {flagged[0]: texts[flagged[0]]}
    if "cuts" in texts:
        return read_cuts(texts["cuts"])
    return tuple(texts.values())


def _training(chosen: Mapping[str, Any], cuts: tuple[int, ...], release_whole_model: bool) -> TrainingChoices:
    holds = HOLDS[chosen["for"]]
    momentum, decay = chosen["momentum"], chosen["weight_decay"]
    if holds in OWN_HEADS and chosen["optimiser"] == "sgd":  # EEFT's, and that of its baselines
        momentum, decay = 0.5 if momentum is None else momentum, 0.0 if decay is None else decay
    modules = ModuleChoices(*(chosen[name] for name in _OF_MODULES)) if holds == "modules" else None
    return TrainingChoices(
        strategy=chosen["for"], cuts=cuts, release_whole_model=release_whole_model, classes=chosen["classes"],
        modules=modules, optimiser=optimiser_rule(chosen["optimiser"], momentum, decay),
        augment=read_augment(chosen["augment"]), gradient=chosen["gradient"], activations=chosen["activations"],
        freeze=chosen["freeze"], recompute=chosen["recompute"], keep_patches=chosen["keep_patches"],
        peft=chosen["peft"],
        prototypes=_prototypes(chosen),
    )  # fmt: skip


def _add_table(table: Path, folder: Path, named: Path | None, form: str) -> int:
    from exporter.attach import add_table

    path = named or folder.absolute().parent / "signing-key.pem"
    done = add_table(table, folder, load_private(path), lambda: datetime.now(timezone.utc))
    if form == "json":
        print_document("attached", asdict(done))
    else:
        say(
            f"{done.output}: {done.name} version {done.version} with {done.added}, digest {done.package_digest[:16]}; "
            "give devices and the server this one"
        )
    return 0


def _key_alone(flag: object, file: Path | None) -> Path | None:
    """The one setting that signing anew needs; others may be there, and none is missed."""
    fields = [replace(field, default=None) if field.default is REQUIRED else field for field in FIELDS]
    return resolve("export", fields, {"signing_key": flag}, os.environ, file).values["signing_key"]


def _export_gated(plan: ExportPlan, gate: GatePlan, form: str) -> int:
    surroundings = _surroundings(plan)
    from exporter.few_shot import played
    from exporter.gate import Bench, sweep
    from exporter.gate_report import KIND, refusal, to_text
    from exporter.tune import settings_for

    bench = Bench(gate, surroundings, Limits(), settings_for(plan.tune, plan.tuning_subsets))
    outcome, report = sweep(plan, bench, played(plan.played_sites))
    if form == "json":
        print_document(KIND, {**encode(outcome), "export": None if report is None else asdict(report)})
    else:
        print(to_text(outcome), end="")
    if report is None:
        raise refusal(outcome)
    _say_report(report)
    return 0


def _prototypes(chosen: Mapping[str, Any]) -> PrototypeRule | None:
    """Raises UsageError for options of prototypes where there are none."""
    given = [name for name in _OF_PROTOTYPES if chosen[name] not in (None, False)]
    if chosen["for"] == "prototypes":
        return PrototypeRule(
            128 if chosen["projection"] is None else chosen["projection"], chosen["distance"] or "cosine",
            not chosen["no_normalise"],
            count_step=1 if chosen["count_step"] is None else chosen["count_step"],
        )  # fmt: skip
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} was given, but {chosen['for']} has no prototypes",
            "leave it out, or choose --for prototypes",
        )
    return None


def _surroundings(plan: ExportPlan):
    # Threads that spin while they wait make small steps eight times slower where another program has a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Torch takes seconds to import: --help and every mistake on the command line are answered before.
    import torch

    from exporter.build import Surroundings

    return Surroundings(
        signer=_signer(plan),
        now=lambda: datetime.now(timezone.utc),
        threads=len(os.sched_getaffinity(0)),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def _export(plan: ExportPlan):
    surroundings = _surroundings(plan)
    from exporter.build import export
    from exporter.few_shot import played
    from exporter.training_package import export_training
    from exporter.tune import settings_for

    if plan.training is not None:
        return export_training(plan, surroundings)
    return export(plan, surroundings, Limits(), settings_for(plan.tune, plan.tuning_subsets), played(plan.played_sites))


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
    if "cuts" in report.figures:
        _say_parts(report.figures)
    else:
        _say_tuning(report)
    say(
        f"{report.output}: {report.name} version {report.version}, {report.size_bytes / 1e6:.1f} MB, "
        f"signed by {report.signer}, digest {report.package_digest[:16]}, {report.figures['total_s']} s"
    )


def _say_parts(figures) -> None:
    for cut in figures["cuts"]:
        shape = "x".join(map(str, cut["output_shape"]))
        say(
            f"cut {cut['index']} of {cut['depth']}, {cut['layer']}: {shape}, {cut['cut_bytes'] / 1e3:.1f} kB an image "
            f"at the cut, parameters {cut['parameter_bytes'] / 1e6:.2f} MB, {cut['macs'] / 1e6:.1f} M MACs, "
            f"graphs {cut['graph_bytes'] / 1e3:.0f} kB"
        )
    if figures["whole_model"]:
        say("this package holds every layer of the model, as --release-whole-model allows")


def _say_tuning(report) -> None:
    top1 = {name: value for name, value in report.figures["top1"].items() if value is not None}
    if top1:
        say("top-1 on held-out public images: " + ", ".join(f"{name} {value:.1%}" for name, value in top1.items()))
    say(f"learning rates for sites: backend {report.figures['backend_lr']:g}, head {report.figures['head_lr']:g}")
    for each in report.figures["preview"]:
        say(
            f"preview at kappa {each['kappa']:g}: a decoder of {each['steps']} steps reads {each['psnr_db']:.1f} dB, "
            f"SSIM {each['ssim']:.2f} of {each['images']} pictures that it never saw; a linear one "
            f"{each['ridge_psnr_db']:.1f} dB, one colour for all {each['colour_psnr_db']:.1f} dB"
        )


def _leave(number: int, frame: object) -> None:
    """SIGTERM unwinds like any error, so that no half-written folder stays behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
