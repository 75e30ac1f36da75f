"""The serving side of `ReadKV`: other instances read blocks of this one's pool, layer by layer."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Container, Iterator, Sequence

from moonpool.engine.instance import InstanceContext
from moonpool.engine.pool_calls import PoolCalls
from moonpool.errors import InvalidRequest, MoonpoolError, StreamBroken, Unavailable
from moonpool.kv.frames import Slice
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.kv.pool import KVPool
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.lending import LendBlocks, Lending, TakeBack
from moonpool.streams.credits import ByteCredits, Traffic
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.link import Link
from moonpool.streams.receiving import FrameWriter, check_hello
from moonpool.streams.serving import ServerStream
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
        self._streams: set[ReadStream] = set()

    @property
    def traffic(self) -> Traffic:
        """What is under way to all readers."""
        return sum((stream.traffic for stream in self._streams), Traffic())

    async def serve(self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: object) -> None:
        """One reader's stream, until it ends; raises as `ServerStream.run`."""
        stream = ReadStream(self)
        self._streams.add(stream)
        try:
            await stream.run(requests, context)
        finally:
            self._streams.discard(stream)

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


class ReadStream(ServerStream[kv_pb2.ReadKVRequest]):
    """One reading instance's stream."""

    def __init__(self, reads: PoolReads) -> None:
        super().__init__(reads.closing, lanes=reads.lanes)
        self._reads = reads
        self._frames: FrameWriter
        self._credits = ByteCredits()  # those of `_frames`, once there are some
        self._sessions: dict[int, asyncio.Task[None]] = {}

    @property
    def traffic(self) -> Traffic:
        """What is under way."""
        return Traffic(unsent=len(self.outbox), credits_out=self._credits.out)

    async def on_hello(self, message: kv_pb2.ReadKVRequest) -> None:
        """Takes readers of the pool's own KV only. The welcome gives no credits: on this stream the reader does."""
        reads = self._reads
        check_hello(message.hello, namespace=reads.namespace, layout=reads.pool.layout)
        self._frames = FrameWriter(
            self.outbox, reads.pool.layout, lambda header: kv_pb2.ReadKVResponse(frame=header), link=reads.link
        )
        self._credits = self._frames.credits
        welcome = kv_pb2.StreamWelcome(receiver=reads.instance, lane=self.offer_lane(message))
        self.post(kv_pb2.ReadKVResponse(welcome=welcome))

    def on_message(self, message: kv_pb2.ReadKVRequest, payload: memoryview) -> None:
        """One message of the reader. What is wrong with a read ends that read only."""
        if message.credit_bytes:
            self._credits.grant(message.credit_bytes)
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open)
            case "credit":
                self._credits.grant(message.credit.bytes)
            case "close":
                for key in unpack_keys(message.close.damaged_key, "damaged_key", max_keys=1):
                    self._reads.suspect(key)
                self._close(message.close.session)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def end(self) -> None:
        """The reader has gone."""
        for task in list(self._sessions.values()):
            task.cancel()

    def _close(self, number: int) -> None:
        task = self._sessions.pop(number, None)
        if task is not None:
            task.cancel()

    def _open(self, message: kv_pb2.ReadOpen) -> None:
        """Begins a read, or answers it as a miss."""
        number = message.session
        try:
            if number in self._sessions:
                self._close(number)
                raise InvalidRequest("session", f"{number} was open already")
            keys, layers = unpack_keys(message.keys, max_keys=MAX_BLOCKS), self._layers(message)
            if any(name not in self._reads.carried_out for name in message.forgotten):
                raise Unavailable("a deletion of such blocks was not carried out yet")
            self._begin(number, keys, layers, message.forgotten)
        except MoonpoolError as error:
            # at level debug: a peer that asks too much must not fill the log
            log.debug("read answered as a miss", error=str(error))
            self._opened(number, 0)

    def _begin(self, number: int, keys: Sequence[BlockKey], layers: range, forgotten: Sequence[str]) -> None:
        lease = self._reads.lend(keys)
        try:
            task = self._sessions[number] = self.spawn(self._serve(number, lease, layers, forgotten))
        except BaseException:
            self._reads.take_back(lease)
            raise
        task.add_done_callback(lambda task: self._ended(number, task, lease))

    def _layers(self, message: kv_pb2.ReadOpen) -> range:
        layout = self._reads.pool.layout
        layers = range(message.layer_begin, message.layer_end)
        layout.check_part(layers, range(layout.kv_heads))
        if (message.head_begin, message.head_end) != (0, layout.kv_heads):
            raise InvalidRequest("head_end", "slices are read whole")
        return layers

    def _ended(self, number: int, task: "asyncio.Task[None]", lease: Lease) -> None:
        self._reads.take_back(lease)  # here, because a task that is cancelled before it has begun cannot do it
        if self._sessions.get(number) is task:
            del self._sessions[number]

    def _opened(self, number: int, blocks: int, forgotten: Sequence[str] = ()) -> None:
        opened = kv_pb2.ReadOpened(session=number, blocks=blocks, forgotten=forgotten)
        self.post(kv_pb2.ReadKVResponse(opened=opened))

    async def _serve(self, number: int, lease: Lease, layers: range, forgotten: Sequence[str]) -> None:
        """One read from its opening to its end; deletions of such blocks were carried out before."""
        reads = self._reads
        self._opened(number, len(lease.blocks), forgotten)
        try:
            async with asyncio.timeout(LEASE_S):
                sent = await self._frames.send(number, 0, reads.slices(lease, layers), timeout_s=STALL_S)
            reads.sent_bytes += sent
        except StreamBroken:
            return  # the stream itself reports it
        except (MoonpoolError, TimeoutError) as error:
            log.warning("read given up", blocks=len(lease.blocks), error=str(error))
        self.post(kv_pb2.ReadKVResponse(done=kv_pb2.ReadDone(session=number)))
