"""Messages that were duplicated, reordered, lost, spoiled or blown up on their way, in both directions.

TLS lets no such thing happen by chance, but a faulty program or middle box might: the proxy speaks TLS on both sides.
A device either comes back by itself or ends with a named error, and is then started again as a service manager would;
nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from contract.codec import LIMITS, decode
from contract.errors import ProtocolError
from tests.chaos.adaptation import (
    CLIENT_HEAD,
    END_S,
    GRADIENT,
    PERMUTED,
    behind,
    check_unharmed,
    finish,
    log_of,
    options,
)
from tests.chaos.limits import QUICK_RETURN, SMALL_BATCHES
from tests.chaos.proxy import TO_DEVICE, TO_SERVER, FrameProxy, Tamper
from tests.make_package import DEVICES
from tests.over_loopback.deployment import Deployment

pytest.importorskip("torch", reason="the server needs torch")

Make = Callable[[str], Deployment]
Limit = Callable[..., None]
Change = Callable[[int, bytes], Sequence[bytes]]  # (its number among the messages of the work from 1 on, message)
NUMBERED = ("features", "gradient", "ask", "scores", "chunk")


PROTOCOL_ERROR = 6  # exit code, contract/errors.py


@dataclass(frozen=True)
class Adapted:
    """`connections` of the first device; `ends`: what it said each time that it ended with a named error."""

    connections: int
    ends: tuple[str, ...]


def adapt_with(deployment: Deployment, mode: str, tamper: Tamper) -> Adapted:
    """A whole adaptation in which the first device's messages go through `tamper`."""
    keys = deployment.package / "keys"
    certificate, authority = (keys / "server.pem", keys / "server.key"), keys / "devices" / DEVICES[0] / "ca.pem"
    ends: list[str] = []
    with (
        deployment.server(*options(mode)) as server,
        FrameProxy(deployment.port, certificate, authority, tamper) as proxy,
    ):
        through = behind(deployment, proxy.port)
        second = deployment.start_device(DEVICES[1], "--label-mode", mode)
        while True:
            first = through.start_device(DEVICES[0], "--label-mode", mode)
            if first.wait(END_S) == 0:
                break
            said = log_of(deployment, DEVICES[0]).splitlines()[-2:]
            assert first.returncode == PROTOCOL_ERROR and said[0].startswith("error: "), said
            assert said[1].startswith("  cure: "), said
            ends.append(said[0])
        finish(deployment, [first, second], server)
    return Adapted(proxy.connections, tuple(ends))


def kind_of(message: bytes) -> str:
    try:
        return decode(message, len(message)).message.TYPE
    except ProtocolError:
        return ""


class Changed:
    """Applies one change to one direction of the first connection; everything else passes."""

    def __init__(self, direction: str, change: Change) -> None:
        self._direction, self._change = direction, change
        self._numbered = 0

    def __call__(self, direction: str, connection: int, number: int, message: bytes) -> Sequence[bytes]:
        if direction != self._direction or connection != 1 or kind_of(message) not in NUMBERED:
            return [message]
        self._numbered += 1
        return self._change(self._numbered, message)


def duplicated(number: int, message: bytes) -> Sequence[bytes]:
    return [message, message]


def swapped() -> Change:
    """The second and third message change places."""
    held: list[bytes] = []

    def change(number: int, message: bytes) -> Sequence[bytes]:
        if number == 2:
            held.append(message)
            return []
        return [message, *held] if number == 3 else [message]

    return change


def lost(number: int, message: bytes) -> Sequence[bytes]:
    return [] if number == 2 else [message]


def spoiled(number: int, message: bytes) -> Sequence[bytes]:
    return [message[:40] + bytes(8) + message[48:]] if number == 2 else [message]


def nonsense(number: int, message: bytes) -> Sequence[bytes]:
    return [bytes(range(256))] if number == 2 else [message]


def oversized(number: int, message: bytes) -> Sequence[bytes]:
    return [message + bytes(LIMITS.frame_bytes)] if number == 2 else [message]


@pytest.mark.slow
def test_wi_04_every_message_twice_in_both_directions_counts_once(fresh: Make, calm: Make) -> None:
    deployment = fresh(GRADIENT)

    def twice(direction: str, connection: int, number: int, message: bytes) -> Sequence[bytes]:
        return [message, message] if kind_of(message) in (*NUMBERED, "heartbeat") else [message]

    adapted = adapt_with(deployment, GRADIENT, twice)
    check_unharmed(deployment, calm(GRADIENT))
    assert adapted == Adapted(1, ())  # repetitions are no reason to hang up


@pytest.mark.slow
def test_faults_one_after_the_other_while_uploading_change_nothing(fresh: Make, calm: Make, limited: Limit) -> None:
    deployment = fresh(PERMUTED)
    limited(deployment, device=SMALL_BATCHES)
    plan = [Changed(TO_SERVER, swapped()), Changed(TO_SERVER, spoiled), Changed(TO_SERVER, oversized)]

    def in_turn(direction: str, connection: int, number: int, message: bytes) -> Sequence[bytes]:
        return plan[connection - 1](direction, 1, number, message) if connection <= len(plan) else [message]

    adapted = adapt_with(deployment, PERMUTED, in_turn)
    check_unharmed(deployment, calm(PERMUTED))
    assert adapted.connections == 1 + len(plan)


def test_faults_one_after_the_other_and_then_everything_twice_change_nothing(
    fresh: Make, calm: Make, limited: Limit
) -> None:
    deployment = fresh(GRADIENT)
    limited(deployment, device=QUICK_RETURN)
    plan = [
        Changed(TO_SERVER, spoiled),
        Changed(TO_DEVICE, oversized),
    ]

    def in_turn(direction: str, connection: int, number: int, message: bytes) -> Sequence[bytes]:
        if connection <= len(plan):
            return plan[connection - 1](direction, 1, number, message)
        return [message, message] if kind_of(message) in NUMBERED else [message]

    adapted = adapt_with(deployment, GRADIENT, in_turn)
    check_unharmed(deployment, calm(GRADIENT))
    assert adapted.connections == 1 + len(plan)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GRADIENT, CLIENT_HEAD])
@pytest.mark.parametrize("direction", [TO_SERVER, TO_DEVICE])
@pytest.mark.parametrize("change", [spoiled, nonsense, oversized, duplicated])
def test_one_fault_while_training_is_got_over_without_help(
    mode: str, direction: str, change: Change, fresh: Make, calm: Make
) -> None:
    deployment = fresh(mode)
    adapted = adapt_with(deployment, mode, Changed(direction, change))
    check_unharmed(deployment, calm(mode))
    assert adapted == Adapted(1 if change is duplicated else 2, ())


@pytest.mark.slow
@pytest.mark.parametrize("change", [swapped(), lost, spoiled, nonsense, oversized, duplicated])
def test_one_fault_while_uploading_is_got_over_without_help(
    change: Change, fresh: Make, calm: Make, limited: Limit
) -> None:
    deployment = fresh(PERMUTED)
    limited(deployment, device=SMALL_BATCHES)
    adapted = adapt_with(deployment, PERMUTED, Changed(TO_SERVER, change))
    check_unharmed(deployment, calm(PERMUTED))
    assert adapted == Adapted(1 if change is duplicated else 2, ())
