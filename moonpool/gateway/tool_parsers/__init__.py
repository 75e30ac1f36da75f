"""Parsers of tool calls, by the name that `--tool-call-parser` takes."""

from collections.abc import Mapping

from moonpool.gateway.tool_parsers.base import ToolParserFamily
from moonpool.gateway.tool_parsers.deepseek import DEEPSEEK
from moonpool.gateway.tool_parsers.json_calls import HERMES, LLAMA3, MISTRAL
from moonpool.gateway.tool_parsers.pythonic import PYTHONIC
from moonpool.gateway.tool_parsers.qwen3_coder import QWEN3_CODER

TOOL_PARSERS: Mapping[str, ToolParserFamily] = {
    "qwen3_coder": QWEN3_CODER,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "pythonic": PYTHONIC,
    "llama3": LLAMA3,
}
"""By name. A chat template takes the first parser that the template uses."""


def tool_parser_of(chat_template: str) -> str:
    """Parser name for a model whose chat template takes tools; "" for an unknown format."""
    return next((name for name, family in TOOL_PARSERS.items() if family.is_used_by(chat_template)), "")
