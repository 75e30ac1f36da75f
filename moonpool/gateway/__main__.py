"""Run a gateway: flags, then configuration, then process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped. Returns the exit code of the process."""
    return run_main(GatewayConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
