"""--add-table: a table goes into its package, which is signed anew; any other table, and any other key, is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from contract.leakage import LEAKAGE_NAME, of_package, to_bytes
from contract.manifest import Manifest, digest, from_bytes
from contract.signature import generate, key_id, save_private, verify
from edge_runtime.engines import open_engine
from edge_runtime.install import Installed, install
from exporter.cli import main
from exporter.package import backend_path
from server_runtime import backend_folder
from server_runtime.leakage.package import read_package
from tests.exporter.conftest import Exported
from tests.leakage_table import leakage_table


@pytest.fixture
def front(exported: Exported, tmp_path: Path) -> Path:
    """A copy of the shared export, with its key beside it."""
    folder = shutil.copytree(exported.folder, tmp_path / "front")
    shutil.copytree(exported.backend, backend_path(folder))
    save_private(tmp_path / "signing-key.pem", exported.key)
    return folder


def manifest_of(front: Path) -> Manifest:
    return from_bytes((front / "manifest.json").read_bytes())


def table_file(front: Path, **changes: object) -> Path:
    path = front.parent / "leakage.json"
    path.write_bytes(to_bytes(replace(leakage_table(manifest_of(front)), **changes)))
    return path


def add(front: Path, *words: str) -> int:
    return main(["--add-table", str(front.parent / "leakage.json"), str(front), *words])


def on_device(front: Path, packages: Path, key: object) -> Installed:
    packages.mkdir(exist_ok=True)
    trusted = {key_id(key.public_key()): key.public_key()}
    return install(front, packages, trusted, lambda path: open_engine("onnxruntime", path, 1), lambda text: None)


def contents(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.iterdir()}


def test_the_table_is_in_the_package_and_device_server_and_attackers_take_it(
    exported: Exported, front: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, before = table_file(front), manifest_of(front)
    first = on_device(front, tmp_path / "packages", exported.key)
    assert add(front, "--format", "json") == 0
    data, signature = ((front / name).read_bytes() for name in ("manifest.json", "manifest.sig"))
    said, after = json.loads(capsys.readouterr().out), from_bytes(data)
    assert verify(data, signature, {after.signer: exported.key.public_key()}) == before.signer
    assert (said["kind"], said["version"], said["package_digest"]) == ("attached", 2, digest(data).hex())
    assert {each.name for each in after.files} == {each.name for each in before.files} | {LEAKAGE_NAME}
    assert replace(after, version=1, created=before.created, files=before.files) == before
    assert (front / LEAKAGE_NAME).read_bytes() == table.read_bytes()
    assert (backend_path(front) / LEAKAGE_NAME).read_bytes() == table.read_bytes()  # a server assigns noise by it
    second = on_device(front, tmp_path / "packages", exported.key)  # no rollback: the version went up
    assert second.digest == digest(data) != first.digest
    assert of_package((second.folder / LEAKAGE_NAME).read_bytes(), second.manifest).package == before.name
    assert backend_folder.read(backend_path(front)).package_digest == digest(data).hex()
    assert read_package(front).digest.hex() == json.loads(table.read_bytes())["settings"]["package_digest"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "packages") == [
        "front", "front.backend", "leakage.json", "signing-key.pem",
    ]  # fmt: skip


def test_a_newer_table_takes_the_place_of_the_older(front: Path) -> None:
    table_file(front)
    assert add(front) == 0
    newer = table_file(front, attacks_s=2.0)  # measured on the package that has a table already
    assert add(front) == 0
    assert manifest_of(front).version == 3
    assert (front / LEAKAGE_NAME).read_bytes() == newer.read_bytes()
    assert sum(each.name == LEAKAGE_NAME for each in manifest_of(front).files) == 1


def other_package(front: Path) -> None:
    table = leakage_table(replace(manifest_of(front), model="vit_base_patch16_224"))
    (front.parent / "leakage.json").write_bytes(to_bytes(table))


def no_table(front: Path) -> None:
    (front.parent / "leakage.json").write_text("{}")


def no_row(front: Path) -> None:
    (front.parent / "leakage.json").write_bytes(to_bytes(leakage_table(manifest_of(front), (0.0, 1.0))))


def no_file(front: Path) -> None:
    (front.parent / "leakage.json").unlink()


def other_key(front: Path) -> None:
    (front.parent / "signing-key.pem").unlink()
    save_private(front.parent / "signing-key.pem", generate())


def no_key(front: Path) -> None:
    (front.parent / "signing-key.pem").unlink()


def altered_file(front: Path) -> None:
    data = bytearray((front / "front.onnx").read_bytes())
    data[-1] ^= 1
    (front / "front.onnx").write_bytes(data)


def altered_manifest(front: Path) -> None:
    data = (front / "manifest.json").read_bytes()
    (front / "manifest.json").write_bytes(data.replace(b'"kappa":0.25', b'"kappa":0.75'))


def no_backend(front: Path) -> None:
    shutil.rmtree(backend_path(front))


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (other_package, 4, "the leakage table is of a package"),
        (no_table, 4, "is no table of leakage-profile"),
        (no_row, 4, "no row at kappa 0.25"),
        (no_file, 2, "leakage.json cannot be read: No such file or directory\n  cure: correct the path"),
        (other_key, 2, "give the key that signed it"),
        (no_key, 2, "readable key file"),
        (altered_file, 4, "is not the file that the manifest lists"),
        (altered_manifest, 4, "signature"),
        (no_backend, 2, "front.backend is missing"),
    ],
)
def test_nothing_is_signed_that_is_not_as_it_was_published(
    front: Path, harm: object, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table_file(front)
    harm(front)
    folders = [each for each in (front, backend_path(front)) if each.exists()]
    before = contents(*folders)
    assert add(front) == code
    shown = capsys.readouterr().err
    assert said in shown and "cure: " in shown and "Traceback" not in shown
    assert contents(*folders) == before
    assert not [name for name in os.listdir(front.parent) if name.startswith(".")]
