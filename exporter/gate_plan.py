"""What a leakage-gated export is to try, and within which limits: pure.

What is fixed on the command line is fixed, what is left open is swept: cut, precision, which patches are sent, strength
of the noise. Measuring is exporter.gate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.errors import UsageError
from contract.tokens import KEPT, Kept, TokenLayout
from exporter.gate_choice import Limit
from exporter.gate_energy import how_to_know_joules
from exporter.plan import ExportPlan
from exporter.statistics import check_sent

STRENGTHS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5)
ATTACKS = ("ridge", "inverse_net")


@dataclass(frozen=True)
class GatePlan:
    """Limits, who attacks how hard, and what is swept; no cuts: every one of the model."""

    limits: tuple[Limit, ...]
    max_energy_j: float | None
    energy_table: str | None
    profile: str | None
    attacks: tuple[str, ...]
    steps: int | None  # None: each attack's own
    images: int | None  # attacked; None: leakage-profile's own
    cuts: tuple[int, ...]
    precisions: tuple[bool, ...]  # INT8 or not
    sent: tuple[Kept, ...]
    strengths: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.limits:
            raise UsageError(
                "--split auto chooses by what leaks, and no limit of that was given",
                "add for example --max-leakage 'ssim<0.35', or name the cut with --split N",
            )
        if self.max_energy_j is not None and not self.max_energy_j > 0:
            raise UsageError(f"--max-energy should be more than 0 J, found {self.max_energy_j:g}", "correct it")
        if self.max_energy_j is not None and self.energy_table is None:
            raise UsageError(
                f"--max-energy {self.max_energy_j:g} was given, and the energy of every split is unknown",
                how_to_know_joules(),
            )
        for name, count in (("--gate-steps", self.steps), ("--gate-images", self.images)):
            if count is not None and count < 1:
                raise UsageError(f"{name} should be 1 or more, found {count}", "correct it")
        if not self.attacks:
            raise UsageError("--gate-attacks names no attack", "leave it out, or name one such as inverse_net")


def strengths_of(plan: ExportPlan, is_fixed: bool) -> tuple[float, ...]:
    """The strengths to try: the plan's own where it was chosen, else a grid up to the strongest that it allows."""
    if is_fixed:
        return (plan.kappa,)
    return tuple(sorted({each for each in STRENGTHS if each <= plan.kappa_max} | {plan.kappa_max}))


def sent_of(plan: ExportPlan, is_fixed: bool) -> tuple[Kept, ...]:
    """Which patches to send: as chosen, else every rule."""
    return (plan.sent_patches,) if is_fixed else KEPT


def candidates(plan: ExportPlan, gate: GatePlan, layouts: Sequence[TokenLayout]) -> list[ExportPlan]:
    """One export for each cut, precision and choice of patches, without decoders for a preview, which only what is
    published needs; all strengths of one are measured on it.

    `layouts` are the tokens at every cut of the model. Where a sweep would leave out patches that nothing can fill in,
    it does not.

    Raises: UsageError for a cut that the model does not have, or patches that cannot be left out there.
    """
    depth = len(layouts) + 1
    cuts = gate.cuts or tuple(range(1, depth))
    for cut in cuts:
        if not 1 <= cut < depth:
            left = "the device" if cut < 1 else "the server"
            raise UsageError(
                f"cut {cut} leaves nothing to {left}: the model has {depth} layers", f"cuts are 1 to {depth - 1}"
            )
        if len(gate.sent) == 1:
            check_sent(layouts[cut - 1], gate.sent[0])
    return [
        replace(plan, split=cut, int8=int8, sent_patches=sent, kappa=min(gate.strengths), preview=False)
        for cut in cuts
        for int8 in gate.precisions
        for sent in gate.sent
        if _can_send(layouts[cut - 1], sent)
    ]


def _can_send(layout: TokenLayout, sent: Kept) -> bool:
    try:
        check_sent(layout, sent)
    except UsageError:
        return False
    return True
