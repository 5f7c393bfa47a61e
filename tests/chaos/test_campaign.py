"""A few faults of every part of the system in one run of each strategy: the result is the undisturbed one's.

`tools/chaos` has the long campaigns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the server needs torch")

from tools.chaos import campaign
from tools.chaos_faults import draw_faults
from tools.chaos_world import WORKS

FAULTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(WORKS))
def test_a_campaign_of_a_few_faults_changes_nothing(strategy: str, package: Path, tmp_path: Path) -> None:
    outcome = campaign(package, tmp_path / "campaign", WORKS[strategy](FAULTS), draw_faults(FAULTS, 3))
    assert outcome.differences == []
    assert len(outcome.applied) == FAULTS
