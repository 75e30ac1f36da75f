"""A conversation that goes on by an id: its KV is pinned at the kvstore; the next turn computes only what is new."""

import dataclasses
from typing import Any

import openai

from moonpool.cli.check import read_gauges
from moonpool.cli.stack import StackPlan
from moonpool.client import Client
from tests.integration.conftest import BLOCK
from tests.integration.shared.test_contexts import until
from tests.integration.stack import CheckedStack

TURN = "the tide of a moon pool rises at noon " * 4


def blocks_pinned(stack: CheckedStack) -> float:
    return sum(reading.value for reading in read_gauges(stack.address) if reading.name == "pinned_blocks")


def test_the_second_turn_pins_the_conversation(plan: StackPlan) -> None:
    with CheckedStack(dataclasses.replace(plan, http_port=0)) as stack, Client(stack.address) as client:
        api = openai.OpenAI(base_url=f"http://{stack.http_address}/v1", api_key="any", max_retries=0)
        ask: Any = {"model": client.cluster_state().model, "max_output_tokens": 8}
        first = api.responses.create(**ask, input=TURN)
        second = api.responses.create(**ask, input=TURN, previous_response_id=first.id)
        assert second.usage is not None
        pinned = second.usage.total_tokens // BLOCK - 1  # the answer's last token is not part of a prompt
        until(lambda: blocks_pinned(stack) >= pinned)
        third = api.responses.create(**ask, input=TURN, previous_response_id=second.id)
        assert third.usage is not None
        assert third.usage.input_tokens_details.cached_tokens >= pinned * BLOCK
