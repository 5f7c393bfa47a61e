"""The small real deployment, made once: tools/test hands its own over, otherwise it is made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if given:
        return Path(given)
    root = tmp_path_factory.mktemp("package")
    subprocess.run([sys.executable, "-m", "tests.make_package", str(root)], check=True)
    return root
