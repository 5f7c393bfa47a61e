"""Runs P3SL on a modelled fleet: the product's own strategy, devices and choices, with seconds and joules of a model.

For each environment of a fleet file: which split each device chooses as its weight of privacy alpha goes from 0 to 1; a
training of some epochs with shares of time awake and what sleep saves; and each device's split, alpha, sigma, leakage
and personalised chain. Devices with a table of `edge-profile --train -o` in the fleet file use its times and watts.
Everything else is modelled: it says what follows from the fleet's figures, not what such devices take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.console import ArgumentParser, run_command
from contract.errors import UsageError
from contract.leakage import Table as Leakage
from contract.output import open_output
from contract.privacy_table import from_leakage
from edge_runtime.choose_split import InfeasibleError, Offer, Preferences, choose_split
from server_runtime.pictures import line_chart
from server_runtime.report import Drawing, Results, Table
from tools.fleet import Fleet, Work
from tools.fleet_file import PAPER, environments_of, load_fleet
from tools.kept_rows import Row
from tools.reproduce_options import add_place, check_counts, check_known, check_rate, take_defaults, texts, world_of
from tools.reproduce_p3sl import MODELS, TEST_IMAGES, prepare, table_of
from tools.reproduce_p3sl_rows import TABLE, P3slCell, P3slLaboratory, P3slRates, costs_of, noise_of
from tools.reproduce_report import report
from tools.reproduce_split_world import ARCHIVE

STEPS = 20  # of alpha
DEFAULTS: dict[str, dict[str, Any]] = {  # by world
    "quick": {"model": "resnet18", "epochs": 5, "batch": 8, "learning_rate": 0.15, "engine": "onnxruntime"},
    "full": {"model": "vgg16_bn", "epochs": 10, "batch": 64, "learning_rate": 0.01, "engine": "torch"},
}


def main() -> int:
    options = parse(sys.argv[1:])
    root = open_output(options.output)
    fleets = {name: load_fleet(options.fleet, name, options.devices) for name in options.environments}
    first = fleets[options.environments[0]]
    default = root / "scratch" / f"simulate-{world_of(options)}-{len(first.devices)}"
    world = prepare(options, (options.world or default).resolve(), tuple(each.name for each in first.devices))
    if options.prepare:
        world.package(options.model)
        return 0
    rates = P3slRates(options.epochs, options.batch, options.learning_rate, options.aggregate_every, 0.0)
    laboratory = P3slLaboratory(world, fleets, options.engine, rates, options.threads)
    leakage = table_of(world, options.model, options.threads, {})
    works = laboratory.works(options.model)
    document = {
        "study": "simulate", "fleet": first.note, "data": world.split.note, "model": options.model,
        "epochs": options.epochs, "quality": quality_of(first),
        "choices": {name: sweep(fleet, works, leakage, options.batch) for name, fleet in fleets.items()},
        "runs": {
            name: laboratory.row(P3slCell(options.model, "p3sl", TABLE, name, options.seeds[0]), leakage)
            for name in (fleets if options.epochs else ())
        },
    }  # fmt: skip
    report(options, root, document, results_of(document), kind="simulate")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--fleet", type=Path, default=PAPER, metavar="FILE", help="devices (default: the paper's seven)"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="so many, the file's in turn (default: the file's)")
    parser.add_argument("--environments", type=texts, help="of the fleet file (default: all)")
    parser.add_argument("--full", action="store_true", help="CIFAR-10 and a model from scratch; default: digits, small")
    parser.add_argument("--model", help="default: resnet18, with --full vgg16_bn")
    parser.add_argument("--epochs", type=int, help="default: 5, with --full 10; 0: choices alone")
    parser.add_argument("--aggregate-every", type=int, default=5, help="epochs, R (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="images of a batch (default: 8, with --full 64)")
    parser.add_argument("--learning-rate", type=float, help="highest of the cosine (default: 0.15, with --full 0.01)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    add_place(parser, f"{ARCHIVE}, with --full")
    options = parser.parse_args(argv)
    options.quick, options.leak, options.seeds, options.test_images = (
        not options.full,
        False,
        [options.seed],
        TEST_IMAGES,
    )
    take_defaults(options, DEFAULTS[world_of(options)])
    known = environments_of(options.fleet)
    options.environments = options.environments or list(known)
    check_known("environment", options.environments, known)
    check_known("model", [options.model], MODELS[world_of(options)])
    check_counts(options, {"epochs": 0, "aggregate-every": 1, "batch": 1, "threads": 1, "seed": 0, "devices": 2})
    check_rate(options)
    if options.table:
        raise UsageError("--table is of tools/reproduce, which keeps rows", "leave it out")
    return options


def quality_of(fleet: Fleet) -> str:
    """Whose figures times and joules are."""
    recorded = [device.name for device in fleet.devices if device.recorded]
    return (
        "modelled" if not recorded else f"modelled, but for the computing of {', '.join(recorded)}, which is recorded"
    )


def sweep(fleet: Fleet, works: Sequence[Work], leakage: Leakage, batch: int) -> Row:
    """The split that each device chooses by the product's rule at each alpha, with its energy and what leaks; None
    where none will do."""
    privacy = from_leakage(leakage, [work.split for work in works])
    noise = noise_of(TABLE, leakage, privacy, 0.0)
    offer = Offer(privacy, dict(zip(noise.splits, noise.sigma, strict=True)))
    alphas = [step / STEPS for step in range(STEPS + 1)]
    found: Row = {"alpha": alphas, "noise": dict(offer.sigma), "devices": {}}
    for device in fleet.devices:
        costs = costs_of(fleet, device.name, works, batch)
        energy_j = {cost.split: cost.energy_j for cost in costs}
        chosen = [_choose(offer, costs, alpha, device.cap_w) for alpha in alphas]
        found["devices"][device.name] = {
            "splits": chosen,
            "joules": [None if split is None else energy_j[split] for split in chosen],
            "fsim": [None if split is None else privacy.at(split, noise.of(split)) for split in chosen],
        }
    return found


def _choose(offer: Offer, costs: Sequence[Any], alpha: float, cap_w: float) -> int | None:
    try:
        return choose_split(offer, costs, Preferences(alpha, cap_w))
    except InfeasibleError:
        return None


def is_monotone(choice: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether more weight of privacy never leaks more, and never costs less."""

    def rises(values: Sequence[float | None], sign: float) -> bool:
        known = [sign * value for value in values if value is not None]
        return all(later >= before - 1e-9 for before, later in zip(known, known[1:], strict=False))

    return rises(choice["joules"], 1.0) and rises(choice["fsim"], -1.0)


def results_of(document: Row) -> Results:
    """The page of a simulation."""
    facts = ("fleet", "data", "model", "epochs", "quality")
    return Results(
        title="P3SL on a modelled fleet",
        facts=tuple((name, document[name]) for name in facts),
        tables=(
            *([_sleep_table(document["runs"]), _device_table(document["runs"])] if document["runs"] else []),
            _choice_table(document["choices"]),
        ),
        drawings=tuple(
            Drawing(
                f"Split that a device chooses as alpha goes from 0 to 1, environment {name}",
                line_chart(
                    {device: [each or 0 for each in own["splits"]] for device, own in choice["devices"].items()},
                    f"1 + {STEPS} alpha",
                ),
            )
            for name, choice in document["choices"].items()
        ),
    )  # fmt: skip


def _sleep_table(runs: Mapping[str, Row]) -> Table:
    def line(environment: str, name: str, share: float, joules: Mapping[str, float]) -> tuple[str, ...]:
        saved = 1.0 - joules["whole"] / joules["never_asleep"]
        shown = [f"{joules[key]:.3g}" for key in ("work", "awake", "whole", "never_asleep", "could_sleep")]
        return environment, name, f"{100 * share:.0f} %", *shown, f"{100 * saved:.0f} %"

    rows = []
    for environment, run in runs.items():
        devices = run["devices"]
        rows += [line(environment, name, each["awake_share"], each["joules"]) for name, each in devices.items()]
        mean = sum(each["awake_share"] for each in devices.values()) / len(devices)
        rows.append(line(environment, "all", mean, run["joules"]))
    return Table(
        "Time awake and joules of an epoch, modelled; saved: by sleeping between turns, beside waiting awake",
        ("environment", "device", "awake", "work", "awake J", "whole J", "never asleep", "could sleep", "saved"),
        tuple(rows),
        note="Work: computing and the link. Awake: with waiting in one's own turn. Whole: with all the time between.",
    )


def _device_table(runs: Mapping[str, Row]) -> Table:
    return Table(
        "Each device in the end",
        ("environment", "device", "split", "alpha", "sigma", "FSIM before noise", "after", "own chain", "epoch in s"),
        tuple(
            (
                environment, name, each["split"], f"{each['alpha']:g}", f"{each['sigma']:.2f}",
                f"{each['fsim_clean']:.3f}", f"{each['fsim']:.3f}",
                None if each["chain"] is None else f"{100 * each['chain']:.1f} %", f"{run['epoch_s']:.3g}",
            )
            for environment, run in runs.items()
            for name, each in run["devices"].items()
        ),
    )  # fmt: skip


def _choice_table(choices: Mapping[str, Row]) -> Table:
    return Table(
        "Choice of split as alpha goes from 0 to 1 (where it changes)",
        ("environment", "device", "splits", "monotone"),
        tuple(
            (environment, name, _changes(choice["alpha"], own["splits"]), "yes" if is_monotone(own) else "no")
            for environment, choice in choices.items()
            for name, own in choice["devices"].items()
        ),
        note="Monotone: a larger alpha never leaks more and never costs less.",
    )


def _changes(alphas: Sequence[float], splits: Sequence[int | None]) -> str:
    """ "1 from 0, 5 from 0.35"."""
    shown = [
        f"{'none' if split is None else split} from {alpha:g}"
        for place, (alpha, split) in enumerate(zip(alphas, splits, strict=True))
        if place == 0 or split != splits[place - 1]
    ]
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(run_command(main))
