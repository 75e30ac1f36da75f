"""Beam search at a decode instance. What may follow is a function of the KV: a wrong block would change it."""

from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.engine.decode.core.events import SearchRules
from moonpool.v1 import kv_pb2
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.engine.decode.core.plain_beams import plain_search
from tests.unit.fakes.engine import digest_after, most_likely
from tests.unit.instances import BLOCK, decoding, prompt, spec

WIDTH = 3


def asked(tokens: list[int], max_tokens: int, ends: list[int], n: int = WIDTH) -> kv_pb2.SequenceSpec:
    sequence = spec("a", tokens, max_tokens=max_tokens, ends=ends, n=n)
    sequence.sampling.MergeFrom(kv_pb2.Sampling(beam_width=WIDTH, length_penalty=0.5))
    return sequence


def following(tokens: list[int]) -> list[tuple[int, float]]:
    found = most_likely(digest_after(tokens))
    return list(zip(found.tokens, found.log_probabilities, strict=True))


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK])
@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 1}])
@pytest.mark.parametrize("n", [1, WIDTH])
async def test_the_best_hypotheses_are_told_at_the_end(length: int, flags: dict[str, Any], n: int) -> None:
    tokens, ends, longest = prompt(length), list(range(8, 24)), BLOCK + 3
    wanted = plain_search(tokens, WIDTH, longest, SearchRules(0.5, False), following, ends)[:n]
    async with decoding(**flags) as decode, conducting(decode) as conductor:
        target = await reserve(decode, asked(tokens, longest, ends, n))
        await transfer(decode, target, tokens)
        first = most_likely(digest_after(tokens), WIDTH + len(ends))
        await conductor.start("a", target, *first.tokens, scores=first.log_probabilities)
        await conductor.until(lambda: len(conductor.reasons) == n)
        for choice, (answer, score) in enumerate(wanted):
            name = f"a/{choice}" if choice else "a"
            assert (conductor.tokens[name], conductor.scores[name]) == (answer, score)
            ended = answer[-1] in ends
            assert conductor.reasons[name] == (kv_pb2.FINISH_REASON_STOP if ended else kv_pb2.FINISH_REASON_LENGTH)
        await decode.rest()


@pytest.mark.parametrize(
    ("tokens", "scores"), [((9, 11), (-1.0, -2.0)), ((9, 11, 13), (-1.0, -2.0)), ((9, 11, 13), ())]
)
async def test_too_few_candidates_fail_the_request(tokens: tuple[int, ...], scores: tuple[float, ...]) -> None:
    start = prompt(20)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, asked(start, 4, []))
        await conductor.start("a", target, *tokens, scores=scores)
        await conductor.until(lambda: "a" in conductor.failed)
        assert "3 beams" in conductor.failed["a"]
        await conductor.cancel("a", target)
        await decode.rest()


async def test_more_beams_than_places_in_a_step_are_refused() -> None:
    async with decoding(max_num_seqs=WIDTH - 1) as decode:
        with pytest.raises(InvalidRequest, match=r"sequence\.sampling\.beam_width"):
            await reserve(decode, asked(prompt(20), 4, []))


async def test_as_many_candidates_as_beams_are_enough() -> None:
    tokens = prompt(20)
    [(answer, score)] = plain_search(tokens, WIDTH, 4, SearchRules(0.5, False), following, [])[:1]
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, asked(tokens, 4, [], 1))
        await transfer(decode, target, tokens)
        first = most_likely(digest_after(tokens), WIDTH)
        await conductor.start("a", target, *first.tokens, scores=first.log_probabilities)
        await conductor.until(lambda: "a" in conductor.reasons or "a" in conductor.failed)
        assert conductor.failed == {}
        assert (conductor.tokens["a"], conductor.scores["a"]) == (answer, score)
        await decode.rest()
