"""Retention: chains whose KV is worth keeping, for whom, at which kvstores, and when the next use is expected."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import pack_keys, unpack_keys
from moonpool.base.scheduling.sessions import SessionHint, SessionTurn
from moonpool.base.scheduling.state_machine import digest_of

RetentionOwner = tuple[str, str]
"""Tenant, and what the tenant keeps the chain for: a session, an announced prompt, or a pin by name."""
MEMORY_LEAD_S = 10.0
"""Seconds before a use is expected at which the blocks are brought from SSD into a kvstore's memory."""
INSTANCE_LEAD_S = 3.0
"""Seconds before a use is expected at which the blocks are brought into a prefill instance."""
MAX_EXPECTED = 16_384
"""Uses that are expected at once. Of more, the use noted longest ago is expected no longer."""
MAX_KEY_BYTES = 64 << 20
"""Bytes of the keys of all retained chains. Of more, the chain noted longest ago is forgotten."""


@dataclass(slots=True)
class RetainedChain:
    """A chain whose KV is worth keeping.

    Attributes:
        owner: for whom.
        keys: of the chain's known full blocks, concatenated; empty = forgotten, for want of room.
        tail: the last of these keys.
        stores: kvstores that hold the blocks, or shall.
        lasting: the chain stays in the table when no use is expected.
        expected: the next use; None = not foreseen.
        until: when the pin of a chain that is pinned ends; a use that is expected has its own end in the hint.
    """

    owner: RetentionOwner
    keys: bytes
    tail: bytes
    stores: tuple[str, ...]
    lasting: bool = False
    expected: ExpectedUse | None = None
    until: float = inf

    @staticmethod
    def of(
        owner: RetentionOwner, keys: Sequence[bytes], stores: tuple[str, ...], *, lasting: bool = False
    ) -> RetainedChain:
        """Return the chain with these keys."""
        return RetainedChain(owner, pack_keys(keys), keys[-1], stores, lasting)

    @property
    def block_keys(self) -> tuple[bytes, ...]:
        """The keys, one by one."""
        return tuple(unpack_keys(self.keys))


@dataclass(slots=True)
class ExpectedUse:
    """A prompt that will come and begin with a retained chain.

    Attributes:
        turn: what the client has said of the session.
        hint, told_at: what the chain's kvstores were told last, and when.
        at: when the prompt is expected, seconds.
        due_at: when the next order for the blocks is due.
        in_memory: the blocks were ordered into memory, or are there.
    """

    turn: SessionTurn
    hint: SessionHint
    told_at: float
    at: float
    due_at: float = 0.0
    in_memory: bool = False


class RetainedChains:
    """All chains that a conductor retains, one for each owner, within one bound of memory."""

    def __init__(self) -> None:
        self._chains: OrderedDict[RetentionOwner, RetainedChain] = OrderedDict()  # noted longest ago first
        self._expected: OrderedDict[RetentionOwner, RetainedChain] = (
            OrderedDict()
        )  # with a use, noted longest ago first
        self._due: list[tuple[float, RetentionOwner]] = []  # `due_at` of uses; outdated ones, too
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._chains)

    def keep(self, chain: RetainedChain) -> None:
        """Retain a chain, in place of the owner's earlier chain. The chain itself may find no room."""
        self.forget(chain.owner)
        self._chains[chain.owner] = chain
        self._key_bytes += len(chain.keys)
        while self._key_bytes > MAX_KEY_BYTES:
            self.forget(next(iter(self._chains)))

    def forget(self, owner: RetentionOwner) -> None:
        """Retain the owner's chain no longer. What is known of the chain's tail and stores stays with its users."""
        chain = self._chains.pop(owner, None)
        if chain is not None:
            self._expected.pop(owner, None)
            self._key_bytes -= len(chain.keys)
            chain.keys, chain.expected = b"", None

    def expect(self, owner: RetentionOwner, use: ExpectedUse, now: float) -> None:
        """Expect a use of the owner's chain, in place of an earlier use. A chain without room is not expected."""
        chain = self._chains.get(owner)
        if chain is None:
            return
        self._expected.pop(owner, None)
        self._expected[owner] = chain
        chain.expected = use
        self._await(owner, use, max(now, use.at - MEMORY_LEAD_S))
        while len(self._expected) > MAX_EXPECTED:
            self.expect_no_more(next(iter(self._expected)))

    def expect_no_more(self, owner: RetentionOwner) -> None:
        """Expect no use of the owner's chain: the prompt has come, or will not."""
        chain = self._expected.pop(owner, None)
        if chain is None:
            return
        chain.expected = None
        if not chain.lasting:  # an announcement knows its chain again when it comes again
            self.forget(owner)

    def due(self) -> float | None:
        """When the next order is due; None = no use is expected."""
        while self._due:
            at, owner = self._due[0]
            chain = self._expected.get(owner)
            if chain is not None and chain.expected is not None and chain.expected.due_at == at:
                return at
            heappop(self._due)
        return None

    def coming(self, now: float) -> Iterator[tuple[RetainedChain, ExpectedUse]]:
        """Return the chains for whose blocks an order is due: first for memory, then for an instance (`in_memory`)."""
        while (at := self.due()) is not None and at <= now:
            owner = heappop(self._due)[1]
            chain = self._expected[owner]
            use = chain.expected
            assert use is not None
            yield chain, use
            if use.in_memory:
                self.expect_no_more(owner)
            else:
                use.in_memory = True
                self._await(owner, use, max(now, use.at - INSTANCE_LEAD_S))

    def lasting(self) -> dict[RetentionOwner, RetainedChain]:
        """Return the chains that stay when no use is expected."""
        return {owner: chain for owner, chain in self._chains.items() if chain.lasting}

    def _await(self, owner: RetentionOwner, use: ExpectedUse, due_at: float) -> None:
        """Note when an order is due. Outdated notes are dropped before most are outdated."""
        use.due_at = due_at
        heappush(self._due, (due_at, owner))
        if len(self._due) > 2 * len(self._expected):
            self._due = self._notes()
            heapify(self._due)

    def _notes(self) -> list[tuple[float, RetentionOwner]]:
        """Return when each use's next order is due."""
        return [(chain.expected.due_at, owner) for owner, chain in self._expected.items() if chain.expected is not None]

    def check_invariants(self) -> None:
        """Assert that what is remembered is bounded, and that each expected use has an order to come."""
        assert len(self._due) <= 2 * MAX_EXPECTED, "outdated notes stay"
        assert self._key_bytes == sum(len(chain.keys) for chain in self._chains.values()) <= MAX_KEY_BYTES
        assert set(self._expected) == {owner for owner, chain in self._chains.items() if chain.expected is not None}
        assert all(chain.lasting or owner in self._expected for owner, chain in self._chains.items())
        assert set(self._notes()) <= set(self._due)

    def digest(self) -> bytes:
        return digest_of(self._chains, list(self._expected), self._due)


@frozen
class TellSession:
    """Tell a kvstore what is known of a session, and which blocks it shall bring from SSD into memory.

    `prefetch`: keys of the chain, from its beginning; () = none, and those of an earlier order are not wanted any more.
    """

    instance: str
    hint: SessionHint
    prefetch: tuple[bytes, ...] = ()
