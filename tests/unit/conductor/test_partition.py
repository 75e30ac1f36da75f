"""Links that are cut without a word, one-way too, and what comes from before: nothing is lost, all is used again."""

from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.base.errors import Mismatch, MoonpoolError
from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2
from tests.faults.proxy import FaultProxies

from .fakes import decode, expected, prefill
from .stack import Stack, stack

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(30, 50))
CUT = "decode-0"


@pytest.fixture
def proxies() -> Iterator[FaultProxies]:
    with FaultProxies() as running:
        yield running


async def behind(proxies: FaultProxies, s: Stack, member: Any) -> conductor_pb2.JoinHello:
    """A member that is reached through a proxy, and has not joined."""
    hello = await s.serve(member)
    host, port = hello.instance.address.rsplit(":", 1)
    hello.instance.address = member.address = proxies.open(member.id, host, int(port))
    return hello


async def test_a_stream_whose_link_is_cut_goes_on_elsewhere(proxies: FaultProxies) -> None:
    """The instance's reports go on coming: only the way to it is cut."""
    cut, other = decode(0, hold_at=3), decode(1)
    async with stack(prefill()) as s:
        await s.follow(cut, await behind(proxies, s, cut))
        await s.joined(cut)
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events, tokens = aiter(stream), list[int]()
        while len(tokens) < 3:
            tokens += (await anext(events)).token_ids
        await s.join(other)
        await s.joined(other)
        proxies.part(CUT)
        cut.go.set()  # its tokens do not arrive
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 6)
        assert stream.result is not None
        assert [placement.decode for placement in stream.result.placements] == ["decode-0", "decode-1"]
        assert s.cluster.find(CUT) is not None, "it is a member still"
        proxies.join(CUT)
        used = ""
        while used != CUT:  # what came late is nobody's, and the instance is used again
            answer = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
            assert answer.token_ids == expected(20, 6)
            used = answer.placement.decode
        await s.rest()


async def test_who_is_silent_and_does_not_answer_is_lost_at_once(proxies: FaultProxies) -> None:
    async with stack(heartbeat_s=0.5) as s:
        call = await s.call_join(await behind(proxies, s, decode()))
        assert (await call.read()).HasField("welcome")
        proxies.part(CUT)
        with pytest.raises(MoonpoolError) as caught:
            await call.read()
        assert "does not answer" in str(caught.value)
        assert s.cluster.find(CUT) is None


async def test_a_report_from_an_earlier_life_is_refused() -> None:
    """The stream of a process whose place another one has taken: what it says counts for nothing."""
    async with stack() as s:
        old = await s.serve(decode(0))
        call = await s.call_join(old)
        assert (await call.read()).HasField("welcome")
        new = await s.call_join(await s.serve(decode(0, epoch=2)))
        assert (await new.read()).HasField("welcome")
        member = s.cluster.registry.get(CUT)
        assert member is not None
        await call.write(conductor_pb2.JoinRequest(load=conductor_pb2.LoadReport(running=9, draining=True)))
        with pytest.raises(MoonpoolError) as caught:
            await call.read()
        assert isinstance(caught.value, Mismatch)
        assert (member.instance.epoch, member.load.draining) == (2, False)
        assert s.cluster.is_member(member)
