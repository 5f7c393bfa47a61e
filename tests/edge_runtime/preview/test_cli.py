"""The command: from package and images to pictures, with nothing sent, nothing installed and nothing released."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import PackageError, UsageError
from edge_runtime.cli import edge_run, parser
from edge_runtime.config import DeviceConfig, PreviewConfig
from edge_runtime.preview.cli import Preview, picture_paths, preview, workplace
from edge_runtime.preview.decoder import open_decoder
from tests.edge_runtime.fake_package import IMAGE, Package, write_device, write_package
from tests.edge_runtime.line import Line
from tests.edge_runtime.preview.decoders import write_pictures, write_previewed
from tests.edge_runtime.test_conduct import collecting

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_previewed(tmp_path_factory.mktemp("previewed") / "front")


@pytest.fixture
def config(tmp_path: Path, package: Package) -> DeviceConfig:
    write_pictures(tmp_path / "images" / "a")
    secret = tmp_path / "state" / "identity" / "device_secret"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(bytes(range(32)))  # always the same draw
    return write_device(tmp_path, package, tmp_path / "images")


def settings(config: DeviceConfig, **changes: object) -> PreviewConfig:
    found = PreviewConfig(
        config.engine, config.trust, config.state, config.noise, config.alpha, config.kappa_floor, config.threads
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def pictures(config: DeviceConfig) -> list[Path]:
    return sorted((config.data / "a").iterdir())


def shown(config: DeviceConfig, output: Path, **changes: object) -> Preview:
    return preview(settings(config, **changes), pictures(config), output, lambda text: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_preview_is_what_a_server_computes_from_the_upload(
    tmp_path: Path, package: Package, config: DeviceConfig
) -> None:
    before = shown(config, tmp_path / "out")
    line = collecting(Line(tmp_path, config, package))
    line.run()
    line.close()
    (batch,) = line.server.stored.values()
    names = {sample.sample_id: str(sample.path) for sample in line.equipment.dataset.samples}
    decode = open_decoder(package.folder / "decoder.kappa-1.onnx", IMAGE, 1)
    for sample_id, codes in zip(batch.sample_ids, batch.codes, strict=True):
        pair = next(each for each in before.pairs if each.name == names[sample_id.tobytes()])
        assert np.array_equal(pair.theirs, np.rint(255 * decode(codes)).astype(np.uint8))
    assert np.mean([each.ssim - each.flat_ssim for each in before.pairs]) > 0.1
    assert np.mean([each.psnr_db - each.flat_psnr_db for each in before.pairs]) > 0.5
    after = shown(config, tmp_path / "again")
    assert contents(tmp_path / "out").keys() == contents(tmp_path / "again").keys()
    for one, two in zip(before.pictures, after.pictures, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_more_noise_and_another_device_show_other_pictures(tmp_path: Path, config: DeviceConfig) -> None:
    usual = shown(config, tmp_path / "usual")
    strong = shown(config, tmp_path / "strong", kappa_floor=2.0)
    other = shown(config, tmp_path / "other", state=tmp_path / "other-state")
    assert strong.settings.kappa == 2.0
    assert np.mean([each.psnr_db for each in strong.pairs]) < np.mean([each.psnr_db for each in usual.pairs])
    assert not np.array_equal(other.pairs[0].theirs, usual.pairs[0].theirs)


def test_a_preview_leaves_no_trace_in_the_state_and_waits_for_nobody(
    tmp_path: Path, package: Package, config: DeviceConfig
) -> None:
    line = collecting(Line(tmp_path, config, package))
    line.run()
    before = contents(config.state)
    assert len((config.state / "release_ledger").read_bytes().splitlines()) == 3
    shown(config, tmp_path / "out", kappa_floor=2.0)  # the run beside it still holds the state's lock
    assert contents(config.state) == before
    line.close()


def test_a_device_that_never_ran_gets_its_secret_by_the_first_preview(tmp_path: Path, config: DeviceConfig) -> None:
    first = shown(config, tmp_path / "out", state=tmp_path / "new")
    assert len((tmp_path / "new" / "identity" / "device_secret").read_bytes()) == 32
    again = shown(config, tmp_path / "out", state=tmp_path / "new")
    assert np.array_equal(first.pairs[0].theirs, again.pairs[0].theirs)


def test_a_newer_package_that_was_only_looked_at_is_not_installed(tmp_path: Path, config: DeviceConfig) -> None:
    newer = write_previewed(tmp_path / "newer", version=7)
    shown(config, tmp_path / "out", engine=str(newer.folder / "front.fake"))
    line = Line(tmp_path, config, newer)  # the older one installs as if nothing had been
    assert line.equipment.installed.manifest.version == 1
    line.close()


def test_a_damaged_decoder_and_a_package_without_one_are_refused(tmp_path: Path, config: DeviceConfig) -> None:
    plain = write_package(tmp_path / "plain")
    with pytest.raises(PackageError, match="has no decoder"):
        shown(config, tmp_path / "out", engine=str(plain.folder / "front.fake"))
    broken = write_previewed(tmp_path / "broken")
    path = broken.folder / "decoder.kappa-1.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(PackageError, match=r"decoder.kappa-1.onnx should have SHA-256"):
        shown(config, tmp_path / "out", engine=str(broken.folder / "front.fake"))
    assert not (tmp_path / "out").exists() and not list(config.state.glob(".preview-*"))


def test_what_a_killed_preview_left_is_removed_and_one_at_work_is_let_be(tmp_path: Path) -> None:
    left = tmp_path / ".preview-killed" / "packages"
    left.mkdir(parents=True)
    with workplace(tmp_path) as folder:
        assert not left.exists()
        with workplace(tmp_path) as other:
            assert folder.exists() and other != folder
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_one_name_go_into_files_of_their_own(tmp_path: Path) -> None:
    images = [Path("a/cat.png"), Path("b/cat.jpg"), Path("cat-2.png"), Path("c/cat.png")]
    names = [path.name for path in picture_paths(images, tmp_path)]
    assert names == ["cat.preview.png", "cat-2.preview.png", "cat-2-2.preview.png", "cat-3.preview.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        picture_paths(images, tmp_path / "file")


def test_the_command_needs_engine_trust_and_state_alone_and_opens_no_socket(
    tmp_path: Path, config: DeviceConfig
) -> None:
    code = (
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event.startswith('socket.'):\n"
        "        raise RuntimeError('a preview opened a socket: ' + event)\n"
        "sys.addaudithook(refuse)\n"
        "from edge_runtime.cli import main\n"
        "raise SystemExit(main())\n"
    )
    words = ["--engine", config.engine, "--trust", config.trust, "--state", config.state, "--format", "json",
             "-o", tmp_path / "out", "--preview", *pictures(config)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["kind"], document["kappa"], document["patches_sent"]) == ("edge-run-preview", 1.0, 4)
    assert [pair["file"] for pair in document["pairs"]] == [str(path) for path in pictures(config)]
    for pair in document["pairs"]:
        with Image.open(pair["picture"]) as sheet:
            assert sheet.width > 2 * sheet.height * 0.9
        assert os.stat(pair["picture"]).st_mode & 0o077 == 0
    assert Path(document["page"]).read_text().count("<img") == 3


def test_a_stop_is_clean_and_leaves_nothing(tmp_path: Path, config: DeviceConfig) -> None:
    code = (
        "import os, signal, edge_runtime.preview.cli as previews\n"
        "previews.make_pairs = lambda *given: iter([os.kill(os.getpid(), signal.SIGTERM)])\n"
        "from edge_runtime.cli import main\n"
        "raise SystemExit(main())\n"
    )
    words = ["--engine", config.engine, "--trust", config.trust, "--state", config.state, "-o", tmp_path / "out",
             "--preview", pictures(config)[0]]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "") and "stopped before the work was done" in done.stderr
    assert not (tmp_path / "out").exists() and not list(config.state.glob(".preview-*"))


def test_flags_that_do_not_go_together_are_explained(tmp_path: Path, config: DeviceConfig) -> None:
    words = [
        "--engine",
        config.engine,
        "--trust",
        str(config.trust),
        "--state",
        str(config.state),
        "--preview",
        "a.png",
    ]
    with pytest.raises(UsageError, match="not allowed with"):
        parser().parse_args([*words, "--infer"])
    for more, said in (
        (["--data", "x"], "--data has no part in --preview"),
        (["--once"], "--once has no part in --preview"),
        (["-o", ""], "should be a path, found ''"),
        (["--kappa-floor", "9"], "the package does not fit this device's settings"),
    ):
        with pytest.raises(UsageError, match=said):
            edge_run(parser().parse_args([*words[:-1], str(pictures(config)[0]), *more]), {}, tmp_path)
    with pytest.raises(UsageError, match="--server has no part in --releases"):
        edge_run(parser().parse_args(["--releases", "--state", "s", "--server", "wss://x"]), {}, tmp_path)
    with pytest.raises(UsageError, match="table or as json"):
        edge_run(parser().parse_args([*words, "--format", "csv"]), {}, tmp_path)
    with pytest.raises(UsageError, match="state is not set"):
        edge_run(parser().parse_args(["--engine", "front", "--trust", "t", "--preview", "a.png"]), {}, tmp_path)
