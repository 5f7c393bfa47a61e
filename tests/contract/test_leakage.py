"""Which package a leakage table is of: content decides, not signature, version or documents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.canonical import CanonicalError
from contract.errors import PackageError
from contract.leakage import (
    LEAKAGE_NAME,
    PACKAGED_BYTES_MAX,
    Attacked,
    Figures,
    Row,
    from_bytes,
    of_package,
    strongest,
    subject_digest,
    to_bytes,
)
from contract.leakage_check import faults
from contract.manifest import FileRecord, Manifest, TransformRules
from contract.tokens import SentRule
from tests.golden.samples import MANIFEST
from tests.leakage_table import leakage_table

OTHER_FILE = FileRecord("other.onnx", 3, "0" * 64)


def test_a_table_is_read_as_it_was_written() -> None:
    table = leakage_table(MANIFEST)
    assert from_bytes(to_bytes(table)) == table == of_package(to_bytes(table), MANIFEST)


@pytest.mark.parametrize(
    "later",
    [
        replace(MANIFEST, version=9, created="2030-01-01T00:00:00Z", signer="0" * 16),
        replace(MANIFEST, files=(*MANIFEST.files, FileRecord(LEAKAGE_NAME, 1, "1" * 64))),
        replace(MANIFEST, files=(*MANIFEST.files, OTHER_FILE)),
        replace(MANIFEST, transforms=replace(MANIFEST.transforms, kappa=0.0)),
        replace(MANIFEST, name="another-name"),
    ],
)
def test_a_package_that_sends_the_same_keeps_its_table(later: Manifest) -> None:
    assert of_package(to_bytes(leakage_table(MANIFEST)), later).package == MANIFEST.name


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, files=(replace(MANIFEST.files[0], sha256="f" * 64), *MANIFEST.files[1:])),
        replace(MANIFEST, transforms=TransformRules(0.5, 0.25, 1.0, True)),
        replace(MANIFEST, cuts=(replace(MANIFEST.cuts[0], sent=SentRule("checkerboard", 1.0)),)),
        replace(MANIFEST, image=replace(MANIFEST.image, interpolation="bilinear")),
    ],
)
def test_a_table_of_another_package_is_refused(other: Manifest) -> None:
    assert subject_digest(other) != subject_digest(MANIFEST)
    with pytest.raises(PackageError, match="the leakage table is of a package") as refused:
        of_package(to_bytes(leakage_table(MANIFEST)), other)
    assert "measure this very package" in refused.value.cure


def test_of_a_package_of_parts_every_file_but_the_table_counts() -> None:
    parts = replace(MANIFEST, cuts=(), files=(*MANIFEST.files, FileRecord("training.json", 1, "2" * 64)))
    with_table = replace(parts, files=(*parts.files, FileRecord(LEAKAGE_NAME, 1, "1" * 64)))
    assert subject_digest(with_table) == subject_digest(parts)
    assert subject_digest(replace(parts, files=(*parts.files, OTHER_FILE))) != subject_digest(parts)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"kind":"edge-profile","schema_version":1}'])
def test_what_is_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(PackageError, match="is no table of leakage-profile"):
        of_package(data, MANIFEST)


GOOD = leakage_table(MANIFEST)
FIGURE = GOOD.rows[0].attacks[0]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ({"settings": replace(GOOD.settings, public_digest="x")}, "public_digest should be 64 digits of hex"),
        ({"settings": replace(GOOD.settings, strengths=(0.0, 1.0, 0.25))}, "strengths should be 0 or more and rise"),
        ({"settings": replace(GOOD.settings, attacks=())}, "attacks should be one or more"),
        ({"rows": GOOD.rows[:-1]}, "should have one of each strength"),
        ({"rows": ()}, "there is none of a protected split"),
        ({"rows": (*GOOD.rows, replace(GOOD.rows[0], protected=False, split=9))}, "without protection"),
        ({"rows": (replace(GOOD.rows[0], images=999), *GOOD.rows[1:])}, "images should be 1 to 10, found 999"),
        ({"rows": (replace(GOOD.rows[0], attacks=()), *GOOD.rows[1:])}, "attacks should be ridge"),
        (
            {"rows": (replace(GOOD.rows[0], attacks=(replace(FIGURE, right=11),)), *GOOD.rows[1:])},
            "right should be 0 to 10, found 11",
        ),
        (
            {"rows": (replace(GOOD.rows[0], attacks=(replace(FIGURE, figures=Figures(9.0, 1.7, 0.5, None)),)),
                      *GOOD.rows[1:])},
            "ridge: ssim should be -1 to 1, found 1.7",
        ),
        ({"lpips_unknown": ""}, "lpips is missing"),
        ({"curve": tuple(replace(each, ssim=each.strength) for each in GOOD.curve)}, "ssim rises from 0 to 1"),
        ({"curve": ()}, "curve: should be of splits"),
        ({"threshold": replace(GOOD.threshold, fsim=2.0)}, "threshold: fsim should be 0 to 1"),
        ({"attacks_s": -1.0}, "attacks_s should be 0 or more"),
    ],
)  # fmt: skip
def test_a_table_that_contradicts_itself_is_refused(harm: dict[str, object], said: str) -> None:
    assert not list(faults(GOOD))
    with pytest.raises(PackageError, match=said):
        of_package(to_bytes(replace(GOOD, **harm)), MANIFEST)  # type: ignore[arg-type]


def test_a_table_in_a_package_has_a_limit() -> None:
    data = to_bytes(leakage_table(MANIFEST)) + b" " * PACKAGED_BYTES_MAX
    with pytest.raises(CanonicalError):
        from_bytes(data, PACKAGED_BYTES_MAX)
    with pytest.raises(PackageError):
        of_package(data, MANIFEST)


VALUES = st.floats(-5, 50)
FIGURES = st.builds(Figures, VALUES, VALUES, VALUES, st.none() | VALUES)


@given(st.lists(FIGURES, min_size=1, max_size=4))
def test_the_strongest_is_no_weaker_than_any_attack(figures: list[Figures]) -> None:
    attacks = tuple(Attacked(str(number), each, None, 0.0) for number, each in enumerate(figures))
    found = strongest(Row(1, 0.0, True, 1, 1, attacks))
    for each in figures:
        assert found.psnr_db >= each.psnr_db and found.ssim >= each.ssim and found.fsim >= each.fsim
        assert each.lpips is None or (found.lpips is not None and found.lpips <= each.lpips)
