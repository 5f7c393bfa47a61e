"""Packages of parts that devices train, from plan to device. Two exports are shared: each takes seconds."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from torch import nn

import exporter.training_package
from contract import training
from contract.errors import CutlayerError, ExportError, GateError, ManifestError, PackageError, UsageError
from contract.manifest import Manifest, from_bytes, to_bytes
from contract.signature import PrivateKey, generate, key_id, sign
from contract.training import AugmentRule, OptimiserRule, TrainingPlan
from edge_runtime.install import Installed, install
from exporter.build import Report
from exporter.cli import main
from exporter.package import backend_path
from exporter.plan import ExportPlan, TrainingChoices, optimiser_rule
from exporter.split import split_model
from exporter.training_package import export_training, head_name, set_modes
from tests.exporter import tiny

ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
CHOICES = TrainingChoices(
    strategy="sequential_split", cuts=(1, 2), release_whole_model=False, classes=None,
    optimiser=optimiser_rule("sgd", None, None), augment=AugmentRule(), gradient="float32", activations="float32",
    freeze=(), recompute=False,
)  # fmt: skip
WHOLE = replace(CHOICES, strategy="fed_avg", cuts=(), release_whole_model=True, classes=3)


def _plan(output: Path, choices: TrainingChoices, **changes: object) -> ExportPlan:
    plain = {"model_args": tuple(ARGS.items()), "int8": False, "split": None, "training": choices}
    return tiny.plan(output, **{**plain, **changes})


@dataclass(frozen=True)
class Exported:
    """A published package: read it, do not change it."""

    folder: Path
    key: PrivateKey
    report: Report

    @property
    def backend(self) -> Path:
        return backend_path(self.folder)

    @property
    def manifest(self) -> Manifest:
        return from_bytes((self.folder / "manifest.json").read_bytes())

    @property
    def plan(self) -> TrainingPlan:
        return training.from_bytes((self.folder / "training.json").read_bytes(), self.manifest)


def _export(folder: Path, choices: TrainingChoices, **changes: object) -> Exported:
    key = generate()
    return Exported(folder, key, export_training(_plan(folder, choices, **changes), tiny.surroundings(key)))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    choices = replace(
        CHOICES, optimiser=optimiser_rule("adamw", None, None), augment=AugmentRule(4, True, 0.2), gradient="int8",
        activations="float16", freeze=("patch_embed", "pos_embed"),
    )  # fmt: skip
    return _export(tmp_path_factory.mktemp("parts") / "front", choices)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _export(tmp_path_factory.mktemp("whole") / "front", replace(WHOLE, recompute=True))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _put(folder: Path, packages: Path, key: PrivateKey) -> Installed:
    """As a device installs it; there is no frontend that could be opened."""
    packages.mkdir(exist_ok=True)
    public = key.public_key()
    return install(folder, packages, {key_id(public): public}, lambda path: pytest.fail(str(path)), lambda text: None)


def _evaluate(folder: Path, graph: str, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession((folder / graph).read_bytes(), providers=["CPUExecutionProvider"])
    feeds = {**load_file(folder / "parameters.safetensors"), "x": images}
    return session.run(["z"], {each.name: feeds[each.name] for each in session.get_inputs()})[0]


def _shipped(exported: Exported) -> nn.Module:
    """The model as a server builds it from the backend folder."""
    plan = json.loads((exported.backend / "export.json").read_text())["plan"]
    model = timm.create_model(plan["model"], **{**plan["model_args"], "num_classes": 0})
    model.load_state_dict(load_tensors(exported.backend / "model.safetensors"))
    return model.eval()


def test_a_package_of_parts_is_whole_and_installs_on_a_device(parts: Exported, tmp_path: Path) -> None:
    graphs = [f"cut{k}.{each}.onnx" for k in (1, 2) for each in ("backward", "evaluate", "forward")]
    listed = [*graphs, "parameters.safetensors", "training.json"]
    assert _names(parts.folder) == sorted([*listed, "manifest.json", "manifest.sig"])
    assert _names(parts.backend) == ["export.json", "manifest.json", "model.safetensors", "training.json"]
    manifest = parts.manifest
    assert [file.name for file in manifest.files] == sorted(listed) and manifest.cuts == ()
    assert manifest.label_modes == ("raw-label", "permuted-label", "logit-gradient", "client-head")
    assert (manifest.name, manifest.family) == ("vit_tiny_patch16_224-sequential_split-1-2", "vit")
    assert (manifest.engine.opset, manifest.quantization.scheme, manifest.transforms.weight_noise) == (
        20,
        "float32",
        False,
    )
    installed = _put(parts.folder, tmp_path / "packages", parts.key)
    assert installed.training == parts.plan and installed.digest.hex() == parts.report.package_digest
    for name in ("manifest.json", "training.json"):
        assert (parts.backend / name).read_bytes() == (parts.folder / name).read_bytes()


def test_training_json_says_what_was_chosen(parts: Exported) -> None:
    plan = parts.plan
    assert (plan.strategy, plan.whole_model, plan.class_count) == ("sequential_split", False, None)
    assert plan.optimiser == OptimiserRule("adamw", 0.0, 0.01) and plan.augment == AugmentRule(4, True, 0.2)
    assert (plan.gradient, plan.activations) == ("int8", "float16")
    assert [(cut.index, cut.depth, cut.layer, cut.output_shape, cut.loss) for cut in plan.cuts] == [
        (1, 3, "blocks.0", (17, 24), "none"), (2, 3, "blocks.1", (17, 24), "none"),
    ]  # fmt: skip
    for cut in plan.cuts:
        assert set(cut.frozen) == {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
        assert "cls_token" in cut.trainable and cut.saved > 0
    assert not any(name.startswith("blocks.1") for name in plan.cuts[0].tensors)


def test_the_parameters_are_those_of_the_cuts_and_the_server_has_the_rest(parts: Exported) -> None:
    given, kept = load_file(parts.folder / "parameters.safetensors"), load_file(parts.backend / "model.safetensors")
    assert set(given) == {name for cut in parts.plan.cuts for name in cut.tensors}
    assert not any(name.startswith(("head", "blocks.2", "norm")) for name in given)
    assert not any(name.startswith("head") for name in kept) and any(name.startswith("blocks.2") for name in kept)
    assert all(value.dtype == np.float32 and np.array_equal(value, kept[name]) for name, value in given.items())
    images = tiny.images(3)
    for cut in parts.plan.cuts:
        frontend, _ = split_model(_shipped(parts), cut.index)
        with torch.no_grad():
            expected = frontend(images).numpy()
        assert np.abs(_evaluate(parts.folder, cut.evaluate, images.numpy()) - expected).max() < 1e-4


def test_the_figures_tell_what_a_cut_costs(parts: Exported) -> None:
    one, two = parts.report.figures["cuts"]
    block = 17 * 24 * 72 + 2 * 17 * 17 * 24 + 17 * 24 * 24 + 2 * (17 * 24 * 96)
    assert (one["macs"], two["macs"]) == (16 * 24 * 192 + block, 16 * 24 * 192 + 2 * block)
    assert one["cut_bytes"] == 17 * 24 * 2  # float16
    sizes = {name: value.nbytes for name, value in load_file(parts.folder / "parameters.safetensors").items()}
    assert two["parameter_bytes"] == sum(sizes.values()) == parts.report.figures["parameter_bytes"]
    graphs = sum(path.stat().st_size for path in parts.folder.glob("cut1.*.onnx"))
    assert one["graph_bytes"] == graphs and one["checked"]["gradient_error"] < 2e-4
    listed = sum(file.size_bytes for file in parts.manifest.files)
    assert parts.report.size_bytes == listed
    stored = json.loads((parts.backend / "export.json").read_text())
    assert stored["figures"] == json.loads(json.dumps(parts.report.figures))
    assert stored["package_digest"] == parts.report.package_digest and stored["plan"]["training"]["cuts"] == [1, 2]


def test_a_whole_model_ends_in_a_head_for_the_classes(whole: Exported, tmp_path: Path) -> None:
    (cut,) = whole.plan.cuts
    assert (cut.index, cut.depth, cut.layer, cut.output_shape, cut.loss) == (3, 3, "head", (3,), "cross-entropy")
    assert whole.plan.whole_model and whole.plan.class_count == 3 and cut.saved == 0  # recomputed
    given, kept = load_file(whole.folder / "parameters.safetensors"), load_file(whole.backend / "model.safetensors")
    assert given["head.weight"].shape == (3, 24) and set(given) - set(kept) == {"head.weight", "head.bias"}
    assert set(kept) <= set(given)
    assert whole.manifest.label_modes == ("raw-label",) and whole.manifest.name.endswith("-fed_avg-whole")
    stored = json.loads((whole.backend / "export.json").read_text())
    assert stored["plan"]["training"]["release_whole_model"] is True and stored["figures"]["whole_model"] is True
    assert _put(whole.folder, tmp_path / "packages", whole.key).training == whole.plan
    images = tiny.images(2)
    with torch.no_grad():
        features = _shipped(whole)(images).numpy()
    logits = _evaluate(whole.folder, cut.evaluate, images.numpy())
    assert np.abs(logits - (features @ given["head.weight"].T + given["head.bias"])).max() < 1e-4


def _resigned(exported: Exported, folder: Path, plan: TrainingPlan, **bytes_of: bytes) -> Path:
    """The package with other bytes as its training.json, signed by its publisher."""
    import hashlib

    shutil.copytree(exported.folder, folder)
    data = bytes_of.get("text", training.to_bytes(plan))
    (folder / "training.json").write_bytes(data)
    files = tuple(
        replace(file, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        if file.name == "training.json" else file for file in exported.manifest.files
    )  # fmt: skip
    signed = to_bytes(replace(exported.manifest, files=files))
    (folder / "manifest.json").write_bytes(signed)
    (folder / "manifest.sig").write_bytes(sign(exported.key, signed))
    return folder


def test_an_altered_graph_is_refused(parts: Exported, tmp_path: Path) -> None:
    folder = shutil.copytree(parts.folder, tmp_path / "front")
    data = bytearray((folder / "cut2.backward.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "cut2.backward.onnx").write_bytes(data)
    with pytest.raises(PackageError, match=r"cut2\.backward\.onnx should have SHA-256") as caught:
        _put(folder, tmp_path / "packages", parts.key)
    assert type(caught.value) is PackageError and _names(tmp_path / "packages") == []


def test_signed_plans_that_name_what_is_not_there_are_refused(parts: Exported, whole: Exported, tmp_path: Path) -> None:
    cut = replace(parts.plan.cuts[0], backward="cut9.backward.onnx")
    unlisted = _resigned(parts, tmp_path / "unlisted", replace(parts.plan, cuts=(cut,)))
    released = training.to_bytes(whole.plan)
    withheld = _resigned(
        whole, tmp_path / "withheld", whole.plan, text=released.replace(b'"whole_model":true', b'"whole_model":false')
    )
    for folder, key, said in (
        (unlisted, parts.key, r"the listed file cut9\.backward\.onnx"),
        (withheld, whole.key, "which is not released"),
    ):
        with pytest.raises(ManifestError, match=said):
            _put(folder, tmp_path / "packages", key)
    assert _names(tmp_path / "packages") == []


@pytest.mark.parametrize(
    ("choices", "changes", "error", "said"),
    [
        (replace(CHOICES, cuts=(1, 3)), {}, UsageError, "cut 3 leaves nothing to the server: this model has 3 layers"),
        (replace(CHOICES, cuts=(99,)), {}, UsageError, "cut 99"),
        (replace(CHOICES, freeze=("blocks.0.mpl",)), {}, UsageError, "beginning of no parameter"),
        (replace(CHOICES, freeze=("head",)), {}, UsageError, "beginning of no parameter on the device"),
        (replace(CHOICES, freeze=("blocks.0", "patch", "pos", "cls")), {}, UsageError, "nothing to train at cut 1"),
        (CHOICES, {"opset": 17}, UsageError, "need opset 20"),
        (WHOLE, {"model": "deit_tiny_distilled_patch16_224"}, ExportError, "no single classifier"),
        (CHOICES, {"model": "mixer_s32_224", "model_args": ()}, ExportError, "no family"),
    ],
)
def test_mistakes_are_found_before_the_work(
    choices: TrainingChoices, changes: dict[str, object], error: type[CutlayerError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as caught:
        _export(tmp_path / "front", choices, **changes)
    assert caught.value.cure and _names(tmp_path) == []


def test_calibration_is_not_needed_and_said_to_be_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="cut 5"):
        _export(tmp_path / "front", replace(CHOICES, cuts=(5,)), calibration=str(tmp_path))
    assert "--calibration is not used" in capsys.readouterr().err


def test_graphs_that_fail_the_gate_leave_what_was_there(
    parts: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a whole export in its place counts the version up."""
    output = shutil.copytree(parts.folder, tmp_path / "front")
    shutil.copytree(parts.backend, backend_path(output))
    before = (output / "manifest.json").read_bytes()
    choices = replace(CHOICES, cuts=(1,))

    def refuse(*arguments: object, **named: object) -> object:
        raise GateError("gradients differ", "report it")

    with monkeypatch.context() as patched:
        patched.setattr(exporter.training_package, "check_training_graphs", refuse)
        with pytest.raises(GateError):
            _export(output, choices)
    assert (output / "manifest.json").read_bytes() == before and _names(tmp_path) == ["front", "front.backend"]
    assert _export(output, choices).manifest.version == 2
    assert not (output / "cut2.forward.onnx").exists() and _names(tmp_path) == ["front", "front.backend"]


def test_norms_that_are_frozen_whole_keep_their_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    set_modes(model, ("0.weight", "1.bias"))
    assert [each.training for each in model] == [True, True, False]


def test_the_head_is_found_by_its_name_in_each_family() -> None:
    with torch.device("meta"):
        names = {name: head_name(timm.create_model(name)) for name in ("vit_tiny_patch16_224", "resnet18", "vgg11")}
    assert names == {"vit_tiny_patch16_224": "head", "resnet18": "fc", "vgg11": "head.fc"}


def test_the_command_reports_each_cut(
    parts: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work itself is replaced by the fixture's report: what is tested is what the command adds."""
    seen: list[ExportPlan] = []

    def instant(plan: ExportPlan, surroundings: object) -> Report:
        seen.append(plan)
        return copy.deepcopy(parts.report)

    monkeypatch.setattr(exporter.training_package, "export_training", instant)
    monkeypatch.chdir(tmp_path)
    words = ["--model", "m", "-o", "front", "--for", "sequential_split", "--cuts", "1-2", "--freeze", "patch_embed,pos"]
    assert main(words) == 0
    shown = capsys.readouterr().err
    assert "cut 1 of 3, blocks.0: 17x24, 0.8 kB an image at the cut" in shown and "cut 2 of 3, blocks.1" in shown
    assert main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == json.loads(json.dumps(asdict(parts.report)["figures"]))
    assert seen[0].training.cuts == (1, 2) and seen[0].training.freeze == ("patch_embed", "pos")


def _check_resnet(folder: Path, cuts: tuple[int, ...]) -> Exported:
    args = (("small_images", True),)
    return _export(folder, replace(CHOICES, cuts=cuts), model="resnet18", model_args=args)


def test_parts_of_a_small_resnet_move_their_statistics(tmp_path: Path) -> None:
    exported = _check_resnet(tmp_path / "front", (1, 2))
    one, two = exported.plan.cuts
    assert (one.layer, one.output_shape, one.trainable, one.buffers) == ("conv1", (64, 32, 32), ("conv1.weight",), ())
    assert two.layer == "bn1" and set(two.buffers) == {"bn1.running_mean", "bn1.running_var"}
    assert one.macs == two.macs == 64 * 32 * 32 * 27
    outputs = onnxruntime.InferenceSession(str(exported.folder / two.forward)).get_outputs()
    assert {"new:bn1.running_mean", "new:bn1.running_var"} <= {each.name for each in outputs}
    kept = load_file(exported.backend / "model.safetensors")
    assert "fc.weight" not in kept and "layer4.1.conv2.weight" in kept and "bn1.num_batches_tracked" in kept
    assert _put(exported.folder, tmp_path / "packages", exported.key).training == exported.plan


@pytest.mark.slow
def test_every_cut_of_a_small_resnet_passes_the_gate(tmp_path: Path) -> None:
    exported = _check_resnet(tmp_path / "front", tuple(range(1, 10)))
    costs = exported.report.figures["cuts"]
    assert [cost["cut_bytes"] for cost in costs] == [262144] * 4 + [131072] * 2 + [65536] * 2 + [32768]
    macs = [cost["macs"] for cost in costs]
    assert macs == sorted(macs) and costs[-1]["layer"] == "layer4.0"
    assert _put(exported.folder, tmp_path / "packages", exported.key).training == exported.plan


@pytest.mark.slow
def test_a_whole_small_resnet_is_exported(tmp_path: Path) -> None:
    args = (("small_images", True),)
    exported = _export(tmp_path / "front", WHOLE, model="resnet18", model_args=args)
    assert exported.plan.cuts[0].layer == "fc" and exported.plan.cuts[0].output_shape == (3,)
    assert load_file(exported.folder / "parameters.safetensors")["fc.weight"].shape == (3, 512)
