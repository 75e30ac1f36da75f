"""A store of tiny budgets against a plain model.

Any order of transfers (whole, partial, abandoned, several on one block), leases, pins, tenants over their quotas,
commits that succeed or fail, blocks that the device loses, time that passes, and crashes.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.core.put_transfer import PutTransfer
from moonpool.kvstore.core.read_leases import ReadLease
from moonpool.kvstore.core.tiered_store import StoreListener
from moonpool.kvstore.eviction.retention import Pins
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantRow
from tests.examples import examples
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    RECORD,
    Driven,
    data_of,
    held,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
    view_of,
)
from tests.unit.kvstore.invariants import check

CHAINS = {"": keys_of(6, "nobody"), "a": keys_of(5, "a"), "b": keys_of(5, "b")}
OWNER = {key: tenant for tenant, keys in CHAINS.items() for key in keys}
ROWS = {
    "a": TenantRow(dram_guarantee_bytes=BLOCK, dram_quota_bytes=3 * BLOCK, ssd_quota_bytes=3 * RECORD),
    "b": TenantRow(dram_guarantee_bytes=2 * BLOCK, pin_bytes=BLOCK),
}
DRAM_BLOCKS, PIN_BLOCKS = 5, 2
CHAIN = st.sampled_from(sorted(CHAINS)).flatmap(
    lambda tenant: st.integers(0, len(CHAINS[tenant]) - 1).flatmap(
        lambda start: st.integers(start + 1, min(start + 2, len(CHAINS[tenant]))).map(
            lambda end: CHAINS[tenant][start:end]
        )
    )
)
PART = st.sampled_from([(range(3), range(2)), (range(3), range(2)), (range(2), range(2)), (range(2, 3), range(2)),
                        (range(3), range(1)), (range(3), range(1, 2))])  # fmt: skip
Cell = tuple[int, int]


class _Session:
    """A writing transfer and what the store said about it."""

    def __init__(self, chain: Sequence[BlockKey], layers: range, heads: range) -> None:
        self.chain, self.layers, self.heads = chain, layers, heads
        self.visible: list[int] = []
        self.durable: list[int] = []
        self.transfer: PutTransfer
        self.unsent: dict[Cell, None] = {}


class _Announced(StoreListener):
    """Hears what the store of a machine announces."""

    def __init__(self, machine: "StoreMachine") -> None:
        self.machine = machine

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        self.machine.changed(set(stored), set(removed), set(cooled))


class StoreMachine(RuleBasedStateMachine):
    """`announced` is what a watcher believes, and must be what is here, as `cold` must be what is on SSD only.

    `kept` is what pins keep, which must stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.ever_durable: set[BlockKey] = set()
        self.start()

    def start(self) -> None:
        pins = Pins(PIN_BLOCKS * BLOCK, TenantAccount.of(ROWS, "pins"))
        self.ssd = open_ssd(
            self.folder, capacity=6 * RECORD, segment=RECORD, pins=pins, account=TenantAccount.of(ROWS, "ssd")
        )
        self.driven = Driven(
            self.ssd,
            dram_bytes=DRAM_BLOCKS * BLOCK,
            pins=pins,
            account=TenantAccount.of(ROWS, "dram"),
            listener=_Announced(self),
        )
        self.driven.now = self.now
        self.store = self.driven.store
        self.transfers: list[_Session] = []
        self.leases: list[ReadLease] = []
        self.pinned: dict[tuple[str, str], tuple[Sequence[BlockKey], float]] = {}
        self.lost: set[BlockKey] = set()
        self.announced = held(self.store)
        self.cold = set(self.store.tiers.cold(self.announced))
        self.actor: str | None = None
        self.used = dict(self.store.tiers.dram.account.used)

    def changed(self, stored: set[BlockKey], removed: set[BlockKey], cooled: set[BlockKey]) -> None:
        assert not (self.announced - self.cold) & stored, "what is in DRAM does not come there"
        assert self.announced >= removed
        assert not removed & cooled
        self.announced = (self.announced | stored) - removed
        assert self.announced >= cooled
        self.cold = (self.cold - stored - removed) | cooled
        self.lost -= stored

    @property
    def kept(self) -> set[BlockKey]:
        return {key for keys, until in self.pinned.values() if until > self.now for key in keys}

    @initialize(chain=CHAIN)
    def begin(self, chain: Sequence[BlockKey]) -> None:
        self.put_and_commit(chain)

    # Writing

    @precondition(lambda self: len(self.transfers) < 3)
    @rule(chain=CHAIN, part=PART)
    def open_put(self, chain: Sequence[BlockKey], part: tuple[range, range]) -> None:
        entry = _Session(chain, *part)
        self.actor = OWNER[chain[0]]
        try:
            transfer = self.store.writes.open(
                spec_of(chain, *part, tenant=self.actor),
                entry.visible.extend,
                entry.durable.extend,
                lambda: None,
                now=self.now,
            )
        except Overloaded as error:
            refusal: Overloaded | None = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.reason == "kvstore_guaranteed" or (refusal.reason == "kvstore_pinned" and self.kept)
            assert refusal.retry_after_s >= 0
        elif transfer is not None:
            entry.transfer = transfer
            assert list(transfer.present) == [i for i, key in enumerate(chain) if key in self.announced]
            entry.unsent = {(i, layer): None for i in range(len(chain)) for layer in entry.layers}
            self.transfers.append(entry)

    @rule(chain=CHAIN)
    def put_and_commit(self, chain: Sequence[BlockKey]) -> None:
        self.actor = OWNER[chain[0]]
        if self.store.tiers.dram.can_reserve(len(chain) * BLOCK, self.actor):
            self.driven.flush(chain, self.actor)
            self.ever_durable |= set(self.ssd.catalogue)

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, 2), count=st.integers(1, 9))
    def write(self, pick: int, count: int) -> None:
        entry = self.transfers[pick % len(self.transfers)]
        self.actor = OWNER[entry.chain[0]]
        for index, layer in list(entry.unsent)[:count]:
            run = run_of(entry.chain[index], index, layer, entry.heads)
            try:
                if not self.store.writes.write(entry.transfer, [run], now=self.now):
                    return  # no room: it waits
            except Overloaded:
                self.transfers.remove(entry)
                self.store.writes.close(entry.transfer)
                return
            del entry.unsent[index, layer]
        if not entry.unsent and entry.transfer.spec.whole_blocks:
            assert entry.transfer.complete

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, 2))
    def wrong_frame(self, pick: int) -> None:
        """What has come before, or was never declared, ends the transfer and nothing else."""
        entry = self.transfers.pop(pick % len(self.transfers))
        self.actor = OWNER[entry.chain[0]]
        run = run_of(entry.chain[0], 0, entry.layers[0])
        with contextlib.suppress(MoonpoolError):
            assert not self.store.writes.write(entry.transfer, [run, run], now=self.now)
        self.store.writes.close(entry.transfer)

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, 2))
    def close_put(self, pick: int) -> None:
        self.store.writes.close(self.transfers.pop(pick % len(self.transfers)).transfer)

    # Reading

    @rule(chain=CHAIN, promote=st.booleans())
    def read(self, chain: Sequence[BlockKey], promote: bool) -> None:
        self.actor = OWNER[chain[0]]
        expected = self.store.tiers.match(chain)
        assert self.driven.read(chain, promote=promote) == [data_of(key) for key in chain[:expected]]

    @precondition(lambda self: len(self.leases) < 2)
    @rule(chain=CHAIN, promote=st.booleans())
    def open_read(self, chain: Sequence[BlockKey], promote: bool) -> None:
        self.actor = OWNER[chain[0]]
        self.leases.append(self.store.reads.open(chain, FORMAT, promote=promote))

    @precondition(lambda self: self.leases)
    @rule(last=st.booleans())
    def finish_read(self, last: bool) -> None:
        lease = self.leases.pop(-1 if last else 0)
        for source in lease.sources:
            data = b""
            for layer in range(3):
                view = view_of(source, layer)
                if source.reader is not None:
                    source.reader.read_layers(layer, view)
                source.filled |= 1 << layer
                data += view
            info = source.block.info if source.block is not None else source.reader and source.reader.info
            assert info
            assert data == data_of(info.key)
        self.store.reads.close(lease)

    @precondition(lambda self: self.leases)
    @rule()
    def lose(self) -> None:
        """The device loses blocks that are being read."""
        lease = self.leases.pop(0)
        for source in lease.sources:
            if source.reader is not None:
                self.lost.add(source.reader.key)
                self.store.reads.lost(source)
        self.store.reads.close(lease)

    # Pins and time

    @rule(chain=CHAIN, name=st.sampled_from("xy"), ttl=st.integers(1, 4))
    def pin(self, chain: Sequence[BlockKey], name: str, ttl: int) -> None:
        tenant = OWNER[chain[0]]
        outcome = self.driven.operations.pin(tenant, name, chain, ttl)
        assert outcome.blocks <= self.store.tiers.match(chain)
        self.pinned[tenant, name] = chain[: outcome.blocks], self.now + ttl

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 5))
    def unpin(self, pick: int) -> None:
        place = sorted(self.pinned)[pick % len(self.pinned)]
        del self.pinned[place]
        self.driven.operations.unpin(*place)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.driven.now = self.now
        self.driven.operations.expire()

    # The device

    @rule()
    def commit(self) -> None:
        self.driven.flush()
        self.ever_durable |= set(self.ssd.catalogue)

    @rule()
    def try_again(self) -> None:
        self.store.writes.queue.retry()

    @rule()
    def commit_fails(self) -> None:
        plan = self.store.writes.queue.next_plan()
        if plan is not None:
            before = set(self.ssd.catalogue)
            self.store.writes.queue.plan_done(OSError(5, "Input/output error"))
            assert set(self.ssd.catalogue) <= before

    @precondition(lambda self: not self.leases)
    @rule()
    def crash(self) -> None:
        """Everything in memory is gone, pins too; what was durable is not."""
        here = set(self.ssd.catalogue)
        self.ssd.close()
        self.start()
        assert here <= set(self.ssd.catalogue) <= self.ever_durable

    # What always holds

    @invariant()
    def sound(self) -> None:
        check(self.store)
        assert self.announced == held(self.store)
        assert self.cold == set(self.store.tiers.cold(self.announced))
        assert self.ssd.account.used is self.ssd.catalogue.live
        check(self.ssd)

    @invariant()
    def pins_keep(self) -> None:
        assert {key for key in OWNER if key in self.store.tiers.dram.pins} == self.kept
        assert self.kept <= self.announced | self.lost

    @invariant()
    def leases_keep(self) -> None:
        dram = self.store.tiers.dram
        held = [source.block for lease in self.leases for source in lease.sources if source.block is not None]
        assert all(dram.get(block.info.key) is block for block in held)

    @invariant()
    def nobody_evicts_another_below_its_guarantee(self) -> None:
        used = dict(self.store.tiers.dram.account.used)
        for tenant, guarantee in (("a", BLOCK), ("b", 2 * BLOCK)):
            before, after = self.used.get(tenant, 0), used.get(tenant, 0)
            assert after >= min(before, guarantee) or self.actor == tenant
        self.used = used

    @invariant()
    def writers_are_told(self) -> None:
        for entry in self.transfers:
            told = set(entry.visible)
            assert len(told) == len(entry.visible)
            assert not told & set(entry.transfer.present)
            assert told | set(entry.transfer.present) | set(entry.transfer.unfinished) == set(range(len(entry.chain)))
            assert not told & set(entry.transfer.unfinished)
            assert set(entry.durable) <= told | set(entry.transfer.present)

    def teardown(self) -> None:
        for entry in self.transfers:
            self.store.writes.close(entry.transfer)
        for lease in self.leases:
            self.store.reads.close(lease)
        self.leases.clear()
        self.driven.flush()
        dram = self.store.tiers.dram
        assert (dram.reserved.total_bytes, dram.held_bytes) == (0, 0)
        assert dram.arena.resident_bytes - dram.arena.free_bytes == dram.block_bytes
        self.ssd.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
TestStore = StoreMachine.TestCase
