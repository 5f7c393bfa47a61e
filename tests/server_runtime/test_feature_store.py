"""The store of EFTViT's features, and the counter of what training them costs."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")

from contract.patch_features import WireFeatures, write_features  # noqa: E402
from exporter.macs import count_macs  # noqa: E402
from server_runtime.feature_store import FeatureStore, Stored  # noqa: E402
from server_runtime.training_macs import VitSizes, sizes_of  # noqa: E402


def upload(round_: int, rows: int, value: float = 0.0, precision: str = "float32") -> Stored:
    features = np.full((rows, 2, 4), value, np.float32)
    return Stored(round_, write_features(features, precision), np.arange(rows))


def test_invariant_7_a_new_upload_takes_the_place_of_the_old_one() -> None:
    store = FeatureStore(1 << 20, 0)
    store.put("pi", upload(0, 5, 1.0))
    store.put("jetson", upload(0, 2, 2.0))
    store.put("pi", upload(3, 4, 3.0))
    assert len(store) == 6
    values = np.concatenate([h for h, _ in store.batches(100, np.random.default_rng(0))])
    assert sorted(values[:, 0, 0]) == [2.0, 2.0, 3.0, 3.0, 3.0, 3.0]


def test_the_oldest_uploads_go_when_the_bytes_are_spent() -> None:
    one = upload(0, 4).nbytes
    store = FeatureStore(2 * one, 0)
    for number, device in enumerate(("a", "b", "c")):
        store.put(device, upload(number, 4))
    assert set(store.uploads) == {"b", "c"} and store.nbytes <= 2 * one
    store.put("d", upload(9, 400))
    assert store.uploads == {} and store.nbytes == 0  # larger than the limit by itself


def test_uploads_count_for_as_many_rounds_as_is_said() -> None:
    store = FeatureStore(1 << 20, 2)
    for number, device in enumerate(("a", "b", "c")):
        store.put(device, upload(number, 1))
    store.forget_before(2)
    assert set(store.uploads) == {"b", "c"}


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_an_epoch_has_every_row_once_with_its_label_whoever_came_first(precision: str) -> None:
    rng = np.random.default_rng(1)
    uploads = {
        name: Stored(0, write_features(rng.normal(size=(rows, 2, 4)).astype(np.float32), precision), np.arange(rows))
        for name, rows in (("a", 5), ("b", 4))
    }
    stores = []
    for names in (("a", "b"), ("b", "a")):
        stores.append(FeatureStore(1 << 20, 0))
        for name in names:
            stores[-1].put(name, uploads[name])
    one, other = (list(store.batches(4, np.random.default_rng(7))) for store in stores)
    assert [len(y) for _, y in one] == [4, 5]  # a last batch of one goes with the one before
    for (h, y), (g, z) in zip(one, other, strict=True):
        assert h.dtype == np.float32 and np.array_equal(h, g) and np.array_equal(y, z)
    assert sorted(np.concatenate([y for _, y in one])) == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_features_without_scales_in_codes_are_the_stores_own_fault() -> None:
    store = FeatureStore(1 << 20, 0)
    store.put("a", Stored(0, WireFeatures(np.zeros((2, 2, 4), np.float16), None), np.zeros(2, np.int64)))
    (batch,) = store.batches(2, np.random.default_rng(0))
    assert batch[0].shape == (2, 2, 4) and batch[1].dtype == np.int64


# -- MACs

VIT_B = VitSizes(blocks=12, width=768, patches=196, patch_values=768, prefix=1, hidden=3072)


@pytest.mark.parametrize(
    ("kept", "giga", "ratio"),
    [(196, 17.56, 1.0), (147, 13.06, 1.34), (98, 8.65, 2.03), (49, 4.32, 4.06), (29, 2.58, 6.80), (10, 0.94, 18.6)],
)
def test_invariant_8_forward_macs_are_those_of_the_table(kept: int, giga: float, ratio: float) -> None:
    assert VIT_B.forward(kept) / 1e9 == pytest.approx(giga, abs=0.005)
    assert VIT_B.forward(196) / VIT_B.forward(kept) == pytest.approx(ratio, rel=0.005)


@pytest.mark.parametrize(("local", "gain"), [(1, 5.85), (2, 5.63), (3, 5.42), (4, 5.23), (6, 4.88)])
def test_invariant_8_training_gains_are_those_of_the_table(local: int, gain: float) -> None:
    full = 3 * 12 * VIT_B.block(196)
    assert full / VIT_B.local_step(49, local) == pytest.approx(gain, abs=0.005)


def test_the_counter_agrees_with_the_one_that_goes_layer_by_layer() -> None:
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **arguments)
    sizes = sizes_of(model)
    assert (sizes.blocks, sizes.patches, sizes.patch_values) == (3, 16, 48)
    assert sizes.forward(16) == count_macs(model, (3, 16, 16))
