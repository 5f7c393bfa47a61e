"""The account of releases out of a state directory: reads the ledger and, for names, the images of --data.

It changes nothing and waits for nobody: a run may be at work, and its lines that are not whole yet are not counted.
What is told of the counts is `releases`' part.
"""

from __future__ import annotations

from collections.abc import Callable

from contract.console import progress
from contract.errors import DataError, DeviceError
from contract.image_folder import scan
from contract.images import MAX_PIXELS, pixel_digest
from contract.keyed_noise import wire_id
from edge_runtime.config import AccountConfig
from edge_runtime.data import load_image
from edge_runtime.release_ledger import ReleaseLedger
from edge_runtime.releases import Account, account
from edge_runtime.state import read_secret


def read_account(config: AccountConfig, say: Callable[[str], None]) -> Account:
    """Raises: DeviceError for a state that is none, or cannot be read; DataError for --data without images."""
    if not (config.state / "identity").is_dir():
        raise DeviceError(f"{config.state} is no state of a device", "give --state the directory that edge-run uses")
    try:
        ledger = ReleaseLedger(config.state / "release_ledger", say, read_only=True)
    except OSError as error:
        raise DeviceError(
            f"the release ledger in {config.state} cannot be read: {error.strerror}", "check its permissions"
        ) from error
    return account(ledger, _names(config), config.max_releases, config.max_patch_share)


def _names(config: AccountConfig) -> dict[bytes, str] | None:
    """Files of --data by wire id; those that cannot be read never left."""
    secret_path = config.state / "identity" / "device_secret"
    if config.data is None or not secret_path.exists():
        return None
    secret = read_secret(secret_path, "device secret")
    names: dict[bytes, str] = {}
    images = scan(config.data, None).images
    for image in progress(images, total=len(images), description="reading", unit="images"):
        try:
            digest = pixel_digest(load_image(image.path, image.relative, MAX_PIXELS))
        except DataError:
            continue
        names.setdefault(wire_id(secret, digest), image.relative)
    return names
