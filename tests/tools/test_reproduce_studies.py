"""The studies beside the main table: copies with one draw of noise or many, thieves, the attack, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.tokens import (  # noqa: E402  (after the skips)
    Statistics,
    TokenLayout,
    augment,
    augmentation_positions,
    wire_steps,
)
from server_runtime.store import Upload  # noqa: E402
from server_runtime.strategies import Ask  # noqa: E402
from tools import reproduce_risk as risk  # noqa: E402
from tools.reproduce_baselines import Budget, Images  # noqa: E402
from tools.reproduce_cells import Cell  # noqa: E402
from tools.reproduce_copies import Copying, PreparedAnswers, copies_of  # noqa: E402
from tools.reproduce_study_tables import study_tables  # noqa: E402
from tools.torch_worker import Device  # noqa: E402

LAYOUT = TokenLayout(1, (2, 3), 8)
STATISTICS = Statistics((1.0,) * 8, (2.0,) * 8, (4.0,) * 8, (6.0,) * 8)
COUNT = 5


@dataclass(frozen=True)
class Sample:
    pixel_digest: bytes


class CleanFrontend:
    """Gives the same clean tokens whenever it is asked."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def tokens_in_steps(self, samples: object, on_images: object) -> np.ndarray:
        return self._tokens


@pytest.fixture
def clean() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1.5, (COUNT, LAYOUT.count, LAYOUT.dim)).astype(np.float16)


@pytest.fixture
def device(clean: np.ndarray) -> Device:
    cut = SimpleNamespace(
        tokens=LAYOUT, statistics=STATISTICS, index=2, sent=SimpleNamespace(kept="all", prefix_share=1)
    )
    bench = SimpleNamespace(
        frontend=CleanFrontend(clean), cut=cut, secret=b"s" * 32, package_digest=b"p" * 32,
        terms=SimpleNamespace(alpha=0.1),
    )  # fmt: skip
    worker = SimpleNamespace(samples=[Sample(bytes([place]) * 32) for place in range(COUNT)])
    return cast(Device, SimpleNamespace(name="d", bench=bench, worker=worker, installed=SimpleNamespace(cut=cut)))


@pytest.fixture
def upload() -> Upload:
    rng = np.random.default_rng(1)
    codes = rng.integers(-100, 100, (COUNT, LAYOUT.count, LAYOUT.dim)).astype(np.int8)
    sources = ((np.arange(COUNT)[:, None] + 1 + np.arange(LAYOUT.patches) % 2) % COUNT).astype(np.uint16)
    ids = rng.integers(0, 255, (COUNT, 16)).astype(np.uint8)
    return Upload("d", ids, codes, sources, np.arange(COUNT).astype(np.uint16))


KEYED = Copying(runs=3, seed=7, replaced=2, kappa=0.5, fresh=False)


def test_keyed_copies_are_what_the_server_rebuilds_from_the_recipe(device: Device, upload: Upload) -> None:
    copies = copies_of(device, upload, KEYED)
    assert sorted(copies) == ["d-copy-000", "d-copy-001", "d-copy-002", "d-copy-003"]
    assert (copies["d-copy-000"].codes == upload.codes).all()
    positions = np.stack([
        augmentation_positions(7, sample.tobytes(), 2, LAYOUT.patches, 2) for sample in upload.sample_ids
    ])  # fmt: skip
    assert upload.sources is not None
    rebuilt = augment(upload.codes, upload.sources, np.arange(COUNT), positions, LAYOUT.prefix)
    assert (copies["d-copy-002"].codes == rebuilt).all() and (rebuilt != upload.codes).any()
    for name, copy in copies.items():
        assert copy.device == name and copy.sources is None and (copy.labels == upload.labels).all()


def test_fresh_copies_have_noise_of_their_own_around_the_same_tokens(
    device: Device, upload: Upload, clean: np.ndarray
) -> None:
    copies = copies_of(device, upload, replace(KEYED, fresh=True, runs=60, replaced=0))
    steps = wire_steps(STATISTICS, 0.5)
    scale = np.concatenate([np.repeat(steps[:1], 1, axis=0), np.repeat(steps[1:], LAYOUT.patches, axis=0)])
    received = np.stack([copy.codes * scale for copy in copies.values()])
    errors = received - clean.astype(np.float32)
    assert abs(errors.std() / (0.5 * np.sqrt(2) * np.sqrt((1 + 6 * 4) / 7)) - 1) < 0.1  # Laplace of scale kappa sigma_c
    assert errors.mean(axis=0).std() < errors.std() / 5  # averaging gains what it gains on 61 independent draws
    again = copies_of(device, upload, replace(KEYED, fresh=True, runs=60, replaced=0))
    assert all((copies[name].codes == again[name].codes).all() for name in copies)


def test_prepared_answers_give_each_asked_copy_its_upload(upload: Upload) -> None:
    answers = PreparedAnswers({"a": upload, "b": upload})
    answers.note_checkpoint()
    assert answers.answer(Ask("features", "collect_features", {"b": {}})) == {"b": upload}


# -- thieves


def blobs(count: int, classes: int, seed: int, prefix_only: bool = False) -> Images:
    """Tokens (n, 1 + 6, 8) whose class shows in the prefix token, or in every token."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    tokens = torch.randn(count, LAYOUT.count, LAYOUT.dim, generator=generator)
    shown = 3 * torch.eye(LAYOUT.dim)[labels]
    tokens[:, : 1 if prefix_only else LAYOUT.count] += shown[:, None]
    return Images(tokens, labels)


def test_a_probe_reads_what_is_linear_and_says_what_it_chose() -> None:
    train, test = blobs(60, 3, 0), blobs(90, 3, 1)
    found = risk.probe(risk.pooled(train, 1, "patches"), risk.pooled(test, 1, "patches"), 3, 50)
    assert found.accuracy > 0.9 and found.held_out_accuracy is not None
    assert found.chosen().keys() == {"lr", "l2", "held_out_accuracy"}


def test_the_thief_takes_the_pooling_that_held_out_shots_prefer() -> None:
    found = risk.steal_by_probe(blobs(60, 3, 0, prefix_only=True), blobs(90, 3, 1, prefix_only=True), 1, 3, 50)
    assert found.pool in ("prefix", "both") and found.accuracy > 0.8
    without_prefix = risk.steal_by_probe(blobs(60, 3, 0), blobs(90, 3, 1), 0, 3, 50)
    assert without_prefix.pool == "patches"


def test_poolings_have_the_width_of_their_parts() -> None:
    images = blobs(4, 2, 0)
    widths = [risk.pooled(images, 1, pool).inputs.shape[1] for pool in risk.POOLS]
    assert widths == [8, 8, 16]
    assert torch.equal(risk.pooled(images, 1, "prefix").inputs, images.inputs[:, 0])


def test_an_auxiliary_backend_learns_from_public_tokens_and_is_tuned_on_the_shots() -> None:
    auxiliary = risk.train_auxiliary(blobs(128, 4, 0), 4, LAYOUT.dim, 1, 4, 0)
    same = risk.train_auxiliary(blobs(128, 4, 0), 4, LAYOUT.dim, 1, 4, 0)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in auxiliary.state_dict().items())
    before = {name: value.clone() for name, value in auxiliary.state_dict().items()}
    budget = Budget(epochs=8, batch=8, rates=(1e-3, 1e-2), folds=2)
    found = risk.steal_by_backend(auxiliary, blobs(24, 3, 2), blobs(90, 3, 3), 3, budget, 1)
    assert found["accuracy"] is not None and found["accuracy"] > 0.6  # chance is a third
    assert found["lr"] in budget.rates
    assert all(torch.equal(value, before[name]) for name, value in auxiliary.state_dict().items())


# -- tables


def made(study: str, case: str, seed: int, accuracy: Any, kappa: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {**vars(Cell(study, "digits", 5, kappa, seed, case)), "accuracy": accuracy, **more}


def only(rows: list[dict[str, Any]]) -> Any:
    (table,) = study_tables(rows)
    return table


def test_ablation_is_paired_with_split_adaptation_by_seed() -> None:
    rows = [
        made("ablation", case, seed, share)
        for case, seed, share in (
            ("sa", 1, 0.50), ("sa", 42, 0.60), ("without_retrieval", 1, 0.52), ("without_retrieval", 42, 0.61),
            ("runs_1", 42, 0.55),
        )
    ]  # fmt: skip
    lines = {line[0]: line[2] for line in only(rows).rows}
    assert lines == {
        "sa": "55.00 +- 7.07", "without_retrieval": "56.50 +- 6.36 (+1.50)", "runs_1": "55.00 (-5.00)"
    }  # fmt: skip


def test_thefts_that_come_within_20_points_are_named() -> None:
    shares = {"lp_clean": 0.7, "quantized_frontend": 0.4, "original_frontend": 0.6, "auxiliary_backend": 0.45}
    (line,) = only([made("risk", "", 1, shares, None)]).rows
    assert line == (
        "digits, 5 shots", "70.00", "40.00 (-30.0)", "60.00 (-10.0, not 20 below)", "45.00 (-25.0)"
    )  # fmt: skip


def test_keyed_and_fresh_are_paired_by_seed() -> None:
    shares = (("keyed", 1, 0.5), ("fresh", 1, 0.4), ("keyed", 42, 0.6), ("fresh", 42, 0.65), ("keyed", 215, 0.9))
    rows = [made("keying", case, seed, share) for case, seed, share in shares]
    (line,) = only(rows).rows
    assert line[-1] == "+2.50, ahead in 1 of 2"
    (alone,) = only(rows[:1]).rows
    assert alone[2:] == ("-", "-")


def test_the_curve_has_a_line_for_each_noise_and_tuning() -> None:
    rows = [
        made("noise", case, 1, 0.3, kappa, noise_free_accuracy=0.4, ridge_psnr_db=16.0, mean_colour_psnr_db=12.0)
        for case in ("shipped", "untuned") for kappa in (0.25, 1.0)
    ]  # fmt: skip
    lines = only(rows).rows
    assert [line[:2] for line in lines] == [
        ("digits, 5 shots, kappa 0.25", "shipped"), ("digits, 5 shots, kappa 0.25", "untuned"),
        ("digits, 5 shots, kappa 1", "shipped"), ("digits, 5 shots, kappa 1", "untuned"),
    ]  # fmt: skip
    assert lines[0][2:] == ("16.00", "12.00", "40.00", "30.00")


def test_studies_without_rows_have_no_table() -> None:
    assert study_tables([]) == []
