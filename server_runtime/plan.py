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

from contract.canonical import INT_MAX
from contract.config import REQUIRED, Field
from contract.errors import ConfigError, suggest
from contract.leakage import Table
from contract.manifest import TransformRules
from contract.training import HOLDS, OWN_HEADS, TrainingCut, TrainingPlan

from . import strategies
from .aggregation import RULES
from .belongs import NOISY
from .noise_table import first_table
from .schedule import SCHEDULES
from .similarity import read_threshold

LABEL_MODES = ("permuted-label", "logit-gradient", "client-head", "raw-label")  # which of them: package and strategy

FIELDS = (
    Field("strategy", str, REQUIRED, "which training strategy: " + ", ".join(strategies.names())),
    Field("backend", Path, REQUIRED, "the folder that export-frontend wrote beside the package (front.backend)"),
    Field("listen", str, REQUIRED, "HOST:PORT to listen on; port 0 takes a free one"),
    Field("roster", Path, REQUIRED, "folder of enrolled devices: ROSTER/<site>/<device>.pub"),
    Field("certificate", Path, None, "TLS certificate chain (PEM); needed off loopback", reads="file"),
    Field("certificate_key", Path, None, "private key of the certificate (PEM)", reads="file"),
    Field(
        "client_ca",
        Path,
        None,
        "CA (PEM) of the devices' certificates: demand one; default: the roster's keys alone",
        reads="file",
    ),
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
    Field("local_epochs", int, 1, "passes of a device over its images between two averagings"),
    Field("quorum", int, 0, "a round goes on with so many devices when the others are away; 0: it waits for all"),
    Field("average", str, "mean", "how parts become one: " + ", ".join(RULES) + "; the last two bear some false ones"),
    Field("outlier", float, 100.0, "a part that moved so many times as far as the median one is left out; 0: none is"),
    Field("fraction", float, 1.0, "share of the devices, more than 0 to 1, that a round asks; drawn anew each round"),
    Field("server_epochs", int, 2, "passes of the server over the features that it keeps, in each round"),
    Field("server_rate", float, 0.0, "highest learning rate of the server's own training; 0: as --learning-rate"),
    Field(
        "sampling",
        str,
        "median",
        "of which images a device sends features: median: as many of each of its classes (--medians); all: of every "
        "image, once",
    ),
    Field(
        "medians",
        float,
        1.0,
        "with --sampling median, how many features a device sends of each of its classes: this many times the images "
        "of its median class; "
        "0: as many as its largest class has images",
    ),  # fmt: skip
    Field("store_mb", int, 1024, "most features that the server keeps, in MiB"),
    Field("store_rounds", int, 0, "for how many rounds a device's features count; 0: until it sends others"),
    Field(
        "threshold",
        str,
        "auto",
        "devices are averaged with those whose use of the model's blocks is no further from theirs than this distance; "
        "0: each alone, inf: all together, auto: found from the largest gap between the distances",
    ),  # fmt: skip
    Field("alone", int, 3, "so many rounds each device trains by itself before it is averaged with others"),
    Field(
        "cuts",
        str,
        "",
        "layers on the device: N, and DEVICE=N for single ones, such as 6,pi-3=2; default: the package's first",
    ),
    Field(
        "prototype_strength",
        float,
        1.0,
        "how strongly a device's embeddings are drawn to the common mean of their class (its prototype), as a weight "
        "beside the task's loss; 0: not at all (the paper's lambda_0)",
    ),  # fmt: skip
    Field(
        "prototype_shift",
        float,
        2.0,
        "how much weaker that is for a device whose own class means lie at a distance from the prototypes: times "
        "exp(-this x distance); 0: the same for all (the paper's alpha)",
    ),  # fmt: skip
    Field(
        "prototype_renewal",
        float,
        0.5,
        "share of the newest round in a prototype, 0 to 1; the rest is what it was (the paper's beta)",
    ),
    Field(
        "server_copies",
        str,
        "each",
        "each: every device trains with a copy of its own of the server's half, and the copies are averaged (SplitFed "
        "V1); one: devices train one after another with the same half (V2)",
    ),  # fmt: skip
    Field("sigma", str, "auto", "noise at the cut: table (P3SL's, by split), a standard deviation; auto: p3sl's table"),
    Field("fsim_threshold", float, 0.0, "p3sl: T_FSIM, at which pictures tell nothing; 0: the leakage table's own"),
    Field("aggregate_every", int, 5, "p3sl: R, epochs from one aggregation to the next"),
    Field("average_by", str, "devices", "p3sl: what counts alike where parts are averaged: devices, or images"),
    Field(
        "average_into",
        str,
        "server",
        "p3sl: server: the server trains on with the average, as published; copy: with its own layers, which keeps "
        "shallow devices' chains whole, and the average is what is judged and published",
    ),
    Field(
        "norms",
        str,
        "averaged",
        "p3sl: running statistics of the averaged model: averaged, as published; public: taken anew from --public",
    ),
    Field("reference_accuracy", float, 0.0, "p3sl: A_ref, noise-free accuracy on --public; 0: no floor of accuracy"),
    Field("accuracy_loss", float, 0.05, "p3sl: beta, share of A_ref that noise may cost before it is lowered"),
    Field("sleep_least_s", float, 10.0, "p3sl: shortest rest for which a device is told to sleep; 0: never"),
    Field("threads", int, None, "CPU threads for training; default: all this process may use"),
    Field(
        "public",
        Path,
        None,
        "p3sl: the server's own images, one folder per class, to judge the model by",
        reads="folder",
    ),
)

SERVER_COPIES = ("each", "one")
# The most that anything here can be; numbers that pass through JSON and a message have 63 bits.
_MOST = {
    "epochs": 1_000_000, "augmentations": 100_000, "seed": INT_MAX, "threads": 1024, "batch": 1 << 16,
    "local_epochs": 1_000_000, "quorum": 1_000_000, "alone": 1_000_000, "server_epochs": 1_000_000,
    "store_mb": 1 << 24, "aggregate_every": 1_000_000, "store_rounds": 1_000_000, "warmup": 1_000_000,
}  # fmt: skip
_LEAST = {"augmentations": 0, "seed": 0, "warmup": 0, "quorum": 0, "alone": 0, "store_rounds": 0}  # of others 1
JUDGING = ("p3sl",)  # which judge the model by the operator's images
AVERAGE_BY = ("devices", "images")
AVERAGE_INTO = ("server", "copy")
NORMS = ("averaged", "public")
SAMPLINGS = ("median", "all")


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
    sampling: str = "median"
    medians: float = 1.0
    store_mb: int = 1024
    store_rounds: int = 0
    threshold: str = "auto"
    alone: int = 3
    prototype_strength: float = 1.0
    prototype_shift: float = 2.0
    prototype_renewal: float = 0.5
    server_copies: str = "each"
    sigma: str = "auto"
    fsim_threshold: float = 0.0
    aggregate_every: int = 5
    average_by: str = "devices"
    average_into: str = "server"
    norms: str = "averaged"
    reference_accuracy: float = 0.0
    accuracy_loss: float = 0.05
    sleep_least_s: float = 10.0
    evaluation_sha256: str = ""  # of the images that judge the model

    def check(
        self, rules: TransformRules, allowed_modes: tuple[str, ...], training: TrainingPlan | None = None,
        devices: Collection[str] = (), leakage: Table | None = None,
    ) -> None:  # fmt: skip
        """Refuse what cannot be trained with a package of these rules and this leakage, or by these devices.

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
        for name, most in _MOST.items():
            least = _LEAST.get(name, 1)
            if not least <= getattr(self, name) <= most:
                raise _wrong(name, f"{least} to {most}", getattr(self, name))
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
        if self.sampling == "all" and self.medians != 1.0:
            raise _wrong("medians", 'left out where sampling is "all"', self.medians)
        if self.warmup > self.epochs:
            raise _wrong("warmup", f"at most epochs ({self.epochs})", self.warmup)
        if self.average not in RULES:
            raise _wrong("average", f"one of {', '.join(RULES)}", self.average, suggest(self.average, RULES))
        self._check_prototypes()
        self._check_noise()
        if training is not None and self.strategy in NOISY:
            splits = [cut.index for cut in training.cuts if cut.loss == "none"]
            wanted = "table" if self.strategy == "p3sl" and self.sigma == "auto" else parse_sigma(self.sigma)
            first_table(wanted, splits, leakage, self.fsim_threshold)

    def _check_noise(self) -> None:
        parse_sigma(self.sigma)
        if not 0 <= self.fsim_threshold <= 1:
            raise _wrong("fsim_threshold", "0 to 1", self.fsim_threshold)
        worded = {"average_by": AVERAGE_BY, "average_into": AVERAGE_INTO, "norms": NORMS, "sampling": SAMPLINGS}
        for name, known in worded.items():
            found = getattr(self, name)
            if found not in known:
                raise _wrong(name, f"one of {', '.join(known)}", found, suggest(found, known))
        for name in ("reference_accuracy", "accuracy_loss"):
            if not 0 <= getattr(self, name) <= 1:
                raise _wrong(name, "a share from 0 to 1", getattr(self, name))
        if self.reference_accuracy and not self.evaluation_sha256:
            raise ConfigError(
                "reference_accuracy is a floor of accuracy, and there are no images to judge the model by",
                "give --public DIR with one folder for each of the site's classes",
            )
        if self.norms == "public" and not self.evaluation_sha256:
            raise ConfigError(
                "norms are to take their statistics from public images, and there are none",
                "give --public DIR with one folder for each of the site's classes",
            )
        if not 0 <= self.sleep_least_s < math.inf:
            raise _wrong("sleep_least_s", "0 or more", self.sleep_least_s)

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


def parse_sigma(text: str) -> float | str:
    """`auto`, `table`, or a standard deviation.

    Raises:
        ConfigError: it is none of these.
    """
    if text in ("auto", "table"):
        return text
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma < math.inf:
        raise _wrong("sigma", "auto, table, or a standard deviation of 0 or more", text)
    return sigma


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
    client_ca: Path | None = None  # devices need a certificate of it, besides their key

    @property
    def scheme(self) -> str:
        """The scheme devices connect with."""
        return "wss" if self.certificate is not None else "ws"


def parse_listen(
    listen: str, certificate: Path | None, certificate_key: Path | None, client_ca: Path | None = None
) -> Listen:
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
    if client_ca is not None and certificate is None:
        raise ConfigError(
            "client_ca is set, and without TLS no device could show a certificate",
            "give --certificate and --certificate-key as well",
        )
    return Listen(host, port, certificate, certificate_key, client_ca)


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
