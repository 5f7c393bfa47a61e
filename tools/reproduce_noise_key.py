"""Which key should the noise of a part that trains have: one draw for ever, or one for each epoch? Both are attacked.

A VGG16-BN learns CIFAR-10 as in `reproduce_leakage`; at consecutive epochs the activations of the same pictures go up
under Laplace noise of deviation sigma. The attacker knows the weights of every epoch, as a server that hands them out
does, and combines the uploads with `epoch_difference`. The ridge on one upload stands beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from contract.console import ArgumentParser, print_document, run_command
from contract.errors import UsageError
from contract.image_folder import scan
from contract.output import open_output
from contract.tokens import TokenLayout
from exporter.architecture import create
from exporter.checkpoint import image_rule
from exporter.models import family_of
from server_runtime.attacks import Effort, Known, Pairs, Seen, Upload, find
from server_runtime.attacks._release import STATISTICS_IMAGES, Law, Release
from server_runtime.files import write_atomic
from server_runtime.leakage.cli import show_progress
from server_runtime.leakage.metrics import measure
from server_runtime.leakage.package import Client
from server_runtime.leakage.public import Pictures, Public, read_public
from server_runtime.report import Results, Table, to_text
from tools.reproduce_leakage import SIDE, STARTS, Training, train_all, unpack_images
from tools.reproduce_options import numbers
from tools.reproduce_split_world import FULL_CLASSES
from tools.reproduce_world import ROOT, alone

KEYS = ("one draw for ever", "one draw an epoch")
IMAGES_AT_ONCE = 250


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    with alone(root / "scratch"):
        folders = unpack_images(root / "scratch", options.shared or ROOT.parent / "shared")
        first = options.after
        epochs = [first + step for step in range(max(options.uploads))]
        training = Training(options.model, epochs[-1], epochs)
        weights = train_all(training, root / "scratch", folders, options.start)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    with torch.no_grad():
        for cut in options.cuts:
            rows += attack_cut(options, [weights[epoch] for epoch in epochs], folders["attacked"], cut, device)
    facts = {
        "model": options.model, "start": options.start, "epochs": epochs, "attacked": options.images, "rows": rows
    }  # fmt: skip
    write_atomic(root / f"noise-key-{options.start}-{first}.json", json.dumps(facts, indent=1).encode())
    if options.format == "json":
        print_document("reproduce-noise-key", facts)
    else:
        print("\n\n".join(map(to_text, results_of(rows).tables)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce_noise_key", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vgg16_bn", help="as reproduce_leakage has it (default: %(default)s)")
    parser.add_argument("--start", choices=STARTS, default="random", help="(default: %(default)s)")
    parser.add_argument("--after", type=int, default=5, metavar="EPOCHS", help="the first upload (default: 5)")
    parser.add_argument("--uploads", type=numbers, default=[1, 2, 5, 10], metavar="N,N,...", help="(default: 1,2,5,10)")
    parser.add_argument("--cuts", type=numbers, default=[1, 4, 10], metavar="N,N,...", help="(default: 1,4,10)")
    parser.add_argument("--sigmas", type=strengths, default=[0.5, 1.0, 2.5], metavar="X,X,...", help="0.5,1,2.5")
    parser.add_argument("--images", type=int, default=500, help="to attack (default: 500)")
    parser.add_argument("--learn", type=int, default=4000, help="to learn from (default: 4000)")
    parser.add_argument("--shared", type=Path, metavar="DIR", help="as reproduce_leakage has it")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    default = Path(tempfile.gettempdir()) / "cutlayer-reproduce-noise-key"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="DIR", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.after < 0 or min(options.uploads) < 1 or min(options.cuts) < 1 or min(options.sigmas) <= 0:
        raise UsageError("epochs, uploads, cuts and sigmas count from 0, 1, 1 and above 0", "correct the flag")
    return options


def strengths(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def attack_cut(
    options: argparse.Namespace, weights: Sequence[Path], folder: Path, cut: int, device: torch.device
) -> list[dict]:
    """Rows of one cut: sigma x key x number of uploads."""
    public, tokens, law = world(options, weights, folder, cut, device)
    truth = public.attacked.images(device)
    learn, held, victim = tokens
    rows = []
    for sigma in options.sigmas:
        release = Release(law, sigma, learn[0][:STATISTICS_IMAGES].float())
        for key in KEYS:
            rng = torch.Generator(device).manual_seed(cut)
            same = release.draw(len(truth), rng) if key == KEYS[0] else None
            uploads = [Upload(release.send(each.float(), rng, same), sigma) for each in victim]
            for count in options.uploads:
                known = Known(
                    Pairs(public.learn.images(device), learn[:count]), Pairs(public.held.images(device), held[:count]),
                    release,
                )  # fmt: skip
                attack = find("ridge" if count == 1 else "epoch_difference").build(Effort())
                attack.fit(known)
                found = attack.reconstruct(Seen(uploads=tuple(uploads[:count])))
                figures = asdict(measure(truth, found))
                rows.append({"cut": cut, "sigma": sigma, "key": key, "uploads": count, **figures})
    return rows


def world(
    options: argparse.Namespace, weights: Sequence[Path], folder: Path, cut: int, device: torch.device
) -> tuple[Public, list[tuple[Tensor, ...]], Law]:
    """Pictures, and float16 tokens of those to learn from, choose on and attack, for the weights of each epoch."""
    model = create(options.model, False, {"small_images": True, "num_classes": FULL_CLASSES})
    rule = image_rule(model, (3, SIDE, SIDE))
    public = read_public(scan(folder, None), rule, options.images, options.learn, 0, show_progress)
    tokens: list[list[Tensor]] = [[], [], []]
    for path in weights:
        model.load_state_dict(load_file(path))
        part, _ = family_of(model)[1].cut(model, cut)
        client = Client(part, rule).eval().to(device)
        for place, pictures in enumerate((public.learn, public.held, public.attacked)):
            tokens[place].append(run(client, pictures, device))
    sample = part.eval().to(device)(torch.zeros(1, 3, SIDE, SIDE, device=device))
    layout = TokenLayout(0, tuple(sample.shape[2:]), sample.shape[1])
    return public, [tuple(each) for each in tokens], Law(layout, (SIDE, SIDE), None)


def run(client: Client, pictures: Pictures, device: torch.device) -> Tensor:
    """Tokens (n, T, d), float16 as `Pairs` of many epochs need the memory."""
    parts = [client(images).half() for images in pictures.images(device).split(IMAGES_AT_ONCE)]
    return torch.cat(parts)


def results_of(rows: Sequence[dict]) -> Results:
    """By cut and sigma: PSNR after so many uploads, for both keys."""
    counts = sorted({row["uploads"] for row in rows})
    found = {(row["cut"], row["sigma"], row["key"], row["uploads"]): row for row in rows}
    lines = []
    for cut, sigma, key in dict.fromkeys((row["cut"], row["sigma"], row["key"]) for row in rows):
        cells = [found[cut, sigma, key, count] for count in counts]
        lines.append((str(cut), f"{sigma:g}", key, *(f"{each['psnr_db']:.1f} / {each['ssim']:.2f}" for each in cells)))
    columns = ("cut", "sigma", "key", *(f"{count} uploads" for count in counts))
    return Results("The key of noise", (), (Table("PSNR in dB / SSIM", columns, tuple(lines)),))


if __name__ == "__main__":
    sys.exit(run_command(main))
