"""Runs a prefill instance: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.prefill.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the process's exit code."""
    return run_main(PrefillConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
