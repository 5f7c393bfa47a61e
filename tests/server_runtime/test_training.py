"""The torch process without its pipe: killed at any message and restarted from its files, it ends bit-identical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import ConfigError  # noqa: E402
from contract.messages import Ask, Gradient  # noqa: E402
from edge_runtime.head import Head, head_step, new_head, softmax_gradient  # noqa: E402
from server_runtime import pipe  # noqa: E402
from server_runtime.conductor import Conducting, Conductor  # noqa: E402
from server_runtime.pipe import PipeFrame  # noqa: E402
from server_runtime.plan import Plan  # noqa: E402
from server_runtime.run_directory import RunDirectory  # noqa: E402
from server_runtime.store import Store, Upload  # noqa: E402
from server_runtime.training import RunRecords, _site_runs  # noqa: E402
from tests.server_runtime import tiny  # noqa: E402

DEVICES = ("jetson", "pi")


@dataclass
class Device:
    """Answers as a real one: the same ask gets the same answer, and it remembers the last one only."""

    upload: Upload
    head: Head
    last: Gradient | None = None
    asked: list[str] = field(default_factory=list)

    def answer(self, ask: Ask) -> Gradient:
        if self.last is not None and self.last.ask == ask.ask:
            return self.last
        assert ask.ask not in self.asked, "asked again about a step that is long over"
        self.asked.append(ask.ask)
        known = {i.tobytes(): int(label) for i, label in zip(self.upload.sample_ids, self.upload.labels, strict=True)}
        labels = np.array([known[i.tobytes()] for i in ask.tensors["sample_ids"]])
        if ask.kind == "head_step":
            self.head, loss = head_step(self.head, ask.tensors["features"], labels, 1e-2)
        else:
            loss = softmax_gradient(ask.tensors["logits"], labels)
        self.last = Gradient(ask.ask, loss.mean_loss, loss.correct, loss.count, loss.gradient)
        return self.last


class Server:
    """One life of the torch process over a run directory; devices are connected from the start."""

    def __init__(self, root: Path, backend: Path, plan: Plan, devices: Mapping[str, Device]) -> None:
        self.store, directory = Store(root), RunDirectory(root)
        sites = _site_runs({"clinic": list(DEVICES)}, plan, backend, None, self.store, directory)
        self.site = sites[0]
        self.devices = devices
        self.frames: list[PipeFrame] = []
        rules = Conducting("run", plan.label_mode, checkpoint_s=5.0)
        self.now_s = 0.0
        self.conductor = Conductor(sites, rules, self, RunRecords(self.store, directory), lambda: self.now_s)
        self.conductor.start()
        for device in devices:
            values: dict[str, pipe.Value] = {"purpose": "adapt", "class_count": 3}
            self.conductor.feed(PipeFrame(pipe.JOINED, "clinic", device, values=values))

    def send(self, frame: PipeFrame) -> None:
        self.frames.append(frame)

    def live(self, gradients: int | None = None) -> None:
        """Until the end, or until so many gradients have come in: then it is dead."""
        while not self.site.over:
            self.now_s += 1.0
            self.conductor.work()
            asked, self.frames = self.frames, []
            for frame in asked:
                message = pipe.carried(frame) if frame.kind == pipe.MESSAGE else None
                if isinstance(message, Ask) and message.kind != "collect_features":
                    if gradients == 0:
                        return
                    gradients = None if gradients is None else gradients - 1
                    self.conductor.feed(pipe.carry("clinic", frame.device, self.devices[frame.device].answer(message)))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_backend_folder(tmp_path_factory.mktemp("export") / "front.backend")


def plan_for(mode: str, strategy: str = "split_adaptation") -> Plan:
    return Plan(strategy, "aa", "bb", mode, tiny.KAPPA, 12, 4, 0.25, 7, 1)


def fill(root: Path, labels: bool) -> dict[str, Device]:
    """A run directory with both uploads in it, and the devices that made them."""
    store, devices = Store(root), {}
    store.fix_classes("clinic", 3, None)
    for seed, name in enumerate(DEVICES):
        upload = tiny.upload(name, 9 - 2 * seed, seed=seed)
        devices[name] = Device(upload, new_head(3, tiny.LAYOUT.dim, np.random.default_rng(seed)))
        store.open_session(name, "s1", "adapt")
        sent = upload if labels else replace(upload, labels=None)
        for number, message in enumerate(tiny.batches(sent, "run.features", 4), start=1):
            store.keep("clinic", name, "s1", number, message)
    store.close()
    return devices


def weights(server: Server) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in server.site.strategy.state().tensors.items()}


@pytest.mark.parametrize("mode", ["logit-gradient", "client-head"])
def test_killed_at_any_gradient_it_ends_bit_identical_and_asks_nothing_twice(
    mode: str, backend: Path, tmp_path: Path
) -> None:
    whole = fill(tmp_path / "whole", labels=False)
    undisturbed = Server(tmp_path / "whole", backend, plan_for(mode), whole)
    undisturbed.live()
    devices = fill(tmp_path / "run", labels=False)
    for gradients in (3, 0, 7, 1, 9):
        life = Server(tmp_path / "run", backend, plan_for(mode), devices)
        life.live(gradients)
        life.store.close()
    last = Server(tmp_path / "run", backend, plan_for(mode), devices)
    last.live()
    assert last.site.ended
    assert weights(last) == weights(undisturbed)
    for name in DEVICES:
        assert devices[name].asked == whole[name].asked
        assert devices[name].head.weight.tobytes() == whole[name].head.weight.tobytes()


def test_what_was_trained_answers_after_a_restart(backend: Path, tmp_path: Path) -> None:
    devices = fill(tmp_path, labels=True)
    first = Server(tmp_path, backend, plan_for("permuted-label"), devices)
    first.live()
    again = Server(tmp_path, backend, plan_for("permuted-label"), devices)
    assert again.site.ended
    assert again.site.last_record["epoch"] == 12
    codes = devices["pi"].upload.codes
    assert again.site.strategy.predict(codes).tobytes() == first.site.strategy.predict(codes).tobytes()


def test_de_04_a_damaged_upload_is_asked_for_again_when_its_device_is_back(backend: Path, tmp_path: Path) -> None:
    devices = fill(tmp_path, labels=True)
    victim = sorted(tmp_path.glob("tensors/clinic/pi/*"))[0]
    victim.write_bytes(b"")
    server = Server(tmp_path, backend, plan_for("permuted-label"), devices)
    asked = [pipe.carried(frame) for frame in server.frames if frame.kind == pipe.MESSAGE and frame.device == "pi"]
    assert [message.ask for message in asked if isinstance(message, Ask)] == ["run.features"]


def test_a_label_mode_that_the_strategy_does_not_know_is_refused(backend: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="linear_probe knows"):
        Server(tmp_path, backend, plan_for("client-head", "linear_probe"), {})
