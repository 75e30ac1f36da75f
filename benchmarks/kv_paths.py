"""KV over the real paths to another process: `ReceiveKV` into a decode's pool, `Put` into a kvstore, `Get` out of it.

Each path moves the ordered KV and returns after the receiver has everything, several transfers at once as in the
services.
"""

import asyncio
import dataclasses
import itertools
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import grpc.aio

from moonpool.base.kv.frames import Slice
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root, namespace, pack_keys, tokens_to_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool, PoolTarget
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.sender import OutboundTransfer, TransferSender
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.config import GRPC_NAME, TRANSPORTS, TransportConfig
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.regions import SharedRegion
from moonpool.base.transport.registry import open_transports
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.v1 import decode_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub

VOCAB_SIZE = 1 << 15
TIMEOUT_S = 120.0
TLS_NAME = "tls"
AT_ONCE = 2
"""Transfers or puts under way at once, so that the stream never waits for the next to open."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model's KV, and the blocks per transfer or put."""

    layout: KVLayout
    blocks: int

    @cached_property
    def namespace(self) -> bytes:
        """Of all benchmarks' KV of this shape."""
        return namespace(bytes(32), self.layout)

    @cached_property
    def root(self) -> bytes:
        """Parent of every chain's first block."""
        return chain_root(self.namespace, "")

    @property
    def transfer_bytes(self) -> int:
        """Bytes per transfer or put."""
        return self.blocks * self.layout.block_bytes

    def tokens(self, seed: int) -> "array[int]":
        """As many as the blocks have, unlike those of other seeds."""
        count = self.blocks * self.layout.block_size
        return array("i", random.Random(seed).choices(range(VOCAB_SIZE), k=count))

    def keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of their blocks."""
        return block_keys(self.root, token_ids, self.layout.block_size)

    def sequence(self, request_id: str, token_ids: "array[int]") -> kv_pb2.SequenceSpec:
        """A sequence with these tokens, one more to be generated."""
        return kv_pb2.SequenceSpec(
            request_id=request_id,
            token_ids=tokens_to_bytes(token_ids),
            prompt_tokens=len(token_ids),
            block_keys=pack_keys(self.keys(token_ids)),
            chain_root=self.root,
            sampling=kv_pb2.Sampling(max_tokens=2, temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        )

    def hello(self, sender: str) -> kv_pb2.StreamHello:
        """First message on a stream with this KV."""
        instance = kv_pb2.Instance(id=sender, epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
        return kv_pb2.StreamHello(sender=instance, namespace=self.namespace, layout=self.layout.to_proto())


SMALL = Shape(KVLayout.uniform(layers=8, kv_heads=4, head_dim=64, block_size=64, dtype="bfloat16"), 128)
"""64 KiB per layer slice: a small model's. Frames near one MiB hold sixteen slices. 64 MiB."""
HALF_B = Shape(KVLayout.uniform(layers=24, kv_heads=2, head_dim=64, block_size=64, dtype="bfloat16"), 32)
"""A prompt of 2,048 tokens of Qwen2.5-0.5B: 24 MiB, 1 MiB of each layer."""
SHAPES = {"small": SMALL, "0.5b": HALF_B}


class Path(Protocol):
    """One way for KV to another process."""

    @property
    def transport(self) -> str:
        """The transport that is used; "" before anything has been moved."""
        ...

    async def send(self, nbytes: int) -> None:
        """Move at least so many bytes; return when the receiver has confirmed them."""
        ...

    async def aclose(self) -> None:
        """End the stream."""
        ...


def filled_pool(shape: Shape = SMALL) -> KVPool:
    """A pool with one transfer's KV, no two slices alike."""
    layout, blocks = shape.layout, shape.blocks
    pool = KVPool.create(layout, blocks, [(0, layout.layers)])
    for layer in range(layout.layers):
        for block in range(blocks):
            pool.slice(layer, block)[:] = (layer * blocks + block + 1).to_bytes(4, "little") * (
                layout.slice_bytes(0) // 4
            )
            pool.seal(layer, block, layout.block_size)
    return pool


def dialers(pool: KVPool, tls: Tls | None = None) -> dict[str, TransportDialer]:
    """A client's end of each transport that there is; peers may read the pool. Without certificates no "tls"."""
    names = [name for name in (GRPC_NAME, *TRANSPORTS) if tls is not None or name != TLS_NAME]
    opened = {
        name: open_transports(TransportConfig(kv_transports=name), tls if name == TLS_NAME else None) for name in names
    }
    return {
        name: TransportDialer(transports, lambda: [SharedRegion(fd, data) for fd, data in pool.shared()])
        for name, transports in opened.items()
        if transports or name == GRPC_NAME
    }


class _Transfers:
    """Runs whole transfers, some at once, until enough bytes have gone."""

    async def send(self, nbytes: int) -> None:
        count = iter(range(-(-nbytes // SMALL.transfer_bytes)))

        async def sender() -> None:
            for _ in count:
                await self.transfer()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(sender())

    async def transfer(self) -> object:
        raise NotImplementedError


class DecodePath(_Transfers):
    """Prefill's side of transfers: reserve, send every slice, wait for the verdict, give the room back."""

    _seeds = itertools.count(1)

    def __init__(
        self,
        channels: Channels,
        address: str,
        pool: KVPool,
        frame_bytes: int,
        dialer: TransportDialer,
        shape: Shape = SMALL,
    ) -> None:
        self._shape = shape
        self._stub = DecodeServiceStub(channels.get(address))
        self._sender = TransferSender(
            KVEndpoint(channels, address, shape.hello("bench"), shape.layout, StreamSettings(dialer)),
            frame_bytes=frame_bytes,
            send_timeout_s=TIMEOUT_S,
        )
        self._pool = pool
        self._steps: grpc.aio.StreamStreamCall[decode_pb2.StepsRequest, decode_pb2.StepsResponse] | None = None
        self._turn = asyncio.Lock()
        self._under_way: list[OutboundTransfer] = []
        self._sent_bytes = 0
        self.layer_sent = asyncio.Event()

    @property
    def transport(self) -> str:
        return self._sender.transport

    @property
    def sent_bytes(self) -> int:
        """Bytes handed to the stream so far."""
        return self._sent_bytes + sum(transfer.sent_bytes for transfer in self._under_way)

    async def transfer(self) -> None:
        """One transfer."""
        target, request_id = await self.reserve()
        transfer = await self._sender.open(target)
        self._under_way.append(transfer)
        for layer in range(self._shape.layout.layers):
            await transfer.send(self._slices(layer))
            self.layer_sent.set()
        self._under_way.remove(transfer)
        self._sent_bytes += transfer.sent_bytes
        transfer.close(aborted=False)
        await transfer.verdict(TIMEOUT_S)
        await self.cancel(target, request_id)

    def _slices(self, layer: int) -> Iterator[Slice]:
        tokens = self._shape.layout.block_size
        for block in range(self._shape.blocks):
            data, value = self._pool.read(layer, block)
            yield Slice(layer, block, data, tokens, value)

    async def computed(self, layer_s: float) -> float:
        """One transfer with layers ready one after the other, each after some seconds.

        Returns the seconds from the last layer until decode reports completion: then the sequence joins.
        """
        target, request_id = await self.reserve()
        transfer = await self._sender.open(target)
        begin, layers = time.perf_counter(), self._shape.layout.layers
        for layer in range(layers):
            await asyncio.sleep(begin + (layer + 1) * layer_s - time.perf_counter())
            await transfer.send(self._slices(layer))
        transfer.close(aborted=False)
        await transfer.verdict(TIMEOUT_S)
        seconds = time.perf_counter() - begin - layers * layer_s
        await self.cancel(target, request_id)
        return seconds

    async def reserve(self) -> tuple[kv_pb2.TransferTarget, str]:
        """A promise of room for tokens that decode has never seen, and the request's id."""
        seed = next(self._seeds)
        request_id = f"bench-{seed}"
        spec = self._shape.sequence(request_id, self._shape.tokens(seed))
        response = await self._stub.Reserve(decode_pb2.ReserveRequest(sequence=spec))
        return response.target, request_id

    async def cancel(self, target: kv_pb2.TransferTarget, request_id: str) -> None:
        """Give promised room back."""
        message = decode_pb2.CancelSequence(
            request_id=request_id, transfer_id=target.transfer_id, generation=target.generation
        )
        async with self._turn:  # a stream takes one write at a time
            if self._steps is None:
                self._steps = self._stub.Steps()
                hello = decode_pb2.StepsHello(conductor=kv_pb2.Instance(id="bench", epoch=1))
                await self._steps.write(decode_pb2.StepsRequest(hello=hello))
            await self._steps.write(decode_pb2.StepsRequest(cancel=message))
            await self._steps.read()

    async def aclose(self) -> None:
        """End the streams."""
        await self._sender.aclose()
        if self._steps is not None:
            self._steps.cancel()


class PutPath(_Transfers):
    """An engine's side of write-back: puts of blocks that the store has never seen, each until all are VISIBLE."""

    _seeds = itertools.count(1)

    def __init__(
        self, channels: Channels, address: str, pool: KVPool, frame_bytes: int, dialer: TransportDialer | None = None
    ) -> None:
        self._writer = StoreWriter(
            KVEndpoint(channels, address, SMALL.hello("bench"), SMALL.layout, StreamSettings(dialer)),
            frame_bytes=frame_bytes,
        )
        self._pool = pool

    @property
    def transport(self) -> str:
        return self._writer.transport

    async def transfer(self) -> list[BlockKey]:
        """One put; the blocks' keys."""
        keys = SMALL.keys(SMALL.tokens(-next(self._seeds)))
        parents = [SMALL.root, *keys[:-1]]
        outcome = await self._writer.put(keys, parents, "", self._pool.read, timeout_s=TIMEOUT_S)
        if outcome.stored != SMALL.blocks:
            raise RuntimeError(f"the store took {outcome.stored} of {SMALL.blocks} blocks")
        return keys

    async def aclose(self) -> None:
        """End the stream."""
        await self._writer.aclose()


class GetPath(_Transfers):
    """An engine's side of loads: reads of blocks that the store has in DRAM, into a pool of the engine."""

    def __init__(self, channels: Channels, address: str, pool: KVPool, dialer: TransportDialer) -> None:
        self._put = PutPath(channels, address, pool, 1 << 20, dialer)
        self._reader = BlockReader(
            KVEndpoint(channels, address, SMALL.hello("bench"), SMALL.layout, StreamSettings(dialer))
        )
        self._keys: list[BlockKey] = []
        self._into = KVPool.create(SMALL.layout, SMALL.blocks, [(0, SMALL.layout.layers)])

    @property
    def transport(self) -> str:
        return self._reader.transport

    async def send(self, nbytes: int) -> None:
        if not self._keys:
            self._keys = await self._put.transfer()
        await super().send(nbytes)

    async def transfer(self) -> None:
        """One read."""
        target = PoolTarget(self._into, range(SMALL.blocks))
        blocks = await self._reader.read(
            self._keys,
            layers=range(SMALL.layout.layers),
            on_slice=target.take,
            into=target.into,
            on_layer=lambda _: None,
            timeout_s=TIMEOUT_S,
        )
        if blocks != SMALL.blocks:
            raise RuntimeError(f"the store had {blocks} of {SMALL.blocks} blocks")

    async def aclose(self) -> None:
        """End the streams."""
        await self._put.aclose()
        await self._reader.aclose()
        self._into.close()
