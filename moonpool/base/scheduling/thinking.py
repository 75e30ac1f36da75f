"""A bound on a model's thinking: after so many tokens, the tokens that end the thinking are forced.

Everything is found from the tokens alone. No state is kept: a sequence that moves, is preempted or is continued
elsewhere thinks on as if nothing had happened.
"""

from array import array

from moonpool.base.frozen import frozen

MAX_MARK_TOKENS = 64
"""Tokens of a mark, at most."""
BEGINS_WITHIN = 16
"""The thinking begins within so many tokens of the answer, or not at all."""


@frozen
class ThinkingBudget:
    """How many tokens an answer may think.

    Attributes:
        tokens: most tokens between the marks.
        begin, end: tokens of the marks before and behind the thinking; at least one each.
        is_open: the prompt has begun the thinking, so that the answer begins within.
    """

    tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False

    def forced(self, tokens: "array[int]", prompt_tokens: int) -> int | None:
        """Return the token that must come next; None = any may.

        Args:
            tokens: the prompt and the answer so far.
            prompt_tokens: the prompt's length.
        """
        start = self._start(tokens, prompt_tokens)
        if start is None or len(tokens) < start + self.tokens:
            return None
        if _find(tokens, self.end, start, start + self.tokens + len(self.end)) is not None:
            return None
        # The mark may have begun already, by the model or by this rule.
        begun = min(len(self.end) - 1, len(tokens) - start)
        while begun and tuple(tokens[len(tokens) - begun :]) != self.end[:begun]:
            begun -= 1
        return self.end[begun]

    def steady(self, tokens: "array[int]", prompt_tokens: int) -> int | None:
        """Return how many next tokens come before one may be forced, at least one; None = none will be forced.

        Args:
            tokens: the prompt and the answer so far.
            prompt_tokens: the prompt's length.
        """
        start = self._start(tokens, prompt_tokens)
        if start is None:
            answer = len(tokens) - prompt_tokens
            if self.is_open or answer >= BEGINS_WITHIN + len(self.begin):
                return None
            return 1 + self.tokens  # the next token may begin the thinking
        if _find(tokens, self.end, start, start + self.tokens + 2 * len(self.end)) is not None:
            return None
        return max(1, start + self.tokens - len(tokens))

    def _start(self, tokens: "array[int]", prompt_tokens: int) -> int | None:
        """Return the place of the thinking's first token; None: the answer does not think, or not yet."""
        if self.is_open:
            return prompt_tokens
        before = _find(tokens, self.begin, prompt_tokens, prompt_tokens + BEGINS_WITHIN + len(self.begin))
        return None if before is None else before + len(self.begin)


def _find(tokens: "array[int]", run: tuple[int, ...], start: int, stop: int) -> int | None:
    """Return the first place from `start` on where a run of tokens begins, whole before `stop`; None: nowhere."""
    stop = min(stop, len(tokens))
    at = start
    while True:
        try:
            at = tokens.index(run[0], at, stop)
        except ValueError:
            return None
        if at + len(run) <= stop and tuple(tokens[at : at + len(run)]) == run:
            return at
        at += 1
