"""Runs a stage on another host: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.remote.process import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the process's exit code."""
    return run_main(StageConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
