"""Blocks with known bytes, and a store driven by hand: no threads, no event loop."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from moonpool.base.kv.blocks import NO_PARENT, PARTS, BlockFormat, BlockInfo, DramBlock
from moonpool.base.kv.frames import OpenedRun, SliceRun
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.picture_rows import PICTURE_NAMESPACE
from moonpool.base.kv.reuse_stats import ReuseSample
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.kvstore.core.put_transfer import PutSpec, PutTransfer
from moonpool.kvstore.core.read_leases import LeasedBlock
from moonpool.kvstore.core.store import BlockStore
from moonpool.kvstore.core.tiered_store import StoreListener
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.policies import LRU
from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.eviction.tenants import TenantAccount
from moonpool.kvstore.operations import StoreOperations
from moonpool.kvstore.ssd.admission import SsdAdmission
from moonpool.kvstore.ssd.encryption import Keyring
from moonpool.kvstore.ssd.files import FileLayer
from moonpool.kvstore.ssd.records import BadRecordError
from moonpool.kvstore.ssd.tier import SsdTier, open_tier
from moonpool.kvstore.write_behind import WriteBehind
from tests.unit.kvstore.invariants import check

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="float32")
FORMAT = BlockFormat(b"n" * 32, LAYOUT)
OTHER_FORMAT = BlockFormat(b"o" * 32, LAYOUT)
ROWS_FORMAT = BlockFormat(PICTURE_NAMESPACE, LAYOUT)
BLOCK = LAYOUT.block_bytes
RECORD = 4096 * 2  # a header page and the data rounded up


def keys_of(count: int, chain: str = "a") -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{chain}:{index}".encode()).digest()) for index in range(count)]


def in_part(keys: Iterable[BlockKey], number: int) -> list[BlockKey]:
    """Those of one part, as a tier lists them."""
    return [key for key in keys if key[0] == number]


def data_of(key: BlockKey, layout: KVLayout = LAYOUT) -> bytes:
    return hashlib.shake_128(key).digest(layout.block_bytes)


def slice_of(key: BlockKey, layer: int, layout: KVLayout = LAYOUT) -> bytes:
    return data_of(key, layout)[layout.place(layer)]


def info_of(key: BlockKey, tenant: str = "", block_format: BlockFormat = FORMAT) -> BlockInfo:
    return BlockInfo(key, NO_PARENT, tenant, block_format)


def block_of(key: BlockKey, tenant: str = "", block_format: BlockFormat = FORMAT) -> DramBlock:
    layout, data = block_format.layout, bytearray(data_of(key, block_format.layout))
    slices = [memoryview(data)[layout.place(layer)] for layer in range(layout.layers)]
    hashes = [bind(slice_hash(part), key, layer) for layer, part in enumerate(slices)]
    return DramBlock(info_of(key, tenant, block_format), data, hashes)


def spec_of(
    keys: Sequence[BlockKey],
    layers: range | None = None,
    heads: range | None = None,
    block_format: BlockFormat = FORMAT,
    tenant: str = "",
    written_at: int = 0,
    durable: bool = False,
) -> PutSpec:
    layout = block_format.layout
    return PutSpec(
        block_format,
        keys,
        [],
        tenant,
        layers or range(layout.layers),
        heads or range(layout.head_shares),
        written_at,
        durable=durable,
    )


def run_of(key: BlockKey, index: int, layer: int, heads: range = range(2)) -> OpenedRun:
    """One block's heads of one layer, as `FrameOpener` hands them out."""
    data = slice_of(key, layer)[heads.start * LAYOUT.share_bytes(0) : heads.stop * LAYOUT.share_bytes(0)]
    run = SliceRun(layer, index, 1, heads.start, heads.stop, LAYOUT.block_size)
    return OpenedRun(run, memoryview(data), [bind(slice_hash(data), key, layer)])


def view_of(source: LeasedBlock, layer: int) -> memoryview:
    """One layer's bytes in DRAM, or memory to read them to."""
    return source.memory(range(layer, layer + 1), LAYOUT) if source.block is None else source.block.slice(layer)


def open_ssd(
    path: Path,
    capacity: int = 1 << 20,
    segment: int = 1 << 16,
    *,
    pins: Container[BlockKey] = (),
    account: TenantAccount | None = None,
    admission: SsdAdmission | None = None,
    files: FileLayer | None = None,
    keyring: Keyring | None = None,
) -> SsdTier:
    """A tier that keeps what is in `pins` and what `account` guarantees."""
    layers = () if files is None else (files,)
    return open_tier(
        [path],
        capacity,
        segment,
        account=account,
        admission=admission or SsdAdmission(pins=pins),
        keyring=keyring,
        files=layers,
        map_bytes=1 << 16,
    )


def held(store: BlockStore) -> set[BlockKey]:
    """Every key that is in a tier."""
    return {key for number in range(PARTS) for key in store.tiers.part(number)}


def owner_of(ssd: SsdTier, key: BlockKey) -> str | None:
    """The tenant of a block; None when it is not there."""
    kind = ssd.catalogue.kind_of(key)
    return None if kind is None else kind.tenant


@asynccontextmanager
async def writing(driven: "Driven", **settings: Any) -> AsyncIterator[WriteBehind]:
    """Runs the writer thread of a store; settings are those of `WriteBehind`."""
    assert driven.store.tiers.ssd is not None
    writer = driven.writer = WriteBehind(driven.store.writes.queue, driven.store.tiers.ssd, **settings)
    task = asyncio.ensure_future(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.wait({task})
        await writer.aclose()


class Driven(StoreListener):
    """A store whose commits happen when `flush` is called or a writer runs, and what it has announced.

    Args:
        listener: is told of everything too.

    Attributes:
        now: the time of its pins.
    """

    def __init__(
        self,
        ssd: SsdTier | None = None,
        dram_bytes: int = 64 * BLOCK,
        pins: Pins | None = None,
        account: TenantAccount | None = None,
        policy: EvictionPolicy | None = None,
        max_transfers: int = 4,
        batch_bytes: int = 32 << 20,
        lease_bytes: int | None = None,
        listener: StoreListener | None = None,
    ) -> None:
        dram = DramTier(dram_bytes, LRU() if policy is None else policy, pins=pins, account=account)
        self.listener = listener or StoreListener()
        self.writer: WriteBehind | None = None
        self.store = BlockStore(
            dram,
            ssd,
            self,
            max_transfers=max_transfers,
            batch_bytes=batch_bytes,
            lease_bytes=lease_bytes,
        )
        self.now = 0.0
        pool, ahead = ThreadPoolExecutor(2), ByteCredits(1 << 20)
        self.operations = StoreOperations(self.store, pool, ahead, ReuseSample(), 0, lambda: self.now)
        self.stored: list[BlockKey] = []
        self.removed: list[BlockKey] = []
        self.visible: list[tuple[BlockKey, ...]] = []
        self.durable: list[tuple[BlockKey, ...]] = []
        self.forgotten: list[tuple[BlockKey, ...]] = []
        self.rooms = 0

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        self.stored += stored
        self.removed += removed
        self.listener.changed(stored, removed, cooled)

    def room(self) -> None:
        self.rooms += 1
        self.listener.room()

    def work(self) -> None:
        if self.writer is not None:
            self.writer.wake()

    def transfers_changed(self) -> None:
        self.listener.transfers_changed()

    def open(self, spec: PutSpec) -> PutTransfer | None:
        return self.store.writes.open(
            spec,
            lambda blocks: self.visible.append(tuple(spec.keys[index] for index in blocks)),
            lambda blocks: self.durable.append(tuple(spec.keys[index] for index in blocks)),
            lambda: self.forgotten.append(tuple(spec.keys)),
        )

    def put(self, keys: Sequence[BlockKey], tenant: str = "", block_format: BlockFormat = FORMAT) -> PutTransfer:
        """Writes whole blocks and ends the transfer; not durable yet."""
        transfer = self.open(spec_of(keys, tenant=tenant, block_format=block_format))
        assert transfer is not None
        for index in range(len(keys)):
            if index not in transfer.present:
                for layer in range(LAYOUT.layers):
                    self.store.writes.write(transfer, [run_of(keys[index], index, layer)])
        assert transfer.complete
        return transfer

    def flush(self, keys: Sequence[BlockKey] = (), tenant: str = "", block_format: BlockFormat = FORMAT) -> None:
        """Puts blocks, and commits everything that is pending."""
        if keys:
            transfer = self.put(keys, tenant, block_format)
        disks = range(1 if self.store.tiers.ssd is None else len(self.store.tiers.ssd.disks))
        while sum(map(self.commit, disks)):
            pass
        if keys:
            self.store.writes.close(transfer)
        check(self.store)

    def commit(self, disk: int = 0) -> bool:
        """Does a disk's next plan, if there is one; whether it had blocks."""
        ssd, plan = self.store.tiers.ssd, self.store.writes.queue.next_plan(disk)
        if ssd is None or plan is None:
            return False
        try:
            ssd.commit(plan)
        except OSError as error:
            self.store.writes.queue.plan_done(error, disk)
        else:
            self.store.writes.queue.plan_done(None, disk)
        return bool(plan.blocks)

    def read(self, keys: Sequence[BlockKey], *, promote: bool = False) -> list[bytes]:
        """The leading blocks' bytes, read layer by layer without threads; bad ones end it."""
        reads = self.store.reads
        lease = reads.open(keys, FORMAT, promote=promote)
        out = [bytearray() for _ in lease.sources]
        try:
            for layer in range(LAYOUT.layers):
                for index, source in enumerate(lease.sources[: len(out)]):
                    view = view_of(source, layer)
                    try:
                        if source.reader is not None:
                            source.reader.read_layers(layer, view)
                    except OSError:
                        del out[index:]
                        break
                    except BadRecordError:
                        reads.lost(source)
                        del out[index:]
                        break
                    source.filled |= 1 << layer
                    out[index] += view
        finally:
            reads.close(lease)
        check(self.store)
        return [bytes(block) for block in out]


@contextmanager
def store(
    path: Path, segment: int = RECORD, *, files: FileLayer | None = None, keyring: Keyring | None = None
) -> Iterator[Driven]:
    """A driven store over an SSD tier in a folder, closed at the end."""
    ssd = open_ssd(path, 1 << 20, segment, files=files, keyring=keyring)
    try:
        yield Driven(ssd)
    finally:
        ssd.close()
