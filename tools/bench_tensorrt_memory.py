"""Uses the engine's CUDA layer on real memory: copies, the order of a stream, two engines' worth of buffers; and
what goes goes in the owner's thread. Every check raises; the figures are of what passed. For leaks run it under
compute-sanitizer --leak-check full."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from edge_runtime.engines._cuda import Lane, Owner, load_driver

MIB = 1 << 20
ROUNDS = 50
BUSY = 8  # works on a whole buffer, which keep the stream behind the host
SIZES_BYTES = (1, 4096, 3 * 224 * 224 * 4 * 8, 197 * 1024 * 4 * 8)  # the last two are ViT-L's pictures and tokens


def exercise_memory(buffer_mib: int) -> dict[str, Any]:
    """What was checked, with figures; the largest buffers are of `buffer_mib`. Raises: AssertionError."""
    driver = load_driver()
    warm = Owner(driver)  # the driver keeps what a first context needed
    warm.do(driver.mem_get_info)
    owner = Owner(driver)
    free_bytes = owner.do(lambda: driver.mem_get_info()[0])
    copied = owner.do(lambda: copy(driver, buffer_mib * MIB))
    ordered = owner.do(lambda: keep_order(driver, buffer_mib * MIB // 4))
    lanes = two_lanes(driver, owner)
    owners = two_owners(driver)
    fewer_bytes = free_bytes - owner.do(lambda: driver.mem_get_info()[0])  # of the whole card: others' work is in it
    owner.close()
    warm.close()
    return {**copied, **ordered, **lanes, **owners, "card_has_fewer_free_bytes": int(fewer_bytes)}


def copy(driver: Any, most_bytes: int) -> dict[str, Any]:
    """There and back again, every byte compared; and how fast page-locked memory is."""
    rng = np.random.default_rng(0)
    for size in (*SIZES_BYTES, most_bytes):
        lane = Lane(driver, {"a": size})
        sent = rng.integers(0, 256, size, dtype=np.uint8)
        lane.send("a", sent)
        lane.wait()
        lane.memory["a"].host[...] = 0
        found = lane.receive("a", sent.shape, np.uint8)
        lane.wait()
        assert np.array_equal(found, sent), f"{size} bytes came back changed"
        lane.free()
    lane = Lane(driver, {"a": most_bytes})
    place = lane.memory["a"].view((most_bytes,), np.uint8)
    rates = {}
    for name, work in (
        ("host_to_device", lambda: driver.memcpy_htod_async(lane.memory["a"].device, place, lane.stream)),
        ("device_to_host", lambda: driver.memcpy_dtoh_async(place, lane.memory["a"].device, lane.stream)),
    ):
        started_s = time.perf_counter()
        for _ in range(20):
            work()
        lane.wait()
        rates[f"{name}_gb_per_s"] = 20 * most_bytes / (time.perf_counter() - started_s) / 1e9
    lane.free()
    return {"copied_bytes": sum(SIZES_BYTES) + most_bytes, **rates}


def keep_order(driver: Any, count: int) -> dict[str, Any]:
    """Send, long work on the same stream, receive: the result is the work's, round after round into the same memory."""
    lane = Lane(driver, {"a": 4 * count, "b": 4 * count})
    early = 0
    for value in range(ROUNDS):
        lane.send("a", np.full(count, value, np.uint32))
        for _ in range(BUSY):
            driver.memset_d32_async(lane.memory["b"].device, 7, count, lane.stream)
        driver.memcpy_dtod_async(lane.memory["b"].device, lane.memory["a"].device, 4 * count, lane.stream)
        found = lane.receive("b", (count,), np.uint32)
        early += not lane.stream.is_done()
        lane.wait()
        assert (found == value).all(), f"round {value} gave {found[0]}"
    lane.free()
    assert early, "the stream was never ahead of the host: nothing was shown of its order"
    return {"ordered_rounds": ROUNDS, "rounds_with_the_host_ahead": early}


def two_lanes(driver: Any, owner: Owner) -> dict[str, Any]:
    """Two engines' buffers in one context, asked by four threads at once."""
    lanes = owner.do(lambda: [Lane(driver, {"a": 8 * MIB, "b": 8 * MIB}) for _ in range(2)])
    failures: list[str] = []

    def part(lane: Lane, value: int) -> np.ndarray:
        lane.send("a", np.full(2 * MIB, value, np.uint32))
        driver.memcpy_dtod_async(lane.memory["b"].device, lane.memory["a"].device, 8 * MIB, lane.stream)
        found = lane.receive("b", (2 * MIB,), np.uint32)
        lane.wait()
        return np.array(found)

    def ask(number: int) -> None:
        for turn in range(ROUNDS // 5):
            value = 1000 * number + turn
            if not (owner.do(lambda value=value: part(lanes[number % 2], value)) == value).all():
                failures.append(f"thread {number}, turn {turn}")

    run_threads(ask, 4)
    owner.do(lambda: [lane.free() for lane in lanes])
    assert not failures, failures
    return {"threads_on_two_lanes": 4, "turns_on_two_lanes": 4 * (ROUNDS // 5)}


def two_owners(driver: Any) -> dict[str, Any]:
    """Two engines, each with a thread of its own that pushed the same primary context."""
    failures: list[str] = []

    def live(number: int) -> None:
        for turn in range(5):
            own = Owner(driver)
            lane = own.do(lambda own=own: Lane(driver, {"a": 4 * MIB}))
            own.at_end(lane.free)
            sent = np.full(MIB, 100 * number + turn, np.uint32)

            def there_and_back(lane: Lane = lane, sent: np.ndarray = sent) -> np.ndarray:
                lane.send("a", sent)
                found = lane.receive("a", sent.shape, np.uint32)
                lane.wait()
                return np.array(found)

            if not np.array_equal(own.do(there_and_back), sent):
                failures.append(f"owner {number}, turn {turn}")
            own.close()

    run_threads(live, 2)
    assert not failures, failures
    return {"owners_at_once": 2, "owners_opened": 10}


def run_threads(work: Any, count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
