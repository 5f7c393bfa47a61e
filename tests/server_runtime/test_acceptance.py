"""Features that do not make sense are refused before anything of them is stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contract.errors import RemoteProtocolError
from contract.messages import Features
from server_runtime.acceptance import Expected, check_features, is_stale
from tests.server_runtime import tiny

EXPECTED = Expected(tiny.LAYOUT, "permuted-label")
GOOD = tiny.batches(tiny.upload("pi", 4), "run.features", 4)[0]
INFER = tiny.batches(tiny.upload("pi", 4), "infer-1", 4, "infer")[0]


def test_good_features_pass() -> None:
    check_features(GOOD, EXPECTED, 3, "adapt")
    check_features(INFER, EXPECTED, 3, "infer")
    check_features(replace(GOOD, labels=None), replace(EXPECTED, label_mode="logit-gradient"), 3, "adapt")
    check_features(replace(GOOD, sources=None), EXPECTED, 3, "adapt")


@pytest.mark.parametrize(
    ("features", "mode", "purpose", "field"),
    [
        (GOOD, "permuted-label", "infer", "split"),
        (INFER, "permuted-label", "adapt", "split"),
        (replace(GOOD, codes=GOOD.codes[:, :-1]), "permuted-label", "adapt", "codes"),
        (replace(GOOD, codes=GOOD.codes[:, :, :-1]), "permuted-label", "adapt", "codes"),
        (replace(GOOD, total=1 << 21), "permuted-label", "adapt", "total"),
        (replace(GOOD, sources=GOOD.sources + np.uint16(4)), "permuted-label", "adapt", "sources"),
        (replace(GOOD, sources=GOOD.sources[:, :-1]), "permuted-label", "adapt", "sources"),
        (replace(GOOD, labels=GOOD.labels + np.uint16(9)), "permuted-label", "adapt", "labels"),
        (replace(GOOD, labels=None), "permuted-label", "adapt", "labels"),
        (GOOD, "logit-gradient", "adapt", "labels"),
        (GOOD, "client-head", "adapt", "labels"),
    ],
)
def test_attack_the_field_that_does_not_fit_is_named(features: Features, mode: str, purpose: str, field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"features\.{field}"):
        check_features(features, replace(EXPECTED, label_mode=mode), 3, purpose)


@pytest.mark.parametrize(
    ("features", "stale"), [(GOOD, False), (replace(GOOD, ask="older.features"), True), (INFER, False)]
)
def test_answers_to_an_earlier_run_are_stale(features: Features, stale: bool) -> None:
    assert is_stale(features, "run") is stale
