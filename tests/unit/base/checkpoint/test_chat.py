"""Chat templates with tools, beside transformers' rendering of the same."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moonpool.base.checkpoint.chat_template import ChatOptions, ChatTemplate, ChatTemplates, ControlTokens
from moonpool.base.errors import CheckpointError, InvalidRequest

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


PROMPT = ChatOptions()
CONTROL = ControlTokens(["<|im_start|>", "</s>"], ["<tool_call>"])


def rendered(
    source: str, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), options: ChatOptions = PROMPT
) -> str:
    return ChatTemplates({"default": source}, {"bos_token": "<s>"}, CONTROL).render(turns, tools, options).text


@pytest.mark.parametrize("source", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["without", "with"])
def test_equals_transformers(source: str, tools: tuple[dict[str, Any], ...]) -> None:
    """Which wants the arguments of calls as objects; ours come as text, as OpenAI's clients send them."""
    mine = rendered(source, TURNS, tools)
    theirs = copy.deepcopy(TURNS)
    function = theirs[1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    texts = render_jinja_template(
        [theirs], tools=list(tools) or None, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )[0]
    assert [mine] == list(texts)
    assert (json.dumps(TOOL["function"]["name"]) in mine) or not tools  # type: ignore[index]


PLAIN = """{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' + turn.content }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN


def test_a_template_without_tools_gets_them_as_text() -> None:
    """Definitions in a system message; calls and their results where they were made."""
    text = rendered(PLAIN, [{"role": "system", "content": "Be brief."}, *TURNS], [TOOL])
    first, second, third, fourth, last = text.split("<|im_start|>")[1:]
    assert first.startswith("system\nBe brief.\n\nYou can call functions.")
    assert json.dumps(TOOL, ensure_ascii=False) in first
    assert second == "user\nHow is it?\n"
    assert third.startswith('assistant\n<tool_call>\n{"name": "weather", "arguments": {"n": 1, "x": [2.5, "é"]}}')
    assert fourth == "user\n<tool_response>\nsun\n</tool_response>\n"
    assert last == "assistant"
    assert "You can call" not in rendered(PLAIN, TURNS)
    assert "<tool_response>" in rendered(PLAIN, TURNS)


def test_a_template_without_system_messages_gets_tools_in_the_first_turn() -> None:
    text = rendered(NO_SYSTEM, TURNS, [TOOL])
    assert text.startswith("<|im_start|>user\nYou can call functions.")
    assert text.index("How is it?") > text.index("<tools>")


def test_the_template_for_tools_is_used_with_tools_only() -> None:
    sources = {"default": "D{{ tools }}", "tool_use": "U{{ tools | length }}"}
    templates = ChatTemplates(sources, {}, CONTROL)
    assert templates.render(TURNS, [TOOL], ChatOptions()).text == "U1"
    assert templates.render(TURNS, (), ChatOptions()).text == "DNone"


def test_variables_of_a_request() -> None:
    """They come before special tokens, and never in place of the conversation."""
    options = ChatOptions(template_kwargs={"enable_thinking": False, "bos_token": "B"})
    assert rendered("{{ enable_thinking }}{{ bos_token }}", [], (), options) == "FalseB"
    with pytest.raises(InvalidRequest, match="cannot set messages") as caught:
        rendered(PLAIN, TURNS, (), ChatOptions(template_kwargs={"messages": []}))
    assert caught.value.field == "chat_template_kwargs"


def test_the_last_message_is_continued() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "It is  "}]
    options = ChatOptions(continue_final_message=True)
    assert rendered(PLAIN, turns, (), options).endswith("<|im_start|>assistant\nIt is  ")
    for wrong in ([TURNS[0]], TURNS[:2]):
        with pytest.raises(InvalidRequest, match="last message must be an assistant's text"):
            rendered(PLAIN, wrong, (), options)
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        rendered("{{ messages[0].content }}", turns, (), options)


ARGUMENTS: list[tuple[Any, dict[str, Any]]] = [
    ('{"n": 1}', {"n": 1}),
    ("", {}),
    (" ", {}),
    ("{", {}),
    ('{"city": "Par', {"city": "Par"}),
    ('{"a": [1, {"b": tru', {"a": [1, {}]}),
    ("{'a': True, 'b': None}", {"a": True, "b": None}),
    ("{'a': {1, 2}}", {}),
    ("[1]", {}),
    ([1], {}),
    ("null", {}),
    (None, {}),
    ({"a": 1}, {"a": 1}),
    ("NaN", {}),
    ("[" * 10_000, {}),
    ('"{}"', {}),
    ("call me", {}),
]


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_conversation_with_a_bad_call_goes_on(arguments: Any, expected: dict[str, Any]) -> None:
    turn = {**TURNS[1], "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]}
    assert f'"arguments": {json.dumps(expected)}' in rendered(QWEN, [TURNS[0], turn])


def test_control_tokens_of_a_conversation_are_marked() -> None:
    """Of users, tools and tool definitions; the assistant may write what templates write around its calls."""
    turns = [
        {"role": "user", "content": "a</s><tool_call>b"},
        {"role": "assistant", "content": "c<tool_call></s>"},
    ]
    chat = ChatTemplates({"default": PLAIN}, {}, CONTROL).render(turns, (), ChatOptions())
    assert [chat.text[begin:end] for begin, end in chat.literals] == ["</s>", "<tool_call>", "</s>"]
    assert (
        chat.text
        == "<|im_start|>user\na</s><tool_call>b\n<|im_start|>assistant\nc<tool_call></s>\n<|im_start|>assistant"
    )


def test_no_template() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if", {})


def test_a_template_gets_calls_in_the_shape_that_it_takes() -> None:
    """Most take objects as arguments; some add them to a text, and some ask for a part of the content."""
    texts = (
        "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls %}{{ '@' + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    assert rendered(texts, TURNS, [TOOL]) == '@{"n": 1, "x": [2.5, "é"]}'
    parts = (
        "{% if tools %}{% endif %}{% for m in messages %}{% if m.tool_calls and not m.content[0].thinking %}"
        "{{ m.tool_calls[0].function.arguments.n }}{% endif %}{% endfor %}"
    )
    assert rendered(parts, TURNS, [TOOL]) == "1"
    assert rendered(parts, [TURNS[0], {**TURNS[1], "content": "Hm."}, TURNS[2]], [TOOL]) == "1"


def test_a_result_has_the_functions_name() -> None:
    """Some templates ask for the name, which OpenAI's clients leave out."""
    source = "{% if tools %}{% endif %}{% for m in messages if m.role == 'tool' %}{{ m.name }};{% endfor %}"
    named = [*TURNS, {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "own"}]
    assert rendered(source, named, [TOOL]) == "weather;own;"


def test_a_template_that_leaves_past_calls_out_gets_them_as_text() -> None:
    """In the family's own form, whose marks are tokens; marks within values are none."""
    source = (
        "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}{% set keep_past_thinking = false %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    control = ControlTokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    function = {"name": "weather", "arguments": '{"n": "<|tool_call_end|>", "x": [true]}'}
    turns = [TURNS[0], {**TURNS[1], "content": "Well.", "tool_calls": [{**CALL, "function": function}]}, TURNS[2]]
    found = ChatTemplates({"default": source}, {}, control).render(turns, [TOOL], PROMPT)
    text = 'Well.\n<|tool_call_start|>[weather(n="<|tool_call_end|>", x=[True])]<|tool_call_end|><tool>sun'
    assert found.text.endswith(text)
    ((begin, end),) = found.literals
    assert (found.text[begin:end], found.text[begin - 1]) == ("<|tool_call_end|>", '"')
