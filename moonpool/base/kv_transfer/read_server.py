"""Server halves of KV streams: the handshake, credits for senders, frames for readers, and read transfers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.base.errors import InvalidRequest, Mismatch, MoonpoolError, TransferFailed, Unavailable
from moonpool.base.kv.frames import FRAME_BYTES, Slice
from moonpool.base.kv.keys import KEY_BYTES, BlockKey, unpack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.messages import payload_bytes
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.fault_injection import frame_to_send, frames_to_send
from moonpool.base.transport.flow_control import TO_DECODE, ByteCredits, CreditReturn, EgressLink, StreamTraffic
from moonpool.base.transport.listener import TransportListener
from moonpool.base.transport.send_queue import SendQueue
from moonpool.base.transport.server_stream import ServerStream
from moonpool.v1 import kv_pb2

WINDOW_BYTES = 32 << 20


def check_hello(
    hello: kv_pb2.StreamHello, *, namespace: bytes | None = None, layout: KVLayout | None = None
) -> KVLayout:
    """Check a stream's first message against what this side holds, and return the stream's layout.

    Args:
        hello: The peer's first message.
        namespace: The only namespace taken; None takes any.
        layout: The only layout taken; None takes any.

    Raises:
        Mismatch: The two sides do not speak of the same KV; names the field.
    """
    theirs = KVLayout.from_proto(hello.layout)
    if len(hello.namespace) != KEY_BYTES:
        raise Mismatch("namespace", f"must have {KEY_BYTES} bytes, has {len(hello.namespace)}")
    if layout is not None and (found := layout.difference(theirs)) is not None:
        raise Mismatch(f"layout.{found.field}", f"here {found.here!r}, there {found.there!r}")
    if namespace is not None and namespace != hello.namespace:
        raise Mismatch("namespace", f"here {namespace.hex()[:16]}, there {hello.namespace.hex()[:16]}")
    return theirs


class FrameReceiver:
    """The credits that a frame receiver gives on one stream.

    `consumed` must be called for every frame, whatever its fate: an unknown transfer's frame or a corrupted frame has
    used up credits too.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._returns = CreditReturn(window_bytes)

    def welcome(
        self, receiver: kv_pb2.Instance, transport: kv_pb2.TransportOffer | None = None
    ) -> kv_pb2.StreamWelcome:
        """Answer to the peer's StreamHello, with the transport that is offered, if any."""
        return kv_pb2.StreamWelcome(receiver=receiver, credit_bytes=self.window_bytes, transport=transport)

    @property
    def kept(self) -> int:
        """Bytes dealt with and not yet handed back."""
        return self._returns.pending

    def consumed(self, nbytes: int, *, idle: bool = False) -> kv_pb2.Credit | None:
        """Note that `nbytes` of payload are dealt with; the Credit to send now, if any. `idle`: none is open."""
        returned = self._returns.consumed(nbytes, idle=idle)
        return kv_pb2.Credit(bytes=returned) if returned else None

    def idle(self) -> kv_pb2.Credit | None:
        """The last open transfer has ended; the Credit to send now, if any."""
        return self.consumed(0, idle=True)


class FrameWriter:
    """Writes many transfers' frames to one reader, which gives the credits.

    The reader's first Credit is the window; until then, no frame is sent.
    """

    def __init__(
        self,
        send_queue: SendQueue,
        layout: KVLayout,
        wrap: Callable[[kv_pb2.FrameHeader], Message],
        *,
        link: EgressLink | None = None,
        priority: int = TO_DECODE,
        target_bytes: int = FRAME_BYTES,
    ) -> None:
        """Frames leave through `send_queue`, each header wrapped into the stream's own message by `wrap`."""
        self._send_queue = send_queue
        self._layout = layout
        self._wrap = wrap
        self._link = link
        self._priority = priority
        self._target_bytes = target_bytes
        self.credits = ByteCredits(0)

    def grant(self, credit: kv_pb2.Credit) -> None:
        """Take a Credit from the reader."""
        self.credits.grant(credit.bytes)

    async def send(self, transfer: int, generation: int, slices: Iterable[Slice], *, timeout_s: float) -> int:
        """Send slices in frames; return the payload bytes.

        When the call returns or raises, the slices' memory is free.

        Args:
            transfer: The reader's transfer.
            generation: The transfer's generation (0 for reads).
            slices: What to send, in order; taken one frame at a time.
            timeout_s: Longest wait for credits, and for room, per frame.

        Raises:
            StreamBroken: The stream ended.
            TransferFailed: The reader gave no credits for `timeout_s`.
        """
        sent = 0
        for header, pieces in frames_to_send(transfer, generation, slices, self._layout, self._target_bytes):
            nbytes = payload_bytes(pieces)
            await self.credits.acquire(nbytes, timeout_s=timeout_s)
            try:
                if self._link is not None:
                    async with asyncio.timeout(timeout_s):
                        await self._link.slot(nbytes, self._priority)
            except BaseException as error:
                self.credits.grant(nbytes)  # nothing was sent, so the reader hands nothing back
                if isinstance(error, TimeoutError):
                    raise TransferFailed(f"no slot on the link within {timeout_s:g} s") from None
                raise
            unsent = functools.partial(self.credits.grant, nbytes)
            await self._send_queue.put(self._wrap(header), pieces, timeout_s=timeout_s, unsent=unsent)
            sent += nbytes
        return sent

    def offer(
        self, header: kv_pb2.FrameHeader, pieces: list[memoryview], wrap: Callable[[kv_pb2.FrameHeader], Message]
    ) -> bool:
        """Send a frame if no wait is needed, the header wrapped by `wrap`.

        Returns:
            Whether the frame was sent; no credits are used if not, or if the call raises.

        Raises:
            StreamBroken: Too many messages wait to be written.
        """
        nbytes = payload_bytes(pieces)
        if self._link is not None or nbytes > self._target_bytes or not self.credits.take(nbytes):
            return False
        unused = nbytes
        try:
            header, pieces = frame_to_send((header, pieces))
            sent = self._send_queue.offer(wrap(header), pieces)
            if sent:
                unused -= payload_bytes(pieces)  # what the reader will hand back: a damaged frame may be shorter
            return sent
        finally:
            if unused:
                self.credits.grant(unused)

    def close(self, error: Exception) -> None:
        """End every waiting `send` with `error`."""
        self.credits.close(error)


Req = TypeVar("Req", bound=Message)
log = get_logger(__name__)


class ReadServerStream(ServerStream[Req]):
    """One reader's stream. `on_hello` must call `writes`, and `begin` may call `serve`."""

    def __init__(
        self,
        closing: asyncio.Event,
        *,
        listener: TransportListener | None,
        response: Callable[..., Message],
        carried_out: Container[str],
        suspect: Callable[[BlockKey], None],
        max_keys: int,
    ) -> None:
        """Start nothing yet.

        Args:
            closing: set when the service ends all streams.
            listener: offers transports beside the call.
            response: the stream's answers.
            carried_out: names of deletions that were carried out here.
            suspect: told of blocks that a reader got damaged.
            max_keys: per transfer.
        """
        super().__init__(closing, listener=listener)
        self.frames: FrameWriter
        self._response = response
        self._carried_out = carried_out
        self._suspect = suspect
        self._max_keys = max_keys
        self._credits = ByteCredits()  # those of `frames`, once there are some
        self._transfers: dict[int, asyncio.Task[None]] = {}

    @property
    def traffic(self) -> StreamTraffic:
        return StreamTraffic(unsent=len(self.send_queue), credits_out=self._credits.out)

    def writes(self, frames: FrameWriter) -> None:
        """The frames of all transfers leave through `frames`; the reader gives the credits."""
        self.frames, self._credits = frames, frames.credits

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        """Begin a transfer; a Moonpool error raised by the transfer makes a miss."""
        raise NotImplementedError

    def serve(self, number: int, work: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Run a transfer; `ended` is called at the transfer's end, also if cancelled before beginning.

        Raises:
            Unavailable: too many run already.
        """
        task = self._transfers[number] = self.spawn(work)

        def over(_: asyncio.Task[None]) -> None:
            ended()
            if self._transfers.get(number) is task:
                del self._transfers[number]

        task.add_done_callback(over)

    def opened(self, number: int, blocks: int = 0, forgotten: Sequence[str] = ()) -> None:
        """Tell the reader how many blocks come, and which deletions of such blocks were carried out before."""
        opened = kv_pb2.ReadOpened(transfer=number, blocks=blocks, forgotten=forgotten)
        self.post(self._response(opened=opened))

    def opened_with(
        self, number: int, blocks: int, forgotten: Sequence[str]
    ) -> Callable[[kv_pb2.FrameHeader], Message]:
        """As `opened`, around the header of a frame that brings everything."""

        def wrap(frame: kv_pb2.FrameHeader) -> Message:
            opened = kv_pb2.ReadOpened(transfer=number, blocks=blocks, forgotten=forgotten, frame=frame)
            return self._response(opened=opened)

        return wrap

    def done(self, number: int) -> None:
        """Tell the reader that no frame follows."""
        self.post(self._response(done=kv_pb2.ReadDone(transfer=number)))

    def on_message(self, message: Any, payload: memoryview) -> None:
        """One message from the reader. What is wrong with a transfer ends that transfer only."""
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
                self._close(message.close.transfer)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _open(self, message: kv_pb2.ReadOpen) -> None:
        number = message.transfer
        try:
            if number in self._transfers:
                self._close(number)
                raise InvalidRequest("transfer", f"{number} was open already")
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
        task = self._transfers.pop(number, None)
        if task is not None:
            task.cancel()

    def end(self) -> None:
        """The reader has gone."""
        for task in list(self._transfers.values()):
            task.cancel()
