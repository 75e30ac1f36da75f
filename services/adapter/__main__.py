"""Runs an adapter: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.rpc.process import run_main
from services.adapter.config import AdapterConfig
from services.adapter.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until stopped; returns the process's exit code."""
    return run_main(AdapterConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
