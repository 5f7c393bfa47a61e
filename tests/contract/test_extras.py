"""What a command says where an extra's packages are missing, as on a device's install."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from contract import extras
from contract.console import run_command
from contract.errors import ConfigError


def no_torch() -> int:
    raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")


def test_a_missing_extra_is_named_with_its_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(no_torch) == 2
    assert capsys.readouterr().err == (
        "error: this command needs torch, which is not installed here\n  cure: pip install 'cutlayer[server]'\n"
    )


def test_a_module_that_no_extra_brings_is_a_fault_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise ModuleNotFoundError("No module named 'contract.gone'", name="contract.gone")

    assert run_command(broken) == 1
    assert "internal error" in capsys.readouterr().err


def test_what_is_there_is_not_asked_for() -> None:
    extras.require("json", "contract.errors")


def test_each_extra_is_one_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for name, extra in extras.EXTRAS.items():
        with pytest.raises(ConfigError, match=name) as found:
            extras.require(name)
        assert f"cutlayer[{extra}]" in found.value.cure


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_the_attacks_command_says_what_a_device_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from server_runtime.entry import leakage_profile

    monkeypatch.setattr(sys, "argv", ["leakage-profile", "--help"])
    assert leakage_profile() == 2
    assert "cutlayer[server]" in capsys.readouterr().err
