from __future__ import annotations

import numpy as np
import pytest

from contract.cut_noise import image_noise, laplace_scale
from contract.privacy_table import PrivacyTable, from_leakage
from tests.leakage_table import sigma_table

TABLE = PrivacyTable((1, 3), (0.0, 1.0, 2.0), ((0.5, 0.4, 0.2), (0.4, 0.3, 0.1)))


def test_leakage_between_measured_strengths_is_on_the_line() -> None:
    assert TABLE.at(1, 0.5) == pytest.approx(0.45)
    assert TABLE.at(3, 1.5) == pytest.approx(0.2)
    assert TABLE.at(1, 9.0) == 0.2
    assert (TABLE.low, TABLE.high) == (pytest.approx(0.1), pytest.approx(0.5))
    with pytest.raises(KeyError):
        TABLE.at(2, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        ((1,), (0.0, 1.0), ((0.5,),)),
        ((1,), (1.0, 0.0), ((0.5, 0.4),)),
        ((3, 1), (0.0,), ((0.5,), (0.4,))),
        ((1,), (0.0,), ((float("nan"),),)),
        ((), (), ()),
    ],
)
def test_what_is_no_table_is_refused(fields: tuple) -> None:
    with pytest.raises(ValueError, match="expected|inhomogeneous"):
        PrivacyTable(*fields)


def test_a_split_that_was_not_measured_shows_what_the_nearest_shallower_one_does() -> None:
    table = from_leakage(sigma_table([2, 5]), [1, 2, 3, 5, 9])
    assert table.splits == (2, 3, 5, 9)  # nothing is known in front of the first
    assert table.at(3, 1.0) == table.at(2, 1.0) > table.at(5, 1.0) == table.at(9, 1.0)
    with pytest.raises(ValueError, match="no row at or in front of split 1"):
        from_leakage(sigma_table([2]), [1])


def test_invariant_7_noise_has_its_standard_deviation_and_the_tails_of_laplace() -> None:
    """sigma is a standard deviation: b = sigma / sqrt 2, kurtosis 6 (algorithms.md 3.4)."""
    noise = image_noise(bytes(32), b"image", b"package", 2, 1.65, (64, 64, 64), "epoch 1").astype(np.float64)
    assert laplace_scale(2.0) == pytest.approx(2.0**0.5)
    assert noise.std() == pytest.approx(1.65, rel=0.02)
    assert abs(noise.mean()) < 0.02
    assert ((noise / noise.std()) ** 4).mean() == pytest.approx(6.0, rel=0.05)


def test_noise_is_one_draw_for_an_image_a_split_a_sigma_and_the_name_of_a_draw() -> None:
    def draw(**changes: object) -> bytes:
        fields = {"sample_id": b"image", "cut": 2, "sigma": 1.0, "draw": "epoch 1"} | changes
        return image_noise(bytes(32), package_digest=b"p", shape=(4, 4), **fields).tobytes()  # type: ignore[arg-type]

    assert draw() == draw()
    others = [draw(sample_id=b"other"), draw(cut=3), draw(sigma=1.5), draw(draw="ask-1"), draw(draw="ask-2")]
    assert len({draw(), *others}) == 6
