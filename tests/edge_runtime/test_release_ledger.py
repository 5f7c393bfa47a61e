from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import DataError
from edge_runtime.release_ledger import Release, ReleaseLedger
from edge_runtime.releases import account, summary

IDS = [bytes([number]) * 16 for number in range(5)]
ONE = Release("ab" * 32, 1, "laplace alpha=0.1", 1.0)
HALF = Release("ab" * 32, 1, "laplace alpha=0.1", 0.5)


def open_ledger(path: Path) -> ReleaseLedger:
    return ReleaseLedger(path, lambda text: None)


def test_the_same_release_again_is_no_further_release(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger")
    for _ in range(3):
        ledger.check(IDS, ONE, 1)
        ledger.record(IDS, ONE)
    assert ledger.releases(IDS[0]) == 1
    assert len((tmp_path / "ledger").read_bytes().splitlines()) == 5


@pytest.mark.parametrize(
    "other",
    [
        HALF,
        Release("cd" * 32, 1, ONE.kind, 1.0),
        Release("ab" * 32, 2, ONE.kind, 1.0),
        Release("ab" * 32, 1, "laplace alpha=0.2", 1.0),
        Release("ab" * 32, 1, "laplace alpha=0.1 fresh=77", 1.0),
    ],
)
def test_anything_else_counts_and_is_capped_across_restarts(tmp_path: Path, other: Release) -> None:
    open_ledger(tmp_path / "ledger").record(IDS[:3], ONE)
    again = open_ledger(tmp_path / "ledger")
    with pytest.raises(DataError, match="3 of 5 images would be released 2 times, max_releases is 1"):
        again.check(IDS, other, 1)
    again.check(IDS, other, 2)
    again.record(IDS, other)
    assert [again.releases(each) for each in IDS] == [2, 2, 2, 1, 1]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 2000), noise=st.binary(max_size=30))
def test_de_04_a_torn_tail_costs_the_last_line_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    open_ledger(path).record(IDS, ONE)
    data = path.read_bytes()
    path.write_bytes(data[:cut] + noise)
    again = open_ledger(path)
    whole = data[:cut].count(b"\n")
    assert sum(again.releases(each) for each in IDS) >= whole
    again.record(IDS, HALF)
    assert all(open_ledger(path).releases(each) >= 1 for each in IDS)


def test_a_spoiled_line_in_the_middle_is_said_and_the_others_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    open_ledger(path).record(IDS, ONE)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"laplace", b"LAPLACE")
    path.write_bytes(b"".join(lines))
    said: list[str] = []
    ledger = ReleaseLedger(path, said.append)
    assert [ledger.releases(each) for each in IDS] == [1, 1, 0, 1, 1] and "unreadable lines are skipped: 1;" in said[0]


@pytest.mark.parametrize(
    "body", [b"", b"zz\tp\t1\tk\t1.0\tall", b"aa\tp\t1\tk\tnan\tall", b"aa\tp\tx\tk\t1.0", b"\xff"]
)
def test_a_line_of_another_form_is_unreadable_and_hides_nothing(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "release_ledger"
    path.write_bytes(b"%08x\t%s\n" % (zlib.crc32(body), body))
    ledger = ReleaseLedger(path, lambda text: None, read_only=True)
    assert (ledger.unreadable, ledger.images) == (1, ())
    told = summary(account(ledger, None, 1, 1.0))
    assert "nothing ever left" not in told and "1 of its lines may hide more" in told
