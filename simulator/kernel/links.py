"""Links that flows share like fluids, with two priorities.

A flow crosses some links and gets the same rate on all of them. Urgent flows share what there is by max-min fairness;
background flows share by the same rule what urgent ones leave. Rates change only when a flow begins or ends, and only
those of flows that share links with it, directly or through others.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil

from simulator.kernel.clock import PS, World

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
    version: int = 0
    """Counts changes of the rate: an expected end of an earlier version is none."""


class Network:
    """All links and the flows on them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made = 0
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
        flow = Flow(self._made, tuple(path), nbytes, priority, done, float(nbytes), self._world.now)
        self.flows[flow.number] = flow
        if nbytes:
            for link in flow.path:
                link.flows[flow.number] = flow
            self._share(_connected(flow.path))
        else:
            self._world.at(self._world.now, self._ended, (flow, flow.version))
        return flow

    def cancel(self, flow: Flow) -> None:
        """Ends a flow early; `done` is not called. One that has ended is left as it is."""
        if self._forget(flow):
            self._share(_connected(flow.path))

    def _forget(self, flow: Flow) -> bool:
        if self.flows.pop(flow.number, None) is None:
            return False
        flow.version += 1
        for link in flow.path:
            link.flows.pop(flow.number, None)
        return True

    def _ended(self, expected: tuple[Flow, int]) -> None:
        flow, version = expected
        if flow.version != version:
            return
        self._forget(flow)
        for link in flow.path:
            link.carried += flow.nbytes
        if flow.nbytes:
            self._share(_connected(flow.path))
        flow.done()

    def _share(self, flows: Sequence[Flow]) -> None:
        rates = fair_rates(flows)
        for flow in flows:
            if rates[flow.number] != flow.rate or not flow.version:
                self._set_rate(flow, rates[flow.number])

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._world.now
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since) / PS)
        flow.since, flow.rate = now, rate
        flow.version += 1
        if rate > 0:
            self._world.after(ceil(flow.left / rate * PS), self._ended, (flow, flow.version))


def _connected(path: Sequence[Link]) -> list[Flow]:
    """All flows that share links with these links, directly or through others, in the order of their beginnings."""
    found: dict[int, Flow] = {}
    for link in path:
        found.update(link.flows)
    if all(len(link.flows) == len(found) for link in path) and all(flow.path == path for flow in found.values()):
        return [found[number] for number in sorted(found)]  # nobody else is concerned
    links, seen = list(path), set[Link]()
    found = {}
    while links:
        link = links.pop()
        if link in seen:
            continue
        seen.add(link)
        for number, flow in link.flows.items():
            if number not in found:
                found[number] = flow
                links.extend(flow.path)
    return [found[number] for number in sorted(found)]


def fair_rates(flows: Sequence[Flow]) -> dict[int, float]:
    """The rate of each flow by number, bytes per second: max-min fair, urgent ones first."""
    if len(flows) == 1:
        return {flows[0].number: min(link.bytes_per_s for link in flows[0].path)}
    spare = {link: link.bytes_per_s for flow in flows for link in flow.path}
    rates: dict[int, float] = {}
    for priority in Priority:
        _fill([flow for flow in flows if flow.priority is priority], spare, rates)
    return rates


def _fill(flows: Sequence[Flow], spare: dict[Link, float], rates: dict[int, float]) -> None:
    """Progressive filling: the link with the least per flow sets the rate of its flows; then the next one does."""
    waiting = flows
    while waiting:
        crowd = Counter(link for flow in waiting for link in flow.path)
        share, tightest = min(((spare[link] / count, link) for link, count in crowd.items()), key=lambda pair: pair[0])
        for flow in waiting:
            if tightest in flow.path:
                rates[flow.number] = share
                for link in flow.path:
                    left = spare[link] - share
                    spare[link] = left if left > _ROUNDING * link.bytes_per_s else 0.0
        waiting = [flow for flow in waiting if tightest not in flow.path]
