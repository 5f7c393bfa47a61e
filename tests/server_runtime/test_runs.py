"""Which run is taken up, what its record holds, and what damage to it costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.manifest import TransformRules
from server_runtime.plan import Plan, parse_listen
from server_runtime.runs import Run, choose_run, lock_run, read_plan, write_plan

PLAN = Plan("split_adaptation", "aa", "bb", "permuted-label", 0.5, 100, 8, 0.25, 0, 1)
RULES = TransformRules(0.1, 0.5, 1.0, True)
MODES = ("permuted-label", "logit-gradient", "client-head")


def choose(
    runs: Path, plan: Plan = PLAN, named: str | None = None, given: frozenset[str] = frozenset(), name: str = "r1",
    say: Callable[[str], None] = print,
) -> Run:  # fmt: skip
    return choose_run(runs, named, plan, given, ["clinic"], lambda: name, say)


def test_a_new_run_records_its_plan(tmp_path: Path) -> None:
    run = choose(tmp_path)
    assert (run.name, run.is_new) == ("r1", True)
    assert Plan(**read_plan(run.root)) == PLAN


def test_the_newest_unfinished_run_of_the_same_plan_is_taken_up(tmp_path: Path) -> None:
    choose(tmp_path, name="20260101T000000")
    choose(tmp_path, replace(PLAN, strategy="linear_probe"), name="20260103T000000")
    choose(tmp_path, named="20260102T000000")
    again = choose(tmp_path)
    assert (again.name, again.is_new) == ("20260102T000000", False)


@pytest.mark.parametrize("field", ["backend_sha256", "package_digest", "strategy"])
def test_a_run_of_another_backend_or_strategy_is_passed_over_and_refused_by_name(field: str, tmp_path: Path) -> None:
    choose(tmp_path, name="r1")
    other = replace(PLAN, **{field: "linear_probe"})
    assert choose(tmp_path, other, name="r2").is_new
    with pytest.raises(ConfigError, match=field):
        choose(tmp_path, other, named="r1")


def test_a_run_keeps_its_settings_unless_others_are_given(tmp_path: Path) -> None:
    choose(tmp_path)
    assert choose(tmp_path, replace(PLAN, epochs=50, threads=8)).plan == PLAN
    with pytest.raises(ConfigError, match="epochs = 100, asked for 50"):
        choose(tmp_path, replace(PLAN, epochs=50), named="r1", given=frozenset({"epochs"}))
    assert choose(tmp_path, replace(PLAN, epochs=50), given=frozenset({"epochs"}), name="r2").is_new


def test_a_new_run_beside_an_unfinished_one_says_which_setting_kept_them_apart(tmp_path: Path) -> None:
    said: list[str] = []
    choose(tmp_path, replace(PLAN, backend_sha256="another"), name="r0")
    choose(tmp_path, name="r1")
    choose(tmp_path, replace(PLAN, epochs=50), given=frozenset({"epochs"}), name="r2", say=said.append)
    assert said == [
        "run r1 is not finished and was started with epochs = 100, asked for 50: run r2 is a new one; to go on with "
        "the other, give its settings"
    ]


def test_a_finished_run_is_served_by_name_only(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from server_runtime.run_directory import RunDirectory
    from server_runtime.strategies import State

    root = choose(tmp_path).root
    RunDirectory(root).keep("clinic", State({"head.bias": torch.zeros(3)}, {}), ended=True)
    said: list[str] = []
    assert choose(tmp_path, name="r2", say=said.append).is_new
    assert "--run r1" in said[0]
    assert not choose(tmp_path, named="r1").is_new


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden", "x" * 41])
def test_a_run_name_stays_inside_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        choose(tmp_path, named=name)


@pytest.mark.parametrize("data", [b"", b"strategy = ", b"\xff\xfe\0noise"])
def test_de_04_a_damaged_plan_is_restored_from_its_copy(data: bytes, tmp_path: Path) -> None:
    root = choose(tmp_path).root
    (root / "run.toml").write_bytes(data)
    said: list[str] = []
    assert choose(tmp_path, say=said.append).name == "r1"
    assert "restored" in said[0]
    assert Plan(**read_plan(root)) == PLAN


def test_de_04_a_run_without_any_plan_is_passed_over(tmp_path: Path) -> None:
    root = choose(tmp_path).root
    for name in ("run.toml", "run.toml.copy"):
        (root / name).write_bytes(b"")
    assert choose(tmp_path, name="r2").is_new
    with pytest.raises(ConfigError, match=r"run\.toml"):
        choose(tmp_path, named="r1")


def test_a_run_from_before_a_setting_goes_on_with_its_default(tmp_path: Path) -> None:
    root = choose(tmp_path).root
    for name in ("run.toml", "run.toml.copy"):
        lines = (root / name).read_text().splitlines(keepends=True)
        (root / name).write_text("".join(line for line in lines if not line.startswith("sampling")))
    assert Plan(**read_plan(root)) == PLAN and choose(tmp_path).name == root.name
    for name in ("run.toml", "run.toml.copy"):  # what has no default is not guessed
        lines = (root / name).read_text().splitlines(keepends=True)
        (root / name).write_text("".join(line for line in lines if not line.startswith("strategy")))
    assert read_plan(root) is None


def test_one_run_has_one_server(tmp_path: Path) -> None:
    root = choose(tmp_path).root
    held = lock_run(root)
    with pytest.raises(ConfigError, match="in use"):
        lock_run(root)
    import os

    os.close(held)
    os.close(lock_run(root))


def test_numbers_and_texts_survive_the_file(tmp_path: Path) -> None:
    odd = replace(PLAN, kappa=1e-05, strategy='a "b" \\ ü', seed=2**62)
    write_plan(tmp_path, odd)
    assert Plan(**read_plan(tmp_path)) == odd


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"strategy": "split_adaptatoin"}, "split_adaptation"),
        ({"label_mode": "raw-label"}, "label_mode"),
        ({"label_mode": "client-heads"}, "did you mean 'client-head'"),
        ({"kappa": 1.5}, "kappa"),
        ({"kappa": -0.1}, "kappa"),
        ({"kappa": float("nan")}, "kappa"),
        ({"epochs": 0}, "epochs"),
        ({"augmentations": -1}, "augmentations"),
        ({"replaced": 1.5}, "replaced"),
        ({"seed": -1}, "seed"),
        ({"threads": 0}, "threads"),
        ({"seed": 2**63}, "seed must be 0 to"),
        ({"epochs": 10**9}, "epochs must be 1 to"),
        ({"alone": 10**9}, "alone must be 0 to"),
        ({"quorum": 1}, "quorum must be at most the 0 enrolled devices"),
        ({"average_into": "nothing"}, "average_into must be one of server, copy"),
        ({"sampling": "most"}, "sampling must be one of median, all"),
        ({"sampling": "all", "medians": 2.0}, 'medians must be left out where sampling is "all"'),
        ({"norms": "guessed"}, "norms must be one of averaged, public"),
        ({"norms": "public"}, "norms are to take their statistics from public images, and there are none"),
    ],
)
def test_a_plan_that_cannot_be_trained_names_its_setting(change: dict[str, object], named: str) -> None:
    PLAN.check(RULES, MODES)
    with pytest.raises(ConfigError, match=named):
        replace(PLAN, **change).check(RULES, MODES)  # type: ignore[arg-type]


def test_a_label_mode_that_the_package_rules_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="the package allows"):
        PLAN.check(RULES, ("client-head",))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("localhost:8443", "localhost", 8443), ("[::1]:8443", "::1", 8443)],
)
def test_loopback_needs_no_certificate(text: str, host: str, port: int) -> None:
    listen = parse_listen(text, None, None)
    assert (listen.host, listen.port, listen.scheme) == (host, port, "ws")


@pytest.mark.parametrize("text", ["0.0.0.0:8443", "192.168.1.5:8443", "example.org:443", "[::]:1"])
def test_attack_tls_is_required_off_loopback(text: str) -> None:
    with pytest.raises(ConfigError, match="TLS"):
        parse_listen(text, None, None)
    assert parse_listen(text, Path("c.pem"), Path("k.pem")).scheme == "wss"


@pytest.mark.parametrize("text", ["8443", ":8443", "host:", "host:x", "host:70000", "host:-1", ""])
def test_a_wrong_address_shows_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:8443"):
        parse_listen(text, Path("c.pem"), Path("k.pem"))


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="certificate_key is not"):
        parse_listen("127.0.0.1:0", Path("c.pem"), None)


def test_the_plan_file_is_toml_that_people_can_read(tmp_path: Path) -> None:
    root = choose(tmp_path).root
    assert f"kappa = {json.dumps(0.5)}\n" in (root / "run.toml").read_text()
