"""Calls as a family writes them, for prompts whose chat template leaves past calls out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.base.answer_formats.syntax import AnswerFormat, ArgumentCalls, HarmonyCalls, JsonCalls, TaggedCalls

Call = tuple[str, Mapping[str, Any]]
"""A function's name and the arguments."""
_PYTHON_NAMES = {"true": "True", "false": "False", "null": "None"}
_ID = "0" * 9


def written_calls(row: AnswerFormat, calls: Sequence[Call]) -> str:
    """Return the calls of one answer in a row's form.

    Rows whose calls need no mark get none. gpt-oss's messages are no texts that can be added to an answer: "" there.
    """
    match row.calls:
        case JsonCalls():
            return _json_calls(row.calls, calls)
        case TaggedCalls():
            return _tagged_calls(row.calls, calls)
        case ArgumentCalls():
            return _argument_calls(row.calls, calls)
        case HarmonyCalls():
            return ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_calls(syntax: JsonCalls, calls: Sequence[Call]) -> str:
    begin = "" if syntax.unmarked else syntax.begins[0]
    if syntax.only_heads:
        before, behind = syntax.heads[0]
        texts = [
            f"{begin}{_filled(before, name=name, number=str(number), id=_ID)}{_json(arguments)}{behind}"
            for number, (name, arguments) in enumerate(calls)
        ]
        return f"{syntax.around[0]}{''.join(texts)}{syntax.around[1]}"
    objects = [
        f"{{{_filled(syntax.first_members, number=str(number))}{_json(syntax.name_key)}: {_json(name)}, "
        f"{_json(syntax.arguments_key)}: {_json(arguments)}}}"
        for number, (name, arguments) in enumerate(calls)
    ]
    if syntax.listed:
        return f"{begin}[{', '.join(objects)}]{syntax.end}"
    texts = [f"{begin}{syntax.space}{each}{syntax.space if syntax.end else ''}{syntax.end}" for each in objects]
    return (syntax.between or "\n").join(texts)


def _tagged_calls(syntax: TaggedCalls, calls: Sequence[Call]) -> str:
    pad = "\n" if syntax.padded else ""
    texts = []
    for name, arguments in calls:
        parameters = [
            f"{_filled(syntax.parameter, key=key, string=_json(isinstance(value, str)))}{pad}"
            f"{value if isinstance(value, str) else _json(value)}{pad}{syntax.parameter_end}"
            for key, value in arguments.items()
        ]
        texts.append(f"{_filled(syntax.function, name=name)}{''.join(parameters)}{syntax.function_end}")
    if syntax.grouped:
        return f"{syntax.begin}{''.join(texts)}{syntax.end}"
    return "\n".join(f"{syntax.begin}{text}{syntax.end}" for text in texts)


def _argument_calls(syntax: ArgumentCalls, calls: Sequence[Call]) -> str:
    begin, end = ("", "") if syntax.unmarked else (syntax.begins[0], syntax.end)
    if syntax.language == "gemma":
        return "".join(f"{begin}call:{name}{_gemma(arguments, syntax.quote)}{end}" for name, arguments in calls)
    texts = [
        f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    if syntax.layout == "lines":
        lines = "\n".join(texts)
        return f"{begin}\n{lines}\n{end}"
    return f"{begin}[{', '.join(texts)}]{end}"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma(item, quote)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_gemma(item, quote) for item in value)}]"
    return _json(value)


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_json(key)}: {_python(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    written = _json(value)
    return _PYTHON_NAMES.get(written, written)


def _filled(text: str, **fields: str) -> str:
    """Return a text of a row with `{name}` and the like filled in; other braces stay."""
    for field, value in fields.items():
        text = text.replace(f"{{{field}}}", value)
    return text
