"""Sessions in the order of eviction: a session's KV stays or goes by when the session is expected back.

Over any policy. Blocks that a session will not ask for again leave first. Any other block is worth the seconds to its
next use, and the block with the most seconds leaves. For a block without a session, and for a session without an
expected return, the seconds since the last use stand for the seconds to the next.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from moonpool.base.kv.blocks import BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.kvstore.eviction.base import EvictionPolicy

MAX_SESSIONS = 4096
"""Sessions with blocks here. Of more, the session that was told of longest ago is forgotten."""
LEAST_REMEMBERED = 1024
"""Blocks that left and whose owner is remembered; as many as are held if that is more."""
SORT_S = 1.0
"""Seconds for which the order among sessions is kept."""
SEVERAL = b"*"
"""Owner of a block that several sessions have had."""


@dataclasses.dataclass(slots=True, eq=False)
class _Claim:
    """A session's hold on the blocks of its last turn, head first.

    `branched`: last block that a turn did not continue; `parallel`: a later turn has continued that branch after all.
    """

    hint: SessionHint
    since: float
    blocks: dict[BlockKey, None] = dataclasses.field(default_factory=dict)
    branched: BlockKey | None = None
    parallel: bool = False

    @property
    def last(self) -> BlockKey:
        """The last block that is here."""
        return next(reversed(self.blocks))

    def resume(self, now: float) -> None:
        """The session's next turn has come; how long the turn takes is not known."""
        self.hint = dataclasses.replace(self.hint, return_s=None, keep_s=None, ended=False)
        self.since = now

    def left_s(self, now: float) -> float:
        """Seconds to the next use; infinite = there is none."""
        hint, waited_s = self.hint, now - self.since
        if hint.ended or (hint.keep_s is not None and waited_s > hint.keep_s):
            return math.inf
        if hint.return_s is None:
            left_s = waited_s
        elif hint.told:
            left_s = abs(hint.return_s - waited_s)
        else:
            left_s = max(hint.return_s, waited_s)
        return left_s * 2.0**-hint.retention


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    """A block: when it was used last, which session has ever had it (b"" = none), and which sessions hold it."""

    info: BlockInfo
    used_at: float
    owner: bytes
    claims: tuple[_Claim, ...] = ()


class SessionRetention(EvictionPolicy):
    """Puts sessions' blocks, which `order` does not see, between the others by the seconds to the next use."""

    def __init__(self, order: EvictionPolicy, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._order = order
        self._clock = clock
        self._held: dict[BlockKey, _Held] = {}
        self._claims: dict[bytes, _Claim] = {}  # by session, told of longest ago first
        self._awaited: dict[bytes, tuple[SessionHint, float]] = {}  # by session: hints whose last block is not here yet
        self._tails: dict[BlockKey, bytes] = {}  # sessions of these, by last block
        self._unwanted: dict[BlockKey, None] = {}  # leave first, in this order
        self._owners: collections.OrderedDict[BlockKey, bytes] = collections.OrderedDict()  # of blocks that left
        self._sorted: list[_Claim] = []
        self._sorted_at = -math.inf

    def __len__(self) -> int:
        """Sessions with blocks here."""
        return len(self._claims)

    @property
    def unwanted(self) -> int:
        """Blocks that leave first."""
        return len(self._unwanted)

    def added(self, info: BlockInfo) -> None:
        """A block behind a session's last block is the session's, too: the turn's answer."""
        held = self._held[info.key] = _Held(info, self._clock(), self._owners.pop(info.key, b""))
        parent = self._held.get(info.parent)
        claims = [it for it in parent.claims if it.last == info.parent] if parent is not None else []
        for claim in claims:
            _claim(held, claim)
        if not claims:
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
        for claim in self._held[chain[-1]].claims if chain else ():
            if claim.last == chain[-1]:
                claim.resume(now)
        self._order.touched(self._unclaimed(chain))

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        self._order.arrived(self._unclaimed(chain))

    def _unclaimed(self, chain: Sequence[BlockKey]) -> Sequence[BlockKey]:
        if not (self._claims or self._unwanted):
            return chain
        return [key for key in chain if not self._held[key].claims and key not in self._unwanted]

    def removed(self, key: BlockKey) -> None:
        held = self._held.pop(key)
        if held.owner:
            self._owners[key] = held.owner
            if len(self._owners) > max(LEAST_REMEMBERED, len(self._held)):
                self._owners.popitem(last=False)
        for claim in held.claims:
            del claim.blocks[key]
            if not claim.blocks:
                del self._claims[claim.hint.session]
        if key in self._unwanted:
            del self._unwanted[key]
        elif not held.claims:
            self._order.removed(key)

    def candidates(self) -> Iterator[BlockKey]:
        """Blocks that no session wants, then all others, the most seconds to the next use first."""
        if not (self._claims or self._unwanted):
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
        for claim in [it for it in self._claims.values() if it.left_s(now) == math.inf]:
            self._end(claim)
        self._sorted = sorted(self._claims.values(), key=lambda it: -it.left_s(now))
        self._sorted_at = now

    def _claimed(self, now: float) -> Iterator[tuple[float, BlockKey]]:
        """Blocks that sessions hold, with seconds to the next use: by session, each session's tail first.

        A block that several sessions hold comes with the last of them. Sessions that have come back since the sorting
        come last.
        """
        named: dict[BlockKey, int] = {}
        away = (claim for claim in self._sorted if claim.since <= self._sorted_at)
        back = (claim for claim in self._sorted if claim.since > self._sorted_at)
        for claim in itertools.chain(away, back):
            left_s = claim.left_s(now)
            for key in reversed(claim.blocks):
                claims = len(self._held[key].claims)
                named[key] = named.get(key, 0) + 1 if claims > 1 else 1
                if named[key] == claims:
                    yield left_s, key

    def hint(self, hint: SessionHint) -> None:
        """Takes what is known of a session now. Blocks that are here, from `tail` back to the first, are the session's.

        Blocks of earlier turns that this turn has not continued are not wanted any more, as after a compaction. If a
        session continues such a branch all the same, it runs several at a time: its branches stay. If `tail` is still
        being written, the hint counts again when `tail` comes.
        """
        now = self._clock()
        self._await(hint, now)
        claim = self._claims.pop(hint.session, None) or _Claim(hint, now)
        claim.hint, claim.since = hint, now
        new, joint = self._back_to(claim, BlockKey(hint.tail))
        left = list(itertools.takewhile(lambda key: key != joint, reversed(claim.blocks))) if new else []
        claim.parallel |= claim.branched in new
        self._leave(claim, left, wanted=claim.parallel)
        claim.branched = left[0] if left else claim.branched
        for key in reversed(new):
            held = self._held[key]
            if not held.claims and key not in self._unwanted:
                self._order.removed(key)
            self._unwanted.pop(key, None)
            _claim(held, claim)
        if claim.blocks:
            self._claims[hint.session] = claim
        if len(self._claims) > MAX_SESSIONS:
            oldest = self._claims.pop(next(iter(self._claims)))
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

    def _back_to(self, claim: _Claim, tail: BlockKey) -> tuple[dict[BlockKey, None], BlockKey | None]:
        """Blocks from `tail` back to the first that the claim has, or to the chain's first; and the former."""
        new: dict[BlockKey, None] = {}
        held = self._held.get(tail)
        while held is not None and held.info.key not in new:  # a writer may name any parent
            if held.info.key in claim.blocks:
                return new, held.info.key
            new[held.info.key] = None
            held = self._held.get(held.info.parent)
        return new, None

    def _end(self, claim: _Claim) -> None:
        del self._claims[claim.hint.session]
        self._leave(claim, list(reversed(claim.blocks)), wanted=False)

    def _leave(self, claim: _Claim, blocks: Sequence[BlockKey], *, wanted: bool) -> None:
        """A session holds blocks no longer; those that no other session ever had leave first unless `wanted`."""
        for key in blocks:
            held = self._held[key]
            held.claims = tuple([it for it in held.claims if it is not claim])
            del claim.blocks[key]
            if held.claims:
                continue
            if wanted or held.owner == SEVERAL:
                self._order.added(held.info)
            else:
                self._unwanted[key] = None


def _claim(held: _Held, claim: _Claim) -> None:
    session = claim.hint.session
    held.claims = (*held.claims, claim)
    held.owner = session if held.owner in (b"", session) else SEVERAL
    claim.blocks[held.info.key] = None
