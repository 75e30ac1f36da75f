"""The server half of `Put` streams.

Opens transfers when there is room, hands frames to the store, and acknowledges blocks; a frame without room for its
blocks waits, and so do the frame's credits.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.message import Message

from moonpool.base import world
from moonpool.base.errors import FrameError, InvalidRequest, MoonpoolError, Overloaded
from moonpool.base.kv.frames import (
    FrameOpener,
    OpenedRun,
    shape_of,
)
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import KEY_BYTES, unpack_keys
from moonpool.base.kv.layout import MAX_SLICE_BYTES
from moonpool.base.kv.values import check_owned
from moonpool.base.rpc.roles import check_tenant
from moonpool.base.telemetry.spans import CURRENT, OpenSpan
from moonpool.base.transport.flow_control import CreditReturn, StreamTraffic
from moonpool.base.transport.framing import (
    PUT,
    STORED,
    OneShotAnswer,
    OneShotMessage,
    parse_put_open,
    split_trailing_hashes,
)
from moonpool.base.transport.listener import TransportListener
from moonpool.kvstore.core.put_transfer import MAX_TRANSFER_BLOCKS, PutSpec, PutTransfer, split_portions
from moonpool.kvstore.core.put_transfers import DeletedBlocksError, PutTransfers
from moonpool.kvstore.dram.arena import RETRY_AFTER_S
from moonpool.kvstore.kv_stream import KVStream
from moonpool.kvstore.memory_wait_queue import MemoryWaitQueue
from moonpool.v1 import kv_pb2, kvstore_pb2

MAX_UNFINISHED_BYTES = 4 * MAX_SLICE_BYTES
"""Bytes in slices larger than a frame that one writer may have sent in part; they lie beside the DRAM budget."""


@dataclasses.dataclass(frozen=True, slots=True)
class PutResources:
    """What all Put streams of a store use."""

    writes: PutTransfers
    rooms: MemoryWaitQueue
    instance: kv_pb2.Instance
    window_bytes: int  # how far a writer may be ahead
    transfer_timeout_s: float  # longest time without progress
    room_timeout_s: float  # longest wait for DRAM


class PutState(enum.Enum):
    """A writing transfer's state on the stream.

    A transfer whose blocks come whole with the opening, and for which there is room, has no state: the transfer ends at
    once. `TRANSITIONS` has the changes that may happen.
    """

    WAITING = "waits for room to open"
    OPEN = "takes frames"
    CLOSING = "the writer has closed; the backlog or other writers bring the other blocks"
    ENDED = "complete and closed, aborted, refused, or the stream has ended"


TRANSITIONS: Mapping[PutState, frozenset[PutState]] = {
    PutState.WAITING: frozenset({PutState.OPEN, PutState.ENDED}),
    PutState.OPEN: frozenset({PutState.CLOSING, PutState.ENDED}),
    PutState.CLOSING: frozenset({PutState.CLOSING, PutState.ENDED}),
    PutState.ENDED: frozenset(),
}
"""For each state the ones that may follow. A transfer begins as WAITING."""


@dataclasses.dataclass(slots=True, eq=False)
class _PutEntry:
    """One transfer on the stream.

    Attributes:
        number: given by the writer.
        progress_at: when something of the transfer came or became durable, on the event loop's clock.
        state: changes by `move` only.
        transfer: the store's transfer; None in the state WAITING.
        task: waits for room, to open the transfer or to write the backlog.
        backlog: parts of opened frames that wait to be written, each with the payload bytes that are settled then.
        timer: ends a transfer without progress.
        span: from the opening to the end; None until the opening is read.
    """

    number: int
    progress_at: float
    state: PutState = PutState.WAITING
    transfer: PutTransfer | None = None
    task: "asyncio.Task[None] | None" = None
    backlog: collections.deque[tuple[list[OpenedRun], int]] = dataclasses.field(default_factory=collections.deque)
    timer: asyncio.TimerHandle | None = None
    span: OpenSpan | None = None

    def move(self, state: PutState) -> None:
        assert state in TRANSITIONS[self.state], f"transfer {self.number}: {self.state.name} to {state.name}"
        self.state = state


class PutStream(KVStream[kvstore_pb2.PutRequest]):
    """One writer process' stream. Blocks are copied and verified straight from the writer's memory."""

    borrows, one_shot_kind = True, PUT

    def __init__(
        self, resources: PutResources, closing: asyncio.Event, listener: TransportListener | None = None
    ) -> None:
        super().__init__(closing, listener=listener)
        self._writes = resources.writes
        self._rooms = resources.rooms
        self._resources = resources
        self._credits = CreditReturn(resources.window_bytes)
        self._entries: dict[int, _PutEntry] = {}
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._spans = CURRENT.get()

    @property
    def traffic(self) -> StreamTraffic:
        return super().traffic + StreamTraffic(credits_kept=self._credits.pending)

    def welcome(self) -> Message:
        welcome = kv_pb2.StreamWelcome(receiver=self._resources.instance, credit_bytes=self._resources.window_bytes)
        return kvstore_pb2.PutResponse(welcome=welcome)

    def on_message(self, message: kvstore_pb2.PutRequest, payload: BytesLike) -> None:
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open, payload)
            case "frame":
                self._frame(message.frame, payload)
            case "close":
                if (entry := self._entries.get(message.close.transfer)) is not None:
                    self._close_requested(entry, message.close.aborted)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _settle(self, nbytes: int, answer: kvstore_pb2.PutResponse | None = None) -> None:
        """Send an answer, if there is one. Payload bytes are dealt with; hands credits back in time."""
        self.return_buffer()
        credit = self._credits.consumed(nbytes, idle=not self._entries)
        if answer is not None:
            answer.credit_bytes = credit
            self.post(answer)
        elif credit:
            self.post(kvstore_pb2.PutResponse(credit=kv_pb2.Credit(bytes=credit)))

    def _open(self, message: kvstore_pb2.PutOpen, payload: BytesLike) -> None:
        answer, entry = None, self._entries.get(message.transfer)
        if entry is not None:
            self._refuse(entry, InvalidRequest("transfer", f"{message.transfer} is open already"))
        else:
            entry = _PutEntry(message.transfer, self._loop.time())
            entry.span = self._spans.begin("kvstore.put", message.traceparent, bytes=0)
            try:
                answer = self._begin(entry, message, payload)
            except MoonpoolError as error:
                self._refuse(entry, error)
            if answer is not None:
                self._spans.end(entry.span)
        self._settle(payload.nbytes, answer)

    def _begin(
        self, entry: _PutEntry, message: kvstore_pb2.PutOpen, payload: BytesLike
    ) -> kvstore_pb2.PutResponse | None:
        """Take a transfer that came whole; the answer then. Opens others, now or when there is room."""
        layers, heads = range(message.layer_begin, message.layer_end), range(message.head_begin, message.head_end)
        spec = self._spec(message, message.keys, message.parent_keys, layers, heads)
        waits = self._waits(spec)
        if message.HasField("frame"):
            if message.frame.transfer != entry.number:
                raise InvalidRequest("frame.transfer", f"{message.frame.transfer} is not the transfer that is opened")
            hashes = _whole_block_hashes(spec, message.frame, payload)
            present = self._writes.put_whole(spec, payload, hashes, entry.progress_at) if hashes and not waits else None
            if present is not None:
                opened = kvstore_pb2.PutOpened(transfer=entry.number, present=present, taken=True)
                return kvstore_pb2.PutResponse(opened=opened)
        self._entries[entry.number] = entry
        transfer = None if waits else self._attempt_open(entry, spec)
        if transfer is None:
            entry.task = self.spawn(self._when_room(entry, spec))
        else:
            self._opened(entry, transfer)
        return None

    def on_one_shot(self, message: OneShotMessage, payload: BytesLike) -> Iterator[OneShotAnswer]:
        layout, end = self.format.layout, message.blocks * KEY_BYTES
        whole = range(layout.layers), range(layout.head_shares)
        spec = self._spec(parse_put_open(message.rest), message.keys[:end], message.keys[end:], *whole)
        slices = len(spec.keys) * layout.layers
        payload, hashes = split_trailing_hashes(message, payload, slices)
        if len(hashes) != slices or payload.nbytes != len(spec.keys) * layout.block_bytes or self._waits(spec):
            return
        present = self._writes.put_whole(spec, payload, hashes, self._loop.time())
        if present is not None:
            yield OneShotAnswer(OneShotMessage(STORED, message.number, numbers=present), [])
            self._writes.make_room(spec)

    def _spec(self, message: kvstore_pb2.PutOpen, of: bytes, before: bytes, layers: range, heads: range) -> PutSpec:
        keys = unpack_keys(of, max_keys=MAX_TRANSFER_BLOCKS)
        check_owned(keys, self.tenant)
        tenant = check_tenant(message.tenant, self.tenant)
        parents = unpack_keys(before, "parent_keys", max_keys=MAX_TRANSFER_BLOCKS)
        now, forgotten = int(world.unix_time()), frozenset(message.forgotten)
        return PutSpec(self.format, keys, parents, tenant, layers, heads, now, forgotten, message.durable)

    def _waits(self, spec: PutSpec) -> bool:
        return bool(self._rooms) and self._rooms.waits(self._writes.wait_group(spec.account))

    def _attempt_open(self, entry: _PutEntry, spec: PutSpec) -> PutTransfer | None:
        return self._writes.open(
            spec,
            lambda blocks: self._visible(entry, blocks),
            lambda blocks: self._durable(entry, blocks),
            lambda: self._refuse(entry, InvalidRequest("keys", "blocks of them were deleted")),
            now=self._loop.time(),
        )

    def _check_unfinished(self) -> None:
        transfers = [entry.transfer for entry in self._entries.values() if entry.transfer is not None]
        if sum(transfer.opener.unfinished_bytes for transfer in transfers) > MAX_UNFINISHED_BYTES:
            raise Overloaded("too many slices have come in part", reason="kvstore_memory", retry_after_s=RETRY_AFTER_S)

    async def _when_room(self, entry: _PutEntry, spec: PutSpec) -> None:
        """Open an unopened transfer, then write the backlog, as room appears."""
        timeout_s, group = self._resources.room_timeout_s, self._writes.wait_group(spec.account)
        try:
            transfer = entry.transfer
            if transfer is None:
                transfer = await self._rooms.get(
                    lambda: self._attempt_open(entry, spec), self._writes.close, timeout_s, group=group
                )
                self._opened(entry, transfer)
            while entry.backlog:
                await self._rooms.get(
                    lambda: self._reserve_first(entry, transfer), lambda _: None, timeout_s, group=group
                )
                async with self._turn:  # one part of one transfer, so that others get their turn on the event loop
                    await asyncio.sleep(0)
                    runs, nbytes = entry.backlog.popleft()
                    entry.progress_at = self._loop.time()
                    self._settle(nbytes)
                    written = self._writes.write(transfer, runs, now=entry.progress_at)
                    assert written  # the room is reserved
            entry.task = None
        except MoonpoolError as error:
            self._refuse(entry, error)
            return
        if entry.state is PutState.CLOSING:
            self._close_requested(entry, aborted=False)

    def _reserve_first(self, entry: _PutEntry, transfer: PutTransfer) -> bool | None:
        entry.progress_at = self._loop.time()
        return self._writes.reserve(transfer, entry.backlog[0][0], now=entry.progress_at) or None

    def _opened(self, entry: _PutEntry, transfer: PutTransfer) -> None:
        entry.transfer = transfer
        entry.move(PutState.OPEN)
        opened = kvstore_pb2.PutOpened(transfer=entry.number, present=transfer.present)
        self.post(kvstore_pb2.PutResponse(opened=opened))
        if durable := self._writes.durable_of(transfer, transfer.present):
            self._durable(entry, durable)
        self._arm(entry)

    def _frame(self, header: kv_pb2.FrameHeader, payload: BytesLike) -> None:
        entry = self._entries.get(header.transfer)
        try:
            if entry is not None and not self._take_frame(entry, header, payload):
                return  # the credit comes back with the transfer
        except MoonpoolError as error:
            assert entry is not None
            self._refuse(entry, error)
        self._settle(payload.nbytes)

    def _take_frame(self, entry: _PutEntry, header: kv_pb2.FrameHeader, payload: BytesLike) -> bool:
        """Write a frame; False if the frame has to wait, for room or because the frame is large."""
        transfer = entry.transfer
        if transfer is None:
            raise InvalidRequest("transfer", f"{header.transfer} is not open yet")
        entry.progress_at = self._loop.time()
        runs = transfer.opener.parse(header, payload)
        if transfer.opener.unfinished_bytes:
            self._check_unfinished()
        parts = split_portions(runs)  # nearly always one
        if not (len(parts) > 1 or entry.backlog):
            waits = self._waits(transfer.spec) and transfer.unreserved_of(parts[0])
            if not waits and self._writes.write(transfer, parts[0], now=entry.progress_at):
                return True
        if self.borrowed:  # the writer has the memory back before this is written
            parts = [[run._replace(data=memoryview(bytes(run.data))) for run in runs] for runs in parts]
        entry.backlog += [(part, 0) for part in parts[:-1]]
        entry.backlog.append((parts[-1], payload.nbytes))  # the credit is handed back with the last
        if entry.task is None:
            entry.task = self.spawn(self._when_room(entry, transfer.spec))
        return False

    def _visible(self, entry: _PutEntry, blocks: Sequence[int]) -> None:
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_VISIBLE)
        if entry.state is PutState.CLOSING and entry.transfer is not None and entry.transfer.complete:
            self._remove(entry)

    def _durable(self, entry: _PutEntry, blocks: Sequence[int]) -> None:
        entry.progress_at = self._loop.time()
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_DURABLE)

    def _ack(self, entry: _PutEntry, blocks: Sequence[int], durability: kvstore_pb2.Durability.ValueType) -> None:
        ack = kvstore_pb2.PutAck(transfer=entry.number, blocks=blocks, durability=durability)
        self.post(kvstore_pb2.PutResponse(ack=ack))

    def _close_requested(self, entry: _PutEntry, aborted: bool) -> None:
        transfer = entry.transfer
        if transfer is None or aborted or transfer.complete:
            self._remove(entry)
        elif transfer.spec.whole_blocks and not entry.backlog:
            self._refuse(entry, "closed before everything was sent")
        else:
            entry.move(PutState.CLOSING)

    def _arm(self, entry: _PutEntry) -> None:
        entry.timer = self._loop.call_at(entry.progress_at + self._resources.transfer_timeout_s, self._expire, entry)

    def _expire(self, entry: _PutEntry) -> None:
        timeout_s = self._resources.transfer_timeout_s
        assert entry.transfer is not None
        if entry.backlog:  # waits for room, with a separate deadline
            entry.progress_at = self._loop.time()
        if self._loop.time() < entry.progress_at + timeout_s:
            self._arm(entry)
        elif not entry.transfer.complete:
            self._refuse(entry, f"no progress for {timeout_s:g} s")
        elif self._writes.awaits(entry.transfer):
            self._refuse(entry, f"some blocks have not become durable within {timeout_s:g} s")
        else:
            self._remove(entry)  # the writer forgot to close the transfer

    def _refuse(self, entry: _PutEntry, reason: str | MoonpoolError) -> None:
        self._remove(entry)
        refused = kvstore_pb2.PutRefused(transfer=entry.number, reason=str(reason))
        if isinstance(reason, Overloaded):
            refused.code = reason.reason
            refused.retry_after_s = reason.retry_after_s
        else:
            codes = {DeletedBlocksError: "deleted", InvalidRequest: "invalid_request", FrameError: "bad_frame"}
            refused.code = next((code for kind, code in codes.items() if isinstance(reason, kind)), "")
        self.post(kvstore_pb2.PutResponse(refused=refused))

    def _remove(self, entry: _PutEntry) -> None:
        if entry.state is not PutState.ENDED:
            entry.move(PutState.ENDED)
            if entry.span is not None:
                self._spans.end(entry.span)
        if self._entries.get(entry.number) is entry:
            del self._entries[entry.number]
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        unwritten = sum(nbytes for _, nbytes in entry.backlog)
        entry.backlog.clear()
        if entry.transfer is not None:
            self._writes.close(entry.transfer)
        self._settle(unwritten)

    def end(self) -> None:
        for entry in list(self._entries.values()):
            with contextlib.suppress(MoonpoolError):
                self._remove(entry)


def _whole_block_hashes(spec: PutSpec, header: kv_pb2.FrameHeader, payload: BytesLike) -> Sequence[int] | None:
    """Hash from a frame that holds all of a transfer's blocks whole; None if the frame needs a transfer.

    Raises:
        FrameError: the frame is bad.
        InvalidRequest: the frame is not all of the transfer.
    """
    layout, count = spec.format.layout, len(spec.keys)
    fits = spec.whole_blocks and payload.nbytes == count * layout.block_bytes
    if fits and shape_of(header, spec.layers, count, spec.heads, layout.block_size) is not None:
        return header.slice_hashes[:]
    runs = FrameOpener(layout, spec.heads, spec.keys).parse(header, payload)
    if spec.whole_blocks and sum(len(hashes) for _, _, hashes in runs) != layout.layers * count:
        raise InvalidRequest("frame", "is not all of the transfer")
    return None
