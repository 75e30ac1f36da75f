"""The cluster's picture: asked for seldom, shared by those who wait, failures too."""

import asyncio

import pytest
from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError, Unavailable
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
        assert (await cluster.state()).model == "tiny"
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


async def test_before_the_first_engine() -> None:
    asked = Asked()
    asked.go.set()
    asked.state.ClearField("model")
    with pytest.raises(Unavailable, match="has joined"):
        await ClusterStateCache(AsyncClient(transport=asked), lambda: 0.0).state()
