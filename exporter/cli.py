"""export-frontend: a model and a cut in, a signed device package and the server's backend out.

Flags, environment and cutlayer.toml become one ExportPlan here; the work is exporter.build's for frontends and
exporter.training_package's for parts that devices train.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contract.canonical import encode
from contract.config import REQUIRED, Resolved, check_inputs, find_file, resolve
from contract.console import print_document, run_command, say
from contract.errors import UsageError
from contract.extras import require
from contract.output import check_output
from contract.signature import PrivateKey, generate, key_id, load_private, save_private, save_public
from contract.training import HOLDS, OWN_HEADS, PrototypeRule
from exporter.gate_cli import GATE_FIELDS, make_gate
from exporter.gate_plan import GatePlan
from exporter.options import FIELDS, OF_FRONTENDS, OF_MODULES, OF_PROTOTYPES, OF_TRAINING, make_parser, read_model_args
from exporter.plan import (
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.list_splits is not None:
        _refuse_idle(arguments, "list_splits", "model_arg", "format")
        return _list_splits(arguments.list_splits, read_model_args(arguments.model_arg) or {}, arguments.format)
    flags = {**vars(arguments), "model_args": read_model_args(arguments.model_arg)}
    is_auto = arguments.split == "auto"
    if is_auto:
        flags["split"] = None
    file = find_file(arguments.config, Path.cwd())
    if arguments.add_table is not None:
        _refuse_idle(arguments, "add_table", "signing_key", "format", "config")
        return _add_table(*map(Path, arguments.add_table), _key_alone(flags["signing_key"], file), arguments.format)
    settings = resolve(
        "export", FIELDS, {field.name: flags[field.name] for field in FIELDS}, os.environ, file, arguments.show_config
    )
    if is_auto:
        settings = _without_split(settings)
    if arguments.show_config:
        print(settings.show())
        return 0
    gate = make_gate(settings, is_auto, _cuts(settings))
    plan = make_plan(settings, arguments.force, arguments.release_whole_model, gate is not None)
    check_inputs(FIELDS, settings)
    check_output(Path(plan.output))
    require("onnx", "torch", "timm")
    signal.signal(signal.SIGTERM, _leave)
    if gate is not None:
        return _export_gated(plan, gate(plan), arguments.format)
    report = _export(plan)
    if arguments.format == "json":
        print_document("export", asdict(report))
    else:
        _say_report(report)
    return 0


def _refuse_idle(arguments: argparse.Namespace, purpose: str, *known: str) -> None:
    """Raises UsageError for a flag that would change nothing; settings of files are there for exports."""
    usual = vars(make_parser().parse_args([]))
    idle = [name for name, value in vars(arguments).items() if value != usual[name] and name not in (purpose, *known)]
    if idle:
        flags = [f"--{name.replace('_', '-')}" for name in (idle[0], purpose)]
        raise UsageError(f"{flags[0]} has no part in {flags[1]}, which exports nothing", "leave it out")


def _list_splits(model: str, model_args: Mapping[str, ModelArg], form: str) -> int:
    from exporter.list_splits import list_splits, table

    found = list_splits(model, model_args)
    if form == "json":
        print_document("splits", asdict(found))
    else:
        print("\n".join(table(found)))
    return 0


def make_plan(settings: Resolved, force: bool, release_whole_model: bool = False, is_gated: bool = False) -> ExportPlan:
    """The plan of settled settings; paths become texts. Raises UsageError when they do not fit together."""
    values: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.values.items()
    }
    values["model_args"] = tuple(sorted(values["model_args"].items()))
    chosen = {name: values.pop(name) for name in ("for", "cuts", *OF_TRAINING)}
    for field in GATE_FIELDS:
        del values[field.name]
    cuts = _cuts(settings)
    if holds_of(chosen["for"]) != "frontend":
        idle = [f"--{name.replace('_', '-')}" for name in OF_MODULES if settings.origin[name] != "default"]
        if idle and HOLDS[chosen["for"]] != "modules":
            raise UsageError(f"{idle[0]} was given, but {chosen['for']} adds no modules", "it belongs to --for eeft")
        idle = [f"--{name.replace('_', '-')}" for name in OF_FRONTENDS if settings.origin[name] != "default"]
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
    idle = [f"--{name.replace('_', '-')}" for name in OF_TRAINING if settings.origin[name] != "default"]
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
    for name in ("preview_steps", "preview_minutes"):
        if settings.origin[name].startswith("--") and not values["preview"]:
            raise UsageError(f"{settings.origin[name]} is of --preview, which was not given", "add --preview")
    values["split"] = cuts[0] if cuts else None
    if is_gated and settings.origin["kappa"] == "default":  # it is swept, and no reason to refuse a ceiling
        values["kappa"] = max(0.0, min(values["kappa"], values["kappa_max"]))
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
    modules = ModuleChoices(*(chosen[name] for name in OF_MODULES)) if holds == "modules" else None
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
    given = [name for name in OF_PROTOTYPES if chosen[name] not in (None, False)]
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


def _signer(plan: ExportPlan) -> Callable[[], PrivateKey]:
    """The key that was named, or the one beside the output, which the first export makes when it has something to sign;
    one that is there is read now, as a mistake should not be told after an hour."""
    beside = Path(plan.output).absolute().parent / "signing-key.pem"
    path = beside if plan.signing_key is None else Path(plan.signing_key)
    if plan.signing_key is None and not beside.exists():
        return lambda: load_private(beside) if beside.exists() else _make_key(beside)
    key = load_private(path)
    return lambda: key


def _make_key(path: Path) -> PrivateKey:
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
