"""What a device is told to do: one frozen dataclass, from flags, CUTLAYER_DEVICE_* variables and edge.toml.

Where each value comes from is settled by contract.config; the signed manifest has its say later, in `terms`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.config import REQUIRED, Field, Resolved, find_file, resolve
from contract.errors import ConfigError, suggest
from contract.names import check_name
from edge_runtime.choose_split import Preferences, read_floor

SECTION = "device"
FILES = ("edge.toml", "cutlayer.toml")
LABEL_MODES = ("permuted-label", "logit-gradient", "client-head", "raw-label")
NOISE_MODES = ("keyed", "fresh")
NAME_CURE = "correct --name: it is the name that server-run claim was given"

FIELDS = (
    Field("engine", Path, REQUIRED, "the package folder, or DIR/front.onnx or DIR/front.plan in it"),
    Field(
        "data", Path, REQUIRED, "the image folder: one folder per class, or loose images with --infer", reads="folder"
    ),
    Field("server", str, REQUIRED, "wss://host:port of the server (ws:// on this machine only)"),
    Field("trust", Path, REQUIRED, "public key (PEM) of the package's publisher", reads="file"),
    Field("ca", Path, None, "certificate (PEM) that vouches for the server; default: the system's", reads="file"),
    Field(
        "certificate",
        Path,
        None,
        "this device's certificate (PEM), for a server that asks for one (--client-ca)",
        reads="file",
    ),
    Field("certificate_key", Path, None, "private key of that certificate (PEM)", reads="file"),
    Field(
        "key",
        Path,
        REQUIRED,
        "this device's private key (PEM), whose public half the server has enrolled",
        reads="file",
    ),
    Field("name", str, REQUIRED, "this device's name, as the server has enrolled it"),
    Field("state", Path, REQUIRED, "directory on a local disk where this device keeps its state"),
    Field(
        "site_secret",
        Path,
        None,
        "32 bytes that the devices of one site share; a device alone makes its own",
        reads="file",
    ),
    Field("classes", Path, None, "class list, one a line; default: the class folders", reads="file"),
    Field("label_mode", str, "permuted-label", f"the one label mode this device accepts: {', '.join(LABEL_MODES)}"),
    Field(
        "noise",
        str,
        "keyed",
        "keyed: an image always gets the same noise, while a part trains one draw an epoch; fresh: as published, to "
        "reproduce a paper",
    ),
    Field("alpha", float, None, "strength of the weight noise; default: the package's"),
    Field("kappa_floor", float, None, "the least feature noise this device accepts; default: the package's kappa"),
    Field("max_releases", int, 1, "how many different releases of one image may ever leave this device"),
    Field("max_patch_share", float, 1.0, "largest share of an image's patches that may ever leave this device"),
    Field("max_mb_per_day", float, None, "most MB that may go over the network in a day, both ways; default: no limit"),
    Field(
        "update_names",
        tuple,
        (),
        "names of other packages that a server may put in the place of the current one, with commas between; default: "
        "none, only newer versions of the current one",
    ),
    Field("metrics", str, None, "HOST:PORT of Prometheus metrics, over plain HTTP on this machine; default: none"),
    Field("require", str, None, "the engine that must run, as tensorrt; default: the report says which ran instead"),
    Field(
        "energy_table",
        Path,
        None,
        "P3SL: this device's table of edge-profile --train -o, to choose its split by",
        reads="file",
    ),
    Field("privacy_weight", float, 0.5, "P3SL: alpha, from 0 (that choice goes by energy alone) to 1 (by privacy)"),
    Field(
        "remeasure_s",
        float,
        60.0,
        "P3SL: seconds to measure the energy table anew, once a turn's energy left it by a tenth or the device slowed "
        "down; 0: it is only corrected where it was found wrong",
    ),
    Field("power_cap_w", float, None, "P3SL: highest peak power of a split that this device may choose"),
    Field(
        "sleep_command",
        str,
        None,
        "P3SL: run between two turns to power down, with the seconds as its last argument, such as 'rtcwake -m mem "
        "-s'; default: the device waits, awake",
    ),
    Field("sigma_floor", str, "0", "the least noise at the cut that this device trains with: N, or SPLIT=N,..."),
    Field("split", int, None, "P3SL: choose this split by hand, whatever the energy table says"),
    Field("threads", int, 0, "threads of the engine; 0: as many CPUs as this program may use"),
    Field("plug", str, None, "TP-Link smart plug that feeds this device, HOST[:PORT][/OUTLET], to measure energy by"),
    Field("plug_account", Path, None, "two lines, name and password of a newer plug's owner; then FILE.hash will do"),
    Field(
        "power_model", str, None, "IDLE:BUSY watts of this device: model its energy where no meter works (never exact)"
    ),
)


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """The settings of work that asks no server; None where the signed manifest decides."""

    engine: str
    data: Path
    trust: Path
    state: Path
    site_secret: Path | None
    classes: Path | None
    label_mode: str
    noise: str
    alpha: float | None
    kappa_floor: float | None
    max_releases: int
    threads: int
    plug: str | None = None
    plug_account: Path | None = None
    power_model: str | None = None
    max_patch_share: float = 1.0
    require: str | None = None
    energy_table: Path | None = None
    privacy_weight: float = 0.5
    power_cap_w: float | None = None
    remeasure_s: float = 60.0
    sigma_floor: str = "0"
    split: int | None = None

    @property
    def wishes(self) -> Preferences:
        """What this device's choice of a split goes by. Raises: ConfigError."""
        return Preferences(self.privacy_weight, self.power_cap_w, read_floor(self.sigma_floor), self.split)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(LocalConfig):
    """The settings of a run with a server."""

    server: str
    ca: Path | None
    key: Path
    name: str
    certificate: Path | None = None
    certificate_key: Path | None = None
    max_mb_per_day: float | None = None
    update_names: tuple[str, ...] = ()
    metrics: str | None = None
    sleep_command: str | None = None


@dataclass(frozen=True)
class PreviewConfig:
    """The settings that a preview depends on."""

    engine: str
    trust: Path
    state: Path
    noise: str
    alpha: float | None
    kappa_floor: float | None
    threads: int


def resolve_config(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None,
    directory: Path,
    needed: Collection[str] | None = None,
    partial: bool = False,
) -> Resolved:
    """Settle every setting; `file` is --config, `directory` where edge.toml or cutlayer.toml is looked for.

    `needed` are those that a command cannot do without, where these are fewer than a run's; `partial` as `resolve`'s.
    Raises: ConfigError.
    """
    known: tuple[Field, ...] = FIELDS
    if needed is not None:
        known = tuple(
            replace(field, default=None) if field.default is REQUIRED and field.name not in needed else field
            for field in FIELDS
        )
    return resolve(SECTION, known, flags, environ, find_file(file, directory, FILES), partial)


def device_config(values: Mapping[str, Any]) -> DeviceConfig:
    """The checked configuration. Raises: ConfigError naming the setting."""
    config = DeviceConfig(**_of(DeviceConfig, values))
    check_name(config.name, "the device's name", NAME_CURE)
    for each in config.update_names:
        check_name(each, "a name of update_names", "correct --update-names")
    check_work(config)
    check_server(config.server)
    check_certificate(config.certificate, config.certificate_key)
    check_metrics(config.metrics)
    require_range("max_mb_per_day", config.max_mb_per_day, 0.1, 1e9)
    read_sleep_command(config.sleep_command)
    return config


def local_config(values: Mapping[str, Any]) -> LocalConfig:
    """The checked settings of work that asks no server, out of all. Raises: ConfigError naming the setting."""
    config = LocalConfig(**_of(LocalConfig, values))
    check_work(config)
    return config


def preview_config(values: Mapping[str, Any]) -> PreviewConfig:
    """The checked settings of a preview, out of all. Raises: ConfigError naming the setting."""
    config = PreviewConfig(**_of(PreviewConfig, values))
    check_protection(config)
    return config


@dataclass(frozen=True)
class PrewarmConfig:
    """The settings that building a plan depends on."""

    engine: str
    trust: Path
    state: Path
    alpha: float | None
    threads: int
    require: str | None


def prewarm_config(values: Mapping[str, Any]) -> PrewarmConfig:
    """The checked settings of a prewarm, out of all. Raises: ConfigError naming the setting."""
    config = PrewarmConfig(**_of(PrewarmConfig, values))
    require_range("alpha", config.alpha, 0.0, 1.0)
    require_range("threads", config.threads, 0, 1024)
    return config


@dataclass(frozen=True)
class AccountConfig:
    """The settings that the account of releases depends on."""

    state: Path
    data: Path | None
    max_releases: int
    max_patch_share: float


def account_config(values: Mapping[str, Any]) -> AccountConfig:
    """The checked settings of the account, out of all. Raises: ConfigError naming the setting."""
    config = AccountConfig(**_of(AccountConfig, values))
    check_caps(config)
    return config


def _of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of its fields, out of all. The engine is a path to be resolved as others are, and then a name: what
    follows the folder in it need not be there."""
    chosen = {field.name: values[field.name] for field in fields(config) if field.name in values}
    return {**chosen, "engine": str(values["engine"])} if "engine" in chosen else chosen


def check_work(config: LocalConfig) -> None:
    """Raises: ConfigError naming the setting."""
    require_choice("label_mode", config.label_mode, LABEL_MODES)
    check_caps(config)
    check_protection(config)
    require_range("privacy_weight", config.privacy_weight, 0.0, 1.0)
    require_range("power_cap_w", config.power_cap_w, 0.0, 1e6)
    require_range("remeasure_s", config.remeasure_s, 0.0, 3600.0)
    require_range("split", config.split, 1, 0xFFFF)
    read_floor(config.sigma_floor)


def check_caps(config: LocalConfig | AccountConfig) -> None:
    """Raises: ConfigError naming the setting."""
    require_range("max_releases", config.max_releases, 1, 1_000_000)
    require_range("max_patch_share", config.max_patch_share, 0.0, 1.0)


def check_protection(config: LocalConfig | PreviewConfig) -> None:
    """Raises: ConfigError naming the setting."""
    require_choice("noise", config.noise, NOISE_MODES)
    require_range("alpha", config.alpha, 0.0, 1.0)
    require_range("kappa_floor", config.kappa_floor, 0.0, 1000.0)
    require_range("threads", config.threads, 0, 1024)


def check_server(server: str) -> None:
    """TLS off this machine, always. Raises: ConfigError."""
    try:
        parts = urlsplit(server)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"server should be wss://host:port, found {server!r}: {error}", "correct --server") from error
    if parts.scheme not in ("ws", "wss") or not host:
        raise ConfigError(f"server should be wss://host:port, found {server!r}", "correct --server")
    if parts.scheme == "ws" and not is_loopback(host):
        raise ConfigError(
            f"server {server} would send features over {host} without TLS",
            "use wss:// (and --ca for a certificate of your own)",
        )


def check_certificate(certificate: Path | None, certificate_key: Path | None) -> None:
    """Both or neither. Raises: ConfigError."""
    if (certificate is None) != (certificate_key is None):
        present, missing = ("certificate", "certificate_key") if certificate else ("certificate_key", "certificate")
        raise ConfigError(f"{present} is set, {missing} is not", "set both, or neither where the server asks for none")


def check_metrics(metrics: str | None) -> tuple[str, int] | None:
    """Host and port of a setting; None where there is none.

    Raises: ConfigError where it is none, or leaves this machine.
    """
    if metrics is None:
        return None
    host, _, port = metrics.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536 and is_loopback(host)):
        raise ConfigError(
            f"metrics should be HOST:PORT of this machine, such as 127.0.0.1:9101, found {metrics!r}",
            "energy stays on the device: let an agent here collect it",
        )
    return host, int(port)


def read_sleep_command(text: str | None) -> tuple[str, ...]:
    """The words of a setting, none where there is none. Raises: ConfigError."""
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
        if not words:
            raise ValueError("it is empty")
    except ValueError as error:
        raise ConfigError(
            f"sleep_command {text!r} is no command: {error}", 'write for example: --sleep-command "rtcwake -m mem -s"'
        ) from error
    return words


def is_loopback(host: str) -> bool:
    """Is this the machine itself? Decided by address, for `127.example.com` is not."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_choice(name: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise ConfigError(
            f"{name} should be one of {', '.join(known)}, found {found!r}{suggest(found, known)}",
            f"correct --{name.replace('_', '-')}",
        )


def require_range(name: str, found: float | None, lowest: float, highest: float) -> None:
    if found is not None and not lowest <= found <= highest:
        raise ConfigError(
            f"{name} should be {lowest} to {highest}, found {found}", f"correct --{name.replace('_', '-')}"
        )
