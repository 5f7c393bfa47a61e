"""How a run on this device stands, as `edge-run status` and /metrics tell it; pure, from what the run knows.

Writing it and listening are left to `witness`. Energy is in it: it is told on this machine only. Moments are of the
monotonic clock, so that a clock that is set, or never was, makes no age wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from contract.exposition import Family, Sample, single

NEXT_DAY = "the next day: the bytes of this one are spent"


@dataclass(frozen=True)
class Link:
    """Whether there is a connection, since when, and else why not."""

    connected: bool
    since_s: float
    cause: str = ""
    cure: str = ""
    retry_at_s: float | None = None
    budget_spent: bool = False  # that is why not: this day's bytes are spent


@dataclass(frozen=True)
class Standing:
    """One moment of a run; None is unknown, never 0."""

    device: str
    purpose: str
    server: str
    boot: str  # names the boot whose clock the moments are of
    pid: int
    taken_s: float
    began_s: float
    link: Link
    run: str | None
    server_says: str
    busy: bool
    step: int
    waiting_for: str
    waiting_s: float
    images: int
    images_acknowledged: int | None
    spool_frames: int
    spool_bytes: int
    sent_bytes: int
    received_bytes: int
    connections: int
    energy_j: float | None
    energy_reason: str | None
    rss_bytes: int
    package_digest: str
    label_mode: str
    budget_bytes: int | None = None  # a day; None: no limit
    budget_spent_bytes: int | None = None
    recent: tuple[tuple[float, str], ...] = ()  # the last lines that were said, with their moments

    def document(self) -> dict[str, Any]:
        """As JSON says it."""
        return asdict(self)


class Recorder:
    """A flight recorder: says what it is told, and remembers the last of it."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float], lines: int = 100) -> None:
        self._say, self._clock = say, clock
        self._lines: deque[tuple[float, str]] = deque(maxlen=lines)

    def __call__(self, text: str) -> None:
        self._lines.append((self._clock(), text))
        self._say(text)

    @property
    def recent(self) -> tuple[tuple[float, str], ...]:
        """Oldest first."""
        return tuple(self._lines)


def families(at: Standing) -> list[Family]:
    """The same for Prometheus."""
    return [
        Family(
            "cutlayer_device_info", "What runs.", "gauge", (Sample(1, {"device": at.device, "purpose": at.purpose}),)
        ),
        single("cutlayer_device_up_seconds", "Since the run began.", "gauge", at.taken_s - at.began_s),
        single("cutlayer_device_connected", "Whether the server is connected.", "gauge", at.link.connected),
        single("cutlayer_device_link_seconds", "Since it is, or is not.", "gauge", at.taken_s - at.link.since_s),
        single("cutlayer_device_busy", "Whether work is in hand.", "gauge", at.busy),
        single("cutlayer_device_steps_total", "Images and steps done.", "counter", at.step),
        single("cutlayer_device_images", "Images of the folder.", "gauge", at.images),
        single("cutlayer_device_images_acknowledged", "Of an upload.", "gauge", at.images_acknowledged),
        single("cutlayer_device_spool_bytes", "Kept until acknowledged.", "gauge", at.spool_bytes),
        single("cutlayer_device_sent_bytes_total", "On the wire.", "counter", at.sent_bytes),
        single("cutlayer_device_received_bytes_total", "On the wire.", "counter", at.received_bytes),
        single(
            "cutlayer_device_budget_bytes", "Of a day, on the network; no line: no limit.", "gauge", at.budget_bytes
        ),
        single("cutlayer_device_budget_spent_bytes", "Of this day's budget.", "gauge", at.budget_spent_bytes),
        single("cutlayer_device_connections_total", "Let in or not.", "counter", at.connections),
        single("cutlayer_device_energy_joules_total", "Since the meter was opened.", "counter", at.energy_j),
        single("cutlayer_device_resident_memory_bytes", "Of this process.", "gauge", at.rss_bytes),
    ]


def in_words(found: Mapping[str, Any]) -> str:
    """A status document (see `status_file`) as a person reads it."""
    at = found["run"]
    lines = [f"state     {found['state']}" + (f" (pid {at['pid']})" if at and found["state"] == "running" else "")]
    if at is not None:
        link = at["link"]
        lines.append(f"run       {at['run'] or 'none yet'} as {at['device']}, to {at['purpose']}, {at['label_mode']}")
        runs = found["state"] == "running"  # else neither connection nor work are as they were last said to be
        if link["connected"]:
            lines.append(f"server    {at['server']}" + (_ago(found["link_s"], "connected for") if runs else ""))
        else:
            cause = link["cause"] or ("no connection yet" if runs else "no connection")
            lines.append(f"server    {at['server']}: {cause}" + (_ago(found["link_s"], "for") if runs else ""))
            lines += [f"          {link['cure']}"] if link["cure"] else []
        if runs:
            lines += [f"          it says: {at['server_says']}"] if at["server_says"] else []
            doing = "busy" if at["busy"] else f"waits for {at['waiting_for'] or 'nothing'}"
            lines.append(f"work      {doing}{_goes_on(found)}, step {at['step']}")
        else:
            lines.append(f"work      came to step {at['step']}")
        sent = "" if at["images_acknowledged"] is None else f", {at['images_acknowledged']} acknowledged"
        lines.append(f"images    {at['images']}{sent}")
        lines.append(f"traffic   {at['sent_bytes'] / 1e6:.2f} MB sent, {at['received_bytes'] / 1e6:.2f} MB received")
        if at.get("budget_bytes") is not None:
            lines.append(
                f"budget    {at['budget_spent_bytes'] / 1e6:.2f} of {at['budget_bytes'] / 1e6:g} MB of this day"
            )
        energy = (
            f"unknown: {at['energy_reason']}" if at["energy_j"] is None else f"{at['energy_j']:.1f} J since the start"
        )
        lines.append(f"energy    {energy}")
    for name, kept in found["spools"].items():
        lines.append(f"spool     {name}: {kept['frames']} messages, {kept['bytes'] / 1e6:.2f} MB kept here")
    return "\n".join(lines)


def _goes_on(found: Mapping[str, Any]) -> str:
    """When there is something to wait for that has its time: the next day of a budget."""
    at, age_s = found["run"], found["age_s"]
    link = at["link"]
    if at["busy"] or not link.get("budget_spent") or link["retry_at_s"] is None or age_s is None:
        return ""
    return f", goes on in {in_hours(max(0.0, link['retry_at_s'] - at['taken_s'] - age_s))}"


def in_hours(seconds: float) -> str:
    """Such as '5 h 3 min'."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _ago(seconds: float | None, words: str) -> str:
    if seconds is None:
        return ""
    return f", {words} {seconds:.0f} s" if seconds < 120 else f", {words} {seconds / 60:.0f} min"
