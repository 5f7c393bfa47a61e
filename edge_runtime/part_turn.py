"""What a part becomes when its split changes (P3SL): pure.

Deeper: the device's own layers stay, bit for bit, with their momentum, whatever a server sends; the new ones are the
server's, or the package's where it sent none, and their optimiser starts at 0. Shallower: the layers beyond are let go
(algorithms.md 3.2, split change).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from numpy.typing import NDArray

from contract.errors import RemoteProtocolError
from contract.messages import Ask

State: TypeAlias = Mapping[str, NDArray[Any]]  # of a trainer: "tensor:<name>", moments "<kind>:<name>", "steps"


def adapted_state(fresh: State, held: State, ask: Ask) -> dict[str, NDArray[Any]]:
    """The trainer state of the new split: `fresh` is that of the package's own part, `held` the device's so far.

    Raises: RemoteProtocolError when the ask's tensors are not those of the part.
    """
    state = {name: held.get(name, value) for name, value in fresh.items()}
    for name, value in ask.tensors.items():
        place = f"tensor:{name}"
        if place not in fresh or fresh[place].shape != value.shape:
            raise RemoteProtocolError(
                f"ask {ask.ask}: tensor {name} {value.shape} is none of the part's", "start a new run on the server"
            )
        if place not in held:
            state[place] = value
    return state
