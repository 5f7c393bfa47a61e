"""Alters one message between a device and the server when a campaign says so; TLS ends in the proxy that calls it.

Moving bytes is left to `tests.chaos.proxy`.
"""

from __future__ import annotations

from collections.abc import Sequence

from contract.codec import decode
from contract.errors import ProtocolError

HANDSHAKE = frozenset(("hello", "challenge", "proof", "welcome", "refuse", "bye"))
NOT_TOLD_APART = ""  # a chunk's later frames and what cannot be read


class Altered:
    """A tamper of `tests.chaos.proxy.FrameProxy`: passes everything on, but for the one message that is armed.

    A message of the work is altered: sent twice, after the one that follows it in its direction, or with bytes of it
    overwritten.
    """

    def __init__(self) -> None:
        self.done = 0  # messages that were altered
        self._kind, self._direction, self._skip = "", "", 0
        self._held: dict[tuple[str, int], bytes] = {}

    def arm(self, kind: str, direction: str, skip: int) -> None:
        """Alter the message of the work after `skip` others in that direction."""
        self._direction, self._skip, self._kind = direction, skip, kind

    def __call__(self, direction: str, connection: int, number: int, message: bytes) -> Sequence[bytes]:
        for place in [each for each in self._held if each[1] < connection]:
            del self._held[place]  # its connection ended first: it was lost, which the protocol must bear as well
            self.done += 1
        held = self._held.pop((direction, connection), None)
        if held is not None:
            self.done += 1
            return [message, held]
        if not self._kind or direction != self._direction or _type_of(message) in (*HANDSHAKE, NOT_TOLD_APART):
            return [message]
        if self._skip:
            self._skip -= 1
            return [message]
        kind, self._kind = self._kind, ""
        if kind == "reordered message":
            self._held[direction, connection] = message
            return []
        self.done += 1
        if kind == "duplicated message":
            return [message, message]
        place = min(40, len(message) // 2)
        return [message[:place] + bytes(each ^ 0xFF for each in message[place : place + 8]) + message[place + 8 :]]


def _type_of(message: bytes) -> str:
    try:
        return decode(message, len(message)).message.TYPE
    except ProtocolError:
        return NOT_TOLD_APART
