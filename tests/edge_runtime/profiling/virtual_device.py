"""A device on virtual time: work moves its clock, takes power and makes it warm; nothing waits, nothing is random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.meters import Piece, Powers, PowerTrace, Timing
from edge_runtime.profiling.measuring import Bench, Candidate, Phase, Point

IDLE_W, COOL_C = 2.0, 40.0


class VirtualDevice:
    """Its trace of power is exact: one piece for each stretch of work or rest."""

    def __init__(self, warms_c_per_j: float = 0.0, throttles_at_c: float = 1e9) -> None:
        self.now_s, self.celsius = 100.0, COOL_C
        self.trace = PowerTrace(Timing())
        self.opened: list[int] = []
        self.rested_s: list[float] = []
        self.throttled = 0
        self.progress_s = 0.0
        self.looks_s: list[float] = []
        self._warms, self._throttles_at_c = warms_c_per_j, throttles_at_c

    def spend(self, seconds: float, watts: float) -> None:
        self.trace.add(Piece(self.now_s, self.now_s + seconds, watts, watts))
        self.now_s += seconds
        self.celsius += self._warms * (watts - IDLE_W) * seconds
        if watts == IDLE_W:
            self.celsius -= min(1.0, seconds / 10.0) * (self.celsius - COOL_C)
        self.throttled += self.celsius >= self._throttles_at_c

    def rest(self, seconds: float) -> None:
        self.rested_s.append(seconds)
        self.spend(seconds, IDLE_W)

    def watch(self) -> Callable[[], tuple[str, ...]]:
        before = self.throttled
        return lambda: ("it slowed down",) if self.throttled > before else ()

    def bench(self, knows_heat: bool = True) -> Bench:
        return Bench(
            lambda: self.now_s, self.rest, lambda: self.celsius if knows_heat else None, self.watch, self.advance,
            self.look,
        )  # fmt: skip

    def look(self) -> None:
        self.looks_s.append(self.now_s)

    def advance(self, seconds: float) -> None:
        self.progress_s += seconds

    def powers(self, began_s: float, ended_s: float) -> Powers | None:
        return self.trace.powers(began_s, ended_s)

    def candidate(
        self, split: int, costs: Sequence[tuple[str, float, float]], images: int = 2, up: int = 100, down: int = 0
    ) -> Candidate:
        """`costs`: of each phase its name, and seconds and watts of the whole work as far as its end."""

        def phase(name: str, parts: Sequence[tuple[str, float, float]]) -> Phase:
            def run() -> int:
                for _, seconds, watts in parts:
                    self.spend(seconds, watts)
                return images

            return Phase(name, run)

        def open_phases() -> Sequence[Phase]:
            self.opened.append(split)
            return [phase(name, costs[: number + 1]) for number, (name, _, _) in enumerate(costs)]

        point = Point("tiny", "tiny", "ab" * 32, split, 4, "w8a8", "fake 1", 1, images, up, down)
        return Candidate(point, tuple(name for name, _, _ in costs), open_phases)
