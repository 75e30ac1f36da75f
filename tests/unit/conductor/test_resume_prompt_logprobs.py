"""Requests that want prompt log probabilities and lose their conductor: the client gets them once."""

import asyncio

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2 as pb

from .fakes import decode, expected, prefill
from .resuming import PROMPT, Call, request, two
from .stack import WAIT_S, stack

SCORED = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)


def right(scored: list[pb.PromptLogprobs]) -> bool:
    """Whether they came once, of the prompt's tokens but the first."""
    [answer] = scored
    assert list(answer.logprobs.logprobs) == pytest.approx([-token / 10 for token in PROMPT[1:]])
    return list(answer.token_ids) == PROMPT


async def test_who_has_them_goes_on_at_another_conductor_like_any_other() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, request(SCORED))
        await lost.read(3)
        assert right(lost.scored)
        again = Call(second, lost.resume(request(SCORED)))
        await d.until(lambda: len(d.resumed) == 1)
        d.go.set()
        await again.read()
        assert lost.tokens + again.tokens == expected(len(PROMPT), 8)
        assert again.scored == []
        assert len(p.requests) == 1, "it was placed once"


async def test_who_lacks_them_has_the_prompt_computed_again() -> None:
    """What ran before was computed without anybody to tell them to: it is not taken over."""
    p, d = prefill(before=[asyncio.Event()]), decode()
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, request(SCORED))
        await lost.step()
        await p.until(lambda: p.running == 1)
        again = Call(second, lost.resume(request(SCORED)))
        await again.read()
        assert again.tokens == expected(len(PROMPT), 8)
        assert right(again.scored)
        assert d.resumed == []
        assert [request.sequence.sampling.prompt_logprobs for request in p.requests] == [0, 0]
        assert all(request.sequence.sampling.HasField("prompt_logprobs") for request in p.requests)
        assert [placed.resume.sequence for placed in again.placed] == ["r~1.0"]
        lost.call.cancel()
        for each in (first, second):
            await each.rest()


@pytest.mark.parametrize("told", [False, True])
async def test_the_same_conductor_tells_them_again_to_a_client_that_lacks_them(told: bool) -> None:
    """What the earlier call was told may have been lost with its connection."""
    before = asyncio.Event()
    p, d = prefill(before=[before]), decode(hold_at=1)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        lost = Call(s, request(SCORED))
        await lost.step()
        message = lost.resume(request(SCORED))
        if told:
            before.set()
            await lost.read(1)
        again = Call(s, message)
        await lost.read()
        before.set()
        d.go.set()
        await again.read()
        assert again.tokens == expected(len(PROMPT), 8)
        assert right(again.scored)
        assert len(p.requests) == 1, "nothing is computed again"
        await s.rest()
