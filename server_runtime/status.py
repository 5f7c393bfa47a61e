"""How a run stands: its sites, what each waits for and since when, its devices; pure, from what the server knows.

Where it is written and shown is left to `observatory` and `status_cli`. Ages are in seconds, so that no clock is
compared with another. Energy is not in it: joules stay on the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from contract.exposition import Family, Sample, single
from contract.messages import Heartbeat

from .admission import Joined
from .roster import Device

Metrics = Mapping[str, "str | int | float | bool | None"]


@dataclass(frozen=True)
class SiteStanding:
    """One site: `state` is "running", "trained" or "failed"; `waiting_for` is the torch process's own word."""

    site: str
    state: str
    waiting_for: str
    busy: bool
    since_s: float | None
    cause: str | None  # why it failed
    metrics: Metrics  # the site's newest line of metrics.jsonl; empty before the first


@dataclass(frozen=True)
class DeviceStanding:
    """One device: `state` is "connected", "away", "claimed" (it has no key yet) or "revoked".

    What it says of itself (step, busy, waiting_for) is of its last heartbeat; None while it is away.
    """

    device: str
    site: str
    state: str
    purpose: str | None
    since_s: float | None  # in this state; None: since before the server started
    heard_s: float | None
    step: int | None
    busy: bool | None
    waiting_for: str | None
    received_bytes: int
    sent_bytes: int
    connections: int
    package: str | None = None  # the one that it said it runs, when it joined last
    update: str | None = None  # what became of the package that is offered; None: it is not meant


@dataclass(frozen=True)
class Standing:
    """A whole run."""

    run: str
    strategy: str
    label_mode: str
    package_digest: str
    kappa: float
    up_s: float
    connections: int
    predictions_waiting: int
    rss_bytes: int
    sites: tuple[SiteStanding, ...]
    devices: tuple[DeviceStanding, ...]
    update: Mapping[str, Any] | None = None  # the package that is offered, and how far that is

    def document(self) -> dict[str, Any]:
        """As JSON says it."""
        return asdict(self)


@dataclass
class Past:
    """What is left of a device's earlier connections."""

    connections: int = 0  # the present one included
    received_bytes: int = 0
    sent_bytes: int = 0
    left_s: float | None = None
    heard_s: float | None = None
    package: str | None = None


class Present(Protocol):
    """A device's open connection, as far as it is shown; times are of the monotonic clock."""

    @property
    def joined(self) -> Joined | None: ...

    opened_s: float
    heard_s: float
    received_bytes: int
    sent_bytes: int
    heartbeat: Heartbeat | None


def device_standing(
    device: Device, here: Present | None, past: Past, now_s: float, update: str | None = None
) -> DeviceStanding:
    """How a device stands, from its open connection and those before."""
    if here is None:
        state = "away" if device.state == "enrolled" else device.state
        since_s = None if past.left_s is None else now_s - past.left_s
        heard_s = None if past.heard_s is None else now_s - past.heard_s
        return DeviceStanding(
            device.name, device.site, state, None, since_s, heard_s, None, None, None, past.received_bytes,
            past.sent_bytes, past.connections, past.package, update,
        )  # fmt: skip
    says = here.heartbeat
    return DeviceStanding(
        device.name, device.site, "connected", here.joined.purpose if here.joined else None, now_s - here.opened_s,
        now_s - here.heard_s, says.step if says else None, says.busy if says else None,
        says.waiting_for if says else None, past.received_bytes + here.received_bytes,
        past.sent_bytes + here.sent_bytes, past.connections, past.package, update,
    )  # fmt: skip


def families(standing: Standing) -> list[Family]:
    """The same for Prometheus."""
    sites, devices = standing.sites, standing.devices
    updated = standing.update["devices"] if standing.update else {}
    figures = sorted(
        {name for site in sites for name, value in site.metrics.items() if isinstance(value, int | float)} - {"time"}
    )
    return [
        Family(
            "cutlayer_run_info", "What runs.", "gauge",
            (Sample(1, {"run": standing.run, "strategy": standing.strategy, "label_mode": standing.label_mode}),),
        ),
        single("cutlayer_up_seconds", "Since the server started.", "gauge", standing.up_s),
        single("cutlayer_connections", "Open sockets, also those not let in yet.", "gauge", standing.connections),
        single("cutlayer_predictions_waiting", "Batches that are owed scores.", "gauge", standing.predictions_waiting),
        single("cutlayer_resident_memory_bytes", "Of the socket process.", "gauge", standing.rss_bytes),
        Family(
            "cutlayer_site_state", "1 for the state that a site is in.", "gauge",
            tuple(Sample(1, {"site": each.site, "state": each.state}) for each in sites),
        ),
        Family(
            "cutlayer_site_waiting_seconds", "Since a site says what it says now; it is busy or it waits.", "gauge",
            tuple(Sample(each.since_s, {"site": each.site, "busy": str(each.busy).lower()}) for each in sites),
        ),
        *(
            Family(
                f"cutlayer_site_{_word(name)}", f"{name} of the site's newest line of metrics.", "gauge",
                tuple(Sample(_figure(each.metrics.get(name)), {"site": each.site}) for each in sites),
            )
            for name in figures
        ),
        Family(
            "cutlayer_device_connected", "Whether a device is here.", "gauge",
            tuple(Sample(each.state == "connected", _named(each)) for each in devices),
        ),
        Family(
            "cutlayer_device_silence_seconds", "Since a device was heard last.", "gauge",
            tuple(Sample(each.heard_s, _named(each)) for each in devices),
        ),
        Family(
            "cutlayer_device_received_bytes_total", "From a device, since the server started.", "counter",
            tuple(Sample(each.received_bytes, _named(each)) for each in devices),
        ),
        Family(
            "cutlayer_device_sent_bytes_total", "To a device, since the server started.", "counter",
            tuple(Sample(each.sent_bytes, _named(each)) for each in devices),
        ),
        Family(
            "cutlayer_update_devices", "Devices by what became of the package that is offered.", "gauge",
            tuple(Sample(count, {"state": word}) for word, count in updated.items()),
        ),
        Family(
            "cutlayer_device_connections_total", "How often a device was let in.", "counter",
            tuple(Sample(each.connections, _named(each)) for each in devices),
        ),
    ]  # fmt: skip


def _named(device: DeviceStanding) -> dict[str, str]:
    return {"site": device.site, "device": device.device}


def _word(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _figure(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def in_words(document: Mapping[str, Any]) -> str:
    """A standing's document as a person reads it."""
    lines = [
        f"run       {document['run']}: {document['strategy']}, {document['label_mode']}, kappa {document['kappa']:g}, "
        f"{document['state']}",
    ]
    for site in document["sites"]:
        words = site["cause"] if site["state"] == "failed" else site["waiting_for"] or "nothing yet"
        lines.append(f"site      {site['site']}: {site['state']}; {words}{_since(site['since_s'])}")
        shown = {name: value for name, value in site["metrics"].items() if name != "site" and value is not None}
        if shown:
            lines.append("          " + ", ".join(f"{name} {_shown(value)}" for name, value in shown.items()))
    update = document.get("update")
    if update:
        told = ", ".join(f"{count} {word}" for word, count in update["devices"].items())
        lines.append(
            f"update    {update['name']} version {update['version']} ({update['package'][:12]}): {update['phase']}; "
            f"{told}"
        )
    for device in document["devices"]:
        words = [device["state"] + _since(device["since_s"])]
        if device["state"] == "connected":
            words.append("busy" if device["busy"] else f"waits for {device['waiting_for'] or 'nothing'}")
        sizes = f"{size_in_words(device['received_bytes'])} in, {size_in_words(device['sent_bytes'])} out"
        words.append(f"{sizes} since the server started")
        words += [f"package {device['package'][:12]}"] if device.get("package") else []
        words += [f"update {device['update']}"] if device.get("update") else []
        lines.append(f"device    {device['device']} ({device['site']}): {', '.join(words)}")
    lines.append("energy    stays on the devices: edge-run status")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size_in_words(size_bytes: int) -> str:
    """In the unit that shows it: what is not nothing never reads as nothing."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    return f"{size_bytes / 1e3:.1f} kB" if size_bytes < 1e6 else f"{size_bytes / 1e6:.1f} MB"


def _since(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f" for {seconds:.0f} s" if seconds < 120 else f" for {seconds / 60:.0f} min"
