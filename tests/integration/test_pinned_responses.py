"""A conversation that goes on by an id: its KV is pinned at the kvstore; the next turn computes only what is new."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import read_gauges
from moonpool.client import Client
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.shared.test_contexts import until
from tests.integration.stack import TRIES, CheckedStack

TURN = "the tide of a moon pool rises at noon " * 4
ONE = SamplingParams(max_tokens=1, temperature=0.0)
POOL_BYTES, DRAM_BYTES, SSD_BYTES, PIN_BYTES = 1 << 20, 2 << 20, 1 << 20, 768 << 10
FLOOD_TOKENS = 2048
"""Tokens of one prompt, whose KV takes 2 MiB."""


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    """Its pools and its store are so small that a few prompts fill them."""
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("stack"))
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 4 * POOL_BYTES, "dram_bytes": DRAM_BYTES, "ssd_bytes": SSD_BYTES}
    plan = with_flags(dataclasses.replace(plan, http_port=0, **sizes), "kvstore", "--set", f"pin_bytes={PIN_BYTES}")
    plan = with_flags(plan, "prefill", "--max-num-batched-tokens", str(FLOOD_TOKENS // 4))
    with CheckedStack(plan) as running:
        yield running


@pytest.fixture
def api(stack: CheckedStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{stack.http_address}/v1", api_key="any", max_retries=0) as client:
        yield client


def store_gauge(stack: CheckedStack, name: str) -> float:
    return sum(reading.value for reading in read_gauges(stack.address) if reading.name == name)


def begun(api: openai.OpenAI, seed: str, **more: Any) -> Any:
    """The second response of a conversation, whose KV is pinned soon."""
    first = api.responses.create(model="tiny-llama", max_output_tokens=8, input=seed + TURN, **more)
    return api.responses.create(
        model="tiny-llama", max_output_tokens=8, input=TURN, previous_response_id=first.id, **more
    )


def full_blocks(response: Any) -> int:
    """Blocks of a conversation; the answer's last token is not part of a prompt."""
    return int(response.usage.total_tokens // BLOCK) - 1


def cached(client: Client, prompt: list[int]) -> int:
    return client.generate(token_ids=prompt, sampling=ONE).usage.cached_tokens


@pytest.mark.parametrize("salt", [None, pytest.param("s", marks=pytest.mark.slow)])
def test_the_next_turn_computes_only_what_is_new_whatever_was_evicted(
    stack: CheckedStack, api: openai.OpenAI, salt: str | None
) -> None:
    """Pools and store are filled many times over: a prompt beside the conversation is gone, the conversation is not."""
    more: Any = {"extra_body": {"cache_salt": salt}} if salt else {}
    with Client(stack.address) as client:
        beside = tokens(12 * BLOCK, f"beside{salt}")
        cached(client, beside)
        second = begun(api, f"{salt}", **more)
        pinned = full_blocks(second)
        until(lambda: store_gauge(stack, "pinned_blocks") >= pinned)
        ask: Any = {"model": "tiny-llama", "max_output_tokens": 8, "input": TURN, **more}
        for tried in range(TRIES):
            for number in range(4):
                cached(client, tokens(FLOOD_TOKENS, f"flood{salt}{tried}{number}"))
            assert cached(client, beside) == 0
            third = api.responses.create(**ask, previous_response_id=second.id)
            api.responses.delete(third.id)
            assert third.usage is not None
            if third.usage.input_tokens_details.cached_tokens >= pinned * BLOCK:
                break
            stack.restart("prefill-0")  # it has learnt that loads are slow
        assert third.usage.input_tokens_details.cached_tokens >= pinned * BLOCK
        api.responses.delete(second.id)
        until(lambda: store_gauge(stack, "pinned_blocks") == 0)


def test_pins_take_no_more_than_they_may(stack: CheckedStack, api: openai.OpenAI) -> None:
    """More conversations than fit are answered all the same, and the store has room for other KV."""
    begun_all = [begun(api, f"many{number} ") for number in range(8)]
    assert sum(map(full_blocks, begun_all)) * (DRAM_BYTES // 128) > PIN_BYTES
    until(lambda: store_gauge(stack, "pinned_bytes") > PIN_BYTES // 2)
    for response in begun_all:
        more = api.responses.create(
            model="tiny-llama", max_output_tokens=2, input="?", previous_response_id=response.id
        )
        assert store_gauge(stack, "pinned_bytes") <= PIN_BYTES
        api.responses.delete(more.id)
        api.responses.delete(response.id)
    until(lambda: store_gauge(stack, "pinned_blocks") == 0)


def test_a_pin_ends_with_its_time(stack: CheckedStack) -> None:
    flags = ["--id", "gateway-1", "--listen", "127.0.0.1:0", "--set", "response_pin_s=3"]
    flags += ["--conductor", stack.address, "--model", stack.plan.model]
    address = stack.spawn("gateway", "gateway-1", flags).wait_ready(180)
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as api:
        pinned = full_blocks(begun(api, "short "))
        until(lambda: store_gauge(stack, "pinned_blocks") >= pinned)
        until(lambda: store_gauge(stack, "pinned_blocks") == 0)
