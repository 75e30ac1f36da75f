"""The server half of one `Put` stream.

Owns its sessions: opening them when there is room, handing frames to the store, acknowledging, and ending those that
make no progress. Must not know how the store keeps blocks.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded
from moonpool.kv.keys import unpack_keys
from moonpool.streams.credits import Traffic
from moonpool.streams.receiving import FrameReceiver
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS, PutSession, PutSpec, parents_of
from services.kvstore.core.writes import Writes
from services.kvstore.streams.rooms import RoomQueue
from services.kvstore.streams.sessions import KVStream


@dataclasses.dataclass(frozen=True, slots=True)
class PutParts:
    """What all Put streams share.

    Attributes:
        writes: where blocks go.
        rooms: where sessions wait for DRAM.
        instance: who this store is.
        window_bytes: how far a writer may be ahead.
        session_timeout_s: longest time without progress.
        room_timeout_s: longest wait for DRAM.
        on_session: called when a session was opened or closed.
    """

    writes: Writes
    rooms: RoomQueue
    instance: kv_pb2.Instance
    window_bytes: int
    session_timeout_s: float
    room_timeout_s: float
    on_session: Callable[[], None]


class _Entry:
    """One session as the stream knows it. `session` is None while it waits for room."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.session: PutSession | None = None
        self.opening: asyncio.Task[None] | None = None
        self.tried = False  # to open it
        self.finished = False  # the writer has sent everything it had to send
        self.silent = False  # its opening's answer says all
        self.progress_at = now
        self.timer: asyncio.TimerHandle | None = None


class PutStream(KVStream[kvstore_pb2.PutRequest]):
    """One writer process' stream."""

    def __init__(self, parts: PutParts, closing: asyncio.Event) -> None:
        super().__init__(closing)
        self._parts = parts
        self._receiver = FrameReceiver(parts.window_bytes)
        self._entries: dict[int, _Entry] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return super().traffic + Traffic(credits_kept=self._receiver.kept)

    def welcome(self) -> Message:
        """The answer to hello, with the window."""
        return kvstore_pb2.PutResponse(welcome=self._receiver.welcome(self._parts.instance))

    def on_message(self, message: kvstore_pb2.PutRequest, payload: memoryview) -> None:
        """One message of the writer. What is wrong with a session ends that session only."""
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open, payload)
            case "frame":
                self._frame(message.frame, payload)
            case "close":
                self._close_requested(message.close)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    # Opening

    def _open(self, message: kvstore_pb2.PutOpen, payload: memoryview) -> None:
        if message.session in self._entries:
            raise InvalidRequest("session", f"{message.session} is open already")
        credit = self._receiver.consumed(payload.nbytes, idle=not self._entries)
        entry = self._entries[message.session] = _Entry(message.session, self._loop.time())
        try:
            spec = self._spec(message)
            lane = self._parts.writes.lane(spec.tenant)
            if self._parts.rooms.waits(lane) or (session := self._attempt(entry, spec)) is None:
                entry.opening = self.spawn(self._open_later(entry, spec))
            elif message.HasField("frame") and session.covers_whole_blocks:
                self._take_whole(entry, session, message.frame, payload, credit)
                return
            else:
                self._opened(entry, session)
        except MoonpoolError as error:
            self._refuse(entry, error)
        self._give_back(credit)

    def _spec(self, message: kvstore_pb2.PutOpen) -> PutSpec:
        keys = unpack_keys(message.keys, max_keys=MAX_SESSION_BLOCKS)
        parents = unpack_keys(message.parent_keys, "parent_keys", max_keys=MAX_SESSION_BLOCKS)
        return PutSpec(
            format=self.format,
            keys=keys,
            parents=parents_of(keys, parents),
            tenant=message.tenant,
            layers=range(message.layer_begin, message.layer_end),
            heads=range(message.head_begin, message.head_end),
        )

    def _attempt(self, entry: _Entry, spec: PutSpec) -> PutSession | None:
        again, entry.tried = entry.tried, True
        return self._parts.writes.open(
            spec,
            lambda blocks: self._visible(entry, blocks),
            lambda blocks: self._durable(entry, blocks),
            now=self._loop.time(),
            again=again,
        )

    async def _open_later(self, entry: _Entry, spec: PutSpec) -> None:
        try:
            session = await self._parts.rooms.get(
                lambda: self._attempt(entry, spec),
                self._parts.writes.close,
                self._parts.room_timeout_s,
                lane=self._parts.writes.lane(spec.tenant),
            )
        except MoonpoolError as error:
            self._refuse(entry, error)
            return
        self._opened(entry, session)

    def _opened(self, entry: _Entry, session: PutSession) -> None:
        entry.session = session
        entry.opening = None
        self._parts.on_session()
        opened = kvstore_pb2.PutOpened(session=entry.number, present=session.present)
        self.post(kvstore_pb2.PutResponse(opened=opened))
        durable = self._parts.writes.durable_present(session)
        if durable:
            self._durable(entry, durable)
        self._arm(entry)

    def _take_whole(
        self,
        entry: _Entry,
        session: PutSession,
        header: kv_pb2.FrameHeader,
        payload: memoryview,
        credit: kv_pb2.Credit | None,
    ) -> None:
        """A session that came in one message is taken, ended, and answered in one message.

        Raises:
            InvalidRequest, FrameError: The frame is not what it should be, or not all of the session.
            Overloaded: There is no memory.
        """
        entry.session = session
        entry.silent = True
        self._parts.on_session()
        if header.session != entry.number:
            raise InvalidRequest("frame.session", f"{header.session} is not the session that is opened")
        self._parts.writes.write(session, session.opener.open(header, payload))
        if not session.complete:
            raise InvalidRequest("frame", "is not all of the session")
        self._remove(entry)
        opened = kvstore_pb2.PutOpened(session=entry.number, present=session.present, taken=True)
        self.post(kvstore_pb2.PutResponse(opened=opened, credit_bytes=credit.bytes if credit is not None else 0))

    # Frames

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        entry = self._entries.get(header.session)
        try:
            if entry is not None and entry.session is not None:
                entry.progress_at = self._loop.time()
                self._parts.writes.write(entry.session, entry.session.opener.open(header, payload))
            elif entry is not None:
                raise InvalidRequest("session", f"{header.session} is not open yet")
        except MoonpoolError as error:
            assert entry is not None
            self._refuse(entry, error)
        self._give_back(self._receiver.consumed(payload.nbytes, idle=not self._entries))

    def _give_back(self, credit: kv_pb2.Credit | None) -> None:
        if credit is not None:
            self.post(kvstore_pb2.PutResponse(credit=credit))

    def _visible(self, entry: _Entry, blocks: Sequence[int]) -> None:
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_VISIBLE)
        if entry.finished and entry.session is not None and entry.session.complete:
            self._remove(entry)

    def _durable(self, entry: _Entry, blocks: Sequence[int]) -> None:
        entry.progress_at = self._loop.time()
        self._ack(entry, blocks, kvstore_pb2.DURABILITY_DURABLE)

    def _ack(self, entry: _Entry, blocks: Sequence[int], durability: kvstore_pb2.Durability.ValueType) -> None:
        if entry.silent:
            return
        ack = kvstore_pb2.PutAck(session=entry.number, blocks=blocks, durability=durability)
        self.post(kvstore_pb2.PutResponse(ack=ack))

    # Ending

    def _close_requested(self, message: kvstore_pb2.PutClose) -> None:
        entry = self._entries.get(message.session)
        if entry is None:
            return
        session = entry.session
        if session is None or message.aborted or session.complete:
            self._remove(entry)
        elif session.covers_whole_blocks:
            self._refuse(entry, "closed before everything was sent")
        else:
            entry.finished = True  # other writers bring the rest of its blocks; what this one brought stays

    def _arm(self, entry: _Entry) -> None:
        timeout_s = self._parts.session_timeout_s
        entry.timer = self._loop.call_at(entry.progress_at + timeout_s, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        if self._loop.time() < entry.progress_at + self._parts.session_timeout_s:
            self._arm(entry)
        elif entry.session is not None and entry.session.complete:
            self._remove(entry)  # the writer has what it wanted and forgot to say so
        else:
            self._refuse(entry, f"no progress for {self._parts.session_timeout_s:g} s")

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
        self._entries.pop(entry.number, None)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.opening is not None and entry.opening is not asyncio.current_task():
            entry.opening.cancel()
        if entry.session is not None:
            self._parts.writes.close(entry.session)
            self._parts.on_session()
        if not self._entries:
            self._give_back(self._receiver.idle())

    def end(self) -> None:
        """The stream is over."""
        for entry in list(self._entries.values()):
            with contextlib.suppress(MoonpoolError):
                self._remove(entry)
