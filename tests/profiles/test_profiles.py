"""Every device's file is read whole, and what a file system says leads to the right one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from contract.config import load_toml
from edge_runtime.meters import ina
from profiles import ProfileError, load, load_file, names
from profiles.detect import applies, detect, find_l4t, look

EXPECTED = {
    "jetson_agx_orin", "jetson_nano", "jetson_orin_nano", "jetson_orin_nx", "jetson_thor", "jetson_xavier_nx",
    "nvidia_desktop", "raspberry_pi_4", "raspberry_pi_5", "x86_laptop",
}  # fmt: skip
METERS = {path.stem for path in Path(ina.__file__).parent.glob("[!_]*.py")} | {"external"}
SMALLEST = """
title = "Board"
status = "untested: no hardware"
[signs]
models = ["Board"]
[software]
system = "Linux"
python = "3.11"
runtime = "native"
engine = "onnxruntime on the CPU"
[meter]
name = "external"
sees = "nothing"
"""
INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Some CPU\n"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_there_is_a_file_for_each_device() -> None:
    assert set(names()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_profile_says_what_was_run_and_which_meter(name: str) -> None:
    profile = load(name)
    assert profile.name == name and "untested" in profile.status
    assert profile.meter.name in METERS
    assert profile.signs.modules or profile.signs.models or profile.signs.x86
    assert all(each.what and each.why and each.fix for each in profile.unsupported)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_rails_of_a_board_make_one_declared_total(name: str) -> None:
    """The rule itself is ina's alone: a profile lists rails, and these must be rails that the rule knows."""
    meter = load(name).meter
    assert bool(meter.rails) == (meter.name == "ina")
    if meter.rails:
        rule = next(rule for rule in ina.TOTALS if all(label in meter.rails for label in rule.labels))
        assert rule.scope.partition(" ")[0] in meter.sees  # "module" or "carrier"


@pytest.mark.parametrize(
    ("model", "compatible", "name"),
    [
        ("NVIDIA Jetson Orin Nano Developer Kit", ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005"), 0),
        ("A carrier of somebody's", ("nvidia,p3768-0000+p3767-0005-super", "nvidia,tegra234"), 0),
        ("NVIDIA Jetson Orin Nano Developer Kit", ("nvidia,p3768-0000+p3767-0000", "nvidia,tegra234"), 1),
        ("", ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"), 2),
        ("NVIDIA Jetson AGX Thor Developer Kit", ("nvidia,p4071-0000+p3834-0008", "nvidia,tegra264"), 3),
        ("NVIDIA Jetson Xavier NX Developer Kit", ("nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"), 4),
        ("NVIDIA Jetson Nano Developer Kit", ("nvidia,jetson-nano", "nvidia,tegra210"), 5),
        ("Raspberry Pi 4 Model B Rev 1.4", ("raspberrypi,4-model-b", "brcm,bcm2711"), 6),
        ("Raspberry Pi 5 Model B Rev 1.0", ("raspberrypi,5-model-b", "brcm,bcm2712"), 7),
        ("Some Board", ("vendor,board",), 8),
    ],
)
def test_the_module_decides_before_the_model(
    tmp_path: Path, model: str, compatible: tuple[str, ...], name: int
) -> None:
    tree = {"proc/device-tree/model": model + "\0", "proc/device-tree/compatible": "\0".join(compatible) + "\0"}
    expected = (
        "jetson_orin_nano", "jetson_orin_nx", "jetson_agx_orin", "jetson_thor", "jetson_xavier_nx", "jetson_nano",
        "raspberry_pi_4", "raspberry_pi_5", None,
    )[name]  # fmt: skip
    assert detect(write(tmp_path, tree)) == expected


def test_a_release_file_is_enough_for_a_jetson_nano(tmp_path: Path) -> None:
    text = "# R32 (release), REVISION: 7.1, GCID: 29689809, BOARD: t210ref, EABI: aarch64, DATE: Wed Feb  2 2022\n"
    write(tmp_path, {"etc/nv_tegra_release": text})
    found = find_l4t(tmp_path)
    assert found is not None and (found.major, found.revision, found.board) == (32, "7.1", "t210ref")
    assert detect(tmp_path) == "jetson_nano"


def test_a_pi_is_known_by_its_cpuinfo_where_the_device_tree_is_hidden(tmp_path: Path) -> None:
    write(
        tmp_path, {"proc/cpuinfo": "processor\t: 0\n\nRevision\t: c03114\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n"}
    )
    assert detect(tmp_path) == "raspberry_pi_4"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({}, None),  # such as a virtual machine
        ({"sys/class/power_supply/BAT0/status": "Full\n"}, "x86_laptop"),
        ({"sys/class/power_supply/BAT0/scope": "Device\n"}, None),  # a mouse
        ({"proc/driver/nvidia/version": "NVRM version\n"}, "nvidia_desktop"),
        (
            {"proc/driver/nvidia/version": "NVRM version\n", "sys/class/power_supply/BAT0/status": "Full\n"},
            "x86_laptop",
        ),
    ],
)
def test_an_x86_machine_is_known_by_what_it_has(tmp_path: Path, files: dict[str, str], name: str | None) -> None:
    assert detect(write(tmp_path, {"proc/cpuinfo": INTEL, **files})) == name
    assert detect(write(tmp_path / "arm", files)) is None


def test_an_empty_root_says_nothing(tmp_path: Path) -> None:
    seen = look(tmp_path)
    assert detect(tmp_path) is None and seen.compatible == () and seen.l4t is None


def test_what_depends_on_the_release_is_left_out_on_a_later_one(tmp_path: Path) -> None:
    profile = load("jetson_orin_nano")

    def lines(major: int | None) -> str:
        text = f"# R{major} (release), REVISION: 4.0, GCID: 1, BOARD: generic, EABI: aarch64\n"
        return "\n".join(applies(profile, None if major is None else find_l4t(write(tmp_path, {RELEASE: text}))))

    assert "3.8" in lines(35) and "3.8" in lines(None)
    assert "3.8" not in lines(36) and "NVML" in lines(36)


RELEASE = "etc/nv_tegra_release"


def test_a_profile_of_ones_own_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SMALLEST + "[power]\nsent_j_per_byte = 1\nlink_source = 'a plug'\n")
    profile = load_file(tmp_path / "mine.toml")
    assert (profile.name, profile.power.sent_j_per_byte, profile.power.idle_w) == ("mine", 1.0, None)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ("[meter.more]\nx = 1", "unknown key more"),
        ("[power]\nidle = 3", "unknown key idle (known: modes"),
        ("[power]\nidle_w = '3'", "idle_w should be float, found '3'"),
        ("[power]\nidle_w = true\nbusy_w = 2", "idle_w should be float, found True"),
        ("[power]\nidle_w = 3\nbusy_w = 5", "no source"),
        ("[power]\nidle_w = 3\nwatts_source = 'x'", "one of idle_w and busy_w"),
        ("[power]\nidle_w = 6\nbusy_w = 5\nwatts_source = 'x'", "0 < idle_w <= busy_w"),
        ("[power]\nmodes = 'all'", "should be a list"),
        ("[ceilings]\ntemperature_c = 80", "no source"),
        ("[[unsupported]]\nwhat = 'a'\nwhy = 'b'", "the key fix is missing"),
        ("[unsupported]\nwhat = 'a'", "should be a list"),
        ("surprise =", "not valid TOML"),
    ],
)
def test_a_profile_with_a_mistake_is_refused(tmp_path: Path, more: str, cause: str) -> None:
    (tmp_path / "mine.toml").write_text(SMALLEST + more + "\n")
    with pytest.raises(ProfileError) as error:
        load_file(tmp_path / "mine.toml")
    assert cause in error.value.cause and error.value.cure


@pytest.mark.parametrize("text", ["name = 'other'\n" + SMALLEST, SMALLEST.replace('title = "Board"', ""), "signs = 1"])
def test_a_profile_without_a_key_or_with_a_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ProfileError, match="title|name"):
        load_file(tmp_path / "mine.toml")


def test_the_wheel_has_the_files_and_the_docs_name_them() -> None:
    root = Path(__file__).parents[2]
    setup = load_toml(root / "pyproject.toml")["tool"]["setuptools"]
    assert setup["package-data"]["profiles"] == ["*.toml"] and "profiles*" in setup["packages"]["find"]["include"]
    page = (root / "docs" / "devices.md").read_text()
    assert [name for name in names() if f"`{name}`" not in page] == []


def test_a_name_without_a_file_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="jetson_orin_nano"):
        load("jetson_orin")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_file(tmp_path / "none.toml")
