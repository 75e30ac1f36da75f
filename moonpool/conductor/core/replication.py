"""Copies of hot prefixes: what is lost without a copy, and when a copy is ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.link_budget import LinkBudget

MAX_HOT_PREFIXES = 1024
"""Prefixes that are watched: those of most regret. Up to twice as many are kept before the others are dropped."""
REGRET_HALF_LIFE_S = 30.0
MIN_PROMPTS = 2.0
"""Least demand for a copy: the prompts that asked for a prefix. Each counts 1 at first, and half after each
`REGRET_HALF_LIFE_S`: three within about 40 s, or two at once. The next turn of a conversation is no demand."""
MIN_GAIN = 2.0
"""Least ratio of the seconds lost without a copy to the seconds that the copy takes."""


class PrefixReplication:
    """The demand for copies of hot prefixes, and the orders for them.

    Args:
        share: share of an instance's link that copies may take, in both directions; 0 = no copies.

    Attributes:
        ordered: copies ordered so far.
    """

    def __init__(self, share: float) -> None:
        self._budget = LinkBudget(share)
        self._regrets: dict[bytes, PrefixRegret] = {}
        self.ordered = 0

    def __bool__(self) -> bool:
        return bool(self._budget)

    def placed(
        self, keys: Sequence[bytes], hint: ReplicationHint | None, tenant: str, now: float
    ) -> ReplicatePrefix | None:
        """Count the hint of a request that was placed; return the order for a copy if there is enough demand."""
        if hint is None:
            return None
        key = keys[hint.blocks - 1]
        regret = self._regrets.get(key)
        if regret is None:
            self._bound(now)
            regret = self._regrets[key] = PrefixRegret(0.0, 0.0, now)
        regret.age(now)
        regret.lost_s += hint.gain_s
        regret.prompts += 1.0
        # One prompt's next turn is no demand; and a copy must save more than it takes from the link.
        if regret.prompts < MIN_PROMPTS or regret.lost_s < MIN_GAIN * hint.read_s:
            return None
        if not self._budget.take(hint.target, hint.source, hint.read_s, now):
            return None
        del self._regrets[key]  # the next copy needs demand of its own
        self.ordered += 1
        return ReplicatePrefix(hint.target, tuple(keys[: hint.blocks]), hint.source, tenant)

    def _bound(self, now: float) -> None:
        """Drop the prefixes of least regret when there are too many."""
        if len(self._regrets) < 2 * MAX_HOT_PREFIXES:
            return
        for regret in self._regrets.values():
            regret.age(now)
        kept = sorted(self._regrets.items(), key=lambda item: -item[1].lost_s)[:MAX_HOT_PREFIXES]
        self._regrets = dict(kept)

    def digest(self) -> bytes:
        return digest_of(self._regrets, self._budget, self.ordered)

    def check_invariants(self) -> None:
        """Assert that what is remembered is bounded."""
        assert len(self._regrets) <= 2 * MAX_HOT_PREFIXES
        assert all(regret.lost_s >= 0 for regret in self._regrets.values())


@dataclass(slots=True)
class PrefixRegret:
    """Seconds lost because a prefix is not where prompts go, and the prompts that lost them, as of the time `at`.

    Both are halved after each `REGRET_HALF_LIFE_S`.
    """

    lost_s: float
    prompts: float
    at: float

    def age(self, now: float) -> None:
        left = 0.5 ** ((now - self.at) / REGRET_HALF_LIFE_S)
        self.lost_s, self.prompts, self.at = self.lost_s * left, self.prompts * left, now


class ReplicationHint(NamedTuple):
    """What a request would have gained if an instance had held a prefix of the prompt.

    Attributes:
        blocks: length of the prefix.
        target: the instance.
        source: instance that holds the prefix.
        gain_s: seconds by which the first token would have come sooner.
        read_s: seconds for which a copy takes the source's link.
    """

    blocks: int
    target: str
    source: str
    gain_s: float
    read_s: float


@frozen
class ReplicatePrefix:
    """Order an instance to copy a chain's blocks from another one, because many requests want them."""

    instance: str
    keys: tuple[bytes, ...]
    source: str
    tenant: str


@frozen
class StopReplication:
    """Call off what was ordered of a chain with this last key: the blocks are not wanted there any more."""

    instance: str
    tail: bytes
