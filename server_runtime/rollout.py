"""One update of the devices' package, canaries first: whose turn it is, and what became of it where; pure.

The rules:
* the first `canary` devices that come are offered the package; nobody else is before all of them said "ok";
* a canary that rolled the package back or refused it stops the update: those it was not offered to never get it;
* a canary that could not try it (no pictures, a full disk) makes room for another;
* a canary that is silent holds the others: it may be the package that stopped it;
* afterwards each device decides for itself, and one that rolls back stops nobody else.

A verdict is a word and the name of a check (`contract.messages.Verdict`): what was measured stays on the device. Where
packages and rollouts are kept is left to `offers`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

OK, NOT_TRIED = "ok", "not-tried"


@dataclass(frozen=True)
class Offered:
    """The package, by its manifest's digest (hex), and for whom it is."""

    package: str
    name: str
    version: int
    size_bytes: int
    folder: str
    devices: tuple[str, ...]
    canary: int
    issue: str  # tells the same package offered again from the first time


@dataclass
class Rollout:
    """How far one update is."""

    offered: Offered
    canaries: list[str] = field(default_factory=list)  # in the order in which they were offered it
    others: list[str] = field(default_factory=list)  # likewise, once the canaries were content
    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)  # device -> word, name of a check

    @property
    def phase(self) -> str:
        """ "canary", "stopped", "rest" or "complete" (nobody is left to hear of)."""
        told = [self.verdicts.get(device, ("", ""))[0] for device in self.canaries]
        if any(word not in ("", OK) for word in told):
            return "stopped"
        wanted = min(self.offered.canary, len(self.offered.devices))
        if told.count(OK) < wanted:
            return "complete" if self._left == 0 else "canary"
        return "rest" if self._left else "complete"

    @property
    def _left(self) -> int:
        return sum(device not in self.verdicts for device in self.offered.devices)

    def offer(self, device: str) -> bool:
        """Whether this device is offered the package now; it is remembered."""
        if device not in self.offered.devices or device in self.verdicts:
            return False
        if device in self.canaries or device in self.others:
            return True
        if self.phase == "canary" and len(self.canaries) < self.offered.canary:
            self.canaries.append(device)
            return True
        if self.phase == "rest":
            self.others.append(device)
            return True
        return False

    def may_fetch(self, device: str) -> bool:
        """Whether it was offered the package."""
        return device in self.canaries or device in self.others

    def waits(self, device: str) -> bool:
        """Whether this device's turn is still to come."""
        return device in self.offered.devices and device not in self.verdicts and self.phase != "stopped"

    def take(self, device: str, word: str, reason: str) -> None:
        """What a device says became of the package; it says so once."""
        if device not in self.offered.devices or device in self.verdicts:
            return
        self.verdicts[device] = (word, reason)
        if word == NOT_TRIED and device in self.canaries:
            self.canaries.remove(device)

    def again(self) -> Rollout:
        """The same package offered again, by the operator: who has it has it, all others are asked anew."""
        kept = {device: told for device, told in self.verdicts.items() if told[0] == OK}
        return Rollout(self.offered, [each for each in self.canaries if each in kept], [], kept)

    def of(self, device: str) -> str | None:
        """How it stands with one device, in words; None: it is not meant."""
        if device not in self.offered.devices:
            return None
        word, reason = self.verdicts.get(device, ("", ""))
        if word:
            return f"{word}: {reason}" if reason else word
        if device in self.canaries or device in self.others:
            return "offered"
        return "left out" if self.phase == "stopped" else "waits"

    def counts(self) -> dict[str, int]:
        """How many devices stand how."""
        words = [(self.of(device) or "").split(":")[0] for device in self.offered.devices]
        return {word: words.count(word) for word in sorted(set(words))}

    def describe(self) -> dict[str, object]:
        """What is told of it, to an operator."""
        offered = self.offered
        return {
            "name": offered.name, "version": offered.version, "package": offered.package, "phase": self.phase,
            "canary": offered.canary, "devices": self.counts(),
        }  # fmt: skip


def choose_devices(
    devices: dict[str, str], named: Collection[str] | None, site: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices (name -> site) that an update is for, sorted; and those of `named` that there are none of."""
    unknown = tuple(sorted(set(named or ()) - devices.keys()))
    wanted = [name for name, its in devices.items() if (site is None or its == site) and (not named or name in named)]
    return tuple(sorted(wanted)), unknown
