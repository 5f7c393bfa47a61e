"""A backend folder is whole, or its fault is named before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("timm")

from contract.errors import ConfigError, CutlayerError, PackageError  # noqa: E402
from server_runtime import backend, backend_folder  # noqa: E402
from tests.server_runtime import tiny  # noqa: E402


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_backend_folder(tmp_path_factory.mktemp("export") / "front.backend", 3e-5, 2e-3)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "front.backend"))


def test_a_whole_folder_is_read(folder: Path) -> None:
    found = backend_folder.read(folder)
    assert (found.model, found.cut.index, found.cut.tokens) == (tiny.MODEL, tiny.CUT, tiny.LAYOUT)
    assert (found.backend_lr, found.head_lr) == (3e-5, 2e-3)
    assert found.model_args == tiny.MODEL_ARGS
    loaded = backend.load(found, tiny.KAPPA, backend.choose_device(1))
    assert loaded.width == tiny.LAYOUT.dim


def test_the_digest_changes_with_the_weights(folder: Path, original: Path) -> None:
    assert backend_folder.read(folder).sha256() == backend_folder.read(original).sha256()
    path = folder / "backend.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert backend_folder.read(folder).sha256() != backend_folder.read(original).sha256()


def test_a_missing_folder_is_a_matter_of_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        backend_folder.read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", backend_folder.FILES)
def test_each_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(PackageError, match=name):
        backend_folder.read(folder)


@pytest.mark.parametrize("name", ["manifest.json", "export.json", "few_shot.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"backend_lr": "x", "plan": 3}'])
def test_de_04_each_unreadable_document_is_an_error_of_ours(name: str, data: bytes, folder: Path) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(CutlayerError):
        backend_folder.read(folder)


@pytest.mark.parametrize("name", ["backend.safetensors", "statistics.safetensors"])
@pytest.mark.parametrize("keep", [0, 100, -8])
def test_weights_that_are_not_whole_are_named(name: str, keep: int, folder: Path) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PackageError, match=name):
        backend.load(backend_folder.read(folder), tiny.KAPPA, backend.choose_device(1))


def test_se_04_weights_of_another_cut_do_not_fit(folder: Path) -> None:
    document = json.loads((folder / "export.json").read_text())
    document["plan"]["model_args"] = list((tiny.MODEL_ARGS | {"depth": 4}).items())
    (folder / "export.json").write_text(json.dumps(document))
    with pytest.raises(PackageError, match=r"backend\.safetensors does not fit"):
        backend.load(backend_folder.read(folder), tiny.KAPPA, backend.choose_device(1))
