"""A small real deployment for tests: keys, image folders, a signed INT8 package and its backend.

Run as `python -m tests.make_package FOLDER`; the torch-free environments test against what it leaves there. Pictures
are drawn here: stripes whose direction and colour make the class.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from exporter import cli
from tests import eft_package

SIDE_PX = 32
MODEL = "vit_tiny_patch16_224"
MODEL_ARGS = ("img_size=32", "patch_size=8", "embed_dim=48", "depth=3", "num_heads=3", "num_classes=4")
PUBLIC_CLASSES = 4
PRIVATE_CLASSES = ("north", "east", "south")
DEVICES = ("device-a", "device-b")
_VIT = ("--model", MODEL, *(word for each in MODEL_ARGS for word in ("--model-arg", each)))
_SMALL = ("--model-arg", "small_images=True")
_CNN = ("--model", "resnet18", *_SMALL, "--model-arg", "channels=(8,8,12,16)", "--model-arg", "layers=(1,1,1,1)")
_VGG = ("--model", "vgg11_bn", *_SMALL)
_SMOOTH = ("--model-arg", "act_layer=silu")
_NO_MAXIMA = ("--model-arg", "average_pools=True")
TRAINING = {  # packages whose parts are trained on the devices
    "parts": (*_VIT, "--for", "sequential_split", "--cuts", "1,2", "--augment", "crop=2,flip"),
    "whole": (*_VIT, "--for", "fed_avg", "--release-whole-model", "--classes", len(PRIVATE_CLASSES)),
    "masked": (*_VIT, "--for", "sequential_split", "--cuts", "1,2", "--keep-patches", "0.25"),
    "cnn": (*_CNN, "--for", "sequential_split", "--cuts", "2,4"),
    "smooth-cnn": (*_CNN, *_SMOOTH, "--for", "sequential_split", "--cuts", "2,4"),
    "eeft": (*_CNN, *_SMOOTH, "--for", "eeft", "--release-whole-model"),
    "vgg": (*_VGG, "--for", "sequential_split", "--cuts", "4,8"),
    "prototypes": (*_CNN, *_SMOOTH, "--for", "prototypes", "--cuts", "4", "--projection", "8", "--augment", "flip"),
    "smooth-vgg": (*_VGG, *_SMOOTH, *_NO_MAXIMA, "--for", "sequential_split", "--cuts", "4,8"),
    eft_package.NAME: eft_package.WORDS,
}
HALF = ("front", "parts", "whole", "masked", "cnn", "smooth-cnn")  # takes about as long as the others and the modules


def main(root: Path) -> None:
    """Everything; two processes export, each a half."""
    rng = np.random.default_rng(0)
    for label in range(PUBLIC_CLASSES):
        draw_folder(root / "public" / f"public-{label}", label, 12, rng)
    for place, name in enumerate(PRIVATE_CLASSES):
        for device in DEVICES:
            draw_folder(root / device / "train" / name, PUBLIC_CLASSES + place, 4, rng)
            draw_folder(root / device / "test" / name, PUBLIC_CLASSES + place, 5, rng)
    (root / "classes.txt").write_text("\n".join(sorted(PRIVATE_CLASSES)) + "\n")
    devices = [word for device in DEVICES for word in ("--device", device)]
    keys = [sys.executable, "-m", "tools.make_keys", "-o", str(root / "keys"), "--site", "site", *devices]
    subprocess.run(keys, check=True)
    others = [name for name in ("front", *TRAINING, "modules") if name not in HALF]
    command = [sys.executable, "-m", "tests.make_package", str(root)]
    halves = [subprocess.Popen([*command, *names]) for names in (HALF, others)]
    statuses = [half.wait() for half in halves]
    if any(statuses):
        raise SystemExit("a package could not be made")


def make(root: Path, name: str) -> None:
    """One of the packages, or the modules."""
    if name == "modules":
        from tests import make_modules  # loads torch, which the process that waits for both halves need not

        make_modules.make(root / name)
        return
    int8 = ("--split", 2, "--int8", "--calibration", root / "public", "--tune", "none")
    words = (*_VIT, *int8) if name == "front" else TRAINING[name]
    export(*words, "--signing-key", root / "keys" / "publisher.key", "-o", root / name)


def draw_folder(folder: Path, label: int, count: int, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(stripes(label, rng)).save(folder / f"{number}.png")


def stripes(label: int, rng: np.random.Generator) -> np.ndarray:
    """(32, 32, 3) uint8: direction and colour by class, phase, width and noise at random."""
    rows, columns = np.mgrid[:SIDE_PX, :SIDE_PX] / SIDE_PX
    angle = label * np.pi / 7
    across = rows * np.cos(angle) + columns * np.sin(angle)
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * (across * rng.uniform(3, 4) + rng.uniform()))
    colour = 0.5 + 0.5 * np.cos(2 * np.pi * (label / 7 + np.arange(3) / 3))
    noisy = wave[..., None] * colour + rng.normal(scale=0.08, size=(SIDE_PX, SIDE_PX, 3))
    return (255 * noisy.clip(0, 1)).astype(np.uint8)


def export(*words: object) -> None:
    """The exporter in this process: torch, which takes seconds to load, is loaded once."""
    status = cli.main([str(word) for word in words])
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        make(Path(sys.argv[1]), wanted)
    if not sys.argv[2:]:
        main(Path(sys.argv[1]))
