"""The frontends that tuning sees, and an export with the published form of tuning, end to end."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract.errors import UsageError
from exporter.checkpoint import create_model, image_rule, own_head
from exporter.frontend_file import Halves
from exporter.models import family_of
from exporter.public_set import divide, open_folder
from exporter.runtime import open_session, run_tokens
from exporter.split import split_model
from exporter.tuning_frontends import make_tuning_frontends
from tests.exporter import tiny


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_pictures(tmp_path_factory.mktemp("public"), 15)


def test_each_subset_gives_a_frontend_of_its_own_and_the_model_stays(pictures: Path, tmp_path: Path) -> None:
    plan = tiny.plan(tmp_path / "front", calibration=str(pictures), tune="paper")
    model = create_model(plan)
    _, family = family_of(model)
    facts = family.facts(model)
    frontend, backend = split_model(model, plan.split)
    before = copy.deepcopy(frontend.state_dict())
    public = open_folder(pictures, image_rule(model, facts.input_shape))
    rng = np.random.default_rng(0)
    parts = divide(len(public), tiny.LIMITS, plan.limit_tuning, rng)
    halves = Halves(model, frontend, backend, own_head(model), facts, family.fold_sites(frontend))
    made = make_tuning_frontends(halves, plan, public, parts, tiny.LIMITS, 1, tmp_path, 3, rng)
    assert len(made) == 3 and all(each.records for each in made)
    images = next(public.batches(parts.evaluation, 4))
    tokens = [run_tokens(open_session(str(each.path), 1), images) for each in made]
    with torch.no_grad():
        exact = frontend(torch.from_numpy(images)).numpy()
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(tokens[a] - tokens[b]).max() > 0  # calibrated on other pictures
    for each in tokens:
        assert np.square(each - exact).mean() < 0.05 * exact.var()
    for name, value in frontend.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_float32_export_needs_no_frontends_for_tuning(tmp_path: Path) -> None:
    plan = tiny.plan(tmp_path / "front", int8=False, tune="noise-aware")
    assert make_tuning_frontends(None, plan, None, None, tiny.LIMITS, 1, tmp_path, 3, None) == ()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="mixes quantized frontends"):
        tiny.plan(tmp_path / "front", int8=False, tune="paper")


def test_the_published_tuning_runs_from_folder_to_package(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "front"
    report = tiny.run(folder, calibration=str(pictures), tune="paper")
    backend = folder.with_name("front.backend")
    assert json.loads((backend / "export.json").read_text())["plan"]["tune"] == "paper"
    assert report.figures["top1"]["tuned_clean"] is not None
    tuned, original = (load_file(backend / f"backend{name}.safetensors") for name in ("", "_original"))
    change = max(float((tuned[name] - original[name]).abs().max()) for name in original)
    steps = -(-2 * report.figures["tuning_images"] // 32)
    assert 0 < change <= 1.1e-5 * steps  # Adam moves a weight by at most its rate in a step


def test_both_parts_of_the_published_tuning_can_be_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SA's ablation: without transforms an epoch has half the images; without subsets the sent frontend is alone."""
    front = tmp_path / "front"
    report = tiny.run(front, calibration=str(pictures), tune="paper", no_hilbert=True, tuning_subsets=0)
    assert "for tuning, calibrated on" not in capsys.readouterr().err
    backend = front.with_name("front.backend")
    tuned, original = (load_file(backend / f"backend{name}.safetensors") for name in ("", "_original"))
    change = max(float((tuned[name] - original[name]).abs().max()) for name in original)
    assert 0.0 < change < 1.05e-5 * -(-report.figures["tuning_images"] // 32)  # a step of Adam is its rate at most
