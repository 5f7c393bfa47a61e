"""Measure noise recipes: accuracy of split adaptation under noisy inference against what attackers read back.

One row for each recipe (what is sent, and how the backend is tuned for it); rows are kept in DIR/rows, so that an
interrupted study goes on where it was and several commands may work on one DIR (--share). What recipes are is said in
`reproduce_noise_release`, attacks are `reproduce_noise_attack`'s, learning is `reproduce_noise_learning`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from contract.output import open_output
from server_runtime.files import write_atomic
from server_runtime.report import Results, Table, to_html, to_text
from tools.kept_rows import finished, keep
from tools.reproduce_noise_attack import Attacker, AttackRule, Pairs, Quality, images_of, patches_of, quality
from tools.reproduce_noise_learning import (
    TUNES,
    Rates,
    adapt,
    features_of,
    nearest_others,
    probe,
    tune_backend,
)
from tools.reproduce_noise_release import Known, Release, Wire, know
from tools.reproduce_noise_shape import learn_shape
from tools.reproduce_noise_world import Halves, Pictures, SitePictures, open_pictures, open_site
from tools.reproduce_options import add_output, numbers
from tools.reproduce_world import ARCHIVES, ROOT, World, alone, full_world, listing, quick_world
from tools.share import WHOLE, Share, read_share, share_of

ROW_SCHEMA = 1
DATASET = "cifar10"
ALPHA = 0.1
NOISY_FRONTENDS = 2  # of the server's tuning and of the attacker
UNSEEN = 0.1  # share of the public pictures on which an attack's progress is checked
RATES = (Rates(1e-4, 3e-3), Rates(3e-4, 3e-3))


@dataclass(frozen=True)
class Recipe:
    """One row of the study."""

    release: Release
    tune: str = "none"

    @property
    def name(self) -> str:
        return f"{self.release.name}; tuned: {self.tune}"


@dataclass(frozen=True)
class Size:
    """How much is spent on a row."""

    attack: AttackRule = field(default_factory=AttackRule)
    public: int = 10_000
    attacked: int = 500
    epochs: int = 100  # of an adaptation
    tune_epochs: float | None = None  # None: the rule's own


QUICK = Size(AttackRule(steps=300, batch=32, width=64, blocks=2, heads=4), 300, 60, 30, 2.0)

PLAIN = Release()
CHANNEL = Release("all", 1.0, 1.0)
HALF = Release("checkerboard", 1.0, 0.5)
QUARTER = Release("quarter", 1.0, 0.5)
STRONG_HALF = Release("checkerboard", 2.0, 0.5)
RECIPES = (  # the most telling first
    Recipe(PLAIN), Recipe(PLAIN, "distil"), Recipe(HALF, "distil"), Recipe(HALF), Recipe(HALF, "noise-aware"),
    Recipe(CHANNEL, "distil"), Recipe(CHANNEL), Recipe(CHANNEL, "noise-aware"), Recipe(CHANNEL, "paper"),
    Recipe(QUARTER, "distil"), Recipe(STRONG_HALF, "distil"),
    Recipe(Release("all", 0.0, 0.5, prefix_alone=True), "distil"),
    Recipe(Release("quarter", 2.0, 0.5), "distil"),
    Recipe(Release("all", 2.0, 0.5), "distil"),
    Recipe(Release("checkerboard", 1.0, 0.5, kappa_rest=3.0), "distil"),
    Recipe(Release("checkerboard", 1.0, 0.5, hidden=True), "distil"),
    Recipe(Release("quarter", 0.5, 0.5, hidden=True), "distil"),
    Recipe(Release("all", 1.0, 0.5, learnt=True), "distil"),
    Recipe(Release("all", 0.0, 0.25, prefix_alone=True), "distil"),
    Recipe(Release("all", 4.0, 0.5), "distil"),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What one row gave. Accuracies are means over seeds, by shots; PSNR in dB and SSIM over the attacked images."""

    accuracy: dict[str, float]
    by_seed: dict[str, list[float]]
    attacks: dict[str, Quality]
    progress_db: list[float]
    bytes_per_image: int
    seconds: float


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    size = replace(QUICK if options.quick else Size())
    if options.attack_steps:
        size = replace(size, attack=replace(size.attack, steps=options.attack_steps))
    if options.public_images:
        size = replace(size, public=options.public_images)
    with alone(root / "scratch" / ("quick" if options.quick else "full")):
        scratch = root / "scratch" / ("quick" if options.quick else "full")
        world = quick_world(scratch) if options.quick else full_world(
            scratch, options.shared or ROOT.parent / "shared", options.test_images, [DATASET]
        )  # fmt: skip
        for seed in options.seeds:
            world.site(world.datasets[0], max(options.shots), seed)
    study = Study(world, size, options.seeds, options.shots)
    rows = []
    for recipe in mine(options.share, options.only):
        path = root / "rows" / f"{world.name}-{slug(recipe)}.json"
        head = {
            "row_schema": ROW_SCHEMA, "world": world.name, "recipe": asdict(recipe), "size": asdict(size),
            "seeds": options.seeds, "shots": options.shots, "test_images": options.test_images,
        }  # fmt: skip
        row = finished(path, json.loads(json.dumps(head)), "accuracy")
        if row is None:
            if options.seconds and time.monotonic() - STARTED_S > options.seconds:
                say(f"no time left for: {recipe.name}")
                continue
            row = keep(path, {**head, "name": recipe.name, **asdict(study.row(recipe))})
        say(line_of(row))
        rows.append(row)
    report(options, root, rows)
    return 0


STARTED_S = time.monotonic()


def mine(share: Share, only: str | None) -> list[Recipe]:
    """This command's recipes: those of one release stay together, because they share an attack."""
    chosen = [recipe for recipe in RECIPES if only is None or only in recipe.name]
    return share_of(chosen, share, lambda recipe: recipe.release)


def slug(recipe: Recipe) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in recipe.name).replace("--", "-")


class Study:
    """A world's tokens, made when first asked for, and the rows measured on them."""

    def __init__(self, world: World, size: Size, seeds: Sequence[int], shots: Sequence[int]) -> None:
        self._size, self._seeds, self._shots = size, seeds, shots
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        self._halves = Halves(world, self._device)
        self._public = open_pictures(world.public, self._halves.rule, size.public)
        self._sites: list[SitePictures] = []
        test: Pictures | None = None
        for seed in seeds:
            shared = test if world.name == "full" else None  # only there all seeds have the same test pictures
            site = open_site(world, max(shots), seed, self._halves.rule, shared)
            test = site.test
            self._sites.append(site)
        mirrored = self._public.mirrored()
        order = torch.randperm(len(self._public), generator=torch.Generator().manual_seed(0))
        held = max(1, round(UNSEEN * len(order)))
        self._learn = torch.cat([order[held:], order[held:] + len(order)])
        self._unseen = order[:held]
        self._mirrored = mirrored
        self._labels = mirrored.labels.to(self._device)
        self._patches = patches_of(mirrored.pixels.to(self._device), self._halves.layout.grid)
        self._clean: Tensor | None = None
        self._token_cache: tuple[object, list[Tensor], list[tuple[Tensor, Tensor]], Known] | None = None
        self._attack_cache: tuple[Release, dict[str, Quality], list[float]] | None = None

    def _tokens(self, release: Release) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], Known]:
        """Public tokens of the plain and noised frontends, (train, test) tokens of every site, public statistics."""
        hidden = release.kept if release.hidden else "all"
        if self._token_cache is None or self._token_cache[0] != hidden:
            halves = self._halves
            self._token_cache = None  # let it go before the next is made
            frontends = [halves.frontend] + [halves.noised(ALPHA, 1000 + n) for n in range(NOISY_FRONTENDS)]
            public = [halves.tokens(each, self._mirrored.pixels, hidden) for each in frontends]
            sites = []
            for seed, site in zip(self._seeds, self._sites, strict=True):
                device = halves.noised(ALPHA, seed)
                sites.append(tuple(halves.tokens(device, part.pixels, hidden) for part in (site.train, site.test)))
            self._token_cache = (hidden, public, sites, know(halves.layout, public[0]))
        return self._token_cache[1:]

    def _clean_features(self) -> Tensor:
        """What the plain backend makes of all public pictures, (n, f)."""
        if self._clean is None:
            tokens = self._halves.tokens(self._halves.frontend, self._mirrored.pixels)
            self._clean = features_of(self._halves.backend, tokens, lambda part: part.float())
        return self._clean

    def row(self, recipe: Recipe) -> Found:
        """Tune, adapt and attack."""
        started_s = time.monotonic()
        say(f"== {recipe.name}")
        public, sites, known = self._tokens(recipe.release)
        shape = learn_shape(self._halves, known, public, self._learn, self._clean_features(), self._patches,
                            self._size.attack) if recipe.release.learnt else None  # fmt: skip
        wire = Wire(recipe.release, known, self._device, shape)
        backend = self._tuned(recipe, wire, public)
        accuracy = self._accuracies(wire, backend, sites)
        attacks, progress = self._attack(wire, public, sites)
        sent = (len(wire.sent) + known.layout.prefix) * known.layout.dim
        means = {name: sum(values) / len(values) for name, values in accuracy.items()}
        return Found(means, accuracy, attacks, progress, sent, round(time.monotonic() - started_s, 1))

    def _tuned(self, recipe: Recipe, wire: Wire, public: list[Tensor]) -> torch.nn.Module:
        if recipe.tune == "none":
            return self._halves.backend
        rows = self._learn.to(self._device)
        assert self._halves.head is not None
        return tune_backend(
            self._halves.backend, self._halves.head, TUNES[recipe.tune], [each[rows] for each in public],
            self._labels[rows], self._clean_features()[rows], lambda tokens: wire.restore(wire.send(tokens)), 0,
            self._size.tune_epochs,
        )  # fmt: skip

    def _accuracies(
        self, wire: Wire, backend: torch.nn.Module, sites: list[tuple[Tensor, Tensor]]
    ) -> dict[str, list[float]]:
        """By method and shots, one figure per seed; every image is sent once, and tests carry the same noise."""
        found: dict[str, list[float]] = {}
        for seed, site, (train, test) in zip(self._seeds, self._sites, sites, strict=True):
            torch.manual_seed(seed)
            received, tested = wire.send(train), torch.cat([wire.send(part) for part in test.split(250)])
            wanted = site.test.labels.to(self._device)
            seen, asked = (features_of(backend, part, wire.restore) for part in (received, tested))
            for shots in self._shots:
                rows = site.shots(shots).to(self._device)
                labels = site.train.labels.to(self._device)[rows]
                name = f"{shots}-shot"
                found.setdefault(f"probe {name}", []).append(
                    probe(seen[rows], labels, asked, wanted, site.classes)
                )  # fmt: skip
                patches = train[rows][:, wire.places[wire.layout.prefix :]]
                sources = nearest_others(patches) if patches.shape[1] else patches.new_zeros((len(rows), 0)).long()
                for rates in RATES:
                    model, head = adapt(
                        backend, received[rows], labels, sources, wire.layout.prefix, wire.restore, site.classes, rates,
                        self._size.epochs, seed,
                    )  # fmt: skip
                    right = (head(features_of(model, tested, wire.restore)).argmax(1) == wanted).float().mean()
                    found.setdefault(f"sa {rates.backend:g} {name}", []).append(float(right))
        return found

    def _attack(
        self, wire: Wire, public: list[Tensor], sites: list[tuple[Tensor, Tensor]]
    ) -> tuple[dict[str, Quality], list[float]]:
        """On the first site's test pictures, which no attacker has seen."""
        if self._attack_cache is not None and self._attack_cache[0] == wire.release:
            return self._attack_cache[1:]
        layout, size = self._halves.layout, (self._halves.rule.height, self._halves.rule.width)
        learn, unseen = self._learn.to(self._device), self._unseen.to(self._device)
        known = Pairs(tuple(each[learn] for each in public[1:]), self._patches[learn])
        checked = Pairs((public[1][unseen],), self._patches[unseen])
        attacker = Attacker(wire.send, wire.restore, wire.places, layout.prefix, known, checked)
        progress = attacker.train(self._size.attack, 0)
        tokens, pictures = sites[0][1], self._sites[0].test
        chosen = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))[: self._size.attacked]
        true = pictures.pixels[chosen].to(self._device).permute(0, 3, 1, 2) / 255.0
        torch.manual_seed(2)
        received = wire.send(tokens[chosen.to(self._device)])
        colour = (
            attacker.ridge(received[:0]).new_zeros(true.shape)
            + (self._patches[learn].reshape(-1, 3).mean(0)[None, :, None, None])
        )
        found = {"mean colour": quality(true, colour)}
        for name, decode in (
            ("ridge", attacker.ridge), ("filtered ridge", attacker.filtered_ridge),
            ("transformer", attacker.transformer),
        ):  # fmt: skip
            found[name] = quality(true, images_of(decode(received), layout.grid, size))
        self._attack_cache = (wire.release, found, progress)
        return found, progress


def line_of(row: dict) -> str:
    """One row in one line."""
    accuracy = ", ".join(f"{name} {100 * value:.1f}" for name, value in row["accuracy"].items())
    attacks = ", ".join(f"{name} {each['psnr_db']:.2f} dB {each['ssim']:.2f}" for name, each in row["attacks"].items())
    checks = " ".join(f"{value:.2f}" for value in row["progress_db"])
    return f"{row['name']}: {accuracy} %; {attacks}; on unseen public {checks}; {row['seconds']} s"


def results_of(rows: Sequence[dict], shots: Sequence[int]) -> Results:
    """The curve as a table."""
    head = ["recipe", "bytes"]
    for count in shots:
        head += [f"SA {count}-shot", f"probe {count}-shot"]
    head += ["ridge", "filtered ridge", "transformer dB", "SSIM"]
    lines = []
    for row in rows:
        line = [row["name"], str(row["bytes_per_image"])]
        for count in shots:
            line += [
                " / ".join(f"{100 * row['accuracy'][f'sa {rates.backend:g} {count}-shot']:.1f}" for rates in RATES),
                f"{100 * row['accuracy'][f'probe {count}-shot']:.1f}",
            ]
        attacks = row["attacks"]
        line += [f"{attacks[name]['psnr_db']:.2f}" for name in ("ridge", "filtered ridge", "transformer")]
        lines.append((*line, f"{attacks['transformer']['ssim']:.3f}"))
    title = (
        "Noise recipes: accuracy under noisy inference (SA at backend rates "
        + " and ".join(f"{rates.backend:g}" for rates in RATES)
        + ") against reconstruction"
    )
    return Results("Noise recipes", (), (Table(title, tuple(head), tuple(lines)),))


def report(options: argparse.Namespace, root: Path, rows: Sequence[dict]) -> None:
    page = results_of(rows, options.shots)
    write_atomic(root / "report.html", to_html(page).encode())
    if options.format == "json":
        print_document("reproduce-noise", {"rows": list(rows), "report": str(root / "report.html")})
    else:
        print("\n\n".join(map(to_text, page.tables)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/reproduce_noise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits and a small model: minutes on two cores")
    parser.add_argument("--seeds", type=numbers, help="default: 1 with --quick, else 1,42,215")
    parser.add_argument("--shots", type=numbers, help="default: 5 with --quick, else 5,10")
    parser.add_argument("--test-images", type=int, default=2000, metavar="N", help="of CIFAR-10 (default: 2000)")
    parser.add_argument("--public-images", type=int, metavar="N", help="most public images (default: 10000)")
    parser.add_argument("--attack-steps", type=int, metavar="N", help="of the transformer decoder (default: 5000)")
    parser.add_argument("--only", metavar="TEXT", help="recipes whose name contains TEXT")
    parser.add_argument(
        "--share", type=read_share, default=WHOLE, metavar="I/N", help="this command's part of the recipes"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no row after this time")
    parser.add_argument("--shared", type=Path, metavar="DIR", help=f"holds {listing(ARCHIVES)}")
    add_output(parser, "cutlayer-reproduce-noise")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or ([1] if options.quick else [1, 42, 215])
    options.shots = options.shots or ([5] if options.quick else [5, 10])
    if min(options.shots) < 2 or (options.attack_steps is not None and options.attack_steps < 1):
        raise UsageError("expected 2 shots or more and 1 attack step or more", "correct --shots or --attack-steps")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
