"""The account of what of each image ever left: which patches, how many copies, under which noise; and its caps."""

from __future__ import annotations

import csv
import io
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ConfigError, DataError, DeviceError
from contract.tokens import SentRule, kept_patches
from edge_runtime.cli import edge_run, parser
from edge_runtime.part_ledger import PartLedger
from edge_runtime.release_ledger import UNCOUNTED, Release, ReleaseLedger
from edge_runtime.released_patches import UNKNOWN, from_text, share_shown, to_text
from edge_runtime.releases import account, summary, to_csv, to_table
from tests.edge_runtime.fake_package import Package, write_device, write_images, write_package
from tests.edge_runtime.line import Line
from tests.edge_runtime.test_conduct import collecting
from tests.edge_runtime.test_part_keeper import plan

ONE, TWO = bytes(16), bytes([1]) * 16
PACKAGE = "ab" * 32
HALF = to_text((4, 4), kept_patches((4, 4), "checkerboard"))
OTHER_HALF = to_text((4, 4), np.setdiff1d(np.arange(16), kept_patches((4, 4), "checkerboard")))
WHOLE = to_text((4, 4))


def draw(kappa: float = 1.0, kind: str = "laplace alpha=0.1", patches: str = HALF) -> Release:
    return Release(PACKAGE, 2, kind, kappa, patches)


def open_ledger(path: Path) -> ReleaseLedger:
    return ReleaseLedger(path / "ledger", lambda text: None)


@pytest.mark.parametrize("kept", ["all", "checkerboard", "quarter"])
@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (3, 5), (14, 14)])
def test_patches_survive_their_text(grid: tuple[int, int], kept: str) -> None:
    positions = kept_patches(grid, kept)  # type: ignore[arg-type]
    shown = from_text(to_text(grid, positions))
    assert shown is not None and shown.shape == grid
    assert np.array_equal(np.flatnonzero(shown), positions)


@pytest.mark.parametrize("text", ["", "4x4", "4x4:ffff0", "0x4:", "4x4:zz", "axb:all", "4x4:ff"])
def test_patches_that_nobody_can_read_count_as_all(text: str) -> None:
    assert from_text(text) is None and share_shown([text]) == 1.0


def test_shares_add_up_where_patches_do() -> None:
    assert share_shown([]) == 0.0
    assert share_shown([HALF]) == share_shown([HALF, HALF]) == 0.5
    assert share_shown([HALF, OTHER_HALF]) == 1.0
    quarter = to_text((2, 2), np.array([0]))  # a coarser grid: its upper left patch is four of the finer one
    assert share_shown([quarter]) == 0.25 and share_shown([HALF, quarter]) == 0.5 + 2 / 16


def test_the_account_tells_draws_copies_patches_and_the_least_noise(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record([ONE, TWO], draw())
    ledger.record([ONE], draw())  # sent again: the same bytes
    ledger.record([ONE], draw(0.5, patches=WHOLE))
    for upload in range(3):
        ledger.record([TWO], draw(kind=f"laplace alpha=0.1 fresh={upload}"))
    found = account(open_ledger(tmp_path), {ONE: "a/1.png", b"other": "never.png"}, 4, 1.0)
    one, two = sorted(found.images, key=lambda each: each.image != "a/1.png")
    assert (one.image, one.draws, one.copies, one.least_kappa, one.patch_share) == ("a/1.png", 2, 1, 0.5, 1.0)
    assert (two.image, two.draws, two.copies, two.patch_share) == (TWO.hex(), 4, 4, 0.5)
    assert found.never == 1 and "patches 4x4:all" in one.releases[1]
    assert "at most 4 draws (max_releases 4) and 100% of the patches" in summary(found)
    lowered = summary(replace(found, max_releases=1, max_patch_share=0.5))  # the caps of today, not of then
    assert "4 draws (max_releases 1, it was more when they left)" in lowered
    assert "100% of the patches (max_patch_share 50%, it was more when they left)" in lowered
    assert summary(account(open_ledger(tmp_path / "none"), None, 1, 1.0)) == "nothing ever left this device"


def test_a_ledger_of_an_earlier_version_still_counts_and_its_patches_count_as_all(tmp_path: Path) -> None:
    body = f"{ONE.hex()}\t{draw().text()}".encode()
    (tmp_path / "ledger").write_bytes(b"%08x\t%s\n" % (zlib.crc32(body), body))
    ledger = open_ledger(tmp_path)
    ledger.check([ONE], draw(), 1)  # the same draw: no second release
    assert ledger.releases(ONE) == 1 and ledger.of(ONE) == (draw(patches=UNKNOWN),) and ledger.share(ONE) == 1.0
    with pytest.raises(DataError, match="100% of an image's patches"):
        ledger.check([ONE], draw(), 1, 0.5)


def test_a_share_above_the_cap_refuses_all_and_records_nothing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.check([ONE], draw(), 9, 0.5)
    ledger.record([ONE], draw())
    ledger.check([ONE], draw(2.0), 9, 0.5)  # other noise on the same patches shows no more of them
    with pytest.raises(DataError, match="100% of an image's patches would have left this device, 50% did") as caught:
        ledger.check([TWO, ONE], draw(2.0, patches=OTHER_HALF), 9, 0.5)
    assert "--max-patch-share" in caught.value.cure
    assert len((tmp_path / "ledger").read_bytes().splitlines()) == 1


def test_a_part_that_trains_records_an_image_once_and_is_capped_before_it_answers(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    parts = PartLedger(ledger, PACKAGE, (8, 8), 0.5)
    cut = replace(plan().cuts[0], kept=4, patches=16)
    first, more = np.array([[0, 1, 2, 3], [4, 5, 6, 7]]), np.array([[8, 9, 10, 11]])
    for epoch in range(3):
        parts.release([ONE, TWO], cut, first, 0.0, f"epoch {epoch}")
    assert len((tmp_path / "ledger").read_bytes().splitlines()) == 2
    found = account(ledger, None, 1, 0.5)
    assert [(each.draws, each.unprotected, each.least_kappa, each.patch_share) for each in found.images] == [
        (0, 1, None, 0.25)
    ] * 2
    assert "2 images went without noise" in summary(found) and ledger.releases(ONE) == 0
    ledger.check([ONE], draw(patches=to_text((4, 4), first[0])), 1, 0.5)
    with pytest.raises(DataError, match="100% of an image's patches"):
        parts.release([ONE], cut, None, 0.0, "epoch 4")
    parts.release([bytes([7]) * 16], cut, more, 0.0, "epoch 4")


def test_every_draw_of_noise_at_the_cut_of_a_part_counts_also_over_restarts(tmp_path: Path) -> None:
    """An epoch that is sent again is the same draw; whoever has several of them averages, so the account tells."""
    cut = plan().cuts[0]

    def release(ids: list[bytes], sigma: float, name: str) -> None:
        PartLedger(open_ledger(tmp_path), PACKAGE, (8, 8), 1.0).release(ids, cut, None, sigma, name)

    for epoch in (1, 2, 2, 3):
        release([ONE, TWO], 2.5, f"run epoch {epoch}")
    for epoch in (4, 5):
        release([ONE], 1.0, f"run epoch {epoch}")  # less noise: another release
    found = account(open_ledger(tmp_path), {ONE: "a/1.png", TWO: "a/2.png"}, 1, 1.0)
    counts = [(each.image, each.part_draws, each.draws) for each in found.images]
    assert counts == [("a/1.png", 5, 0), ("a/2.png", 3, 0)]
    assert "2 went to such a part under noise, one of them in 5 draws" in summary(found)
    assert "sigma=2.5, 3 draws" in found.images[1].releases[0] and ",3," in to_csv(found).splitlines()[2]
    lines = (tmp_path / "ledger").read_bytes().splitlines()
    assert len(lines) == 3 + 5 and open_ledger(tmp_path).unreadable == 0  # images at a strength, and draws of batches


def test_draws_that_an_earlier_version_did_not_count_are_unknown_and_not_none(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record([ONE], draw(2.5, kind=UNCOUNTED))
    PartLedger(ledger, PACKAGE, (8, 8), 1.0).release([ONE], plan().cuts[0], None, 2.5, "run epoch 9")
    found = account(ledger, None, 1, 1.0)
    assert found.images[0].part_draws is None and "unknown" in to_table(found)
    assert "of 1 an earlier version counted no draws" in summary(found) and ledger.releases(ONE) == 0


def test_draws_torn_by_a_power_cut_cost_that_batch_only(tmp_path: Path) -> None:
    parts = PartLedger(open_ledger(tmp_path), PACKAGE, (8, 8), 1.0)
    for epoch in (1, 2):
        parts.release([ONE, TWO], plan().cuts[0], None, 2.5, f"run epoch {epoch}")
    path, said = tmp_path / "ledger", list[str]()
    path.write_bytes(path.read_bytes()[:-9])
    ledger = ReleaseLedger(path, said.append)
    assert [release.draws for each in (ONE, TWO) for release in ledger.of(each)] == [1, 1]
    assert len(said) == 1 and "torn last line" in said[0]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "front")


def test_a_run_is_refused_before_anything_is_sent_where_too_many_patches_would_leave(
    tmp_path: Path, package: Package
) -> None:
    config = write_device(tmp_path, package, write_images(tmp_path / "images", {"a": 3}), max_patch_share=0.5)
    line = collecting(Line(tmp_path, config, package))
    with pytest.raises(DataError, match="max_patch_share is 50%"):
        line.run()
    assert not line.server.stored and not (config.state / "release_ledger").exists()
    line.close()
    cut = package.manifest.cuts[0]
    half = write_package(tmp_path / "half", version=2, cuts=(replace(cut, sent=SentRule("checkerboard", 0.5)),))
    config = write_device(tmp_path, half, tmp_path / "images", max_patch_share=0.5, kappa_floor=0.5)
    line = collecting(Line(tmp_path, config, half, session="s2", run="run-2"))
    line.run()
    assert line.server.images == 3 and "50% of the patches" in summary(account(line.equipment.ledger, None, 1, 0.5))
    line.close()


def test_the_command_names_files_and_changes_nothing(
    tmp_path: Path, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "images", {"a": 3})
    config = write_device(tmp_path, package, images)
    line = collecting(Line(tmp_path, config, package))
    line.run()
    path = config.state / "release_ledger"
    with path.open("ab") as stream:
        stream.write(b"half a li")  # as a run beside it may be writing
    before = path.read_bytes()
    write_images(images, {"b": 1}, seed=5)
    words = ["--releases", "--state", str(config.state), "--data", str(images)]
    assert edge_run(parser().parse_args([*words, "--format", "json"]), {}, tmp_path) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "edge-run-releases" and document["never"] == 1
    assert [(each["image"], each["draws"], each["least_kappa"]) for each in document["images"]] == [
        (f"a/a_{number}.png", 1, 1.0) for number in range(3)
    ]
    assert edge_run(parser().parse_args([*words, "--format", "csv"]), {}, tmp_path) == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 3
    assert edge_run(parser().parse_args(["--releases", "--state", str(config.state)]), {}, tmp_path) == 0
    table = capsys.readouterr().out
    assert line.equipment.dataset.samples[0].sample_id.hex() in table and "3 images have left" in table
    assert path.read_bytes() == before
    line.close()


def test_a_folder_that_is_no_state_and_a_cap_that_is_no_share_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="is no state of a device"):
        edge_run(parser().parse_args(["--releases", "--state", str(tmp_path)]), {}, tmp_path)
    with pytest.raises(ConfigError, match="max_patch_share should be 0.0 to 1.0"):
        edge_run(
            parser().parse_args(["--releases", "--state", str(tmp_path), "--max-patch-share", "1.5"]), {}, tmp_path
        )
