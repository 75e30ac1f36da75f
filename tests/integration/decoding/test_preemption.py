"""Answers do not depend on preemption: a decode instance that takes every sequence's KV away, again and again.

Each way of giving blocks up, in every step, at each place in a block, and in a pool too small for all.
"""

import asyncio
import dataclasses
import json
import re
from dataclasses import dataclass

import jsonschema
import pytest

from moonpool.base.sampling_params import SamplingParams, stream_seed
from moonpool.client import AsyncClient, GenerateResult
from tests.integration.conftest import BLOCK, tokens
from tests.integration.decoding.conftest import DecodeWith
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack

POOL = 26
ANSWER = 3 * BLOCK + 5
FORMATTED: dict[str, list[list[list[int]]]] = {}
"""Structured answers of the way that came first."""


@dataclass(frozen=True)
class Served:
    """A running stack whose decode instance preempts."""

    way: str
    stack: CheckedStack
    reference: Reference

    async def _all(self, asked: list[tuple[list[int], SamplingParams]]) -> list[GenerateResult]:
        async with AsyncClient(self.stack.address) as client:
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=how) for prompt, how in asked))

    def ask(
        self, prompts: list[list[int]], hows: list[SamplingParams]
    ) -> list[tuple[list[int], SamplingParams, GenerateResult]]:
        """The answers to prompts, all at once."""
        asked = list(zip(prompts, hows, strict=True))
        return [(*pair, result) for pair, result in zip(asked, asyncio.run(self._all(asked)), strict=True)]

    def check(self, prompts: list[list[int]], answer: int) -> None:
        """Greedy and sampled answers to the prompts, all at once, are the reference's."""
        hows = [
            SamplingParams(max_tokens=answer, temperature=float(n % 2), seed=n, ignore_eos=True)
            for n in range(len(prompts))
        ]
        for prompt, how, result in zip(
            prompts, hows, asyncio.run(self._all(list(zip(prompts, hows, strict=True)))), strict=True
        ):
            assert len(result.token_ids) == answer
            if how.temperature:
                assert max(self.reference.misses(prompt, result.token_ids, how.seed or 0)) <= GAP_TOLERANCE
            else:
                self.reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)

    def check_several(self, prompt: list[int], how: SamplingParams) -> None:
        """Each of several answers is the reference's for its seed."""
        [result] = asyncio.run(self._all([(prompt, dataclasses.replace(how, ignore_eos=True))]))
        assert len(result.choices) == how.n
        for index, choice in enumerate(result.choices):
            assert len(choice.token_ids) == how.max_tokens
            seed = stream_seed(how.seed or 0, index)
            assert max(self.reference.misses(prompt, choice.token_ids, seed)) <= GAP_TOLERANCE


PREEMPTING = (
    *("--speculative", "off"),  # a step is a token, so each token is a place of preemption
    *("--set", "preempt_every=1", "--set", "assumed_answer_tokens=4"),
    *("--set", "chunked_prefill_size=40", "--set", f"blocks={POOL}"),
)
WAYS = {
    "recompute": ["--set", "preemption=recompute"],
    "swap": ["--set", "preemption=swap"],
    "swap on a staged device": ["--set", "preemption=swap", "--device", "staged:7"],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=[pytest.mark.slow] if way == "swap" else []) for way in WAYS],
)
def served(request: pytest.FixtureRequest, decode_with: DecodeWith, reference: Reference) -> Served:
    """The stack with a decode instance that preempts this way."""
    return Served(request.param, decode_with(*PREEMPTING, *WAYS[request.param]), reference)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_alone(served: Served, length: int) -> None:
    """Preempted after every token, so at each border of a block."""
    before = served.stack.gauge("decode-", "preemptions_total")
    served.check([tokens(length, f"{served.way} {length}")], BLOCK + 3)
    assert served.stack.gauge("decode-", "preemptions_total") - before >= BLOCK


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_several_answers(served: Served, length: int) -> None:
    """A group is preempted whole after every token, so at each border of a block; each answer is that of its seed."""
    prompt, before = (
        tokens(length, f"{served.way} several {length}"),
        served.stack.gauge("decode-", "preemptions_total"),
    )
    served.check_several(prompt, SamplingParams(max_tokens=BLOCK + 3, temperature=1.0, seed=2**64 - 2, n=4))
    assert served.stack.gauge("decode-", "preemptions_total") - before >= BLOCK


def test_in_company_and_too_many(served: Served) -> None:
    """Eight sequences grow to twice the pool."""
    prompts = [tokens(5 + 6 * number, f"{served.way} company {number}") for number in range(8)]
    assert sum(-(-(len(prompt) + ANSWER) // BLOCK) for prompt in prompts) > 1.5 * POOL
    served.check(prompts, ANSWER)
    swaps = served.stack.gauge("decode-", "swaps_total")
    assert (swaps > 0) == served.way.startswith("swap")


def test_all_that_sampling_looks_at_is_kept(served: Served) -> None:
    """Penalties' counts, seeds, bans and log probabilities, of one answer and of several, preempted in every step."""
    prompts = [tokens(3 + BLOCK * number, f"{served.way} looks {number}") for number in range(2)]
    several = SamplingParams(max_tokens=BLOCK + 2, seed=5, n=2, ignore_eos=True, logprobs=3, frequency_penalty=0.8)
    alone = SamplingParams(
        max_tokens=BLOCK + 2, seed=6, ignore_eos=True, logprobs=0, presence_penalty=1.2, repetition_penalty=1.7,
        temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, logit_bias={9: 2.0}, min_tokens=5, stop_token_ids=[10],
    )  # fmt: skip
    for prompt, how, result in served.ask(prompts, [several, alone]):
        for index, choice in enumerate(result.choices):
            assert choice.token_ids == served.reference.drawn(prompt, choice.token_ids, how, index)
            assert [logprob.token_id for logprob in choice.logprobs] == choice.token_ids
            served.reference.assert_logprobs(prompt, choice.logprobs, how.logprobs or 0)


def test_log_probabilities_of_a_prompt(served: Served) -> None:
    """A prompt that is cached is computed all the same, in several chunks; its KV is then there for others."""
    prompt, how = tokens(5 * BLOCK + 3, f"{served.way} scored"), SamplingParams(max_tokens=3, temperature=0.0)
    [(_, _, plain)] = served.ask([prompt], [how])
    assert not plain.prompt_logprobs
    [(_, _, scored)] = served.ask([prompt], [dataclasses.replace(how, prompt_logprobs=2, n=2)])
    assert scored.usage.cached_tokens == 0
    assert scored.prompt_logprobs[0] is None
    found = [prompt_logprob for prompt_logprob in scored.prompt_logprobs if prompt_logprob is not None]
    assert [each.token_id for each in found] == prompt[1:]
    served.reference.assert_logprobs(prompt[:1], found, 2)
    assert [choice.token_ids for choice in scored.choices] == [plain.token_ids] * 2
    [(_, _, again)] = served.ask([prompt], [how])
    assert (again.token_ids, again.usage.cached_tokens) == (plain.token_ids, 5 * BLOCK)


def test_answers_of_a_format(served: Served) -> None:
    """The parsers behind structured answers come back with their sequences: each way gives the same ones, all valid."""
    schema = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "kind": {"enum": ["x", "yy"]},
            "n": {"type": "integer", "maximum": 99},
        },
        "required": ["ok", "kind", "n"],
        "additionalProperties": False,
    }
    text = json.dumps(schema)
    drawn = SamplingParams(max_tokens=150, seed=3, n=2, response_format="json_schema", grammar=text)
    greedy = dataclasses.replace(drawn, temperature=0.0, n=1, logprobs=1)
    pattern = SamplingParams(max_tokens=20, seed=4, response_format="regex", grammar="(ab|ba){2,4}")
    results = [result for *_, result in served.ask([tokens(40, "format")] * 3, [drawn, greedy, pattern])]
    for result in results[:2]:
        for choice in result.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), schema)
    assert re.fullmatch("(ab|ba){2,4}", results[2].text)
    served.reference.assert_logprobs(tokens(40, "format"), results[1].logprobs, 1)
    answers = [[choice.token_ids for choice in result.choices] for result in results]
    assert FORMATTED.setdefault("answers", answers) == answers
