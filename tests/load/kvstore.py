"""Loads a kvstore through `Put` and `Get`: `python -m tests.load.kvstore [--address HOST:PORT]`.

A share of the requests puts new blocks, the others read blocks that an earlier one has put, and check their bytes.
Without an address a kvstore is started, alone. The first answer is the first layer of a read, and all of a put.
"""

import argparse
import contextlib
import hashlib
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from moonpool.base.errors import NotFound, TransferFailed
from moonpool.base.kv.keys import block_keys, chain_root, namespace
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest
from moonpool.cli.stack import ServiceProcess
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.v1 import kv_pb2
from tests.load.program import Program
from tests.load.program import main as run
from tests.slices import hashed

START_S = 60.0
STOP_S = 20.0
REQUEST_S = 60.0


def flags(parser: argparse.ArgumentParser) -> None:
    """The program's own flags."""
    parser.add_argument("--put-share", type=float, default=0.3, help="of requests that put; the others get")
    parser.add_argument("--blocks", type=int, default=8, help="of each request; at most so many of a trace's")
    parser.add_argument("--layers", type=int, default=8, help="of each block")
    parser.add_argument("--slice-bytes", type=int, default=64 << 10, help="of each layer of a block")
    parser.add_argument("--dram-bytes", type=int, default=256 << 20, help="of the kvstore of its own")
    parser.add_argument("--ssd-bytes", type=int, default=1 << 30, help="of the kvstore of its own; 0 = DRAM only")


@contextlib.contextmanager
def target(options: argparse.Namespace) -> Iterator[str]:
    """The kvstore to load."""
    if options.address:
        yield options.address
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--dram-bytes", str(options.dram_bytes), "--ssd-bytes", str(options.ssd_bytes)]
        arguments += ["--data-dir", str(Path(folder) / "data"), "--log-level", "warning"]
        service = ServiceProcess("kvstore", "kvstore-0", arguments, Path(folder) / "kvstore.log")
        try:
            yield service.wait_ready(START_S)
        finally:
            service.signal(signal.SIGTERM)
            service.wait(STOP_S)


def layout_of(options: argparse.Namespace) -> KVLayout:
    """Blocks of the wanted sizes."""
    return KVLayout.uniform(options.layers, 1, options.slice_bytes // (2 * 64 * 2), 64, "bfloat16")


def content(key: bytes, layer: int, layout: KVLayout) -> bytes:
    """What a block's layer holds, a function of its key."""
    word = hashlib.blake2b(key + bytes([layer]), digest_size=16).digest()
    return word * (layout.slice_bytes(0) // len(word))


class Chains:
    """The blocks of the test that can be read."""

    def __init__(self, options: argparse.Namespace, trace: Sequence[TraceRequest], layout: KVLayout) -> None:
        self._options, self._trace, self._layout = options, trace, layout
        self.root = chain_root(namespace(bytes(32), layout), f"load-{options.seed}")
        self._stored: list[Sequence[bytes]] = []

    def next(self, index: int) -> tuple[bool, Sequence[bytes]]:
        """Whether a request puts, and which keys it is about."""
        generator = random.Random(f"{self._options.seed}/{index}")
        puts = generator.random() < self._options.put_share
        if self._stored and not puts:
            return False, generator.choice(self._stored)
        wanted = self._options.blocks
        if self._trace:
            wanted = max(1, min(wanted, len(self._trace[index].hash_ids)))
        tokens = [generator.randrange(1 << 30) for _ in range(wanted * self._layout.block_size)]
        return True, block_keys(self.root, tokens, self._layout.block_size)

    def stored(self, keys: Sequence[bytes]) -> None:
        """The blocks can be read from now on."""
        self._stored.append(keys)


@contextlib.asynccontextmanager
async def sending(
    options: argparse.Namespace, address: str, trace: Sequence[TraceRequest]
) -> AsyncIterator[SendRequest]:
    """Puts and gets."""
    layout = layout_of(options)
    chains = Chains(options, trace, layout)
    me = kv_pb2.Instance(id="load", epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    hello = kv_pb2.StreamHello(sender=me, namespace=namespace(bytes(32), layout), layout=layout.to_proto())
    async with contextlib.AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        writer = StoreWriter(KVEndpoint(channels, address, hello, layout))
        stack.push_async_callback(writer.aclose)
        reader = BlockReader(KVEndpoint(channels, address, hello, layout))
        stack.push_async_callback(reader.aclose)

        async def put(keys: Sequence[bytes], outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            slices = {(layer, i): content(key, layer, layout) for i, key in enumerate(keys) for layer in layers}
            parents = [chains.root, *keys[:-1]]
            await writer.put(keys, parents, "", hashed(lambda layer, i: slices[layer, i]), timeout_s=REQUEST_S)
            outcome.first = clock()
            chains.stored(keys)

        async def get(keys: Sequence[bytes], outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            def on_slice(layer: int, index: int, data: memoryview, value: int) -> None:
                if data != content(keys[index], layer, layout):
                    raise TransferFailed(f"layer {layer} of block {index} is not what was put")

            def on_layer(layer: int) -> None:
                if outcome.first is None:
                    outcome.first = clock()

            found = await reader.read(keys, layers=layers, on_slice=on_slice, on_layer=on_layer, timeout_s=REQUEST_S)
            if found < len(keys):  # evicted from all tiers: a miss, which tests of small stores may have
                raise NotFound(f"{len(keys) - found} of {len(keys)} blocks are gone")

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            puts, keys = chains.next(index)
            await (put if puts else get)(keys, outcome, clock)
            outcome.nbytes, outcome.tokens = len(keys) * layout.block_bytes, len(keys) * layout.block_size

        layers = range(layout.layers)
        yield send


PROGRAM = Program("kvstore", __doc__ or "", flags, target, sending, generates=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run(PROGRAM, argv)


if __name__ == "__main__":
    sys.exit(main())
