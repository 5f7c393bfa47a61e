"""EFTViT in one process: a package from the exporter, the devices' own code, the server's strategy.

Invariants of algorithms.md 4.4; what is pure has tests of its own (median sampling, features on the wire, the store and
the counter of MACs).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from contract.errors import ConfigError, TrainingError
from contract.messages import Ask as AskMessage
from contract.messages import PatchFeatures, Settled
from contract.model_delta import read_delta
from contract.patch_features import WireFeatures, read_features
from contract.signature import key_id, load_public
from edge_runtime.config import DeviceConfig
from edge_runtime.install import Installed, install
from edge_runtime.part_store import PartStore
from edge_runtime.round_keeper import RoundKeeper
from edge_runtime.state import open_state, write_durably
from edge_runtime.trainer import open_trainer
from exporter.models import family_of
from exporter.models._masked import masked_whole
from server_runtime import backend_folder, split_model, strategies
from server_runtime.report import to_text
from server_runtime.split_model import Shipped
from server_runtime.strategies import Ask, Record, Settings, Site, State
from server_runtime.strategies.eft_vit import EftVit
from server_runtime.training_macs import sizes_of
from tests import eft_package
from tests.eft_package import DEPTH, DIM, KEPT, LOCAL, PATCHES
from tests.eft_package import SIDE_PX as SIZE
from tools.reproduce_eft_cost import measured, results_of
from tools.simulation import Answers, Terms
from tools.torch_trainer import open_torch_trainer
from tools.torch_worker import MemoryStore, OpenPart, PartDevice, make_part_device

CLASSES = ("left", "right", "up")
# How many images of each class: an even number of classes, one class alone, one image alone.
SITE = {"jetson": (6, 3, 0), "pi": (0, 5, 0), "thor": (0, 0, 1)}
SETTINGS = Settings("raw-label", 0.0, 4, 0, 0.0, 3, batch=4, learning_rate=1e-3, local_epochs=2)


@dataclass
class World:
    """A signed package of a tiny ViT, its backend, and folders of images."""

    root: Path
    front: Path
    publisher: Path
    shipped: Shipped
    installed: Installed

    def device(
        self, name: str, state: Path, engine: str = "onnxruntime", noise: str = "keyed", on_disk: bool = False
    ) -> PartDevice:  # fmt: skip
        open_state(state).close()
        for secret, content in (("device_secret", name.encode() * 32), ("site_secret", b"site" * 32)):
            write_durably(state / "identity" / secret, content[:32])
        classes = self.root / "classes.txt"
        classes.write_text("".join(f"{each}\n" for each in CLASSES))
        config = DeviceConfig(
            engine=str(self.front), data=self.root / "images" / name, server="wss://localhost:1",
            trust=self.publisher, ca=None, key=self.publisher, name=name, state=state,
            site_secret=state / "identity" / "site_secret", classes=classes, label_mode="raw-label", noise=noise,
            alpha=0.0, kappa_floor=0.0, max_releases=1, threads=1,
        )  # fmt: skip
        store = PartStore(open_state_folder(state), print) if on_disk else MemoryStore()
        return make_part_device(config, self.installed, self.opener(engine), store)

    def opener(self, engine: str) -> OpenPart:
        plan = self.shipped.plan
        if engine == "onnxruntime":
            return lambda cut: open_trainer(self.installed.folder, cut, plan.optimiser)
        cpu, count = torch.device("cpu"), plan.class_count
        return lambda cut: open_torch_trainer(
            self.installed.folder, cut, plan.optimiser, self.shipped.module, count, cpu
        )

    def strategy(self, **changes: Any) -> EftVit:
        from dataclasses import replace

        return EftVit(self.shipped, replace(SETTINGS, **changes))

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(self.installed.folder / "parameters.safetensors")


def open_state_folder(state: Path) -> Path:
    folder = state / "parts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def world(package: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("eft")
    rng = np.random.default_rng(0)
    colours = {"left": (220, 30, 30), "right": (30, 220, 30), "up": (30, 30, 220)}
    for name, counts in SITE.items():
        for label, count in zip(CLASSES, counts, strict=True):
            for number in range(count):
                path = root / "images" / name / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(-30, 31, (SIZE, SIZE, 3))
                Image.fromarray(np.clip(np.array(colours[label]) + noise, 0, 255).astype(np.uint8)).save(path)
    front = eft_package.front_of(package, root)
    folder = backend_folder.read(front.with_name(f"{front.name}.backend"))
    assert isinstance(folder, backend_folder.TrainingFolder)
    publisher = package / "keys" / "publisher.pub"
    trusted = {key_id(load_public(publisher)): load_public(publisher)}
    (root / "installed").mkdir()

    def open_nothing(path: Path) -> None:
        raise AssertionError(f"{path}: a package of parts has no frontend")

    installed = install(front, root / "installed", trusted, open_nothing, print)
    return World(root, front, publisher, split_model.load(folder, torch.device("cpu")), installed)


@dataclass
class Run:
    """A strategy driven to its end, with everything that was asked and answered."""

    strategy: EftVit
    devices: Mapping[str, PartDevice]
    reload: Callable[[], EftVit] | None = None  # at every record, a new strategy goes on from its state
    asks: list[Ask] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def play(self) -> Run:
        answers = Answers(self.devices, Terms("run", "site", "eft_vit", "raw-label", 0.0, 0))
        conduct, sent = self.strategy.run(self.site), None
        while True:
            try:
                step = next(conduct) if sent is None else conduct.send(sent)
            except StopIteration:
                return self
            sent = {}
            if isinstance(step, Ask):
                self.asks.append(step)
                sent = answers.answer(step)
                self.replies.append(sent)
            elif isinstance(step, Record):
                self.records.append(dict(step.values))
                answers.note_checkpoint()
                if self.reload is not None:
                    state = self.strategy.state()
                    values = json.loads(json.dumps(dict(state.values), allow_nan=False))
                    tensors = safetensors.torch.load(safetensors.torch.save(dict(state.tensors)))
                    self.strategy = self.reload()
                    self.strategy.load(self.site, State(tensors, values))
                    conduct, sent = self.strategy.run(self.site), None

    @property
    def site(self) -> Site:
        return Site("site", tuple(sorted(self.devices)), len(CLASSES))

    def features(self, device: str) -> list[PatchFeatures]:
        return [each[device] for each in self.replies if isinstance(each.get(device), PatchFeatures)]

    def published(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in self.strategy.state().tensors.items()}


def site_of(world: World, root: Path, engine: str = "onnxruntime", **options: Any) -> dict[str, PartDevice]:
    return {name: world.device(name, root / name, engine, **options) for name in SITE}


@pytest.fixture(scope="module")
def played(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rounds of two epochs on three devices."""
    return Run(world.strategy(), site_of(world, tmp_path_factory.mktemp("played"))).play()


def keeper_of(device: PartDevice) -> RoundKeeper:
    assert isinstance(device.keeper, RoundKeeper)
    return device.keeper


# -- the package


def test_the_package_releases_the_whole_model_and_says_so(world: World) -> None:
    plan = world.shipped.plan
    assert plan.whole_model and plan.strategy == "eft_vit"
    local, whole = plan.cuts
    assert (local.index, local.loss, whole.index, whole.loss) == (LOCAL, "none", DEPTH, "cross-entropy")
    export = json.loads(world.front.with_name(f"{world.front.name}.backend").joinpath("export.json").read_text())
    assert export["plan"]["training"]["release_whole_model"] is True


def test_invariant_1_the_cut_has_the_kept_patches_and_the_class_token(world: World) -> None:
    local, whole = world.shipped.plan.cuts
    for cut in (local, whole):
        assert (cut.kept, cut.patches) == (round(0.25 * PATCHES), PATCHES)
    assert local.output_shape == (KEPT + 1, DIM) and local.evaluated_shape == (PATCHES + 1, DIM)


def test_invariant_1_all_patches_in_any_order_give_the_plain_model(world: World) -> None:
    model = masked_whole(world.shipped.module).eval()
    images, rng = torch.randn(3, 3, SIZE, SIZE), np.random.default_rng(0)
    plain = world.shipped.module(images)
    everything = torch.arange(PATCHES).expand(3, -1)
    shuffled = torch.from_numpy(np.stack([rng.permutation(PATCHES) for _ in range(3)]))
    for keep in (everything, shuffled):  # a token keeps the position of its patch wherever it stands
        torch.testing.assert_close(model(images, keep), plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(images, shuffled[:, :KEPT]), plain, atol=1e-3)


def test_invariant_9_the_gradient_crosses_the_frozen_global_module(world: World) -> None:
    local, whole = world.shipped.plan.cuts
    trainer = world.opener("onnxruntime")(whole)
    keep = np.tile(np.arange(KEPT), (2, 1))
    images = np.random.default_rng(0).normal(size=(2, 3, SIZE, SIZE)).astype(np.float32)
    trainer.forward(images, np.eye(3, dtype=np.float32)[:2], keep)
    gradients = trainer.backward(None)
    assert set(gradients) == {*local.trainable, "head.weight", "head.bias"}
    assert all(np.abs(gradients[name]).max() > 0 for name in local.trainable)
    ours = world.opener("torch")(whole)
    ours.forward(images, np.eye(3, dtype=np.float32)[:2], keep)
    ours.backward(None)
    for name, parameter in ours._part.named_parameters():  # type: ignore[union-attr]
        if name in whole.frozen:
            assert parameter.grad is None
        else:
            np.testing.assert_allclose(parameter.grad.numpy(), gradients[name], rtol=2e-3, atol=1e-6, err_msg=name)


# -- rounds


def test_invariant_2_each_side_leaves_the_others_module_alone(world: World, played: Run) -> None:
    local, whole = world.shipped.plan.cuts
    parameters, published = world.parameters, played.published()
    for name in local.trainable:  # theta_l on the server is still the package's
        np.testing.assert_array_equal(published[f"backend.{name}"], parameters[name])
    assert any((published[f"backend.{name}"] != parameters[name]).any() for name in whole.frozen)
    received = played.asks[-1].tensors["jetson"]
    changed = {name: value for name, value in received.items() if not name.startswith("head.")}
    expected = read_delta(changed, {name: parameters[name] for name in whole.frozen})
    trainer = keeper_of(played.devices["jetson"])._trainers[DEPTH]
    for name in whole.frozen:  # theta_g on the device is what came, to the bit
        np.testing.assert_array_equal(trainer._tensors[name], expected[name])
        np.testing.assert_allclose(trainer._tensors[name], published[f"backend.{name}"], atol=1e-5)
    for name in ("head.weight", "head.bias"):
        np.testing.assert_array_equal(trainer._tensors[name], published[name])
    own = keeper_of(played.devices["jetson"]).local_weights()
    assert own is not None and any((own[name] != parameters[name]).any() for name in own)


def test_invariant_3_devices_send_the_median_of_each_class_they_have(played: Run) -> None:
    for device, counts in SITE.items():
        present = [count for count in counts if count]
        m = max(1, int(np.median(present)))
        for reply in played.features(device):
            assert reply.labels is not None and reply.samples == reply.count == sum(counts)
            found = np.bincount(reply.labels, minlength=3)
            assert list(found) == [m if count else 0 for count in counts]


def test_invariant_4_features_repeat_from_sample_secret_mask_and_local_module(world: World, played: Run) -> None:
    device, local = played.devices["jetson"], world.shipped.plan.cuts[0]
    keeper, reply = keeper_of(device), played.features("jetson")[-1]
    own = keeper.local_weights()
    assert own is not None and reply.values is not None and reply.labels is not None
    part = world.opener("torch")(local)  # another engine, from the weights alone
    part.load_parameters({name: np.array(own[name]) for name in local.trainable})
    images = keeper._images
    plain = images.plain(range(len(images)))
    made = part.features(plain.images, images.kept_patches(plain.sample_ids, local))
    wanted = read_features(WireFeatures(np.array(reply.values), None))
    for row, label in zip(wanted, reply.labels, strict=True):
        nearest = np.abs(made[plain.labels == label] - row).max(axis=(1, 2)).min()
        assert nearest < 5e-3  # float16


@pytest.mark.parametrize("noise", ["keyed", "fresh"])
def test_invariant_5_a_sample_shows_the_same_patches_in_every_round(
    world: World, tmp_path: Path, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = world.device("jetson", tmp_path, "torch", noise)
    images, seen = keeper_of(device)._images, dict[bytes, set[int]]()
    method = "kept_patches" if noise == "keyed" else "fresh_patches"
    draw = getattr(images, method)

    def note(sample_ids: Any, *more: Any) -> Any:
        keep = draw(sample_ids, *more)
        for sample, positions in zip(sample_ids, keep, strict=True):
            seen.setdefault(sample, set()).update(map(int, positions))
        return keep

    monkeypatch.setattr(images, method, note)
    Run(world.strategy(epochs=10, learning_rate=1e-4), {"jetson": device}).play()
    sizes = {len(positions) for positions in seen.values()}
    if noise == "keyed":
        assert sizes == {KEPT}
    else:  # as published: five rounds show far more than a quarter
        assert max(sizes) > 3 * KEPT


def test_a_device_with_one_class_an_empty_class_or_one_image_completes(played: Run) -> None:
    for device, counts in SITE.items():
        sent = played.features(device)
        assert len(sent) == 2 and all(each.labels is not None and each.count == sum(counts) for each in sent)
        assert {int(label) for each in sent if each.labels is not None for label in each.labels} == {
            label for label, count in enumerate(counts) if count
        }
        assert keeper_of(played.devices[device]).local_weights() is not None


def test_invariant_6_upload_bytes_are_samples_by_tokens_by_channels_by_width(played: Run) -> None:
    rows = sum(len(each.labels) for device in SITE for each in played.features(device) if each.labels is not None)
    sent = sum(record["bytes_up"] for record in played.records)
    assert sent == rows * ((KEPT + 1) * DIM * 2 + 2)  # float16, and a label
    assert [record["features"] for record in played.records] == [rows // 2] * 2


def test_invariant_7_the_store_holds_one_upload_of_each_device(played: Run) -> None:
    one_round = sum(len(played.features(device)[0].labels) for device in SITE)
    assert [record["store_rows"] for record in played.records] == [one_round] * 2


def test_the_global_module_travels_when_it_has_changed_and_only_then(played: Run, world: World) -> None:
    first, second, last = played.asks
    assert [each.kind for each in played.asks] == ["masked_round", "masked_round", "load_global"]
    for device in SITE:
        assert set(first.tensors[device]) == {"head.weight", "head.bias"}  # theta_g is still the package's
        assert set(second.tensors[device]) > {"head.weight", "norm.weight"}
        assert {each.dtype for name, each in second.tensors[device].items() if not name.startswith("head.")} == {
            np.dtype(np.float16)
        }
    record = played.records[1]
    assert record["bytes_down"] == sum(each.nbytes for sent in second.tensors.values() for each in sent.values())
    assert all(isinstance(reply, Settled) for reply in played.replies[-1].values())


def test_a_device_that_has_the_newest_global_module_gets_none(world: World, tmp_path: Path) -> None:
    strategy = world.strategy(epochs=2)
    Run(strategy, {"pi": world.device("pi", tmp_path, "torch")}).play()
    assert strategy.last_part("pi").tensors["pi"] == {}
    assert "norm.weight" in strategy.last_part("never-seen").tensors["never-seen"]


def test_rounds_report_compute_bytes_and_loss(played: Run) -> None:
    for record in played.records:
        assert record["macs_devices"] > 0 and record["macs_server"] > 0
        assert np.isfinite(record["loss"]) and np.isfinite(record["server_loss"])
        assert record["asked"] == 3 and record["samples"] == 15


def test_devices_and_server_have_rates_of_their_own(world: World, tmp_path: Path) -> None:
    run = Run(world.strategy(server_rate=1e-12), site_of(world, tmp_path, "torch")).play()
    assert {ask.parameters["rate"] for ask in run.asks if ask.kind == "masked_round"} == {SETTINGS.learning_rate}
    now, shipped = run.published(), world.shipped.module.state_dict()
    for name in world.shipped.plan.cuts[1].frozen:  # theta_g, which the server trains
        np.testing.assert_allclose(now[f"backend.{name}"], shipped[name].numpy(), atol=1e-9)
    own = keeper_of(run.devices["jetson"]).local_weights()
    assert own is not None and max(np.abs(own[name] - shipped[name].numpy()).max() for name in own) > 1e-4


def test_a_fraction_of_the_devices_is_asked_and_all_get_the_end(world: World, tmp_path: Path) -> None:
    run = Run(world.strategy(fraction=0.34, epochs=8), site_of(world, tmp_path, "torch")).play()
    asked = [tuple(each.tensors) for each in run.asks[:-1]]
    assert all(len(each) == 1 for each in asked) and len(set(asked)) > 1
    assert set(run.asks[-1].tensors) == set(SITE)


def test_both_engines_tell_the_same_story(world: World, played: Run, tmp_path: Path) -> None:
    other = Run(world.strategy(), site_of(world, tmp_path, "torch")).play()
    for one, two in zip(played.records, other.records, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
        assert one["server_loss"] == pytest.approx(two["server_loss"], rel=1e-2)
        assert (one["bytes_up"], one["macs_devices"]) == (two["bytes_up"], two["macs_devices"])


# -- stops


def test_a_server_that_stops_between_rounds_goes_on_to_the_same_bits(world: World, played: Run, tmp_path: Path) -> None:
    stopped = Run(world.strategy(), site_of(world, tmp_path), world.strategy).play()
    one, other = played.published(), stopped.published()
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].tobytes() != other[name].tobytes()] == []


def test_a_device_that_is_killed_goes_on_from_its_disk(world: World, tmp_path: Path) -> None:
    """Every ask is answered by a new process, and in the middle of a round one is killed."""
    ask = {"size": 4, "seed": 3, "rate": 1e-3, "threshold": 1.0, "base": 0, "epochs": 2}
    rounds = [
        AskMessage("r.1", "masked_round", {**ask, "step": 1, "after": 0, "epoch": 1}, 60.0),
        AskMessage("r.2", "masked_round", {**ask, "step": 2, "after": 1, "epoch": 3}, 60.0),
    ]
    alive = world.device("jetson", tmp_path / "one", on_disk=True)
    expected = [alive.keeper.answer(each, "r") for each in rounds]
    found = []
    for each in rounds:
        reborn = keeper_of(world.device("jetson", tmp_path / "other", on_disk=True))
        reborn._images.plain = lambda places: (_ for _ in ()).throw(KeyboardInterrupt)  # after the epochs
        with pytest.raises(KeyboardInterrupt):
            reborn.answer(each, "r")
        found.append(world.device("jetson", tmp_path / "other", on_disk=True).keeper.answer(each, "r"))
    for one, other in zip(expected, found, strict=True):
        assert isinstance(one, PatchFeatures) and isinstance(other, PatchFeatures)
        assert one.values is not None and other.values is not None
        assert one.values.tobytes() == other.values.tobytes() and one.mean_loss == other.mean_loss


# -- who is refused


def test_another_number_of_classes_is_refused(world: World) -> None:
    with pytest.raises(TrainingError, match="has 5 classes, the package's model 3"):
        next(world.strategy().run(Site("site", ("pi",), 5)))


@pytest.mark.parametrize(
    ("field_name", "value", "cause"),
    [
        ("values", np.zeros((1, KEPT, DIM), np.float16), r"expected float16 tokens \(5, 24\) at cut 1"),
        ("values", np.zeros((1, KEPT + 1, DIM), np.float32), "expected float16 tokens"),
        ("labels", np.array([3], np.uint16), "expected classes below 3, found 3"),
    ],
)
def test_features_that_do_not_fit_name_device_and_field(
    world: World, field_name: str, value: np.ndarray, cause: str
) -> None:
    arrays = {"values": np.zeros((1, KEPT + 1, DIM), np.float16), "labels": np.zeros(1, np.uint16), field_name: value}
    reply = PatchFeatures("masked-0-1", 1, 1, 0.5, 1, arrays["values"], None, arrays["labels"])
    conduct = world.strategy().run(Site("site", ("pi",), 3))
    next(conduct)
    with pytest.raises(TrainingError, match=f"pi: patch_features.{field_name}: {cause}"):
        conduct.send({"pi": reply})


def test_a_device_without_images_takes_part_without_a_row(world: World) -> None:
    conduct = world.strategy().run(Site("site", ("pi", "thor"), 3))
    next(conduct)
    some = PatchFeatures(
        "masked-0-1", 1, 1, 0.5, 1, np.zeros((1, KEPT + 1, DIM), np.float16), None, np.zeros(1, np.uint16)
    )
    step = conduct.send({"pi": some, "thor": PatchFeatures("masked-0-1", 0, 0, 0.0, 0, None, None, None)})
    assert isinstance(step, Record) and step.values["samples"] == 1
    following = conduct.send({})
    assert isinstance(following, Ask) and set(following.tensors) == {"pi"}  # and is not asked again


def test_the_plan_refuses_shares_of_devices_where_all_are_needed() -> None:
    from contract.manifest import TransformRules
    from server_runtime.plan import Plan

    plan = Plan("split_fed", "", "", "raw-label", 0.0, 1, 0, 0.0, 0, 1, fraction=0.5)
    with pytest.raises(ConfigError):
        plan.check(TransformRules(0.0, 0.0, 0.0, False), ("raw-label",), None, ("pi",))
    assert strategies.check("eft_vit") == "eft_vit"


def test_a_step_s_cost_is_measured_on_the_package_as_it_is_published(world: World) -> None:
    row = measured(world.front, sizes_of(world.shipped.module), LOCAL, 0.75, 2)
    local, _ = family_of(world.shipped.module)[1].cut(world.shipped.module, LOCAL)
    assert (row["kept"], row["local"], row["batch"]) == (KEPT, LOCAL, 2)
    assert row["parameters"] == sum(each.numel() for each in local.parameters())
    assert row["step_s"] > 0 and row["peak_bytes"] > 1 << 20 and row["macs"] > 0
    assert "local blocks" in to_text(results_of([row], "tiny").tables[0])
