"""Several answers to one prompt, through a real conductor, with members that only speak the contract."""

import asyncio

from moonpool.base.sampling_params import SamplingParams

from .fakes import choice_token, decode, expected, prefill
from .stack import stack

PROMPT = list(range(30, 70))


async def test_each_answer_has_its_tokens_text_and_end() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=SamplingParams(max_tokens=5, n=3, seed=7))
        events = [event async for event in stream]
        result = stream.result
        assert result is not None
        wanted = [expected(len(PROMPT), 5, choice) for choice in range(3)]
        assert [choice.token_ids for choice in result.choices] == wanted
        assert (result.token_ids, result.text) == (result.choices[0].token_ids, result.choices[0].text)
        assert [choice.finish_reason for choice in result.choices] == ["length"] * 3
        assert result.usage.completion_tokens == 15
        for choice in range(3):
            mine = [event for event in events if event.choice == choice]
            assert [token for event in mine for token in event.token_ids] == wanted[choice]
            assert "".join(event.text for event in mine) == result.choices[choice].text
        await s.rest()
        assert (d.reserved, d.cancelled) == ({}, [])


async def test_first_tokens_may_be_all() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1, n=2))
        assert [choice.token_ids for choice in result.choices] == [[choice_token(40, 0)], [choice_token(40, 1)]]
        assert result.placement.decode == ""
        assert d.history == []
        await s.rest()


async def test_one_that_meets_a_stop_text_is_stopped_alone() -> None:
    p, d = prefill(), decode(hold_at=4)
    async with stack(p, d) as s:
        wanted = expected(len(PROMPT), 8, 1)
        text = s.checkpoint.tokenizer.decode(PROMPT + wanted[:3])[len(s.checkpoint.tokenizer.decode(PROMPT)) :]
        how = SamplingParams(max_tokens=5, n=2, stop=[text])
        asked = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=how, request_id="r"))
        await d.until(lambda: d.stopped == [("r", 1)])
        d.go.set()
        result = await asked
        first, second = result.choices
        assert (first.token_ids, first.finish_reason) == (expected(len(PROMPT), 5), "length")
        assert (second.token_ids, second.text, second.finish_reason) == (wanted[:3], "", "stop")
        await s.rest()


async def test_placed_anew_they_begin_again_and_the_client_sees_no_token_twice() -> None:
    p, d, other = prefill(), decode(fail_at=[3]), decode(1)
    async with stack(p, d, other) as s:
        how = SamplingParams(max_tokens=6, n=2)
        result = await s.client.generate(token_ids=PROMPT, sampling=how, request_id="r")
        assert [choice.token_ids for choice in result.choices] == [expected(40, 6, choice) for choice in range(2)]
        assert (d.history, other.history) == (["r"], ["r~1"])
        again = p.requests[1].sequence
        assert (len(again.token_ids) // 4, again.prompt_tokens) == (40, 40), "from the prompt on"
        await s.rest()


async def test_answers_that_differ_when_they_begin_again_fail() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    p, d, other = prefill(before=[*gates]), decode(fail_at=[3]), decode(1)
    gates[0].set()
    async with stack(p, d, other, retries=1) as s:
        asked = asyncio.create_task(
            s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=6, n=2), request_id="r")
        )
        await p.until(lambda: len(p.requests) == 2)
        p.first_token = 99
        gates[1].set()
        [failed] = await asyncio.gather(asked, return_exceptions=True)
        assert "not those that came before" in str(failed)
        await s.rest()
