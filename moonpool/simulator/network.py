"""The network in virtual time: links that flows share, and calls with random delays that may be lost or late.

A flow crosses some links and gets the same rate on all of them. Urgent flows share a link by max-min fairness;
background flows share what is left by the same rule. Each call's fate depends on the seed alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import ceil
from operator import attrgetter

from moonpool.base.scheduling.state_machine import draw_unit
from moonpool.simulator.clock import PS, SimulatedWorld, ps

MANY = 96
"""Flows at once from which on shares are not dealt out with each change."""
DEAL_S = 0.002
"""Between two deals then. A layer slice takes some ten milliseconds."""
_DEAL = ps(DEAL_S)
_ROUNDING = 1e-9
"""A smaller share of a link is a rounding error, not room."""
NOTICED_S = 1.0
"""Seconds until both ends of a connection notice a lost message."""


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
    """Ended flows' bytes."""
    flows: "dict[int, Flow]" = field(default_factory=dict)
    routes: "dict[Route, None]" = field(default_factory=dict)
    """Those with flows."""

    @property
    def unused(self) -> float:
        """Bytes per second that no flow has."""
        spare = self.bytes_per_s - sum([flow.rate for flow in self.flows.values()])
        return spare if spare > _ROUNDING * self.bytes_per_s else 0.0


@dataclass(slots=True, eq=False)
class Route:
    """Flows of one priority over the same links, oldest first. They get the same rate."""

    path: tuple[Link, ...]
    priority: Priority
    flows: "dict[int, Flow]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over some links."""

    number: int
    route: Route
    nbytes: int
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


class SimulatedNetwork:
    """All links and the flows on them.

    Args:
        world: the time.
        many: flows at once from which on shares are dealt out every `DEAL_S` only.
    """

    def __init__(self, world: SimulatedWorld, many: int = MANY) -> None:
        self.world, self._many = world, many
        self._made = 0
        self._changed: dict[Link, None] = {}
        self._routes: dict[tuple[tuple[Link, ...], Priority], Route] = {}
        self.flows: dict[int, Flow] = {}

    def send(
        self,
        path: Sequence[Link],
        nbytes: int,
        done: Callable[[], None],
        priority: Priority = Priority.URGENT,
    ) -> Flow:
        """Start a flow; `done` is called when the last byte has arrived. No bytes arrive at once, as an event."""
        self._made += 1
        now, way = self.world.now, (tuple(path), priority)
        route = self._routes.get(way) or self._routes.setdefault(way, Route(*way))
        flow = Flow(self._made, route, nbytes, done, float(nbytes), now)
        self.flows[flow.number] = flow
        if nbytes:
            self._enter(flow)
        else:
            flow.end = now
            self._look_at(flow, now)
        return flow

    def cancel(self, flow: Flow) -> None:
        """End a flow early; `done` is not called. An ended flow does not change."""
        if flow.number in self.flows:
            self._leave(flow)
            self._share(flow.route.path)

    def _enter(self, flow: Flow) -> None:
        deals, route = len(self.flows) > self._many, flow.route
        if deals:
            self._set_rate(flow, min([link.unused for link in route.path]))
        alone = not (deals or self._changed)
        route.flows[flow.number] = flow
        for link in route.path:
            alone = alone and not link.flows
            link.flows[flow.number] = flow
            link.routes[route] = None
        if alone:  # most are
            self._set_rate(flow, min([link.bytes_per_s for link in route.path]))
        else:
            self._share(route.path)

    def _leave(self, flow: Flow) -> None:
        del self.flows[flow.number]
        route = flow.route
        route.flows.pop(flow.number, None)
        for link in route.path:
            link.flows.pop(flow.number, None)
            if not route.flows:
                link.routes.pop(route, None)

    def _look(self, flow: Flow) -> None:
        """End a flow if the last byte has arrived; the flow's rate may have changed since this call was planned."""
        now = self.world.now
        if flow.looked_at != now or flow.number not in self.flows:
            return
        flow.looked_at = None
        if flow.end is None:
            return
        if flow.end > now:
            self._look_at(flow, flow.end)
            return
        self._leave(flow)
        for link in flow.route.path:
            link.carried += flow.nbytes
        if flow.nbytes:
            self._share(flow.route.path)
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
            self.world.after(_DEAL, self._deal_changed)
        self._changed.update(dict.fromkeys(path))

    def _deal_changed(self, _: None) -> None:
        changed, self._changed = self._changed, {}
        self._deal(changed)

    def _deal(self, links: Iterable[Link]) -> None:
        routes = _connected(tuple(links))
        rates = fair_rates(routes) if routes else {}
        changed = [flow for route in routes for flow in route.flows.values() if flow.rate != rates[route]]
        if len(routes) > 1:
            changed.sort(key=attrgetter("number"))
        for flow in changed:
            self._set_rate(flow, rates[flow.route])

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self.world.now
        if now != flow.since:
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since) / PS)
        flow.since, flow.rate = now, rate
        flow.end = end = now + ceil(flow.left / rate * PS) if rate > 0 else None
        soon = _DEAL if len(self.flows) > self._many else 0  # earlier by so little is not looked at anew
        if end is not None and (flow.looked_at is None or end + soon < flow.looked_at):
            self._look_at(flow, end)

    def _look_at(self, flow: Flow, when: int) -> None:
        flow.looked_at = when
        self.world.at(when, self._look, flow)


def _connected(path: Sequence[Link]) -> list[Route]:
    """All routes that share links with these links, directly or through others, in the order of their oldest flows."""
    links, found = dict.fromkeys(path), dict[Route, None]()
    waiting = list(links)
    while waiting:
        for route in waiting.pop().routes:
            if route not in found:
                found[route] = None
                for link in route.path:
                    if link not in links:
                        links[link] = None
                        waiting.append(link)
    return sorted(found, key=lambda route: next(iter(route.flows)))


def fair_rates(routes: Sequence[Route]) -> dict[Route, float]:
    """Rate of each flow of a route, bytes per second: max-min fair, urgent flows first."""
    if len(routes) == 1:
        route = routes[0]
        return {route: min([link.bytes_per_s for link in route.path]) / len(route.flows)}
    spare = {link: link.bytes_per_s for route in routes for link in route.path}
    rates: dict[Route, float] = {}
    urgent = [route for route in routes if route.priority is Priority.URGENT]
    if urgent:
        _fill(urgent, spare, rates, last=len(urgent) == len(routes))
    if len(urgent) < len(routes):
        _fill([route for route in routes if route.priority is not Priority.URGENT], spare, rates, last=True)
    return rates


def _fill(routes: Sequence[Route], spare: dict[Link, float], rates: dict[Route, float], *, last: bool) -> None:
    """Progressive filling: the link with the least per flow sets the rate for the link's flows; then the next.

    A link's remainder per flow only grows while others are filled, so an outdated heap entry is too small. What they
    get is taken from what is spare, unless they are the `last`.
    """
    routes_by_link: dict[Link, list[Route]] = {}
    counts: dict[Link, int] = {}
    for route in routes:
        count = len(route.flows)
        for link in route.path:
            if (on_link := routes_by_link.get(link)) is None:
                routes_by_link[link], counts[link] = [route], count
            else:
                on_link.append(route)
                counts[link] += count
    heap = [(spare[link] / count, place, link) for place, (link, count) in enumerate(counts.items())]
    heapify(heap)
    waiting = sum([len(route.flows) for route in routes])
    while waiting:
        share, place, link = heappop(heap)
        count = counts[link]
        if count and share != spare[link] / count:
            heappush(heap, (spare[link] / count, place, link))
        elif count:
            waiting -= count
            filled = [route for route in routes_by_link[link] if route not in rates]
            rates.update(dict.fromkeys(filled, share))
            for route in filled if waiting or not last else ():
                for other in route.path:
                    counts[other] -= len(route.flows)
                    spare[other] = _left(spare[other], share, len(route.flows), _ROUNDING * other.bytes_per_s)


def _left(spare: float, share: float, count: int, least: float) -> float:
    """What is left of `spare` when `count` flows have taken their share; at most `least` is a rounding error."""
    for _ in range(count):
        spare -= share
        if spare <= least:
            return 0.0
    return spare


@dataclass(frozen=True, slots=True)
class CallDelays:
    """How long a message takes.

    Attributes:
        least_s: seconds that each takes.
        more_s: mean random seconds on top; exponential.
        prompt_s: seconds until the conductor plans a request that has come: tokenising and hashing.
        run_s: mean seconds for a run of decode steps to the engine and back; exponential.
        drop_share: share of messages that are lost.
        late_share: share of messages that take `late_s` longer.
    """

    least_s: float = 0.0003
    more_s: float = 0.0002
    prompt_s: float = 0.0
    run_s: float = 0.0
    drop_share: float = 0.0
    late_share: float = 0.0
    late_s: float = 5.0


def exponential(mean_s: float, seed: int, *counters: int) -> float:
    """Random seconds with this mean."""
    return -mean_s * math.log(1.0 - draw_unit(seed, *counters)) if mean_s else 0.0


class Calls:
    """Sends messages; the n-th message's fate depends on the seed and n alone.

    Attributes:
        world: the time.
        sent, dropped, late: messages so far.
    """

    def __init__(self, world: SimulatedWorld, delays: CallDelays, seed: int) -> None:
        self.world = world
        self._delays = delays
        self._seed = seed
        self._faulty = delays.drop_share > 0.0 or delays.late_share > 0.0
        self.sent = self.dropped = self.late = 0

    def send(self, deliver: Callable[[], None], *, reliable: bool = False) -> None:
        """Call `deliver` after the message's delay, unless the message is lost. A reliable message is never lost."""
        arrives = self.arrival(reliable=reliable)
        if arrives is not None:
            self.world.at(arrives, _deliver, deliver)

    def arrival(self, *, reliable: bool = False) -> int | None:
        """When a message that is sent now arrives, picoseconds; None if the message is lost."""
        self.sent += 1
        delays = self._delays
        delay = delays.least_s + exponential(delays.more_s, self._seed, self.sent, 2)
        if self._faulty:
            fate = draw_unit(self._seed, self.sent, 1)
            if fate < delays.drop_share and not reliable:
                self.dropped += 1
                return None
            if delays.drop_share <= fate < delays.drop_share + delays.late_share:
                self.late += 1
                delay += delays.late_s
        return self.world.now + ps(delay)


class SimulatedLink:
    """A connection: messages arrive in sending order, in each direction.

    A lost message breaks the connection: later messages do not arrive, and after a while both ends notice.

    Args:
        calls: carries the messages.
        broken: called when both ends notice; not after `close`.
    """

    __slots__ = ("_broken", "_calls", "_latest", "_lost", "closed")

    def __init__(self, calls: Calls, broken: Callable[[], None]) -> None:
        self._calls, self._broken = calls, broken
        self._latest = [0, 0]
        self._lost = False
        self.closed = False

    def send(self, deliver: Callable[[], None], *, back: bool = False, reliable: bool = False) -> None:
        """Call `deliver` when the message arrives at the other end, or with `back` at this end."""
        if self._lost or self.closed:
            return
        arrives, world = self._calls.arrival(reliable=reliable), self._calls.world
        if arrives is None:
            self._lost = True
            world.after(ps(NOTICED_S), self._break)
            return
        self._latest[back] = max(arrives, self._latest[back])
        world.at(self._latest[back], self._arrive, deliver)

    def close(self) -> None:
        """Messages stop arriving."""
        self.closed = True

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if not self.closed:
            deliver()

    def _break(self, _: None) -> None:
        if not self.closed:
            self.closed = True
            self._broken()


def _deliver(deliver: Callable[[], None]) -> None:
    deliver()
