"""A package with a decoder, from the command that trains it to the preview on a device: one real export, shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import exporter.preview
from contract.errors import ExportError, UsageError
from contract.manifest import Manifest, from_bytes
from contract.signature import generate, key_id, save_public, verify
from edge_runtime.config import PreviewConfig
from edge_runtime.preview.cli import preview
from exporter.cli import main
from exporter.preview import plain_graph
from tests.edge_runtime.onnx_bytes import linear_decoder
from tests.exporter import tiny
from tests.make_package import draw_folder

KAPPA = 0.5
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("previewed"), np.random.default_rng(0)
    for label in range(4):
        draw_folder(root / "public" / f"class{label}", label, 12, rng)
    draw_folder(root / "private", 2, 3, rng)
    key = generate()
    save_public(root / "publisher.pub", key.public_key())
    tiny.run(
        root / "front", key, model_args=tuple({**tiny.ARGS, "depth": 2}.items()), split=1,
        calibration=str(root / "public"), kappa=KAPPA, kappa_max=KAPPA, preview=True, preview_steps=25,
        masked=True,  # an attacker runs every patch, as devices that adapt do
    )  # fmt: skip
    manifest = (root / "front" / "manifest.json").read_bytes()
    verify(manifest, (root / "front" / "manifest.sig").read_bytes(), {key_id(key.public_key()): key.public_key()})
    return root


def manifest_of(folders: Path) -> Manifest:
    return from_bytes((folders / "front" / "manifest.json").read_bytes())


def test_the_decoder_reads_more_than_a_ridge_which_reads_more_than_one_colour(folders: Path) -> None:
    manifest = manifest_of(folders)
    (decoder,) = manifest.preview
    assert (decoder.onnx, decoder.cut, decoder.kappa, decoder.alpha) == ("decoder.onnx", 1, KAPPA, 0.1)
    assert (decoder.steps, decoder.images) == (25, 9)
    assert decoder.psnr_db >= decoder.ridge_psnr_db > decoder.colour_psnr_db + 3.0
    assert decoder.ssim > decoder.colour_ssim + 0.2
    assert "decoder.onnx" in [record.name for record in manifest.files]
    figures = json.loads((folders / "front.backend" / "export.json").read_text())["figures"]
    assert figures["preview"][0]["psnr_db"] == decoder.psnr_db
    assert (folders / "front.backend" / "manifest.json").read_bytes() == (folders / "front/manifest.json").read_bytes()


def test_the_graph_says_nothing_of_the_machine_that_made_it(folders: Path) -> None:
    data = (folders / "front" / "decoder.onnx").read_bytes()
    assert b"/server_runtime/" not in data and b".py" not in data and sys.prefix.encode() not in data
    assert len(data) < 4 << 20


def previewed(folders: Path, tmp_path: Path) -> PreviewConfig:
    """A device's settings, and always the same secret."""
    state = tmp_path / "state" / "identity"
    state.mkdir(parents=True)
    (state / "device_secret").write_bytes(bytes(range(32)))
    front, publisher = str(folders / "front"), folders / "publisher.pub"
    return PreviewConfig(front, publisher, tmp_path / "state", "keyed", None, None, 1)


def test_a_device_previews_its_own_pictures_with_it(folders: Path, tmp_path: Path) -> None:
    config = previewed(folders, tmp_path)
    shown = preview(config, sorted((folders / "private").iterdir()), tmp_path / "out", lambda text: None)
    assert shown.settings.kappa == KAPPA and len(shown.pairs) == 3
    assert np.mean([pair.psnr_db - pair.flat_psnr_db for pair in shown.pairs]) > 3.0
    assert np.mean([pair.ssim - pair.flat_ssim for pair in shown.pairs]) > 0.2
    assert len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.skipif("CUTLAYER_TEST_DEVICE_PYTHONS" not in os.environ, reason="tools/test names the device's Pythons")
def test_every_python_of_a_device_draws_the_same(folders: Path, tmp_path: Path) -> None:
    config, picture = previewed(folders, tmp_path), folders / "private" / "0.png"
    here = preview(config, [picture], tmp_path / "here", lambda text: None).pairs[0]
    words = ["--engine", config.engine, "--trust", config.trust, "--state", config.state, "--preview", picture]
    for number, python in enumerate(os.environ["CUTLAYER_TEST_DEVICE_PYTHONS"].split()):
        code = "from edge_runtime.cli import main; raise SystemExit(main())"
        done = subprocess.run(
            [python, "-c", code, *map(str, words), "-o", str(tmp_path / str(number)), "--format", "json"],
            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (pair,) = json.loads(done.stdout)["pairs"]
        assert pair["ssim"] == pytest.approx(here.ssim, abs=0.01) and pair["words"] == here.words


def test_a_graph_of_another_size_is_refused(folders: Path) -> None:
    manifest = manifest_of(folders)
    layout = manifest.cuts[0].tokens
    weight = np.zeros((layout.count * layout.dim, 3 * 8 * 8))
    with pytest.raises(ExportError, match=r"should draw \(1, 3, 32, 32\)"):
        plain_graph(linear_decoder((layout.count, layout.dim), weight, np.zeros(3 * 8 * 8), (8, 8)), manifest, 1)


def test_a_training_that_fails_or_leaves_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny.plan(tmp_path / "front", calibration=str(tmp_path), preview=True)
    for module, said in (("no_such_module", "ended with exit code 1"), ("this", "left no decoders.json")):
        monkeypatch.setattr(exporter.preview, "_TRAINER", module)
        with pytest.raises(ExportError, match=said):
            exporter.preview._train(plan, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tune", "none"), "public images"),
        (("--calibration", "x", "--preview-steps", "0"), "preview-steps must be 1 or more"),
        (("--calibration", "x", "--preview-minutes", "0"), "preview-minutes must be more than 0"),
        (("--calibration", "x", "--for", "sequential_split"), "parts for sequential_split send without noise"),
    ],
)
def test_plans_without_a_preview_to_make_are_explained(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", tiny.MODEL, "--preview", *words, "-o", str(tmp_path / "front")]) == UsageError.exit_code
    assert said in capsys.readouterr().err
