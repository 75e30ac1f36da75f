"""Loads a prefill instance through `Prefill`: `python -m tests.load.prefill [--address HOST:PORT]`.

The KV goes to a decode side of the program's own, which checks every frame and keeps nothing; so nothing but prefill
is loaded. Without an address a prefill instance is started (and a conductor for it to join). The first answer is the
first token, the end is the end of the stream, when the KV has arrived.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from moonpool.base.errors import TransferFailed
from moonpool.base.rpc.channels import Channels
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.v1 import prefill_pb2
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.load import prompts
from tests.load.instance import instance
from tests.load.program import Program
from tests.load.program import main as run
from tests.load.sink import sink


def flags(parser: argparse.ArgumentParser) -> None:
    """The program's own flags."""
    prompts.flags(parser)
    prompts.model_flags(parser)


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[str]:
    """The prefill instance to load."""
    with instance("prefill", options) as address:
        yield address


@contextlib.asynccontextmanager
async def sending(
    options: argparse.Namespace, address: str, trace: Sequence[TraceRequest]
) -> AsyncIterator[SendRequest]:
    """Prompts to prefill, their KV to a sink."""
    plan = prompts.plan_of(options, decode=False)
    source = prompts.of(options, trace, plan.vocab_size)
    numbers = itertools.count(1)
    async with Channels() as channels, sink(plan) as receiver:
        stub = PrefillServiceStub(channels.get(address))

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            tokens = source.tokens(index)
            number = next(numbers)
            spec = prompts.sequence(f"load-{options.seed}-{number}", tokens, 2, plan)
            request = prefill_pb2.PrefillRequest(sequence=spec, target=receiver.expect(number, len(tokens)))
            try:
                async for event in stub.Prefill(request):
                    if event.HasField("first_token"):
                        outcome.first, outcome.tokens = clock(), len(tokens)
                    elif event.HasField("finished"):
                        outcome.nbytes = event.finished.sent_bytes
            finally:
                whole = receiver.forget(number)
            if not whole:
                raise TransferFailed("the prefill ended, but its KV has not all come")

        yield send


PROGRAM = Program("prefill", __doc__ or "", flags, target, sending, generates=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run(PROGRAM, argv)


if __name__ == "__main__":
    sys.exit(main())
