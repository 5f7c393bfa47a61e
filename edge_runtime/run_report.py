"""What is known at the end of a run, gathered into its report; what was answered is added by `answering`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from contract.messages import Welcome
from edge_runtime.answering import local_figures
from edge_runtime.client import Traffic
from edge_runtime.equip import Equipment
from edge_runtime.releases import account, summary
from edge_runtime.report import Report, peak_rss_mb
from edge_runtime.stages import StageCost
from edge_runtime.throttle import SlowdownWatch


@dataclass(frozen=True)
class Talk:
    """What the conversation with the server cost; nothing where there was none."""

    traffic: Traffic
    sent_again: int = 0
    sent_again_most: int = 0
    round_trips: int = 0


def make_report(
    equipment: Equipment, outcome: str, welcome: Welcome | None, talk: Talk, watch: SlowdownWatch
) -> Report:
    """Everything that is known at the end, predictions aside."""
    counters, costs, manifest = equipment.worker.counters, equipment.stages.costs(), equipment.installed.manifest
    dataset, config = equipment.dataset, equipment.config
    names = {sample.sample_id: sample.relative for sample in dataset.samples}
    spent = equipment.stages.total() if costs else StageCost(0.0, None, reason="no stage was run")
    return Report(
        outcome=outcome,
        run=welcome.run if welcome else None,
        images=len(dataset.samples),
        classes=len(dataset.classes),
        class_counts=dataset.class_counts(),
        skipped=tuple(asdict(entry) for entry in dataset.skipped),
        duplicates=tuple(asdict(entry) for entry in dataset.duplicates),
        ignored=dataset.ignored,
        bytes_sent_payload=counters.payload_bytes,
        bytes_per_image=counters.payload_bytes / counters.images if counters.images else None,
        bytes_on_wire=talk.traffic.sent_bytes,
        bytes_received=talk.traffic.received_bytes,
        connections=talk.traffic.connections,
        messages_sent_again=talk.sent_again,
        sent_again_most=talk.sent_again_most,
        round_trips=talk.round_trips,
        codes_changed=equipment.codes_changed,
        saturated=counters.saturated / counters.codes if counters.codes else None,
        stages_s={name: cost.seconds for name, cost in costs.items()},
        stages_energy_j={name: cost.energy_j for name, cost in costs.items()},
        stages_energy_bound_j={name: cost.bound_j for name, cost in costs.items()},
        energy_j=spent.energy_j,
        energy_bound_j=spent.bound_j,
        energy_per_upload_j=per_upload(spent.energy_j, talk.round_trips),
        energy_per_upload_bound_j=per_upload(spent.bound_j, talk.round_trips),
        energy_reason=spent.reason,
        energy_scope=None if spent.energy_j is None else equipment.stages.scope,
        mean_power_w=spent.mean_w,
        peak_power_w=spent.peak_w,
        peak_window_s=spent.peak_window_s,
        slowed_down=tuple(asdict(flag) for flag in watch.flags()),
        engine=equipment.engine.name,
        engine_fallback=equipment.choice.fallback_reason,
        threads=equipment.engine.threads,
        int8_layers=equipment.engine.int8_layers,
        linear_layers=equipment.engine.linear_layers,
        plans=equipment.engine.plans,
        int8_lost=equipment.engine.int8_lost,
        golden_snr_db=equipment.installed.golden_snr_db,
        label_mode=equipment.terms.label_mode,
        kappa=welcome.kappa if welcome else None,
        sigma=counters.sigma,
        alpha=equipment.terms.alpha,
        noise=equipment.config.noise,
        package=manifest.name,
        package_version=manifest.version,
        package_digest=equipment.installed.digest.hex(),
        peak_rss_mb=peak_rss_mb(),
        released=summary(account(equipment.ledger, names, config.max_releases, config.max_patch_share)),
        local=local_figures(equipment),
    )


def per_upload(joules: float | None, uploads: int) -> float | None:
    """None where joules are unknown or there was no upload."""
    return joules / uploads if joules is not None and uploads else None
