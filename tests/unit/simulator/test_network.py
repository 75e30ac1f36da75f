"""Links: fair shares, two priorities, and no byte appears or vanishes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.network import MANY, Flow, Link, Priority, Route, SimulatedNetwork, fair_rates


class Rig:
    """A network, and when each flow ended."""

    def __init__(self, many: int = MANY) -> None:
        self.world = SimulatedWorld()
        self.network = SimulatedNetwork(self.world, many)
        self.ends: dict[str, float] = {}
        self.flows: dict[str, Flow] = {}

    def send(self, at: float, name: str, nbytes: int, *path: Link, priority: Priority = Priority.URGENT) -> None:
        def begin(_: object) -> None:
            self.flows[name] = self.network.send(path, nbytes, lambda: self._end(name), priority)

        self.world.at(ps(at), begin)

    def _end(self, name: str) -> None:
        self.ends[name] = self.world.seconds


def test_two_flows_share_a_link() -> None:
    rig, link = Rig(), Link("l", 100.0)
    rig.send(0.0, "a", 300, link)
    rig.send(1.0, "b", 100, link)  # both at 50 from now: b ends at 3, a has 100 left
    rig.world.run()
    assert rig.ends == {"b": 3.0, "a": 4.0}
    assert link.carried == 400
    assert not link.flows
    assert not rig.network.flows


def test_background_flows_get_what_is_left() -> None:
    rig, near, far = Rig(), Link("near", 100.0), Link("far", 40.0)
    rig.send(0.0, "slow", 80, near, far)  # 40 a second by the far link
    rig.send(0.0, "back", 240, near, priority=Priority.BACKGROUND)  # 60, then 100
    rig.world.run()
    assert rig.ends == {"slow": 2.0, "back": 3.2}


def test_background_waits_while_urgent_fills_the_link() -> None:
    rig, link = Rig(), Link("l", 100.0)
    rig.send(0.0, "back", 100, link, priority=Priority.BACKGROUND)
    rig.send(0.5, "urgent", 200, link)
    rig.world.run()
    assert rig.ends == {"urgent": 2.5, "back": 3.0}


def test_nothing_to_send_arrives_at_once() -> None:
    rig, link = Rig(), Link("l", 100.0)
    rig.send(0.0, "a", 100, link)
    rig.send(0.5, "none", 0, link)
    rig.world.run()
    assert rig.ends == {"none": 0.5, "a": 1.0}


def test_a_cancelled_flow_makes_room() -> None:
    rig, link = Rig(), Link("l", 100.0)
    rig.send(0.0, "a", 150, link)
    rig.send(0.0, "b", 1000, link)
    rig.world.at(ps(1.0), lambda _: rig.network.cancel(rig.flows["b"]))
    rig.world.run()
    assert rig.ends == {"a": 2.0}
    assert link.carried == 150
    rig.network.cancel(rig.flows["a"])  # has ended: nothing happens


FLOW = st.tuples(
    st.integers(0, 50), st.integers(0, 2000), st.sets(st.integers(0, 3), min_size=1), st.sampled_from(Priority)
)


@given(st.lists(FLOW, max_size=12), st.lists(st.integers(1, 500), min_size=4, max_size=4))
def test_every_byte_arrives_once_and_no_link_is_overcommitted(
    plans: list[tuple[int, int, set[int], Priority]], speeds: list[int]
) -> None:
    rig = Rig()
    links = [Link(str(place), float(speed)) for place, speed in enumerate(speeds)]
    for place, (at, nbytes, path, priority) in enumerate(plans):
        rig.send(at, str(place), nbytes, *(links[n] for n in sorted(path)), priority=priority)
    while len(rig.world):
        rig.world.run(until=rig.world.now + ps(0.5))
        for link in links:
            assert sum(flow.rate for flow in link.flows.values()) <= link.bytes_per_s * (1 + 1e-9)
    assert len(rig.ends) == len(plans)
    for place, link in enumerate(links):
        assert link.carried == sum(nbytes for _, nbytes, path, _ in plans if place in path)
    for place, (at, nbytes, path, _) in enumerate(plans):  # no flow is quicker than its slowest link
        least = nbytes / min(links[n].bytes_per_s for n in path)
        assert rig.ends[str(place)] >= (at + least) * (1 - 1e-9)


@given(st.lists(FLOW, min_size=1, max_size=12), st.lists(st.integers(1, 500), min_size=4, max_size=4))
def test_shares_are_fair_and_leave_nothing_unused(
    plans: list[tuple[int, int, set[int], Priority]], speeds: list[int]
) -> None:
    """Each flow crosses a full link on which no flow of its priority, or of a higher one, gets more than it."""
    links = [Link(str(place), float(speed)) for place, speed in enumerate(speeds)]
    routes: dict[tuple[frozenset[int], Priority], Route] = {}
    for number, (_, _, path, priority) in enumerate(plans):
        way = frozenset(path), priority
        route = routes.setdefault(way, Route(tuple(links[n] for n in sorted(path)), priority))
        route.flows[number] = Flow(number, route, 1, lambda: None, 1.0, 0)
    rates = fair_rates(list(routes.values()))
    taken = {link: sum(rates[each] * len(each.flows) for each in rates if link in each.path) for link in links}
    for route, rate in rates.items():
        peers = {link: [other for other in rates if link in other.path] for link in route.path}
        assert any(
            taken[link] >= link.bytes_per_s * (1 - 1e-9)
            and all(rates[each] <= rate + 1e-6 for each in others if each.priority == route.priority)
            and (route.priority is Priority.BACKGROUND
                 or sum(rates[each] * len(each.flows) for each in others if not each.priority)
                 >= link.bytes_per_s * (1 - 1e-9))
            for link, others in peers.items()
        )  # fmt: skip


# Many flows


def hub(count: int, many: int) -> tuple[Rig, Link]:
    """So many flows from links of their own into one, each begun 0.3 ms after the one before."""
    rig, shared = Rig(many), Link("hub", 1e6)
    for place in range(count):
        rig.send(place * 3e-4, str(place), 10_000, Link(str(place), 1e5), shared)
    return rig, shared


def test_shares_of_many_flows_are_dealt_out_at_intervals() -> None:
    """The eleventh flow comes when ten of them fill the link: it waits for the next deal, 2 ms after the first one."""
    rig, shared = hub(11, many=5)
    rig.world.run(until=ps(0.003))
    assert [flow.rate for flow in rig.flows.values()] == [1e5] * 10 + [0.0]
    rig.world.run(until=ps(0.0057))  # dealt out at 3.7 ms, and at 5.7 ms again
    assert [flow.rate for flow in rig.flows.values()] == pytest.approx([1e6 / 11] * 11)
    rig.world.run()
    assert shared.carried == 110_000


def test_flows_that_do_not_meet_begin_and_end_at_once_among_many() -> None:
    rig = Rig(many=1)
    for place in range(4):
        rig.send(0.1 * place, str(place), 100, Link(str(place), 100.0))
    rig.world.run()
    assert rig.ends == {str(place): pytest.approx(0.1 * place + 1.0) for place in range(4)}


def test_dealing_at_intervals_is_near_to_dealing_at_once() -> None:
    """300 flows through one link: each ends within 1.5 % of the whole, and the link is done as soon."""
    often, _ = hub(300, many=300)
    seldom, _ = hub(300, many=10)
    often.world.run()
    seldom.world.run()
    whole = max(often.ends.values())
    assert max(abs(seldom.ends[name] - often.ends[name]) for name in often.ends) < 0.015 * whole
    assert max(seldom.ends.values()) == pytest.approx(whole, rel=0.002)
    assert seldom.world.events < often.world.events


@given(st.lists(FLOW, max_size=20), st.lists(st.integers(1, 500), min_size=4, max_size=4))
def test_no_link_of_many_flows_is_overcommitted(
    plans: list[tuple[int, int, set[int], Priority]], speeds: list[int]
) -> None:
    rig = Rig(many=3)
    links = [Link(str(place), float(speed)) for place, speed in enumerate(speeds)]
    for place, (at, nbytes, path, priority) in enumerate(plans):
        rig.send(at / 1000, str(place), nbytes, *(links[n] for n in sorted(path)), priority=priority)
    while len(rig.world):
        rig.world.run(until=rig.world.now + ps(0.0011))
        for link in links:
            assert sum(flow.rate for flow in link.flows.values()) <= link.bytes_per_s * (1 + 1e-9)
        if rig.world.now > ps(0.1):
            rig.world.run()
    assert len(rig.ends) == len(plans)
    for place, link in enumerate(links):
        assert link.carried == sum(nbytes for _, nbytes, path, _ in plans if place in path)
