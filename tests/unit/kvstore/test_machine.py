"""A store of tiny budgets against a plain model: any order of puts, abandoned sessions, reads, commits and restarts."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kvstore.assembly import PutSession
from services.kvstore.reads import ReadLease
from tests.unit.kvstore.helpers import (
    BLOCK,
    FORMAT,
    LAYOUT,
    RECORD,
    Driven,
    data_of,
    keys_of,
    open_ssd,
    run_of,
    spec_of,
)

KEYS = keys_of(7)
CHAIN = st.integers(0, 6).flatmap(
    lambda start: st.integers(start + 1, min(start + 2, 7)).map(lambda end: KEYS[start:end])
)


class StoreMachine(RuleBasedStateMachine):
    """`announced` is what a watcher believes; it must be what is here."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.sessions: list[tuple[PutSession, dict[tuple[int, int], None]]] = []
        self.leases: list[ReadLease] = []
        self.start()

    def start(self) -> None:
        self.ssd = open_ssd(self.folder, capacity=4 * RECORD, segment=RECORD)
        self.driven = Driven(self.ssd, dram_bytes=2 * BLOCK)
        self.announced = set(self.driven.store.holdings)
        self.driven.store.holdings.on_change.append(self.changed)

    def changed(self, stored: Any, removed: Any) -> None:
        assert not self.announced & set(stored)
        assert self.announced >= set(removed)
        self.announced |= set(stored)
        self.announced -= set(removed)

    @precondition(lambda self: len(self.sessions) < 2)
    @rule(chain=CHAIN)
    def open_put(self, chain: Any) -> None:
        session = self.driven.open(spec_of(chain))
        if session is not None:
            cells = {(layer, i): None for i in range(len(chain)) for layer in range(3) if i not in session.present}
            self.sessions.append((session, cells))

    @rule(chain=CHAIN)
    def put_and_commit(self, chain: Any) -> None:
        session = self.driven.open(spec_of(chain))
        if session is not None:
            self.driven.store.writes.close(session)
            self.driven.flush(chain)

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 2), count=st.integers(1, 9))
    def write(self, pick: int, count: int) -> None:
        session, cells = self.sessions[pick % len(self.sessions)]
        for layer, index in list(cells)[:count]:
            del cells[layer, index]
            self.driven.store.writes.write(session, [run_of(session.spec.keys[index], index, layer)])
        if not cells:
            assert session.complete

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 2))
    def close_put(self, pick: int) -> None:
        session, _ = self.sessions.pop(pick % len(self.sessions))
        self.driven.store.writes.close(session)

    @rule(chain=CHAIN, promote=st.booleans())
    def read(self, chain: Any, promote: bool) -> None:
        expected = self.driven.store.holdings.match(chain)
        assert self.driven.read(chain, promote=promote) == [data_of(key) for key in chain[:expected]]

    @precondition(lambda self: len(self.leases) < 2)
    @rule(chain=CHAIN, promote=st.booleans())
    def open_read(self, chain: Any, promote: bool) -> None:
        self.leases.append(self.driven.store.reads.open(chain, FORMAT, promote=promote))

    @precondition(lambda self: self.leases)
    @rule()
    def finish_read(self) -> None:
        lease = self.leases.pop(0)
        for source in lease.sources:
            data = b""
            for layer in range(3):
                view = source.take(layer, LAYOUT)
                if source.reader is not None:
                    source.reader.read(layer, view)
                source.filled |= 1 << layer
                data += view
            info = source.block.info if source.block is not None else source.reader and source.reader.info
            assert info
            assert data == data_of(info.key)
        self.driven.store.reads.close(lease)

    @precondition(lambda self: self.leases)
    @rule()
    def lose(self) -> None:
        """The device loses a block that is being read."""
        lease = self.leases.pop(0)
        for source in lease.sources:
            if source.reader is not None:
                self.driven.store.reads.lost(source)
        self.driven.store.reads.close(lease)

    @rule()
    def commit(self) -> None:
        self.driven.flush()

    @precondition(lambda self: not self.leases)
    @rule()
    def crash(self) -> None:
        """Everything in memory is gone; what was durable is not."""
        durable = set(self.ssd) | set(self.ssd._forgotten)
        here = set(self.ssd)
        self.ssd.close()
        self.sessions.clear()
        self.leases.clear()
        self.start()
        assert here <= set(self.ssd) <= durable

    @invariant()
    def sound(self) -> None:
        self.driven.store.check_invariants()
        assert self.announced == set(self.driven.store.holdings)
        assert self.ssd.used_bytes <= self.ssd.capacity_bytes

    def teardown(self) -> None:
        for session, _ in self.sessions:
            self.driven.store.writes.close(session)
        for lease in self.leases:
            self.driven.store.reads.close(lease)
        self.driven.flush()
        dram = self.driven.store.holdings.dram
        assert (dram.reserved_bytes, dram.held_bytes) == (0, 0)
        self.ssd.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None, derandomize=True)
TestStore = StoreMachine.TestCase
