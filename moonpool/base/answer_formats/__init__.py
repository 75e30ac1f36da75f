"""How families of models write tool calls and thinking: one table, and how a model's row is found."""

from moonpool.base.answer_formats.detection import FORMATS, REASONING_FORMATS, FoundFormat, found_format
from moonpool.base.answer_formats.rows import FORMAT_ROWS, REASONING_ROWS
from moonpool.base.answer_formats.syntax import (
    DEFAULT_CALL_ID,
    AnswerFormat,
    ArgumentCalls,
    CallSyntax,
    HarmonyCalls,
    JsonCalls,
    ReasoningFormat,
    TaggedCalls,
)
from moonpool.base.answer_formats.writing import written_calls

__all__ = [
    "DEFAULT_CALL_ID",
    "FORMATS",
    "FORMAT_ROWS",
    "REASONING_FORMATS",
    "REASONING_ROWS",
    "AnswerFormat",
    "ArgumentCalls",
    "CallSyntax",
    "FoundFormat",
    "HarmonyCalls",
    "JsonCalls",
    "ReasoningFormat",
    "TaggedCalls",
    "found_format",
    "written_calls",
]
