"""The settings of export-frontend as they may be given: flag, environment and file, with their help.

Which of them go together, and the plan that they make, is exporter.cli's; those of a leakage-gated export are
exporter.gate_cli's.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Sequence
from pathlib import Path

from contract.config import REQUIRED, Field
from contract.console import ArgumentParser
from contract.errors import UsageError
from contract.tokens import KEPT
from contract.training import HOLDS
from exporter.gate_cli import GATE_FIELDS
from exporter.plan import ACTIVATIONS, GRADIENTS, OPTIMISERS, PEFTS, QUANTIZERS, TUNES, ModelArg

DESCRIPTION = "A model and a cut in, a signed device package and the server's backend out."
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
    Field(
        "calibration",
        Path,
        None,
        "folder of public images, one folder per class if the backend is to be tuned",
        reads="folder",
    ),
    Field("weights", Path, None, "safetensors file or torch state dict", reads="file"),
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
    Field(
        "tuning_subsets",
        int,
        3,
        "how many more INT8 frontends, each calibrated on its own part of the public images, the backend is tuned "
        "with, so that it fits no single one; 0: the one that is sent alone",
    ),  # fmt: skip
    Field(
        "played_sites",
        int,
        None,
        "how many small tasks are made of the public images to try learning rates for sites on; more take longer and "
        "choose more surely; default: 2 to 6, by the size of the backend",
    ),  # fmt: skip
    Field("limit_tuning", int, 2000, "most images that the backend is tuned on"),
    Field("preview", bool, False, "add an attacker's decoders to the package, for edge-run --preview; takes minutes"),
    Field("preview_steps", int, 1500, "steps of training of each decoder; the more, the nearer to a real attacker's"),
    Field("preview_minutes", float, 15.0, "time after which the training of decoders ends with what it has"),
    Field("tensorrt", bool, False, "check that TensorRT, or tensorrt_rtx without a GPU, builds plans of the frontend"),
    Field(
        "signing_key",
        Path,
        None,
        "private key (PEM); default: signing-key.pem beside the output, made if missing",
        reads="file",
    ),
    Field(
        "for",
        str,
        "split_adaptation",
        "strategy of server-run that the package is made for: a frontend that stays as it is for split_adaptation and "
        "linear_probe, else what devices train",
    ),  # fmt: skip
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
        "share of an image's patches, 0 to 1, that goes through the part in training; default: all, with eft_vit 0.25",
    ),  # fmt: skip
    Field(
        "skips",
        int,
        3,
        "eeft: from so many earlier blocks a light bypass leads into each block of the model; 1 is lighter, and was "
        "better wherever it was measured (docs/results.md)",
    ),
    Field(
        "complexity",
        float,
        0.3,
        "eeft: how much training prefers to use few of the model's blocks, as a weight beside the task's loss; 0: not "
        "at all",
    ),  # fmt: skip
    Field(
        "start_alpha",
        float,
        3.0,
        "eeft: how much of each block's output is used at first, as the logit of a share: 3 means 0.95; published: -3",
    ),  # fmt: skip
    Field(
        "start_skips",
        float,
        0.0,
        "eeft: how loud the bypasses are at first, 0 to 1; 0 leaves the model as it is until they are trained; "
        "published: 1",
    ),  # fmt: skip
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
OF_PROTOTYPES = ("projection", "distance", "no_normalise", "count_step")
OF_MODULES = ("skips", "complexity", "start_alpha", "start_skips")
OF_TRAINING = ("classes", "optimiser", "momentum", "weight_decay", "augment", "gradient", "activations", "freeze",
               "recompute", "keep_patches", "peft", *OF_MODULES, *OF_PROTOTYPES)  # fmt: skip
OF_FRONTENDS = ("alpha", "kappa", "kappa_max", "sent_patches", "prefix_noise", "quantizer", "tune", "limit_tuning",
                 "no_hilbert", "tuning_subsets", "played_sites", "tensorrt")  # fmt: skip
_GROUPS = (  # of --help; the first that has a setting takes it
    ("a package for eeft", OF_MODULES),
    ("a package for prototypes", OF_PROTOTYPES),
    ("a package of what devices train (--for)", OF_TRAINING),
    (
        "a frontend, which devices run as it is",
        ("int8", "masked", "preview", "preview_steps", "preview_minutes", *OF_FRONTENDS),
    ),
    ("an export that leakage decides", tuple(field.name for field in GATE_FIELDS)),
)
_RELEASE_HELP = "agree that the package holds every layer of the model; recorded, and only taken from the command line"
_SPLITS_HELP = "print where MODEL, with --model-arg, can be cut and what each cut costs; nothing is exported"
_METAVARS = {"cuts": "CUTS", "freeze": "NAMES", "augment": "RULE", "split": "N|auto", "max_leakage": "LIMIT",
             "gate_attacks": "NAMES"}  # fmt: skip
_ADD_TABLE_HELP = "put a table of leakage-profile into the package DIR that it is of and sign it anew; exports nothing"
_MODEL_ARG_HELP = "an argument of timm.create_model, as a Python literal or text; may be given several times"


def make_parser() -> argparse.ArgumentParser:
    """Every setting is a flag; the rest is about this one call."""
    parser = ArgumentParser(prog="export-frontend", description=DESCRIPTION)
    groups = [(parser.add_argument_group(title), names) for title, names in _GROUPS]
    for field in FIELDS:
        add = next((group for group, names in groups if field.name in names), parser).add_argument
        if field.name == "model_args":
            add("--model-arg", action="append", default=[], metavar="KEY=VALUE", help=_MODEL_ARG_HELP)
        elif field.name == "max_leakage":
            add(_flag(field), action="append", metavar=_METAVARS[field.name], help=field.described)
        elif field.type is bool:
            add(_flag(field), action="store_true", default=None, help=field.described)
        else:
            names = ("-o", _flag(field)) if field.name == "output" else (_flag(field),)
            choices = _CHOICES.get(field.name)
            metavar = None if choices else _METAVARS.get(field.name, field.type.__name__.upper())
            add(*names, default=None, choices=choices, metavar=metavar, help=field.described)
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


def read_model_args(given: Sequence[str]) -> dict[str, ModelArg] | None:
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
