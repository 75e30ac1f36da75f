"""What is wrong with a request is named, before any engine hears of it."""

import pytest

from moonpool.base.checkpoint import DefaultSampling
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.checkpoint.pooling import Pooling
from moonpool.base.contracts import sampling_from_proto
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import InvalidRequest, Slo

from .fakes import decode, prefill
from .stack import stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5000]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5] * 512}, "token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": "a b c d " * 1000}, "prompt"),
        ({"messages": [{"role": "user", "content": "a b c d " * 1000}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 600}, "messages"),
        ({"model": "other"}, "model"),
        ({"tenant": "x" * 300}, "tenant"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"request_id": "a~b"}, "request_id"),
        ({"slo": Slo(ttft_s=0.0)}, "slo.ttft_s"),
        ({"sampling": SamplingParams(max_tokens=0)}, "sampling.max_tokens"),
        ({"sampling": SamplingParams(max_tokens=4, min_tokens=5)}, "sampling.min_tokens"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "sampling.temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": SamplingParams(top_k=-1)}, "sampling.top_k"),
        ({"sampling": SamplingParams(min_p=2.0)}, "sampling.min_p"),
        ({"sampling": SamplingParams(presence_penalty=3.0)}, "sampling.presence_penalty"),
        ({"sampling": SamplingParams(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
        ({"sampling": SamplingParams(stop=[""])}, "sampling.stop"),
        ({"sampling": SamplingParams(stop_token_ids=[9999])}, "sampling.stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={9999: 1.0})}, "sampling.logit_bias"),
        ({"sampling": SamplingParams(n=65)}, "sampling.n"),
        ({"sampling": SamplingParams(logprobs=21)}, "sampling.logprobs"),
        ({"sampling": SamplingParams(prompt_logprobs=-1)}, "sampling.prompt_logprobs"),
        ({"sampling": SamplingParams(bad_words=[""])}, "sampling.bad_words"),
        ({"sampling": SamplingParams(response_format="regex", grammar="([")}, "sampling.grammar"),
    ],
)
async def test_what_is_wrong_is_named(given: dict[str, object], field: str) -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        prompt = {} if {"prompt", "token_ids", "messages"} & set(given) else {"token_ids": PROMPT}
        with pytest.raises(InvalidRequest) as caught:
            await s.client.generate(**{**prompt, **given})  # type: ignore[arg-type]
        assert caught.value.field == field
        await s.rest()


async def test_max_tokens_is_cut_to_the_models_length() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=[5] * 509, sampling=SamplingParams(max_tokens=100))
        assert (len(result.token_ids), result.finish_reason) == (3, "length")


async def test_what_a_request_does_not_say_is_what_the_checkpoint_suggests() -> None:
    suggested = DefaultSampling(temperature=0.25, top_p=0.75, top_k=20, repetition_penalty=1.5)
    p, d = prefill(), decode()
    async with stack(p, d, suggested=suggested) as s:
        await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
        await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1, temperature=0.0, top_k=0))
    unsaid, said = (sampling_from_proto(request.sequence.sampling) for request in p.requests)
    assert (unsaid.temperature, unsaid.top_p, unsaid.top_k, unsaid.repetition_penalty) == (0.25, 0.75, 20, 1.5)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (0.0, 0.75, 0, 1.5)
    p, d = prefill(), decode()
    async with stack(p, d, suggested=suggested, generation_config="none") as s:
        await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
    [neutral] = (sampling_from_proto(request.sequence.sampling) for request in p.requests)
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.repetition_penalty) == (1.0, 1.0, 0, 1.0)


async def test_a_model_that_classifies_writes_no_answers() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, pooling=Pooling("classify", "last", labels=("good",))) as s:
        with pytest.raises(InvalidRequest, match="classifies texts") as caught:
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
        assert caught.value.field == "sampling.embedding"
    assert p.requests == []


async def test_what_the_checkpoint_says_of_every_answer_holds() -> None:
    rules = AnswerRules(max_tokens=5, suppressed=(7, 9))
    asked = SamplingParams(max_tokens=20, min_p=0.25)
    for setting, most, suppressed in (("auto", 5, [7, 9]), ("none", 20, [])):
        p, d = prefill(), decode()
        async with stack(p, d, rules=rules, generation_config=setting, suggested=DefaultSampling(min_p=0.5)) as s:
            await s.client.generate(token_ids=PROMPT, sampling=asked)
            await s.client.generate(token_ids=PROMPT, sampling=SamplingParams(max_tokens=2))
        first, second = (request.sequence for request in p.requests)
        assert (first.sampling.max_tokens, list(first.suppressed_token_ids)) == (most, suppressed)
        found = [sampling_from_proto(sequence.sampling).min_p for sequence in (first, second)]
        assert found == [0.25, 0.5 if setting == "auto" else 0.0]
        assert second.sampling.max_tokens == 2
