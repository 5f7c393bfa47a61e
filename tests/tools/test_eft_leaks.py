"""What a curious server reads back from EFTViT's features: the attack of `tools/reproduce eft_vit --leaks`, small."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from exporter.models import family_of
from tests.eft_package import KEPT, LOCAL, PATCHES, SIDE_PX
from tests.tools.test_eft_vit import Run, World, world
from tools.reproduce_eft_leaks import MASKS, Attacker, Found, Watch, table_of
from tools.simulation import Answers, Terms, adapt

__all__ = ["world"]  # the fixture
ROUNDS = (1, 5)


def pictures(count: int) -> Tensor:
    """Public pictures (n, 3, h, w) in [0, 1]: a colour each, and noise."""
    rng = torch.Generator().manual_seed(0)
    colours, noise = (
        torch.rand((count, 3, 1, 1), generator=rng),
        torch.rand((count, 3, SIDE_PX, SIDE_PX), generator=rng),
    )
    return (0.8 * colours + 0.2 * noise).clamp(0, 1)


@pytest.fixture(scope="module")
def found(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Found]:
    """What is read back after some rounds, by how masks are drawn."""
    rule, public = world.installed.manifest.image, pictures(300)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (rule.mean, rule.std))
    local = family_of(world.shipped.module)[1].cut(world.shipped.module, LOCAL)[0].eval()
    side = math.isqrt(PATCHES)
    attacker = Attacker(local, public, (public - mean) / std, (side, side), KEPT)
    rows = {}
    for masks, noise in MASKS.items():
        devices = {"jetson": world.device("jetson", tmp_path_factory.mktemp(masks), "torch", noise)}
        watch = Watch(Answers(devices, Terms("run", "site", "eft_vit", "raw-label", 0.0, 0)), devices)
        run = Run(world.strategy(epochs=2 * ROUNDS[-1], learning_rate=1e-5), devices)
        adapt(run.strategy, watch, run.site)
        truth = {each.sample_id: picture(each.path) for each in devices["jetson"].dataset.samples}
        assert len(watch.rounds) == ROUNDS[-1]
        for rounds in ROUNDS:
            rows[masks, rounds] = attacker.read(masks, watch.rounds[:rounds], truth)
    return rows


def picture(path: Path) -> Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1) / 255


def test_the_server_reads_back_a_quarter_under_fixed_masks_however_many_rounds(
    found: dict[tuple[str, int], Found],
) -> None:
    for rounds in ROUNDS:
        assert found["fixed", rounds].area == KEPT / PATCHES


def test_the_server_reads_back_most_of_a_picture_under_fresh_masks(found: dict[tuple[str, int], Found]) -> None:
    assert found["fresh", 5].area > 0.6 > found["fresh", 1].area
    assert found["fresh", 5].psnr_db > found["fixed", 5].psnr_db + 3.0


def test_the_patches_that_are_shown_are_not_protected(found: dict[tuple[str, int], Found]) -> None:
    for row in found.values():
        assert row.visible_psnr_db > row.guess_psnr_db + 6.0
        assert row.places_read > 3 / PATCHES  # chance: 1 / PATCHES


def test_the_table_says_what_was_found(found: dict[tuple[str, int], Found]) -> None:
    table = table_of(list(found.values()))
    assert [row[:2] for row in table.rows] == [("fixed", 1), ("fixed", 5), ("fresh", 1), ("fresh", 5)]
    assert {len(row) for row in table.rows} == {len(table.columns)}
