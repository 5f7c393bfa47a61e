from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from contract.errors import ConfigError
from contract.manifest import LabelMode
from edge_runtime.config import DeviceConfig, device_config, is_loopback, local_config, resolve_config

NEEDED = """
engine = "front/front.plan"
data = "images"
server = "wss://server:8443"
trust = "publisher.pub"
key = "device.pem"
name = "pi-1"
state = "state"
"""


def read(directory: Path, text: str = NEEDED, flags: dict[str, object] | None = None, **environ: str) -> DeviceConfig:
    (directory / "edge.toml").write_text("[device]\n" + text)
    return device_config(resolve_config(flags or {}, environ, None, directory).values)


def test_what_the_command_line_leaves_out_comes_from_edge_toml(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.data == tmp_path / "images" and config.label_mode == "permuted-label"
    assert config.engine == str(tmp_path / "front/front.plan")  # as every path in a file
    assert (config.alpha, config.kappa_floor, config.max_releases) == (None, None, 1)


@pytest.mark.parametrize("mode", ["permuted-label", "logit-gradient", "client-head", "raw-label"])
def test_every_label_mode_of_a_package_can_be_set(tmp_path: Path, mode: str) -> None:
    assert mode in get_args(LabelMode)
    assert read(tmp_path, f"{NEEDED}label_mode = '{mode}'").label_mode == mode


def test_work_alone_needs_no_server_and_reads_past_one(tmp_path: Path) -> None:
    (tmp_path / "edge.toml").write_text("[device]\n" + NEEDED + "metrics = '8.8.8.8:1'\n")
    values = resolve_config({}, {}, None, tmp_path, ("engine", "data", "trust", "state")).values
    config = local_config(values)
    assert not isinstance(config, DeviceConfig) and config.engine == str(tmp_path / "front/front.plan")
    with pytest.raises(ConfigError, match="metrics should be"):
        device_config(values)
    with pytest.raises(ConfigError, match="threads should be"):
        local_config({**values, "threads": -1})


@pytest.mark.parametrize("names", [",", "ward,../x", "a b"])
def test_names_that_no_package_has_are_refused(tmp_path: Path, names: str) -> None:
    assert read(tmp_path, flags={"update_names": "ward,ward-b"}).update_names == ("ward", "ward-b")
    with pytest.raises(ConfigError, match="a name of update_names"):
        read(tmp_path, flags={"update_names": names})


def test_flags_go_over_environment_over_file(tmp_path: Path) -> None:
    flags = {"name": "pi-2"}
    config = read(tmp_path, flags=flags, CUTLAYER_DEVICE_NAME="pi-3", CUTLAYER_DEVICE_THREADS="2")
    assert (config.name, config.threads) == ("pi-2", 2)


def test_edge_toml_is_looked_for_before_cutlayer_toml(tmp_path: Path) -> None:
    (tmp_path / "cutlayer.toml").write_text("[device]\nname = 'other'\n")
    assert read(tmp_path).name == "pi-1"


def test_a_missing_setting_names_flag_variable_and_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, NEEDED.replace("key =", "# key ="))
    assert all(part in error.value.cure for part in ("--key", "CUTLAYER_DEVICE_KEY", "[device]"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("label_mode = 'permuted'", "permuted-label"),
        ("label_mode = 'raw'", "one of permuted-label, logit-gradient, client-head, raw-label"),
        ("noise = 'none'", "keyed, fresh"),
        ("alpha = -0.1", "alpha should be 0.0 to 1.0"),
        ("kappa_floor = -1", "kappa_floor"),
        ("max_releases = 0", "max_releases"),
        ("threads = -1", "threads"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, NEEDED + line)


@pytest.mark.parametrize(
    "server", ["ws://server:1", "http://server", "server:8443", "ws://127.example.com:1", "wss://"]
)
def test_only_tls_leaves_this_machine(tmp_path: Path, server: str) -> None:
    with pytest.raises(ConfigError, match="server"):
        read(tmp_path, NEEDED.replace("wss://server:8443", server))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host) and not is_loopback(host + ".example.com")
