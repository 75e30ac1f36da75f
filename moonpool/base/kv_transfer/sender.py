"""Sends a request's KV to a decode instance: each transfer is one channel on a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from moonpool.base.errors import Mismatch, StreamBroken, TransferFailed
from moonpool.base.kv.frames import FRAME_BYTES, Slice
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint, StreamMethod
from moonpool.base.rpc.messages import payload_bytes
from moonpool.base.transport.fault_injection import frames_to_send
from moonpool.base.transport.flow_control import TO_DECODE
from moonpool.base.transport.mux_channel import MuxChannel
from moonpool.base.transport.mux_stream import MuxStream, StreamClient
from moonpool.v1 import decode_pb2, kv_pb2

SEND_TIMEOUT_S = 30.0
RECEIVE_KV = StreamMethod("DecodeService", "ReceiveKV", decode_pb2.ReceiveKVRequest, decode_pb2.ReceiveKVResponse)
_Channel = MuxChannel[decode_pb2.ReceiveKVRequest, decode_pb2.ReceiveKVResponse]


def _channel_of(message: decode_pb2.ReceiveKVResponse) -> Hashable:
    return message.verdict.transfer_id, message.verdict.generation


class DamagedInTransfer(TransferFailed):
    """A slice did not match the hash on arrival: the slice was damaged in the sender's pool, or on the way.

    Attributes:
        block: index in the sequence.
    """

    def __init__(self, message: str, block: int) -> None:
        super().__init__(message)
        self.args = (message, block)
        self.block = block


class TransferSender(StreamClient[decode_pb2.ReceiveKVRequest, decode_pb2.ReceiveKVResponse]):
    """This process's transfers to one decode instance, all on one stream."""

    def __init__(
        self, decode: KVEndpoint, *, send_timeout_s: float = SEND_TIMEOUT_S, frame_bytes: int = FRAME_BYTES
    ) -> None:
        """Connect when the first transfer opens.

        Args:
            decode: the decode instance.
            send_timeout_s: longest wait for credits, and for the link, per frame.
            frame_bytes: payload size aimed at.
        """
        self._layout = decode.layout
        self._send_timeout_s = send_timeout_s
        self._frame_bytes = frame_bytes
        spec = decode.spec(f"KV to {decode.address}", RECEIVE_KV, _channel_of, priority=TO_DECODE)
        super().__init__(MuxStream(spec))

    async def open(self, target: kv_pb2.TransferTarget, forgotten: Sequence[str] = ()) -> OutboundTransfer:
        """Tell decode that the transfer's prefill begins.

        Args:
            target: the promise of decode.
            forgotten: deletions that the sent KV is younger than.

        Raises:
            Mismatch: decode does not take this KV, or is not the epoch that promised.
            StreamBroken: decode cannot be reached.
            TransferFailed: the transfer is open already.
        """
        transfer = OutboundTransfer(target, self._layout, self._send_timeout_s, self._frame_bytes)
        channel = await self._stream.open((target.transfer_id, target.generation), transfer)
        try:
            epoch = channel.welcome.receiver.epoch
            if epoch != target.decode.epoch:
                raise Mismatch("epoch", f"promised by {target.decode.epoch}, {epoch} answers")
            transfer.begin(channel, forgotten)
        except BaseException:
            channel.close()
            raise
        return transfer


class OutboundTransfer:
    """One transfer. Send each slice once, `close`, then wait for the `verdict`.

    As a context manager the transfer aborts everything unclosed, and drops a verdict that was not waited for.
    """

    def __init__(
        self, target: kv_pb2.TransferTarget, layout: KVLayout, send_timeout_s: float, frame_bytes: int
    ) -> None:
        self.target = target
        self.sent_bytes = 0
        self._layout = layout
        self._send_timeout_s = send_timeout_s
        self._frame_bytes = frame_bytes
        self._channel: _Channel | None = None
        self._closed = False
        self._complete = False
        self._error: Exception | None = None
        self._done = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(aborted=True)
        self.release()

    def begin(self, channel: _Channel, forgotten: Sequence[str]) -> None:
        """Announce the transfer on the transfer's channel; for the sender."""
        self._channel = channel
        target = self.target
        opened = decode_pb2.TransferOpen(
            transfer_id=target.transfer_id,
            generation=target.generation,
            decode_epoch=target.decode.epoch,
            forgotten=forgotten,
        )
        channel.post(decode_pb2.ReceiveKVRequest(open=opened))

    async def send(self, slices: Iterable[Slice]) -> int:
        """Send whole layer slices; return the payload bytes. The slices' memory is free afterwards, also on errors.

        Raises:
            StreamBroken: the stream has ended.
            TransferFailed: the receiver gave the transfer up, or credits or the link came too late; or the transfer is
                closed.
        """
        channel = self._channel
        if channel is None or self._closed:
            raise TransferFailed(f"transfer {self.target.transfer_id} is closed")
        sent = self.sent_bytes
        await channel.send(self._frames(slices), timeout_s=self._send_timeout_s)
        return self.sent_bytes - sent

    def _frames(self, slices: Iterable[Slice]) -> Iterator[tuple[decode_pb2.ReceiveKVRequest, list[memoryview]]]:
        target = self.target
        for header, pieces in frames_to_send(
            target.transfer_id, target.generation, slices, self._layout, self._frame_bytes
        ):
            if self._error is not None:  # the receiver gave the transfer up between two frames
                raise self._error
            yield decode_pb2.ReceiveKVRequest(frame=header), pieces
            self.sent_bytes += payload_bytes(pieces)

    def close(self, aborted: bool) -> None:
        """Tell the receiver that the transfer is over, without waiting. `aborted`: forgets the channel. Idempotent."""
        channel = self._channel
        if self._closed or channel is None:
            return
        self._closed = True
        if not self._done.is_set():
            message = decode_pb2.TransferClose(
                transfer_id=self.target.transfer_id, generation=self.target.generation, aborted=aborted
            )
            try:
                channel.post(decode_pb2.ReceiveKVRequest(close=message))
            except StreamBroken as error:
                self.on_broken(error)
        if aborted:
            self.on_broken(TransferFailed(f"transfer {self.target.transfer_id} was aborted"))
            channel.close()

    async def verdict(self, timeout_s: float) -> None:
        """Wait until the receiver has every slice, intact. The channel is over afterwards, also on errors.

        Raises:
            TransferFailed: slices are missing or damaged, or no verdict came within `timeout_s`.
            StreamBroken: the stream ended before the verdict.
        """
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            if self._channel is not None:
                self._channel.suspect(began)  # a peer that hangs: the next transfer gets a new stream
            raise TransferFailed(f"transfer {self.target.transfer_id}: no verdict within {timeout_s:g} s") from None
        finally:
            self.release()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Forget the channel without waiting for the verdict. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    def on_message(self, message: decode_pb2.ReceiveKVResponse, payload: memoryview) -> None:
        """The verdict; for the stream."""
        verdict = message.verdict
        if verdict.status == decode_pb2.TRANSFER_STATUS_COMPLETE:
            self._complete = True
            self._done.set()
            self.release()
        else:
            reason = verdict.reason or "no reason given"
            given_up = f"transfer {verdict.transfer_id} was given up by the receiver: {reason}"
            if verdict.HasField("damaged_block"):
                raise DamagedInTransfer(given_up, verdict.damaged_block)
            raise TransferFailed(given_up)

    def on_broken(self, error: Exception) -> None:
        """The channel has failed; for the stream."""
        if not self._complete and self._error is None:
            self._error = error
            self._done.set()
