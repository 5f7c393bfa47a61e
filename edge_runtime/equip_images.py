"""Which images of --data are used, under which class list: what a run adapts to, learns from, or is asked about.

How a folder is read is `data`'s and contract.image_folder's part. Classes that the server numbers come first, those
that only this device has learned behind them, so that numbers mean the same on both sides.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from contract.canonical import decode, encode, from_json, to_json
from contract.console import Progress, progress
from contract.errors import ConfigError
from edge_runtime.config import LocalConfig
from edge_runtime.data import (
    SHOWN_FILES,
    Dataset,
    class_folders,
    load_dataset,
    read_class_list,
    require_labels,
    without_labels,
)
from edge_runtime.install import Installed
from edge_runtime.state import State, read_or_set_aside, write_durably

SITE_RECORD_BYTES = 1 << 20

Purpose = Literal["adapt", "infer", "learn"]


@dataclass(frozen=True)
class SiteRecord:
    """What a prediction run needs to know of the adaptation before it."""

    classes: tuple[str, ...]


def remember_classes(state: State, classes: tuple[str, ...]) -> None:
    """Keep the class list of the adaptation. Raises: DeviceError."""
    write_durably(state.site, to_json(encode(SiteRecord(classes))))


def find_images(
    config: LocalConfig,
    purpose: Purpose,
    state: State,
    installed: Installed,
    secret: bytes,
    learned: Sequence[str],
    check_stop: Callable[[], None],
    say: Callable[[str], None],
) -> tuple[Dataset, tuple[str, ...]]:
    """The samples of --data, and the class list that the server numbers; `learned` are the classes of the head here.

    Raises: DataError; ConfigError; what `check_stop` raises.
    """
    record = read_or_set_aside(state.site, lambda data: decode(SiteRecord, from_json(data, SITE_RECORD_BYTES)), say)
    adapted = None if record is None else record.classes
    listed = installed.manifest.classes if config.classes is None else read_class_list(config.classes)
    if listed is not None:
        listed = tuple(unicodedata.normalize("NFC", name) for name in listed)  # as names of folders count
    if purpose == "adapt":
        if listed is None and adapted is not None:
            say_new(class_folders(config.data), adapted, say)
        dataset = read_folder(config, installed, secret, listed, check_stop, say)
        require_labels(dataset, config.data)
        return dataset, dataset.classes
    listed = listed or adapted
    if purpose == "learn":
        classes = grown(listed or (), class_folders(config.data))
        dataset = read_folder(config, installed, secret, classes, check_stop, say)
        require_labels(dataset, config.data)
        return dataset, dataset.classes
    listed = listed or tuple(learned)
    if not listed:
        raise ConfigError(
            "this device does not know the class list that predictions are named by",
            "adapt with this --state first (or edge-run --learn with labelled images), or give --classes FILE",
        )
    known = grown(listed, learned)
    found = grown(known, class_folders(config.data))
    if len(found) > len(known):
        strange = quoted(found[len(known) :])
        say(f"{strange} in {config.data}: no classes that are known here, their images count as unlabelled")
    dataset = read_folder(config, installed, secret, found, check_stop, say)
    dataset = without_labels(dataset, len(known))
    return dataset, dataset.classes[: len(listed)]


def read_folder(
    config: LocalConfig,
    installed: Installed,
    secret: bytes,
    classes: Sequence[str] | None,
    check_stop: Callable[[], None],
    say: Callable[[str], None],
) -> Dataset:
    """The folder under this list (None: its own class folders), with a word of each file that is no use."""
    reading: Progress[None] = progress(total=None, description="reading", unit="images")
    with reading as bar:

        def tick() -> None:
            bar.update(1)
            check_stop()

        dataset = load_dataset(config.data, classes, secret, installed.manifest.image.max_pixels, tick)
    for entry in dataset.skipped[:SHOWN_FILES]:
        say(f"skipped {entry.file}: {entry.reason}")
    if len(dataset.skipped) > SHOWN_FILES:
        say(f"skipped {len(dataset.skipped) - SHOWN_FILES} files more; the report lists them")
    return dataset


def grown(classes: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """The list, and what is new of `more` behind it."""
    return (*classes, *(name for name in more if name not in classes))


def say_new(folders: Sequence[str], adapted: Sequence[str], say: Callable[[str], None]) -> None:
    """A run that is under way keeps its classes: say so before its server refuses."""
    new = [name for name in folders if name not in adapted]
    if new:
        say(
            f"{quoted(new)}: new since this device adapted to {len(adapted)} classes, which that run keeps; for more "
            "classes start a new run on the server, or let this device alone learn them: edge-run --learn"
        )


def quoted(names: Sequence[str]) -> str:
    """Some of the names; quoted, so that a report for strangers hides them."""
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(repr(name) for name in names[:SHOWN_FILES]) + more
