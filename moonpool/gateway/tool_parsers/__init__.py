"""Readers and grammars of the formats of calls: from a row of the table to what reads and holds an answer."""

from __future__ import annotations

from dataclasses import replace

from moonpool.base.answer_formats import AnswerFormat, ArgumentCalls, HarmonyCalls, JsonCalls
from moonpool.base.grammar import AnswerGrammar
from moonpool.gateway.tool_parsers.argument_calls import argument_forms, argument_openings
from moonpool.gateway.tool_parsers.base import ToolParameters, ToolParser
from moonpool.gateway.tool_parsers.forms import ANY_NUMBER, CallForms
from moonpool.gateway.tool_parsers.harmony import HarmonyParser, harmony_forced, harmony_grammar
from moonpool.gateway.tool_parsers.json_calls import json_forms, json_openings
from moonpool.gateway.tool_parsers.marked_text import MarkedTextParser, Openings
from moonpool.gateway.tool_parsers.tagged_calls import tagged_forms, tagged_openings


def answer_reader(row: AnswerFormat, tools: ToolParameters) -> ToolParser:
    """What reads an answer of a row; `tools` are the functions that may be called, maybe none."""
    if isinstance(row.calls, HarmonyCalls):
        return HarmonyParser(tools)
    return MarkedTextParser(_openings(row, tools))


def strict_grammar(row: AnswerFormat, answer: AnswerGrammar, tools: ToolParameters) -> str:
    """Lark grammar of answers that are free text, in which calls follow their schemas.

    Raises:
        SchemaWordError: a schema has a word that is not supported.
        InvalidRequest: a schema cannot be followed in this form; names `tools`.
    """
    if isinstance(row.calls, HarmonyCalls):
        return harmony_grammar(answer, tools)
    _forms(row, answer, tools, ANY_NUMBER).hold(answer)
    for mark in row.hidden:
        answer.pass_mark(mark)
    return answer.lark()


def forced_grammar(row: AnswerFormat, answer: AnswerGrammar, tools: ToolParameters, most: int) -> str:
    """Lark grammar of answers that are thinking and at most `most` calls.

    Raises:
        SchemaWordError: a schema has a word that is not supported.
        InvalidRequest: a schema cannot be followed in this form; names `tools`.
    """
    if isinstance(row.calls, HarmonyCalls):
        return harmony_forced(answer, tools)
    more = f"{{0,{most - 1}}}" if most > 1 else ""
    return answer.forced_lark(_forms(row, answer, tools, more).forced(answer, more))


def _openings(row: AnswerFormat, tools: ToolParameters) -> Openings:
    match row.calls:
        case HarmonyCalls():
            raise AssertionError("has a parser of its own")
        case JsonCalls():
            openings = json_openings(row.calls, tools, row.hidden)
        case ArgumentCalls():
            openings = argument_openings(row.calls, tools, row.hidden)
        case _:
            openings = tagged_openings(row.calls, tools, row.hidden)
    openings = replace(openings, opens_line=row.opens_line)
    return openings if tools else openings.without_calls()


def _forms(row: AnswerFormat, answer: AnswerGrammar, tools: ToolParameters, more: str) -> CallForms:
    match row.calls:
        case HarmonyCalls():
            raise AssertionError("has grammars of its own")
        case JsonCalls():
            return json_forms(row.calls, answer, tools, more)
        case ArgumentCalls():
            return argument_forms(row.calls, answer, tools, more)
    return tagged_forms(row.calls, answer, tools, more)
