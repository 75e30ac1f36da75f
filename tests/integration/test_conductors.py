"""Two conductors side by side, which all instances have joined: one is killed, its streams go on at the other."""

import asyncio
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import wait_at_rest
from moonpool.client import Client
from tests.integration.conftest import small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import REST_TIMEOUT_S, CheckedStack
from tests.integration.streams import disturbed

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """A stack of two conductors."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("both"))
    with CheckedStack(dataclasses.replace(plan, conductors=2, decode=2)) as stack:
        yield stack


@pytest.mark.slow
def test_streams_go_on_at_the_other_conductor(both: CheckedStack, reference: Reference) -> None:
    stack, second = both, both.addresses[1]
    prompts = [tokens(40 + 30 * number, f"two conductors {number}") for number in range(4)]
    with Client(second) as client:
        assert len(client.cluster_state().instances) == 4, "all have joined the second one too"
    results = asyncio.run(
        disturbed(stack.addresses, prompts, GREEDY, lambda: stack.services["conductor"].signal(signal.SIGKILL))
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 1000
        reference.assert_greedy(prompt, result.token_ids)
        assert [logprob.token_id for logprob in result.logprobs] == result.token_ids
        reference.assert_logprobs(prompt, result.logprobs, 1)
        assert [prompt_logprob and prompt_logprob.token_id for prompt_logprob in result.prompt_logprobs] == [
            None,
            *prompt[1:],
        ]
    assert sorted([result.resumes for result in results]) == [0, 0, 1, 1], "each conductor had half of them"
    wait_at_rest(second, REST_TIMEOUT_S)
    stack.restart("conductor")
    assert stack.gauge("decode", "sequences_adopted_total") == len(prompts) / 2
    with Client(stack.address) as client:  # it has learnt everything from the instances
        state = client.cluster_state()
        assert (state.ready, len(state.instances)) == (True, 4)
        again = client.generate(token_ids=prompts[-1], sampling=SamplingParams(max_tokens=4, temperature=0.0))
    assert again.usage.cached_tokens > 0
    assert again.token_ids == results[-1].token_ids[:4]
