"""Formats of answers: OpenAI's `response_format`, vLLM's `structured_outputs` and its older fields."""

import json
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import check_grammar
from moonpool.base.sampling_params import SamplingParams
from moonpool.client.testing import FakeConductor

from .fakes import TURNS, Answers, answering

OPENAI = {"type": "json_schema"}
SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"]}


@pytest.mark.parametrize(
    ("body", "format_", "grammar"),
    [
        ({"response_format": {"type": "text"}}, "", ""),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": OPENAI | {"json_schema": {"name": "n", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"json_object": False, "regex": None}}, "", ""),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"guided_choice": ["yes", 'a "no"']}, "lark", 'start: "yes" | "a \\"no\\""'),
    ],
)
async def test_formats_are_passed_on(gateway: Answers, body: dict[str, Any], format_: str, grammar: Any) -> None:
    assert (await gateway.chat(**body)).status_code == 200
    asked = gateway.asked.sampling
    assert asked.response_format == format_
    assert (asked.grammar if isinstance(grammar, str) else json.loads(asked.grammar)) == grammar
    check_grammar(SamplingParams(response_format=asked.response_format, grammar=asked.grammar))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": OPENAI | {"json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
async def test_what_is_wrong_is_named(gateway: Answers, body: dict[str, Any], param: str) -> None:
    answered = await gateway.chat(**body)
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == param
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"response_format": OPENAI | {"json_schema": {"schema": {}}}}, "response_format"),
        ("/v1/chat/completions", {"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tools",
        ),
        ("/v1/responses", {"text": {"format": OPENAI | {"schema": {}}}}, "text.format"),
        ("/v1/messages", {"output_config": {"format": OPENAI | {"schema": {}}}}, "output_config.format"),
    ],
)
async def test_what_the_conductor_refuses_has_the_name_that_the_client_knows(
    path: str, body: dict[str, Any], param: str
) -> None:
    prompt = {"input": "x"} if path == "/v1/responses" else {"messages": TURNS, "max_tokens": 5}
    refusal = InvalidRequest("sampling.grammar", "properties.a.not: is not supported yet")
    async with answering(FakeConductor(lambda _: [refusal])) as gateway:
        refused = await gateway.http.post(path, json={**prompt, **body})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"{param}: properties.a.not: is not supported yet"


async def test_a_word_of_a_schema_that_constrains_nothing_is_warned_of(gateway: Answers) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
    answered = await gateway.chat(response_format=OPENAI | {"json_schema": {"schema": schema}})
    place = "response_format.json_schema.schema.properties.a.format"
    assert answered.headers["warning"] == f'299 moonpool "ignored fields: {place}"'


async def test_a_response_says_it_of_its_text(gateway: Answers) -> None:
    told = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answered = await gateway.http.post("/v1/responses", json={"input": "x", "text": {"format": told}})
    assert answered.status_code == 200
    assert answered.json()["text"] == {"format": told}
    assert gateway.asked.sampling.response_format == "json_schema"
    assert json.loads(gateway.asked.sampling.grammar) == SCHEMA | {"additionalProperties": False}
    wrong = await gateway.http.post("/v1/responses", json={"input": "x", "text": {"format": OPENAI}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text.format.schema")
