"""A picture beside what an attacker makes of it, with figures and words for its owner.

The picture goes the way of an upload: the device's own weights, noise by its key, the tokens that are sent, INT8. What
reads them is a decoder of the signed package. Files and engines are `cli`'s and `decoder`'s part, the page `page`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import PackageError
from contract.manifest import Manifest
from contract.preview import Decoder, psnr_db, ssim
from contract.tokens import kept_patches

Pixels = NDArray[np.uint8]
Decode = Callable[[NDArray[np.int8]], NDArray[np.float32]]  # codes (S, d) -> picture (h, w, 3) in [0, 1]

LONGER = (
    "an attacker who trains longer gets more, and so does one with pictures more like yours; see docs/threat_model.md"
)
AIM = 0.25  # of SSIM, at most: the threat model's
# By SSIM; a rough reading, no law.
WORDS = (
    (0.9, "almost the picture itself"),
    (0.6, "easy to recognise"),
    (0.4, "recognisable"),
    (AIM, "shapes and colours"),
)


@dataclass(frozen=True)
class Pair:
    """One picture at the model's size, what the attacker drew, and how alike they are.

    `flat_psnr_db` and `flat_ssim` are what the picture's own mean colour alone would get.
    """

    name: str
    yours: Pixels  # (h, w, 3)
    theirs: Pixels
    psnr_db: float
    ssim: float
    flat_psnr_db: float
    flat_ssim: float

    @property
    def words(self) -> str:
        """What the likeness means, roughly; below the aim, what was measured and no more."""
        if round(self.ssim, 2) <= round(self.flat_ssim, 2):  # as they are shown
            return "no more alike than one flat colour"
        below = f"less than {AIM:g}, the aim of the threat model"
        return next((text for least, text in WORDS if self.ssim >= least), below)


@dataclass(frozen=True)
class Settings:
    """What is previewed: `kappa` is the noise in the pictures, `kappa_floor` the least that this device accepts."""

    kappa: float
    kappa_floor: float
    alpha: float
    fresh: bool
    patches_sent: int
    patches: int
    decoder: Decoder


def settings_of(manifest: Manifest, kappa_floor: float, alpha: float, fresh: bool) -> Settings:
    """The package's first frontend under the decoder that fits this device's settings best.

    That is the one for the strongest noise that is no stronger than the device's least: it shows no less than an
    attacker gets. Raises: PackageError when the package has no decoder.
    """
    if not manifest.cuts:
        raise PackageError(
            f"package {manifest.name} has parts that devices train: they send activations without noise, of which "
            "there is no preview",
            "read 'Models that devices train' in docs/threat_model.md; leakage-profile measures on the server what "
            "they show",
        )
    cut = manifest.cuts[0]
    decoders = [decoder for decoder in manifest.preview if decoder.cut == cut.index]
    if not decoders:
        raise PackageError(
            f"package {manifest.name} version {manifest.version} has no decoder, so that nothing can be previewed",
            "ask its publisher to export it with export-frontend --preview",
        )
    fitting = [each for each in decoders if each.kappa <= kappa_floor or math.isclose(each.kappa, kappa_floor)]
    chosen = max(fitting, key=_kappa) if fitting else min(decoders, key=_kappa)
    sent = len(kept_patches(cut.tokens.grid, cut.sent.kept))
    return Settings(chosen.kappa, kappa_floor, alpha, fresh, sent, cut.tokens.patches, chosen)


def _kappa(decoder: Decoder) -> float:
    return decoder.kappa


def make_pair(name: str, yours: Pixels, codes: NDArray[np.int8], decode: Decode) -> Pair:
    """The pair of one picture, from the very codes that would be sent."""
    found = decode(codes)
    true = yours.astype(np.float64) / 255.0
    flat = np.broadcast_to(true.mean(axis=(0, 1)), true.shape)
    theirs = np.rint(255.0 * found).astype(np.uint8)
    return Pair(name, yours, theirs, psnr_db(true, found), ssim(true, found), psnr_db(true, flat), ssim(true, flat))


def figures(pair: Pair) -> tuple[str, str]:
    """Two sentences about one pair."""
    return (
        f"likeness {pair.ssim:.2f} (SSIM, 1 is the same picture), {pair.psnr_db:.1f} dB (PSNR): {pair.words}, for this "
        "attacker",
        f"one flat colour in its place: {pair.flat_ssim:.2f}, {pair.flat_psnr_db:.1f} dB",
    )


def remarks(settings: Settings) -> Sequence[str]:
    """What an owner must know to read the pairs."""
    decoder = settings.decoder
    lines = [
        f"settings: feature noise kappa {settings.kappa:g}, weight noise alpha {settings.alpha:g}, "
        f"{settings.patches_sent} of {settings.patches} patches",
        f"the attacker: trained for {decoder.steps} steps on {decoder.learnt_images} public pictures; of "
        f"{decoder.images} others it gets {decoder.ssim:.2f}, {decoder.psnr_db:.1f} dB on average, a linear decoder "
        f"{decoder.ridge_psnr_db:.1f} dB, one colour for all {decoder.colour_ssim:.2f}, "
        f"{decoder.colour_psnr_db:.1f} dB",
        LONGER,
    ]
    if settings.kappa_floor > settings.kappa and not math.isclose(settings.kappa_floor, settings.kappa):
        lines.append(
            f"this device sends with kappa {settings.kappa_floor:g} at least: with so much noise an attacker gets less "
            f"than is shown, which is for {settings.kappa:g}, the nearest that the package has a decoder for"
        )
    if settings.kappa_floor < settings.kappa and not math.isclose(settings.kappa_floor, settings.kappa):
        lines.append(
            f"warning: this device would accept kappa {settings.kappa_floor:g}, with less noise than is shown here "
            f"(kappa {settings.kappa:g}): an attacker then gets more"
        )
    if settings.alpha < decoder.alpha:
        lines.append(
            f"warning: the attacker was trained for weight noise alpha {decoder.alpha:g}; one who is trained for this "
            f"device's {settings.alpha:g} gets more"
        )
    if settings.fresh:
        lines.append(
            "warning: noise = fresh draws new noise for every upload, and an attacker averages them: what is shown is "
            "what a single one gives"
        )
    lines.append("nothing was sent, and none of this counts as a release")
    return lines
