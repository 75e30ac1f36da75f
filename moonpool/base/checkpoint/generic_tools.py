"""Tools for chat templates without tool support: definitions, calls and results as texts in ordinary messages.

The form is Hermes', which many models have seen: `<tools>`, `<tool_call>` and `<tool_response>` around JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.base.answer_formats import FORMATS
from moonpool.base.checkpoint.past_calls import with_text_of_calls
from moonpool.base.checkpoint.traced_text import joined, text_of, written

GENERIC_TOOL_CALL = "<tool_call>"
"""What a call begins with in an answer."""
_INSTRUCTIONS = """You can call functions. These are the functions, one JSON object on each line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON within <tool_call> tags, for example:
<tool_call>
{{"name": {name}, "arguments": {{}}}}
</tool_call>"""


def with_generic_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system: str = "system"
) -> list[dict[str, Any]]:
    """Return `messages` with the tools, and with past calls and their results as text.

    Args:
        messages: in OpenAI's form, with calls' arguments as objects.
        tools: OpenAI's definitions; empty = none.
        system: role of the message that shows the tools: "system", or "user" for templates without system messages.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            text = "<tool_response>\n" + text_of(message.get("content") or "") + "\n</tool_response>"
            if turns and turns[-1].get("results"):
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text, "results": True})
        else:
            turns.append(_with_calls(message))
    for turn in turns:
        turn.pop("results", None)
    return _with_definitions(turns, tools, system) if tools else turns


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    return with_text_of_calls(turn, message.get("tool_calls", ()), FORMATS["hermes"])


def _with_definitions(
    turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], system: str
) -> list[dict[str, Any]]:
    text = written(_instructions, list(tools))
    at = next((at for at, turn in enumerate(turns) if turn.get("role") == system), None)
    if at is None:
        return [{"role": system, "content": text}, *turns]
    parts = (turns[at].get("content"), text) if system == "system" else (text, turns[at].get("content"))
    turns[at] = {**turns[at], "content": joined(filter(None, parts), "\n\n")}
    return turns


def _instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _INSTRUCTIONS.format(tools=lines, name=json.dumps(tools[0].get("function", {}).get("name", "")))
