"""How long an answer may think: the fields of the APIs, and the budget in tokens that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.base.sampling_params import MAX_THINKING_BUDGET

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How hard the model is to think, as OpenAI and Anthropic name it."""
EFFORT_TOKENS: dict[str, int] = {"none": 0, "minimal": 512, "low": 2048}
"""Tokens of thinking by effort; from "medium" on, the model thinks as long as it likes."""


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """What a request says of the thinking.

    Attributes:
        tokens: most tokens of thinking; None: the request gives no number.
        effort: how hard the model is to think; None: not said.
    """

    tokens: int | None = None
    effort: Effort | None = None

    def budget(self, *, template_has_effort: bool) -> int | None:
        """Most tokens of thinking; None = any number. `template_has_effort`: the prompt says how hard to think."""
        if self.tokens is not None:
            return self.tokens if self.tokens <= MAX_THINKING_BUDGET else None
        if self.effort is None or (template_has_effort and self.effort != "none"):
            return None
        return EFFORT_TOKENS.get(self.effort)

    def template_kwargs(self) -> dict[str, object]:
        """Variables for the chat template, under the names that templates use."""
        if self.effort is None:
            return {}
        thinks = {"enable_thinking": False} if self.effort == "none" else {}
        return {"reasoning_effort": self.effort, **thinks}


def budget_field(tokens: int | None) -> int | None:
    """A number of tokens as servers' fields give it: -1 = any number."""
    return None if tokens == -1 else tokens
