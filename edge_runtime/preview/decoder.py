"""A decoder of the package in onnxruntime: wire codes of one picture in, the attacker's picture out.

Verifying the file is left to `install`, whatever engine runs the frontend.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from contract.errors import EngineError
from contract.images import ImageRule
from contract.preview import CODES_NAME, PICTURE_NAME
from edge_runtime.engines.onnxruntime import session_options
from edge_runtime.preview.pairs import Decode


def open_decoder(path: Path, image: ImageRule, threads: int) -> Decode:
    """Raises: EngineError when onnxruntime refuses the file; the function, when it fails or draws another size."""
    options = session_options()
    options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes share no base but Exception
        raise _refused(path, error) from error

    def decode(codes: NDArray[np.int8]) -> NDArray[np.float32]:
        try:
            picture = session.run([PICTURE_NAME], {CODES_NAME: codes[None]})[0]
        except Exception as error:  # see above
            raise _refused(path, error) from error
        if picture.shape != (1, 3, image.height, image.width) or not np.isfinite(picture).all():
            raise EngineError(
                f"{path.name} should draw a picture of {image.height} x {image.width}, found {picture.shape}",
                "ask the package's publisher to export it again",
            )
        drawn: NDArray[np.float32] = np.clip(picture[0].transpose(1, 2, 0), 0.0, 1.0)
        return drawn

    return decode


def _refused(path: Path, error: Exception) -> EngineError:
    return EngineError(
        f"onnxruntime {onnxruntime.__version__} cannot run {path.name}: {str(error).splitlines()[0][:300]}",
        "compare its version with engine.onnxruntime_min of the manifest",
    )
