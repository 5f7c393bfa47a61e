"""The command from flags to folders. Each export takes seconds, so tests share the fixture's where they can."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tomllib
from PIL import Image
from safetensors.numpy import load_file

import exporter.frontend_file
from contract.errors import GateError, UsageError
from contract.images import normalise
from contract.manifest import from_bytes
from contract.signature import key_id, verify
from exporter.build import Surroundings
from exporter.cli import FIELDS, main
from exporter.package import backend_path
from exporter.runtime import open_session, run_tokens
from exporter.split import build_backend
from tests.exporter import tiny
from tests.exporter.conftest import Exported

PACKAGE = ["front.onnx", "golden.safetensors", "manifest.json", "manifest.sig"]
BACKEND = [
    "backend.safetensors", "backend_original.safetensors", "export.json", "few_shot.json", "frontend.safetensors",
    "manifest.json", "public.toml", "server_head.safetensors", "statistics.safetensors",
]  # fmt: skip


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_package_is_whole_signed_and_consistent(exported: Exported) -> None:
    assert _names(exported.folder) == PACKAGE and _names(exported.backend) == BACKEND
    public = exported.key.public_key()
    data, signature = ((exported.folder / name).read_bytes() for name in ("manifest.json", "manifest.sig"))
    assert verify(data, signature, {key_id(public): public}) == exported.manifest.signer
    cut = exported.manifest.cuts[0]
    assert (cut.index, cut.depth, cut.onnx, cut.input_shape) == (2, 3, "front.onnx", tiny.SHAPE)
    assert len(cut.weights) == 9 and exported.manifest.quantization.int8_share == 1.0
    assert exported.manifest.quantization.snr_db > 20 and not exported.manifest.quantization.forced
    assert min(cut.statistics.sigma_patch) > 0 and min(cut.statistics.absmax_prefix) > 0
    assert "synthetic" in exported.manifest.quantization.recipe[-1]
    assert (exported.backend / "manifest.json").read_bytes() == data


def test_ex_03_a_moved_package_runs_and_matches_its_golden_vectors(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(exported.folder, tmp_path / "another name")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    golden = load_file(moved / "golden.safetensors")
    rule = from_bytes((moved / "manifest.json").read_bytes()).image
    tokens = run_tokens(open_session(str(moved / "front.onnx"), 1), normalise(golden["pixels"], rule))
    assert golden["pixels"].shape == (4, 32, 32, 3) and golden["pixels"].dtype == np.uint8
    assert np.abs(tokens - golden["tokens"]).mean() < 0.01 * np.abs(golden["tokens"]).mean()


def test_the_server_can_rebuild_its_half(exported: Exported) -> None:
    import torch
    from safetensors.torch import load_file as load_tensors

    plan = json.loads((exported.backend / "export.json").read_text())["plan"]
    backend = build_backend(plan["model"], plan["model_args"], plan["split"])
    backend.load_state_dict(load_tensors(exported.backend / "backend.safetensors"))
    head = load_tensors(exported.backend / "server_head.safetensors")
    with torch.no_grad():
        features = backend(torch.from_numpy(load_file(exported.folder / "golden.safetensors")["tokens"]))
    assert (features @ head["weight"].T + head["bias"]).shape == (4, 4)
    statistics = load_file(exported.backend / "statistics.safetensors")
    assert statistics["covariance_patch"].shape == (48, 48) and statistics["mean_prefix"].shape == (48,)
    assert json.loads((exported.backend / "few_shot.json").read_text())["backend_lr"] == 1e-5


def test_ex_04_a_graph_that_is_off_in_one_channel_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = exporter.frontend_file.export_float

    def off_by_a_tenth(*arguments: object) -> object:
        model = plain(*arguments)
        bias = next(each for each in model.graph.initializer if each.name == "blocks.0.mlp.fc2.bias")
        values = np.frombuffer(bias.raw_data, "<f4").copy()
        values[11] += 0.1
        bias.raw_data = values.tobytes()
        return model

    monkeypatch.setattr(exporter.frontend_file, "export_float", off_by_a_tenth)
    args = tuple({**tiny.ARGS, "depth": 2}.items())
    with pytest.raises(GateError, match="tokens at batch 1") as caught:
        tiny.run(tmp_path / "front", model_args=args, split=1)
    assert "largest error 1.00e-01" in caught.value.cause
    assert list(tmp_path.iterdir()) == []
    assert "largest error 1.00e-01" in capsys.readouterr().err  # figures are printed whatever comes of them


def test_qu_03_black_images_only_give_a_warning_and_sound_scales(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an unlabelled folder, and in place of an earlier package: the version counts up."""
    folder = tmp_path / "black"
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (32, 32)).save(folder / f"{number}.png")
    output = shutil.copytree(exported.folder, tmp_path / "front")
    shutil.copytree(exported.backend, backend_path(output))
    args = tuple({**tiny.ARGS, "depth": 2}.items())
    report = tiny.run(output, model_args=args, split=1, calibration=str(folder), force=True)
    assert "one colour only" in capsys.readouterr().err
    assert report.version == 2 and from_bytes((output / "manifest.json").read_bytes()).version == 2
    assert _names(output) == PACKAGE and _names(tmp_path) == ["black", "front", "front.backend"]
    import onnx
    from onnx import numpy_helper

    model = onnx.load(output / "front.onnx")
    scales = [numpy_helper.to_array(each) for each in model.graph.initializer if each.name.endswith("_scale")]
    scales += [numpy_helper.to_array(each) for each in model.graph.initializer if each.name.endswith("_scales")]
    assert len(scales) == 4 + 5
    assert all(np.isfinite(each).all() and (each > 0).all() for each in scales)


def test_tuning_on_labelled_pictures_ends_in_figures_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.write_pictures(tmp_path / "public", 24)
    report = tiny.run(tmp_path / "front", calibration=str(folder), tune="noise-aware", kappa=0.5)
    figures = report.figures
    assert figures["server_head"] == "fitted to the public set"  # a random model's own head knows nothing
    assert figures["evaluation_images"] == 19 and figures["tuning_images"] == 77
    assert figures["top1"]["float32"] > 0.5 and figures["top1"]["tuned_noisy"] is not None
    few_shot = json.loads((backend_path(tmp_path / "front") / "few_shot.json").read_text())
    assert len(few_shot["table"]) == 7 and few_shot["backend_lr"] == figures["backend_lr"]
    table = tomllib.loads((backend_path(tmp_path / "front") / "public.toml").read_text())
    assert table["classes"] == ["class0", "class1", "class2", "class3"]
    assert len(table["tuned_on"]) == 77 and not set(table["tuned_on"]) & set(table["held_out"])
    tuned, original = (
        load_file(backend_path(tmp_path / "front") / name)
        for name in ("backend.safetensors", "backend_original.safetensors")
    )
    assert any(not np.array_equal(tuned[name], original[name]) for name in original)
    said = capsys.readouterr().err
    assert all(word in said for word in ("Calibrating", "Tokens, tuning frontend 3", "Playing few-shot sites", "SNR"))
    assert _names(tmp_path) == ["front", "front.backend", "public"]


def test_mistakes_in_the_plan_are_found_before_the_work(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (8, 8)).save(flat / "a.png")
    for changes, said in (
        ({"tune": "noise-aware"}, "labelled public images"),
        ({"tune": "noise-aware", "calibration": str(flat)}, "no two class folders"),
        ({"split": 3}, r"1\.\.2"),
    ):
        with pytest.raises(UsageError, match=said):
            tiny.run(tmp_path / "front", **changes)
    assert _names(tmp_path) == ["flat"]


def test_trained_weights_need_real_images(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tiny.tiny_model().state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="no folder of public images"):
        tiny.run(tmp_path / "front", weights=str(tmp_path / "w.safetensors"))


def test_an_early_cut_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    from exporter.build import _cut
    from exporter.models import Facts

    facts = Facts(12, None, tiny.SHAPE, tuple(map(str, range(12))))
    assert _cut(6, facts) == 6 and "usual for this model: 8" in capsys.readouterr().err
    assert _cut(None, facts) == 8 and not capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"tune": "wild"}, {"opset": 16}, {"alpha": -1.0}, {"kappa": 2.0}, {"version": 0}, {"limit_tuning": 0},
     {"pretrained": True, "weights": "w"}],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        tiny.plan(Path("front"), **changes)


# The command line


def test_flags_environment_and_file_are_merged_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTLAYER_EXPORT_SPLIT", "2")
    Path("cutlayer.toml").write_text(
        '[export]\nmodel = "vit_base_patch16_224"\nsplit = 5\nmodel_args = {img_size = 64}\n'
    )
    assert main(["--model", "vit_tiny_patch16_224", "-o", "front", "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert 'model = "vit_tiny_patch16_224"  # --model' in shown
    assert "split = 2  # CUTLAYER_EXPORT_SPLIT" in shown
    assert "img_size = 64" in shown and "[export] model_args in" in shown
    assert "kappa = 0.25  # default" in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "vit_tiny_patch16_224"], 2, "output is not set"),
        (["-o", "front"], 2, "model is not set"),
        (["--model", "m", "-o", "front", "--tune", "nois-aware"], 2, "noise-aware"),
        (["--model", "m", "-o", "front", "--model-arg", "img_size"], 2, "KEY=VALUE"),
        (["--model", "m", "-o", "front", "--model-arg", "patch_size={1,2}"], 2, "numbers, texts, lists"),
        (["--model", "vit_tinny_patch16_224", "-o", "front", "--tune", "none"], 2, "vit_tiny_patch16_224"),
        (["--model", "convnext_atto", "-o", "front", "--tune", "none"], 3, "no family that can be split"),
        (["--model", "vit_tiny_patch16_224", "-o", "front", "--signing-key", "absent.pem"], 2, "absent.pem"),
        (["--model", "vit_tiny_patch16_224", "-o", "front", "--calibration", "absent"], 2, "no folder absent"),
    ],
)
def test_mistakes_are_one_line_of_cause_and_one_of_cure(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    error = capsys.readouterr().err
    assert said in error and "cure: " in error and "Traceback" not in error
    assert not [name for name in _names(tmp_path) if not name.startswith("signing-key")]


def test_model_arguments_are_literals_or_texts() -> None:
    from exporter.options import read_model_args

    given = ["img_size=32", "global_pool=avg", "class_token=False", "init_values=1e-5", "img_size=(32,64)", "x=a=b"]
    assert read_model_args(given) == {
        "img_size": (32, 64), "global_pool": "avg", "class_token": False, "init_values": 1e-5, "x": "a=b",
    }  # fmt: skip


def test_every_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    flags = [f"--{field.name.replace('_', '-')}" for field in FIELDS if field.name != "model_args"]
    assert all(flag in shown for flag in (*flags, "--model-arg", "--force", "--format", "--config", "--show-config"))


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from exporter import cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_json_is_one_document_and_a_missing_key_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exported: Exported
) -> None:
    """The work itself is replaced by the fixture's report: what is tested is what the command adds."""
    import exporter.build

    seen = []

    def instant(plan: object, surroundings: Surroundings, *settings: object) -> object:
        assert not list(tmp_path.rglob("*.pem")) or seen  # a key is made once a model has passed, not before
        seen.append(surroundings.signer())
        return copy.deepcopy(exported.report)

    monkeypatch.setattr(exporter.build, "export", instant)
    monkeypatch.chdir(tmp_path)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        for _ in range(2):
            assert main(["--model", "m", "-o", "out/front", "--format", "json"]) == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    text, _, rest = capsys.readouterr().out.partition("\n}\n")
    document = json.loads(text + "\n}")
    assert document["kind"] == "export" and document["version"] == 1 and rest
    assert document["figures"]["linear_layers"] == 8
    assert _names(tmp_path / "out") == ["signing-key.pem", "signing-key.pub.pem"]
    assert (tmp_path / "out" / "signing-key.pem").stat().st_mode & 0o777 == 0o600
    ids = [key_id(each.public_key()) for each in seen]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_a_terminated_export_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "exporter.cli", "--model", "vit_small_patch16_224", "--int8", "--tune", "none"]
    process = subprocess.Popen(
        [*words, "-o", str(tmp_path / "front")], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline_s = time.monotonic() + 120
    while not any(name.startswith(".front.") for name in os.listdir(tmp_path)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert [name for name in _names(tmp_path) if not name.startswith("signing-key")] == []
