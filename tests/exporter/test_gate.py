"""A whole leakage-gated export of a tiny model with the ridge decoder: one that passes, one that is refused, mistakes.

leakage-profile is a command of its own; here it runs in this process, so that torch is loaded once. The slow test
starts it as it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from contract.errors import UsageError
from contract.leakage import LEAKAGE_NAME, of_package
from contract.manifest import from_bytes
from contract.scratch import lock_folder
from contract.tokens import KEPT, TokenLayout
from exporter import gate
from exporter.cli import main
from exporter.gate_plan import GatePlan, candidates, sent_of, strengths_of
from exporter.package import backend_path
from server_runtime import backend_folder
from server_runtime.leakage import cli as leakage_cli
from tests.exporter import tiny
from tests.exporter.test_gate_energy import write as write_energy_table

pytest.importorskip("piq", reason="SSIM and FSIM come from piq: install the extra attack")

MODEL = ["--model", tiny.MODEL, *(word for key, value in {**tiny.ARGS, "depth": 2}.items()
                                  for word in ("--model-arg", f"{key}={value}"))]  # fmt: skip
GATED = ["--split", "auto", "--gate-attacks", "ridge", "--tune", "none", "--sent-patches", "all"]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_pictures(tmp_path_factory.mktemp("gate") / "public", 12)


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """leakage-profile in this process, with a short classifier; the flags that it got, of the packages it opened."""
    flags: list[list[str]] = []

    def run(module: str, words: Sequence[str], stdout: int) -> int:
        assert (module, stdout) == (leakage_cli.__name__, subprocess.DEVNULL)
        with contextlib.redirect_stdout(io.StringIO()):  # the exporter throws its table away: it reads the file
            code = leakage_cli.main(words)
        if "--check" not in words:
            flags.append(list(words))
        return code

    monkeypatch.setattr("server_runtime.leakage.classifier.STEPS", (5, 5))
    monkeypatch.setattr(gate, "run_child", run)
    return flags


@pytest.fixture
def export(public: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*words: str) -> int:
        return main([*MODEL, "--calibration", str(public), "-o", str(tmp_path / "front"), *words])

    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("signing-key"))


def test_one_that_passes_is_exported_with_its_table(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max-leakage", "ssim<0.95", "--int8", "--kappa-max", "0.5", "--format", "json"]
    assert export(*GATED, *words) == 0
    said = json.loads(capsys.readouterr().out)
    front = tmp_path / "front"
    chosen, points = said["chosen"], said["points"]
    assert said["kind"] == "leakage-gate" and names(tmp_path) == ["front", "front.backend", "front.gate.json"]
    assert [(each["point"]["precision"], each["point"]["kappa"]) for each in points] == [
        ("int8", kappa) for kappa in (0.0, 0.25, 0.5)
    ]
    assert len(attacked) == 1 and "0.0,0.25,0.5" in attacked[0]
    reads = [each["point"]["leakage"]["psnr_db"] for each in points]
    assert reads[0] > reads[-1] and points[0]["point"]["unprotected"]["psnr_db"] >= reads[0] - 0.5
    within = [each["point"] for each in points if not each["faults"]]
    assert chosen in within and chosen["accuracy"] == max(each["accuracy"] for each in within)
    manifest = from_bytes((front / "manifest.json").read_bytes())
    assert (manifest.cuts[0].index, manifest.transforms.kappa, manifest.version) == (1, chosen["kappa"], 1)
    table = of_package((front / LEAKAGE_NAME).read_bytes(), manifest)
    row = next(row for row in table.rows if row.protected and row.strength == chosen["kappa"])
    assert row.attacks[0].figures.ssim == chosen["leakage"]["ssim"]
    assert said["export"]["figures"]["top1_at"] == [{"kappa": chosen["kappa"], "top1": chosen["accuracy"]}]
    beside = json.loads((tmp_path / "front.gate.json").read_bytes())
    assert beside == json.loads((backend_path(front) / "gate.json").read_bytes())
    assert beside["points"] == points and beside["chosen"] == chosen
    assert chosen["energy"] == {
        "joules": None, "kind": "unknown", "source": "no table of edge-profile was given (--energy-table)",
    }  # fmt: skip
    assert backend_folder.read(backend_path(front)).package_digest == said["export"]["package_digest"]


def test_one_that_no_point_satisfies_is_refused_and_nothing_is_written(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is stopped before it decides, and goes on: nothing is measured twice, whatever the limits are by then."""
    words = ["--kappa", "0.25", "--int8"]

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gate, "_outcome", stop)
        assert export(*GATED, *words, "--max-leakage", "ssim<0.2") == 130
    assert names(tmp_path) == [".front.gate"]
    assert "the same command goes on" in capsys.readouterr().err
    assert export(*GATED, "--kappa", "0.5", "--int8", "--max-leakage", "ssim<0.2") == 2
    assert "with other settings" in capsys.readouterr().err
    assert export(*GATED, *words, "--max-leakage", "ssim<0.9", "--max-leakage", "psnr<2") == 9
    out, err = capsys.readouterr()
    assert names(tmp_path) == []
    assert "0.25" in out and " no\n" in out and "mean colour" in out and "J of ?" in out
    assert "error: none of 1 points is within the limits, nothing was written" in err
    assert "psnr" in err and "no protection can reach psnr<2" in err
    assert len(attacked) == 1


def test_accuracy_that_cannot_be_measured_is_no_accuracy(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model-arg", "num_classes=7", "--max-leakage", "ssim<0.9", "--kappa", "0.25", "--int8"]
    assert export(*GATED, *words) == 2
    assert "accuracy is unknown" in capsys.readouterr().err
    assert names(tmp_path) == [] and not attacked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "auto"], "no limit of that was given"),
        (["--split", "1", "--gate-steps", "5"], "--gate-steps was given, but no limit"),
        (["--split", "auto", "--max-leakage", "ssim<x"], "a metric, < and a number"),
        (["--split", "auto", "--max-leakage", "ssim<0.3", "--max-energy", "1"], "energy of every split is unknown"),
        (["--split", "auto", "--max-leakage", "ssim<0.3", "--max-energy", "-1"], "more than 0 J"),
        (["--split", "auto", "--max-leakage", "ssim<0.3", "--gate-images", "0"], "1 or more"),
        (["--cuts", "1,2", "--max-leakage", "ssim<0.3"], "cut 2 leaves nothing to the server"),
        (["--split", "0", "--max-leakage", "ssim<0.3"], "cut 0 leaves nothing to the device"),
        (
            ["--split", "auto", "--max-leakage", "ssim<0.3", "--kappa-max", "-1"],
            "kappa-max must be 0 or more, found -1",
        ),
        (["--split", "auto", "--max-leakage", "ssim<0.3", "--gate-attacks", "rigde"], "did you mean 'ridge'"),
        (["--split", "auto", "--max-leakage", "ssim<0.3", "--for", "sequential_split"], "is for frontends"),
    ],
)
def test_mistakes_are_found_before_the_work(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: list[str], said: str,
) -> None:  # fmt: skip
    assert export(*words) == 2
    assert said in capsys.readouterr().err
    assert names(tmp_path) == [] and not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_two_exports_into_one_output_at_once_are_refused(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".front.gate").mkdir()
    other = lock_folder(tmp_path / ".front.gate")
    try:
        assert export(*GATED, "--max-leakage", "ssim<0.9", "--kappa", "0.25", "--int8") == 2
    finally:
        os.close(other)
    assert "another export of the same output is running" in capsys.readouterr().err and not attacked


def test_a_limit_of_joules_needs_joules(
    export: Callable[..., int], attacked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is of split 2, and this model has split 1 alone."""
    table = str(write_energy_table(tmp_path / "table.json"))
    words = ["--max-leakage", "ssim<0.9", "--max-energy", "1", "--energy-table", table]
    assert export(*GATED, *words) == 2
    shown = capsys.readouterr().err
    assert "the energy of every candidate is unknown" in shown and "has no row of split 1" in shown
    assert names(tmp_path) == ["table.json"]


def test_public_images_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "-o", str(tmp_path / "front"), *GATED, "--max-leakage", "ssim<0.5"]) == 2
    assert "measured on public images" in capsys.readouterr().err


def plan_of(**changes: object) -> GatePlan:
    from exporter.gate_choice import read_limits

    values = {
        "limits": read_limits(["ssim<0.5"]), "max_energy_j": None, "energy_table": None, "profile": None,
        "attacks": ("ridge",), "steps": None, "images": None, "cuts": (), "precisions": (True, False),
        "sent": KEPT, "strengths": (0.0, 1.0), **changes,
    }  # fmt: skip
    return GatePlan(**values)


def test_what_is_left_open_is_swept_and_what_is_fixed_is_not() -> None:
    plan = tiny.plan(Path("front"), kappa=0.3, kappa_max=0.7, calibration="public", preview=True)
    assert strengths_of(plan, False) == (0.0, 0.25, 0.5, 0.7) and strengths_of(plan, True) == (0.3,)
    assert sent_of(plan, True) == ("all",) and sent_of(plan, False) == KEPT
    layouts = [TokenLayout(1, (40, 40), 8), TokenLayout(1, (2, 2), 8), TokenLayout(0, (2, 2), 8)]
    found = candidates(plan, plan_of(), layouts)
    shown = [(each.split, each.int8, each.sent_patches) for each in found]
    every = ("all", "checkerboard", "quarter", "none")
    assert shown == [
        (cut, int8, sent)
        for cut, rules in ((1, every[:1]), (2, every), (3, every[:3]))  # too many patches; all; no class token
        for int8 in (True, False)
        for sent in rules
    ]
    assert {(each.kappa, each.preview) for each in found} == {(0.0, False)}
    fixed = candidates(plan, plan_of(cuts=(2,), sent=("quarter",), precisions=(True,)), layouts)
    assert [(each.split, each.sent_patches) for each in fixed] == [(2, "quarter")]
    with pytest.raises(UsageError, match="cut 4 leaves nothing"):
        candidates(plan, plan_of(cuts=(4,)), layouts)
    for cut, sent, said in ((1, "quarter", "few enough to be filled in"), (3, "none", "this model has none")):
        with pytest.raises(UsageError, match=said):
            candidates(plan, plan_of(cuts=(cut,), sent=(sent,)), layouts)


@pytest.mark.slow
def test_the_command_itself_attacks_a_tuned_package(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing replaced: tuning, both attacks, the trained one for a few steps, and what the sweep promised."""
    words = [*MODEL, "--calibration", str(public), "-o", str(tmp_path / "front"), "--split", "auto"]
    words += ["--sent-patches", "checkerboard"]
    words += ["--kappa", "0.5", "--max-leakage", "ssim<0.99", "--gate-steps", "20", "--format", "json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    swept = [(each["point"]["precision"], each["point"]["sent"]) for each in said["points"]]
    assert swept == [("int8", "checkerboard"), ("float32", "checkerboard")]
    figures = said["export"]["figures"]
    assert figures["top1"]["tuned_noisy"] == said["chosen"]["accuracy"]
    rows = json.loads((tmp_path / "front" / LEAKAGE_NAME).read_bytes())["rows"]
    assert [each["attack"] for each in rows[0]["attacks"]] == ["ridge", "inverse_net"]
