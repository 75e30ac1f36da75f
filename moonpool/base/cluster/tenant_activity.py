"""Tenant reports: an instance passes on to each conductor what the other conductors have told of their tenants.

The instance reads names and versions only. Each conductor gets every row once for each version. The first time, a
conductor gets all rows, also the rows from the conductor's own earlier starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

from moonpool.base.scheduling.fair_share import MAX_TENANTS
from moonpool.v1 import conductor_pb2, kv_pb2

KEPT_S = 120.0
"""Seconds for which a silent conductor's rows are kept: a budget has refilled by then."""
MAX_ROWS = 512
"""Rows in a report."""
MAX_STARTS = 16
"""Conductors, and their earlier starts, that are kept."""


class _Row(NamedTuple):
    """A row, the row's arrival time, and the row's place among all rows."""

    use: conductor_pb2.TenantActivity
    came: float
    place: int


@dataclass(slots=True, eq=False)
class _Start:
    """Rows that a conductor has told since one start.

    Attributes:
        heard_at: time of the last message.
        number: number of the last message.
        more: further rows follow.
        rows: rows by tenant, the newest last.
    """

    heard_at: float
    number: int = 0
    more: bool = False
    rows: OrderedDict[str, _Row] = field(default_factory=OrderedDict)


class TenantActivityBoard:
    """Rows that all conductors have told an instance."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._starts: dict[tuple[str, int], _Start] = {}
        self._count = 0

    def take(self, conductor: kv_pb2.Instance, use: conductor_pb2.ConductorActivity) -> None:
        now, name = self._clock(), (conductor.id, conductor.epoch)
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
            del self._starts[min(self._starts, key=lambda name: self._starts[name].heard_at)]

    def news(self, conductor: kv_pb2.Instance, since: int) -> tuple[list[conductor_pb2.ConductorActivity], int]:
        """Messages for a conductor, and the number to give as `since` in the next call.

        Args:
            conductor: receiver; gets no rows that the receiver itself has told since the receiver's last start.
            since: number from the last call for this conductor's stream; 0 = no call yet.
        """
        now = self._clock()
        for name in [name for name, start in self._starts.items() if now - start.heard_at > KEPT_S]:
            del self._starts[name]
        own = conductor.id, conductor.epoch
        uses: dict[tuple[str, int], conductor_pb2.ConductorActivity] = {}
        changed: list[tuple[int, tuple[str, int], _Row]] = []
        for name, start in self._starts.items():
            if name != own:
                uses[name] = conductor_pb2.ConductorActivity(
                    conductor=name[0], epoch=name[1], number=start.number, age_s=now - start.heard_at,
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
