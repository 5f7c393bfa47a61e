"""How far a build is, from the nested phases that TensorRT tells of, and how long the rest may take."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


@dataclass
class Phases:
    """The phases under way, by name; a phase inside another is a part of one of its steps."""

    _open: dict[str, _Phase] = field(default_factory=dict)
    _best: float = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._open[name] = _Phase(parent, max(1, steps))

    def step(self, name: str, number: int) -> None:
        """Step `number` (from 0) is over."""
        if name in self._open:
            self._open[name].done = max(self._open[name].done, number + 1)

    def finish(self, name: str) -> None:
        self._open.pop(name, None)

    @property
    def fraction(self) -> float:
        """Share of the work that is done, in 0..1; it never goes back."""
        roots = [name for name, phase in self._open.items() if phase.parent not in self._open]
        if roots:
            self._best = max(self._best, self._share(roots[0]))
        return self._best

    def _share(self, name: str) -> float:
        phase = self._open[name]
        inner = max((self._share(other) for other, each in self._open.items() if each.parent == name), default=0.0)
        return min(1.0, (phase.done + inner) / phase.steps)


def remaining_s(elapsed_s: float, fraction: float) -> float | None:
    """Seconds that are left if the rest goes as the part before; None while that is too small a part to tell."""
    return elapsed_s * (1.0 - fraction) / fraction if fraction >= 0.02 else None
