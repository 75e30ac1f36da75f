"""Runs a decode instance: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the process's exit code."""
    return run_main(DecodeConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
