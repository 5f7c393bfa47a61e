"""Everything that was chosen for one export, in one frozen value; it is stored with the backend as it is.

Where the choices come from (flags, environment, file) is left to exporter.cli.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import UsageError

ModelArg = int | float | bool | str | None | list["ModelArg"] | dict[str, "ModelArg"]

TUNES = ("noise-aware", "none")


@dataclass(frozen=True)
class Limits:
    """Bounds of an export's cost and of its figures."""

    calibration_images: int = 32  # SA's own number
    statistics_images: int = 512
    evaluation_images: int = 500
    compared_images: int = 8  # for the signal-to-noise ratio at the cut
    synthetic_images: int = 10
    batch: int = 4  # more a run is slower per image: intermediates leave the cache
    golden_images: int = 4
    int8_share: float = 0.97
    int8_snr_db: float = 20.0


@dataclass(frozen=True)
class ExportPlan:
    """One export. Paths are texts, so that the plan can be stored; None stands for what was not given."""

    model: str
    model_args: tuple[tuple[str, ModelArg], ...]
    split: int | None  # None: two thirds of the depth
    int8: bool
    calibration: str | None
    weights: str | None
    pretrained: bool
    tune: str
    opset: int
    alpha: float
    kappa: float
    kappa_max: float
    name: str | None
    version: int | None  # None: one more than the package that is replaced
    seed: int
    limit_tuning: int
    signing_key: str | None
    force: bool
    output: str

    def __post_init__(self) -> None:
        _require(self.tune in TUNES, f"tune must be one of {', '.join(TUNES)}, found {self.tune!r}")
        _require(not (self.weights and self.pretrained), "expected --weights or --pretrained, found both")
        _require(self.opset >= 17, f"opset must be 17 or more (LayerNormalization), found {self.opset}")
        _require(0.0 <= self.alpha <= 1.0, f"alpha must lie in 0..1, found {self.alpha}")
        _require(0.0 <= self.kappa <= self.kappa_max, f"kappa must lie in 0..kappa-max, found {self.kappa}")
        _require(self.version is None or self.version >= 1, f"version must be 1 or more, found {self.version}")
        _require(self.limit_tuning >= 1, f"limit-tuning must be 1 or more, found {self.limit_tuning}")


def _require(holds: bool, cause: str) -> None:
    if not holds:
        raise UsageError(cause, "see export-frontend --help")
