"""Ids of past calls, for chat templates that show ids to the model or refuse ids of another form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.base.answer_formats import AnswerFormat


def with_names(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each tool's turn has the function's `name`, which some templates ask for.

    OpenAI's clients name the call alone.
    """
    names = {
        str(call.get("id", "")): name
        for turn in turns
        for call in turn.get("tool_calls") or ()
        if (name := _name(call))
    }
    named = []
    for turn in turns:
        called = names.get(str(turn.get("tool_call_id", ""))) if turn.get("role") == "tool" else None
        named.append({**turn, "name": called} if called and not turn.get("name") else dict(turn))
    return named


def with_own_ids(turns: Sequence[Mapping[str, Any]], row: AnswerFormat | None) -> list[dict[str, Any]]:
    """Return messages with ids of calls as the family writes ids: of clients' other models, for example.

    The same conversation gets the same ids, so that its KV is found again.
    """
    if row is None or not row.own_ids:
        return [dict(turn) for turn in turns]
    own, names, number = re.compile(row.own_ids), dict[str, str](), 0
    renamed = []
    for turn in turns:
        calls = []
        for call in turn.get("tool_calls") or ():
            given = str(call.get("id", ""))
            digits, name = hashlib.sha256(given.encode(errors="replace")).hexdigest(), _name(call)
            fits = own.fullmatch(given) is not None
            names[given] = given if fits else row.call_id.format(digits=digits, name=name, number=number)
            calls.append({**call, "id": names[given]})
            number += 1
        result = {**turn, **({"tool_calls": calls} if calls else {})}
        if "tool_call_id" in turn:
            result["tool_call_id"] = names.get(str(turn["tool_call_id"]), turn["tool_call_id"])
        renamed.append(result)
    return renamed


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
