"""An answer's text: detokenised as tokens come, and cut before a stop string."""

from __future__ import annotations

from array import array

from moonpool.checkpoint import StopWatcher
from services.conductor.request import Request, Served


class AnswerText:
    """Text of one answer. What all `push` and `end` return, concatenated, is the final text."""

    def __init__(self, request: Request, served: Served) -> None:
        """Start with no text; the prompt is the context in which the first tokens are spelled."""
        self._detokenizer = served.tokenizer.stream(request.prompt[-16:], request.sampling.skip_special_tokens)
        self._watcher = StopWatcher(request.stops)
        self._min_tokens = request.sampling.min_tokens
        self._pushed = 0

    @property
    def stopped(self) -> bool:
        """A stop string has come."""
        return self._watcher.stopped

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that became certain. Stop strings count from `min_tokens` on."""
        self._pushed += 1
        text = self._detokenizer.push(array("i", (token_id,)))
        return self._watcher.push(text) if self._pushed >= self._min_tokens else text

    def end(self) -> str:
        """Return what was held back."""
        if self.stopped or not self._pushed:
            return ""
        return self._watcher.push(self._detokenizer.flush()) + ("" if self.stopped else self._watcher.flush())
