"""Loads a decode instance through `Reserve`, `ReceiveKV` and `Steps`: `python -m tests.load.decode [--address H:P]`.

Each request reserves room, sends KV made up for its prompt over the real transfer path, starts the sequence and reads
its tokens to the last. The KV is made up, so the tokens mean nothing (an emulated engine, which checks KV, cannot be
loaded so). Without an address a decode instance is started (and a conductor for it to join). The first answer is the
first token from decode.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.kv.frames import Slice
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.rpc.channels import Channels
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest
from moonpool.conductor.decode_streams import NewTokens, StepsPool
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.v1 import decode_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from tests.load import prompts
from tests.load.instance import instance
from tests.load.program import Program
from tests.load.program import main as run
from tests.slices import slice_to_send

VERDICT_S = 60.0
SMALL_FLOATS = b"\x3c"
"""Every element made of these bytes is a small number in all element types."""


def flags(parser: argparse.ArgumentParser) -> None:
    """The program's own flags."""
    prompts.flags(parser)
    prompts.model_flags(parser)


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[str]:
    """The decode instance to load."""
    if options.engine != "real":
        raise ConfigError("engine", "emulated compute checks the KV, and here it is made up; leave it 'real'")
    with instance("decode", options) as address:
        yield address


def made_up(layout: KVLayout, tokens: int) -> Iterator[Slice]:
    """KV of a prompt, layer by layer."""
    data = memoryview(SMALL_FLOATS * layout.slice_bytes(0))
    for layer in range(layout.layers):
        for block in range(layout.blocks_for(tokens)):
            yield slice_to_send(layout, layer, block, data, layout.valid_tokens(tokens, block))


class Tokens:
    """Follows one sequence: what `take` gives are its tokens, with the last of them the reason of the end."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[tuple[int, bool] | MoonpoolError] = asyncio.Queue()

    def add_tokens(self, new: NewTokens) -> bool:
        """New ones."""
        self._news.put_nowait((len(new.token_ids), bool(new.reason)))
        return bool(new.reason)

    def fail(self, error: MoonpoolError) -> None:
        """The sequence cannot go on."""
        self._news.put_nowait(error)

    async def take(self) -> tuple[int, bool]:
        """How many new tokens there are, and whether they are the last.

        Raises:
            MoonpoolError: the sequence cannot go on.
        """
        news = await self._news.get()
        if isinstance(news, MoonpoolError):
            raise news
        return news


@contextlib.asynccontextmanager
async def sending(
    options: argparse.Namespace, address: str, trace: Sequence[TraceRequest]
) -> AsyncIterator[SendRequest]:
    """Whole lives of sequences at decode."""
    plan = prompts.plan_of(options, decode=True)
    options.shared_tokens = 0  # made-up KV must never be found again as somebody's prefix
    source = prompts.of(options, trace, plan.vocab_size)
    me = kv_pb2.Instance(id="load", epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    hello = kv_pb2.StreamHello(sender=me, namespace=plan.namespace, layout=plan.layout.to_proto())
    numbers = itertools.count(1)
    async with contextlib.AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        stub = DecodeServiceStub(channels.get(address))
        sender = TransferSender(KVEndpoint(channels, address, hello, plan.layout))
        stack.push_async_callback(sender.aclose)
        pool = StepsPool(channels)
        pool.conductor.CopyFrom(kv_pb2.Instance(id="load", epoch=1, kind=kv_pb2.INSTANCE_KIND_CONDUCTOR))
        stack.push_async_callback(pool.aclose)

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            tokens, count = source.tokens(index), max(2, source.output_tokens(index))
            request_id = f"load-{options.seed}-{next(numbers)}"
            spec = prompts.sequence(request_id, tokens, count, plan)
            promised = await stub.Reserve(decode_pb2.ReserveRequest(sequence=spec))
            goal = promised.target
            goal.decode.address = address  # as we reach it
            steps, following = pool.get(goal.decode), Tokens()
            steps.subscribe(request_id, following, goal)
            try:
                async with await sender.open(goal) as transfer:
                    steps.start(request_id, goal, tokens[-1:])
                    outcome.nbytes = await transfer.send(made_up(plan.layout, len(tokens)))
                    transfer.close(aborted=False)
                    await transfer.verdict(VERDICT_S)
                finished = False
                while not finished:
                    new, finished = await following.take()
                    outcome.note(new, clock())
            except BaseException:
                steps.cancel(request_id, goal)
                raise
            finally:
                steps.unsubscribe(request_id)

        yield send


PROGRAM = Program("decode", __doc__ or "", flags, target, sending)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run(PROGRAM, argv)


if __name__ == "__main__":
    sys.exit(main())
