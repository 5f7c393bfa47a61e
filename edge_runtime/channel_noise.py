"""Whether the noise of single channels falls from one package's first cut to another's; pure, by the manifests alone.

`kappa` is in units of a standard deviation that each channel declares (`contract.tokens.noise_scales`). A package that
declares a smaller one gets less noise under the same kappa, so the declarations are compared:

* with the range that is declared beside it, which bounds what leaves. It needs no common scale, so it holds between any
  two packages, where these are of other models or cuts from the least channel of one to the least of the other;
* as it is, where model and cut are the same, so that a channel is the same thing in both.

What is declared is not held against what the frontend computes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from contract.manifest import Cut
from contract.tokens import kept_patches

# Two honest exports that were looked at differ by 0.57 to 1.44 in a channel, and by 0.85 on the whole (rises counted).
# From a few pictures a class token's deviation is too rough a guess to be compared.
CHANNEL_LEAST, WHOLE_LEAST = 0.5, 0.75

Doubles = NDArray[np.float64]


def fallen_noise(new: Cut, old: Cut, same_channels: bool) -> Iterator[str]:
    """What falls too far, in words. `same_channels`: both are of one model."""
    same = same_channels and (new.index, new.depth, new.tokens.dim) == (old.index, old.depth, old.tokens.dim)
    if new.tokens.prefix:
        yield from _fallen("prefix", _prefix(new), _prefix(old) if old.tokens.prefix else _patch(old), same)
    if len(kept_patches(new.tokens.grid, new.sent.kept)):
        yield from _fallen("patch", _patch(new), _patch(old), same)


def _fallen(tokens: str, new: tuple[Doubles, Doubles], old: tuple[Doubles, Doubles], same: bool) -> Iterator[str]:
    pairs = [(" beside its range", _of_range(*new), _of_range(*old))]
    if same:
        pairs.append(("", new[0], old[0]))
    for beside, after, before in pairs:
        shares = _shares(after, before, same)
        if not shares.size:
            continue
        worst, whole = shares.min(), np.exp(np.log(np.maximum(shares, np.finfo(np.float64).tiny)).mean())
        if worst < CHANNEL_LEAST:
            yield f"a channel of the {tokens} tokens with {worst:.0%} of its noise before{beside}"
            return
        if whole < WHOLE_LEAST:
            yield f"the channels of the {tokens} tokens with {whole:.0%} of their noise before{beside}"
            return


def _shares(after: Doubles, before: Doubles, same: bool) -> Doubles:
    """What each channel keeps of its noise; those that had none before cannot lose it."""
    if not same:
        places = np.linspace(0.0, 1.0, max(len(after), len(before)))
        after, before = np.quantile(after, places), np.quantile(before, places)
    had = before > 0.0
    with np.errstate(over="ignore"):
        kept: Doubles = np.minimum(after[had] / before[had], 1.0)  # what rises pays for nothing that falls
    return kept


def _of_range(sigma: Doubles, absmax: Doubles) -> Doubles:
    """Without a range the channel gets no finer than its noise, at most all of it; without either it gets no noise."""
    with np.errstate(over="ignore"):
        of_range: Doubles = np.minimum(sigma / np.maximum(absmax, np.finfo(np.float64).tiny), 1.0)
    return of_range


def _prefix(cut: Cut) -> tuple[Doubles, Doubles]:
    return np.array(cut.statistics.sigma_prefix), np.array(cut.statistics.absmax_prefix)


def _patch(cut: Cut) -> tuple[Doubles, Doubles]:
    return np.array(cut.statistics.sigma_patch), np.array(cut.statistics.absmax_patch)
