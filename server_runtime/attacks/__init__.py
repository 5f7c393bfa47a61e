"""What an attack is, and the door to the attacks: the folder is the registry, a file's name is its name.

An attacker here is a curious server: it knows the package, the law of every noise and public images, but no secret and
no draw. What devices send under which law is `_release`'s part, measuring what an attack gives `leakage`'s.

Shapes: n images (n, 3, h, w) in [0, 1]; clean tokens (n, T, d); S of the T tokens are sent; C classes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from contract.errors import UsageError, suggest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ._release import Release

Finds = Literal["images", "labels", "members"]


def _ignore(steps: int) -> None:
    """Progress that nobody watches."""


def _never() -> bool:
    """Time that does not run out."""
    return False


@dataclass(frozen=True)
class Effort:
    """How hard an attack tries: `steps` of optimisation (None: the attack's own default), told one by one.

    `time_is_over` is asked between the steps of a trained decoder, which then ends with the best it has.
    """

    steps: int | None = None
    seed: int = 0
    on_steps: Callable[[int], object] = _ignore
    time_is_over: Callable[[], bool] = _never


@dataclass(frozen=True)
class Pairs:
    """Public images, and clean tokens of them (each (n, T, d), any float type).

    Several entries of `tokens` are several frontends: weight noises that the attacker drew, or the weights of several
    epochs. `places` (n, K): which patches the tokens behind the prefix stand for, where the frontend saw only those.
    """

    images: Tensor
    tokens: tuple[Tensor, ...] = ()
    places: Tensor | None = None


@dataclass(frozen=True)
class Known:
    """What the attacker knows before it looks: pairs to learn from, pairs to choose on, and the law of the release.

    `client` maps images to tokens (n, T, d) with the weights that the attacker believes in; `trained` maps images to
    logits (n, C), or to values at the cut, with the weights that a device started from.
    """

    learn: Pairs
    held: Pairs
    release: Release
    client: nn.Module | None = None
    trained: nn.Module | None = None


@dataclass(frozen=True)
class Upload:
    """What the server decoded of n images: (n, S, d), released at `strength`; `places` as in `Pairs`."""

    received: Tensor
    strength: float = 0.0
    places: Tensor | None = None


@dataclass(frozen=True)
class Update:
    """What local training on `count` images did to a model: SGD of `steps` whole-batch steps at `rate`, from
    `Known.trained`; devices tell the count in every mode.

    `delta` is after minus before, by parameter name. The loss is the mean cross-entropy with `labels` (count,),
    None where unknown, or, for a part of a model, the sum of the values at the cut times `at_cut`, the gradient
    that the server itself sent.
    """

    delta: Mapping[str, Tensor]
    count: int
    rate: float
    steps: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    labels: Tensor | None = None
    at_cut: Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """What the server received of n images; an attack takes what its NEEDS names and leaves the rest.

    `uploads` are those of the same images, oldest first. `logit_gradients` (n, C) are per sample, in any scale above 0.
    `ids` are the names of samples on the wire; `suspects` the pixel digests (32 bytes) that the attacker asks about,
    `guessed_keys` the device secrets that it tries.
    """

    uploads: tuple[Upload, ...] = ()
    logit_gradients: Tensor | None = None
    update: Update | None = None
    ids: tuple[bytes, ...] = ()
    suspects: tuple[bytes, ...] = ()
    guessed_keys: tuple[bytes, ...] = ()


class Attack(Protocol):
    """One attack. `fit` learns from what is known; `reconstruct` gives images (n, 3, h, w) in [0, 1], class numbers
    (n,), or one bool per suspect, as the file's FINDS says."""

    def fit(self, known: Known) -> None: ...

    def reconstruct(self, seen: Seen) -> Tensor: ...


class AttackModule(Protocol):
    """What a file of this folder offers. NEEDS: "upload" (one), "uploads" (several), "client", "trained", "update",
    "logit_gradients" or "ids"."""

    FINDS: Finds
    NEEDS: frozenset[str]

    def planned_steps(self, asked: int | None, images: int) -> int:
        """How many steps an attack on so many images takes; 0 where it takes none."""
        ...

    def build(self, effort: Effort) -> Attack: ...


def names() -> tuple[str, ...]:
    """All attacks, by the files in this folder; nothing is imported."""
    return tuple(sorted(item.name for item in pkgutil.iter_modules(__path__) if not item.name.startswith("_")))


def find(name: str) -> AttackModule:
    """Import an attack (and with it torch).

    Raises:
        UsageError: there is none of that name; the cause names the nearest one.
    """
    if name not in names():
        raise UsageError(
            f"there is no attack {name!r}{suggest(name, names())}", "choose one or more of: " + ", ".join(names())
        )
    module: AttackModule = importlib.import_module(f"{__name__}.{name}")
    return module
