"""Decode instances in the role both: a client's requests, without any prefill instance."""

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded, Unavailable
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2, prefill_pb2

from .fakes import BLOCK_SIZE, both, decode, expected, no_room, prefill, store
from .stack import Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def keys(s: Stack) -> list[bytes]:
    return list(block_keys(chain_root(s.model().namespace, ""), PROMPT, BLOCK_SIZE))


async def test_one_instance_serves_and_explain_says_so() -> None:
    d = both(cached_tokens=16)
    async with stack(d) as s:
        assert (await s.client.cluster_state()).ready
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.token_ids == expected(len(PROMPT), 8)
        assert (result.placement.prefill, result.placement.decode) == ("decode-0", "decode-0")
        assert result.usage.cached_tokens == 16
        assert 0 < result.timing.ttft_s < result.timing.e2e_s
        [reserve], [start] = d.requests, d.starts
        assert reserve.computes_prompt
        assert not reserve.HasField("max_queue_s")
        assert (start.compute_prompt, list(start.sources), list(start.held_blocks), start.delay_s) == (True, [], [], 0)
        found = await s.client.explain(result.request_id)
        assert [candidate.instance for candidate in found.candidates] == ["decode-0"]
        await s.rest()
        assert (d.reserved, d.cancelled) == ({}, [])


@pytest.mark.parametrize("how", [{"max_tokens": 1}, {"max_tokens": 5, "n": 3}, {"max_tokens": 1, "n": 2}])
async def test_answers_of_any_number_and_length(how: dict[str, int]) -> None:
    async with stack(d := both()) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(temperature=0.0, **how))  # type: ignore[arg-type]
        wanted = [expected(len(PROMPT), how["max_tokens"], choice) for choice in range(how.get("n", 1))]
        assert [choice.token_ids for choice in result.choices] == wanted
        assert result.placement.decode == "decode-0"
        await s.rest()
        assert (d.reserved, d.cancelled) == ({}, [])


async def test_beams() -> None:
    async with stack(both()) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=5, beam_width=3, n=2))
        assert [choice.token_ids for choice in result.choices] == [expected(40, 5), expected(40, 4, 1)]
        await s.rest()


async def test_prompt_scores_and_embeddings() -> None:
    async with stack(both()) as s:
        scored = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
        result = await s.client.generate(token_ids=PROMPT, sampling=scored)
        assert len(result.prompt_logprobs) == len(PROMPT)
        embedded = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1, embedding=True))
        assert list(embedded.embedding) == pytest.approx([0.6, 0.8])
        await s.rest()


async def test_log_probabilities_come_with_all_tokens() -> None:
    async with stack(both()) as s:
        wanted = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
        result = await s.client.generate(token_ids=PROMPT, sampling=wanted)
        assert [found.logprob for found in result.logprobs] == pytest.approx(
            [-token / 10 for token in result.token_ids]
        )


@pytest.mark.parametrize("n", [1, 2])
async def test_after_a_failure_another_one_goes_on(n: int) -> None:
    first, second = both(0, fail_at=[6]), both(1, fail_at=[6])
    async with stack(first, second) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=10, n=n, seed=1))
        for choice in range(n):
            assert result.choices[choice].token_ids == expected(len(PROMPT), 10, choice)
        assert len({placement.decode for placement in result.placements}) == 2
        again = second if second.starts[0].request_id.endswith("~1") else first
        [reserve] = again.requests[:1]
        if n == 1:  # the answer so far is computed with the prompt
            assert len(reserve.sequence.token_ids) // 4 == len(PROMPT) + 6
        else:
            [start] = again.starts[:1]
            assert list(start.known_token_ids) == expected(len(PROMPT), 6)[1:]
        await s.rest()


async def test_kvstores_get_blocks_and_a_prefix_is_told_where_it_is() -> None:
    d, kept = both(), store()
    async with stack(d, kept) as s:
        kept.store(keys(s))
        await s.until(lambda: s.servicer.core.cluster.index.held("kvstore-0") == 2)
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        [reserve], [start] = d.requests, d.starts
        assert reserve.write_back.id == "kvstore-0"
        assert list(start.held_blocks) == [2]
        assert [(source.instance.id, source.blocks) for source in start.sources] in ([], [("kvstore-0", 2)])


async def test_what_was_not_there_is_forgotten() -> None:
    d, kept = both(), store()
    async with stack(d, kept) as s:
        kept.store(keys(s))
        index = s.servicer.core.cluster.index
        await s.until(lambda: index.held("kvstore-0") == 2)
        d.misses = [prefill_pb2.StoreMiss(store=kept.instance, block=1)]
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert not index.holds("kvstore-0", keys(s)[1])


async def test_a_full_one_is_passed_over_and_a_stale_one_too() -> None:
    stale = Overloaded("the prompts here take long", reason="stale", retry_after_s=0.0)
    first, second = both(0, refusals=[no_room(), stale]), both(1, refusals=[])
    async with stack(first, second) as s:
        for _ in range(4):
            result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
            assert result.token_ids == expected(len(PROMPT), 8)
        assert not first.refusals
        await s.rest()


async def test_a_prompt_of_prefill_may_be_answered_there() -> None:
    busy = conductor_pb2.LoadReport(drain_s=1000.0, queued_tokens=1000)
    async with stack(prefill(), d := both(load=busy)) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.placement.prefill, result.placement.decode) == ("prefill-0", "decode-0")
        assert not d.requests[0].computes_prompt
        assert not d.starts


async def test_plain_decode_never_sees_the_new_fields() -> None:
    async with stack(prefill(), d := decode()) as s:
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        [asked] = d.requests
        assert not asked.computes_prompt
        assert not asked.HasField("max_queue_s")


async def test_plain_decode_alone_is_no_cluster() -> None:
    async with stack(decode()) as s:
        assert not (await s.client.cluster_state()).ready
        assert s.cluster.registry.missing == ["prefill"]
        with pytest.raises(Unavailable, match="missing: prefill"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)


async def test_it_keeps_its_role() -> None:
    async with stack(both(), both(1)) as s:
        with pytest.raises(InvalidRequest, match="has both roles"):
            await s.client.change_role("decode-0", "prefill")
