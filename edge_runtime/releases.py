"""What of each image has ever left this device, told to its owner: noise draws, copies, patches, least noise.

Pure: the ledger counts (`release_ledger`); here counts become values, a table, CSV or JSON. One draw that is sent
again, in a restart or for a prediction, is the same bytes and no further copy.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from edge_runtime.release_ledger import OF_PARTS, WITHOUT_NOISE, Release, ReleaseLedger


@dataclass(frozen=True)
class ImageReleases:
    """One image. `draws` differ in noise; `copies` are the most draws under one setting, which an attacker averages.

    `least_kappa` is None where nothing left under noise. `unprotected` are packages' parts that got it without noise.
    `part_draws` are draws of noise at the cut of parts that are trained here; None: an earlier version kept no count.
    """

    image: str  # file, or wire id where it is not in --data
    draws: int
    copies: int
    least_kappa: float | None
    patch_share: float
    unprotected: int
    part_draws: int | None
    releases: tuple[str, ...]


@dataclass(frozen=True)
class Account:
    """All images of which something left, and the caps."""

    images: tuple[ImageReleases, ...]
    never: int | None  # images of --data of which nothing ever left; None without --data
    max_releases: int
    max_patch_share: float
    unreadable: int = 0  # lines of the ledger, of which nobody knows what they counted


def account(
    ledger: ReleaseLedger, names: Mapping[bytes, str] | None, max_releases: int, max_patch_share: float
) -> Account:
    """`names` are the files of --data by wire id, None where there is no --data."""
    known = {} if names is None else names
    images = [_of_image(known.get(each, each.hex()), ledger.of(each), ledger.share(each)) for each in ledger.images]
    never = None if names is None else len(set(names) - set(ledger.images))
    ordered = tuple(sorted(images, key=lambda each: each.image))
    return Account(ordered, never, max_releases, max_patch_share, ledger.unreadable)


def _of_image(name: str, releases: Sequence[Release], share: float) -> ImageReleases:
    noised = [each for each in releases if each.kind not in OF_PARTS]
    parts = [0 if each.kind == WITHOUT_NOISE else each.draws for each in releases if each.kind in OF_PARTS]
    counted = [each for each in parts if each is not None]
    settings = Counter((each.package_digest, each.cut, each.kind.split(" fresh=")[0], each.scale) for each in noised)
    return ImageReleases(
        image=name,
        draws=len(noised),
        copies=max(settings.values(), default=0),
        least_kappa=min((each.scale for each in noised), default=None),
        patch_share=share,
        unprotected=sum(each.kind == WITHOUT_NOISE for each in releases),
        part_draws=sum(counted) if len(counted) == len(parts) else None,
        releases=tuple(_in_words(each) for each in releases),
    )


def _in_words(release: Release) -> str:
    unit = "sigma" if release.kind in OF_PARTS else "kappa"
    noise = release.kind if release.kind == WITHOUT_NOISE else f"{release.kind} {unit}={release.scale:g}"
    patches = release.patches or "unknown, from an earlier version"
    noise += f", {release.draws} draws" if release.draws is not None else ""
    return f"{noise}, cut {release.cut} of package {release.package_digest[:12]}, patches {patches}"


def document(found: Account) -> dict[str, object]:
    """The fields of the JSON document."""
    return asdict(found)


def to_csv(found: Account) -> str:
    """One image a line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("image", "draws", "copies", "least_kappa", "patch_share", "unprotected", "part_draws", "releases"))
    for each in found.images:
        least = "" if each.least_kappa is None else f"{each.least_kappa:g}"
        writer.writerow(
            (each.image, each.draws, each.copies, least, f"{each.patch_share:.4f}", each.unprotected,
             "" if each.part_draws is None else each.part_draws, "; ".join(each.releases))
        )  # fmt: skip
    return text.getvalue()


def to_table(found: Account) -> str:
    """For a person on a terminal."""
    if not found.images:
        return summary(found) + "\n"
    width = max(len(each.image) for each in found.images)
    lines = [f"{'image':<{width}}  draws  copies  least kappa  patches  without noise  draws of parts"]
    for each in found.images:
        least = "-" if each.least_kappa is None else f"{each.least_kappa:g}"
        lines.append(
            f"{each.image:<{width}}  {each.draws:5}  {each.copies:6}  {least:>11}  {each.patch_share:7.0%}  "
            f"{f'{each.unprotected} parts' if each.unprotected else 'never':>13}  "
            f"{'unknown' if each.part_draws is None else each.part_draws:>14}"
        )
    lines.append(summary(found))
    return "\n".join(lines) + "\n"


def summary(found: Account) -> str:
    """One sentence on the whole, with the caps."""
    never = "" if found.never is None else f", nothing of {found.never} others in --data"
    lost = f"; the ledger is damaged, and {found.unreadable} of its lines may hide more" if found.unreadable else ""
    if not found.images:
        return (
            f"nothing is known to have left this device{never}{lost}"
            if lost
            else f"nothing ever left this device{never}"
        )
    draws = max(each.draws for each in found.images)
    share = max(each.patch_share for each in found.images)
    unprotected = sum(each.unprotected > 0 for each in found.images)
    bare = f"; {unprotected} images went without noise to a part that is trained here" if unprotected else ""
    drawn = [each.part_draws for each in found.images if each.part_draws]
    bare += f"; {len(drawn)} went to such a part under noise, one of them in {max(drawn)} draws" if drawn else ""
    unknown = sum(each.part_draws is None for each in found.images)
    bare += f"; of {unknown} an earlier version counted no draws for such a part" if unknown else ""
    caps = (draws > found.max_releases, "max_releases", f"{found.max_releases}"), (
        share > found.max_patch_share, "max_patch_share", f"{found.max_patch_share:.0%}",
    )  # fmt: skip
    in_draws, in_share = (f"{name} {cap}{', it was more when they left' if over else ''}" for over, name, cap in caps)
    return (
        f"{len(found.images)} images have left{never}; of one image at most {draws} draws ({in_draws}) and "
        f"{share:.0%} of the patches ({in_share}){bare}{lost}"
    )
