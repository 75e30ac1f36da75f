"""Runs an indexer: flags -> configuration -> process."""

import sys
from collections.abc import Sequence

from moonpool.base.rpc.process import run_main
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.interop.indexer.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the process's exit code."""
    return run_main(IndexerConfig, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
