"""The server half of one `Put` stream: opens sessions when there is room, hands frames to the store, acknowledges.

A frame whose blocks find no room waits, and its credits with it. Sessions without progress are ended.
"""

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from moonpool.errors import FrameError, InvalidRequest, MoonpoolError, Overloaded
from moonpool.kv.frames import FrameOpener, OpenRun
from moonpool.kv.keys import KEY_BYTES, unpack_keys
from moonpool.kv.layout import MAX_SLICE_BYTES
from moonpool.kv.scattered import Bytes
from moonpool.kv.shapes import shape_of
from moonpool.kv.values import check_owned
from moonpool.rpc.roles import permitted
from moonpool.streams.credits import CreditReturn, Traffic
from moonpool.streams.lanes.brief import PUT, STORED, Answer, Brief, about, hashes_of
from moonpool.streams.lanes.listening import LaneServer
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS, PutSession, PutSpec, portions
from services.kvstore.core.writes import DeletedBlocks, Writes
from services.kvstore.dram.arena import RETRY_AFTER_S
from services.kvstore.streams.kv_stream import KVStream
from services.kvstore.streams.rooms import RoomQueue

MAX_UNFINISHED_BYTES = 4 * MAX_SLICE_BYTES
"""Bytes of slices larger than a frame that one writer may have sent in part; they lie beside the DRAM budget."""


@dataclasses.dataclass(frozen=True, slots=True)
class PutResources:
    """What all Put streams of a store use."""

    writes: Writes
    rooms: RoomQueue
    instance: kv_pb2.Instance
    window_bytes: int  # how far a writer may be ahead
    session_timeout_s: float  # longest time without progress
    room_timeout_s: float  # longest wait for DRAM


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """One session as the stream knows it."""

    number: int
    progress_at: float  # when something of it came or became durable, on the event loop's clock
    session: PutSession | None = None  # while it waits for room
    task: "asyncio.Task[None] | None" = None  # waits for room, to open the session or to write its backlog
    # Parts of opened frames that wait to be written, and the payload bytes that are dealt with then.
    backlog: collections.deque[tuple[list[OpenRun], int]] = dataclasses.field(default_factory=collections.deque)
    close: kvstore_pb2.PutClose | None = None  # the writer's, once it has come
    timer: asyncio.TimerHandle | None = None


class PutStream(KVStream[kvstore_pb2.PutRequest]):
    """One writer process' stream. Blocks are copied and verified straight from the writer's memory (`land`)."""

    borrows, brief_kind = True, PUT

    def __init__(self, resources: PutResources, closing: asyncio.Event, lanes: LaneServer | None = None) -> None:
        super().__init__(closing, lanes=lanes)
        self._writes = resources.writes
        self._rooms = resources.rooms
        self._resources = resources
        self._credits = CreditReturn(resources.window_bytes)
        self._entries: dict[int, _Entry] = {}
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    @property
    def traffic(self) -> Traffic:
        return super().traffic + Traffic(credits_kept=self._credits.pending)

    def welcome(self) -> Message:
        welcome = kv_pb2.StreamWelcome(receiver=self._resources.instance, credit_bytes=self._resources.window_bytes)
        return kvstore_pb2.PutResponse(welcome=welcome)

    def on_message(self, message: kvstore_pb2.PutRequest, payload: Bytes) -> None:
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open, payload)
            case "frame":
                self._frame(message.frame, payload)
            case "close":
                self._close_requested(message.close)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _settle(self, nbytes: int, answer: kvstore_pb2.PutResponse | None = None) -> None:
        """Sends an answer, if there is one. Payload bytes are dealt with; hands credits back if it is time."""
        self.give_back()
        credit = self._credits.consumed(nbytes, idle=not self._entries)
        if answer is not None:
            answer.credit_bytes = credit
            self.post(answer)
        elif credit:
            self.post(kvstore_pb2.PutResponse(credit=kv_pb2.Credit(bytes=credit)))

    def _open(self, message: kvstore_pb2.PutOpen, payload: Bytes) -> None:
        answer, entry = None, self._entries.get(message.session)
        if entry is not None:
            self._refuse(entry, InvalidRequest("session", f"{message.session} is open already"))
        else:
            entry = _Entry(message.session, self._loop.time())
            try:
                answer = self._begin(entry, message, payload)
            except MoonpoolError as error:
                self._refuse(entry, error)
        self._settle(payload.nbytes, answer)

    def _begin(self, entry: _Entry, message: kvstore_pb2.PutOpen, payload: Bytes) -> kvstore_pb2.PutResponse | None:
        """Takes a session that came whole; the answer then. Opens others, now or when there is room."""
        layers, heads = range(message.layer_begin, message.layer_end), range(message.head_begin, message.head_end)
        spec = self._spec(message, message.keys, message.parent_keys, layers, heads)
        waits = self._waits(spec)
        if message.HasField("frame"):
            if message.frame.session != entry.number:
                raise InvalidRequest("frame.session", f"{message.frame.session} is not the session that is opened")
            hashes = _whole(spec, message.frame, payload)
            present = self._writes.put_whole(spec, payload, hashes, entry.progress_at) if hashes and not waits else None
            if present is not None:
                opened = kvstore_pb2.PutOpened(session=entry.number, present=present, taken=True)
                return kvstore_pb2.PutResponse(opened=opened)
        self._entries[entry.number] = entry
        session = None if waits else self._attempt_open(entry, spec)
        if session is None:
            entry.task = self.spawn(self._when_room(entry, spec))
        else:
            self._opened(entry, session)
        return None

    def on_brief(self, message: Brief, payload: Bytes) -> Iterator[Answer]:
        layout, end = self.format.layout, message.blocks * KEY_BYTES
        whole = range(layout.layers), range(layout.kv_heads)
        spec = self._spec(about(message.rest), message.keys[:end], message.keys[end:], *whole)
        slices = len(spec.keys) * layout.layers
        payload, hashes = hashes_of(message, payload, slices)
        if len(hashes) != slices or payload.nbytes != slices * layout.slice_bytes or self._waits(spec):
            return
        present = self._writes.put_whole(spec, payload, hashes, self._loop.time())
        if present is not None:
            yield Answer(Brief(STORED, message.number, numbers=present), [])
            self._writes.make_room(spec)

    def _spec(self, message: kvstore_pb2.PutOpen, of: bytes, before: bytes, layers: range, heads: range) -> PutSpec:
        keys = unpack_keys(of, max_keys=MAX_SESSION_BLOCKS)
        check_owned(keys, self.tenant)
        tenant = permitted(message.tenant, self.tenant)
        parents = unpack_keys(before, "parent_keys", max_keys=MAX_SESSION_BLOCKS)
        now, forgotten = int(time.time()), frozenset(message.forgotten)
        return PutSpec(self.format, keys, parents, tenant, layers, heads, now, forgotten, message.durable)

    def _waits(self, spec: PutSpec) -> bool:
        return bool(self._rooms) and self._rooms.waits(self._writes.lane(spec.tenant))

    def _attempt_open(self, entry: _Entry, spec: PutSpec) -> PutSession | None:
        return self._writes.open(
            spec,
            lambda blocks: self._visible(entry, blocks),
            lambda blocks: self._durable(entry, blocks),
            lambda: self._refuse(entry, InvalidRequest("keys", "blocks of them were deleted")),
            now=self._loop.time(),
        )

    def _check_unfinished(self) -> None:
        sessions = [entry.session for entry in self._entries.values() if entry.session is not None]
        if sum(session.opener.unfinished_bytes for session in sessions) > MAX_UNFINISHED_BYTES:
            raise Overloaded("too many slices have come in part", reason="kvstore_memory", retry_after_s=RETRY_AFTER_S)

    async def _when_room(self, entry: _Entry, spec: PutSpec) -> None:
        """Opens a session that is not open, then writes its backlog, as there is room."""
        timeout_s, lane = self._resources.room_timeout_s, self._writes.lane(spec.tenant)
        try:
            session = entry.session
            if session is None:
                session = await self._rooms.get(
                    lambda: self._attempt_open(entry, spec), self._writes.close, timeout_s, lane=lane
                )
                self._opened(entry, session)
            while entry.backlog:
                await self._rooms.get(lambda: self._reserve_first(entry, session), lambda _: None, timeout_s, lane=lane)
                async with self._turn:  # one part of one session, and others have a turn of the event loop
                    await asyncio.sleep(0)
                    runs, nbytes = entry.backlog.popleft()
                    entry.progress_at = self._loop.time()
                    self._settle(nbytes)
                    written = self._writes.write(session, runs, now=entry.progress_at)
                    assert written  # the room is its own
            entry.task = None
        except MoonpoolError as error:
            self._refuse(entry, error)
            return
        if entry.close is not None:
            self._close_requested(entry.close)

    def _reserve_first(self, entry: _Entry, session: PutSession) -> bool | None:
        entry.progress_at = self._loop.time()
        return self._writes.reserve(session, entry.backlog[0][0], now=entry.progress_at) or None

    def _opened(self, entry: _Entry, session: PutSession) -> None:
        entry.session = session
        opened = kvstore_pb2.PutOpened(session=entry.number, present=session.present)
        self.post(kvstore_pb2.PutResponse(opened=opened))
        if durable := self._writes.durable_of(session, session.present):
            self._durable(entry, durable)
        self._arm(entry)

    def _frame(self, header: kv_pb2.FrameHeader, payload: Bytes) -> None:
        entry = self._entries.get(header.session)
        try:
            if entry is not None and not self._take_frame(entry, header, payload):
                return  # its credit comes back with it
        except MoonpoolError as error:
            assert entry is not None
            self._refuse(entry, error)
        self._settle(payload.nbytes)

    def _take_frame(self, entry: _Entry, header: kv_pb2.FrameHeader, payload: Bytes) -> bool:
        """Writes a frame; False when it has to wait, for room or because it is large."""
        session = entry.session
        if session is None:
            raise InvalidRequest("session", f"{header.session} is not open yet")
        entry.progress_at = self._loop.time()
        runs = session.opener.parse(header, payload)
        if session.opener.unfinished_bytes:
            self._check_unfinished()
        parts = portions(runs)  # nearly always one
        if not (len(parts) > 1 or entry.backlog):
            waits = self._waits(session.spec) and session.begun_by(parts[0])
            if not waits and self._writes.write(session, parts[0], now=entry.progress_at):
                return True
        if self.lent:  # the writer has its memory back before this is written
            parts = [[run._replace(data=memoryview(bytes(run.data))) for run in runs] for runs in parts]
        entry.backlog += [(part, 0) for part in parts[:-1]]
        entry.backlog.append((parts[-1], payload.nbytes))  # its credit is handed back with the last
        if entry.task is None:
            entry.task = self.spawn(self._when_room(entry, session.spec))
        return False

    def _visible(self, entry: _Entry, blocks: Sequence[int]) -> None:
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_VISIBLE)
        if entry.close is not None and entry.session is not None and entry.session.complete:
            self._remove(entry)

    def _durable(self, entry: _Entry, blocks: Sequence[int]) -> None:
        entry.progress_at = self._loop.time()
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_DURABLE)

    def _ack(self, entry: _Entry, blocks: Sequence[int], durability: kvstore_pb2.Durability.ValueType) -> None:
        ack = kvstore_pb2.PutAck(session=entry.number, blocks=blocks, durability=durability)
        self.post(kvstore_pb2.PutResponse(ack=ack))

    def _close_requested(self, message: kvstore_pb2.PutClose) -> None:
        entry = self._entries.get(message.session)
        if entry is None:
            return
        session = entry.session
        if session is None or message.aborted or session.complete:
            self._remove(entry)
        elif session.spec.whole_blocks and not entry.backlog:
            self._refuse(entry, "closed before everything was sent")
        else:
            entry.close = message  # the backlog or other writers bring the rest of its blocks

    def _arm(self, entry: _Entry) -> None:
        entry.timer = self._loop.call_at(entry.progress_at + self._resources.session_timeout_s, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        timeout_s = self._resources.session_timeout_s
        assert entry.session is not None
        if entry.backlog:  # waits for room, which has a deadline of its own
            entry.progress_at = self._loop.time()
        if self._loop.time() < entry.progress_at + timeout_s:
            self._arm(entry)
        elif not entry.session.complete:
            self._refuse(entry, f"no progress for {timeout_s:g} s")
        elif self._writes.awaits(entry.session):
            self._refuse(entry, f"some blocks have not become durable within {timeout_s:g} s")
        else:
            self._remove(entry)  # the writer forgot to close it

    def _refuse(self, entry: _Entry, reason: str | MoonpoolError) -> None:
        self._remove(entry)
        refused = kvstore_pb2.PutRefused(session=entry.number, reason=str(reason))
        if isinstance(reason, Overloaded):
            refused.code = reason.reason
            refused.retry_after_s = reason.retry_after_s
        else:
            codes = {DeletedBlocks: "deleted", InvalidRequest: "invalid_request", FrameError: "bad_frame"}
            refused.code = next((code for kind, code in codes.items() if isinstance(reason, kind)), "")
        self.post(kvstore_pb2.PutResponse(refused=refused))

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.number) is entry:
            del self._entries[entry.number]
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        unwritten = sum(nbytes for _, nbytes in entry.backlog)
        entry.backlog.clear()
        if entry.session is not None:
            self._writes.close(entry.session)
        self._settle(unwritten)

    def end(self) -> None:
        for entry in list(self._entries.values()):
            with contextlib.suppress(MoonpoolError):
                self._remove(entry)


def _whole(spec: PutSpec, header: kv_pb2.FrameHeader, payload: Bytes) -> Sequence[int] | None:
    """Hashes of a frame with all of a session's whole blocks; None when it takes a session. Raises if it is bad."""
    layout, count = spec.format.layout, len(spec.keys)
    fits = spec.whole_blocks and payload.nbytes == count * layout.block_bytes
    if fits and shape_of(header, spec.layers, count, spec.heads, layout.block_tokens) is not None:
        return header.slice_hashes[:]
    runs = FrameOpener(layout, spec.heads, spec.keys).parse(header, payload)
    if spec.whole_blocks and sum(len(hashes) for _, _, hashes in runs) != layout.layers * count:
        raise InvalidRequest("frame", "is not all of the session")
    return None
