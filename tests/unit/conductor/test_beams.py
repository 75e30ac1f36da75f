"""A beam search through a real conductor, with members that only speak the contract."""

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams

from .fakes import decode, expected, prefill
from .stack import stack

PROMPT = list(range(30, 70))


async def test_hypotheses_come_at_the_end_the_best_first() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=SamplingParams(max_tokens=5, beam_width=3, n=2))
        events = [event async for event in stream]
        result = stream.result
        assert result is not None
        assert [(event.choice, event.position, len(event.token_ids)) for event in events] == [(0, 0, 5), (1, 0, 4)]
        assert [choice.token_ids for choice in result.choices] == [expected(40, 5), expected(40, 4, 1)]
        assert [choice.score for choice in result.choices] == [-0.5, -1.5]
        assert [choice.finish_reason for choice in result.choices] == ["length", "stop"]
        assert (result.usage.completion_tokens, result.seed) == (9, 0)
        assert not p.requests[0].sequence.sampling.HasField("seed")
        await s.rest()
        assert (d.reserved, d.cancelled) == ({}, [])


@pytest.mark.parametrize("width", [1, 3])
async def test_one_token_needs_a_decode_instance_too(width: int) -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1, beam_width=width))
        assert (result.token_ids, result.choices[0].score) == (expected(40, 1), -0.5)
        assert result.placement.decode == "decode-0"
        await s.rest()


@pytest.mark.parametrize("width", [1, 3])
async def test_placed_anew_they_begin_again_from_the_prompt(width: int) -> None:
    p, d, other = prefill(), decode(fail_at=[1]), decode(1)
    async with stack(p, d, other) as s:
        how = SamplingParams(max_tokens=6, beam_width=width)
        result = await s.client.generate(token_ids=PROMPT, sampling=how, request_id="r")
        assert (result.token_ids, result.choices[0].score) == (expected(40, 6), -0.5)
        assert (d.history, other.history) == (["r"], ["r~1"])
        again = p.requests[1].sequence
        assert (len(again.token_ids) // 4, again.prompt_tokens) == (40, 40), "from the prompt on"
        await s.rest()


async def test_what_beams_cannot_have_is_refused() -> None:
    async with stack(prefill(), decode()) as s:
        with pytest.raises(InvalidRequest, match=r"sampling\.top_k"):
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(beam_width=2, top_k=5))
        how = SamplingParams(beam_width=16, ignore_eos=True, stop_token_ids=range(1, 250))
        with pytest.raises(InvalidRequest, match=r"sampling\.beam_width"):
            await s.client.generate(token_ids=PROMPT, sampling=how)
