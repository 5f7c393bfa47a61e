from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contract.errors import DataError, EngineError
from contract.images import load_pixels, normalise, resize
from edge_runtime.data import Sample, load_dataset
from edge_runtime.engines import open_engine
from edge_runtime.pipeline import Frontend, extract, read_features, samples_per_batch
from tests.edge_runtime.fake_package import DIM, IMAGE, LAYOUT, fake_model, write_images

ROOT = Path(__file__).parents[2]


def frontend(threads: int = 1) -> Frontend:
    return Frontend(open_engine("fake", fake_model()[0], threads), IMAGE, LAYOUT)


def samples_of(root: Path, count: int = 7) -> tuple[Sample, ...]:
    return load_dataset(write_images(root, {"a": count}), None, bytes(32), 10_000, lambda: None).samples


@pytest.mark.parametrize("threads", [1, 3])
def test_features_on_disk_are_the_engines_tokens_in_upload_order(tmp_path: Path, threads: int) -> None:
    samples, ticks = samples_of(tmp_path / "images"), list[int]()
    extract(frontend(threads), samples, tmp_path / "clean", ticks.append)
    assert sum(ticks) == 7 and (tmp_path / "clean").stat().st_mode & 0o777 == 0o600
    stored = read_features(tmp_path / "clean", LAYOUT, 0, 7)
    for row, sample in enumerate(samples):
        pixels = resize(load_pixels(sample.path, sample.relative), IMAGE)
        tokens = frontend().engine.run(normalise(pixels[None], IMAGE))[0]
        assert (stored[row] == tokens.astype(np.float16)).all()
    assert (read_features(tmp_path / "clean", LAYOUT, 5, 2) == stored[5:]).all()


def test_a_picture_that_changes_meanwhile_is_named(tmp_path: Path) -> None:
    samples = samples_of(tmp_path / "images", 1)
    write_images(tmp_path / "images", {"a": 1}, seed=9)
    with pytest.raises(DataError, match=r"a/a_0\.png changed while"):
        frontend().tokens(samples)


def test_tokens_that_are_not_finite_are_an_engine_error(tmp_path: Path) -> None:
    class Broken:
        name, version, threads, kernels = "broken", "1", 1, None

        def run(self, images: np.ndarray, keep: np.ndarray | None = None) -> np.ndarray:
            return np.full((len(images), LAYOUT.count, DIM), 1e6, np.float32)

    with pytest.raises(EngineError, match="not finite in float16"):
        Frontend(Broken(), IMAGE, LAYOUT).tokens(samples_of(tmp_path, 1))


def test_a_batch_fits_a_frame_and_a_large_sample_goes_alone() -> None:
    from contract.tokens import TokenLayout

    vit_large = TokenLayout(1, (14, 14), 1024)
    size = samples_per_batch(vit_large, True, 1 << 20)
    assert size == 5 and size * (197 * 1024 + 2 * 196 + 18) < (1 << 20) - 4096
    assert samples_per_batch(vit_large, True, 64 << 10) == 1
    assert samples_per_batch(LAYOUT, False, 1 << 20) == 256


GROWTH = """
import resource, sys
from pathlib import Path
import numpy as np
from contract.tokens import TokenLayout
from edge_runtime.transforms.patch_retrieval import retrieve
count, path = int(sys.argv[1]), Path(sys.argv[2])
layout = TokenLayout(1, (8, 8), 384)
row = np.random.default_rng(0).normal(size=(layout.count, layout.dim)).astype(np.float16)
with path.open("wb") as stream:
    for number in range(count):
        stream.write((row + np.float16(number % 7)).tobytes())
retrieve(path, count, layout, lambda step: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_of_retrieval_does_not_follow_the_features(tmp_path: Path) -> None:
    peaks = []
    for count in (40, 600):  # 2 MB and 30 MB of features
        command = [sys.executable, "-c", GROWTH, str(count), str(tmp_path / "clean")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * 1024)
    # What may grow is one position, n * d float32 a few times over, and n * n similarities.
    assert peaks[1] - peaks[0] < 15e6
