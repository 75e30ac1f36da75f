"""Clients for a kvstore that holds full layers and windowed layers as separate blocks (`KVLayout.stored_parts`).

So the store need not know of windows: a block's windowed slices may be there or not, and are evicted separately. Each
part has a separate stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from moonpool.base.errors import TransferFailed
from moonpool.base.kv.keys import window_key
from moonpool.base.kv.layout import KVLayout, LayoutPart
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader, Into, OnSlice, PrefixLost
from moonpool.base.kv_transfer.store_writer import PutOutcome, ReadSlice, StoreWriter
from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.peer_clients import PeerClient
from moonpool.v1 import kv_pb2

Client = TypeVar("Client", bound=PeerClient)


class PrefixReader(PeerClient, Protocol):
    """What prefixes are read with: a `BlockReader` or a `PartedReader`."""

    async def read_prefix(
        self,
        keys: Sequence[bytes],
        *,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
        into: Into | None = None,
    ) -> int:
        """Read all layers of a chain's blocks; see `BlockReader.read_prefix`."""
        ...


class WindowLost(TransferFailed):
    """The source has the blocks, but lacks windowed slices of the last blocks: the chain cannot be continued there.

    Attributes:
        block: first block whose windowed slices are missing.
    """

    def __init__(self, block: int) -> None:
        super().__init__(f"the windowed slices of block {block} are not there")
        self.args = (block,)
        self.block = block


def endpoint_of(part: LayoutPart, whole: KVEndpoint) -> KVEndpoint:
    """A peer, for streams that carry these layers alone."""
    hello = kv_pb2.StreamHello()
    hello.CopyFrom(whole.hello)
    hello.layout.CopyFrom(part.layout.to_proto())
    return dataclasses.replace(whole, hello=hello, layout=part.layout)


class _Parted(Generic[Client]):
    """One client for each part that the kvstore holds apart."""

    def __init__(self, store: KVEndpoint, open_client: Callable[[KVEndpoint], Client]) -> None:
        """Connect when the first transfer begins. `open_client` makes a part's client."""
        parts = store.layout.stored_parts
        self._parts: list[tuple[LayoutPart, Client]] = [(part, open_client(endpoint_of(part, store))) for part in parts]

    @property
    def channels(self) -> int:
        return sum(client.channels for _, client in self._parts)

    @property
    def traffic(self) -> StreamTraffic:
        """What is under way on the streams."""
        return sum((client.traffic for _, client in self._parts), StreamTraffic())

    async def aclose(self) -> None:
        for _, client in self._parts:
            await client.aclose()


class PartedWriter(_Parted[StoreWriter]):
    """This process's puts to one kvstore. A `BlockWriter`."""

    def __init__(self, store: KVEndpoint) -> None:
        """Connect when the first put begins."""
        super().__init__(store, StoreWriter)

    async def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        tenant: str,
        read: ReadSlice,
        *,
        timeout_s: float,
        windowed: Collection[int],
        forgotten: Sequence[str] = (),
    ) -> PutOutcome:
        """Store blocks as `StoreWriter.put`, each part for at most `timeout_s`; return the full layers' outcome.

        Args:
            keys: the blocks' keys.
            parents: for each block, the key before in the chain.
            tenant: the blocks' owner.
            read: gives slices; windowed slices are read for `windowed` only.
            timeout_s: seconds.
            windowed: indices of blocks whose windowed slices are stored, too.
            forgotten: earlier deletions of such blocks; these blocks are younger.
        """
        (full, writer), *others = self._parts
        outcome = await writer.put(keys, parents, tenant, _of_part(read, full), forgotten, timeout_s=timeout_s)
        at = sorted(windowed)
        for part, writer in others if at else ():
            await writer.put(
                [window_key(keys[index]) for index in at],
                [keys[index] for index in at],
                tenant,
                _of_part(lambda layer, index: read(layer, at[index]), part),
                forgotten,
                timeout_s=timeout_s,
            )
        return outcome


def _of_part(read: ReadSlice, part: LayoutPart) -> ReadSlice:
    return lambda layer, index: read(part.layers[layer], index)


class PartedReader(_Parted[BlockReader]):
    """This process's reads from one kvstore."""

    def __init__(self, store: KVEndpoint, open_reader: Callable[[KVEndpoint], BlockReader]) -> None:
        """Connect when the first read begins. `open_reader` makes a part's client."""
        super().__init__(store, open_reader)
        self._layout: KVLayout = store.layout

    async def read_prefix(
        self,
        keys: Sequence[bytes],
        *,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
        into: Into | None = None,
    ) -> int:
        """Read all layers of a chain's blocks, windowed layers for the last blocks only; see `BlockReader.read`.

        Returns:
            The leading blocks that the store had; all blocks if the parts are stored apart.

        Raises:
            PrefixLost: the store lacks a block; or as of `BlockReader.read`.
            WindowLost: the store lacks windowed slices.
        """
        if len(self._parts) == 1:
            [(_, reader)] = self._parts
            return await reader.read_prefix(
                keys, on_slice=on_slice, on_layer=on_layer, timeout_s=timeout_s, tenant=tenant, into=into
            )
        first = self._layout.unread_windows(len(keys))
        windowed_layers = self._layout.windowed_layers
        slices = [len(keys) - (first if layer in windowed_layers else 0) for layer in range(self._layout.layers)]
        order = _LayersInOrder(slices, on_layer)

        async def read(number: int) -> int:
            part, reader = self._parts[number]
            skipped = first if number else 0

            def take(layer: int, index: int, data: memoryview, value: int) -> None:
                on_slice(part.layers[layer], index + skipped, data, value)
                order.came(part.layers[layer])

            def target(layer: int, index: int) -> memoryview | None:
                return None if into is None else into(part.layers[layer], index + skipped)

            return await reader.read(
                list(map(window_key, keys[first:])) if number else keys,
                layers=range(part.layout.layers),
                on_slice=take,
                on_layer=lambda _: None,
                timeout_s=timeout_s,
                tenant=tenant,
                into=target,
            )

        try:
            async with asyncio.TaskGroup() as group:
                full, windowed = (group.create_task(read(number)) for number in range(2))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if full.result() < len(keys):
            raise PrefixLost(full.result())
        if windowed.result() < len(keys) - first:
            raise WindowLost(first + windowed.result())
        return len(keys)


class _LayersInOrder:
    """Reports layers in order, each when all the layer's slices have come."""

    def __init__(self, missing: list[int], on_layer: Callable[[int], None]) -> None:
        self._missing = missing
        self._on_layer = on_layer
        self._next = 0

    def came(self, layer: int) -> None:
        self._missing[layer] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._on_layer(self._next)
            self._next += 1
