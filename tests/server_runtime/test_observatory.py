"""What is shown of a run is its newest figures."""

from __future__ import annotations

from pathlib import Path

from server_runtime.observatory import newest_metrics


def test_the_newest_figures_of_each_site_also_after_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"site": "a", "epoch": 1, "loss": 0.9}\n{"site": "b", "epoch": 4}\n{"site": "a", "epoch": 2, "loss": 0.5}\n'
        '{"site": "a", "ended": true}\n{"site": "elsewhere", "epoch": 9}\n[1]\n{"site": "b", "epo'
    )
    found = newest_metrics(path, ("a", "b", "c"))
    assert found == {"a": {"site": "a", "epoch": 2, "loss": 0.5}, "b": {"site": "b", "epoch": 4}, "c": {}}
    assert newest_metrics(tmp_path / "none", ("a",)) == {"a": {}}
