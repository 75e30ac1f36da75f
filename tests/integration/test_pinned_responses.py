"""A response that continues others computes only what is new, also after all KV that is not pinned was evicted."""

import dataclasses
import itertools
from pathlib import Path

import openai

from moonpool.cli.check import read_gauges
from moonpool.cli.stack import StackPlan
from moonpool.client import Client
from moonpool.sampling_params import SamplingParams
from tests.integration.conftest import BLOCK, tokens
from tests.integration.shared.test_contexts import until
from tests.integration.stack import CheckedStack

TURN = "the tide of a moon pool rises at noon " * 4
ONE = SamplingParams(max_tokens=1, temperature=0.0)


def blocks_pinned(stack: CheckedStack) -> float:
    return sum(reading.value for reading in read_gauges(stack.address) if reading.name == "pinned_blocks")


def test_a_turn_computes_only_what_is_new_after_eviction(plan: StackPlan, tmp_path: Path) -> None:
    small = dataclasses.replace(
        plan, data_dir=tmp_path, http_port=0, kv_cache_memory_bytes=2 << 20, dram_bytes=4 << 20, ssd_bytes=0
    )
    with CheckedStack(small) as stack, Client(stack.address) as client:
        api = openai.OpenAI(base_url=f"http://{stack.http_address}/v1", api_key="any", max_retries=0)
        model = client.cluster_state().model
        unpinned = tokens(8 * BLOCK, "not pinned")
        client.generate(token_ids=unpinned, sampling=ONE)
        first = api.responses.create(model=model, input=TURN, max_output_tokens=8)
        second = api.responses.create(model=model, input=TURN, max_output_tokens=8, previous_response_id=first.id)
        assert second.usage is not None
        pinned = second.usage.total_tokens // BLOCK - 1  # the answer's last token is not part of a prompt
        until(lambda: blocks_pinned(stack) >= pinned)
        for number in itertools.count():  # other prompts evict all that is not pinned, from pools and store
            client.generate(token_ids=tokens(64 * BLOCK, f"other {number}"), sampling=ONE)
            if number > 8 and client.generate(token_ids=unpinned, sampling=ONE).usage.cached_tokens == 0:
                break
        third = api.responses.create(model=model, input=TURN, max_output_tokens=8, previous_response_id=second.id)
        assert third.usage is not None
        assert third.usage.input_tokens_details.cached_tokens >= pinned * BLOCK
