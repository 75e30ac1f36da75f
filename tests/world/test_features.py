"""Features that an emulated engine lacks, through services on virtual time: a checkpoint's own engine computes."""

import asyncio
import json
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, SamplingParams
from moonpool.engine.models.random_checkpoint import create
from tests.world.cluster import Cluster, Simulation, prompt
from tests.world.judge import wrong_format
from tests.world.plain import PlainJudge
from tests.world.process import in_new_process

BLOCK = ("--block-size", "16")
FLAGS = {
    "prefill": [*BLOCK, "--max-num-batched-tokens", "64", "--set", "blocks=256"],
    "decode": [*BLOCK, "--set", "blocks=256", "--speculative", "ngram", "--set", "preempt_every=50"],
}
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
})  # fmt: skip
GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=30, temperature=1.0, seed=7, top_k=20, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=30, temperature=0.8, seed=8, presence_penalty=0.5, repetition_penalty=1.2),
    "several": SamplingParams(max_tokens=20, temperature=1.0, seed=9, n=3, ignore_eos=True),
    "log probabilities": SamplingParams(max_tokens=15, temperature=0.0, logprobs=3, prompt_logprobs=2),
    "schema": SamplingParams(max_tokens=60, temperature=1.0, seed=3, response_format="json_schema", grammar=SCHEMA),
    "regex": SamplingParams(
        max_tokens=60, temperature=0.0, response_format="regex", grammar="[a-c]{3,9}(-[0-9]{2}){2}"
    ),
    "beams": SamplingParams(max_tokens=12, beam_width=3, n=3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("checkpoint") / "tiny-llama", seed=5, dtype="float32")


@in_new_process
async def test_every_feature_gives_the_plain_models_answers(simulation: Simulation, checkpoint: Path) -> None:
    judge, cluster = PlainJudge(checkpoint), Cluster(simulation, {}, FLAGS, checkpoint=checkpoint)
    await cluster.start()
    async with AsyncClient(cluster.addresses) as client, asyncio.TaskGroup() as group:
        prompts = {name: prompt(50 + 20 * number, name) for number, name in enumerate(ASKED)}
        asked = {
            name: group.create_task(client.generate(token_ids=prompts[name], sampling=how))
            for name, how in ASKED.items()
        }
    for name, how in ASKED.items():
        result, before = asked[name].result(), prompts[name]
        for index, choice in enumerate(result.choices):
            if how.beam_width:
                assert choice.score is not None
                assert not judge.wrong_score(before, choice.token_ids, choice.score), name
            else:
                assert not judge.wrong(before, choice.token_ids, how, index), name
            assert not judge.wrong_logprobs([*before], choice.logprobs), name
        assert len(result.choices) == how.n
        if how.response_format:
            assert result.finish_reason == "stop"
            assert not wrong_format(how, result.text)
        if how.prompt_logprobs is not None:
            scored = [prompt_logprob for prompt_logprob in result.prompt_logprobs if prompt_logprob is not None]
            assert not judge.wrong_logprobs(before[:1], scored)
            assert len(scored) == len(before) - 1
    assert await cluster.gauge("decode-0", "accepted_tokens_total") > 0, "no guess was right"
    assert await cluster.gauge("decode-0", "preemptions_total") > 0
    await cluster.rest()
    await cluster.drain()
