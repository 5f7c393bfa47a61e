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
from exporter.plan import ExportPlan

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
                "measure the splits on the device (edge-profile -o table.json) and add --energy-table table.json",
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


def candidates(plan: ExportPlan, gate: GatePlan, layouts: Sequence[TokenLayout], patches_most: int) -> list[ExportPlan]:
    """One export for each cut, precision and choice of patches; all strengths of one are measured on it.

    `layouts` are the tokens at every cut of the model. Where a sweep would leave out patches that nothing can fill in
    (more than `patches_most`, or no class token to tell of them), it does not.

    Raises: UsageError for a cut that the model does not have.
    """
    depth = len(layouts) + 1
    cuts = gate.cuts or tuple(range(1, depth))
    beyond = [cut for cut in cuts if cut >= depth]
    if beyond:
        raise UsageError(
            f"cut {beyond[0]} leaves nothing to the server: the model has {depth} layers", f"cuts are 1 to {depth - 1}"
        )
    return [
        replace(plan, split=cut, int8=int8, sent_patches=sent, kappa=min(gate.strengths))
        for cut in cuts
        for int8 in gate.precisions
        for sent in gate.sent
        if len(gate.sent) == 1 or _can_send(layouts[cut - 1], sent, patches_most)
    ]


def _can_send(layout: TokenLayout, sent: Kept, patches_most: int) -> bool:
    return sent == "all" or (layout.patches <= patches_most and (sent != "none" or layout.prefix > 0))
