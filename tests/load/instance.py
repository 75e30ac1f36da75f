"""A single engine instance to be loaded: the one at `--address`, or one started with a conductor for it to join."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moonpool.cli.stack import LocalStack, StackPlan


@contextlib.contextmanager
def instance(kind: str, options: argparse.Namespace) -> Iterator[str]:
    """Address of a prefill or decode instance.

    Args:
        kind: "prefill" or "decode".
        options: `address` and the flags of `prompts.model_flags`.
    """
    if options.address:
        yield options.address
        return
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            model=options.model,
            data_dir=Path(folder),
            prefill=int(kind == "prefill"),
            decode=int(kind == "decode"),
            kvstore=0,
            dtype=options.dtype,
            block_size=options.block_size,
            engine=options.engine,
            time_scale=options.engine_time_scale,
            kv_cache_memory_bytes=options.kv_bytes,
            log_level="warning",
        )
        with LocalStack(plan) as stack:
            yield stack.services[f"{kind}-0"].address
