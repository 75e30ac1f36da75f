"""Requests through a real conductor, with members that only speak the contract."""

import asyncio

import pytest

from moonpool.base.errors import Overloaded, TransferFailed
from moonpool.base.kv.keys import block_keys, chain_root, unpack_keys
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import NotFound, Unavailable

from .fakes import BLOCK_SIZE, decode, expected, prefill
from .stack import WAIT_S, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_happy_path() -> None:
    p, d = prefill(cached_tokens=16), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r1", tenant="t")
        assert result.token_ids == expected(len(PROMPT), 8)
        assert (
            result.text
            == s.checkpoint.tokenizer.decode(PROMPT + result.token_ids)[len(s.checkpoint.tokenizer.decode(PROMPT)) :]
        )
        assert result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (40, 16, 8)
        assert (result.placement.prefill, result.placement.decode) == ("prefill-0", "decode-0")
        assert result.timing.ttft_s > 0
        assert result.timing.e2e_s >= result.timing.ttft_s
        await s.rest()
        assert d.reserved == {}
        assert d.cancelled == []
        assert p.running == 0

        spec = p.requests[0].sequence
        keys = block_keys(chain_root(s.model().namespace, "t"), PROMPT, BLOCK_SIZE)
        assert unpack_keys(spec.block_keys) == keys
        assert len(keys) == 2
        assert (spec.prompt_tokens, spec.request_id, list(spec.end_token_ids)) == (40, "r1", [1])
        assert spec.sampling.HasField("seed")
        assert spec.sampling.temperature == 0.0
        assert p.requests[0].target.decode == d.instance

        explanation = await s.client.explain("r1")
        assert explanation.placement is not None
        assert explanation.placement.prefill == "prefill-0"
        assert explanation.measured_ttft_s > 0
        assert explanation.transport == "tcp"
        assert [candidate.instance for candidate in explanation.candidates] == ["prefill-0"]
        with pytest.raises(NotFound):
            await s.client.explain("nobody")


async def test_text_and_chat_prompts_are_tokenised_with_the_checkpoints_tokenizer() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(prompt="def add(a, b):", sampling=GREEDY)
        assert result.usage.prompt_tokens == len(s.checkpoint.tokenizer.encode("def add(a, b):"))
        if s.checkpoint.tokenizer.chat_template:
            result = await s.client.generate(messages=[{"role": "user", "content": "hello"}], sampling=GREEDY)
            tokens = s.checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
            assert result.usage.prompt_tokens == len(tokens)


async def test_the_first_token_waits_for_no_transfer() -> None:
    transfer = asyncio.Event()
    p, d = prefill(after=[transfer]), decode(hold_at=1)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = aiter(stream)
        first = await anext(events)
        assert (first.position, list(first.token_ids)) == (0, expected(40, 1))
        transfer.set()
        d.go.set()
        tokens = [token async for event in events for token in event.token_ids]
        assert tokens == expected(40, 8)[1:]
        await s.rest()


async def test_decode_gathers_the_tokens_of_answers_that_are_read_at_their_end() -> None:
    """But not where stop strings are watched for."""
    p, d = prefill(), decode()
    watched = SamplingParams(max_tokens=8, temperature=0.0, stop=["never said"])
    async with stack(p, d) as s:
        whole = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="whole")
        await s.client.generate(token_ids=PROMPT, sampling=watched, request_id="watched")
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY, request_id="stream")
        assert [token async for event in stream for token in event.token_ids] == whole.token_ids
        assert stream.result is not None
        assert stream.result.token_ids == expected(len(PROMPT), 8)
        assert d.gathered == ["whole"]
        await s.rest()


async def test_max_tokens_1_needs_no_decode() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
        assert result.token_ids == expected(40, 1)
        assert (result.finish_reason, result.placement.decode) == ("length", "")
        assert d.history == []
        assert not p.requests[0].HasField("target")
        await s.rest()


async def test_an_end_token_first_gives_the_promise_back() -> None:
    p, d = prefill(first_token=1), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.token_ids, result.text, result.finish_reason) == ([1], "", "stop")
        assert result.placement.decode == ""
        await s.rest()
        await d.until(lambda: d.reserved == {})
        assert len(d.cancelled) == 1


async def test_an_ignored_end_token_goes_on() -> None:
    p, d = prefill(), decode()
    second = expected(40, 2)[1]
    async with stack(p, d) as s:
        params = SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=[second], ignore_eos=True)
        result = await s.client.generate(token_ids=PROMPT, sampling=params)
        assert (result.token_ids, result.finish_reason) == (expected(40, 2), "stop")
        assert list(p.requests[0].sequence.end_token_ids) == [second]
        assert d.cancelled == []


async def test_a_stop_text_cuts_the_text_and_cancels_decode() -> None:
    p, d = prefill(), decode(hold_at=6)
    async with stack(p, d) as s:
        tokenizer = s.checkpoint.tokenizer
        whole = tokenizer.decode(PROMPT + expected(40, 5))[len(tokenizer.decode(PROMPT)) :]
        stop = whole[2:6]
        params = SamplingParams(max_tokens=50, temperature=0.0, stop=stop)
        result = await s.client.generate(token_ids=PROMPT, sampling=params)
        assert result.finish_reason == "stop"
        assert result.text == whole[: whole.index(stop)]
        assert result.token_ids == expected(40, len(result.token_ids))
        await d.until(lambda: d.reserved == {})
        await s.rest()


@pytest.mark.parametrize("failing", [1, 2, 5])
async def test_a_failed_sequence_continues_exactly_at_another_instance(failing: int) -> None:
    engines = prefill(0), prefill(1), decode(0, fail_at=[failing]), decode(1)
    async with stack(*engines) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = [event async for event in stream]
        assert stream.result is not None
        assert stream.result.token_ids == expected(40, 8)
        assert "".join(event.text for event in events) == stream.result.text
        assert [placement.decode for placement in stream.result.placements] == ["decode-0", "decode-1"]
        assert stream.result.usage.prompt_tokens == 40
        again = next(request for p in engines[:2] for request in p.requests if "~1" in request.sequence.request_id)
        assert again.sequence.prompt_tokens == 40
        assert len(again.sequence.token_ids) == 4 * (40 + failing)
        assert len(again.sequence.block_keys) == 32 * ((40 + failing) // BLOCK_SIZE)
        await s.rest()
        assert engines[2].reserved == {}
        assert engines[3].reserved == {}


async def test_a_transfer_that_fails_after_the_first_token_is_repeated() -> None:
    p, d = prefill(after=[TransferFailed("a slice is missing")]), decode(hold_at=1)
    d.progress = d.go.set  # once the failed attempt is cancelled, sequences go on
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(40, 8)
        assert len(result.placements) == 2
        await s.rest()
        assert d.reserved == {}


async def test_a_broken_steps_stream_is_opened_again() -> None:
    p, d = prefill(), decode(break_at=[3])
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(40, 8)
        assert d.streams == 2
        await s.rest()


async def test_prefill_that_fails_before_its_token_is_replaced() -> None:
    engines = prefill(0, before=[Unavailable("gone")]), prefill(1), decode()
    async with stack(*engines) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(40, 8)
        assert result.placement.prefill == "prefill-1"
        await s.rest()


async def test_after_the_last_retry_the_error_is_told() -> None:
    p, d = prefill(before=[Unavailable(str(n)) for n in range(2)]), decode()
    async with stack(p, d, retries=1) as s:
        with pytest.raises(Unavailable, match="1"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        await s.rest()
        await d.until(lambda: d.reserved == {})


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels_everywhere(where: str) -> None:
    p, d = prefill(before=[asyncio.Event()] if where == "prefill" else []), decode(hold_at=2)
    async with stack(p, d) as s:
        task = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=GREEDY))
        if where == "prefill":
            await p.until(lambda: p.running == 1)
        else:
            await d.until(lambda: d.streams == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await s.rest()
        await d.until(lambda: not d.reserved)
        await p.until(lambda: p.running == 0)
        assert len(d.cancelled) == 1


async def test_a_tenant_pays_for_the_tokens_that_a_client_had_when_it_left() -> None:
    """The core is told of tokens now and then only; a client that leaves before must not have them for nothing."""
    p, d = prefill(), decode(hold_at=60)
    async with stack(p, d, tenant_budgets={"ann": {"tpm": len(PROMPT) + 50}}) as s:
        sampling = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
        had = 0
        async for event in s.client.stream(token_ids=PROMPT, sampling=sampling, tenant="ann"):
            had += len(event.token_ids)
            if had >= 60:
                break
        await s.rest()
        with pytest.raises(Overloaded, match="tokens a minute"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, tenant="ann")


async def test_leaving_the_iteration_cancels() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with stack(p, d) as s:
        async for _ in s.client.stream(token_ids=PROMPT, sampling=GREEDY):
            break
        await s.rest()
        await d.until(lambda: not d.reserved)


async def test_the_drawn_seed_is_told_and_kept_over_attempts() -> None:
    p, d = prefill(), decode(fail_at=[2])
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=4))
        assert {request.sequence.sampling.seed for request in p.requests} == {result.seed}
        assert len(p.requests) == 2


async def test_a_draining_conductor_ends_what_runs_as_cancelled() -> None:
    p, d = prefill(), decode(hold_at=2)
    async with stack(p, d) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = aiter(stream)
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += (await anext(events)).token_ids
        draining = asyncio.create_task(s.servicer.drain(0.01))
        async for _ in events:
            pass
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.token_ids == expected(40, 2)
        await draining
        with pytest.raises(Unavailable, match="draining"):
            await s.client.generate(token_ids=PROMPT)
