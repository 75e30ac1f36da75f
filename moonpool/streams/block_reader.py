"""Reads blocks from a kvstore or from an engine's pool, layer by layer: the client of `Get` and `ReadKV`.

Callbacks take what comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import NamedTuple

from moonpool.errors import InvalidRequest, StreamBroken, TransferFailed
from moonpool.kv.keys import pack_keys
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels, Metadata, payload_stream
from moonpool.streams.lanes.beside import Beside
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.mux import CONNECT_TIMEOUT_S, MuxSession, MuxStream, StreamClient
from moonpool.streams.prefix_read import Answer, Into, OnSlice, PrefixLost, PrefixRead
from moonpool.v1 import kv_pb2, kvstore_pb2

__all__ = ["BlockReader", "PrefixLost", "ReadMethod"]

READ_WINDOW_BYTES = 32 << 20

Asked = kvstore_pb2.GetRequest | kv_pb2.ReadKVRequest


class ReadMethod(NamedTuple):
    """How blocks are read from one kind of instance; the messages of all kinds have the same fields."""

    service: str
    method: str
    asked: type[Asked]
    answer: type[Answer]


FROM_STORE = ReadMethod("KVStoreService", "Get", kvstore_pb2.GetRequest, kvstore_pb2.GetResponse)
FROM_PREFILL = ReadMethod("PrefillService", "ReadKV", kv_pb2.ReadKVRequest, kv_pb2.ReadKVResponse)
FROM_DECODE = FROM_PREFILL._replace(service="DecodeService")


def _get_session(message: Answer) -> Hashable:
    match message.WhichOneof("message"):
        case "frame":
            return message.frame.session
        case "opened":
            return message.opened.session
        case "missing":
            return message.missing.session
        case "done":
            return message.done.session
    return None


class BlockReader(StreamClient[Asked, Answer]):
    """One per pair of processes: everything this process reads from one kvstore or engine, on one stream."""

    def __init__(
        self,
        channels: Channels,
        address: str,
        hello: kv_pb2.StreamHello,
        layout: KVLayout,
        method: ReadMethod = FROM_STORE,
        *,
        window_bytes: int = READ_WINDOW_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        lanes: LaneDialer | None = None,
        metadata: Metadata = (),
        forgotten: Callable[[Sequence[bytes], str], Sequence[str]] = lambda keys, tenant: (),
        beside: Beside | None = None,
    ) -> None:
        """Connects when the first read begins.

        Args:
            channels: Where the channel comes from.
            address: "host:port" of the instance.
            hello: This side, and the KV it speaks of.
            layout: Arrangement of that KV.
            method: How its kind is read.
            window_bytes: Payload bytes the source may be ahead.
            connect_timeout_s: Longest wait for the source's welcome.
            lanes: Opens lanes beside gRPC; None to stay on gRPC.
            metadata: Of the call, such as an API key.
            forgotten: `(keys, tenant)` -> the deletions that concern such blocks and were carried out on this side:
                nothing is taken from who has not carried out all of them.
            beside: Where slices land that land `into` memory; None: on the loop.
        """
        self._layout = layout
        self._forgotten = forgotten
        self._beside = beside
        self._asked = method.asked
        self._ids = count(1)
        stream: MuxStream[Asked, Answer] = MuxStream(
            f"KV from {address}",
            lambda: payload_stream(
                channels.get(address),
                f"moonpool.v1.{method.service}",
                method.method,
                method.asked,
                method.answer,
            )(metadata=metadata),
            method.asked(hello=hello),
            _get_session,
            method.answer,
            lanes=lanes,
            window_bytes=window_bytes,
            credit=lambda credit: method.asked(credit=credit),
            connect_timeout_s=connect_timeout_s,
        )
        super().__init__(stream)

    async def read(
        self,
        keys: Sequence[bytes],
        *,
        layers: range,
        heads: range | None = None,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
        into: Into | None = None,
    ) -> int:
        """Reads the leading blocks of `keys` that the source has; returns how many that were (fewer is a miss).

        Args:
            keys: A chain's keys; their order numbers the blocks.
            layers: Consecutive layers wanted.
            heads: Consecutive heads wanted; None for all, as slices with scales must be read.
            on_slice: Called once with (layer, index into keys, bytes of the wanted heads in order, their hash) for each
                slice; must take them at once. A slice of a block at or past the returned count may come too.
            on_layer: Called for each layer, in order, when all its slices have been handed out.
            timeout_s: Longest time for all of it.
            tenant: Whose KV it is.
            into: Says where the slice of any (layer, index into keys) may land; saves a copy: `on_slice` gets that
                memory then. None for a slice that may not. The memory is undefined where a read fails, or has fewer
                blocks; nothing is written there after `read` has returned or raised.

        Neither is called after `read` has returned or raised. What they raise ends the read.

        Raises:
            InvalidRequest: The layout has no such heads, or they cannot be read apart.
            PrefixLost: A block went missing after a layer had been handed out with it.
            TransferFailed: It took too long, or the source ended the session early, or may have deleted blocks.
            DamagedSliceError: A slice did not match its hash; the source was told and will look at its block.
            FrameError: What came was not intact, not asked for, or came twice.
            StreamBroken: The stream has ended, or the source cannot be reached.
            Mismatch: The source does not take this KV.
        """
        heads = range(self._layout.kv_heads) if heads is None else heads
        if not keys or not layers or not heads:
            return 0
        self._check_heads(heads)
        forgotten = self._forgotten(keys, tenant)
        read = PrefixRead(self._layout, keys, layers, heads, on_slice, on_layer, forgotten, into, self._beside)
        number = next(self._ids)
        began = asyncio.get_running_loop().time()
        try:
            with self._stream.deadlines.within(timeout_s):
                await self._read(number, read, keys, layers, heads)
        except TimeoutError:
            self._stream.suspect(began)
            raise TransferFailed(f"{self._stream.name}: a read of {len(keys)} blocks took {timeout_s:g} s") from None
        return read.blocks

    def _check_heads(self, heads: range) -> None:
        """Here, because the source would end the stream, and with it all other reads."""
        whole = range(self._layout.kv_heads)
        if heads.step != 1 or heads.start not in whole or heads.stop > whole.stop:
            raise InvalidRequest("heads", f"{heads} are not among the layout's {self._layout.kv_heads}")
        if self._layout.scale_bytes and heads != whole:
            raise InvalidRequest("heads", "slices with scales travel whole")

    async def _read(self, number: int, read: PrefixRead, keys: Sequence[bytes], layers: range, heads: range) -> None:
        session = await self._stream.open(number, read, read.place)
        finished = False
        try:
            opening = kv_pb2.ReadOpen(
                session=number,
                keys=pack_keys(keys),
                layer_begin=layers.start,
                layer_end=layers.stop,
                head_begin=heads.start,
                head_end=heads.stop,
                takes_frame=True,
                forgotten=read.forgotten,
            )
            session.post(self._asked(open=opening, credit_bytes=session.take_credit()))
            read.expect()
            await read.finished.wait()
            finished = True
        finally:
            read.leave()
            session.close()
            if not finished:
                self._tell_closed(session, number, read.damaged_key)
            await read.quiet()

    def _tell_closed(self, session: MuxSession[Asked, Answer], number: int, damaged_key: bytes) -> None:
        close = kv_pb2.ReadClose(session=number, damaged_key=damaged_key)
        try:
            session.post(self._asked(close=close))
        except StreamBroken:
            return
