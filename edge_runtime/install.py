"""Installing a package: verify it step by step, then swap it in; a bad part is named, an older version refused.

The order is the point: sizes, signature over the exact manifest bytes, only then their meaning, rollback, the files'
digests; for a frontend an engine that opens and golden vectors, for parts to be trained what `training.json` says of
them; and at last one rename. The laws of each step are `contract`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from contract.errors import (
    CutlayerError,
    DeviceError,
    EngineError,
    KindError,
    OtherNameError,
    PackageError,
    RollbackError,
    SignatureError,
    TrialError,
    why,
)
from contract.images import normalise
from contract.leakage import LEAKAGE_NAME, PACKAGED_BYTES_MAX, of_package
from contract.manifest import LIMITS, MANIFEST_NAME, SIGNATURE_NAME, Cut, FileRecord, Manifest, digest, from_bytes
from contract.signature import PublicKey, verify
from contract.training import TRAINING_NAME, TrainingPlan
from contract.training import from_bytes as training_from_bytes
from edge_runtime.engines import Engine
from edge_runtime.state import sync_folder

GOLDEN_NAME = "golden.safetensors"
CURRENT, PREVIOUS, READY = "current", "previous", "ready"  # links to packages; ready: tried, and not current yet
QUARANTINE = "quarantine.json"
ATTEMPT = "attempt.json"  # which package is being tried
QUARANTINE_BYTES = 1 << 20
COPY_BLOCK_BYTES = 1 << 20
_HEX = re.compile("[0-9a-f]{64}")
FETCH = "copy the package folder again from the server"


@dataclass(frozen=True)
class InstallLimits:
    """What an installer takes in, and how near the golden vectors an engine must come."""

    signature_bytes: int = 4096
    golden_bytes: int = 64 << 20
    golden_snr_db: float = 25.0


LIMITS_OF_INSTALL = InstallLimits()


@dataclass(frozen=True)
class Installed:
    """A package that passed every check, in its place in the state directory.

    It holds a frontend, or parts to be trained (`training`), or both.
    """

    folder: Path
    manifest: Manifest
    digest: bytes
    golden_snr_db: float | None  # None: equal to the last bit, or no frontend that could be compared
    training: TrainingPlan | None

    @property
    def cut(self) -> Cut:
        """The frontend that this device runs: the package's first. Raises: PackageError when it has none."""
        if not self.manifest.cuts:
            raise PackageError(
                f"package {self.manifest.name} holds parts to be trained and no frontend",
                "use it with a server whose strategy trains on devices, or export one with --for split_adaptation",
            )
        return self.manifest.cuts[0]

    @property
    def onnx(self) -> Path:
        """The frontend's file. Raises: PackageError when it has none."""
        return self.folder / self.cut.onnx


def install(
    source: Path,
    packages: Path,
    trusted: Mapping[str, PublicKey],
    open_frontend: Callable[[Path], Engine],
    say: Callable[[str], None],
) -> Installed:
    """Verify the package in `source` and make it the current one under `packages`.

    What an update left to go back to (`update`) stays only while the same package is current.
    Raises: as `stage`.
    """
    staged = stage(source, packages, trusted, open_frontend, say)
    try:
        if current_name(packages) != staged.folder.name:
            (packages / PREVIOUS).unlink(missing_ok=True)
            point(packages, CURRENT, staged.folder.name)
        shed_others(packages)
    except OSError as error:
        raise DeviceError(
            f"the package cannot be installed in {packages}: {why(error, packages)}", "make room on the disk"
        ) from error
    return staged


def stage(
    source: Path,
    packages: Path,
    trusted: Mapping[str, PublicKey],
    open_frontend: Callable[[Path], Engine],
    say: Callable[[str], None],
    same_kind: bool = False,
) -> Installed:
    """Verify the package in `source` and copy it to its place under `packages`, beside the current one.

    `open_frontend` opens the frontend without noise, for the golden vectors; a package without one never calls it.
    With `same_kind` parts never take a frontend's place.
    Raises: SignatureError, ManifestError, RollbackError, PackageError, EngineError; DeviceError when the disk refuses.
    """
    signed = read_limited(source / MANIFEST_NAME, LIMITS.size_bytes)
    signature = read_limited(source / SIGNATURE_NAME, LIMITS_OF_INSTALL.signature_bytes)
    signer = verify(signed, signature, trusted)
    manifest = from_bytes(signed)
    if manifest.signer != signer:
        raise SignatureError(f"the manifest names signer {manifest.signer}, the signature is of {signer}", FETCH)
    package_digest = digest(signed)
    refuse_quarantined(package_digest, packages)
    refuse_rollback(manifest, package_digest, packages)
    if same_kind:
        refuse_other_kind(manifest, packages)
    folder = packages / package_digest.hex()
    try:
        for leftover in packages.glob(".incoming-*"):
            shutil.rmtree(leftover)
        if is_whole(folder, manifest, say):
            training, snr_db = check_contents(folder, manifest, open_frontend)
        else:
            incoming = packages / f".incoming-{package_digest.hex()}"
            try:
                copy_package(source, incoming, manifest, signed, signature)
                training, snr_db = check_contents(incoming, manifest, open_frontend)
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(incoming, folder)
            finally:
                shutil.rmtree(incoming, ignore_errors=True)
    except OSError as error:
        raise DeviceError(
            f"the package cannot be installed in {packages}: {why(error, packages)}", "make room on the disk"
        ) from error
    return Installed(folder, manifest, package_digest, None if math.isinf(snr_db) else snr_db, training)


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Raises: PackageError when the file is missing, unreadable or too big to be what it should be."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit_bytes + 1)
    except OSError as error:
        raise PackageError(f"the package lacks {path.name}: {error.strerror} ({path.parent})", FETCH) from error
    if len(data) > limit_bytes:
        raise PackageError(f"{path.name} should have at most {limit_bytes} bytes, found more", FETCH)
    return data


def quarantined(packages: Path) -> dict[str, str]:
    """Digests (hex) of packages that failed on this device, with the reason; an unreadable list is none."""
    try:
        found = json.loads((packages / QUARANTINE).read_bytes()[:QUARANTINE_BYTES])
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: reason for name, reason in found.items() if isinstance(reason, str)}


def attempted(packages: Path) -> str | None:
    """The digest (hex) of the package that is being tried, or was when the device stopped; None where there is none."""
    try:
        name = json.loads((packages / ATTEMPT).read_bytes()[:QUARANTINE_BYTES])["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and _HEX.fullmatch(name) else None


def refuse_quarantined(package_digest: bytes, packages: Path) -> None:
    """Raises: PackageError when this very package failed here before."""
    reason = quarantined(packages).get(package_digest.hex())
    if reason is not None:
        raise PackageError(
            f"package {package_digest.hex()[:12]} was tried on this device and failed: {reason}",
            f"sign a better one with a higher version; to try this one again, delete its line in "
            f"{packages / QUARANTINE}",
        )


def refuse_rollback(manifest: Manifest, package_digest: bytes, packages: Path) -> None:
    """Raises: RollbackError when this name was installed with a higher version, or with this one and other content."""
    never_current = {*quarantined(packages), current_name(packages, READY), attempted(packages)}
    never_current -= {current_name(packages, link) for link in (CURRENT, PREVIOUS)}
    for path in sorted(packages.glob(f"*/{MANIFEST_NAME}")):
        if path.parent.is_symlink() or path.parent.name in never_current:
            continue  # a version that failed here, or is only being tried, is none to stay above
        try:
            data = path.read_bytes()
            known = from_bytes(data)
        except (OSError, CutlayerError):
            continue  # damaged after it was installed: it is set right when it is installed again
        if known.name != manifest.name:
            continue
        if known.version > manifest.version:
            raise RollbackError(
                f"package {manifest.name} version {manifest.version} is older than the installed {known.version}",
                "sign the frontend again with a higher version, or give this device a new --state",
            )
        if known.version == manifest.version and digest(data) != package_digest:
            raise RollbackError(
                f"package {manifest.name} version {manifest.version} was installed with digest "
                f"{digest(data).hex()[:12]}, this one has {package_digest.hex()[:12]}",
                "a changed package needs a higher version",
            )


def current_manifest(packages: Path) -> Manifest | None:
    """That of what is current; None where there is nothing, or it is damaged."""
    try:
        return from_bytes((packages / CURRENT / MANIFEST_NAME).read_bytes())
    except (OSError, CutlayerError):
        return None


def refuse_other_kind(manifest: Manifest, packages: Path) -> None:
    """Raises: KindError when a frontend would take the place of parts to be trained, or the other way round."""
    current = current_manifest(packages)
    if current is None:
        return
    if bool(current.cuts) != bool(manifest.cuts):
        kinds = ("parts that devices train", "a frontend")
        raise KindError(
            f"package {manifest.name} version {manifest.version} holds {kinds[bool(manifest.cuts)]}, and "
            f"{current.name}, which is current, {kinds[bool(current.cuts)]}: an update stays of one kind",
            "run it with edge-run --engine and a --state of its own",
        )


def refuse_other_name(manifest: Manifest, packages: Path, allowed: Collection[str]) -> None:
    """For packages that a server chose: it must not choose among all that one key has signed.

    Raises: OtherNameError when it is neither of the name that is current nor of one that is allowed, and where nothing
    can be read that is current: neither name nor noise could be compared.
    """
    current, by_hand = current_manifest(packages), "edge-run update DIR"
    if current is None:
        raise OtherNameError(
            f"package {manifest.name} version {manifest.version} cannot be compared: the current one cannot be read",
            f"install one by hand: {by_hand}",
        )
    if manifest.name not in (current.name, *allowed):
        raise OtherNameError(
            f"package {manifest.name} version {manifest.version} is not known to be meant for this device: "
            f"{current.name} is current",
            f"take it by hand ({by_hand}), or let servers do so: --update-names {manifest.name}",
        )


def is_whole(folder: Path, manifest: Manifest, say: Callable[[str], None]) -> bool:
    """Is this very package installed already, every byte as listed?"""
    if not folder.is_dir():
        return False
    try:
        for record in manifest.files:
            check_file(folder / record.name, record, None)
    except (PackageError, OSError) as error:
        say(f"the installed copy is damaged and is installed again: {why(error)}")
        return False
    return True


def copy_package(source: Path, incoming: Path, manifest: Manifest, signed: bytes, signature: bytes) -> None:
    """Copy exactly the listed files, checking each byte on the way; the manifest goes in as it was verified.

    Raises: PackageError naming the file; OSError.
    """
    incoming.mkdir(mode=0o700)
    for record in manifest.files:
        check_file(source / record.name, record, incoming / record.name)
    for name, data in ((MANIFEST_NAME, signed), (SIGNATURE_NAME, signature)):
        with (incoming / name).open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    sync_folder(incoming)


def check_file(path: Path, record: FileRecord, copy_to: Path | None) -> None:
    """Size and SHA-256 of a file against the manifest, copying it on the way if asked.

    Raises: PackageError naming the file; OSError when the copy cannot be written.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            raise PackageError(f"{record.name} should have {record.size_bytes} bytes, found {size_bytes}", FETCH)
        reader = path.open("rb")
    except OSError as error:
        raise PackageError(f"the package lacks {record.name}: {error.strerror}", FETCH) from error
    found = hashlib.sha256()
    with reader, (copy_to or Path(os.devnull)).open("wb") as writer:
        while block := reader.read(COPY_BLOCK_BYTES):
            found.update(block)
            if copy_to is not None:
                writer.write(block)
        if copy_to is not None:
            writer.flush()
            os.fsync(writer.fileno())
    if found.hexdigest() != record.sha256:
        raise PackageError(
            f"{record.name} should have SHA-256 {record.sha256[:16]}..., found {found.hexdigest()[:16]}...", FETCH
        )


def check_contents(
    folder: Path, manifest: Manifest, open_frontend: Callable[[Path], Engine]
) -> tuple[TrainingPlan | None, float]:
    """What is to be trained, if anything, and the golden SNR of the frontend in dB, infinite without one.

    Raises: ManifestError when training.json does not fit the manifest; PackageError when the leakage table is another
    package's; and as `check_golden`.
    """
    training, listed = None, {record.name for record in manifest.files}
    if TRAINING_NAME in listed:
        training = training_from_bytes(read_limited(folder / TRAINING_NAME, LIMITS.size_bytes), manifest)
    if LEAKAGE_NAME in listed:
        of_package(read_limited(folder / LEAKAGE_NAME, PACKAGED_BYTES_MAX), manifest)
    return training, check_golden(folder, manifest, open_frontend) if manifest.cuts else math.inf


def check_golden(folder: Path, manifest: Manifest, open_frontend: Callable[[Path], Engine]) -> float:
    """SNR in dB of the engine's tokens against those shipped, without noise.

    Raises: PackageError when the golden file is not what the manifest says; EngineError when the engine is too far off.
    """
    cut = manifest.cuts[0]
    pixels, expected = read_golden(folder / GOLDEN_NAME, manifest, cut)
    try:
        engine = open_frontend(folder / cut.onnx)
        tokens = engine.run(normalise(pixels, manifest.image))
    except EngineError as error:
        raise EngineError(
            f"{cut.onnx}: {error.cause} (the package needs onnxruntime {manifest.engine.onnxruntime_min} or later)",
            error.cure,
        ) from error
    if tokens.shape != expected.shape:
        raise PackageError(f"{cut.onnx} should give tokens {expected.shape}, found {tokens.shape}", FETCH)
    snr_db = signal_to_noise_db(expected, tokens)
    if not snr_db >= LIMITS_OF_INSTALL.golden_snr_db:
        raise TrialError(
            f"{GOLDEN_NAME}: {engine.name} {engine.version} should give the shipped tokens within "
            f"{LIMITS_OF_INSTALL.golden_snr_db} dB, found {snr_db:.1f} dB",
            "this engine computes something else than the exporter checked: use another version of it",
            "parity",
        )
    return snr_db


def read_golden(path: Path, manifest: Manifest, cut: Cut) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Pixels (n, h, w, 3) uint8 and tokens (n, T, d) float32. Raises: PackageError."""
    if all(record.name != path.name for record in manifest.files):
        raise PackageError(f"the manifest lists no {path.name}", "export the package again")
    if path.stat().st_size > LIMITS_OF_INSTALL.golden_bytes:
        raise PackageError(
            f"{path.name} should have at most {LIMITS_OF_INSTALL.golden_bytes} bytes", "export the package again"
        )
    try:
        tensors = load_file(path)
        pixels, tokens = tensors["pixels"], tensors["tokens"]
    except (SafetensorError, KeyError) as error:
        raise PackageError(f"{path.name} should hold pixels and tokens: {error}", "export the package again") from error
    image, layout = manifest.image, cut.tokens
    if pixels.shape[1:] != (image.height, image.width, 3) or pixels.dtype != np.uint8 or len(pixels) == 0:
        raise PackageError(
            f"{path.name}: pixels {pixels.dtype} {pixels.shape} do not fit the manifest", "export the package again"
        )
    if tokens.shape != (len(pixels), layout.count, layout.dim) or tokens.dtype != np.float32:
        raise PackageError(
            f"{path.name}: tokens {tokens.dtype} {tokens.shape} do not fit the manifest", "export the package again"
        )
    return pixels, tokens


def signal_to_noise_db(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """10 log10 of the signal's power over the difference's; infinite when equal, NaN when not finite."""
    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(np.subtract(found, expected, dtype=np.float64)).sum())
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if 0.0 < signal < math.inf and noise < math.inf else math.nan


def current_name(packages: Path, link: str = CURRENT) -> str | None:
    """The folder that is current, or the one before it (`previous`); None where there is none."""
    try:
        return os.readlink(packages / link)
    except OSError:
        return None


def point(packages: Path, link: str, name: str) -> None:
    """`link` names another package from one instant to the next."""
    draft = packages / f".{link}.partial"
    draft.unlink(missing_ok=True)
    draft.symlink_to(name)
    os.replace(draft, packages / link)
    sync_folder(packages)


def shed_others(packages: Path) -> None:
    """Of packages that nothing points at only the manifests stay, against rollback: frontends can fill a small card."""
    kept = {current_name(packages, link) for link in (CURRENT, PREVIOUS, READY)}
    for manifest in packages.glob(f"*/{MANIFEST_NAME}"):
        if manifest.parent.name not in kept and not manifest.parent.is_symlink():
            for file in manifest.parent.iterdir():
                if file != manifest:
                    file.unlink()
