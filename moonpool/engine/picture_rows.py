"""Encoded pictures in kvstores: read before a prompt is queued, written behind the step that has encoded them.

A read that fails or is late costs the encoding. A write that fails costs nothing but the next encoding. Rows are cut
into blocks of `BLOCK_ROWS` rows, which go over the streams that blocks of KV have, with their hashes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, MoonpoolError
from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import BlockKey, slice_hash
from moonpool.base.kv.media import MediaItem
from moonpool.base.kv.picture_rows import BLOCK_ROWS, PICTURE_NAMESPACE, row_keys, rows_layout
from moonpool.base.kv.values import ValueSource, ValueTarget
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.prefix_reader import BlockReader
from moonpool.base.kv_transfer.store_writer import StoreWriter
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.limits import ROWS_BYTES
from moonpool.base.scheduling.steps import PlacedPicture
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.base.transport.async_utils import wait_within
from moonpool.base.transport.peer_clients import PeerClients
from moonpool.engine.request import IncomingRequest, RequestRows
from moonpool.v1 import kv_pb2

READ_TIMEOUT_S = 1.0
"""Longest wait for the rows of a prompt: encoding is bounded, too, and a prompt waits meanwhile."""
PUT_TIMEOUT_S = 10.0
PAUSE_S = 2.0
"""How long a kvstore is left alone after a read or a write failed there."""
HERE_BYTES = ROWS_BYTES // 4 * 3
"""Bytes of rows that are taken to be in the engine's memory, which keeps `ROWS_BYTES`: they are not read again."""
MAX_HELD_BYTES = ROWS_BYTES
"""Most bytes of rows that are read, and wait for steps; pictures beyond them are encoded."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of rows on their way to kvstores; more are dropped."""
log = get_logger(__name__)


class PictureStores:
    """One instance's reads and writes of rows.

    Args:
        model: 32-byte namespace of the model's KV.
        rule: what the model makes of pictures.
        row_bytes: bytes of a picture's row, those of later layers included.
        endpoint: a kvstore, by address.
        forgotten: tenant -> names of deletions of the tenant's KV that were carried out here.

    Attributes:
        read_pictures, missed_pictures: pictures whose rows a kvstore gave, or was believed to hold and did not give.
        stored_pictures, dropped_pictures: pictures whose rows kvstores took, or did not take.
        held_bytes: bytes of rows that are read, and that no step has taken yet.
        waiting_bytes: bytes of rows on their way to kvstores.
    """

    def __init__(
        self,
        model: bytes,
        rule: PictureRule,
        row_bytes: int,
        endpoint: Callable[[str], KVEndpoint],
        forgotten: Callable[[str], Sequence[str]],
    ) -> None:
        self._model, self._rule, self._block_bytes = model, rule, BLOCK_ROWS * row_bytes
        self._row_bytes, self._layout = row_bytes, rows_layout(row_bytes)
        self._endpoint, self._forgotten = endpoint, forgotten
        self._readers = PeerClients(lambda address: BlockReader(self._of_rows(address)))
        self._writers = PeerClients(lambda address: StoreWriter(self._of_rows(address)))
        self._group: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._here: OrderedDict[bytes, int] = OrderedDict()
        self._here_bytes = 0
        self.read_pictures = self.missed_pictures = 0
        self.stored_pictures = self.dropped_pictures = 0
        self.held_bytes = self.waiting_bytes = 0

    def _of_rows(self, address: str) -> KVEndpoint:
        store, hello = self._endpoint(address), kv_pb2.StreamHello()
        hello.CopyFrom(store.hello)
        hello.namespace = PICTURE_NAMESPACE
        hello.layout.CopyFrom(self._layout.to_proto())
        return replace(store, hello=hello, layout=self._layout)

    async def run(self) -> None:
        """Work until cancelled; then streams are closed, and rows on their way are dropped."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()  # until cancelled
        finally:
            self._group = None
            await self._readers.aclose()
            await self._writers.aclose()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no rows are on their way to kvstores; False when the time was over first."""
        return await wait_within(timeout_s, self._idle)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def added(self, incoming: IncomingRequest, asked: Sequence[kv_pb2.MediaItem]) -> IncomingRequest:
        """Return a request with the rows of its pictures, as far as kvstores give them.

        Args:
            incoming: the request.
            asked: its pictures, as the conductor has sent them: each with its kvstore.
        """
        stores = {item.digest: item.rows_store for item in asked if item.HasField("rows_store")}
        held = {item.digest for item in asked if item.rows_held}
        if not stores:
            return incoming
        items = {item.digest: item for item in incoming.media if item.digest in stores}
        began, here = world.monotonic(), items.keys() & self._here.keys()
        believed = [item for item in items.values() if item.digest in held and item.digest not in here]
        known = await self._read_all(incoming.spec.tenant, believed, stores) if believed else {}
        wanted = {digest: stores[digest] for digest in items if digest not in known and digest not in here}
        forgotten = tuple(self._forgotten(incoming.spec.tenant))  # now: the rows are older than later deletions

        def placed(picture: PlacedPicture) -> None:
            self._note_here(picture)
            if picture.rows and (store := wanted.get(picture.digest)) is not None:
                self._keep(incoming.spec.tenant, picture, store, forgotten)

        def given(nbytes: int) -> None:
            self.held_bytes -= nbytes

        rows = RequestRows(known, wanted, placed, given)
        if known:
            # A request that ends before its steps gives back the rest.
            weakref.finalize(rows, lambda: given(sum(map(len, known.values())))).atexit = False
            rows.seconds = world.monotonic() - began
            rows.tokens = sum(items[digest].end - items[digest].begin for digest in known)
        there = {*known, *here}
        left = tuple((item.begin, item.end) for item in incoming.media if item.digest not in there)
        return replace(incoming, rows=rows, spec=replace(incoming.spec, pictures=left))

    def _note_here(self, picture: PlacedPicture) -> None:
        """The engine's memory has a picture's rows now, as long as later ones leave room."""
        self._here_bytes += picture.tokens * self._row_bytes - self._here.get(picture.digest, 0)
        self._here[picture.digest] = picture.tokens * self._row_bytes
        self._here.move_to_end(picture.digest)
        while self._here_bytes > HERE_BYTES:
            self._here_bytes -= self._here.popitem(last=False)[1]

    async def _read_all(
        self, tenant: str, items: Sequence[MediaItem], stores: Mapping[bytes, kv_pb2.Instance]
    ) -> dict[bytes, bytes]:
        """Return the rows of pictures, by digest, as far as kvstores give them and `MAX_HELD_BYTES` leave room."""
        reads, known, before = list[tuple[MediaItem, int]](), dict[bytes, bytes](), self.held_bytes
        for item in items:
            grid = self._rule.grid(item.width, item.height, item.detail)
            nbytes = self._row_bytes * self._rule.tokens(grid).count(self._rule.mark)
            if self.held_bytes + nbytes <= MAX_HELD_BYTES:
                self.held_bytes += nbytes
                reads.append((item, nbytes))
        taken = self.held_bytes - before
        try:
            found = await asyncio.gather(
                *(self._read(tenant, item, nbytes, stores[item.digest]) for item, nbytes in reads)
            )
            known = {item.digest: rows for (item, _), rows in zip(reads, found, strict=True) if rows is not None}
        finally:
            self.held_bytes -= taken - sum(map(len, known.values()))
        self.read_pictures += len(known)
        self.missed_pictures += len(reads) - len(known)
        return known

    async def _read(self, tenant: str, item: MediaItem, nbytes: int, store: kv_pb2.Instance) -> bytes | None:
        """Return a picture's `nbytes` of rows; None if the kvstore does not give them all, intact and in time."""
        if self._readers.paused(store, world.monotonic()):
            return None
        keys = row_keys(self._model, tenant, item.digest, -(-nbytes // self._block_bytes))
        data = memoryview(bytearray(len(keys) * self._block_bytes))
        parts = [data[at : at + self._block_bytes] for at in range(0, len(data), self._block_bytes)]
        targets = [ValueTarget(self._layout, part) for part in parts]

        def take(layer: int, index: int, got: memoryview, value: int) -> None:
            targets[index].take(layer, got)

        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                reader = await self._readers.get(store)
                count = await reader.read_prefix(
                    keys, on_slice=take, on_layer=lambda layer: None, timeout_s=READ_TIMEOUT_S, tenant=tenant
                )
        except (MoonpoolError, TimeoutError) as error:
            log.warning("rows of a picture cannot be read", store=store.id, reason=str(error) or "late")
            self._readers.pause(store, world.monotonic() + PAUSE_S)
            return None
        whole = count == len(keys) and all(target.length() == self._block_bytes for target in targets)
        return bytes(data[:nbytes]) if whole else None

    # --- writing -----------------------------------------------------------------------------------------------------

    def _keep(self, tenant: str, picture: PlacedPicture, store: kv_pb2.Instance, forgotten: Sequence[str]) -> None:
        nbytes = len(picture.rows)
        paused = self._writers.paused(store, world.monotonic())
        if self._group is None or paused or self.waiting_bytes + nbytes > MAX_WAITING_BYTES:
            self.dropped_pictures += 1
            return
        self.waiting_bytes += nbytes
        self._idle.clear()
        task = self._group.create_task(self._put(tenant, picture, store, forgotten))

        def done(_: asyncio.Task[None]) -> None:
            self.waiting_bytes -= nbytes
            if not self.waiting_bytes:
                self._idle.set()

        task.add_done_callback(done)  # not a `finally`: a task cancelled before its first step reaches none

    async def _put(self, tenant: str, picture: PlacedPicture, store: kv_pb2.Instance, forgotten: Sequence[str]) -> None:
        blocks = -(-len(picture.rows) // self._block_bytes)
        data = memoryview(picture.rows.ljust(blocks * self._block_bytes, b"\0"))
        keys = row_keys(self._model, tenant, picture.digest, blocks)
        parents: list[BlockKey] = [NO_PARENT, *keys][:blocks]
        sources = [ValueSource(data[at : at + self._block_bytes]) for at in range(0, len(data), self._block_bytes)]

        def read(layer: int, index: int) -> tuple[memoryview, int]:
            part = sources[index].slice(layer)
            return part, slice_hash(part)

        try:
            writer = await self._writers.get(store)
            await writer.put(keys, parents, tenant, read, forgotten, timeout_s=PUT_TIMEOUT_S)
            self.stored_pictures += 1
        except MoonpoolError as error:
            self.dropped_pictures += 1
            if isinstance(error, InvalidRequest):  # that is about this picture, as too large for the share
                log.info("rows of a picture are not stored", store=store.id, reason=str(error))
                return
            self._writers.pause(store, world.monotonic() + PAUSE_S)
            log.warning("rows of a picture cannot be stored", store=store.id, reason=str(error))
        except Exception:
            # A defect here costs stored rows, not the engine that serves requests.
            self.dropped_pictures += 1
            log.exception("rows of a picture cannot be stored", store=store.id)


PICTURE_METRICS: tuple[Metric[PictureStores], ...] = (
    Metric(
        "picture_rows_held_bytes",
        "Bytes of encoded pictures that kvstores gave, and that no step has taken yet.",
        lambda stores: stores.held_bytes,  # at rest 0 only once the memory of ended requests is collected
    ),
    Metric(
        "picture_rows_waiting_bytes",
        "Bytes of encoded pictures on their way to kvstores.",
        lambda stores: stores.waiting_bytes,
        0,
    ),
    counter("pictures_read_total", "Pictures whose encoded rows kvstores gave.", lambda stores: stores.read_pictures),
    counter(
        "pictures_missed_total",
        "Pictures whose rows a kvstore was believed to hold and did not give; they were encoded.",
        lambda stores: stores.missed_pictures,
    ),
    counter(
        "pictures_stored_total", "Pictures whose encoded rows kvstores took.", lambda stores: stores.stored_pictures
    ),
    counter(
        "pictures_dropped_total",
        "Pictures whose encoded rows no kvstore took.",
        lambda stores: stores.dropped_pictures,
    ),
)
