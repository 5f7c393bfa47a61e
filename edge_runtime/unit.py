"""The text of a systemd unit for edge-run, hardened; pure. Writing it is left to `edge-run install-service`.

Unknown keys are passed over with a warning by older systemd, so that one text serves 237 to 257. What is off, and why:
MemoryDenyWriteExecute, as engines compile code at run time; ProcSubset=pid, as the meters and the profile read
/proc/cpuinfo and /proc/device-tree; PrivateDevices where a device node was named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NAME = "cutlayer-edge"
WATCHDOG_S = 300  # the slowest image, and then some
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))  # what ProtectHome hides
FIX_FIRST = "2 4"  # exit codes that trying again does not mend: settings, package


@dataclass(frozen=True)
class Service:
    """What a unit depends on. Paths are absolute."""

    command: tuple[str, ...]  # edge-run and its flags, without --key, --site-secret and --state
    key: Path
    site_secret: Path | None
    certificate_key: Path | None
    readable: tuple[Path, ...]  # images, package, CA, settings
    user: str | None  # None: one that exists while the service runs
    devices: tuple[str, ...] = ()  # such as /dev/vcio
    memory_max: str | None = None


def unit_text(service: Service) -> str:
    """The whole unit."""
    secret = () if service.site_secret is None else ("--site-secret", "${CREDENTIALS_DIRECTORY}/site.secret")
    tls = () if service.certificate_key is None else ("--certificate-key", "${CREDENTIALS_DIRECTORY}/tls.key")
    words = (*map(quote, service.command), "--key", "${CREDENTIALS_DIRECTORY}/device.key", *secret, *tls)
    in_home = any(path.is_relative_to(home) for path in service.readable for home in HOMES)
    lines = [
        "[Unit]",
        "Description=Cutlayer device",
        "# Wanted and not required: without a network it works, keeps what it made, and tries again for ever.",
        "Wants=network-online.target",
        "After=network-online.target time-sync.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(words)} --state ${{STATE_DIRECTORY}}",
        "Environment=CUTLAYER_LOG=json",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={FIX_FIRST}",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=20",
        "KillMode=mixed",
        f"WatchdogSec={WATCHDOG_S}",
        f"StateDirectory={NAME}",
        "StateDirectoryMode=0700",
        f"LoadCredential=device.key:{service.key}",
        *([] if service.site_secret is None else [f"LoadCredential=site.secret:{service.site_secret}"]),
        *([] if service.certificate_key is None else [f"LoadCredential=tls.key:{service.certificate_key}"]),
        *(["DynamicUser=yes"] if service.user is None else [f"User={service.user}"]),
        *([] if service.memory_max is None else [f"MemoryMax={service.memory_max}"]),
        "",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        f"ProtectHome={'read-only' if in_home else 'yes'}",
        "PrivateTmp=yes",
        "PrivateUsers=yes",
        *_devices(service.devices),
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectProc=invisible",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "KeyringMode=private",
        "RemoveIPC=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged",
        "SystemCallErrorNumber=EPERM",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _devices(nodes: tuple[str, ...]) -> list[str]:
    if not nodes:
        return ["PrivateDevices=yes"]
    return ["DevicePolicy=closed", *(f"DeviceAllow={node} rw" for node in nodes)]


def quote(word: str) -> str:
    """A word of ExecStart: quoted where it needs to be; % and $ stand for themselves."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and all(letter.isalnum() or letter in "-_./:=,+@%$" for letter in word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
