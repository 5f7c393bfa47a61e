"""Where a model can be cut, and what each cut costs: tokens and bytes that go out for an image, work on the device.

Nothing is allocated and no weights are needed: the model is built on the meta device. Choosing a cut, and printing the
table, are left to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from contract.errors import ExportError
from exporter.checkpoint import create_named
from exporter.macs import layer_macs
from exporter.models import family_of
from exporter.split import usual_cut


@dataclass(frozen=True)
class Split:
    """One cut. `cut_bytes` are one image's tokens as they are sent, a byte a value; `macs` the frontend's, for one."""

    index: int
    layer: str  # the last one on the device
    output_shape: tuple[int, int]  # (T, d)
    prefix: int  # of the T tokens
    grid: tuple[int, int]  # of the others
    cut_bytes: int
    macs: int


@dataclass(frozen=True)
class Splits:
    """Every cut of a model, in order, with the one that is taken where nobody chooses."""

    model: str
    family: str
    input_shape: tuple[int, int, int]
    depth: int
    usual: int
    splits: tuple[Split, ...]


def list_splits(model_name: str, model_args: Mapping[str, object]) -> Splits:
    """Raises UsageError for a name timm does not know, ExportError for a model that cannot be made or split."""
    with torch.device("meta"):
        model = create_named(model_name, False, model_args)
    name, family = family_of(model)
    facts = family.facts(model)
    if facts.depth < 2:
        raise ExportError(f"{model_name} has one layer, and a cut lies between two", "choose a deeper model")
    frontends = [family.cut(model, k)[0] for k in range(1, facts.depth)]
    work = layer_macs(frontends[-1], facts.input_shape)
    splits = []
    for index, (frontend, layout) in enumerate(zip(frontends, family.layouts(model), strict=True), start=1):
        macs = sum(work.get(layer, 0) for layer in frontend.modules())
        splits.append(
            Split(
                index, facts.layers[index - 1], (layout.count, layout.dim), layout.prefix, layout.grid,
                layout.count * layout.dim, macs,
            )
        )  # fmt: skip
    return Splits(model_name, name, facts.input_shape, facts.depth, usual_cut(facts), tuple(splits))


def table(found: Splits) -> Sequence[str]:
    """Lines for people; `*` marks the usual cut."""
    shape = "x".join(map(str, found.input_shape))
    lines = [f"{found.model} ({found.family}), images {shape}, {found.depth} layers, * where nothing is chosen"]
    rows = [("split", "layer", "tokens", "grid", "bytes an image", "M MACs")]
    for each in found.splits:
        tokens, dim = each.output_shape
        rows.append(
            (f"{each.index}{'*' if each.index == found.usual else ' '}", each.layer, f"{tokens}x{dim}",
             f"{each.grid[0]}x{each.grid[1]}" + (f"+{each.prefix}" if each.prefix else ""), f"{each.cut_bytes}",
             f"{each.macs / 1e6:.1f}")
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) if place == 1 else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join(cells))
    return lines
