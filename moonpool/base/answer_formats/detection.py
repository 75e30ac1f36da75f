"""Which row of the table a model is of: by all marks of the chat template, with the model's class as a witness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.base.answer_formats.rows import FORMAT_ROWS, REASONING_ROWS
from moonpool.base.answer_formats.syntax import AnswerFormat, ReasoningFormat

FORMATS: Mapping[str, AnswerFormat] = {name: row for row in FORMAT_ROWS for name in row.names}
"""Rows by every name that `--tool-call-parser` takes."""
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {name: row for row in REASONING_ROWS for name in row.names}
"""Forms of thinking by every name that `--reasoning-parser` takes."""


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """What a chat template and a model's class say.

    Attributes:
        row: the row; None if no row fits, or several do and the class is of none of them.
        reasoning: the form of thinking; None without marks of thinking.
        note: what a person should know at the start: nothing fits, or the witness says something else; "" = nothing.
    """

    row: AnswerFormat | None
    reasoning: ReasoningFormat | None
    note: str = ""


def found_format(chat_template: str, architecture: str = "") -> FoundFormat:
    """The formats of a model.

    Args:
        chat_template: source of the template that takes tools; "" = there is none.
        architecture: the model's class in Hugging Face's or GGUF's name; "" = unknown.
    """
    source = chat_template.replace('\\"', '"').replace("\\'", "'")
    fitting = [row for row in FORMAT_ROWS if _fits(row, source)]
    witnesses = [row for row in FORMAT_ROWS if architecture and architecture in row.architectures]
    named = [row for row in fitting if row in witnesses]
    chosen = fitting if len(fitting) == 1 else named
    row = chosen[0] if len(chosen) == 1 else None
    return FoundFormat(row, _reasoning(row, source), _note(row, fitting, witnesses, architecture))


def _fits(row: AnswerFormat, source: str) -> bool:
    has_all = any(all(text in source for text in texts) for texts in row.needs)
    return has_all and not any(text in source for text in row.lacks)


def _reasoning(row: AnswerFormat | None, source: str) -> ReasoningFormat | None:
    forms = (*(row.reasoning if row is not None else ()), *REASONING_ROWS)
    return next((form for form in forms if form.is_in(source)), None)


def _note(
    row: AnswerFormat | None, fitting: list[AnswerFormat], witnesses: list[AnswerFormat], architecture: str
) -> str:
    told = ", ".join(witness.name for witness in witnesses)
    if row is None and len(fitting) > 1:
        names = ", ".join(each.name for each in fitting)
        return f"the chat template fits several formats of tool calls ({names}); choose one with --tool-call-parser"
    if row is None:
        hint = f"; models of the class {architecture} usually write {told}" if told else ""
        return f"no known format of tool calls fits the chat template{hint}; choose one with --tool-call-parser"
    if witnesses and row not in witnesses:
        return f"models of the class {architecture} usually write {told}, but the chat template shows {row.name}"
    return ""
