"""Flower and NVFlare in the benchmark of the wire: started beside ours, asked in the same turns, and what came of it.

How they are started is `peers`' business, what they do then that of `bench_wire_flower` and `bench_wire_nvflare`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.errors import DeviceError
from tools import peers
from tools.bench_wire_control import Control, Order
from tools.bench_wire_memory import resident_bytes

HERE = Path(__file__).parent
CLIENT = {"flower": "supernode-0", "nvflare": "site-1"}
RUNS = {
    "flower": "SuperLink and SuperNodes over TLS, a ServerApp that uses send_and_receive",
    "nvflare": "a POC's server and clients over mTLS, a ModelController that uses send_model_and_wait",
}


@dataclass(frozen=True)
class Peer:
    """A deployment that takes orders."""

    version: str
    runs: str
    client: str  # the name of one of its client programs
    control: Control
    deployment: peers.Deployment

    def exchange(self, clients: int, size_bytes: int, count: int) -> Order:
        """Ask so many clients at once with so many bytes each, `count` times.

        Raises: DeviceError when it does not answer, or not with as many bytes.
        """
        cure = f"run it by hand: {self.runs}"
        try:
            answer = self.control.ask("exchange", clients=clients, size_bytes=size_bytes, count=count)
        except (OSError, RuntimeError) as error:
            raise DeviceError(f"{self.deployment.folder.name} does not answer: {error or 'time out'}", cure) from error
        expected = clients * count * (size_bytes // 4 * 4)
        if answer["received_bytes"] != expected:
            raise DeviceError(f"{answer['received_bytes']} bytes came back, not {expected}", cure)
        return answer

    def client_bytes(self) -> int | None:
        """Resident bytes of one client: its program and all that this has running; None where nobody says."""
        each = [resident_bytes(pid) for pid in self.deployment.processes(self.client)]
        known = [size for size in each if size is not None]
        return sum(known) if len(known) == len(each) else None


@contextmanager
def started(root: Path, keys: Path, pythons: Mapping[str, str | None], clients: int) -> Iterator[dict[str, Peer]]:
    """The peers whose interpreters are given, all clients connected. Raises: UsageError, DeviceError."""
    with ExitStack() as stack:
        found = {}
        for name, python in pythons.items():
            if python is not None:
                version = peers.version_of(name, python)
                control = Control(root / f"{name}.socket")
                config = {"control": str(control.path)}
                app = HERE / f"bench_wire_{name}.py"
                if name == "flower":
                    deployment = peers.start_flower(root / name, python, keys, app, clients, config)
                else:
                    deployment = peers.start_nvflare(root / name, python, app, clients, config)
                stack.callback(deployment.close)
                found[name] = Peer(version, RUNS[name], CLIENT[name], control, deployment)
        for name, peer in found.items():
            try:
                peer.control.accept()
                peer.control.ask("join", clients=clients)
            except (OSError, RuntimeError) as error:
                raise DeviceError(f"{name}'s app does not come: {error}", f"run it by hand: {peer.runs}") from error
        yield found


def figures(
    found: Mapping[str, Peer],
    pythons: Mapping[str, str | None],
    exchanges: Mapping[str, list[Order]],
    rounds: Mapping[str, list[Order]],
    client_bytes: Mapping[str, int | None],
    percentile: Callable[[list[float], float], float],
) -> dict[str, object]:
    """Of each peer: its exchange over all turns, its round, and how many times ours they take, within a turn.

    All are times from asking until the answers are there, in the process that asks: our torch process, a ServerApp, a
    controller. `exchanges` and `rounds` hold the turns' answers by name, "ours" among them; `client_bytes` is what one
    client takes before the first exchange. A peer that was not started has the reason in its place.
    """
    result: dict[str, object] = {}
    for name in pythons:
        if name not in found:
            result[name] = {"left_out": peers.NOT_GIVEN.format(name=name, package=peers.PACKAGES[name])}
            continue
        turns = [turn["whole_s"] for turn in exchanges[name]]
        all_s = [value for turn in turns for value in turn]
        ours = [statistics.median(turn["whole_s"]) for turn in exchanges["ours"]]  # as the process that asks sees it
        whole = [sum(turn["whole_s"]) for turn in rounds[name]]
        ours_whole = [sum(turn["whole_s"]) for turn in rounds["ours"]]
        result[name] = {
            "version": found[name].version,
            "runs": found[name].runs,
            "client_idle_bytes": client_bytes[name],
            "exchanges": len(all_s),
            "exchange_p50_s": percentile(all_s, 0.5),
            "exchange_p99_s": percentile(all_s, 0.99),
            "exchange_times_ours": statistics.median(
                statistics.median(turn) / mine for turn, mine in zip(turns, ours, strict=True)
            ),
            "rounds": len(whole),
            "round_s": statistics.median(whole),
            "round_times_ours": statistics.median(each / mine for each, mine in zip(whole, ours_whole, strict=True)),
        }
    return result
