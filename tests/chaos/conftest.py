"""The small real deployment, an undisturbed adaptation of it for each label mode, and fresh ones to disturb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.adaptation import adapt
from tests.chaos.limits import write_command
from tests.over_loopback.conftest import package
from tests.over_loopback.deployment import Deployment, copy_secrets

__all__ = ["package"]


@pytest.fixture(scope="session")
def calm(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployment]:
    """The undisturbed adaptation under a label mode, run when it is first asked for."""
    made: dict[str, Deployment] = {}

    def of(mode: str) -> Deployment:
        if mode not in made:
            made[mode] = Deployment(package, tmp_path_factory.mktemp(f"calm-{mode}"))
            adapt(made[mode], mode)
        return made[mode]

    return of


@pytest.fixture
def fresh(package: Path, tmp_path: Path, calm: Callable[[str], Deployment]) -> Iterator[Callable[[str], Deployment]]:
    """A deployment that has not adapted yet, whose devices have the secrets of the undisturbed ones."""

    def of(mode: str) -> Deployment:
        copy_secrets(calm(mode).root, tmp_path)
        return Deployment(package, tmp_path)

    yield of
    for left in psutil.Process().children():  # devices of a test that failed would try for ever
        left.kill()


@pytest.fixture
def limited(tmp_path: Path) -> Callable[..., None]:
    """Lets a deployment run its commands with the limits of tests.chaos.limits. Call it after `fresh`."""

    def limit(deployment: Deployment, server: tuple[str, ...] = (), device: tuple[str, ...] = ()) -> None:
        deployment.server_bin = write_command(tmp_path / "limited", "server-run", server).parent
        deployment.device_bin = write_command(tmp_path / "limited", "edge-run", device).parent

    return limit
