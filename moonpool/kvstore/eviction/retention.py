"""Retention: blocks that are kept for an owner, until a time.

Two views. `Pins` are hard: the blocks of a pin stay in either tier, and count against budgets. Pins are not stored:
they end with the process. A key may be in several pins; a pinned block stays until the last pin has ended, and costs
the tenant once.

`SessionRetention` is soft: it orders eviction in DRAM, over any policy. A session's KV stays or goes by when the
session is expected back. Blocks that a session will not ask for again leave first. Any other block is worth the
seconds to its next use, and the block with the most seconds leaves. For a block without a session, and for a session
without an expected return, the seconds since the last use stand for the seconds to the next.
"""

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.tenants import TenantAccount


@dataclasses.dataclass(slots=True, eq=False)
class Retention:
    """Blocks that are kept: by a pin, which is hard, or for a session, which orders eviction.

    Attributes:
        tenant: of a pin; a session's name has the tenant in it.
        session: as in `SessionHint`; b"" = a pin.
        blocks: the blocks that are kept, head first.
        until: when the retention ends; infinite = no end is known.
        since: when the store was told of the session last, or when the session came back.
        return_s: seconds from then to the next use, as expected; None = not known.
        told: the client has said when.
        worth: each step halves the seconds to the next use.
        branched: the session's last block that a turn did not continue.
        parallel: a later turn has continued that branch after all.
    """

    tenant: str = ""
    session: bytes = b""
    blocks: dict[BlockKey, None] = dataclasses.field(default_factory=dict)
    until: float = math.inf
    since: float = 0.0
    return_s: float | None = None
    told: bool = False
    worth: int = 0
    branched: BlockKey | None = None
    parallel: bool = False

    @property
    def last(self) -> BlockKey:
        """The last block that is here."""
        return next(reversed(self.blocks))

    def told_of(self, hint: SessionHint, now: float) -> None:
        """Take what is known of the session now."""
        self.since, self.return_s, self.told, self.worth = now, hint.return_s, hint.told, hint.retention
        self.until = math.inf if hint.keep_s is None else now + hint.keep_s
        if hint.ended:
            self.until = -math.inf

    def resume(self, now: float) -> None:
        """The session's next turn has come; how long the turn takes is not known."""
        self.since, self.until, self.return_s = now, math.inf, None

    def left_s(self, now: float) -> float:
        """Return the seconds to the next use; infinite = there is none."""
        waited_s = now - self.since
        if now > self.until:
            return math.inf
        if self.return_s is None:
            left_s = waited_s
        elif self.told:
            left_s = abs(self.return_s - waited_s)
        else:
            left_s = max(self.return_s, waited_s)
        return left_s * 2.0**-self.worth


MAX_NAME_BYTES = 256
"""Of a pin's name, as UTF-8."""
MAX_ENTRIES = 1 << 18
"""Keys of all pins together; a key in several pins counts for each."""
MAX_TTL_S = 7 * 86400.0
"""Of a pin that is not renewed."""
MAX_PINS = 1024
"""Pins of a store at once."""
SizeOf = Callable[[BlockKey], int | None]  # bytes of a block; None if not here


class PinLimit(enum.Enum):
    """Why a pin keeps fewer blocks than were asked for, as in the contract."""

    UNSPECIFIED = enum.auto()
    ABSENT = enum.auto()
    TENANT_BUDGET = enum.auto()
    STORE_BUDGET = enum.auto()


class PinOutcome(NamedTuple):
    """How many leading blocks a pin keeps, their bytes, and why not more."""

    blocks: int
    nbytes: int
    limit: PinLimit


@dataclasses.dataclass(slots=True)
class _Pinned:
    """A pinned block: bytes, and each tenant's number of pins."""

    nbytes: int
    pins: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Pins:
    """All pins of a store. Times are arguments, in seconds on one clock.

    All together keep at most `budget_bytes`. The account of blocks kept by each tenant's pins is kept up to date here.
    """

    def __init__(
        self,
        budget_bytes: int = 0,
        account: TenantAccount | None = None,
        *,
        max_pins: int = MAX_PINS,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.account = account or TenantAccount()
        self.max_pins = max_pins
        self.max_entries = max_entries
        self.by_name: dict[tuple[str, str], Retention] = {}
        self.pinned: dict[BlockKey, _Pinned] = {}
        self.nbytes = 0  # of all pinned blocks; one that several tenants pin counts once

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, key: object) -> bool:
        return key in self.pinned

    @property
    def keys(self) -> int:
        return len(self.pinned)

    @property
    def next_expiry(self) -> float:
        """When the next pin ends; infinite without pins."""
        return min((pin.until for pin in self.by_name.values()), default=math.inf)

    def pin(
        self, tenant: str, name: str, keys: Sequence[BlockKey], size_of: SizeOf, *, now: float, ttl_s: float
    ) -> tuple[PinOutcome, list[BlockKey]]:
        """Keeps the leading keys that are here and fit the budgets; replaces the tenant's pin of that name.

        Call `expire` first: an expired pin still counts.

        Returns:
            The outcome, and the keys with a possibly changed state.

        Raises:
            Overloaded: there are too many pins, or too many keys in pins.
        """
        _check(tenant, name, keys, ttl_s)
        others = [pin for place, pin in self.by_name.items() if place != (tenant, name)]
        entries = sum(len(pin.blocks) for pin in others)
        if len(others) >= self.max_pins or entries + len(keys) > self.max_entries:
            message = f"there are {len(others)} other pins of {entries} blocks, and there may be no more"
            raise Overloaded(message, reason="kvstore_pins", retry_after_s=self.next_expiry - now)
        changed = list(dict.fromkeys((*keys, *self._end([(tenant, name)]))))
        outcome = self._take(tenant, keys, size_of)
        if outcome.blocks:
            kept = dict.fromkeys(keys[: outcome.blocks])
            self.by_name[tenant, name] = Retention(tenant, blocks=kept, until=now + ttl_s)
        return outcome, changed

    def _take(self, tenant: str, keys: Sequence[BlockKey], size_of: SizeOf) -> PinOutcome:
        nbytes = 0
        for count, key in enumerate(keys):
            pinned, size = self.pinned.get(key), size_of(key)
            if size is None:
                return PinOutcome(count, nbytes, PinLimit.ABSENT)
            size = size if pinned is None else pinned.nbytes
            owed = 0 if pinned is not None and tenant in pinned.pins else size
            if self.account.over_quota(tenant, owed):
                return PinOutcome(count, nbytes, PinLimit.TENANT_BUDGET)
            if pinned is None:
                if self.nbytes + size > self.budget_bytes:
                    return PinOutcome(count, nbytes, PinLimit.STORE_BUDGET)
                pinned = self.pinned[key] = _Pinned(size)
                self.nbytes += size
            self.account.used.add(tenant, owed)
            pinned.pins[tenant] += 1
            nbytes += size
        return PinOutcome(len(keys), nbytes, PinLimit.UNSPECIFIED)

    def unpin(self, tenant: str, name: str) -> list[BlockKey]:
        """Ends a pin, if there is one; this and what ends several returns their keys."""
        return self._end([(tenant, name)])

    def end_all(self, tenants: Container[str]) -> list[BlockKey]:
        return self._end([place for place in self.by_name if place[0] in tenants])

    def expire(self, now: float) -> list[BlockKey]:
        return self._end([place for place, pin in self.by_name.items() if pin.until <= now])

    def _end(self, places: Sequence[tuple[str, str]]) -> list[BlockKey]:
        ended = [self.by_name.pop(place) for place in places if place in self.by_name]
        keys = [(pin.tenant, key) for pin in ended for key in pin.blocks]
        for tenant, key in keys:
            pinned = self.pinned[key]
            pinned.pins[tenant] -= 1
            if not pinned.pins[tenant]:
                del pinned.pins[tenant]
                self.account.used.add(tenant, -pinned.nbytes)
            if not pinned.pins:
                del self.pinned[key]
                self.nbytes -= pinned.nbytes
        return list(dict.fromkeys(key for _, key in keys))


def _check(tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: float) -> None:
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest("name", f"must have 1 to {MAX_NAME_BYTES} bytes")
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
    if not keys:
        raise InvalidRequest("keys", "a pin has at least one key")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("keys", "a key occurs twice")
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise InvalidRequest("ttl_s", f"must be in (0, {MAX_TTL_S:g}], is {ttl_s:g}")


MAX_SESSIONS = 4096
"""Sessions with blocks here. Of more, the session that was told of longest ago is forgotten."""
LEAST_REMEMBERED = 1024
"""Blocks that left and whose owner is remembered; as many as are held if that is more."""
SORT_S = 1.0
"""Seconds for which the order among sessions is kept."""
SEVERAL = b"*"
"""Owner of a block that several sessions have had."""


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    """A block: when it was used last, which session has ever had it (b"" = none), and which sessions hold it."""

    info: BlockInfo
    used_at: float
    owner: bytes
    holders: tuple[Retention, ...] = ()


class SessionRetention(EvictionPolicy):
    """Puts sessions' blocks, which `order` does not see, between the others by the seconds to the next use."""

    def __init__(self, order: EvictionPolicy, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._order = order
        self._clock = clock
        self._held: dict[BlockKey, _Held] = {}
        self._sessions: dict[bytes, Retention] = {}  # by session, told of longest ago first
        self._awaited: dict[bytes, tuple[SessionHint, float]] = {}  # by session: hints whose last block is not here yet
        self._tails: dict[BlockKey, bytes] = {}  # sessions of these, by last block
        self._unwanted: dict[BlockKey, None] = {}  # leave first, in this order
        self._owners: collections.OrderedDict[BlockKey, bytes] = collections.OrderedDict()  # of blocks that left
        self._sorted: list[Retention] = []
        self._sorted_at = -math.inf

    def __len__(self) -> int:
        """Sessions with blocks here."""
        return len(self._sessions)

    @property
    def unwanted(self) -> int:
        """Blocks that leave first."""
        return len(self._unwanted)

    def added(self, info: BlockInfo) -> None:
        """A block behind a session's last block is the session's, too: the turn's answer."""
        held = self._held[info.key] = _Held(info, self._clock(), self._owners.pop(info.key, b""))
        parent = self._held.get(info.parent)
        holders = parent.holders if parent is not None else ()
        retentions = [retention for retention in holders if retention.last == info.parent]
        for retention in retentions:
            _hold(held, retention)
        if not retentions:
            self._order.added(info)
        if info.key in self._tails:
            hint, told_at = self._awaited[self._tails[info.key]]
            self.hint(hint.after(self._clock() - told_at))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        now = self._clock()
        for key in chain:
            self._held[key].used_at = now
            if key in self._unwanted:
                del self._unwanted[key]
                self._order.added(self._held[key].info)
        for retention in self._held[chain[-1]].holders if chain else ():
            if retention.last == chain[-1]:
                retention.resume(now)
        self._order.touched(self._unclaimed(chain))

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        self._order.arrived(self._unclaimed(chain))

    def _unclaimed(self, chain: Sequence[BlockKey]) -> Sequence[BlockKey]:
        if not (self._sessions or self._unwanted):
            return chain
        return [key for key in chain if not self._held[key].holders and key not in self._unwanted]

    def removed(self, key: BlockKey) -> None:
        held = self._held.pop(key)
        if held.owner:
            self._owners[key] = held.owner
            if len(self._owners) > max(LEAST_REMEMBERED, len(self._held)):
                self._owners.popitem(last=False)
        for retention in held.holders:
            del retention.blocks[key]
            if not retention.blocks:
                del self._sessions[retention.session]
        if key in self._unwanted:
            del self._unwanted[key]
        elif not held.holders:
            self._order.removed(key)

    def candidates(self) -> Iterator[BlockKey]:
        """Blocks that no session wants, then all others, the most seconds to the next use first."""
        if not (self._sessions or self._unwanted):
            yield from self._order.candidates()
            return
        now = self._clock()
        if now - self._sorted_at >= SORT_S:
            self._sort(now)
        yield from self._unwanted
        claimed = self._claimed(now)
        following = next(claimed, None)
        for other in self._order.candidates():
            other_s = now - self._held[other].used_at
            while following is not None and following[0] > other_s:
                yield following[1]
                following = next(claimed, None)
            yield other
        if following is not None:
            yield following[1]
        for _, key in claimed:
            yield key

    def _sort(self, now: float) -> None:
        for retention in [retention for retention in self._sessions.values() if retention.left_s(now) == math.inf]:
            self._end(retention)
        self._sorted = sorted(self._sessions.values(), key=lambda retention: -retention.left_s(now))
        self._sorted_at = now

    def _claimed(self, now: float) -> Iterator[tuple[float, BlockKey]]:
        """Blocks that sessions hold, with seconds to the next use: by session, each session's tail first.

        A block that several sessions hold comes with the last of them. Sessions that have come back since the sorting
        come last.
        """
        named: dict[BlockKey, int] = {}
        away = (retention for retention in self._sorted if retention.since <= self._sorted_at)
        back = (retention for retention in self._sorted if retention.since > self._sorted_at)
        for retention in itertools.chain(away, back):
            left_s = retention.left_s(now)
            for key in reversed(retention.blocks):
                retentions = len(self._held[key].holders)
                named[key] = named.get(key, 0) + 1 if retentions > 1 else 1
                if named[key] == retentions:
                    yield left_s, key

    def hint(self, hint: SessionHint) -> None:
        """Takes what is known of a session now. Blocks that are here, from `tail` back to the first, are the session's.

        Blocks of earlier turns that this turn has not continued are not wanted any more, as after a compaction. If a
        session continues such a branch all the same, it runs several at a time: its branches stay. If `tail` is still
        being written, the hint counts again when `tail` comes.
        """
        now = self._clock()
        self._await(hint, now)
        retention = self._sessions.pop(hint.session, None) or Retention(session=hint.session)
        retention.told_of(hint, now)
        new, joint = self._back_to(retention, BlockKey(hint.tail))
        left = list(itertools.takewhile(lambda key: key != joint, reversed(retention.blocks))) if new else []
        retention.parallel |= retention.branched in new
        self._leave(retention, left, wanted=retention.parallel)
        retention.branched = left[0] if left else retention.branched
        for key in reversed(new):
            held = self._held[key]
            if not held.holders and key not in self._unwanted:
                self._order.removed(key)
            self._unwanted.pop(key, None)
            _hold(held, retention)
        if retention.blocks:
            self._sessions[hint.session] = retention
        if len(self._sessions) > MAX_SESSIONS:
            oldest = self._sessions.pop(next(iter(self._sessions)))
            self._leave(oldest, list(reversed(oldest.blocks)), wanted=True)
        self._sorted_at = -math.inf

    def _await(self, hint: SessionHint, now: float) -> None:
        """Remembers the latest hint on a session whose last block is not here."""
        if (earlier := self._awaited.pop(hint.session, None)) is not None:
            self._tails.pop(BlockKey(earlier[0].tail), None)
        tail = BlockKey(hint.tail)
        if tail in self._held:
            return
        self._awaited.pop(self._tails.pop(tail, b""), None)
        self._awaited[hint.session], self._tails[tail] = (hint, now), hint.session
        if len(self._awaited) > MAX_SESSIONS:
            oldest, _ = self._awaited.pop(next(iter(self._awaited)))
            del self._tails[BlockKey(oldest.tail)]

    def _back_to(self, retention: Retention, tail: BlockKey) -> tuple[dict[BlockKey, None], BlockKey | None]:
        """Blocks from `tail` back to the first that the retention has, or to the chain's first; and the former."""
        new: dict[BlockKey, None] = {}
        held = self._held.get(tail)
        while held is not None and held.info.key not in new:  # a writer may name any parent
            if held.info.key in retention.blocks:
                return new, held.info.key
            new[held.info.key] = None
            held = self._held.get(held.info.parent)
        return new, None

    def _end(self, retention: Retention) -> None:
        del self._sessions[retention.session]
        self._leave(retention, list(reversed(retention.blocks)), wanted=False)

    def _leave(self, retention: Retention, blocks: Sequence[BlockKey], *, wanted: bool) -> None:
        """A session holds blocks no longer; those that no other session ever had leave first unless `wanted`."""
        for key in blocks:
            held = self._held[key]
            held.holders = tuple([other for other in held.holders if other is not retention])
            del retention.blocks[key]
            if held.holders:
                continue
            if wanted or held.owner == SEVERAL:
                self._order.added(held.info)
            else:
                self._unwanted[key] = None


def _hold(held: _Held, retention: Retention) -> None:
    held.holders = (*held.holders, retention)
    held.owner = retention.session if held.owner in (b"", retention.session) else SEVERAL
    retention.blocks[held.info.key] = None
