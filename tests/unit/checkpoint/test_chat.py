"""Chat templates with tools, beside transformers' rendering of the same."""

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moonpool.checkpoint.tokenizer import ChatTemplate
from moonpool.errors import CheckpointError, InvalidRequest

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "<é>", "parameters": {"type": "object", "properties": {"n": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"n": 1, "x": [2.5, "é"]}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c1"},
]
QWEN = """{%- if tools %}# Tools
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- "<|im_start|>" + message.role + message.content }}
{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + '}' }}
{%- endfor %}{%- if message.role == "tool" %}{{- message.tool_call_id }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant" }}{%- endif %}"""
LLAMA = """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}{%- if 'tool_calls' in message %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
{%- else %}{{- message['content'] | trim }}{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("source", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["without", "with"])
def test_equals_transformers(source: str, tools: tuple[dict[str, Any], ...]) -> None:
    """Which wants the arguments of calls as objects; ours come as text, as OpenAI's clients send them."""
    mine = ChatTemplate(source, {"bos_token": "<s>"}).render(TURNS, tools, add_generation_prompt=True)
    theirs = copy.deepcopy(TURNS)
    function = theirs[1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    texts = render_jinja_template(
        [theirs], tools=list(tools) or None, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )[0]
    assert [mine] == list(texts)
    assert (json.dumps(TOOL["function"]["name"]) in mine) or not tools  # type: ignore[index]


def test_tools_that_the_template_would_not_show() -> None:
    template = ChatTemplate("{% for turn in messages %}{{ turn.content }}{% endfor %}", {})
    assert template.render(TURNS, (), add_generation_prompt=True) == "How is it?sun"
    with pytest.raises(InvalidRequest, match="takes no tools") as caught:
        template.render(TURNS, [TOOL], add_generation_prompt=True)
    assert caught.value.field == "tools"


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "NaN", '{"a": NaN}', "[" * 10_000, '"{}"'])
def test_arguments_that_are_no_object(arguments: str) -> None:
    turn = {**TURNS[1], "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]}
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(QWEN, {}).render([TURNS[0], turn], (), add_generation_prompt=True)
    assert caught.value.field == "messages.1.tool_calls.0.function.arguments"


def test_no_template() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if", {})
