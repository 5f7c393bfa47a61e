"""Is a written leakage table whole, does it follow from its rows, and is it of this package and these public images?

What a table must hold by itself is `contract.leakage_check`'s. The attacks are not run again: that an attack read what
a row says is the one thing that cannot be told from the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from contract.errors import PackageError
from contract.image_folder import scan
from contract.leakage import LEAKAGE_NAME
from contract.leakage_check import faults

from .curve import least_strength
from .package import Package, read_package
from .profiler import curve_of
from .public import digest_of
from .table import Table, read_table

_CURE = "measure again with leakage-profile -o; a table is not to be edited"


def check_table(path: Path, package: Path | None, public: Path | None) -> Iterator[str]:
    """What was checked, one line each, as it is.

    Raises: ConfigError for a file that is no table; PackageError for one that contradicts itself, or is of another
    package or other images; what is wrong with these.
    """
    table = read_table(path)
    found = list(faults(table))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PackageError(f"{path} is no sound leakage table: {found[0]}{more}", _CURE)
    yield f"form, ranges and completeness: {len(table.rows)} rows, {len(table.curve)} points of curves"
    _check_curves(path, table)
    yield "curves and least noise: as they follow from the rows; no figure rises with the noise"
    if package is None:
        yield "not checked: which package it is of (give --package)"
    else:
        yield from _check_package(path, table, read_package(package))
    if public is None:
        yield "not checked: which public images were attacked (give --public)"
    elif digest_of(scan(public, None)) != table.settings.public_digest:
        raise PackageError(f"{path} was measured on other images than those of {public}", "give its own --public")
    else:
        yield f"public images: names and sizes are those of {public}"
    yield "not checked: the signature, which is the package's (edge-run checks it), and the attacks themselves"


def _check_curves(path: Path, table: Table) -> None:
    for split in dict.fromkeys(row.split for row in table.rows):
        told = [point for point in table.curve if point.split == split]
        drawn = curve_of(table.rows, split)
        alike = len(told) == len(drawn) and all(
            math.isclose(a, b, abs_tol=1e-6)
            for one, other in zip(told, drawn, strict=True)
            for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
        )
        if not alike:
            raise PackageError(f"{path}: the curve of split {split} does not follow from its rows", _CURE)
        wanted = None
        if table.threshold.fsim is not None:
            fsim = [point.fsim for point in drawn]
            wanted = least_strength([point.strength for point in drawn], fsim, table.threshold.fsim)
        least = next(each.strength for each in table.least_noise if each.split == split)
        if least != wanted and (least is None or wanted is None or not math.isclose(least, wanted)):
            raise PackageError(f"{path}: the least noise of split {split} does not follow from its curve", _CURE)


def _check_package(path: Path, table: Table, package: Package) -> Iterator[str]:
    """Raises: PackageError."""
    wanted, settings = package.digest.hex(), table.settings
    if settings.package_digest != wanted:
        raise PackageError(
            f"{path} is of a package {table.package} with content {settings.package_digest[:16]}, {package.root} has "
            f"content {wanted[:16]}",
            "give the package that it was measured on",
        )
    for what, claimed, true in (
        ("model", table.model, package.manifest.model),
        ("unit of noise", table.unit, package.splits[0].unit),
        ("weight noise", settings.alpha, package.alpha),
        ("splits", sorted({row.split for row in table.rows}), sorted(split.index for split in package.splits)),
    ):
        if claimed != true:
            raise PackageError(f"{path}: {what} should be {true}, as {package.root} has, found {claimed}", _CURE)
    yield f"package: content {wanted[:16]}, model, splits and weight noise are those of {package.root}"
    kappa = package.manifest.transforms.kappa
    if package.manifest.cuts and kappa not in settings.strengths:
        yield f"warning: there is no row at kappa {kappa:g}, the package's own noise: --add-table refuses it"
    held = package.root / LEAKAGE_NAME
    if not held.is_file():
        yield "the package carries no table yet"
    elif held.read_bytes() == path.read_bytes():
        yield "the package carries this very table"
    else:
        yield "warning: the package carries another table"
