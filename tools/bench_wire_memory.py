"""Memory of one device process in the benchmark of the wire, as the operating system counts it; and a bare client's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.bench_wire_control import Control, Order
from tools.bench_wire_programs import Programs, stop


def resident_bytes(pid: int, field_name: str = "VmRSS") -> int | None:
    """What the operating system says of a process; None where it does not say it like Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field_name}:")]
    return int(found[0]) * 1024 if found else None


def peak_bytes(pid: int, call: Callable[[], object]) -> int | None:
    """The most memory that a process holds during a call."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts at what is resident now
    except OSError:
        return None
    call()
    return resident_bytes(pid, "VmHWM")


def measure_memory(
    started: Programs, url: str, control: Control, bare: tuple[Control, str], devices: int, round_bytes: int
) -> Order:
    """A device of its own, idle, sending, and with an engine; and a bare client beside it."""
    model = started.root / "engine.onnx"
    model_bytes = write_engine(model)
    bare_client = started.start_bare_client("bare-memory", bare[1])
    bare[0].ask("join", clients=devices + 1)
    device = started.start_device("memory", url, round_bytes)
    control.ask("join", devices=["memory"])
    one = ["memory"]
    figures: Order = {"bare_idle_bytes": resident_bytes(bare_client.pid), "idle_bytes": resident_bytes(device.pid)}
    upload = peak_bytes(device.pid, lambda: control.ask("collect", devices=one))
    round_trip = peak_bytes(device.pid, lambda: control.ask("exchange", devices=one, size_bytes=round_bytes, count=1))
    idle = figures["idle_bytes"]
    for name, peak in (("upload", upload), ("round", round_trip)):
        figures[f"peak_{name}_bytes"] = peak
        known = peak is not None and idle is not None
        figures[f"peak_{name}_over_idle_in_payloads"] = (peak - idle) / round_bytes if known else None
    stop(device)
    engine = started.start_device("engine", url, round_bytes, "--engine", model)
    control.ask("join", devices=["engine"])
    figures |= {"engine_bytes": resident_bytes(engine.pid), "engine_model_bytes": model_bytes}
    stop(engine)
    stop(bare_client)
    if idle is None:
        figures["reason"] = "this system has no /proc/PID/status"
    return figures


def write_engine(path: Path) -> int:
    """A small frontend for onnxruntime: one patch-like matrix product; returns its size."""
    import numpy as np
    from onnx import TensorProto, checker, helper, numpy_helper

    weight = np.random.default_rng(0).standard_normal((768, 384), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["images", "shape"], ["patches"]),
         helper.make_node("MatMul", ["patches", "weight"], ["tokens"])],
        "frontend",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 64, 64])],
        [helper.make_tensor_value_info("tokens", TensorProto.FLOAT, [1, 16, 384])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array([1, 16, 768]), "shape")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return path.write_bytes(model.SerializeToString())
