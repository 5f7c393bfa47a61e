"""TensorRT plans: what makes one fit, what a failed build means, which one serves; builders and GPU are made up."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from contract.errors import EngineError
from edge_runtime.delivery import Stopped
from edge_runtime.engines import open_engine
from edge_runtime.plans import build as building
from edge_runtime.plans.build import Watch, build_plan
from edge_runtime.plans.child import Outcome, Request
from edge_runtime.plans.choose import Frontend, open_planned
from edge_runtime.plans.ladder import RUNGS, Ended, explain
from edge_runtime.plans.progress import Phases, remaining_s
from edge_runtime.plans.store import PlanStore
from tests.edge_runtime.onnx_bytes import quantized_model
from tests.edge_runtime.test_tensorrt_engine import FAKES, IMAGES, cuda, plan_of  # noqa: F401

MODEL = quantized_model()[0]


@pytest.fixture
def world(cuda: ModuleType, tmp_path: Path) -> Iterator[World]:  # noqa: F811
    made = World(cuda, tmp_path)
    yield made
    made.close()


class World:
    """A device with a frontend, a store of plans, and a builder that counts what it builds."""

    def __init__(self, cuda: ModuleType, folder: Path) -> None:  # noqa: F811
        self.cuda, self.folder = cuda, folder
        self.onnx = folder / "front.onnx"
        self.onnx.write_bytes(MODEL)
        (folder / "plans").mkdir()
        self.built: list[str] = []
        self.said: list[str] = []
        self.refusing: dict[str, EngineError] = {}
        self.secret = "secret"
        self._open: list[object] = []

    @property
    def store(self) -> PlanStore:
        return PlanStore(self.folder / "plans", lambda data: f"{self.secret}{hash(data)}")

    def build(self, request: Request, check: Callable[[], None], say: Callable[[str], None]) -> Outcome:
        self.built.append(request.types)
        if request.types in self.refusing:
            raise self.refusing[request.types]
        version = sys.modules["tensorrt"].__version__
        plan = plan_of(self.onnx.read_bytes(), request.batch_most, types=request.types, version=version)
        Path(request.plan).write_bytes(plan)
        return Outcome("tensorrt", version, 12.0, 99, {}, 1 << 30, 1 << 29, 1 << 28)

    def open(self) -> object:
        frontend = Frontend(self.onnx, 4, IMAGES[:4], self.reference)
        engine, self.record = open_planned(frontend, self.store, lambda: None, self.said.append, self.build)
        self._open.append(engine)
        return engine

    def reference(self) -> np.ndarray:
        return open_engine("onnxruntime", self.onnx, 1).run(IMAGES[:4])

    def close(self) -> None:
        for engine in self._open:
            engine.close()  # type: ignore[attr-defined]


def test_a_plan_is_built_once_in_both_types_and_the_better_one_kept(world: World) -> None:
    engine = world.open()
    assert world.built == ["float16", "float32"]
    assert [each.types for each in world.record.tried] == world.built
    assert all(each.runs >= 1 and each.fastest_ms <= each.median_ms <= each.slowest_ms for each in world.record.tried)
    half, single = (each.snr_db for each in world.record.tried)
    assert single is None and 40 < half < 90  # the fake rounds its tokens to float16
    assert sorted(path.name for path in (world.folder / "plans").iterdir()) == ["front.json", "front.plan"]
    assert engine.run(IMAGES[:2]).shape == (2, 4, 8)  # type: ignore[attr-defined]
    world.open()
    assert world.built == ["float16", "float32"]


FACTS = {
    "GPU's name": lambda world: world.cuda.GPU.update(name="Other Orin"),
    "its capability": lambda world: world.cuda.GPU.update(capability=(7, 2)),
    "its size": lambda world: world.cuda.GPU.update(processors=16),
    "the driver": lambda world: world.cuda.GPU.update(driver=12040),
    "TensorRT's version": lambda world: setattr(sys.modules["tensorrt"], "__version__", "10.4.0"),
    "the ONNX file": lambda world: world.onnx.write_bytes(quantized_model(seed=3)[0]),
}


@pytest.mark.parametrize("change", FACTS)
def test_en_01_any_difference_is_said_and_built_again_once(
    world: World, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.cuda, "GPU", dict(world.cuda.GPU))
    world.open()
    FACTS[change](world)
    world.open()
    world.open()
    assert world.built == ["float16", "float32"] * 2
    reasons = [text for text in world.said if "built again" in text]
    assert len(reasons) == 1 and " was " in reasons[0] and ", is " in reasons[0]


DAMAGES = {
    "empty": lambda store: store.plan.write_bytes(b""),
    "truncated": lambda store: store.plan.write_bytes(store.plan.read_bytes()[:-1]),
    "altered": lambda store: store.plan.write_bytes(b"X" + store.plan.read_bytes()[1:]),
    "gone": lambda store: store.plan.unlink(),
    "without a record": lambda store: (store.folder / "front.json").unlink(),
    "with a broken record": lambda store: (store.folder / "front.json").write_bytes(b"{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_plan_that_is_not_whole_is_never_opened(world: World, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.open()
    DAMAGES[damage](world.store)
    opened: list[bytes] = []
    real = importlib.import_module("edge_runtime.engines.tensorrt").open_model
    monkeypatch.setattr(
        "edge_runtime.plans.choose.open_model",
        lambda path, threads: opened.append(path.read_bytes()) or real(path, threads),
    )
    world.open()
    assert world.built == ["float16", "float32"] * 2
    assert all(plan.startswith(b"FAKE-TENSORRT") and plan.endswith(MODEL) for plan in opened) and len(opened) == 3
    assert sum("built again" in text for text in world.said) == 1


def test_a_whole_plan_that_tensorrt_refuses_is_built_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.open()
    refused = world.record.types
    monkeypatch.setenv("FAKE_TRT", f"none={refused}")
    world.open()
    assert world.built == ["float16", "float32"] * 2 and world.record.types not in (None, refused)
    assert "refuses the plan" in " ".join(world.said)


def test_a_plan_and_record_of_another_device_are_foreign(world: World) -> None:
    world.open()
    world.secret = "another"
    world.open()
    assert world.built == ["float16", "float32"] * 2
    assert "it was not built by this device for this package" in " ".join(world.said)


def test_en_04_a_plan_that_is_not_finite_never_serves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRT", "nan=float16")
    world.open()
    half, single = world.record.tried
    assert world.record.types == "float32" and single.refused is None
    assert "not finite" in half.refused and half.median_ms is None and half.runs == 0


def test_en_04_where_no_plan_is_near_enough_that_is_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "reference", lambda: np.ones((4, 4, 8), np.float32))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"float16 plan should be within 25 dB .*found -.*float32 plan") as caught:
            world.open()
    assert "front.onnx" in caught.value.cure
    assert world.built == ["float16", "float32"] and not world.store.plan.exists()


def test_one_serialisation_that_cannot_be_built_leaves_the_other(world: World) -> None:
    world.refusing["float16"] = EngineError("killed", "less")
    world.open()
    assert world.record.types == "float32" and "no float16 plan: killed" in world.said


def test_a_build_that_fails_leaves_nothing_and_is_tried_again(world: World) -> None:
    world.refusing = {types: EngineError(f"{types} was killed", "less") for types in ("float16", "float32")}
    with pytest.raises(EngineError, match="float32 was killed"):
        world.open()
    assert not list((world.folder / "plans").iterdir())
    world.refusing = {}
    world.open()
    assert world.record.types is not None


@pytest.mark.parametrize(
    ("ended", "is_memory", "words"),
    [
        (Ended(-9, (), 3 << 30, 1 << 30), True, r"was killed: too little memory \(3\.0 GiB were free, 1\.0 GiB given"),
        (Ended(5, ("Could not find any implementation for node X",), None, None), True, "too little memory"),
        (Ended(5, ("Error Code 2: OutOfMemory (Requested size was 4)",), None, None), True, "OutOfMemory"),
        (Ended(1, ("MemoryError: std::bad_alloc",), 1, 1), True, "bad_alloc"),
        (Ended(5, ("In node 3 (importer): UNSUPPORTED_NODE: Gelu",), 1, 1), False, "does not take the frontend"),
        (Ended(-11, ("segfault",), 1, 1), False, "signal 11"),
        (Ended(5, (), 1, 1), False, "says nothing"),
    ],
)
def test_en_03_failures_are_told_in_words(ended: Ended, is_memory: bool, words: str) -> None:
    failure = explain(ended)
    assert failure.is_memory is is_memory and failure.cure
    with pytest.raises(EngineError, match=words):
        raise EngineError(failure.cause, failure.cure)


def request_of(folder: Path) -> Request:
    (folder / "front.onnx").write_bytes(MODEL)
    return Request(
        str(folder / "front.onnx"), str(folder / "float16.plan.partial"), "float16", 4, 8, 4, 0.0, 0, False,
        str(folder / "timing.cache"), None,
    )  # fmt: skip


@pytest.fixture
def child_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Request:
    """A request for a real child process, which finds the fakes."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    return request_of(tmp_path)


def test_en_03_a_build_that_is_killed_is_tried_with_less_and_then_stands(
    child_world: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRT", "kill=3,memory=2")
    said: list[str] = []
    outcome = build_plan(child_world, lambda: None, said.append)
    assert len(said) == 2 and "was killed: too little memory (4.0 GiB were free" in said[0]
    assert "Could not find any implementation" in said[1] and "1.0 GiB given as workspace" in said[1]
    plan = Path(child_world.plan)
    assert outcome.plan_bytes == plan.stat().st_size and plan.stat().st_mode & 0o777 == 0o600
    assert outcome.workspace_bytes == (4 << 30) * RUNGS[2].workspace_share and outcome.version == "10.3.0"
    assert Path(str(child_world.timing_cache)).read_bytes() == b"timed"


def test_en_03_a_build_without_a_chance_names_the_memory_and_leaves_no_plan(
    child_world: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRT", "kill=0")
    with pytest.raises(EngineError, match="too little memory"):
        build_plan(child_world, lambda: None, lambda text: None, RUNGS[-1:])
    assert not Path(child_world.plan).exists()


def test_what_tensorrt_does_not_take_is_told_at_once(child_world: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRT", "refuse=1")
    said: list[str] = []
    with pytest.raises(EngineError, match="does not take the frontend: .*UNSUPPORTED_NODE"):
        build_plan(child_world, lambda: None, said.append)
    assert said == []


def test_a_stop_ends_the_build_and_its_process(child_world: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRT", "hang=1")
    started: list[int] = []
    real = building.subprocess.Popen

    def spy(*arguments: object, **options: object) -> object:
        child = real(*arguments, **options)  # type: ignore[call-overload]
        started.append(child.pid)
        return child

    monkeypatch.setattr(building.subprocess, "Popen", spy)

    def check() -> None:
        if started:
            raise Stopped

    with pytest.raises(Stopped):
        build_plan(child_world, check, lambda text: None)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], signal.SIGKILL)  # it was waited for


def test_progress_never_goes_back_and_tells_what_is_left() -> None:
    phases = Phases()
    phases.start("build", None, 4)
    seen = [phases.fraction]
    phases.step("build", 0)
    phases.start("tactics", "build", 10)
    for number in range(10):
        phases.step("tactics", number)
        seen.append(phases.fraction)
    phases.finish("tactics")
    phases.step("build", 1)
    seen.append(phases.fraction)
    phases.step("unknown", 3)
    assert seen == sorted(seen) and seen[0] == 0.0 and seen[1] == pytest.approx(0.275) and seen[-1] == 0.5
    assert remaining_s(30.0, 0.25) == 90.0 and remaining_s(30.0, 0.0) is None


def test_a_long_build_says_now_and_then_how_far_it_is() -> None:
    clock, said = iter([0.0, 4.0, 11.0, 15.0, 22.0]), []
    watch = Watch("float16", said.append, lambda: next(clock))
    for line in (b"[TRT] chatter", b'{"fraction": 0.2}', b'{"fraction": 0.5}', b"[]", b'{"fraction": 0.6}'):
        watch.take(line)
    watch.tick()
    assert said == [
        "building the float16 plan: 50 % after 11 s, about 11 s left",
        "building the float16 plan: 60 % after 22 s, about 15 s left",
    ]


def test_a_record_with_another_plans_digest_is_refused(world: World) -> None:
    world.open()
    forged = replace(world.record, plan_sha256="0" * 64)
    assert world.store._mark(forged) != world.record.mark
