"""What of each image leaves with the activations of a part that is trained here: recorded before it is sent.

No noise protects it, and every epoch shows the image anew, so one line stands for all epochs of a package's cut. Which
patches go is `training_set`'s part, the file `release_ledger`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.training import TrainingCut
from edge_runtime.release_ledger import WITHOUT_NOISE, Release, ReleaseLedger
from edge_runtime.released_patches import to_text


@dataclass(frozen=True)
class PartLedger:
    """The ledger as a part that is trained here fills it; `size` (h, w) of the pictures."""

    ledger: ReleaseLedger
    package_digest: str
    size: tuple[int, int]
    max_patch_share: float

    def release(self, sample_ids: Sequence[bytes], cut: TrainingCut, kept: NDArray[np.int64] | None) -> None:
        """Activations of these images are about to leave; `kept` (B, K) are their patches, None all of them.

        Raises: DataError when one would go over the cap, and then nothing may be sent; DeviceError.
        """
        grid = _grid(cut, self.size)
        if kept is None:
            patches = [to_text(grid)] * len(sample_ids)
        else:
            patches = [to_text(grid, row) for row in kept]
        self.ledger.check_patches(sample_ids, patches, self.max_patch_share)
        self.ledger.record(sample_ids, Release(self.package_digest, cut.index, WITHOUT_NOISE, 0.0), patches)


def _grid(cut: TrainingCut, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a masked part's patches; of others, which send all, one cell says the same."""
    if cut.patches is None:
        return 1, 1
    rows = math.isqrt(cut.patches * size[0] // size[1])
    columns = rows * size[1] // size[0]
    return (rows, columns) if rows * columns == cut.patches else (1, cut.patches)
