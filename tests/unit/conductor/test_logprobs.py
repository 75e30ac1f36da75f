"""Log probabilities through a conductor: each token's comes with it, once, also if the request is placed again."""

import pytest

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds

from .fakes import BLOCK_SIZE, decode, expected, prefill, store
from .stack import stack

PROMPT = list(range(30, 70))


@pytest.mark.parametrize("failing", [1, 3])
@pytest.mark.parametrize("answers", [1, 2])
async def test_each_token_has_its_own_whatever_fails(answers: int, failing: int) -> None:
    p, d, other = prefill(), decode(fail_at=[failing]), decode(1)
    async with stack(p, d, other) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=SamplingParams(max_tokens=6, n=answers, logprobs=0))
        events = [event async for event in stream]
        result = stream.result
        assert result is not None
        for choice in result.choices:
            assert [logprob.token_id for logprob in choice.logprobs] == choice.token_ids
            assert [logprob.logprob for logprob in choice.logprobs] == pytest.approx(
                [-token_id / 10 for token_id in choice.token_ids]
            )
        assert result.token_ids == expected(len(PROMPT), 6)
        assert all(tuple(logprob.token_id for logprob in event.logprobs) == event.token_ids for event in events)
        assert len(result.placements) == 2
        await s.rest()


async def test_those_of_a_prompt_come_once_and_what_is_cached_of_it_is_not_looked_for() -> None:
    p, d, other, k = prefill(), decode(fail_at=[2]), decode(1), store()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, other, k) as s:
        index = s.servicer.core.cluster.index
        k.store(list(block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)))
        await s.until(lambda: index.held("kvstore-0") == 2)
        how = SamplingParams(max_tokens=4, prompt_logprobs=1)
        result = await s.client.generate(token_ids=PROMPT, sampling=how)
        assert result.prompt_logprobs[0] is None
        found = [prompt_logprob for prompt_logprob in result.prompt_logprobs if prompt_logprob is not None]
        assert [token.token_id for token in found] == PROMPT[1:]
        assert [token.logprob for token in found] == pytest.approx([-token / 10 for token in PROMPT[1:]])
        assert result.token_ids == expected(len(PROMPT), 4)
        first, again = p.requests
        assert (first.sequence.sampling.prompt_logprobs, first.HasField("source")) == (1, False)
        assert not again.sequence.sampling.HasField("prompt_logprobs"), "placed anew, they are known"
        assert again.HasField("source")
        await s.rest()


async def test_the_embedding_of_a_prompt_comes_once_and_uses_what_is_cached() -> None:
    p, d, other, k = prefill(), decode(fail_at=[2]), decode(1), store()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d, other, k) as s:
        index = s.servicer.core.cluster.index
        k.store(list(block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)))
        await s.until(lambda: index.held("kvstore-0") == 2)
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=4, embedding=True))
        assert result.embedding == pytest.approx((0.6, 0.8))
        assert result.token_ids == expected(len(PROMPT), 4)
        first, again = p.requests
        assert (first.sequence.sampling.embedding, first.HasField("source")) == (True, True)
        assert not again.sequence.sampling.embedding, "placed anew, the embedding is known"
        await s.rest()


async def test_members_that_do_not_tell_what_is_wanted_are_not_believed() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, retries=0) as s:
        p.silent = True
        with pytest.raises(Unavailable, match="the log probabilities are not those of 1 tokens"):
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=3, logprobs=1))
        with pytest.raises(Unavailable, match="0 log probabilities came for a prompt of 40 tokens"):
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=3, prompt_logprobs=1))
        with pytest.raises(Unavailable, match="0 bytes came for the prompt's embedding"):
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=3, embedding=True))


async def test_bad_words_reach_the_engines_as_tokens_with_and_without_a_space_before_them() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        how = SamplingParams(max_tokens=2, bad_words=["return", "x y"])
        await s.client.generate(token_ids=PROMPT, sampling=how)
        encode = s.checkpoint.tokenizer.encode
        runs = [list(run.token_ids) for run in p.requests[0].sequence.bad_tokens]
        assert runs == [list(run.token_ids) for run in d.requests[0].sequence.bad_tokens]
        assert encode("return", False) in runs
        assert encode(" return", False) in runs
        assert encode("x y", False) in runs
        await s.rest()


async def test_a_budget_of_thinking_reaches_the_engines_as_tokens() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        encode = s.checkpoint.tokenizer.encode
        begin, end = "<think>", "</think>"
        for prompt, is_open in (("hello", False), ("hello <think>\n", True), ("<think> a", False)):
            p.requests.clear()
            how = SamplingParams(max_tokens=2, thinking_budget=0 if is_open else 5, thinking_marks=[begin, end])
            await s.client.generate(token_ids=encode(prompt, False), sampling=how)
            found = p.requests[0].sequence.thinking
            assert list(found.begin_token_ids) == encode(begin, False)
            assert list(found.end_token_ids) == encode(end, False)
            assert (found.tokens, found.is_open) == (how.thinking_budget, is_open)
        for wrong in (
            {"thinking_budget": 3},
            {"thinking_marks": [begin, end]},
            {"thinking_budget": 3, "thinking_marks": ["", end]},
        ):
            with pytest.raises(InvalidRequest, match="thinking_marks"):
                await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(**wrong))
        await s.rest()
