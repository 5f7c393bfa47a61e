"""Hostile bytes at every door, for so many minutes: counts the inputs, and names the seed of whatever got through.

The doors and the mutator are those of the tests (`tests/contract/attacks`), with four more: spool segments from a bad
disk, heads of HTTP requests, files of the roster, and settings. A fault is any error that a door does not declare.
Every input follows from the door's name, the seed and its number, so `--door NAME --first N` makes it again.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from contract import exposition
from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import ConfigError, UsageError
from edge_runtime.config import device_config, resolve_config
from edge_runtime.spool import HEAD, MESSAGE, Spool, pack_record
from server_runtime.roster import read_roster
from tests.contract.attacks.mutations import mutated
from tests.contract.attacks.test_fuzz import DOORS as CONTRACT_DOORS

SHOWN_FAULTS = 5
_HEAD = b'{"session":"s","run":"r","note":"","generation":1}'
_SEGMENT = pack_record(HEAD, 1, _HEAD) + pack_record(MESSAGE, 1, b"x" * 40) + pack_record(MESSAGE, 2, b"y" * 9)
_REQUEST = b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\nAccept: */*\r\n\r\n"
_CLAIM = b'{"public_key":"' + b"ab" * 32 + b'","expires_s":1700000000.0}\n'

_SETTINGS = b"""[device]
engine = "front"
data = "images"
server = "wss://host:8443"
trust = "publisher.pub"
key = "device.key"
name = "pi-3"
state = "state"
metrics = "127.0.0.1:9101"
sigma_floor = "1=0.5,2=0.25"
kappa_floor = 0.25
max_releases = 1
"""

Door = Callable[[random.Random], None]


def doors(folder: Path) -> dict[str, Door]:
    """By name; what needs files has them in `folder`."""

    def spool(rng: random.Random) -> None:
        home = folder / "spool"
        home.mkdir(exist_ok=True)
        for old in home.iterdir():
            old.unlink()
        (home / "000000000001.segment").write_bytes(mutated(_SEGMENT, [_SEGMENT], rng))
        found = Spool(home, lambda text: None)
        for seq in range(found.acknowledged + 1, found.next_seq):
            found.read(seq)
        found.begin("s", "r", 0)
        found.append(b"z", durable=True)
        assert Spool(home, lambda text: None).read(1) == b"z"

    def http(rng: random.Random) -> None:
        head = mutated(_REQUEST, [_REQUEST], rng)
        assert exposition.answer(head, {"/metrics": lambda: ("text/plain", "x")}).startswith(b"HTTP/1.1 ")

    def roster(rng: random.Random) -> None:
        site = folder / "roster" / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "pi.claim").write_bytes(mutated(_CLAIM, [_CLAIM], rng))
        try:
            read_roster(folder / "roster")
        except ConfigError as error:
            assert error.cause and error.cure

    def settings(rng: random.Random) -> None:
        path = folder / "edge.toml"
        path.write_bytes(mutated(_SETTINGS, [_SETTINGS], rng))
        try:
            device_config(resolve_config({}, {}, path, folder).values)
        except ConfigError as error:
            assert error.cause and error.cure

    others: dict[str, Door] = {"spool": spool, "http": http, "roster": roster, "settings": settings}
    return {name: door for name, (door, _) in CONTRACT_DOORS.items()} | others


def run_doors(chosen: dict[str, Door], seed: int, first: int, seconds: float, most: int | None) -> dict[str, object]:
    """Take turns until the time is over, or each door had `most` inputs."""
    counts, faults = dict.fromkeys(chosen, 0), []
    began_s, number = time.monotonic(), first
    while time.monotonic() - began_s < seconds and (most is None or number - first < most):
        for name, door in chosen.items():
            try:
                door(random.Random(f"{name} fuzz {seed} {number}"))
            except Exception as error:  # whatever it is, it got through
                faults.append({"door": name, "seed": seed, "number": number, "error": repr(error)[:300]})
            counts[name] += 1
        number += 1
    minutes = (time.monotonic() - began_s) / 60
    return {"inputs": sum(counts.values()), "by_door": counts, "minutes": minutes, "faults": faults}


def main() -> int:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        known = doors(Path(folder))
        if options.door is not None and options.door not in known:
            raise UsageError(f"there is no door {options.door!r}", f"one of {', '.join(known)}")
        chosen = known if options.door is None else {options.door: known[options.door]}
        found = run_doors(chosen, options.seed, options.first, 60 * options.minutes, options.most)
    faults = found["faults"]
    assert isinstance(faults, list)
    if options.format == "json":
        print_document("fuzz", found)
    else:
        print(f"{found['inputs']} inputs at {len(chosen)} doors in {found['minutes']:.1f} min, {len(faults)} faults")
        for fault in faults[:SHOWN_FAULTS]:
            say(f"{fault['error']}: --door {fault['door']} --seed {fault['seed']} --first {fault['number']} --most 1")
    return 7 if faults else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default %(default)g")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--door", metavar="NAME", help="only this one")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument("--most", type=int, metavar="N", help="inputs of each door, at most")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < math.inf:  # NaN is neither
        raise UsageError(f"--minutes {options.minutes:g} tries nothing, or has no end", "give a number above 0")
    if options.most is not None and options.most < 1:
        raise UsageError(f"--most {options.most} tries nothing", "give at least 1")
    if options.first < 0:
        raise UsageError(f"--first {options.first} is no input's number", "they begin at 0")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
