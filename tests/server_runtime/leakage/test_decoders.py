"""Decoders for the owner's preview: the gate on their graphs, and time that runs out. A real one: tests/exporter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.errors import ExportError
from contract.tokens import Kept, SentRule
from server_runtime.attacks import Effort, Seen, Upload
from server_runtime.attacks._release import Law, Release
from server_runtime.attacks.inverse_net import InverseNet
from server_runtime.attacks.inverse_net import Size as NetSize
from server_runtime.leakage.decoders import check_graph, to_onnx
from server_runtime.leakage.decoders_cli import main
from tests.edge_runtime.onnx_bytes import linear_decoder
from tests.server_runtime.attacks.small_world import LAYOUT, SIZE, world


def test_a_graph_that_draws_something_else_is_refused() -> None:
    rng = np.random.default_rng(0)
    weight, offset = 0.001 * rng.normal(size=(3 * 2, 3 * 4 * 4)), np.full(3 * 4 * 4, 0.5)
    codes = rng.integers(-127, 128, (2, 3, 2), np.int8)
    graph = linear_decoder((3, 2), weight, offset, (4, 4))
    expected = (codes.reshape(2, -1) @ weight + offset).clip(0, 1).reshape(2, 3, 4, 4).transpose(0, 2, 3, 1)
    check_graph(graph, codes, expected)
    with pytest.raises(ExportError, match="largest difference is 0.1"):
        check_graph(graph, codes, expected + 0.1)
    with pytest.raises(ExportError, match="refuses the decoder"):
        check_graph(graph[:-9], codes, expected)


def test_a_decoder_whose_time_is_over_is_the_best_so_far_and_no_weaker_than_the_ridge() -> None:
    small, asked = world(), []

    def over() -> bool:
        asked.append(1)
        return len(asked) == 12

    attack = InverseNet(Effort(500, time_is_over=over), NetSize(width=16, blocks=1, heads=2, batch=16))
    attack.fit(small.known)
    assert attack.steps == 12
    assert attack.checks_db[0] == pytest.approx(attack.ridge.held_psnr_db, abs=1.0)
    kept_db = max(attack.checks_db)
    assert kept_db >= attack.checks_db[0] and len(attack.checks_db) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["checkerboard", "none"])
def test_the_graph_draws_what_the_attack_draws_of_fewer_patches(kept: Kept) -> None:
    small = world()
    law = Law(LAYOUT, SIZE, small.known.release.law.statistics, SentRule(kept, 0.5))
    known = replace(small.known, release=Release(law, 1.0, small.known.learn.tokens[0]))
    attack = InverseNet(Effort(10), NetSize(width=16, blocks=1, heads=2, batch=16))
    attack.fit(known)
    received = known.release.send(small.tokens(), torch.Generator().manual_seed(0))[:4]
    codes = torch.round(received / known.release.steps).to(torch.int8)
    pictures = attack.reconstruct(Seen((Upload(received, 1.0),)))
    check_graph(to_onnx(attack.as_module(), codes[:1], 20), codes.numpy(), pictures.permute(0, 2, 3, 1).numpy())


@pytest.mark.slow
@pytest.mark.skipif("CUTLAYER_TEST_PACKAGE" not in os.environ, reason="packages are made by tests.make_package")
def test_one_seed_makes_one_decoder_bit_for_bit_and_another_another(tmp_path: Path) -> None:
    made, given = [], Path(os.environ["CUTLAYER_TEST_PACKAGE"])
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = ["--package", given / "front", "--public", given / "public", "--kappa", "0.25", "--steps", "20",
                 "--minutes", "5", "--learn", "2000", "--opset", "20", "--seed", seed, "-o", folder]  # fmt: skip
        assert main([str(word) for word in words]) == 0
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1] and made[0]["decoder.onnx"] != made[2]["decoder.onnx"]
    assert sorted(made[0]) == ["decoder.onnx", "decoders.json"]
