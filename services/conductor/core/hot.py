"""Hot prefixes: those whose holders are so busy that prompts would gain from one more copy.

Who loads a prefix holds it from then on (the Mooncake paper's way), so prefixes spread by being used. A copy is ordered
where that is not enough: where what prompts have lost, because the instance that had time did not hold their prefix, is
more than the copy takes. Nothing is copied that several prompts have not asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.digest import digest_of
from moonpool.frozen import frozen
from services.conductor.core.plan import Wish

TOP = 1024
"""Prefixes that are watched, those of most regret; up to twice as many before the others are dropped."""
HALF_LIFE_S = 30.0
ASKED = 2.0
"""So much the prompts that asked for a prefix must count together, each 1 at first and half of it after `HALF_LIFE_S`:
three within about 40 s, or two at the same time. A conversation's next turn is no demand."""
WORTH = 2.0
"""What was lost must be so many times what the copy takes."""


@frozen
class Replicate:
    """An instance is to copy a chain's blocks from another one, because they are hot."""

    instance: str
    keys: tuple[bytes, ...]
    source: str
    tenant: str


@dataclass(slots=True)
class Regret:
    """Of one prefix: seconds lost and prompts that lost them, both halved every `HALF_LIFE_S`, at a time."""

    lost_s: float
    asked: float
    at: float

    def age(self, now: float) -> None:
        """Lets time pass."""
        left = 0.5 ** ((now - self.at) / HALF_LIFE_S)
        self.lost_s, self.asked, self.at = self.lost_s * left, self.asked * left, now


class Hot:
    """Decides on copies.

    Args:
        share: of an instance's link that copies may take, out of it and into it; 0 = there are none.

    Attributes:
        ordered: copies so far.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._regrets: dict[bytes, Regret] = {}
        self._free_at: dict[str, float] = {}  # when the budget of an instance's link allows another copy
        self.ordered = 0

    def __bool__(self) -> bool:
        return self._share > 0

    def placed(self, keys: Sequence[bytes], wish: Wish | None, tenant: str, now: float) -> Replicate | None:
        """A prompt is placed that has this wish; the order for a copy, if it is time for one."""
        if wish is None:
            return None
        key = keys[wish.blocks - 1]
        regret = self._regrets.get(key)
        if regret is None:
            self._bound(now)
            regret = self._regrets[key] = Regret(0.0, 0.0, now)
        regret.age(now)
        regret.lost_s += wish.gain_s
        regret.asked += 1.0
        if regret.asked < ASKED or regret.lost_s < WORTH * wish.read_s or not self._affords(wish, now):
            return None
        del self._regrets[key]
        self.ordered += 1
        for end in (wish.target, wish.source):
            self._free_at[end] = now + wish.read_s / self._share
        return Replicate(wish.target, tuple(keys[: wish.blocks]), wish.source, tenant)

    def _affords(self, wish: Wish, now: float) -> bool:
        self._free_at = {end: at for end, at in self._free_at.items() if at > now}
        return wish.target not in self._free_at and wish.source not in self._free_at

    def _bound(self, now: float) -> None:
        """Drops the prefixes of least regret when there are too many."""
        if len(self._regrets) < 2 * TOP:
            return
        for regret in self._regrets.values():
            regret.age(now)
        kept = sorted(self._regrets.items(), key=lambda item: -item[1].lost_s)[:TOP]
        self._regrets = dict(kept)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._regrets, self._free_at, self.ordered)

    def check_invariants(self) -> None:
        """Asserts that what is remembered is bounded."""
        assert len(self._regrets) <= 2 * TOP
        assert all(regret.lost_s >= 0 for regret in self._regrets.values())
