"""The device's answer to the server's question for a split: its own tables, kept true by what its turns really took.

The rules are `choose_split`'s. After every turn the energy that the meter told is held against the table: where it left
it by 10 % and by more than the meter may be wrong, or where the device slowed itself down, the whole table is measured
anew (`remeasure`) if it may be, else corrected where it was found wrong, and the choice made anew. Without a meter the
table is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.errors import ConfigError, RemoteProtocolError
from contract.messages import Ask, Choice
from contract.privacy_table import PrivacyTable
from edge_runtime.choose_split import (
    InfeasibleError,
    Offer,
    Preferences,
    SplitCost,
    choose_by_delay,
    choose_by_sum,
    choose_split,
    corrected,
)
from edge_runtime.profiling.rows import Row
from edge_runtime.profiling.table import read_table

NONE = 0  # what is answered where no split will do
REMEASURED_APART = 10  # turns: one that a short measuring cannot foresee is not measured after every turn


@dataclass(frozen=True)
class Spent:
    """What training took so far: joules (None: unknown) within +- `bound_j`, images, and what slowed it down."""

    energy_j: float | None = None
    bound_j: float = 0.0
    images: int = 0
    slowed_down: frozenset[str] = frozenset()


def read_costs(path: Path, model: str, package_digest: str) -> tuple[SplitCost, ...]:
    """The costs of this model's parts from a table of `edge-profile --train -o`; rows of this very package where there
    are some.

    The link's energy and time count where every row has them: a sum with them is not compared with one without.
    Raises: ConfigError.
    """
    rows = read_rows(path, model, package_digest)
    has_link = all(row.total_j is not None for row in rows)
    is_timed = all(row.away is not None for row in rows)
    return tuple(_cost(row, has_link, is_timed) for row in rows)


def read_rows(path: Path, model: str, package_digest: str) -> list[Row]:
    """The rows of this model's trained parts, by split; those of this very package where there are some.

    Raises: ConfigError.
    """
    table = read_table(path)
    rows = [row for row in table.rows if row.point.model == model] if table.work == "training" else []
    rows = [row for row in rows if row.point.package_digest == package_digest] or rows
    if not rows:
        raise ConfigError(
            f"{path} has no row of a trained part of {model}", "measure this package: edge-profile --train -o FILE"
        )
    return sorted(rows, key=lambda row: row.point.split)


def _cost(row: Row, has_link: bool, is_timed: bool) -> SplitCost:
    measured_j = None if row.energy is None else row.energy.measured_j.mean
    energy_j = row.total_j if has_link else measured_j
    link_j = energy_j - measured_j if energy_j is not None and measured_j is not None else 0.0
    power = None if row.energy is None else row.energy.power
    away_s = row.away.seconds if is_timed and row.away is not None else 0.0
    time_s = row.seconds_per_image.mean + away_s
    return SplitCost(row.point.split, energy_j, None if power is None else power.peak_w, time_s, link_j, away_s)


class OwnChoice:
    """Answers `choose_split`."""

    def __init__(
        self,
        costs: Sequence[SplitCost],
        wishes: Preferences,
        say: Callable[[str], None],
        spent: Callable[[], Spent] = Spent,
        signed: PrivacyTable | None = None,
        remeasure: Callable[[Sequence[SplitCost]], Sequence[SplitCost]] | None = None,
    ) -> None:
        """`spent` tells what training took since the program began; `signed` is the leakage table of the package;
        `remeasure` makes a table that is no longer true anew, None where it may not be."""
        self._costs, self._wishes, self._say, self._spent, self._signed = tuple(costs), wishes, say, spent, signed
        self._remeasure, self._turns = remeasure, REMEASURED_APART  # since the table was measured
        self._before = spent()
        self._last = NONE  # what was chosen last
        self._chosen: dict[int, int] = {}  # by round

    def answer(self, ask: Ask) -> Choice:
        """The split that this device wants, `NONE` where it accepts none; why stays here.

        Raises: RemoteProtocolError for tables that are none; ConfigError where this device cannot choose.
        """
        if not self._costs and self._wishes.split is None:
            raise ConfigError(
                "the server asks which split this device chooses, and it has no energy table to choose by",
                "measure with edge-profile --train -o FILE and set energy_table, or set split to choose by hand",
            )
        self._correct()
        rule, number, offer = str(ask.parameters["rule"]), int(ask.parameters["round"]), self._read(ask)
        try:
            chosen = self._choose(rule, number, offer, ask)
        except InfeasibleError as error:
            self._say(f"no split will do: {error}")
            chosen = NONE
        if chosen not in (NONE, self._last):
            self._say(f"split {chosen} is chosen" + (f", it was {self._last}" if self._last else ""))
        self._last = self._chosen[number] = chosen
        return Choice(ask.ask, chosen)

    def _choose(self, rule: str, number: int, offer: Offer, ask: Ask) -> int:
        if rule == "p3sl":
            return choose_split(offer, self._costs, self._wishes)
        if rule == "asl":
            earlier = [split for before, split in sorted(self._chosen.items()) if before < number]
            return choose_by_delay(offer, self._costs, self._wishes, earlier)
        if rule == "ares":
            return choose_by_sum(offer, self._costs, self._wishes)
        raise RemoteProtocolError(f"ask {ask.ask}: there is no rule {rule!r}", "update the device's software")

    def _correct(self) -> None:
        """Hold the turn that just ended against the table."""
        now, before = self._spent(), self._before
        self._before, images = now, now.images - before.images
        if self._last == NONE or images <= 0:
            return
        self._turns += 1
        measured_j = None
        if now.energy_j is not None and before.energy_j is not None:
            here = next((cost for cost in self._costs if cost.split == self._last), SplitCost(self._last, None))
            measured_j = (now.energy_j - before.energy_j) / images + here.link_j
            if here.energy_j is not None and abs(measured_j - here.energy_j) <= (now.bound_j - before.bound_j) / images:
                measured_j = None  # the meter cannot tell the two apart
        slowed_down = bool(now.slowed_down - before.slowed_down)
        costs = corrected(self._costs, self._last, measured_j, slowed_down)
        is_left = costs != self._costs or slowed_down
        if is_left and self._remeasure is not None and self._turns >= REMEASURED_APART:
            self._say(f"the turn at split {self._last} was not as the energy table says: it is measured anew")
            costs = corrected(self._remeasure(self._costs), self._last, None, slowed_down)
            self._turns = 0
        elif costs != self._costs:
            self._say(f"the turn at split {self._last} was not as the energy table says: it is corrected")
        self._costs = costs

    def _read(self, ask: Ask) -> Offer:
        tensors = ask.tensors
        splits = tuple(int(each) for each in tensors["splits"])
        try:
            rows = tuple(tuple(float(value) for value in row) for row in tensors["leakage"])
            privacy = PrivacyTable(splits, tuple(float(each) for each in tensors["strengths"]), rows)
        except ValueError as error:
            raise RemoteProtocolError(f"ask {ask.ask}: no leakage table: {error}", "update the server") from error
        if self._signed is not None:
            privacy = self._held_against(privacy, self._signed, ask)
        return Offer(privacy, dict(zip(splits, (float(each) for each in tensors["sigma"]), strict=True)))

    def _held_against(self, told: PrivacyTable, signed: PrivacyTable, ask: Ask) -> PrivacyTable:
        """The publisher's word counts: a server may not play down what leaks."""
        same = told.splits == signed.splits and told.strengths == tuple(map(_single, signed.strengths))
        if not same or not np.allclose(told.as_array(), signed.as_array(), atol=1e-6):
            raise RemoteProtocolError(
                f"ask {ask.ask}: the leakage table is not the one that is signed with the package",
                "give the server the backend folder that belongs to this package",
            )
        return told


def _single(value: float) -> float:
    return float(np.float32(value))
