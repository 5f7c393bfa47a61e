"""A leakage table of a package, as leakage-profile would write it, without the attacks."""

from __future__ import annotations

from collections.abc import Sequence

from contract.leakage import (
    Attacked,
    Baselines,
    Enough,
    Figures,
    Point,
    Row,
    Settings,
    Table,
    Threshold,
    subject_digest,
)
from contract.manifest import Manifest

BLIND = Figures(11.8, 0.05, 0.31, None)


def leakage_table(manifest: Manifest, strengths: tuple[float, ...] | None = None) -> Table:
    """Ridge alone, by default at none, the package's own and strong noise; what it reads falls as the noise rises."""
    strengths = tuple(sorted({0.0, manifest.transforms.kappa, 1.0})) if strengths is None else strengths
    index = manifest.cuts[0].index if manifest.cuts else 1
    figures = [Figures(20.0 - 2 * each, 0.7 - 0.2 * each, 0.8 - 0.1 * each, None) for each in strengths]
    rows = [
        Row(index, each, True, 10, 40, (Attacked("ridge", found, None, 0.5),))
        for each, found in zip(strengths, figures, strict=True)
    ]
    curve = [
        Point(index, each, found.psnr_db, found.ssim, found.fsim)
        for each, found in zip(strengths, figures, strict=True)
    ]
    return Table(
        package=manifest.name, model=manifest.model, unit="kappa",
        settings=Settings(subject_digest(manifest).hex(), "0" * 64, ("ridge",), strengths, 0.1, 10, 40, None, 0),
        lpips_unknown="no weights", baselines=Baselines(BLIND, BLIND, None),
        threshold=Threshold(None, "no classes", None, None), rows=tuple(rows), curve=tuple(curve),
        least_noise=(Enough(index, None),), attacks_s=1.0,
    )  # fmt: skip


def sigma_table(splits: Sequence[int], threshold: float | None = 0.35) -> Table:
    """Of parts that devices train: FSIM is 0.5 - 0.1 sigma - 0.05 (s - 1), on the fine grid up to 2.5."""
    strengths = tuple(round(0.05 * step, 10) for step in range(51))
    curve = [
        Point(split, each, 20.0 - each, 0.5, 0.5 - 0.1 * each - 0.05 * (split - 1))
        for split in splits
        for each in strengths
    ]
    return Table(
        package="parts", model="tiny", unit="sigma",
        settings=Settings("0" * 64, "0" * 64, ("ridge",), strengths, 0.0, 10, 40, None, 0),
        lpips_unknown="no weights", baselines=Baselines(BLIND, BLIND, None),
        threshold=Threshold(threshold, "so that tests have one", 3, 0.9), rows=(), curve=tuple(curve),
        least_noise=tuple(Enough(split, None) for split in splits), attacks_s=1.0,
    )  # fmt: skip
