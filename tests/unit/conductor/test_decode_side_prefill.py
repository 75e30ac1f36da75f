"""A decode instance computes the rest of a prompt itself: what the client and `explain` get."""

from typing import Any

import pytest

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds

from .fakes import BLOCK_SIZE, ScriptedDecode, decode, expected, prefill
from .stack import Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SPEEDS = speeds_to_proto(Speeds(prefill_per_token_s=1.0, decode_base_s=1e-6))


def members(**settings: Any) -> tuple[Any, ScriptedDecode]:
    """A prefill and a decode instance of the same speed."""
    engines = prefill(), decode(**settings)
    for engine in engines:
        engine.load.speed.CopyFrom(SPEEDS)
    return engines


async def hold(s: Stack, d: ScriptedDecode) -> None:
    """The decode instance tells that it holds the prompt's two full blocks."""
    d.store(list(block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE)))
    await s.until(lambda: s.servicer.core.cluster.index.held("decode-0") == 2)


async def test_the_answer_comes_from_decode_alone_and_explain_says_so() -> None:
    p, d = members(held_blocks=2)
    async with stack(p, d, decode_prompt_tokens=32) as s:
        await hold(s, d)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(len(PROMPT), 8)
        assert (result.placement.prefill, result.placement.decode) == ("decode-0", "decode-0")
        assert (result.usage.cached_tokens, len(p.requests), len(d.computed)) == (2 * BLOCK_SIZE, 0, 1)
        assert 0 < result.timing.ttft_s < result.timing.e2e_s
        found = await s.client.explain(result.request_id)
        assert found.placement is not None
        assert [(candidate.instance, candidate.used_blocks, candidate.prefill_s) for candidate in found.candidates] == [
            ("decode-0", 2, 8.0),
            ("prefill-0", 2, 8.0),
        ]
        assert found.measured_ttft_s > 0
        await s.rest()


async def test_one_that_fails_on_the_way_is_continued_elsewhere_without_a_gap() -> None:
    p, d = members(held_blocks=2, fail_at=[3])
    async with stack(p, d, decode(1), decode_prompt_tokens=32) as s:
        await hold(s, d)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(len(PROMPT), 8)
        assert [placement.prefill for placement in result.placements] == ["decode-0", "prefill-0"]
        await s.rest()


async def test_it_may_be_off() -> None:
    p, d = members(held_blocks=2)
    async with stack(p, d, decode_prompt_tokens=0) as s:
        await hold(s, d)
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.placement.prefill, d.computed) == ("prefill-0", [])


async def test_log_probabilities_come_with_all_its_tokens() -> None:
    p, d = members(held_blocks=2)
    async with stack(p, d, decode_prompt_tokens=32) as s:
        await hold(s, d)
        wanted = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
        result = await s.client.generate(token_ids=PROMPT, sampling=wanted)
        assert (len(d.computed), result.token_ids) == (1, expected(len(PROMPT), 8))
        assert [logprob.logprob for logprob in result.logprobs] == pytest.approx(
            [-token / 10 for token in result.token_ids]
        )


async def test_a_prompt_whose_own_are_wanted_is_for_prefill_as_all_of_it_is_computed() -> None:
    p, d = members(held_blocks=2)
    async with stack(p, d, decode_prompt_tokens=32) as s:
        await hold(s, d)
        wanted = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
        result = await s.client.generate(token_ids=PROMPT, sampling=wanted)
        assert (d.computed, result.placement.prefill) == ([], "prefill-0")
