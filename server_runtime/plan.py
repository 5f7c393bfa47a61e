"""What a server was told to do, checked: the plan of a run (all that its result depends on) and where to listen.

Reading flags and files is left to `cli`, the backend folder to `backend_folder`, choosing a run directory to `runs`.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contract.config import REQUIRED, Field
from contract.errors import ConfigError, suggest
from contract.manifest import TransformRules

from . import strategies

LABEL_MODES = ("permuted-label", "logit-gradient", "client-head")  # raw labels are not taken by these strategies

FIELDS = (
    Field("strategy", str, REQUIRED, "which training strategy: " + ", ".join(strategies.names())),
    Field("backend", Path, REQUIRED, "the folder that export-frontend wrote beside the package (front.backend)"),
    Field("listen", str, REQUIRED, "HOST:PORT to listen on; port 0 takes a free one"),
    Field("roster", Path, REQUIRED, "folder of enrolled devices: ROSTER/<site>/<device>.pub"),
    Field("certificate", Path, None, "TLS certificate chain (PEM); needed off loopback"),
    Field("certificate_key", Path, None, "private key of the certificate (PEM)"),
    Field("runs", Path, Path("runs"), "folder of run directories"),
    Field("run", str, None, "which run to start or take up; default: the newest unfinished one of the same plan"),
    Field("label_mode", str, "permuted-label", "where labels stay: " + ", ".join(LABEL_MODES)),
    Field("kappa", float, None, "feature noise in standard deviations per channel; default: the package's"),
    Field("epochs", int, 100, "passes over a site's images"),
    Field("augmentations", int, 64, "patch-retrieval runs per image, one drawn each epoch; 0 trains without"),
    Field("replaced", float, 0.25, "share of an image's patches that a run replaces"),
    Field("seed", int, 0, "seed of the head, the order of training and the augmentations"),
    Field("threads", int, None, "CPU threads for training; default: all this process may use"),
    Field("public", Path, None, "the server's own public images; server-run does not read them"),
)


@dataclass(frozen=True)
class Plan:
    """All that a run's result depends on; `run.toml` is this."""

    strategy: str
    backend_sha256: str
    package_digest: str
    label_mode: str
    kappa: float
    epochs: int
    augmentations: int
    replaced: float
    seed: int
    threads: int

    def check(self, rules: TransformRules, allowed_modes: tuple[str, ...]) -> None:
        """Refuse what cannot be trained.

        Raises:
            ConfigError: naming the setting.
        """
        strategies.check(self.strategy)
        if self.label_mode not in LABEL_MODES:
            hint = suggest(self.label_mode, LABEL_MODES)
            raise _wrong("label_mode", f"one of {', '.join(LABEL_MODES)}", self.label_mode, hint)
        if self.label_mode not in allowed_modes:
            raise _wrong("label_mode", f"one that the package allows ({', '.join(allowed_modes)})", self.label_mode)
        if not (math.isfinite(self.kappa) and 0 <= self.kappa <= rules.kappa_max):
            raise _wrong("kappa", f"0 to {rules.kappa_max:g}, for which the backend was tuned", self.kappa)
        for name, lowest in (("epochs", 1), ("augmentations", 0), ("seed", 0), ("threads", 1)):
            if getattr(self, name) < lowest:
                raise _wrong(name, f"{lowest} or more", getattr(self, name))
        if not 0 <= self.replaced <= 1:
            raise _wrong("replaced", "a share from 0 to 1", self.replaced)

    def values(self) -> dict[str, str | int | float]:
        """The plan as flat values, for run.toml and the torch process."""
        return asdict(self)

    def differences(self, recorded: Mapping[str, Any], given: frozenset[str]) -> list[str]:
        """Where a recorded plan differs from this one, in fields that are not merely defaults here."""
        always = {"strategy", "backend_sha256", "package_digest"}
        return [
            f"{field.name} = {recorded.get(field.name)!r}, asked for {getattr(self, field.name)!r}"
            for field in fields(self)
            if (field.name in always or field.name in given) and recorded.get(field.name) != getattr(self, field.name)
        ]


@dataclass(frozen=True)
class Listen:
    """Where to listen, and with which certificate; without one only loopback is allowed."""

    host: str
    port: int
    certificate: Path | None
    certificate_key: Path | None

    @property
    def scheme(self) -> str:
        """The scheme devices connect with."""
        return "wss" if self.certificate is not None else "ws"


def parse_listen(listen: str, certificate: Path | None, certificate_key: Path | None) -> Listen:
    """HOST:PORT -> Listen.

    Raises:
        ConfigError: it is no HOST:PORT, only half of certificate and key is given, or TLS is missing off loopback.
    """
    host, _, port_text = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # [::1]:8443
    if not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise _wrong("listen", "HOST:PORT, such as 0.0.0.0:8443", listen)
    if (certificate is None) != (certificate_key is None):
        present, missing = ("certificate", "certificate_key") if certificate else ("certificate_key", "certificate")
        raise ConfigError(f"{present} is set, {missing} is not", "set both, or neither to listen on loopback only")
    if certificate is None and not _is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs TLS, and no certificate is set",
            "give --certificate and --certificate-key (tools/make_keys makes a pair), or listen on 127.0.0.1",
        )
    return Listen(host, int(port_text), certificate, certificate_key)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wrong(name: str, expected: str, found: object, hint: str = "") -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"{name} must be {expected}; found {found!r}{hint}", f"correct {flag} or [server] {name}")
