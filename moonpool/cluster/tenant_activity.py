"""What conductors have told an instance of their tenants, which the instance passes on to the other conductors.

The instance reads nothing but names and versions. Each conductor gets every row once for each version; the first time
all rows that there are, those of its own earlier starts among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

from moonpool.scheduling.fair_share import MAX_TENANTS
from moonpool.v1 import conductor_pb2, kv_pb2

KEPT_S = 120.0
"""Seconds for which the rows of a conductor are kept that tells no more: a budget has refilled by then."""
MAX_ROWS = 512
"""Rows in a report."""
MAX_STARTS = 16
"""Conductors, and their earlier starts, that are kept."""


class _Row(NamedTuple):
    """A row, when it came, and its place among all rows."""

    use: conductor_pb2.TenantActivity
    came: float
    place: int


@dataclass(slots=True, eq=False)
class _Start:
    """What one start of a conductor has told.

    Attributes:
        heard_at: when it told last.
        number: of its last message.
        more: further rows follow.
        rows: by tenant, the newest last.
    """

    heard_at: float
    number: int = 0
    more: bool = False
    rows: OrderedDict[str, _Row] = field(default_factory=OrderedDict)


class TenantActivityBoard:
    """What all conductors have told an instance."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._starts: dict[tuple[str, int], _Start] = {}
        self._count = 0

    def take(self, conductor: kv_pb2.Instance, use: conductor_pb2.ConductorActivity) -> None:
        """Take what a conductor tells."""
        now, name = self._clock(), (conductor.id, conductor.incarnation)
        start = self._starts.setdefault(name, _Start(now))
        if use.number <= start.number:
            return
        start.number, start.heard_at, start.more = use.number, now, use.more
        for row in use.tenants:
            self._count += 1
            start.rows[row.tenant] = _Row(row, now, self._count)
            start.rows.move_to_end(row.tenant)
        while len(start.rows) > MAX_TENANTS:
            start.rows.popitem(last=False)
        while len(self._starts) > MAX_STARTS:
            del self._starts[min(self._starts, key=lambda it: self._starts[it].heard_at)]

    def news(self, conductor: kv_pb2.Instance, since: int) -> tuple[list[conductor_pb2.ConductorActivity], int]:
        """What a conductor is told, and the number from which it is told the next time.

        Args:
            conductor: the one that is told; not what its own present start has told.
            since: number of the last call for this conductor's stream; 0 = none.
        """
        now = self._clock()
        for name in [name for name, start in self._starts.items() if now - start.heard_at > KEPT_S]:
            del self._starts[name]
        own = conductor.id, conductor.incarnation
        uses: dict[tuple[str, int], conductor_pb2.ConductorActivity] = {}
        changed: list[tuple[int, tuple[str, int], _Row]] = []
        for name, start in self._starts.items():
            if name != own:
                uses[name] = conductor_pb2.ConductorActivity(
                    conductor=name[0], incarnation=name[1], number=start.number, age_s=now - start.heard_at,
                    more=start.more,
                )  # fmt: skip
                found = takewhile(lambda row: row.place > since, reversed(start.rows.values()))
                changed += [(row.place, name, row) for row in found]
        changed.sort(key=itemgetter(0))
        for _, name, row in changed[:MAX_ROWS]:
            uses[name].tenants.add().CopyFrom(row.use)
            uses[name].tenants[-1].age_s = now - row.came
        for _, name, _ in changed[MAX_ROWS:]:
            uses[name].more = True
        return list(uses.values()), changed[MAX_ROWS - 1][0] if len(changed) > MAX_ROWS else self._count
