"""A leakage table of a package, as leakage-profile would write it, without the attacks."""

from __future__ import annotations

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
