"""A defect in serving one request ends that request with an error, without another attempt, and no other request."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.base.errors import Internal
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.client import AsyncClient
from moonpool.conductor.core.actions import AnnouncePlacement, CompleteRequest
from moonpool.conductor.core.events import Event, StopRequested, TokensArrived
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.decode_streams import NewTokens
from moonpool.conductor.instance_calls import InstanceCalls
from moonpool.conductor.output_queue import OutputQueue
from moonpool.conductor.sequence_subscription import SequenceSubscription
from moonpool.v1 import kv_pb2

from .fakes import decode, expected, prefill
from .logprobs import told
from .stack import WAIT_S, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
UNSPEAKABLE = -1
"""A token that the tokenizer cannot spell: it raises an unexpected exception."""


async def read(client: AsyncClient, request_id: str, tokens: list[int], first: asyncio.Event) -> None:
    async for event in client.stream(token_ids=PROMPT, sampling=GREEDY, request_id=request_id):
        tokens += event.token_ids
        if len(tokens) >= 4:
            first.set()


async def test_tokens_of_decode_that_cannot_be_told_end_their_request_alone() -> None:
    p, d = prefill(), decode(hold_at=4)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        answers: dict[str, list[int]] = {"doomed": [], "well": []}
        there = {name: asyncio.Event() for name in answers}
        tasks = {name: asyncio.create_task(read(s.client, name, answers[name], there[name])) for name in answers}
        for event in there.values():
            await event.wait()
        spec = d.reserved["doomed"].sequence
        d.outgoing[0].put_nowait(told(spec, 0, 4, [UNSPEAKABLE], kv_pb2.FINISH_REASON_UNSPECIFIED))
        with pytest.raises(Internal, match="cannot send tokens"):
            await tasks["doomed"]
        await d.until(lambda: d.cancelled == ["doomed"])
        d.go.set()
        await tasks["well"]
        assert answers["well"] == expected(len(PROMPT), 8)
        assert (d.streams, len(p.requests)) == (1, 2)
        await s.rest()


async def test_a_first_token_that_cannot_be_told_ends_its_request() -> None:
    p, d = prefill(first_token=UNSPEAKABLE), decode()
    async with stack(p, d) as s:
        with pytest.raises(Internal, match="cannot send tokens"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert len(p.requests) == 1
        await d.until(lambda: len(d.cancelled) == 1)
        await s.rest()


@pytest.mark.parametrize(
    ("order", "broken"), [(AnnouncePlacement, {"plan": None}), (CompleteRequest, {"finish": None})]
)
async def test_an_order_that_cannot_be_carried_out_ends_its_request_alone(order: Any, broken: dict[str, None]) -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        handle = s.servicer.core.handle

        def orders(now: float, event: Any, out: list[Any]) -> None:
            handle(now, event, out)
            out[:] = [
                replace(action, **broken) if isinstance(action, order) and action.request == 1 else action
                for action in out
            ]

        s.servicer.core.handle = orders  # type: ignore[method-assign]
        with pytest.raises(Internal, match="cannot serve this request"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(len(PROMPT), 8)
        assert d.streams == 1
        await s.rest()


async def test_a_core_that_fails_outside_a_request_ends_the_conductor() -> None:
    """As where a call ends: what the core knows is not certain any more."""

    async def conducts() -> None:
        async with stack(prefill(), decode()) as s:
            handle = s.servicer.core.handle

            def fails(now: float, event: Any, out: list[Any]) -> None:
                if isinstance(event, IoEnded):
                    raise KeyError("the core has a defect")
                handle(now, event, out)

            s.servicer.core.handle = fails  # type: ignore[method-assign]
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)

    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(conducts(), WAIT_S)
    assert ended.group_contains(Internal, match="the core has a defect")


async def test_a_client_hears_of_a_defect_that_keeps_the_core_from_ending_its_request() -> None:
    posted: list[Event] = []

    def post(event: Event) -> None:
        posted.append(event)
        raise KeyError("the core has a defect")

    def taken(*_: Any) -> int:
        return 1

    running = kv_pb2.FINISH_REASON_UNSPECIFIED
    stream: Any = SimpleNamespace(
        spec=SimpleNamespace(id="doomed", number=7),
        choices=[SimpleNamespace(index=0, finish=running)],
        finish=running,
        untold=0,
        add_tokens=taken,
        outgoing=OutputQueue(),
    )
    subscription = SequenceSubscription(5, "doomed", stream, post, lambda *_, **__: None, lambda _: None, lambda: 0.0)
    assert subscription.add_tokens(NewTokens(0, 1, [9]))
    arrived, stopped = posted
    assert isinstance(arrived, TokensArrived)
    assert isinstance(stopped, StopRequested)
    assert stopped.request == 7
    with pytest.raises(Internal):
        await stream.outgoing.next()


class Unbuildable:
    """A request whose message cannot be built."""

    def sequence_spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        raise ValueError(sequence)


@pytest.mark.parametrize("kind", ["reserve", "prefill"])
async def test_a_call_whose_message_cannot_be_built_ends(kind: str) -> None:
    posted: list[Event] = []
    nothing: Any = None
    calls = InstanceCalls(nothing, nothing, lambda _: None, posted.append, posted.append, 1.0)
    order: Any = SimpleNamespace(io=7, sequence="s", tbt_slo_s=0.0, starts_in_s=0.0)
    getattr(calls, kind)(order, Unbuildable())
    [ended] = posted
    assert isinstance(ended, IoEnded)
    assert (ended.io, ended.result) == (7, Failure(FailureKind.INTERNAL, "a call failed"))
    await calls.aclose()
