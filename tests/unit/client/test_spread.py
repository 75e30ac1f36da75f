"""Which of several conductors gets a request."""

import contextvars
from collections import Counter
from collections.abc import Sequence

import pytest
from google.protobuf.message import Message

from moonpool.base import world
from moonpool.base.errors import NotFound, Unsupported
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.client.failover import AVOIDED_S, ConductorFailover, ConductorList
from moonpool.client.testing import FakeConductor
from moonpool.client.transport import GrpcTransport, NotConnected
from moonpool.v1 import conductor_pb2 as pb

from .conftest import Dial


def conductors(*names: str) -> ConductorList:
    return ConductorList([GrpcTransport(name) for name in names], names)


def test_open_requests_are_spread_evenly_and_so_are_short_ones() -> None:
    places = conductors("a", "b", "c")
    for _ in range(30):
        places.began(places.choose())
    places.ended(1)
    assert places.choose() == 1, "it has the fewest open requests"
    short = conductors("a", "b")
    counts = Counter[int]()
    for _ in range(10):
        number = short.choose()
        counts[number] += 1
        short.began(number)
        short.ended(number)
    assert counts == {0: 5, 1: 5}


def test_a_session_stays_at_one_conductor_whatever_the_order_of_the_list() -> None:
    one, other = conductors("a", "b", "c"), conductors("c", "a", "b")
    names, others = ("a", "b", "c"), ("c", "a", "b")
    chosen = [names[one.choose("t", f"s{number}")] for number in range(60)]
    assert chosen == [others[other.choose("t", f"s{number}")] for number in range(60)]
    assert min(Counter(chosen).values()) > 60 / 3 / 3, "sessions are spread, too"


def test_a_lost_conductor_is_passed_over_and_then_tried_by_one_request() -> None:
    now = 100.0

    def story() -> None:
        nonlocal now
        world.CURRENT.set(world.World(clock=world.Clock(monotonic=lambda: now)))
        places = conductors("a", "b")
        call = ConductorFailover(places, 1.0, places.choose())
        assert call.failed() == 0.0
        assert call.number == 1
        call.found()
        places.began(1)
        assert [places.choose() for _ in range(3)] == [1, 1, 1], "though the other one has fewer open requests"
        session = next(name for name in map(str, range(99)) if conductors("a", "b").choose("", name) == 0)
        assert places.choose("", session) == 1, "another one serves the session meanwhile"
        now += AVOIDED_S
        assert [places.choose(), places.choose()] == [0, 1], "one request is the trial"
        places.answered(0)
        assert places.choose() == 0
        for number in (0, 1):
            places.failed(number)
        assert places.choose() == 0, "with none left, all are tried"

    contextvars.Context().run(story)


def test_requests_of_a_client_are_spread_and_lost_ones_go_on(dial: Dial) -> None:
    one, other = FakeConductor(), FakeConductor()
    with dial(one, other) as client:
        for _ in range(6):
            client.generate(prompt="hi")
        assert (len(one.requests), len(other.requests)) == (3, 3)
        for _ in range(3):
            client.generate(prompt="hi", session=SessionTurn(id="s"))
        with pytest.raises(Unsupported):
            client.update_session(SessionTurn(id="s", last=True))  # which no fake has an answer to
    served = one if len(one.requests) == 6 else other
    assert len(served.requests) == 6
    assert [type(asked) for asked in served.asked] == [pb.UpdateSessionRequest], "the session is known there"
    down, up = FakeConductor(lambda _: [NotConnected("down")]), FakeConductor()
    with dial(down, up) as client:
        for _ in range(5):
            assert client.generate(prompt="hi").token_ids == [1, 2, 3]
    assert (len(down.requests), len(up.requests)) == (1, 5)


class Lost(FakeConductor):
    """Does not answer."""

    def answer(self, request: Message) -> Message:
        raise NotConnected("down")


def test_the_clusters_state_has_the_requests_of_all_conductors(dial: Dial) -> None:
    def fake(requests: int, p50: float, ago_s: Sequence[float], **tenants: int) -> FakeConductor:
        conductor = FakeConductor()
        known = [pb.TenantState(tenant=name, weight=1.0, requests=count) for name, count in tenants.items()]
        ended = [pb.EndedRequest(request_id=f"{requests} {ago:g}", ended_ago_s=ago) for ago in ago_s]
        conductor.state.queue.CopyFrom(pb.QueueState(for_room=requests, tenants=known))
        conductor.state.recent.CopyFrom(
            pb.RecentState(window_s=60, requests=requests, usage=pb.Usage(completion_tokens=10 * requests),
                           ttft_s=pb.Quantiles(p50=p50, p99=2 * p50), last=ended)
        )  # fmt: skip
        return conductor

    one, other = fake(1, 1.0, (1.0, 3.0), a=1), fake(3, 2.0, (2.0,), a=2, b=1)
    with dial(one, other) as client:
        for _ in range(2):
            state = client.cluster_state()
            assert (state.queue.for_room, state.recent.requests, state.recent.usage.completion_tokens) == (4, 4, 40)
            assert [(tenant.tenant, tenant.requests) for tenant in state.queue.tenants] == [("a", 3), ("b", 1)]
            assert (state.recent.ttft_s.p50, state.recent.ttft_s.p99) == (1.75, 4.0)
            assert [request.request_id for request in state.recent.last] == ["1 1", "3 2", "1 3"], "newest first"
    with dial(one, Lost()) as client:
        assert client.cluster_state().recent.requests == 1


def test_any_conductor_may_know_a_request(dial: Dial) -> None:
    one, other = FakeConductor(), FakeConductor()
    other.explanations["r"] = pb.ExplainResponse(attempts=[pb.Attempt(placement=pb.Placement(prefill="p"))])
    with dial(one, other) as client:
        assert client.explain("r") is not None
        with pytest.raises(NotFound):
            client.explain("unknown")
