"""Settings of a leakage-gated export, and the gate that they ask for; the other settings are exporter.cli's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contract.config import Field, Resolved
from contract.errors import UsageError
from exporter.gate_choice import read_limits
from exporter.gate_plan import ATTACKS, GatePlan, sent_of, strengths_of
from exporter.plan import ExportPlan

GATE_FIELDS = (
    Field(
        "max_leakage",
        tuple,
        (),
        "try every cut, precision, choice of patches and noise that is not fixed, and export the most accurate one of "
        "which the strongest attack reads less, such as ssim<0.35; also psnr and fsim, may be given several times",
    ),  # fmt: skip
    Field("max_energy", float, None, "joules an image that a device may take; needs --energy-table"),
    Field(
        "energy_table",
        Path,
        None,
        "what edge-profile measured of this model's splits on a device, with its -o",
        reads="file",
    ),
    Field("profile", str, None, "device profile, or its file, with whose watts joules are modelled from that table"),
    Field("gate_attacks", tuple, ATTACKS, "attacks of leakage-profile that judge, with commas between"),
    Field("gate_steps", int, None, "steps of each attack; default: the attack's own"),
    Field("gate_images", int, None, "public images to attack; default: leakage-profile's own number"),
)


def make_gate(settings: Resolved, is_auto: bool, cuts: tuple[int, ...]) -> Callable[[ExportPlan], GatePlan] | None:
    """How the gate of a plan is made; None where none was asked for. No cuts: all are tried.

    Raises: UsageError.
    """
    values, origin = settings.values, settings.origin
    limits = read_limits(values["max_leakage"])
    if not limits and not is_auto:
        idle = [f"--{field.name.replace('_', '-')}" for field in GATE_FIELDS if origin[field.name] != "default"]
        if idle:
            raise UsageError(
                f"{idle[0]} was given, but no limit of what leaks", "add for example --max-leakage 'ssim<0.35'"
            )
        return None
    return lambda plan: GatePlan(
        limits, values["max_energy"], None if values["energy_table"] is None else str(values["energy_table"]),
        values["profile"], values["gate_attacks"], values["gate_steps"], values["gate_images"], cuts,
        (values["int8"],) if origin["int8"] != "default" else (True, False),
        sent_of(plan, origin["sent_patches"] != "default"), strengths_of(plan, origin["kappa"] != "default"),
    )  # fmt: skip
