"""The serving side of reads: what the streams of a kvstore and of a pool have in common.

Each session is a task. There is no refusal of a single read: what cannot be served is answered as a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.errors import InvalidRequest, MoonpoolError, Unavailable
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.streams.credits import ByteCredits, Traffic
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.receiving import FrameWriter
from moonpool.streams.serving import ServerStream
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

Req = TypeVar("Req", bound=Message)

log = get_logger(__name__)


class ReadSessions(ServerStream[Req]):
    """One reader's stream. `on_hello` must call `writes`, and `begin` may call `serve`."""

    def __init__(
        self,
        closing: asyncio.Event,
        *,
        lanes: LaneServer | None,
        response: Callable[..., Message],
        carried_out: Container[str],
        suspect: Callable[[BlockKey], None],
        max_keys: int,
    ) -> None:
        """Starts nothing yet.

        Args:
            closing: set when the service ends its streams.
            lanes: offers lanes beside the call.
            response: the stream's answers.
            carried_out: names of deletions that were carried out here.
            suspect: told of blocks that a reader got damaged.
            max_keys: of one session.
        """
        super().__init__(closing, lanes=lanes)
        self.frames: FrameWriter
        self._response = response
        self._carried_out = carried_out
        self._suspect = suspect
        self._max_keys = max_keys
        self._credits = ByteCredits()  # those of `frames`, once there are some
        self._sessions: dict[int, asyncio.Task[None]] = {}

    @property
    def traffic(self) -> Traffic:
        """What is under way."""
        return Traffic(unsent=len(self.outbox), credits_out=self._credits.out)

    def writes(self, frames: FrameWriter) -> None:
        """The frames of all sessions leave through `frames`; the reader gives the credits."""
        self.frames, self._credits = frames, frames.credits

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        """Begins a session; what it raises of Moonpool's errors makes it a miss."""
        raise NotImplementedError

    def serve(self, number: int, work: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Runs a session; `ended` is called at its end, also of one that is cancelled before it has begun.

        Raises:
            Unavailable: too many run already.
        """
        task = self._sessions[number] = self.spawn(work)

        def over(_: asyncio.Task[None]) -> None:
            ended()
            if self._sessions.get(number) is task:
                del self._sessions[number]

        task.add_done_callback(over)

    def opened(self, number: int, blocks: int = 0, forgotten: Sequence[str] = ()) -> None:
        """Tells the reader how many blocks come, and which deletions of such blocks were carried out before."""
        opened = kv_pb2.ReadOpened(session=number, blocks=blocks, forgotten=forgotten)
        self.post(self._response(opened=opened))

    def opened_with(
        self, number: int, blocks: int, forgotten: Sequence[str]
    ) -> Callable[[kv_pb2.FrameHeader], Message]:
        """As `opened`, around the header of a frame that brings all of it."""

        def wrap(frame: kv_pb2.FrameHeader) -> Message:
            opened = kv_pb2.ReadOpened(session=number, blocks=blocks, forgotten=forgotten, frame=frame)
            return self._response(opened=opened)

        return wrap

    def done(self, number: int) -> None:
        """Tells the reader that nothing follows."""
        self.post(self._response(done=kv_pb2.ReadDone(session=number)))

    def on_message(self, message: Any, payload: memoryview) -> None:
        """One message of the reader. What is wrong with a session ends that session only."""
        if message.credit_bytes:
            self._credits.grant(message.credit_bytes)
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open)
            case "credit":
                self._credits.grant(message.credit.bytes)
            case "close":
                for key in unpack_keys(message.close.damaged_key, "damaged_key", max_keys=1):
                    self._suspect(key)
                self._close(message.close.session)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _open(self, message: kv_pb2.ReadOpen) -> None:
        number = message.session
        try:
            if number in self._sessions:
                self._close(number)
                raise InvalidRequest("session", f"{number} was open already")
            keys = unpack_keys(message.keys, max_keys=self._max_keys)
            if message.forgotten and any(name not in self._carried_out for name in message.forgotten):
                raise Unavailable("a deletion of such blocks was not carried out yet")
            self.begin(message, keys)
        except MoonpoolError as error:
            # at level debug: a peer that asks too much must not fill the log
            log.debug("read answered as a miss", error=str(error))
            self.opened(number)
            self.done(number)

    def _close(self, number: int) -> None:
        task = self._sessions.pop(number, None)
        if task is not None:
            task.cancel()

    def end(self) -> None:
        """The reader has gone."""
        for task in list(self._sessions.values()):
            task.cancel()
