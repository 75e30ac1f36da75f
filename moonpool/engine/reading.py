"""The serving side of `ReadKV`: other instances read blocks of this one's pool, layer by layer."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Container, Iterator, Sequence

from moonpool.engine.instance import InstanceContext
from moonpool.engine.pool_calls import PoolCalls
from moonpool.errors import InvalidRequest, MoonpoolError, StreamBroken
from moonpool.kv.frames import Slice
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.kv.pool import KVPool
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.lending import LendBlocks, Lending, TakeBack
from moonpool.streams.credits import Traffic
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.link import Link
from moonpool.streams.open_streams import OpenStreams
from moonpool.streams.read_sessions import ReadSessions
from moonpool.streams.receiving import FrameWriter, check_hello
from moonpool.telemetry.gauges import Entry
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

log = get_logger(__name__)

MAX_BLOCKS = 1 << 15
"""Keys of one read at most."""
STALL_S = 10.0
"""Longest wait for a reader's credits."""
LEASE_S = 60.0
"""Longest read; its blocks cannot be evicted so long."""


class PoolReads:
    """What other instances read here.

    Args:
        instance: this one.
        namespace: of its KV, the only one that is read.
        pool: what is read.
        link: the way out.
        calls: has the core hold blocks.
        manager: where the core has its blocks; only looked at.
        closing: set when streams are to end.
        lanes: offers lanes to readers.
        carried_out: names of deletions that were carried out here.

    Attributes:
        sessions: reads under way.
        sent_bytes: so far.
    """

    def __init__(
        self,
        instance: kv_pb2.Instance,
        namespace: bytes,
        pool: KVPool,
        link: Link,
        calls: PoolCalls,
        manager: BlockManager,
        closing: asyncio.Event,
        lanes: LaneServer,
        carried_out: Container[str],
    ) -> None:
        self.instance, self.namespace, self.pool, self.link, self.closing = instance, namespace, pool, link, closing
        self.lanes, self.carried_out = lanes, carried_out
        self.sessions = self.sent_bytes = 0
        self._calls = calls
        self._manager = manager
        self._numbers = itertools.count(1)
        self._streams = OpenStreams()

    @property
    def traffic(self) -> Traffic:
        """What is under way to all readers."""
        return self._streams.traffic

    async def serve(self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: object) -> None:
        """One reader's stream, until it ends; raises as `ServerStream.run`."""
        stream = ReadStream(self)
        with self._streams.running(stream):
            await stream.run(requests, context)

    def lend(self, keys: Sequence[BlockKey]) -> "Lease":
        """Holds the leading blocks of `keys` that are here."""
        number = next(self._numbers)
        blocks = self._calls.lend(LendBlocks(number, tuple(keys)))
        self.sessions += 1
        return Lease(number, keys[: len(blocks)], blocks)

    def take_back(self, lease: "Lease") -> None:
        """A lease is over."""
        self.sessions -= 1
        self._calls.take_back(TakeBack(lease.number))

    def suspect(self, key: BlockKey) -> None:
        """A reader got a block whose bytes do not match their hash: if they do not here, nobody finds it any more.

        It is not lent for that, which may be impossible just now: nothing is evicted before this returns.
        """
        layers = range(self.pool.layout.layers)
        if not all(self._is_intact(layer, block) for block in self._manager.match([key]) for layer in layers):
            self._calls.take_back(TakeBack(next(self._numbers), (key,)))

    def _is_intact(self, layer: int, block: int) -> bool:
        data, value = self.pool.read(layer, block)
        return slice_hash(data) == value

    def slices(self, lease: "Lease", layers: range) -> Iterator[Slice]:
        """The slices of a lease, layers in order."""
        full = self.pool.layout.block_tokens
        for layer in layers:
            for index, (block, key) in enumerate(zip(lease.blocks, lease.keys, strict=True)):
                data, value = self.pool.read(layer, block)
                yield Slice(layer, index, data, full, bind(value, key, layer))


def pool_reads(
    context: InstanceContext,
    calls: PoolCalls,
    manager: BlockManager,
    closing: asyncio.Event,
    carried_out: Container[str],
) -> PoolReads:
    """What other instances read of an instance's pool."""
    setup = context.setup
    pool, link = context.engine.pool, context.link
    own = context.instance, setup.namespace, pool, link
    return PoolReads(*own, calls, manager, closing, context.lanes, carried_out)


def read_gauges(reads: PoolReads, lending: Lending) -> list[Entry]:
    """What other instances read."""
    return [
        ("peer_reads", lambda: reads.sessions, 0),
        ("lent_blocks", lambda: sum(1 for _ in lending), 0),
        ("read_credits_out_bytes", lambda: reads.traffic.credits_out, 0),
        ("peer_read_bytes", lambda: reads.sent_bytes, None),
    ]


class Lease:
    """Blocks that are held for one read."""

    def __init__(self, number: int, keys: Sequence[BlockKey], blocks: tuple[int, ...]) -> None:
        self.number, self.keys, self.blocks = number, keys, blocks


class ReadStream(ReadSessions[kv_pb2.ReadKVRequest]):
    """One reading instance's stream."""

    def __init__(self, reads: PoolReads) -> None:
        super().__init__(
            reads.closing,
            lanes=reads.lanes,
            response=kv_pb2.ReadKVResponse,
            carried_out=reads.carried_out,
            suspect=reads.suspect,
            max_keys=MAX_BLOCKS,
        )
        self._reads = reads

    async def on_hello(self, message: kv_pb2.ReadKVRequest) -> None:
        """Takes readers of the pool's own KV only. The welcome gives no credits: on this stream the reader does."""
        reads = self._reads
        check_hello(message.hello, namespace=reads.namespace, layout=reads.pool.layout)
        self.writes(
            FrameWriter(
                self.outbox, reads.pool.layout, lambda header: kv_pb2.ReadKVResponse(frame=header), link=reads.link
            )
        )
        welcome = kv_pb2.StreamWelcome(receiver=reads.instance, lane=self.offer_lane(message))
        self.post(kv_pb2.ReadKVResponse(welcome=welcome))

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        """Begins a read."""
        reads, layers = self._reads, self._layers(message)
        lease = reads.lend(keys)
        try:
            work = self._serve(message.session, lease, layers, message.forgotten)
            self.serve(message.session, work, lambda: reads.take_back(lease))
        except BaseException:
            reads.take_back(lease)
            raise

    def _layers(self, message: kv_pb2.ReadOpen) -> range:
        layout = self._reads.pool.layout
        layers = range(message.layer_begin, message.layer_end)
        layout.check_part(layers, range(layout.kv_heads))
        if (message.head_begin, message.head_end) != (0, layout.kv_heads):
            raise InvalidRequest("head_end", "slices are read whole")
        return layers

    async def _serve(self, number: int, lease: Lease, layers: range, forgotten: Sequence[str]) -> None:
        """One read from its opening to its end; deletions of such blocks were carried out before."""
        reads = self._reads
        self.opened(number, len(lease.blocks), forgotten)
        try:
            async with asyncio.timeout(LEASE_S):
                sent = await self.frames.send(number, 0, reads.slices(lease, layers), timeout_s=STALL_S)
            reads.sent_bytes += sent
        except StreamBroken:
            return  # the stream itself reports it
        except (MoonpoolError, TimeoutError) as error:
            log.warning("read ended early", blocks=len(lease.blocks), error=str(error))
        self.done(number)
