"""Runs a gateway: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.rpc.process import run_main
from services.gateway.config import GatewayConfig
from services.gateway.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until stopped; returns the process's exit code."""
    return run_main(GatewayConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
