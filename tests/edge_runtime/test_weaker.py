"""What comes by itself never shows more of an image; frontends as a whole are tried in test_fleet_update."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from contract.canonical import to_json
from contract.errors import WeakerError
from contract.manifest import Cut
from contract.tokens import SentRule, TokenLayout
from edge_runtime.install import install
from edge_runtime.weaker import refuse_weaker, refuse_weaker_parts
from tests.edge_runtime.fake_package import Package, write_device, write_package
from tests.edge_runtime.test_update import TRUSTED, open_fake


def parts_of(strategy: str, index: int = 2, kept: int | None = 4) -> dict[str, bytes]:
    """training.json of one part."""
    plan = json.loads((Path(__file__).parents[1] / "golden" / "training_1.json").read_bytes())
    cut = {**plan["cuts"][0], "index": index, "kept": kept, "patches": None if kept is None else 16}
    cut |= {"evaluated_shape": [17, 8], "output_shape": [17 if kept is None else 1 + kept, 8]}
    return {"training.json": to_json({**plan, "strategy": strategy, "whole_model": False, "cuts": [cut]})}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (parts_of("sequential_split", kept=8), "50% of the patches in place of 25%"),
        (parts_of("sequential_split", kept=None), "100% of the patches in place of 25%"),
        (parts_of("sequential_split", index=1), "a cut after 25% of the layers in place of 50%"),
        (parts_of("parallel_split"), "parts for parallel_split in place of sequential_split"),
        (parts_of("sequential_split", index=3, kept=4), ""),
    ],
)
def test_parts_that_come_by_themselves_never_show_more(tmp_path: Path, contents: dict[str, bytes], said: str) -> None:
    def parts(version: int, contents: dict[str, bytes]) -> Package:
        files = [f"cut_2.{name}.onnx" for name in ("forward", "backward", "evaluate")]
        more = dict.fromkeys([*files, "parameters.safetensors"], b"-")
        return write_package(tmp_path / f"v{version}", version=version, cuts=(), contents={**contents, **more})

    packages = tmp_path / "packages"
    packages.mkdir()
    install(parts(1, parts_of("sequential_split")).folder, packages, TRUSTED, open_fake, print)
    new = parts(2, contents).folder
    with pytest.raises(WeakerError, match=said) if said else nullcontext():
        refuse_weaker_parts(new, packages)


def scaled(cut: Cut, **factors: dict[int, float]) -> Cut:
    """The cut with some channels' statistics times a factor; channel -1 means all."""
    changed = {}
    for field, of_channel in factors.items():
        values = getattr(cut.statistics, field)
        changed[field] = tuple(
            value * of_channel.get(channel, of_channel.get(-1, 1.0)) for channel, value in enumerate(values)
        )
    return replace(cut, statistics=replace(cut.statistics, **changed))


@pytest.mark.parametrize("floor", [None, 1.0])  # a floor of the device's own is in units of the same declarations
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigma_patch": {3: 0.0}}, "a channel of the patch tokens with 0% of its noise before beside its range"),
        ({"sigma_prefix": {0: 0.45}}, "a channel of the prefix tokens with 45% of its noise"),
        ({"absmax_patch": {0: 3.0}}, "a channel of the patch tokens with 33% of its noise"),
        ({"sigma_patch": {-1: 0.7}}, "the channels of the patch tokens with 70% of their noise"),
        ({"sigma_patch": {2: 0.1}, "absmax_patch": {2: 0.1}}, "a channel of the patch tokens with 10% of its noise"),
        ({"sigma_patch": {-1: 0.7}, "absmax_patch": {-1: 0.7}}, "the channels of the patch tokens with 70%"),
        ({"sigma_patch": {-1: 0.6, 1: 1e30}}, "the channels of the patch tokens with 64% of their noise"),
        ({"sigma_patch": {-1: 0.9, 1: 0.6}, "sigma_prefix": {-1: 1.5}}, ""),
    ],
)
def test_attack_the_noise_of_single_channels_falls_under_the_same_kappa(
    tmp_path: Path, change: dict[str, dict[int, float]], said: str, floor: float | None
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    first = write_package(tmp_path / "v1")
    install(first.folder, packages, TRUSTED, open_fake, print)
    config = write_device(tmp_path / "pi", first, tmp_path, kappa_floor=floor)
    new = replace(first.manifest, version=2, cuts=(scaled(first.manifest.cuts[0], **change),))
    with pytest.raises(WeakerError, match=said) if said else nullcontext():
        refuse_weaker(new, packages, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigma_patch": {-1: 10.0}, "absmax_patch": {-1: 10.0}}, ""),  # another model, of another scale
        ({"sigma_patch": {5: 0.0}}, "a channel of the patch tokens with 0%"),
        ({"sigma_prefix": {-1: 0.7}}, "the channels of the prefix tokens with 70%"),
    ],
)
def test_attack_channels_of_another_model_lose_their_noise(
    tmp_path: Path, change: dict[str, dict[int, float]], said: str
) -> None:
    """Its channels are no longer those before, nor need there be as many."""
    packages = tmp_path / "packages"
    packages.mkdir()
    first = write_package(tmp_path / "v1")
    install(first.folder, packages, TRUSTED, open_fake, print)
    cut = first.manifest.cuts[0]
    doubled = {name: (*values[::-1], *values) for name, values in vars(cut.statistics).items()}
    wide = replace(cut, statistics=replace(cut.statistics, **doubled), tokens=replace(cut.tokens, dim=16))
    new = replace(first.manifest, version=2, model="other", cuts=(scaled(wide, **change),))
    with pytest.raises(WeakerError, match=said) if said else nullcontext():
        refuse_weaker(new, packages, write_device(tmp_path / "pi", first, tmp_path))


def test_channels_of_tokens_that_are_not_sent_need_no_noise(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    first = write_package(tmp_path / "v1")
    install(first.folder, packages, TRUSTED, open_fake, print)
    cut = replace(first.manifest.cuts[0], sent=SentRule("none"))
    for each in (
        scaled(cut, sigma_patch={-1: 0.0}),
        replace(scaled(first.manifest.cuts[0], sigma_prefix={-1: 0.0}), tokens=TokenLayout(0, (2, 2), 8)),
    ):
        new = replace(first.manifest, version=2, cuts=(each,))
        refuse_weaker(new, packages, write_device(tmp_path / "pi", first, tmp_path))
