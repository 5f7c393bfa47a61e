"""The small real deployment, made once: tools/test hands its own over, otherwise it is made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("CUTLAYER_TEST_PACKAGE")
    if given:
        return Path(given)
    from tests.make_package import main

    root = tmp_path_factory.mktemp("package")
    main(root)
    return root
