"""What a server was told to do, checked: the plan of a run (all that its result depends on) and where to listen.

Reading flags and files is left to `cli`, the backend folder to `backend_folder`, choosing a run directory to `runs`.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contract.config import REQUIRED, Field
from contract.errors import ConfigError, suggest
from contract.manifest import TransformRules
from contract.training import HOLDS, MASKED, OWN_HEADS, RELEASED, TrainingCut, TrainingPlan

from . import strategies
from .aggregation import RULES
from .schedule import SCHEDULES
from .similarity import read_threshold

LABEL_MODES = ("permuted-label", "logit-gradient", "client-head", "raw-label")  # which of them: package and strategy

FIELDS = (
    Field("strategy", str, REQUIRED, "which training strategy: " + ", ".join(strategies.names())),
    Field("backend", Path, REQUIRED, "the folder that export-frontend wrote beside the package (front.backend)"),
    Field("listen", str, REQUIRED, "HOST:PORT to listen on; port 0 takes a free one"),
    Field("roster", Path, REQUIRED, "folder of enrolled devices: ROSTER/<site>/<device>.pub"),
    Field("certificate", Path, None, "TLS certificate chain (PEM); needed off loopback"),
    Field("certificate_key", Path, None, "private key of the certificate (PEM)"),
    Field("metrics", str, None, "HOST:PORT of a status page and Prometheus metrics, over plain HTTP; default: none"),
    Field("runs", Path, Path("runs"), "folder of run directories"),
    Field("run", str, None, "which run to start or take up; default: the newest unfinished one of the same plan"),
    Field("label_mode", str, "permuted-label", "where labels stay: " + ", ".join(LABEL_MODES)),
    Field("kappa", float, None, "feature noise in standard deviations per channel; default: the package's"),
    Field("epochs", int, 100, "passes over a site's images"),
    Field("augmentations", int, 64, "patch-retrieval runs per image, one drawn each epoch; 0 trains without"),
    Field("replaced", float, 0.25, "share of an image's patches that a run replaces"),
    Field("seed", int, 0, "seed of the head, the order of training and the augmentations"),
    Field("batch", int, 64, "images of a device's training batch"),
    Field("learning_rate", float, 0.01, "highest learning rate of training on devices"),
    Field("schedule", str, "constant", "how the learning rate goes on after the warm-up: " + " or ".join(SCHEDULES)),
    Field("warmup", int, 0, "epochs in which the learning rate rises to its highest"),
    Field("local_epochs", int, 1, "where devices hold the whole model: epochs of a device in one round"),
    Field("quorum", int, 0, "the same, and prototypes: so many devices are enough when the others are away; 0: all"),
    Field("average", str, "mean", "how parts become one: " + ", ".join(RULES) + "; the last two bear some false ones"),
    Field("outlier", float, 100.0, "a part that moved so many times as far as the median one is left out; 0: none is"),
    Field("fraction", float, 1.0, "fed_avg, fed_bfpt, eft_vit: share of the devices that a round asks"),
    Field("server_epochs", int, 2, "eft_vit: epochs of the server on the stored features in a round"),
    Field("server_rate", float, 0.0, "eft_vit: highest learning rate of the server; 0: as the devices'"),
    Field("medians", float, 1.0, "eft_vit: features of a class, in medians of a device's classes; 0: its largest"),
    Field("store_mb", int, 1024, "eft_vit: most MiB of features that are kept"),
    Field("store_rounds", int, 0, "eft_vit: rounds for which a device's features count; 0: until it sends others"),
    Field(
        "threshold",
        str,
        "auto",
        "eeft: devices this near in their utilisation factors are averaged (0: none, inf: all)",
    ),
    Field("alone", int, 3, "eeft: rounds in which a device is averaged with nobody"),
    Field(
        "cuts",
        str,
        "",
        "layers on the device: N, and DEVICE=N for single ones, such as 6,pi-3=2; default: the package's first",
    ),
    Field("prototype_strength", float, 1.0, "prototypes: lambda_0, the pull's weight beside the task's loss; 0: none"),
    Field("prototype_shift", float, 2.0, "prototypes: alpha, how a device's shift weakens its pull; 0: not at all"),
    Field("prototype_renewal", float, 0.5, "prototypes: beta, a round's share in the class prototypes, 0 to 1"),
    Field(
        "server_copies", str, "each", "prototypes: each device has a copy of the server's half (SplitFed V1), or one"
    ),
    Field("threads", int, None, "CPU threads for training; default: all this process may use"),
    Field("public", Path, None, "the server's own public images; server-run does not read them"),
)

# Settings that mean nothing to a strategy, by what its packages hold: kept in the record, never a reason to differ.
_EEFT = frozenset({"threshold", "alone"})
_EFT_VIT = frozenset({"fraction", "server_epochs", "server_rate", "medians", "store_mb", "store_rounds"})
_OF_ROUNDS = frozenset({"local_epochs", "quorum"}) | _EFT_VIT | _EEFT
_ON_DEVICES = ("batch", "average", "outlier", "learning_rate", "schedule", "warmup", "cuts", *_OF_ROUNDS)
_IN_ROUNDS = ("fed_avg", "fed_bfpt", "eft_vit")  # which can ask any share of the devices
_AVERAGED = ("fed_avg", "fed_avg_own_heads", "fed_bfpt", "parallel_split", "split_fed")  # by a rule that may be chosen
_OF_PROTOTYPES = ("prototype_strength", "prototype_shift", "prototype_renewal", "server_copies")
SERVER_COPIES = ("each", "one")
_WHOLE = frozenset({"kappa", "augmentations", "replaced", "cuts", *_OF_PROTOTYPES})
_IGNORED = {
    "frontend": frozenset((*_ON_DEVICES, *_OF_PROTOTYPES)),
    "parts": frozenset({"kappa", "augmentations", "replaced", *_OF_ROUNDS, *_OF_PROTOTYPES}),
    "whole": _WHOLE | _EEFT,
    "body": _WHOLE | _EEFT | _EFT_VIT,
    "modules": _WHOLE | _EFT_VIT,
}
_MEANT = {"prototypes": frozenset((*_OF_PROTOTYPES, "quorum"))}  # by a single strategy


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
    batch: int = 64
    learning_rate: float = 0.01
    schedule: str = "constant"
    warmup: int = 0
    local_epochs: int = 1
    quorum: int = 0
    average: str = "mean"
    outlier: float = 100.0
    cuts: str = ""
    fraction: float = 1.0
    server_epochs: int = 2
    server_rate: float = 0.0
    medians: float = 1.0
    store_mb: int = 1024
    store_rounds: int = 0
    threshold: str = "auto"
    alone: int = 3
    prototype_strength: float = 1.0
    prototype_shift: float = 2.0
    prototype_renewal: float = 0.5
    server_copies: str = "each"

    def check(
        self, rules: TransformRules, allowed_modes: tuple[str, ...], training: TrainingPlan | None = None,
        devices: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Refuse what cannot be trained with a package of these rules, or by these devices.

        Raises:
            ConfigError: naming the setting.
        """
        strategies.check(self.strategy)
        self._check_training(training, devices)
        if self.label_mode not in LABEL_MODES:
            hint = suggest(self.label_mode, LABEL_MODES)
            raise _wrong("label_mode", f"one of {', '.join(LABEL_MODES)}", self.label_mode, hint)
        if self.label_mode not in allowed_modes:
            raise _wrong("label_mode", f"one that the package allows ({', '.join(allowed_modes)})", self.label_mode)
        if not (math.isfinite(self.kappa) and 0 <= self.kappa <= rules.kappa_max):
            raise _wrong("kappa", f"0 to {rules.kappa_max:g}, for which the backend was tuned", self.kappa)
        lowest_of = {"epochs": 1, "augmentations": 0, "seed": 0, "threads": 1}
        lowest_of |= {"batch": 1, "warmup": 0, "local_epochs": 1, "quorum": 0, "alone": 0}
        lowest_of |= {"server_epochs": 1, "store_mb": 1, "store_rounds": 0}
        for name, lowest in lowest_of.items():
            if getattr(self, name) < lowest:
                raise _wrong(name, f"{lowest} or more", getattr(self, name))
        read_threshold(self.threshold)
        if not 0 <= self.replaced <= 1:
            raise _wrong("replaced", "a share from 0 to 1", self.replaced)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise _wrong("learning_rate", "more than 0", self.learning_rate)
        if not 0 < self.fraction <= 1:
            raise _wrong("fraction", "more than 0 and at most 1", self.fraction)
        for name in ("medians", "server_rate", "outlier"):
            if not 0 <= getattr(self, name) < math.inf:
                raise _wrong(name, "0 or more", getattr(self, name))
        if self.schedule not in SCHEDULES:
            raise _wrong("schedule", f"one of {', '.join(SCHEDULES)}", self.schedule, suggest(self.schedule, SCHEDULES))
        if self.warmup > self.epochs:
            raise _wrong("warmup", f"at most epochs ({self.epochs})", self.warmup)
        if self.average not in RULES:
            raise _wrong("average", f"one of {', '.join(RULES)}", self.average, suggest(self.average, RULES))
        if self.average != "mean" and self.strategy not in _AVERAGED:
            raise _wrong("average", f"mean: {self.strategy} has a rule of its own, or none", self.average)
        self._check_prototypes()

    def _check_prototypes(self) -> None:
        for name in ("prototype_strength", "prototype_shift"):
            if not 0 <= getattr(self, name) < math.inf:
                raise _wrong(name, "0 or more", getattr(self, name))
        if not 0 <= self.prototype_renewal <= 1:
            raise _wrong("prototype_renewal", "a share from 0 to 1", self.prototype_renewal)
        if self.server_copies not in SERVER_COPIES:
            hint = suggest(self.server_copies, SERVER_COPIES)
            raise _wrong("server_copies", f"one of {', '.join(SERVER_COPIES)}", self.server_copies, hint)

    def _check_training(self, training: TrainingPlan | None, devices: Collection[str]) -> None:
        """Whether the package holds what the strategy trains, and has the cuts."""
        needed = HOLDS[self.strategy]
        if training is None:
            holds = {"frontend"}
        elif HOLDS.get(training.strategy) in OWN_HEADS:  # of these, a model that is frozen is no other's
            holds = {HOLDS[training.strategy]}
        else:
            parts = any(cut.loss == "none" for cut in training.cuts)
            whole = training.whole_model and any(cut.loss != "none" for cut in training.cuts)
            holds = ({"parts"} if parts else set()) | ({"whole"} if whole else set())
        if needed not in holds:
            held = "a frozen frontend" if training is None else f"what {training.strategy} trains"
            raise ConfigError(
                f"strategy {self.strategy} cannot train the package of this backend, which holds {held}",
                f"export the model for {self.strategy}, or choose another --strategy",
            )
        if self.strategy == "prototypes" and (training is None or training.prototypes is None):
            raise ConfigError(
                "strategy prototypes needs parts with a projection head, and the package of this backend has none",
                "export the model with --for prototypes",
            )
        default, own = parse_cuts(self.cuts)
        if needed != "parts" and self.cuts:
            raise _wrong("cuts", f"left out: {self.strategy} trains no parts of a model", self.cuts)
        waits = self.strategy in MASKED or self.strategy == "fed_bfpt" or needed not in RELEASED
        if self.quorum and waits and self.strategy != "prototypes":
            raise _wrong("quorum", f"left out: {self.strategy} waits for all devices", self.quorum)
        if self.fraction < 1 and self.strategy not in _IN_ROUNDS:
            raise _wrong("fraction", f"left out: {self.strategy} asks all devices", self.fraction)
        if self.local_epochs > 1 and needed not in RELEASED:
            raise _wrong("local_epochs", f"left out: a round of {self.strategy} is one epoch", self.local_epochs)
        if self.quorum > len(devices):
            raise _wrong("quorum", f"at most the {len(devices)} enrolled devices", self.quorum)
        if training is None or needed != "parts":
            return
        for device in own:
            if device not in devices:
                raise _wrong("cuts", "cuts of enrolled devices", device, suggest(device, devices))
        for index in (default, *own.values()):
            cut_of(training, index)

    def values(self) -> dict[str, str | int | float]:
        """The plan as flat values, for run.toml and the torch process."""
        return asdict(self)

    def differences(self, recorded: Mapping[str, Any], given: frozenset[str]) -> list[str]:
        """Where a recorded plan differs from this one, in fields that are not merely defaults here."""
        always = {"strategy", "backend_sha256", "package_digest"}
        given = given - (_IGNORED[HOLDS[self.strategy]] - _MEANT.get(self.strategy, frozenset()))
        return [
            f"{field.name} = {recorded.get(field.name)!r}, asked for {getattr(self, field.name)!r}"
            for field in fields(self)
            if (field.name in always or field.name in given) and recorded.get(field.name) != getattr(self, field.name)
        ]


def parse_cuts(text: str) -> tuple[int | None, dict[str, int]]:
    """`6,pi-3=2,pi-4=10` -> the cut of all devices, None for the package's first, and single devices' own.

    Raises:
        ConfigError: it is no such list.
    """
    default, own = None, {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        device, named, number = entry.rpartition("=")
        device = device.strip()
        twice = device in own if named else default is not None
        if not number.strip().isdecimal() or (named and not device) or twice:
            raise _wrong("cuts", "one N, and DEVICE=N once for each device, such as 6,pi-3=2", text)
        if named:
            own[device] = int(number)
        else:
            default = int(number)
    return default, own


def cut_of(training: TrainingPlan, index: int | None) -> TrainingCut:
    """The client part with so many layers; None: the package's first.

    Raises:
        ConfigError: the package has no such part.
    """
    parts = [cut for cut in training.cuts if cut.loss == "none"]
    found = next((cut for cut in parts if index in (None, cut.index)), None)
    if found is None:
        raise _wrong("cuts", f"cuts of the package ({', '.join(str(cut.index) for cut in parts)})", index)
    return found


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
    host, port = parse_address("listen", listen)
    if (certificate is None) != (certificate_key is None):
        present, missing = ("certificate", "certificate_key") if certificate else ("certificate_key", "certificate")
        raise ConfigError(f"{present} is set, {missing} is not", "set both, or neither to listen on loopback only")
    if certificate is None and not _is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs TLS, and no certificate is set",
            "give --certificate and --certificate-key (tools/make_keys makes a pair), or listen on 127.0.0.1",
        )
    return Listen(host, port, certificate, certificate_key)


def parse_address(name: str, text: str) -> tuple[str, int]:
    """HOST:PORT of a setting.

    Raises:
        ConfigError: it is none.
    """
    host, _, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # [::1]:8443
    if not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise _wrong(name, "HOST:PORT, such as 0.0.0.0:8443", text)
    return host, int(port_text)


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
