"""Thinking of past turns, for chat templates that know it by another name than `reasoning_content`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_THINKING = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]""")


def names_thinking(source: str) -> bool:
    """Whether a chat template reads a message's thinking as `thinking` (gpt-oss, LFM2.5)."""
    return "reasoning_content" not in source and _THINKING.search(source) is not None


def with_thinking(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its thinking under that name, too.

    Of a message with text and calls, gpt-oss's template takes the text alone, and refuses both.
    """
    thinking = turn.get("reasoning_content")
    if not thinking or (turn.get("content") and turn.get("tool_calls")):
        return dict(turn)
    return {"thinking": thinking, **turn}
