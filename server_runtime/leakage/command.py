"""leakage-profile as a command: where the server's packages are missing, as on a device, it says so."""

from __future__ import annotations

import sys

from contract.console import run_command
from contract.extras import require


def main() -> int:
    return run_command(_main)


def _main() -> int:
    require("torch", "timm")
    from . import cli  # imports torch

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
