"""Measures the wire beside bare websockets: one exchange, a round of large tensors, an upload, and the device's memory.

Both sides are the product's own programs but for the torch process and the images (`bench_wire_server`,
`bench_wire_device`); the peer is the websockets library over the same TLS (`bench_wire_bare`). Ours and the peer take
turns in one run, because a machine's speed changes: ratios are made within a turn, and the median of the turns is told.

    exchange   the server asks with a tensor, the device answers with one of the same size
    round      4 devices at once, replayable: 50 MB down, then 50 MB up, as one message each (in chunks)
    upload     4 devices at once, durable: 50 MB up in batches, each with an fsync on the device and on the server
               beside bare (no disk), and beside bare with one write and fsync per frame on both sides
    memory     resident bytes of one device process, as the operating system counts them (Linux)
    peers      the exchange and the round on Flower and NVFlare, whose interpreters are given, in the same turns
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contract.console import ArgumentParser, print_document, run_command, say
from contract.errors import UsageError
from tools import bench_wire_peers, peers
from tools.bench_wire_control import Order
from tools.bench_wire_memory import measure_memory
from tools.bench_wire_programs import programs

START_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    turns: int
    exchanges: int  # in a turn
    exchange_bytes: int
    devices: int
    round_bytes: int
    rounds: int  # turns of the large tensors
    peer_exchanges: int  # in a turn, of Flower and NVFlare: they take seconds


Call = Callable[[], Order]


# --- figures -----------------------------------------------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio_of(ours: list[float], theirs: list[float]) -> float:
    """Median over the turns of ours / theirs in the same turn."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def take_turns(calls: dict[str, Call], turns: int) -> dict[str, list[Order]]:
    """Every call once a turn, in an order that is turned round each time."""
    answers: dict[str, list[Order]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            answers[name].append(calls[name]())
    return answers


def exchange_figures(answers: dict[str, list[Order]]) -> dict[str, object]:
    """Of the exchange as the socket process sees it, and with the way through the pipe and back."""
    spans = {
        "ours": [turn["boundary_s"] for turn in answers["ours"]],
        "with_pipe": [turn["whole_s"] for turn in answers["ours"]],
        "bare": [turn["whole_s"] for turn in answers["bare"]],
    }
    figures: dict[str, object] = {"exchanges": sum(len(turn) for turn in spans["ours"])}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        by_turn = {key: [percentile(turn, share) for turn in turns] for key, turns in spans.items()}
        figures[f"exchange_{name}_s"] = statistics.median(by_turn["ours"])
        figures[f"bare_{name}_s"] = statistics.median(by_turn["bare"])
        figures[f"ratio_{name}"] = ratio_of(by_turn["ours"], by_turn["bare"])
        figures[f"with_pipe_{name}_s"] = statistics.median(by_turn["with_pipe"])
        figures[f"with_pipe_ratio_{name}"] = ratio_of(by_turn["with_pipe"], by_turn["bare"])
    return figures


def duration_figures(answers: dict[str, list[Order]]) -> dict[str, object]:
    """Seconds of ours and of each peer, and ours over each peer."""
    spans = {name: [sum(turn["whole_s"]) for turn in turns] for name, turns in answers.items()}
    figures: dict[str, object] = {f"{name}_s": statistics.median(turns) for name, turns in spans.items()}
    for name in spans.keys() - {"ours"}:
        figures[f"ratio_to_{name}"] = ratio_of(spans["ours"], spans[name])
    return figures


# --- the run -----------------------------------------------------------------------------------------------------


def measure(sizes: Sizes, device_python: str, pythons: dict[str, str | None]) -> dict[str, object]:
    names = [f"device-{number}" for number in range(1, sizes.devices + 1)]
    with programs(device_python, [*names, "memory", "engine"]) as started:
        control, url = started.start_server("ours", "tools.bench_wire_server", "--root", started.root / "run")
        bare = started.start_server("bare", "tools.bench_wire_bare", "server", "--folder", started.root / "bare")
        for name in names:
            started.start_device(name, url, sizes.round_bytes)
            started.start_bare_client(f"bare-{name}", bare[1])
        control.ask("join", devices=names)
        bare[0].ask("join", clients=sizes.devices)

        def ours(clients: int, size_bytes: int, count: int) -> Call:
            return lambda: control.ask("exchange", devices=names[:clients], size_bytes=size_bytes, count=count)

        def theirs(clients: int, down_bytes: int, up_bytes: int, count: int = 1, durable: bool = False) -> Call:
            values = {"down_bytes": down_bytes, "up_bytes": up_bytes, "count": count, "durable": durable}
            return lambda: bare[0].ask("exchange", clients=clients, **values)

        small, large, n = sizes.exchange_bytes, sizes.round_bytes, sizes.devices
        figures: dict[str, object] = {}
        with bench_wire_peers.started(started.root, started.keys, pythons, n) as others:
            idle_bytes = {name: peer.client_bytes() for name, peer in others.items()}
            calls = {"bare": theirs(1, small, small, sizes.exchanges), "ours": ours(1, small, sizes.exchanges)}
            calls |= {name: partial(peer.exchange, 1, small, sizes.peer_exchanges) for name, peer in others.items()}
            for call in calls.values():
                call()  # warm-up
            exchanges = take_turns(calls, sizes.turns)
            calls = {"bare": theirs(n, large, large), "ours": ours(n, large, 1)}
            calls |= {name: partial(peer.exchange, n, large, 1) for name, peer in others.items()}
            rounds = take_turns(calls, sizes.rounds)
            figures["exchange"] = exchange_figures(exchanges)
            figures["round"] = duration_figures({name: rounds[name] for name in ("bare", "ours")})
            figures["peers"] = bench_wire_peers.figures(others, pythons, exchanges, rounds, idle_bytes, percentile)
        uploads = {
            "bare": theirs(n, 0, large),
            "bare_fsync": theirs(n, 0, large, durable=True),
            "ours": lambda: control.ask("collect", devices=names),
        }
        figures["upload"] = duration_figures(take_turns(uploads, sizes.rounds))
        figures["memory"] = measure_memory(started, url, control, bare, sizes.devices, sizes.round_bytes)
    return figures


def profile(sizes: Sizes, device_python: str) -> dict[str, object]:
    """Microseconds of one exchange by share, in the device's process and in the server's."""
    with programs(device_python, ["device-1"]) as started:
        files = {name: started.root / f"{name}.json" for name in ("device", "server")}
        root = started.root / "run"
        control, url = started.start_server(
            "ours", "tools.bench_wire_server", "--root", root, "--trace", files["server"]
        )
        started.start_device("device-1", url, sizes.exchange_bytes, "--trace", files["device"])
        control.ask("join", devices=["device-1"])
        count = sizes.exchanges * sizes.turns
        answer = control.ask("exchange", devices=["device-1"], size_bytes=sizes.exchange_bytes, count=count)
        started.close()
        shares = {name: shares_us(path, count) for name, path in files.items()}
    return {"exchanges": count, "exchange_p50_us": 1e6 * percentile(answer["boundary_s"], 0.5), **shares}


def shares_us(path: Path, count: int) -> dict[str, float]:
    import json

    spent_s: dict[str, float] = json.loads(path.read_text())
    return {share: 1e6 * value / count for share, value in sorted(spent_s.items(), key=lambda item: -item[1])}


def to_text(document: dict[str, object]) -> str:
    lines: list[str] = []
    for part, values in document.items():
        if isinstance(values, dict):
            lines.append(part)
            lines += [f"  {name:<42} {shown(name, value)}" for name, value in flat(values)]
        else:
            lines.append(f"{part:<44} {shown(part, values)}")
    return "\n".join(lines)


def flat(values: dict[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {inner}", each) for inner, each in value.items())
        else:
            yield name, value


def shown(name: str, value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    if isinstance(value, float):
        return f"{1000 * value:.3f} ms" if name.endswith("_s") else f"{value:.2f}"
    return str(value)


def main() -> int:
    options = parse(sys.argv[1:])
    peers.stop_on_sigterm()
    sizes = Sizes(
        options.turns, options.exchanges, options.exchange_bytes, options.devices, options.round_bytes, options.rounds,
        options.peer_exchanges,
    )  # fmt: skip
    pythons = {name: getattr(options, name) for name in peers.PACKAGES}
    for name, given in pythons.items():
        if given is not None:
            peers.version_of(name, given)
    python = str(options.device_python)
    version = version_of(python)
    say(f"measuring with {sizes.devices} devices on Python {version}")
    document: dict[str, object] = {"device_python": version, "cpus": os.cpu_count(), "sizes": vars(sizes)}
    document |= {"profile": profile(sizes, python)} if options.profile else measure(sizes, python, pythons)
    if options.format == "json":
        print_document("bench-wire", document)
    else:
        print(to_text(document))
    return 0


def version_of(python: str) -> str:
    """The version of an interpreter that has what a device needs.

    Raises: UsageError when it cannot be started, or lacks a package.
    """
    cure = "give --device-python an interpreter that has this project's device packages"
    program = "import platform, onnxruntime, edge_runtime.client; print('Python', platform.python_version())"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {START_S:g} s"
        raise UsageError(f"--device-python {python} cannot be run: {reason}", cure) from error
    words = done.stdout.split()
    if done.returncode or len(words) != 2 or words[0] != "Python":
        said = (done.stderr.strip().splitlines() or ["it is no Python"])[-1]
        raise UsageError(f"--device-python {python} cannot run a device: {said}", cure)
    return words[1]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/bench_wire", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=7, help="turns of exchanges (default %(default)s)")
    parser.add_argument("--exchanges", type=int, default=300, help="exchanges in a turn (default %(default)s)")
    parser.add_argument("--exchange-bytes", type=int, default=100_000, help="each way (default %(default)s)")
    parser.add_argument("--devices", type=int, default=4, help="devices of a round (default %(default)s)")
    parser.add_argument("--round-bytes", type=int, default=50_000_000, help="each way and device (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the large tensors (default %(default)s)")
    parser.add_argument(
        "--device-python", type=Path, default=Path(sys.executable), help="interpreter of the devices (default: this)"
    )
    for name, package in peers.PACKAGES.items():
        parser.add_argument(
            f"--{name}", metavar="PYTHON", help=f"measure it as well: an interpreter that has {package}"
        )
    parser.add_argument("--peer-exchanges", type=int, default=2, help="their exchanges in a turn (default %(default)s)")
    parser.add_argument("--profile", action="store_true", help="only where an exchange's time goes, in microseconds")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default %(default)s")
    options = parser.parse_args(argv)
    for name in ("turns", "exchanges", "exchange_bytes", "devices", "round_bytes", "rounds", "peer_exchanges"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(options, name)} is too few", "give at least 1")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
