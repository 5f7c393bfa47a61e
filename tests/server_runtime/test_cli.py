"""server-run's flags and what it says of each mistake; nothing here starts a process of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import ConfigError  # noqa: E402
from server_runtime import strategies  # noqa: E402
from server_runtime.belongs import STRATEGIES_OF, check_given  # noqa: E402
from server_runtime.cli import main  # noqa: E402
from server_runtime.plan import FIELDS  # noqa: E402
from server_runtime.status import size_in_words  # noqa: E402
from tests.server_runtime import tiny  # noqa: E402


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_backend_folder(tmp_path_factory.mktemp("export") / "front.backend")


@pytest.fixture
def words(backend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    tiny.enrol(tmp_path / "roster", "clinic", "pi")
    return {
        "--strategy": "split_adaptation", "--backend": str(backend), "--listen": "127.0.0.1:0",
        "--roster": str(tmp_path / "roster"), "--runs": str(tmp_path / "runs"),
    }  # fmt: skip


def run(words: dict[str, str], *more: str) -> int:
    return main([*(word for pair in words.items() for word in pair), *more])


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"--strategy": "split_adaption"}, 2, "did you mean 'split_adaptation'"),
        ({"--backend": "nowhere"}, 2, "nowhere"),
        ({"--listen": "0.0.0.0:8443"}, 2, "TLS"),
        ({"--listen": "8443"}, 2, "HOST:PORT"),
        ({"--roster": "nobody"}, 2, "nobody"),
        ({"--certificate": "c.pem"}, 2, "certificate_key"),
        ({"--kappa": "9"}, 2, "kappa"),
        ({"--epochs": "0"}, 2, "epochs"),
        ({"--threads": "0"}, 2, "threads must be 1 to 1024"),
        ({"--epochs": "many"}, 2, "--epochs must be an integer"),
        ({"--label-mode": "raw-label"}, 2, "raw-label"),
        ({"--run": "../up"}, 2, "../up"),
        ({"--config": "no.toml"}, 2, "no.toml"),
    ],
)
def test_each_mistake_has_a_cause_and_a_cure(
    change: dict[str, str], code: int, named: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words | change) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert named in said.err
    assert said.err.count("error:") == 1
    assert "\n  cure: " in said.err


@pytest.mark.parametrize("name", sorted(STRATEGIES_OF))
def test_a_setting_of_other_strategies_is_refused_wherever_it_comes_from(name: str) -> None:
    every, owners = set(strategies.names()), STRATEGIES_OF[name]
    assert owners < every and {field.name for field in FIELDS} >= {name}
    for strategy in owners:
        check_given(strategy, {name: "--x", "epochs": "--epochs"})
    for strategy in every - owners:
        check_given(strategy, {name: "default", "epochs": "--epochs"})
        with pytest.raises(ConfigError, match=f"means nothing to {strategy}"):
            check_given(strategy, {name: f"--{name}"})
        if name == "public":  # in a file it says what the server has, for whatever runs there
            check_given(strategy, {name: "[server] in cutlayer.toml"})
            continue
        with pytest.raises(ConfigError, match=r"\(\[server\] in cutlayer.toml\), but means nothing"):
            check_given(strategy, {name: "[server] in cutlayer.toml"})


def test_a_setting_of_another_strategy_is_refused_before_a_run_is_made(
    words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, "--prototype-shift", "0") == 2
    assert "--prototype-shift was given, but means nothing to split_adaptation" in capsys.readouterr().err
    assert run(words, "--epochs", "9" * 30) == 2
    assert "epochs must be 1 to 1000000" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_incomplete_backend_is_a_package_error(
    words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(words | {"--backend": str(tmp_path / "empty")}) == 4
    assert "lacks manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--strategy", "--backend", "--listen", "--roster"])
def test_a_missing_setting_names_its_flag(
    missing: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({flag: value for flag, value in words.items() if flag != missing}) == 2
    assert missing in capsys.readouterr().err


def test_show_config_says_where_each_value_comes_from(
    words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cutlayer.toml").write_text('[server]\nepochs = 7\npublic = "public"\n')
    monkeypatch.setenv("CUTLAYER_SERVER_SEED", "5")
    assert run(words, "--show-config") == 0
    shown = capsys.readouterr().out
    for line in ("epochs = 7  # [server] epochs in cutlayer.toml", "seed = 5  # CUTLAYER_SERVER_SEED",
                 "augmentations = 64  # default", 'listen = "127.0.0.1:0"  # --listen'):  # fmt: skip
        assert line in shown


def test_help_names_every_setting_and_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for field in FIELDS:
        assert field.name == "public" or "--" + field.name.replace("_", "-") in shown
    for name in strategies.names():
        assert name in shown
    for default in ("(default: 100)", "(default: runs)", "(default: permuted-label)", "(default: auto)"):
        assert default in shown


def test_the_socket_process_never_imports_torch() -> None:
    code = (
        "import sys; import server_runtime.cli, server_runtime.server; "
        "print([name for name in ('torch', 'timm', 'onnx') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["backup", "../runs/one", "-o", "copy"], "run '../runs/one' is not a name"),
        (["unpack", "nofile"], "there is no file nofile"),
        (["unpack", "roster"], "there is no file roster"),
        (["revoke", "nobody"], "device 'nobody' is not in the roster"),
    ],
)
def test_what_commands_are_given_is_checked_first(
    arguments: list[str], cause: str, words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--roster", words["--roster"]] if arguments[0] == "revoke" else ["--runs", words["--runs"]]
    before = sorted(tmp_path.iterdir())
    assert main([*arguments, *where]) == 2
    said = capsys.readouterr().err
    assert cause in said and "Errno" not in said and "cure: " in said
    assert sorted(tmp_path.iterdir()) == before


def test_files_that_are_not_there_are_told_before_a_run_is_made(
    words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words | {"--certificate": "c.pem", "--certificate-key": "k.pem"}) == 2
    assert "there is no file c.pem (certificate)" in capsys.readouterr().err
    assert run(words, "--public", "nowhere") == 2
    assert "there is no folder nowhere (public)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_to_revoke_or_restore_twice_is_no_mistake_and_is_said(
    words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command, said in (
        ("revoke", "pi of site clinic is revoked;"), ("revoke", "was revoked before: it stays so"),
        ("restore", "pi of site clinic may join again"), ("restore", "is not revoked, but enrolled: it stays so"),
    ):  # fmt: skip
        assert main([command, "pi", "--roster", words["--roster"]]) == 0
        assert said in capsys.readouterr().err


def test_bytes_are_told_in_the_unit_that_shows_them() -> None:
    assert [size_in_words(count) for count in (0, 999, 20_480, 3_200_000)] == ["0 B", "999 B", "20.5 kB", "3.2 MB"]


def test_a_mistyped_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["foget", "--device", "pi"]) == 2
    assert "no command 'foget' of server-run (did you mean 'forget'?)" in capsys.readouterr().err
