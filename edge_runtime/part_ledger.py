"""What of each image leaves with the activations of a part that is trained here: recorded before it is sent.

Every epoch shows the image anew, by other weights. Without noise one line stands for all epochs of a package's cut;
under noise each draw is counted, as whoever has many of them averages. Which patches go is `training_set`'s part, what
names a draw `transforms.cut_noise`'s, the file `release_ledger`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.training import TrainingCut
from edge_runtime.choose_split import SigmaFloor
from edge_runtime.release_ledger import UNDER_NOISE, WITHOUT_NOISE, Release, ReleaseLedger
from edge_runtime.released_patches import to_text
from edge_runtime.terms import refusal

_ROUNDING = 1e-6  # of a sigma that crossed the wire


@dataclass(frozen=True)
class PartLedger:
    """The ledger as a part that is trained here fills it; `size` (h, w) of the pictures, `floor` the device's own."""

    ledger: ReleaseLedger
    package_digest: str
    size: tuple[int, int]
    max_patch_share: float
    floor: SigmaFloor = field(default_factory=SigmaFloor)

    def release(
        self, sample_ids: Sequence[bytes], cut: TrainingCut, kept: NDArray[np.int64] | None, sigma: float, draw: str
    ) -> None:
        """Activations of these images are about to leave under noise of deviation `sigma` and of this `draw`; `kept`
        (B, K) are their patches, None all of them.

        Raises: RefusedError when that is less noise than the device's floor, DataError when an image would go over the
        cap, and then nothing may be sent; DeviceError.
        """
        least = self.floor.of(cut.index)
        if not sigma >= least - _ROUNDING:  # NaN is refused as well
            raise refusal(
                f"noise at split {cut.index}", f"at least {least:g} (this device's sigma_floor)", f"{sigma:g}",
                "raise the server's --sigma, or lower sigma_floor here knowing what that shows",
            )  # fmt: skip
        grid = _grid(cut, self.size)
        if kept is None:
            patches = [to_text(grid)] * len(sample_ids)
        else:
            patches = [to_text(grid, row) for row in kept]
        self.ledger.check_patches(sample_ids, patches, self.max_patch_share)
        kind, draw = (UNDER_NOISE, draw) if sigma > 0.0 else (WITHOUT_NOISE, "")
        self.ledger.record(sample_ids, Release(self.package_digest, cut.index, kind, sigma), patches, draw)


def _grid(cut: TrainingCut, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a masked part's patches; of others, which send all, one cell says the same."""
    if cut.patches is None:
        return 1, 1
    rows = math.isqrt(cut.patches * size[0] // size[1])
    columns = rows * size[1] // size[0]
    return (rows, columns) if rows * columns == cut.patches else (1, cut.patches)
