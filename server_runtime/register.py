"""Who was here, how often, and what they sent: what is left of a device's connections, and the roster as it stands now.

From it and from what the server knows of its sites the standing is put together; showing it is `observatory`'s part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from contract.errors import CutlayerError, RefusedError

from .admission import Joined, Terms
from .connection import Connection
from .observatory import newest_metrics
from .rollout import Rollout
from .roster import Device, Roster
from .status import Past, SiteStanding, Standing, device_standing


class Register:
    """Of one server, since it started."""

    def __init__(self, roster: Roster, terms: Terms, root: Path) -> None:
        self._roster, self._terms, self._root = roster, terms, root
        self._past = {name: Past() for name in roster.devices}
        self._began_s = time.monotonic()
        self._version = roster.version()
        self._known: Mapping[str, Device | None] = roster.devices  # as the roster was when it last changed

    def came(self, joined: Joined) -> None:
        """A device was let in."""
        past = self._past[joined.device.name]
        past.connections += 1
        past.package = joined.package_digest

    def went(self, connection: Connection) -> None:
        """A connection ended."""
        if connection.joined is not None:
            past = self._past[connection.name]
            past.received_bytes += connection.received_bytes
            past.sent_bytes += connection.sent_bytes
            past.left_s, past.heard_s = time.monotonic(), connection.heard_s

    @property
    def roster_changed(self) -> bool:
        """Whether the roster on the disk is another than when `look_again` was called last."""
        return self._roster.version() != self._version

    def look_again(self, present: Mapping[str, Connection], say: Callable[[str], None]) -> dict[str, RefusedError]:
        """Read the roster; who of those present may not stay, and why. A file that cannot be used is said, once.

        A key may be half-copied at this moment: its device stays as it was, and the next change is looked at again.
        """
        self._version = self._roster.version()
        known: dict[str, Device | None] = {}
        refused: dict[str, RefusedError] = {}
        for name, before in self._known.items():
            try:
                known[name] = self._roster.current(name)
                error = present[name].standing() if name in present else None
            except CutlayerError as fault:
                say(f"warning: {fault.cause}")
                known[name], error = before, None
            if error is not None:
                refused[name] = error
        self._known = known
        return refused

    def standing(
        self,
        sites: tuple[SiteStanding, ...],
        present: Mapping[str, Connection],
        connections: int,
        waiting: int,
        rollout: Rollout | None = None,
    ) -> Standing:
        """How the run stands: its sites as the server knows them, its devices, and this process."""
        now_s, terms = time.monotonic(), self._terms
        return Standing(
            terms.run, terms.strategy, terms.label_mode, terms.package_digest, terms.kappa, now_s - self._began_s,
            connections, waiting, psutil.Process().memory_info().rss, sites,
            tuple(
                device_standing(
                    self._known.get(name) or device, present.get(name), self._past[name], now_s,
                    None if rollout is None else rollout.of(name),
                )
                for name, device in sorted(self._roster.devices.items())
            ),
            None if rollout is None else rollout.describe(),
        )  # fmt: skip

    def metrics(self, sites: tuple[str, ...]) -> dict[str, dict[str, object]]:
        """The newest line of each site."""
        return newest_metrics(self._root / "metrics.jsonl", sites)
