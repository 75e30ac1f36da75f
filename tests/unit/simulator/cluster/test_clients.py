"""Clients: whom each asks, and what becomes of a request whose conductor is lost."""

from typing import Any

from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.cluster.clients import RETRY_S, Clients, Serving
from moonpool.simulator.cluster.requests import DONE, Request, TokenTimes
from tests.unit.simulator.cluster.rig import config

UNREAD: Any = object()


class Scripted:
    """A conductor that answers or not, and remembers what it was asked."""

    def __init__(self, clients: Clients, *, up: bool) -> None:
        self.up = up
        self.asked: list[int] = []
        self.resumed: list[int] = []
        self.has: list[Serving] = []
        self._clients = clients

    def ask(self, request: Request) -> None:
        self.asked.append(request.number)
        self._clients.taken(Serving(UNREAD, request))

    def resume(self, before: Serving) -> None:
        self.resumed.append(before.request.number)

    def rejoin(self, before: Serving) -> bool:
        return before in self.has

    def leave(self, before: Serving) -> None:
        self.has.clear()


def made(*ups: bool) -> tuple[SimulatedWorld, Clients, list[Scripted], list[Request]]:
    ended: list[Request] = []
    world = SimulatedWorld()
    clients = Clients(world, config(), ended.append)
    conductors = [Scripted(clients, up=up) for up in ups]
    clients.conductors = conductors
    return world, clients, conductors, ended


def request(number: int) -> Request:
    return Request(number, arrived=0, tokens=10, answer=2, keys=())


def test_each_asks_its_own_conductor_or_the_next_that_answers() -> None:
    world, clients, conductors, _ = made(True, False, True)
    for number in range(4):
        clients.arrive(request(number))
    world.run()
    assert [conductor.asked for conductor in conductors] == [[0, 3], [], [1, 2]]


def test_while_none_answers_it_asks_again_and_again() -> None:
    world, clients, (conductor,), _ = made(False)
    clients.arrive(request(0))
    world.run(until=ps(10 * RETRY_S))
    assert conductor.asked == []
    conductor.up = True
    world.run()
    assert conductor.asked == [0]
    assert ps(10 * RETRY_S) < world.now <= ps(11 * RETRY_S + config().delays.prompt_s)


def test_what_a_lost_conductor_had_is_resumed_at_another_one_if_it_was_placed() -> None:
    world, clients, conductors, ended = made(True, True)
    new, placed, whole = (request(2 * number) for number in range(3))
    for each in (new, placed, whole):
        clients.arrive(each)
    world.run()
    for each in (placed, whole):
        clients.taken(Serving(UNREAD, each, sequence=UNREAD, plan=UNREAD))
    whole.answers[0].take(TokenTimes(world.now, [1], world.now + 1))
    conductors[0].up = False
    clients.lost([new, placed, whole])
    world.run()
    assert (conductors[1].asked, conductors[1].resumed) == ([new.number], [placed.number])
    assert ended == [whole]
    assert (whole.outcome, len(clients)) == (DONE, 2)


def test_who_loses_a_connection_alone_finds_its_request_where_it_is() -> None:
    world, clients, conductors, ended = made(True, True)
    mine, other = request(1), request(3)
    for each in (mine, other):
        clients.arrive(each)
    world.run()
    first, second = (Serving(UNREAD, item, sequence=UNREAD, plan=UNREAD) for item in (mine, other))
    for serving in (first, second):
        clients.taken(serving)
        conductors[1].has.append(serving)
    assert clients.disconnect(mine, seen=False) is first
    assert clients.disconnect(other, seen=False) is second
    clients.end(other, DONE)  # while its client is away
    world.run()
    assert (first.rejoined, ended) == (1, [other])
    assert clients.disconnect(mine, seen=True) is first
    assert conductors[1].has == []
    world.run()
    assert (first.rejoined, conductors[1].resumed) == (1, [1])
