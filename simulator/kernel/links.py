"""Links that flows share like fluids, with two priorities.

A flow crosses some links and gets the same rate on all of them. Urgent flows share what there is by max-min fairness;
background flows share by the same rule what urgent ones leave. Rates change only when a flow begins or ends, and only
those of flows that share links with it, directly or through others.

Where many flows are under way (`MANY`), a single store may connect all of them, and each begin and end would change
the rates of all. There shares are dealt out at most every `DEAL_S`: until then who begins has what nobody uses of its
links, and what somebody leaves is free. So no link ever carries more than it can, and a flow is late by at most that
time for each change that meets it, and by as much again at its end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import ceil

from simulator.kernel.clock import PS, World, ps

MANY = 96
"""Flows at once from which on shares are not dealt out with each change."""
DEAL_S = 0.002
"""Between two deals then. A slice of a layer takes some ten milliseconds."""
_DEAL = ps(DEAL_S)
_ROUNDING = 1e-9
"""A smaller share of a link is an error of rounding, not room."""


class Priority(IntEnum):
    """Which flows go first."""

    URGENT = 0
    BACKGROUND = 1


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a network card or bus."""

    name: str
    bytes_per_s: float
    carried: int = 0
    """Bytes of flows that have ended."""
    flows: "dict[int, Flow]" = field(default_factory=dict)

    @property
    def unused(self) -> float:
        """Bytes per second that no flow has."""
        spare = self.bytes_per_s - sum([flow.rate for flow in self.flows.values()])
        return spare if spare > _ROUNDING * self.bytes_per_s else 0.0


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over some links."""

    number: int
    path: tuple[Link, ...]
    nbytes: int
    priority: Priority
    done: Callable[[], None]
    left: float
    """Bytes that had not been carried at `since`."""
    since: int
    rate: float = 0.0
    """Bytes per second since then."""
    end: int | None = None
    """When the last byte arrives at this rate; None = never."""
    looked_at: int | None = None
    """When that is looked at next; not after `end`."""


class Network:
    """All links and the flows on them.

    Args:
        world: the time.
        many: flows at once from which on shares are dealt out every `DEAL_S` only.
    """

    def __init__(self, world: World, many: int = MANY) -> None:
        self._world, self._many = world, many
        self._made = 0
        self._changed: dict[Link, None] = {}
        self.flows: dict[int, Flow] = {}

    def send(
        self,
        path: Sequence[Link],
        nbytes: int,
        done: Callable[[], None],
        priority: Priority = Priority.URGENT,
    ) -> Flow:
        """Starts a flow; `done` is called when its last byte has arrived. No bytes arrive at once, as an event."""
        self._made += 1
        now = self._world.now
        flow = Flow(self._made, tuple(path), nbytes, priority, done, float(nbytes), now)
        self.flows[flow.number] = flow
        if nbytes:
            self._enter(flow)
        else:
            flow.end = now
            self._look_at(flow, now)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Ends a flow early; `done` is not called. One that has ended is left as it is."""
        if flow.number in self.flows:
            self._leave(flow)
            self._share(flow.path)

    def _enter(self, flow: Flow) -> None:
        deals = len(self.flows) > self._many
        if deals:
            self._set_rate(flow, min([link.unused for link in flow.path]))
        alone = not (deals or self._changed)
        for link in flow.path:
            alone = alone and not link.flows
            link.flows[flow.number] = flow
        if alone:  # most are
            self._set_rate(flow, min([link.bytes_per_s for link in flow.path]))
        else:
            self._share(flow.path)

    def _leave(self, flow: Flow) -> None:
        del self.flows[flow.number]
        for link in flow.path:
            link.flows.pop(flow.number, None)

    def _look(self, flow: Flow) -> None:
        """Ends a flow whose last byte has arrived; its rate may have changed since this was planned."""
        now = self._world.now
        if flow.looked_at != now or flow.number not in self.flows:
            return
        flow.looked_at = None
        if flow.end is None:
            return
        if flow.end > now:
            self._look_at(flow, flow.end)
            return
        self._leave(flow)
        for link in flow.path:
            link.carried += flow.nbytes
        if flow.nbytes:
            self._share(flow.path)
        flow.done()

    def _share(self, path: Sequence[Link]) -> None:
        """Something has changed on these links."""
        if not self._changed and len(self.flows) <= self._many:
            for link in path:
                if link.flows:
                    self._deal(path)
                    return
            return
        if not self._changed:
            self._world.after(_DEAL, self._deal_changed)
        self._changed.update(dict.fromkeys(path))

    def _deal_changed(self, _: None) -> None:
        changed, self._changed = self._changed, {}
        self._deal(changed)

    def _deal(self, links: Iterable[Link]) -> None:
        flows = _connected(tuple(links))
        rates = fair_rates(flows) if flows else {}
        for flow in flows:
            rate = rates[flow.number]
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._world.now
        if now != flow.since:
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since) / PS)
        flow.since, flow.rate = now, rate
        flow.end = end = now + ceil(flow.left / rate * PS) if rate > 0 else None
        soon = _DEAL if len(self.flows) > self._many else 0  # earlier by so little is not looked at anew
        if end is not None and (flow.looked_at is None or end + soon < flow.looked_at):
            self._look_at(flow, end)

    def _look_at(self, flow: Flow, when: int) -> None:
        flow.looked_at = when
        self._world.at(when, self._look, flow)


def _connected(path: Sequence[Link]) -> list[Flow]:
    """All flows that share links with these links, directly or through others, in the order of their beginnings."""
    links, found = dict.fromkeys(path), dict[int, Flow]()
    waiting = list(links)
    while waiting:
        for number, flow in waiting.pop().flows.items():
            if number not in found:
                found[number] = flow
                for link in flow.path:
                    if link not in links:
                        links[link] = None
                        waiting.append(link)
    return [found[number] for number in sorted(found)]


def fair_rates(flows: Sequence[Flow]) -> dict[int, float]:
    """The rate of each flow by number, bytes per second: max-min fair, urgent ones first."""
    if len(flows) == 1:
        return {flows[0].number: min([link.bytes_per_s for link in flows[0].path])}
    spare = {link: link.bytes_per_s for flow in flows for link in flow.path}
    rates: dict[int, float] = {}
    urgent = [flow for flow in flows if flow.priority is Priority.URGENT]
    if urgent:
        _fill(urgent, spare, rates, last=len(urgent) == len(flows))
    if len(urgent) < len(flows):
        _fill([flow for flow in flows if flow.priority is not Priority.URGENT], spare, rates, last=True)
    return rates


def _fill(flows: Sequence[Flow], spare: dict[Link, float], rates: dict[int, float], *, last: bool) -> None:
    """Progressive filling: the link with the least per flow sets the rate of its flows; then the next one does.

    What is left per flow of a link only grows while others are filled, so an outdated entry of the heap is too small.
    What they get is taken from what is spare, unless they are the `last`.
    """
    if len(flows) == 1:
        share = rates[flows[0].number] = min([spare[link] for link in flows[0].path])
        _take(flows[0].path, share, spare)
        return
    crowds: dict[Link, list[Flow]] = {}
    for flow in flows:
        for link in flow.path:
            if (crowd := crowds.get(link)) is None:
                crowds[link] = [flow]
            else:
                crowd.append(flow)
    counts = {link: len(crowd) for link, crowd in crowds.items()}
    heap = [(spare[link] / count, place, link) for place, (link, count) in enumerate(counts.items())]
    heapify(heap)
    waiting = len(flows)
    while waiting:
        share, place, link = heappop(heap)
        count = counts[link]
        if count and share != spare[link] / count:
            heappush(heap, (spare[link] / count, place, link))
        elif count:
            waiting -= count
            if last and not waiting:
                rates.update([(flow.number, share) for flow in crowds[link] if flow.number not in rates])
                return
            for flow in crowds[link]:
                if flow.number not in rates:
                    rates[flow.number] = share
                    _take(flow.path, share, spare)
                    for other in flow.path:
                        counts[other] -= 1


def _take(path: Sequence[Link], share: float, spare: dict[Link, float]) -> None:
    for link in path:
        left = spare[link] - share
        spare[link] = left if left > _ROUNDING * link.bytes_per_s else 0.0
