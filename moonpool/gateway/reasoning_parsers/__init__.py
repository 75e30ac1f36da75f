"""Reasoning parsers, by the name that the setting `reasoning_parser` takes."""

from collections.abc import Mapping

from moonpool.gateway.reasoning_parsers.base import ReasoningFormat

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),  # Qwen 3, QwQ, DeepSeek R1 and models made from them
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""By name. A chat template takes the first parser whose marks the template has."""


def reasoning_parser_of(chat_template: str) -> str:
    """Name of the parser for a model with this chat template; "" if the model does not think."""
    return next((name for name, parser in REASONING_PARSERS.items() if parser.end in chat_template), "")
