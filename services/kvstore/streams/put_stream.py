"""The server half of one `Put` stream: opens sessions when there is room, hands frames to the store, acknowledges.

A frame whose blocks find no room waits, and its credits with it. Sessions without progress are ended.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Sequence

from google.protobuf.message import Message

from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded
from moonpool.kv.frames import OpenRun
from moonpool.kv.keys import unpack_keys
from moonpool.kv.layout import MAX_SLICE_BYTES
from moonpool.streams.credits import Traffic
from moonpool.streams.receiving import FrameReceiver
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS, PutSession, PutSpec
from services.kvstore.core.writes import Writes
from services.kvstore.dram.arena import RETRY_AFTER_S
from services.kvstore.streams.open_calls import KVStream
from services.kvstore.streams.rooms import RoomQueue

MAX_UNFINISHED_BYTES = 4 * MAX_SLICE_BYTES
"""Bytes of slices larger than a frame that one writer may have sent in part; they lie beside the DRAM budget."""


@dataclasses.dataclass(frozen=True, slots=True)
class PutResources:
    """What all Put streams of a store use.

    Attributes:
        window_bytes: how far a writer may be ahead.
        session_timeout_s: longest time without progress.
        room_timeout_s: longest wait for DRAM.
    """

    writes: Writes
    rooms: RoomQueue
    instance: kv_pb2.Instance
    window_bytes: int
    session_timeout_s: float
    room_timeout_s: float


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """One session as the stream knows it.

    Attributes:
        progress_at: when something of it came or became durable, on the event loop's clock.
        session: None while it waits for room.
        task: waits for room, to open the session or to write its backlog.
        backlog: opened frames that wait for room, and their payload bytes.
        close: the writer's close, once it has come.
        silent: the answer to its opening says all.
    """

    number: int
    progress_at: float
    session: PutSession | None = None
    task: "asyncio.Task[None] | None" = None
    backlog: collections.deque[tuple[list[OpenRun], int]] = dataclasses.field(default_factory=collections.deque)
    close: kvstore_pb2.PutClose | None = None
    silent: bool = False
    timer: asyncio.TimerHandle | None = None


class PutStream(KVStream[kvstore_pb2.PutRequest]):
    """One writer process' stream."""

    def __init__(self, resources: PutResources, closing: asyncio.Event) -> None:
        super().__init__(closing)
        self._writes = resources.writes
        self._rooms = resources.rooms
        self._resources = resources
        self._receiver = FrameReceiver(resources.window_bytes)
        self._entries: dict[int, _Entry] = {}
        self._unfinished_bytes = 0
        self._loop = asyncio.get_running_loop()

    @property
    def traffic(self) -> Traffic:
        return super().traffic + Traffic(credits_kept=self._receiver.kept)

    def welcome(self) -> Message:
        return kvstore_pb2.PutResponse(welcome=self._receiver.welcome(self._resources.instance))

    def on_message(self, message: kvstore_pb2.PutRequest, payload: memoryview) -> None:
        """What is wrong with a session ends that session only."""
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open, payload)
            case "frame":
                self._frame(message.frame, payload)
            case "close":
                self._close_requested(message.close)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _open(self, message: kvstore_pb2.PutOpen, payload: memoryview) -> None:
        credit = self._receiver.consumed(payload.nbytes, idle=not self._entries)
        entry = self._entries.get(message.session)
        try:
            if entry is not None:
                raise InvalidRequest("session", f"{message.session} is open already")
            entry = self._entries[message.session] = _Entry(message.session, self._loop.time())
            if self._open_now(entry, message, payload, credit):
                return
        except MoonpoolError as error:
            assert entry is not None
            self._refuse(entry, error)
        self._give_back(credit)

    def _open_now(
        self, entry: _Entry, message: kvstore_pb2.PutOpen, payload: memoryview, credit: kv_pb2.Credit | None
    ) -> bool:
        """Opens a session, now or when there is room; whether the answer has given back the message's credit."""
        spec = self._spec(message)
        if self._waits(spec) or (session := self._attempt_open(entry, spec)) is None:
            entry.task = self.spawn(self._when_room(entry, spec))
            return False
        entry.session = session
        whole = message.HasField("frame") and session.covers_whole_blocks
        if whole and self._take_whole(entry, session, message.frame, payload):
            self._remove(entry)
            opened = kvstore_pb2.PutOpened(session=entry.number, present=session.present, taken=True)
            self.post(kvstore_pb2.PutResponse(opened=opened, credit_bytes=credit.bytes if credit is not None else 0))
            return True
        self._opened(entry, session)
        return False

    def _spec(self, message: kvstore_pb2.PutOpen) -> PutSpec:
        keys = unpack_keys(message.keys, max_keys=MAX_SESSION_BLOCKS)
        parents = unpack_keys(message.parent_keys, "parent_keys", max_keys=MAX_SESSION_BLOCKS)
        layers = range(message.layer_begin, message.layer_end)
        heads = range(message.head_begin, message.head_end)
        return PutSpec(self.format, keys, parents, message.tenant, layers, heads)

    def _waits(self, spec: PutSpec) -> bool:
        return self._rooms.waits(self._writes.lane(spec.tenant))

    def _attempt_open(self, entry: _Entry, spec: PutSpec) -> PutSession | None:
        return self._writes.open(
            spec,
            lambda blocks: self._visible(entry, blocks),
            lambda blocks: self._durable(entry, blocks),
            now=self._loop.time(),
        )

    def _open_frame(self, session: PutSession, header: kv_pb2.FrameHeader, payload: memoryview) -> list[OpenRun]:
        before = session.opener.unfinished_bytes
        try:
            runs = session.opener.open(header, payload)
        finally:
            self._unfinished_bytes += session.opener.unfinished_bytes - before
        if self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            raise Overloaded("too many slices have come in part", reason="kvstore_memory", retry_after_s=RETRY_AFTER_S)
        return runs

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
                await self._rooms.get(lambda: self._write_first(entry, session), lambda _: None, timeout_s, lane=lane)
        except MoonpoolError as error:
            self._refuse(entry, error)
            return
        entry.task = None
        if entry.close is not None:
            self._close_requested(entry.close)

    def _opened(self, entry: _Entry, session: PutSession) -> None:
        entry.session = session
        opened = kvstore_pb2.PutOpened(session=entry.number, present=session.present)
        self.post(kvstore_pb2.PutResponse(opened=opened))
        durable = self._writes.durable_present(session)
        if durable:
            self._durable(entry, durable)
        self._arm(entry)

    def _take_whole(self, entry: _Entry, session: PutSession, header: kv_pb2.FrameHeader, payload: memoryview) -> bool:
        """Writes a frame that came with its session's opening; False when there is no room for it.

        Raises:
            InvalidRequest, FrameError: the frame is not what it should be, or not all of the session.
            Overloaded: there is no memory.
        """
        if header.session != entry.number:
            raise InvalidRequest("frame.session", f"{header.session} is not the session that is opened")
        entry.silent = True
        entry.silent = self._writes.write(session, self._open_frame(session, header, payload), now=entry.progress_at)
        if entry.silent and not session.complete:
            raise InvalidRequest("frame", "is not all of the session")
        return entry.silent

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        entry = self._entries.get(header.session)
        try:
            if entry is not None and not self._take_frame(entry, header, payload):
                return  # its credit comes back with it
        except MoonpoolError as error:
            assert entry is not None
            self._refuse(entry, error)
        self._give_back(self._receiver.consumed(payload.nbytes, idle=not self._entries))

    def _take_frame(self, entry: _Entry, header: kv_pb2.FrameHeader, payload: memoryview) -> bool:
        """Writes a frame; False when it has to wait for room."""
        session = entry.session
        if session is None:
            raise InvalidRequest("session", f"{header.session} is not open yet")
        entry.progress_at = self._loop.time()
        runs = self._open_frame(session, header, payload)
        waits = entry.backlog or (self._waits(session.spec) and self._writes.needs_room(session, runs))
        if not waits and self._writes.write(session, runs, now=entry.progress_at):
            return True
        entry.backlog.append((runs, payload.nbytes))
        if entry.task is None:
            entry.task = self.spawn(self._when_room(entry, session.spec))
        return False

    def _write_first(self, entry: _Entry, session: PutSession) -> bool | None:
        """Writes the first frame of the backlog; None while there is no room."""
        runs, nbytes = entry.backlog[0]
        entry.progress_at = self._loop.time()
        if not self._writes.write(session, runs, now=entry.progress_at):
            return None
        if entry.backlog:  # else the session has ended with this frame
            entry.backlog.popleft()
            self._give_back(self._receiver.consumed(nbytes))
        return True

    def _give_back(self, credit: kv_pb2.Credit | None) -> None:
        if credit is not None:
            self.post(kvstore_pb2.PutResponse(credit=credit))

    def _visible(self, entry: _Entry, blocks: Sequence[int]) -> None:
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_VISIBLE)
        if entry.close is not None and entry.session is not None and entry.session.complete:
            self._remove(entry)

    def _durable(self, entry: _Entry, blocks: Sequence[int]) -> None:
        entry.progress_at = self._loop.time()
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_DURABLE)

    def _ack(self, entry: _Entry, blocks: Sequence[int], durability: kvstore_pb2.Durability.ValueType) -> None:
        if entry.silent:
            return
        ack = kvstore_pb2.PutAck(session=entry.number, blocks=blocks, durability=durability)
        self.post(kvstore_pb2.PutResponse(ack=ack))

    def _close_requested(self, message: kvstore_pb2.PutClose) -> None:
        entry = self._entries.get(message.session)
        if entry is None:
            return
        session = entry.session
        if session is None or message.aborted or session.complete:
            self._remove(entry)
        elif session.covers_whole_blocks and not entry.backlog:
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
        if isinstance(reason, InvalidRequest):
            refused.code = "invalid_request"
        elif isinstance(reason, Overloaded):
            refused.code = reason.reason
            refused.retry_after_s = reason.retry_after_s
        self.post(kvstore_pb2.PutResponse(refused=refused))

    def _remove(self, entry: _Entry) -> None:
        """Forgets a session and everything it left unfinished."""
        if self._entries.get(entry.number) is entry:
            del self._entries[entry.number]
            if entry.session is not None:
                self._unfinished_bytes -= entry.session.opener.unfinished_bytes
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        unwritten = sum(nbytes for _, nbytes in entry.backlog)
        entry.backlog.clear()
        if entry.session is not None:
            self._writes.close(entry.session)
        self._give_back(self._receiver.consumed(unwritten, idle=not self._entries))

    def end(self) -> None:
        for entry in list(self._entries.values()):
            with contextlib.suppress(MoonpoolError):
                self._remove(entry)
