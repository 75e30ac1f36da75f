"""Forced calls on SmolLM2, whose chat template takes no tools: each parses against its schema and ends as a call.

`moonpool pull smollm2` fetches the model; without it these tests are skipped.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.cli.stack import StackPlan
from tests.integration.stack import CheckedStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo")
TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "book_table",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "object", "properties": {"city": {"enum": list(CITIES)}}, "required": ["city"]},
                "guests": {"type": "integer", "minimum": 1, "maximum": 9},
                "outside": {"type": "boolean"},
            },
            "required": ["place", "guests"],
        },
    },
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    file = cached_model("smollm2", cache_folder())
    if file is None:
        pytest.skip("SmolLM2 is not here; `moonpool pull smollm2` fetches it")
    plan = StackPlan(
        model=str(file), data_dir=tmp_path_factory.mktemp("stack"), http_port=0, kv_cache_memory_bytes=512 << 20
    )
    with CheckedStack(plan) as running:
        yield running


async def test_two_hundred_forced_calls(stack: CheckedStack) -> None:
    """Half of them name the function, half leave the choice to the model; half are streamed."""
    tools: Any = [{"type": "function", "function": tool} for tool in TOOLS]
    schemas = {tool["name"]: _closed(tool["parameters"]) for tool in TOOLS}
    busy = asyncio.Semaphore(8)
    async with openai.AsyncOpenAI(base_url=f"http://{stack.http_address}/v1", api_key="any", timeout=600) as client:

        async def call(number: int) -> None:
            name, city = TOOLS[number % 2]["name"], CITIES[number % 5]
            choice: Any = {"type": "function", "function": {"name": name}} if number % 4 < 2 else "required"
            turns: Any = [{"role": "user", "content": f"Call {name} for {city}, number {number}."}]
            ask: Any = {"model": stack.plan.model.rpartition("/")[2].removesuffix(".gguf"), "max_tokens": 900}
            ask |= {"messages": turns, "tools": tools, "tool_choice": choice, "seed": number, "temperature": 0.7}
            ask["parallel_tool_calls"] = number % 8 > 5  # this small model may reach the bound of a list
            async with busy:
                if number % 2:
                    async with client.chat.completions.stream(**ask) as events:
                        answer = await events.get_final_completion()
                else:
                    answer = await client.chat.completions.create(**ask)
            assert answer.choices[0].finish_reason == "tool_calls", answer
            for tool_call in answer.choices[0].message.tool_calls or ():
                assert tool_call.type == "function"
                jsonschema.validate(json.loads(tool_call.function.arguments), schemas[tool_call.function.name])

        failures = await asyncio.gather(*map(call, range(200)), return_exceptions=True)
    assert [failure for failure in failures if failure is not None] == []


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with closed objects."""
    inner = {name: _closed(value) if "properties" in value else value for name, value in schema["properties"].items()}
    return {**schema, "properties": inner, "additionalProperties": False}
