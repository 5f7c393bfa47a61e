"""Who may import whom (README, Layout): read from the source, so that a lazy import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"contract", "edge_runtime", "exporter", "profiles", "server_runtime", "tools", "tests"}

# Package -> (our packages it may import, third-party modules it may import). None: no limit.
RULES: dict[str, tuple[set[str], set[str] | None]] = {
    "contract": (set(), {"numpy", "PIL", "safetensors", "cryptography", "tqdm", "tomli", "tomllib"}),
    "profiles": (set(), {"tomli", "tomllib"}),
    "edge_runtime": (
        {"contract", "profiles"},
        {"numpy", "onnxruntime", "websockets", "psutil", "cryptography", "safetensors", "PIL"},
    ),
    "exporter": ({"contract", "profiles"}, None),
    "server_runtime": ({"contract", "profiles", "exporter.split", "exporter.models"}, None),
}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_allowed(name: str, package: str) -> bool:
    ours, others = RULES[package]
    top = name.split(".")[0]
    if top in OURS:
        allowed = {package, *ours}
        # `from exporter import split` shows up as "exporter" and "exporter.split": the second decides.
        return any(name == each or name.startswith(each + ".") or each.startswith(name + ".") for each in allowed)
    return top in sys.stdlib_module_names or others is None or top in others


@pytest.mark.parametrize("package", sorted(RULES))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    broken = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports_of(path)
        if not is_allowed(name, package)
    ]
    assert not broken, "\n".join(broken)


def test_the_rule_itself_catches_a_breach() -> None:
    assert not is_allowed("torch", "edge_runtime")
    assert not is_allowed("exporter.split", "edge_runtime")
    assert not is_allowed("exporter.tune", "server_runtime")
    assert is_allowed("exporter.split.build_backend", "server_runtime")


@pytest.mark.parametrize("name", ["pickle", "marshal", "shelve", "dill", "joblib"])
def test_nothing_unpickles(name: str) -> None:
    users = [path for package in RULES for path in (ROOT / package).rglob("*.py") if name in set(imports_of(path))]
    assert not users


def test_the_device_command_starts_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'onnx', 'timm', 'torchvision', 'exporter', 'server_runtime'}:\n"
        "            raise ImportError('forbidden on a device: ' + name)\n"
        "sys.meta_path.insert(0, Wall())\n"
        "import pkgutil, importlib, edge_runtime\n"
        "for entry in pkgutil.walk_packages(edge_runtime.__path__, 'edge_runtime.'):\n"
        "    importlib.import_module(entry.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def has_main(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)


def test_every_command_runs_as_a_module_too() -> None:
    commands = [path for package in RULES for path in (ROOT / package).rglob("*.py") if has_main(path)]
    assert len(commands) >= 8
    silent = [
        str(path.relative_to(ROOT)) for path in commands if '\nif __name__ == "__main__":\n' not in path.read_text()
    ]
    assert not silent
    done = subprocess.run([sys.executable, "-m", "edge_runtime.cli", "--help"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: edge-run")
