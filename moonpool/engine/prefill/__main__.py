"""Runs an instance that begins as prefill: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.engine.roles.process import PrefillProcessConfig, serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the process's exit code."""
    return run_main(PrefillProcessConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
