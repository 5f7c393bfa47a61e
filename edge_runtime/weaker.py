"""Whether a package that comes by itself would protect the images less than the current one; then it is refused.

By hand that is the operator's to decide. What a frontend computes, nobody here can judge: the publisher's key vouches
for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from contract.errors import CutlayerError, WeakerError
from contract.manifest import LIMITS, MANIFEST_NAME, Cut, Manifest, from_bytes
from contract.tokens import kept_patches
from contract.training import TRAINING_NAME, TrainingPlan
from contract.training import from_bytes as training_from_bytes
from edge_runtime.channel_noise import fallen_noise
from edge_runtime.config import DeviceConfig
from edge_runtime.install import CURRENT, current_manifest, read_limited


def refuse_weaker(manifest: Manifest, packages: Path, config: DeviceConfig) -> None:
    """By the manifests alone. Where this device's settings name its own least noise, the package's counts for nothing.

    Raises: WeakerError.
    """
    current = current_manifest(packages)
    if current is not None:
        _refuse(manifest, [*_less_noise(manifest, current, config), *_more_shown(manifest, current)])


def refuse_weaker_parts(folder: Path, packages: Path) -> None:
    """By what both packages have devices train.

    Raises: WeakerError; ManifestError, PackageError where what came cannot be read.
    """
    manifest = from_bytes(read_limited(folder / MANIFEST_NAME, LIMITS.size_bytes))
    new, current = _training_of(folder, manifest), current_manifest(packages)
    if new is None or current is None:
        return
    try:
        old = _training_of(packages / CURRENT, current)
    except (OSError, CutlayerError):
        return
    _refuse(manifest, list(_weaker_parts(new, old)))


def _refuse(manifest: Manifest, weaker: list[str]) -> None:
    if weaker:
        raise WeakerError(
            f"package {manifest.name} version {manifest.version} protects the images less: {'; '.join(weaker)}",
            "look at it, then take it by hand: edge-run update DIR",
        )


def _less_noise(manifest: Manifest, current: Manifest, config: DeviceConfig) -> Iterator[str]:
    new, old = manifest.transforms, current.transforms
    if config.kappa_floor is None and new.kappa < old.kappa:
        yield f"feature noise {new.kappa:g} in place of {old.kappa:g}"
    if config.alpha is None and (new.alpha < old.alpha or new.weight_noise < old.weight_noise):
        yield f"weight noise {new.alpha if new.weight_noise else 0:g} in place of {old.alpha:g}"


def _more_shown(manifest: Manifest, current: Manifest) -> Iterator[str]:
    for cut, before in zip(manifest.cuts[:1], current.cuts[:1], strict=False):
        if cut.index * before.depth < before.index * cut.depth:
            yield f"a cut after {cut.index} of {cut.depth} blocks in place of {before.index} of {before.depth}"
        if _sent_share(cut) > _sent_share(before):
            yield f"{_sent_share(cut):.0%} of the patches in place of {_sent_share(before):.0%}"
        if cut.sent.prefix_share < before.sent.prefix_share:
            yield f"{cut.sent.prefix_share:g} of the noise on the CLS token"
        yield from fallen_noise(cut, before, manifest.model == current.model)  # a floor of kappa does not mend it


def _sent_share(cut: Cut) -> float:
    return len(kept_patches(cut.tokens.grid, cut.sent.kept)) / math.prod(cut.tokens.grid)


def _training_of(folder: Path, manifest: Manifest) -> TrainingPlan | None:
    if all(file.name != TRAINING_NAME for file in manifest.files):
        return None
    return training_from_bytes(read_limited(folder / TRAINING_NAME, LIMITS.size_bytes), manifest)


def _weaker_parts(new: TrainingPlan, old: TrainingPlan | None) -> Iterator[str]:
    """Another strategy may send what the present one keeps here."""
    if old is None or new.strategy != old.strategy:
        yield f"parts for {new.strategy} in place of {'none' if old is None else old.strategy}"
        return
    shallowest, before = (min(cut.index / cut.depth for cut in plan.cuts) for plan in (new, old))
    if shallowest < before:
        yield f"a cut after {shallowest:.0%} of the layers in place of {before:.0%}"
    share, share_before = (max((cut.kept or 1) / (cut.patches or 1) for cut in plan.cuts) for plan in (new, old))
    if share > share_before:
        yield f"{share:.0%} of the patches in place of {share_before:.0%}"
