"""The report of one edge-run as values, and as JSON document, CSV or table.

Pure but for the peak of this process's memory. Energy and file names are in it because it stays on the device.
"""

from __future__ import annotations

import csv
import io
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from edge_runtime.local_record import Compared
from edge_runtime.predictions import Prediction


@dataclass(frozen=True)
class LocalFigures:
    """The head that answers here without a server; `reason` says why there is none."""

    images: int = 0  # that it learned from
    classes: int = 0
    held_out_accuracy: float | None = None  # on images of these that were left out in turn; None: no class has two
    held_out_images: int = 0
    compared: Compared | None = None  # with the server, when it was asked last about labelled images new to the head
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """What a run did; None is unknown, never 0."""

    outcome: str
    run: str | None
    images: int
    classes: int
    class_counts: tuple[int, ...]
    skipped: tuple[dict[str, str], ...]
    duplicates: tuple[dict[str, str], ...]
    ignored: int
    bytes_sent_payload: int
    bytes_per_image: float | None
    bytes_on_wire: int  # sent; all messages, handshakes and repetitions included
    bytes_received: int
    connections: int
    messages_sent_again: int  # of the spool, over all reconnections of this process
    sent_again_most: int  # after one reconnection: never more than the credit window
    round_trips: int  # asks of the server that this device answered in whole
    codes_changed: float | None  # None: the package has parts to be trained, and no noise acts on them
    saturated: float | None
    stages_s: dict[str, float]
    stages_energy_j: dict[str, float | None]
    stages_energy_bound_j: dict[str, float | None]  # the truth is within so many joules of the figure
    energy_j: float | None  # of the time in which any stage ran; stages may overlap
    energy_bound_j: float | None
    energy_per_upload_j: float | None  # for each ask of the server that was answered in whole, all stages together
    energy_per_upload_bound_j: float | None
    energy_reason: str | None
    energy_scope: str | None  # meter, and what it sees; None where energy is unknown
    mean_power_w: float | None
    peak_power_w: float | None
    peak_window_s: float | None  # the peak is one over so long: what the sensor averages
    slowed_down: tuple[dict[str, str], ...]  # what the device said of heat or a weak supply: not comparable then
    engine: str
    engine_fallback: str | None
    threads: int
    int8_layers: int | None
    linear_layers: int | None
    plans: tuple[str, ...]  # what was measured of each TensorRT plan that was built for this frontend
    int8_lost: str | None  # why fewer layers ran as int8 than were quantized; None: none was lost, or nobody can tell
    golden_snr_db: float | None  # None: equal to the last bit
    label_mode: str
    kappa: float | None
    alpha: float
    noise: str
    sigma: float  # of the noise at the cut of a part that is trained here
    package: str
    package_version: int
    package_digest: str
    peak_rss_mb: float
    released: str | None = None  # what of these images has ever left this device, in words
    local: LocalFigures | None = None
    link_down: str | None = None  # why the server did not answer all images that it was asked about
    predictions: tuple[Prediction, ...] | None = None
    accuracy: float | None = None  # of the answers as they were given, whoever gave them


def document(report: Report) -> dict[str, object]:
    """The fields of the JSON document; predictions and accuracy only where there are predictions."""
    fields = asdict(report)
    if report.predictions is None:
        del fields["predictions"], fields["accuracy"]
    return fields


def to_csv(report: Report) -> str:
    """Predictions one a line, or the report's single figures as one line under their names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if report.predictions is not None:
        writer.writerow(("file", "class", "probability", "answered_by"))
        writer.writerows(
            (each.file, each.class_name, f"{each.probability:.6f}", each.answered_by) for each in report.predictions
        )
    else:
        single = {name: value for name, value in document(report).items() if not isinstance(value, (dict, tuple, list))}
        writer.writerow(single)
        writer.writerow("" if value is None else value for value in single.values())
    return text.getvalue()


def to_table(report: Report) -> str:
    """For a person on a terminal."""
    lines = [f"{name:<16} {value}" for name, value in table_rows(report)]
    for entry in report.skipped:
        lines.append(f"{'skipped':<16} {entry['file']}: {entry['reason']}")
    for entry in report.duplicates:
        lines.append(f"{'duplicate':<16} {entry['file']} has the pixels of {entry['same_as']}")
    if report.predictions is not None:
        width = max((len(each.file) for each in report.predictions), default=4)
        lines += ["", f"{'file':<{width}}  probability  by      class"]
        lines += [
            f"{each.file:<{width}}  {each.probability:11.3f}  {each.answered_by:<6}  {each.class_name}"
            for each in report.predictions
        ]
    return "\n".join(lines) + "\n"


def local_rows(local: LocalFigures) -> Iterable[tuple[str, str]]:
    """How good answers without a server are."""
    if local.reason is not None:
        yield "answers alone", f"no: {local.reason}"
        return
    learned = f"{local.images} images of {local.classes} classes"
    if local.held_out_accuracy is None:
        yield "answers alone", f"learned from {learned}; accuracy unknown, as no class has two images"
    else:
        yield "answers alone", f"{local.held_out_accuracy:.1%} of {local.held_out_images} left out, from {learned}"
    if local.compared is not None:
        both = local.compared
        yield "", f"last compared on {both.images} new images: server {both.server:.1%}, alone {both.local:.1%}"


def table_rows(report: Report) -> Iterable[tuple[str, str]]:
    """Label and text of each line of the summary."""
    yield "outcome", f"{report.outcome}{f' (run {report.run})' if report.run else ''}"
    left_out = f"{len(report.skipped)} skipped, {len(report.duplicates)} duplicates"
    yield "images", f"{report.images} of {report.classes} classes, {left_out}"
    if report.accuracy is not None:
        yield "accuracy", f"{report.accuracy:.1%} of the answers below"
    if report.link_down is not None:
        yield "link down", report.link_down
    if report.local is not None:
        yield from local_rows(report.local)
    yield "package", f"{report.package} version {report.package_version} ({report.package_digest[:12]})"
    trains = report.linear_layers is None
    kernels = f"int8 in {shown(report.int8_layers)} of {report.linear_layers} linear layers"
    at_once = f"{report.threads} {'images at once' if report.plans else 'threads'}"
    yield "engine", f"{report.engine}, {at_once}, {'float32 training' if trains else kernels}"
    yield from (("", text) for text in (report.int8_lost, report.engine_fallback, *report.plans) if text)
    yield "labels", report.label_mode
    if report.sigma > 0.0:
        yield "noise", f"{report.noise}, sigma {report.sigma:g} at the cut"
    elif report.codes_changed is None:
        yield "noise", "none: this package trains without feature or weight noise"
    else:
        changed = f"{report.codes_changed:.1%} of weight codes changed"
        yield "noise", f"{report.noise}, kappa {shown(report.kappa)}, alpha {report.alpha} ({changed})"
    if report.released is not None:
        yield "released", report.released
    per_image = "" if report.bytes_per_image is None else f", {report.bytes_per_image:.0f} bytes per image"
    yield (
        "upload",
        f"{report.bytes_sent_payload} bytes of {'activations' if trains else 'features'}{per_image}, "
        f"{report.bytes_on_wire} bytes on the wire",
    )
    yield (
        "traffic",
        f"{report.bytes_on_wire} bytes sent, {report.bytes_received} received, "
        f"{report.round_trips} round trips, {report.connections} connections, "
        f"{report.messages_sent_again} messages sent again",
    )
    yield "time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.stages_s.items()) or "-"
    yield from energy_rows(report)
    for flag in report.slowed_down:
        yield "slowed down", f"{flag['name']}: {flag['words']}"
    yield "memory", f"{report.peak_rss_mb:.0f} MB at most"


def energy_rows(report: Report) -> Iterable[tuple[str, str]]:
    """Energy with its bound, power with the window of its peak."""
    if report.energy_j is None:
        yield "energy", f"unknown: {report.energy_reason}"
        return
    yield "energy", f"{joules(report.energy_j, report.energy_bound_j)} ({report.energy_scope})"
    each = [
        f"{name} {joules(energy_j, report.stages_energy_bound_j.get(name))}"
        for name, energy_j in report.stages_energy_j.items()
    ]
    yield "", ", ".join(each)
    if report.energy_per_upload_j is not None and report.round_trips > 1:
        yield "", f"{joules(report.energy_per_upload_j, report.energy_per_upload_bound_j)} for each of the uploads"
    if report.energy_reason:
        yield "", report.energy_reason
    if report.mean_power_w is not None and report.peak_power_w is not None and report.peak_window_s is not None:
        over = f"over {report.peak_window_s * 1e3:.0f} ms" if report.peak_window_s else "in one conversion"
        yield "power", f"{report.mean_power_w:.2f} W mean, {report.peak_power_w:.2f} W peak {over}"


def joules(energy_j: float | None, bound_j: float | None) -> str:
    """Energy and its bound; one that is as wide as the figure says that the stage was too short to be measured."""
    if energy_j is None or bound_j is None:
        return "unknown"
    too_short = ", too short to tell" if bound_j >= energy_j > 0.0 else ""
    return f"{energy_j:.1f} J \N{PLUS-MINUS SIGN} {bound_j:.1f}{too_short}"


def shown(value: object) -> str:
    """A figure, or "unknown"."""
    return "unknown" if value is None else str(value)


def peak_rss_mb() -> float:
    """The most memory this process ever held, in MB of 10^6 bytes."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / 1e6
