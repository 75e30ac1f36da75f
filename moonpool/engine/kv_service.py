"""What peers and conductors ask from an instance's KV pool: block reads (`ReadKV`) and deletions.

Shared by prefill and decode.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence

from moonpool.base.cluster.proto_conversion import read_deletions
from moonpool.base.errors import InvalidRequest, MoonpoolError, StreamBroken, Unavailable
from moonpool.base.kv.delete_kv import DeletionLog, KVSelection, check_ttls
from moonpool.base.kv.frames import Slice
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv_transfer.read_server import FrameWriter, ReadServerStream, check_hello
from moonpool.base.kv_transfer.write_back import WriteBack, WriteBackJob
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.scheduling.block_lending import BlockLending, BlocksLent, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.async_utils import wait_within
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.open_streams import OpenStreams
from moonpool.engine.instance import InstanceContext
from moonpool.v1 import kv_pb2

MAX_BLOCKS = 1 << 15
"""Most keys in one read."""
STALL_S = 10.0
"""Longest wait for a reader's credits."""
LEASE_S = 60.0
"""Longest read; the read's blocks cannot be evicted so long."""
WRITE_BACK_TIMEOUT_S = 30.0
LENDING_METRICS: tuple[Metric[BlockLending], ...] = (
    Metric("lent_blocks", "Pool blocks kept while other instances read.", lambda lending: sum(1 for _ in lending), 0),
)
log = get_logger(__name__)


class PoolCalls:
    """Calls of the KV service to the core.

    Args:
        ask: has the core handle an event before returning; raises the core's errors.
        tell: the same for an event without an answer; raises nothing.
    """

    def __init__(self, ask: Callable[[DeleteKV | LendBlocks], None], tell: Callable[[ReturnBlocks], None]) -> None:
        self._ask = ask
        self._tell = tell
        self._forgot: dict[int, int] = {}
        self._lent: dict[int, tuple[int, ...]] = {}

    def answered(self, action: KVDeleted | BlocksLent) -> None:
        """The core's answer."""
        if isinstance(action, KVDeleted):
            self._forgot[action.number] = action.blocks
        else:
            self._lent[action.number] = action.blocks

    def forget(self, event: DeleteKV) -> int:
        """Delete KV from the pool; return how many blocks.

        Raises:
            Unavailable: the core has stopped.
        """
        self._ask(event)
        if event.number not in self._forgot:
            raise Unavailable("the instance stops")
        return self._forgot.pop(event.number)

    def lend(self, event: LendBlocks) -> tuple[int, ...]:
        """Return the blocks that may be read until `take_back`; none where the core has stopped."""
        self._ask(event)
        return self._lent.pop(event.number, ())

    def take_back(self, event: ReturnBlocks) -> None:
        """The blocks are not read any more."""
        self._tell(event)


class PoolReads:
    """What other instances read here.

    Args:
        context: this instance's.
        calls: has the core hold blocks.
        manager: the pool's blocks; in the core; only looked at.
        closing: set when streams are to end.
        carried_out: names of deletions that were carried out here.

    Attributes:
        open_reads: reads under way.
        sent_bytes: so far.
    """

    def __init__(
        self,
        context: InstanceContext,
        calls: PoolCalls,
        manager: BlockManager,
        closing: asyncio.Event,
        carried_out: Container[str],
    ) -> None:
        self.context, self.closing, self.carried_out = context, closing, carried_out
        self.pool, self.namespace = context.engine.pool, context.setup.namespace
        self.open_reads = self.sent_bytes = 0
        self._calls = calls
        self._manager = manager
        self._numbers = itertools.count(1)
        self._streams = OpenStreams()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way to all readers."""
        return self._streams.traffic

    async def serve(self, requests: AsyncIterator[kv_pb2.ReadKVRequest], context: object) -> None:
        """One reader's stream, until the end; raises as `ServerStream.run`."""
        stream = ReadStream(self)
        with self._streams.running(stream):
            await stream.run(requests, bare_write(context))

    @property
    def quiet(self) -> asyncio.Event:
        """Set while there are no streams of readers."""
        return self._streams.quiet

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is read; False when the time was over first."""
        return await wait_within(timeout_s, self._idle)

    def lend(self, keys: Sequence[BlockKey], windows_from: int) -> "PoolReadLease":
        """Hold the leading blocks of `keys` that are here; see `LendBlocks`."""
        number = next(self._numbers)
        blocks = self._calls.lend(LendBlocks(number, tuple(keys), windows_from))
        self.open_reads += 1
        self._idle.clear()
        return PoolReadLease(number, keys[: len(blocks)], blocks, windows_from if len(blocks) == len(keys) else 0)

    def take_back(self, lease: "PoolReadLease") -> None:
        """Return a lease."""
        self.open_reads -= 1
        if not self.open_reads:
            self._idle.set()
        self._calls.take_back(ReturnBlocks(lease.number))

    def suspect(self, key: BlockKey) -> None:
        """Handle a block whose bytes did not match their hash at a reader.

        Deletes the block if its bytes do not match here. The block need not be lent for that: no eviction happens
        before this returns.
        """
        layout = self.pool.layout
        for block in self._manager.find([key]):
            lacking = layout.windowed_layers if self._manager.is_partial(block) else ()
            if all(self._is_intact(layer, block) for layer in range(layout.layers) if layer not in lacking):
                continue
            self._calls.take_back(ReturnBlocks(next(self._numbers), (key,)))

    def _is_intact(self, layer: int, block: int) -> bool:
        data, value = self.pool.read(layer, block)
        return slice_hash(data) == value

    def slices(self, lease: "PoolReadLease", layers: range) -> Iterator[Slice]:
        """Return the slices of a lease, layers in order."""
        full = self.pool.layout.block_size
        for layer in layers:
            first = lease.windows_from if layer in self.pool.layout.windowed_layers else 0
            for index, (block, key) in enumerate(zip(lease.blocks[first:], lease.keys[first:], strict=True), first):
                data, value = self.pool.read(layer, block)
                yield Slice(layer, index, data, full, bind(value, key, layer))


READ_METRICS: tuple[Metric[PoolReads], ...] = (
    Metric("peer_reads", "Open reads of other instances.", lambda reads: reads.open_reads, 0),
    Metric(
        "read_credits_out_bytes",
        "Bytes sent to reading instances with credits not yet returned.",
        lambda reads: reads.traffic.credits_out,
        0,
    ),
    counter("peer_read_bytes_total", "Bytes that other instances read from the pool.", lambda reads: reads.sent_bytes),
)


class PoolReadLease:
    """Blocks that are held for one read."""

    def __init__(self, number: int, keys: Sequence[BlockKey], blocks: tuple[int, ...], windows_from: int) -> None:
        self.number, self.keys, self.blocks = number, keys, blocks
        self.windows_from = windows_from


class ReadStream(ReadServerStream[kv_pb2.ReadKVRequest]):
    """One reading instance's stream."""

    def __init__(self, reads: PoolReads) -> None:
        super().__init__(
            reads.closing,
            listener=reads.context.listener,
            response=kv_pb2.ReadKVResponse,
            carried_out=reads.carried_out,
            suspect=reads.suspect,
            max_keys=MAX_BLOCKS,
        )
        self._reads = reads

    async def on_hello(self, message: kv_pb2.ReadKVRequest) -> None:
        """Take readers of the pool's own KV only. The welcome gives no credits: on this stream the reader does."""
        reads = self._reads
        check_hello(message.hello, namespace=reads.namespace, layout=reads.pool.layout)
        self.writes(
            FrameWriter(
                self.send_queue,
                reads.pool.layout,
                lambda header: kv_pb2.ReadKVResponse(frame=header),
                link=reads.context.link,
            )
        )
        welcome = kv_pb2.StreamWelcome(receiver=reads.context.instance, transport=self.offer_transport(message))
        self.post(kv_pb2.ReadKVResponse(welcome=welcome))

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        reads, layers = self._reads, self._layers(message)
        lease = reads.lend(keys, message.windows_from)
        try:
            work = self._serve(message.transfer, lease, layers, message.forgotten)
            self.serve(message.transfer, work, lambda: reads.take_back(lease))
        except BaseException:
            reads.take_back(lease)
            raise

    def _layers(self, message: kv_pb2.ReadOpen) -> range:
        layout = self._reads.pool.layout
        layers = range(message.layer_begin, message.layer_end)
        layout.check_part(layers, range(layout.head_shares))
        if (message.head_begin, message.head_end) != (0, layout.head_shares):
            raise InvalidRequest("head_end", "slices are read whole")
        return layers

    async def _serve(self, number: int, lease: PoolReadLease, layers: range, forgotten: Sequence[str]) -> None:
        """One read from opening to end; deletions of such blocks were carried out before."""
        reads = self._reads
        self.opened(number, len(lease.blocks), forgotten)
        try:
            async with asyncio.timeout(LEASE_S):
                sent = await self.frames.send(number, 0, reads.slices(lease, layers), timeout_s=STALL_S)
            reads.sent_bytes += sent
        except StreamBroken:
            return  # the stream reports the error
        except (MoonpoolError, TimeoutError) as error:
            log.warning("read ended early", blocks=len(lease.blocks), error=str(error))
        self.done(number)


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingDeletion:
    """A deletion whose blocks are gone here, while writes of such KV are still under way."""

    blocks: int
    writes: tuple[WriteBackJob, ...]


class KVDeletion:
    """Carries out deletions, each once, however often and by how many conductors ordered.

    Args:
        block_bytes: bytes per block.
        write_back: the instance's.
        carry_out: deletes from the pool; returns the number of blocks.
        carried_out: log of deletions, which peers read; each deletion is added here.
    """

    def __init__(
        self,
        block_bytes: int,
        write_back: WriteBack,
        carry_out: Callable[[DeleteKV], int],
        carried_out: DeletionLog,
    ) -> None:
        self._namespace = carried_out.namespace
        self._block_bytes = block_bytes
        self._write_back = write_back
        self._carry_out = carry_out
        self._carried_out = carried_out
        self._numbers = itertools.count(1)
        self._ending: dict[str, _PendingDeletion] = {}

    async def forget(self, request: kv_pb2.ForgetRequest) -> kv_pb2.ForgetResponse:
        """Delete KV; return after all writes of such KV to kvstores have ended.

        A repeated order waits for the same end, and gets the same number of blocks.

        Raises:
            InvalidRequest: a selection or a time is wrong.
            Unavailable: such a write does not end; to be asked again.
        """
        ttl_s, ending = check_ttls(request.ttl_s), dict[str, _PendingDeletion]()
        for chosen in await read_deletions(request.deletions):
            self._begin({name: selection for name, selection in chosen.items() if name not in self._carried_out})
            ending |= {name: self._ending[name] for name in chosen if name in self._ending}
            await asyncio.sleep(0)
        blocks = sum(deletion.blocks for deletion in ending.values())
        if ttl_s:
            blocks += self._from_pool(KVSelection(), ttl_s)
        writes = {write for deletion in ending.values() for write in deletion.writes}
        if not await self._write_back.ended(writes, WRITE_BACK_TIMEOUT_S):
            raise Unavailable("deleted here, but it is being written to a kvstore that does not answer")
        for name in ending:
            self._ending.pop(name, None)
        return kv_pb2.ForgetResponse(blocks=blocks, bytes=blocks * self._block_bytes)

    def _begin(self, new: Mapping[str, KVSelection]) -> None:
        """Delete from the pool, and from queued writes to kvstores.

        The pool is searched once for all deletions. The blocks count for the first one.
        """
        if not new:
            return
        together = KVSelection.union(new.values())
        blocks = self._from_pool(together)
        writes = tuple(self._write_back.forget(together, self._namespace))
        for name, selection in new.items():
            self._ending[name] = _PendingDeletion(blocks, writes)
            self._carried_out.add(name, selection)
            blocks = 0

    def _from_pool(self, selection: KVSelection, ttl_s: Mapping[str, float] | None = None) -> int:
        everything, ages = self._namespace in selection.namespaces, tuple((ttl_s or {}).items())
        return self._carry_out(DeleteKV(next(self._numbers), selection, everything, ages))
