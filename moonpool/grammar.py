"""What an answer may look like: JSON, a JSON schema, a regular expression or a grammar, by the library llguidance.

Free of torch: a conductor checks with it before any work is done, an engine computes with it which tokens may follow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moonpool.errors import InvalidRequest
from moonpool.sampling_params import MAX_GRAMMAR_BYTES, ResponseFormat, SamplingParams

FORMATS: tuple[str, ...] = get_args(ResponseFormat)
_WHITESPACE = r"(\n[ \t]{0,16}| )?"
"""Between the parts of JSON. Without a bound, small models write spaces up to the last token."""
_MAX_REASON = 400
LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    step_max_items=10_000,
    step_lexer_fuel=100_000,
    verbose_errors=False,
)
"""What a grammar may cost at most: some 100 MB, and some 0.3 s in a step; the same where it is checked and used."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which texts are answers.

    Attributes:
        format: how `text` is meant.
        text: the schema, expression or grammar; "" for "json_object".
    """

    format: str
    text: str

    @classmethod
    def of(cls, params: SamplingParams) -> Grammar | None:
        """What some parameters ask for; None = any text."""
        return cls(params.response_format, params.grammar) if params.response_format else None

    def compiled(self) -> str:
        """Llguidance's form of it.

        Raises:
            ValueError: a schema is no JSON object, or the format is not known.
        """
        match self.format:
            case "json_object":
                return _json_grammar('{"type": "object"}')
            case "json_schema":
                return _json_grammar(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(self.text)
        raise ValueError(f"must be one of {', '.join(FORMATS)}, not {self.format!r}")


def _json_grammar(schema: str) -> str:
    if not isinstance(json.loads(schema), dict):
        raise ValueError("a schema must be a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})


def _first_fault(compiled: str) -> str:
    """What is wrong, also what shows only where the first token is looked for; "" = nothing."""
    wrong = LLMatcher.validate_grammar(compiled, limits=LIMITS)
    if wrong:
        return str(wrong)
    parser = LLMatcher(LLTokenizer("byte"), compiled, log_level=0, limits=LIMITS)
    parser.compute_bitmask()
    return str(parser.get_error())


def check_grammar(params: SamplingParams, field_prefix: str = "sampling") -> None:
    """Checks that the grammar, if there is one, can be followed; takes up to half a second.

    Nothing is ever fetched, whatever a schema refers to.

    Raises:
        InvalidRequest: it is wrong, too large, or uses what is not supported; names "FIELD_PREFIX.grammar".
    """
    grammar = Grammar.of(params)
    if grammar is None:
        return
    field = f"{field_prefix}.grammar"
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    try:
        wrong = _first_fault(grammar.compiled())
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise InvalidRequest(field, f"is no {grammar.format} that can be followed: {wrong[:_MAX_REASON]}")
