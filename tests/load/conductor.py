"""Loads a conductor through the SDK: `python -m tests.load.conductor [--address HOST:PORT]`.

Without an address a local stack with the bundled model is started, its compute emulated and quick, so that the
conductor is what is loaded; `--engine real` has the compute too. Prompts share beginnings as conversations do: each
belongs to one of `--conversations`, whose common prefix is cached after its first turn.
"""

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.cli.load_generator.loops import SendRequest
from moonpool.cli.load_generator.senders import prompt_arguments, sdk_sender
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Slo
from moonpool.simulator.traces.mooncake import TraceRequest
from tests.load import prompts
from tests.load.program import Program
from tests.load.program import main as run

ENGINE = "emulated:llama-70b-a800"
TIME_SCALE = 100.0


def flags(parser: argparse.ArgumentParser) -> None:
    """The program's own flags."""
    prompts.flags(parser)
    parser.add_argument("--model", default=str(model_dir()), help="default: the bundled model")
    parser.add_argument("--engine", default=ENGINE, help="of the stack of its own: real or emulated:PROFILE")
    parser.add_argument("--engine-time-scale", type=float, default=0.0, help=f"default: {TIME_SCALE:g} when emulated")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances of the stack of its own")
    parser.add_argument("--decode", type=int, default=1, help="decode instances")


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[str]:
    """The conductor to load."""
    if options.address:
        yield options.address
        return
    emulated = options.engine != "real"
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            model=options.model,
            data_dir=Path(folder),
            prefill=options.prefill,
            decode=options.decode,
            engine=options.engine,
            time_scale=options.engine_time_scale or (TIME_SCALE if emulated else 0.0),
            log_level="warning",
        )
        with LocalStack(plan) as stack:
            yield stack.address


@contextlib.asynccontextmanager
async def sending(
    options: argparse.Namespace, address: str, trace: Sequence[TraceRequest]
) -> AsyncIterator[SendRequest]:
    """Requests through the SDK; their tokens follow from the seed and their index."""
    source = prompts.of(options, trace)
    slo = Slo(ttft_s=options.ttft_slo_s if math.isfinite(options.ttft_slo_s) else None)
    async with AsyncClient(address) as client:
        yield sdk_sender(client, prompt_arguments(source, slo))


PROGRAM = Program("conductor", __doc__ or "", flags, target, sending)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run(PROGRAM, argv)


if __name__ == "__main__":
    sys.exit(main())
