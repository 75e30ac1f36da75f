"""Ollama's API: objects, streams of lines, tools, and what is asked of the conductor."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.base.errors import Internal, Overloaded
from moonpool.client.testing import FakeConductor, Script, answer
from tests.unit.gateway.fakes import Answers, answering
from tests.unit.gateway.test_embeddings import VALUES
from tests.unit.gateway.test_embeddings import script as embedding_script
from tests.unit.gateway.test_tool_calls import PARIS, SUNNY, TOOL
from tests.unit.gateway.test_tool_calls import script as tool_script

MESSAGES = [{"role": "user", "content": "hi"}]
FIGURES = ("total_duration", "prompt_eval_count", "eval_count", "eval_duration")


async def post(gateway: Answers, path: str, **body: Any) -> Any:
    return await gateway.http.post(f"/api/{path}", json={"model": "tiny", **body})


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat_is_a_stream_of_lines_by_default(gateway: Answers) -> None:
    *texts, last = lines(await post(gateway, "chat", messages=MESSAGES))
    whole = (await post(gateway, "chat", messages=MESSAGES, stream=False)).json()
    assert "".join(line["message"]["content"] for line in texts) == whole["message"]["content"] != ""
    assert {line["done"] for line in texts} == {False}
    assert (last["done"], last["done_reason"], whole["done"]) == (True, "stop", True)
    assert all(isinstance(found[name], int) for found in (last, whole) for name in FIGURES)
    assert last["eval_count"] == whole["eval_count"] > 0
    assert whole["model"] == "tiny"


async def test_a_prompt_is_a_users_turn_unless_raw(gateway: Answers) -> None:
    answered = (await post(gateway, "generate", prompt="hi", system="Be brief.", stream=False)).json()
    turns = [(turn.role, turn.content) for turn in gateway.fake.requests[-1].chat.messages]
    assert turns == [("system", "Be brief."), ("user", "hi")]
    assert answered["response"]
    *texts, last = lines(await post(gateway, "generate", prompt="hi", raw=True))
    assert gateway.fake.requests[-1].text == "hi"
    assert "".join(line["response"] for line in texts) == answered["response"]
    assert last["response"] == ""


async def test_options_are_sampling(gateway: Answers) -> None:
    options = {"temperature": 0.5, "top_k": 3, "seed": 7, "stop": "x", "num_predict": 9, "repeat_penalty": 1.25}
    answered = await post(gateway, "chat", messages=MESSAGES, options={**options, "num_ctx": 4096}, stream=False)
    sampling = gateway.asked.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, list(sampling.stop)) == (9, 3, 7, ["x"])
    assert (sampling.temperature, sampling.repetition_penalty) == (0.5, 1.25)
    assert "options.num_ctx" in answered.headers["warning"]


async def test_formats(gateway: Answers) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given, kind in (("json", "json_object"), (schema, "json_schema")):
        await post(gateway, "chat", messages=MESSAGES, format=given, stream=False)
        assert gateway.fake.requests[-1].sampling.response_format == kind
    assert json.loads(gateway.fake.requests[-1].sampling.grammar) == schema


async def test_models_names() -> None:
    async with answering(FakeConductor(), served_model_name="smollm2,best") as gateway:
        listed = (await gateway.http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in listed] == ["smollm2", "best"]
        answered = await post(gateway, "chat", model="smollm2:latest", messages=MESSAGES, stream=False)
        assert (answered.status_code, answered.json()["model"]) == (200, "smollm2")
        shown = (await post(gateway, "show", model="best")).json()
        assert shown["capabilities"][0] == "completion"
        for path, body in (("chat", {"messages": MESSAGES}), ("show", {})):
            refused = await post(gateway, path, model="other", **body)
            assert refused.status_code == 404
            assert "'smollm2'" in refused.json()["error"]
        assert (await gateway.http.get("/api/version")).json()["version"]


async def test_tools_are_called_and_their_results_sent_back() -> None:
    async with answering(FakeConductor(tool_script), tool_call_parser="hermes") as gateway:
        whole = (await post(gateway, "chat", messages=MESSAGES, tools=[TOOL], stream=False)).json()["message"]
        call = {"function": {"name": "weather", "arguments": json.loads(PARIS)}}
        assert (whole["content"].strip(), whole["tool_calls"]) == ("I look.", [call])
        *_, calling, last = lines(await post(gateway, "chat", messages=MESSAGES, tools=[TOOL]))
        assert (calling["message"]["tool_calls"], last["done"]) == ([call], True)
        result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
        turns = [*MESSAGES, whole, result]
        answered = (await post(gateway, "chat", messages=turns, tools=[TOOL], stream=False)).json()
        assert answered["message"]["content"] == SUNNY
        _, calls, told = gateway.fake.requests[-1].chat.messages
        assert [each.id for each in calls.tool_calls] == [told.tool_call_id]


async def test_an_error_before_the_stream_is_json() -> None:
    """With a status and as JSON, though the client asked for lines; behind the first text it is a line."""
    answers: Iterator[Script]
    answers = iter([[Overloaded("full", reason="queue_full", retry_after_s=1.0)], [*answer()[:2], Internal("lost")]])
    async with answering(FakeConductor(lambda _: next(answers))) as gateway:
        refused = await post(gateway, "chat", messages=MESSAGES)
        assert (refused.status_code, refused.headers["content-type"]) == (429, "application/json")
        assert refused.json() == {"error": "full"}
        assert lines(await post(gateway, "chat", messages=MESSAGES))[-1] == {"error": "lost"}


async def test_embeddings() -> None:
    async with answering(FakeConductor(embedding_script)) as gateway:
        for given, count in (("a", 1), (["a", "b"], 2)):
            found = (await post(gateway, "embed", input=given, truncate=True)).json()
            assert found["embeddings"] == [pytest.approx(VALUES)] * count
            assert found["prompt_eval_count"] == 3 * count


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "messages.0.images.0"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("embed", {}, "input"),
    ],
)
async def test_wrong_fields_are_named(gateway: Answers, path: str, body: dict[str, Any], named: str) -> None:
    refused = await post(gateway, path, **body)
    assert refused.status_code == 400
    assert named in refused.json()["error"]
