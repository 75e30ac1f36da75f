"""The cluster's picture: asked for seldom, shared by those who wait, failures too."""

import asyncio
import gc

import pytest
from google.protobuf.message import Message

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor
from moonpool.gateway.serving.cluster_state import MAX_AGE_S, ClusterStateCache
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.test_client_disconnect import Holding

from .fakes import ready


class Asked(Holding):
    """Answers about the cluster when it is told to, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__([])
        self.state = ready(FakeConductor()).state
        self.times = 0
        self.error: MoonpoolError | None = None
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def query(self, request: Message, timeout_s: float) -> pb.ClusterStateResponse:
        assert isinstance(request, pb.ClusterStateRequest)
        self.times += 1
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.state


async def test_asked_once_a_second() -> None:
    asked, now = Asked(), [100.0]
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    asked.go.set()
    for seconds, times in ((0.0, 1), (MAX_AGE_S, 1), (0.5, 2), (10.0, 3)):
        now[0] += seconds
        assert (await cluster.state()).model == (await cluster.state_now()).model == "tiny"
        assert asked.times == times


async def test_a_failure_is_for_those_who_waited() -> None:
    """A conductor that hangs costs its callers one timeout, not one after the other; the next one asks anew."""
    asked, now = Asked(), [100.0]
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    asked.error = Unavailable("gone")
    waiting = [asyncio.create_task(cluster.state()) for _ in range(5)]
    await asked.begun.wait()
    now[0] += 5.0
    asked.go.set()
    assert [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == ["gone"] * 5
    assert asked.times == 1
    asked.error = None
    now[0] += 0.01
    assert (await cluster.state()).ready
    assert asked.times == 2


async def test_requests_go_on_with_the_state_before_while_the_conductor_is_late() -> None:
    """Who asks how the cluster is waits, and is told that the conductor does not answer."""
    asked, now = Asked(), [100.0]
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    asked.go.set()
    before = await cluster.state()
    asked.go.clear()
    now[0] += 2.0
    assert await cluster.state() is before
    looking = asyncio.create_task(cluster.state_now())
    asked.error = Unavailable("gone")
    asked.go.set()
    with pytest.raises(Unavailable, match="gone"):
        await looking
    assert await cluster.state() is before
    now[0] += 3600.0
    assert await cluster.state() is before, "a request asks the conductor itself"
    asked.error = None
    assert await cluster.state() is not before


async def test_requests_go_on_while_a_conductor_starts_or_drains() -> None:
    """It knows no engine, and another conductor may serve. Who asks how the cluster is, is told."""
    asked, now = Asked(), [100.0]
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    asked.go.set()
    before = await cluster.state()
    asked.state = pb.ClusterStateResponse(conductor=asked.state.conductor)
    for _ in range(2):
        now[0] += 2.0
        assert await cluster.state() is before
        assert await cluster.state() is before
    with pytest.raises(Unavailable, match="has joined"):
        await cluster.state_now()
    asked.state = ready(FakeConductor()).state
    now[0] += 2.0
    assert await cluster.state() is not before


async def test_a_conductor_that_is_late_from_the_start_is_named_and_may_be_asked_again() -> None:
    """503, not 504: what is over is the time of the gateway's own question."""
    asked = Asked()
    asked.go.set()
    asked.error = DeadlineExceeded("the client waited for the conductor's answer to ClusterState")
    with pytest.raises(Unavailable, match="waited for the conductor's answer to ClusterState, how the cluster is"):
        await ClusterStateCache(AsyncClient(transport=asked), lambda: 0.0).state()


async def test_what_was_asked_before_a_change_is_not_kept() -> None:
    asked, now = Asked(), [100.0]
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    early = asyncio.create_task(cluster.state())
    await asked.begun.wait()
    cluster.forget()
    late = asyncio.create_task(cluster.state())
    await asyncio.sleep(0)
    asked.go.set()
    await asyncio.gather(early, late)
    assert asked.times == 2
    assert await cluster.state() is late.result()


async def test_before_the_first_engine() -> None:
    asked = Asked()
    asked.go.set()
    asked.state.ClearField("model")
    with pytest.raises(Unavailable, match="has joined"):
        await ClusterStateCache(AsyncClient(transport=asked), lambda: 0.0).state()


async def test_a_failure_that_nobody_waits_for_is_not_told() -> None:
    """As requests go on with the state before."""
    asked, now, told = Asked(), [100.0], list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    cluster = ClusterStateCache(AsyncClient(transport=asked), lambda: now[0])
    asked.go.set()
    before = await cluster.state()
    now[0] += 2 * MAX_AGE_S
    asked.error = Unavailable("gone")
    assert await cluster.state() is before
    while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110  # turns of the event loop, no time
        await asyncio.sleep(0)
    assert asked.times == 2
    asked.error = None  # which knows the query by its traceback
    cluster.forget()
    gc.collect()
    assert told == []
