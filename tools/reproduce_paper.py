"""The setting of the Split Adaptation paper itself, for whoever has its models and data: a plan, a check, and the runs.

Folders hold what this project does not ship: WEIGHTS/MODEL.safetensors with timm's names; DATA/DATASET/train/CLASS/FILE
and DATA/DATASET/test/CLASS/FILE; PUBLIC/CLASS/FILE, the server's own labelled images (the paper's is ImageNet's).
`--dry-run` prints the plan and says what is missing. Computing and keeping rows is left to `reproduce`.

Sizes and settings are algorithms.md section 1's; where this project departs from the paper, the plan says so.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError, safe_open

from contract.console import ArgumentParser, print_document
from contract.errors import CutlayerError, DataError, why
from contract.image_folder import scan
from contract.output import open_output
from server_runtime.report import Table, to_text
from tools import reproduce
from tools.reproduce_baselines import CHOOSE
from tools.reproduce_cells import PACKAGES, PAPER_TUNE, unknown_word
from tools.reproduce_options import add_output, add_share
from tools.reproduce_rows import Adaptation, Effort
from tools.reproduce_world import DEVICE, SiteFolders, World, by_class, draw_key, draw_shots, made

SEEDS, SHOTS, KAPPA = (1, 42, 215), (3, 5, 10), 1.0
ALPHA, RUNS, REPLACED, LR, EPOCHS = 0.01, 64, 50, 1e-5, 100
DEPARTURES = (
    f"feature noise is Laplace of scale {KAPPA:g} sigma per channel (--kappas), the paper's 0.8 for all channels",
    "noise is drawn once per token and copied with it, the paper draws anew for each of 65 copies",
    "an epoch sees each image as it is and one of its copies, the paper's all 65",
    "labels go under a secret permutation, with the same gradients as the paper's exchange of losses",
    "Places365 has one linear layer as a head, the paper's two",
    "a Wiener filter stands before the backend",
)


@dataclass(frozen=True)
class PaperModel:
    """A model as the paper cuts it: blocks on the device of all blocks; T tokens of width d at the cut."""

    split: int
    depth: int
    tokens: int
    dim: int
    retrieval: bool = True  # patch retrieval; not for a hierarchical model
    blocks: bool = True  # one row of blocks, as offsite tuning needs

    @property
    def image_bytes(self) -> int:
        """Wire codes of one image."""
        return self.tokens * self.dim


MODELS = {
    "vit_large_patch16_224": PaperModel(16, 24, 197, 1024),
    "deit_base_patch16_224": PaperModel(8, 12, 197, 768),
    "swin_large_patch4_window7_224": PaperModel(22, 24, 196, 768, retrieval=False, blocks=False),
}
DATASETS = {"cifar100": 100, "places365": 365, "domainnet-clipart": 345}  # classes


@dataclass(frozen=True)
class Folders:
    """Where the user's files are."""

    weights: Path
    data: Path
    public: Path

    def weights_of(self, model: str) -> Path:
        return self.weights / f"{model}.safetensors"


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    folders = Folders(options.weights, options.data, options.public)
    lacking = [*check_export(), *check_files(folders, options)]
    if options.dry_run:
        show(options, lacking)
    if lacking:
        raise DataError(
            f"the paper's setting lacks {len(lacking)} things, first: {lacking[0]}",
            "add what is missing, or leave its model or data set out: --models, --datasets; --dry-run lists all",
        )
    if not options.dry_run:
        root = open_output(options.output)
        for name in options.models:
            run_model(options, root / name, folders, name)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce sa --paper", description=(__doc__ or "").splitlines()[0])
    for name, text in (
        ("--weights", "holds MODEL.safetensors"), ("--data", "holds DATASET/train and DATASET/test, by class"),
        ("--public", "the server's labelled images, by class"),
    ):  # fmt: skip
        parser.add_argument(name, type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--models", type=reproduce.listed_from(tuple(MODELS)), default=list(MODELS), help="default: all"
    )
    parser.add_argument("--datasets", type=reproduce.listed_from(tuple(DATASETS)), default=list(DATASETS))
    parser.add_argument("--studies", type=reproduce.listed_from(("main", "baselines")), default=["main", "baselines"])
    parser.add_argument("--cases", type=reproduce.listed_from(tuple(CHOOSE)), help="baselines (default: all)")
    parser.add_argument("--seeds", type=reproduce.listed(int), default=list(SEEDS), help="default: 1,42,215")
    parser.add_argument("--shots", type=reproduce.listed(int), default=list(SHOTS), help="default: 3,5,10")
    parser.add_argument("--kappas", type=reproduce.listed(float), default=[KAPPA], help="default: %(default)s")
    parser.add_argument("--test-images", type=int, metavar="N", help="sample of the test images (default: all)")
    parser.add_argument("--engine", choices=["torch", "onnxruntime"], default="torch")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, check the files, compute nothing")
    add_share(parser)
    add_output(parser)
    options = parser.parse_args(argv)
    options.study, options.quick, options.paper, options.shared = "sa", False, True, None
    known = options.cases
    reproduce.check(argparse.Namespace(**{**vars(options), "cases": None}))
    options.cases = known
    return options


# -- what is there


def check_export() -> Iterator[str]:
    """The exporter itself."""
    unknown = unknown_word(PACKAGES[PAPER_TUNE])
    if unknown:
        yield unknown


def check_files(folders: Folders, options: argparse.Namespace) -> Iterator[str]:
    """What is missing or does not fit, each in one line."""
    for name in options.models:
        yield from check_weights(folders.weights_of(name), name)
    yield from check_classes(folders.public, None, 1)
    for dataset in options.datasets:
        yield from check_classes(folders.data / dataset / "train", DATASETS[dataset], max(options.shots))
        yield from check_classes(folders.data / dataset / "test", DATASETS[dataset], 1)


def check_weights(path: Path, name: str) -> Iterator[str]:
    """Names and shapes against the model's own; values are not read."""
    try:
        shapes = shapes_of(path)
    except (OSError, SafetensorError) as error:
        yield f"{path}: {why(error, path)}"
        return
    with torch.device("meta"):
        model = timm.create_model(name, **model_args(shapes))
    for key, value in model.state_dict().items():
        if key not in shapes:
            yield f"{path}: {key} is missing"
            return
        if shapes[key] != tuple(value.shape):
            yield f"{path}: {key} should be {tuple(value.shape)}, found {shapes[key]}"
            return


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a safetensors file. Raises: OSError, SafetensorError."""
    with safe_open(path, framework="pt") as opened:
        return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118


def model_args(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of classes that the weights' own head has."""
    heads = [shape for key, shape in shapes.items() if key in ("head.weight", "head.fc.weight")]
    return {"num_classes": heads[0][0]} if heads else {}


def check_classes(folder: Path, classes: int | None, least: int) -> Iterator[str]:
    """A folder of class folders, with as many classes and images in each as are needed."""
    try:
        found = scan(folder, None)
    except CutlayerError as error:
        yield error.cause
        return
    counts = [0] * len(found.classes)
    for image in found.images:
        if image.class_index is not None:
            counts[image.class_index] += 1
    if len(counts) < 2 or (classes is not None and len(counts) != classes):
        yield f"{folder}: expected {'2 or more' if classes is None else classes} classes, found {len(counts)}"
    elif min(counts) < least:
        yield f"{folder}: expected {least} images in each class, found {min(counts)}"


# -- the plan


def plan_table(options: argparse.Namespace) -> Table:
    """What would be run, by model and data set."""
    lines = []
    for name in options.models:
        model = MODELS[name]
        for dataset in options.datasets:
            images = [shots * DATASETS[dataset] for shots in options.shots]
            sent = [f"{(each * (model.image_bytes + (392 if model.retrieval else 0))) / 1e6:.1f}" for each in images]
            main = len(options.shots) * len(options.seeds) * len(options.kappas) * ("main" in options.studies)
            baselines = len(baselines_of(options, model)) * len(options.shots) * len(options.seeds)
            lines.append((
                name, f"{model.split} of {model.depth}", dataset, DATASETS[dataset], ", ".join(map(str, images)),
                ", ".join(sent), main, baselines * ("baselines" in options.studies),
            ))  # fmt: skip
    columns = (
        "model", "blocks on the device", "data set", "classes", f"images at {','.join(map(str, options.shots))} shots",
        "MB sent", "rows", "baselines",
    )  # fmt: skip
    return Table("Plan", columns, tuple(lines))


def baselines_of(options: argparse.Namespace, model: PaperModel) -> list[str]:
    """Those that are asked for and that the model has."""
    asked = options.cases or list(CHOOSE)
    return [name for name in asked if model.blocks or name != "offsite_tuning"]


def show(options: argparse.Namespace, lacking: Sequence[str]) -> None:
    table = plan_table(options)
    settings = {
        "seeds": options.seeds, "alpha": ALPHA, "kappas": options.kappas, "epochs": EPOCHS, "learning_rate": LR,
        "augmentation_runs": RUNS, "replaced_patches": REPLACED, "tune": PAPER_TUNE,
    }  # fmt: skip
    if options.format == "json":
        plan = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        print_document(
            "reproduce",
            {"plan": plan, "settings": settings, "departures": list(DEPARTURES), "missing": list(lacking)},
        )
        return
    print(to_text(table))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in settings.items()))
    print("\ndepartures from the paper:\n" + "\n".join(f"- {text}" for text in DEPARTURES))
    print("\nmissing:\n" + ("\n".join(f"- {text}" for text in lacking) or "nothing"))


# -- the runs


def run_model(options: argparse.Namespace, root: Path, folders: Folders, name: str) -> None:
    """All rows of one model, kept and reported in a folder of its own."""
    model = MODELS[name]
    patches = model.tokens - 1
    adaptation = Adaptation(ALPHA, EPOCHS, RUNS, REPLACED / patches, LR, LR)
    if not model.retrieval:
        adaptation = replace(adaptation, runs=0, replaced=0.0)
    chosen = argparse.Namespace(**{**vars(options), "cases": baselines_of(options, model)})
    root.mkdir(parents=True, exist_ok=True)
    scratch = root / "scratch"
    reproduce.reproduce(
        chosen, root, scratch, lambda: paper_world(scratch, folders, name, options), Effort(adaptation=adaptation)
    )


def paper_world(root: Path, folders: Folders, name: str, options: argparse.Namespace) -> World:
    """The model, its public images, and the data sets' folders."""
    weights = folders.weights_of(name)
    notes = {dataset: f"{dataset} of {folders.data}, one device" for dataset in options.datasets}

    def site(dataset: str, shots: int, seed: int) -> SiteFolders:
        return folder_site(root, folders.data / dataset, shots, seed, options.test_images)

    return World(
        f"paper-{name}", root, name, model_args(shapes_of(weights)), weights, folders.public, notes, site,
        MODELS[name].split, words=(*PACKAGES[PAPER_TUNE], "--alpha", str(ALPHA)),
    )  # fmt: skip


def folder_site(root: Path, data: Path, shots: int, seed: int, test_images: int | None) -> SiteFolders:
    """A site that holds copies of its shots, and tests on the folder itself or on copies of a sample of it.

    Raises: DataError.
    """
    train, test = (
        {image.relative: image.path for image in scan(data / part, None).images} for part in ("train", "test")
    )
    drawn = {name: train[name] for name in draw_shots(list(train), shots, seed)}
    site = made(root / f"{data.name}-{shots}shot-seed{seed}", lambda path: copy_files(drawn, path))
    tested = data / "test"
    if test_images is not None:
        sample = sorted(test, key=lambda each: draw_key("test", each))[:test_images]
        chosen = {name: test[name] for name in sample}
        tested = made(root / f"{data.name}-test-{len(chosen)}", lambda path: copy_files(chosen, path))
    return SiteFolders({DEVICE: site}, {DEVICE: tested}, tuple(sorted(by_class(list(train)))))


def copy_files(files: Mapping[str, Path], target: Path) -> None:
    """Files under their names, CLASS/FILE, below `target`."""
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
