"""One choice's tokens and text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from moonpool.base.checkpoint import StopWatcher
from moonpool.base.contracts import logprobs_to_proto
from moonpool.base.errors import StreamBroken
from moonpool.base.logprobs import Logprobs
from moonpool.conductor.valid_request import ClientProgress, ServedModel, ValidRequest
from moonpool.v1 import conductor_pb2, kv_pb2

UNFINISHED = kv_pb2.FINISH_REASON_UNSPECIFIED
STOP = kv_pb2.FINISH_REASON_STOP
LENGTH = kv_pb2.FINISH_REASON_LENGTH
CANCELLED = kv_pb2.FINISH_REASON_CANCELLED
CONTEXT_TOKENS = 16
"""Tokens at the prompt's end, as context for spelling the first generated tokens."""


class ChoiceOutput:
    """One of a request's `n` outputs: tokens, text, and what the client still lacks.

    Attributes:
        index: number of the choice.
        tokens: generated so far, those included that a resuming client already had.
        finish: set with the last token.
        resumed_at: number of tokens that a resuming client had.
        score: a deferred answer's score; None for others.
    """

    def __init__(self, request: ValidRequest, index: int, served: ServedModel) -> None:
        self.index = index
        self.tokens = array("i")
        self.finish: kv_pb2.FinishReason.ValueType = UNFINISHED
        self.resumed_at = 0
        self.score: float | None = None
        self._request = request
        skips = request.sampling.skip_special_tokens
        self._detokenizer = served.tokenizer.stream(request.prompt[-CONTEXT_TOKENS:], skips)
        self._stop = StopWatcher(request.stops)
        self._spelled = 0  # tokens that went through the detokenizer: all but the end token
        self._logprobs = Logprobs()  # of the tokens from `resumed_at` on, if they are wanted
        self._text_parts: list[str] = []  # together the whole text that is certain
        self._lacking = ""  # certain text that the client does not have
        self._ahead_chars = 0  # characters that the client has beyond the certain text

    @property
    def new(self) -> int:
        """Number of tokens that no resuming client had before."""
        return len(self.tokens) - self.resumed_at

    def count_known(self, position: int, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens from `position` on are known already; all of them if the choice is complete.

        Raises:
            StreamBroken: tokens before `position` are missing, or known tokens were different.
        """
        known = len(self.tokens) - position
        if self.finish:
            return len(token_ids)
        if not known:
            return 0
        if known < 0:
            raise StreamBroken(f"tokens {len(self.tokens)} to {position - 1} were lost")
        if list(token_ids[:known]) != self.tokens[position : position + len(token_ids)].tolist():
            raise StreamBroken(f"tokens from {position} on are not those that came before")
        return known

    def extend(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> conductor_pb2.TokenDelta | None:
        """Append tokens up to the choice's end; return the client's message, None for no news."""
        position, text, unspelled = len(self.tokens), "", array("i")
        for token_id in token_ids:
            if self.finish:
                break
            self.tokens.append(token_id)
            if self._request.ends_with(token_id, len(self.tokens)):
                self.finish = STOP  # the end token has no text
                continue
            unspelled.append(token_id)
            if self._request.stops:  # the token that completes a stop string is the last
                text += self._spell(unspelled)
                unspelled = array("i")
            if self._stop.stopped:
                self.finish = STOP
            elif len(self.tokens) >= self._request.spec.max_tokens:
                self.finish = LENGTH
        if unspelled:
            text += self._spell(unspelled)
        if self.finish:
            text += self._held_back_text()
        taken = self.tokens[position:]
        if not taken:
            return None
        text = self._unsent(text)
        delta = conductor_pb2.TokenDelta(
            position=position, token_ids=taken, text=text, choice=self.index, reason=self.finish
        )
        if logprobs is not None:
            part = logprobs.part(0, len(taken))
            self._logprobs.extend(part)
            delta.logprobs.CopyFrom(logprobs_to_proto(part))
        return delta

    def end(self, reason: kv_pb2.FinishReason.ValueType) -> conductor_pb2.TokenDelta | None:
        """End the choice for a reason from outside; return the text that was held back, None for no text.

        A cancelled choice may go on at another conductor, so text that is not certain yet is not sent.
        """
        if self.finish:
            return None
        self.finish = reason
        return self.text_delta("" if reason == CANCELLED else self._held_back_text())

    def text_delta(self, text: str = "") -> conductor_pb2.TokenDelta | None:
        """Return a message with text but no tokens: what a resuming client lacks, then `text`; None for no text."""
        text = self._unsent(text)
        return conductor_pb2.TokenDelta(position=len(self.tokens), text=text, choice=self.index) if text else None

    def finished_proto(self) -> conductor_pb2.FinishedChoice:
        return conductor_pb2.FinishedChoice(reason=self.finish, completion_tokens=len(self.tokens), score=self.score)

    # --- clients that resume ------------------------------------------------------------------------------------------

    def restore(self, progress: ClientProgress) -> None:
        """Start from a client's tokens. The client has all text that is certain with them, perhaps more.

        `finish` is set if the tokens complete the choice.
        """
        self.extend(progress.tokens)
        self._set_client_chars(progress.text_chars)
        self.resumed_at = len(self.tokens)

    def has(self, progress: ClientProgress) -> bool:
        """Whether a client's tokens are this choice's first ones, and everything after them can be sent again."""
        count = len(progress.tokens)
        return count >= self.resumed_at and self.tokens[:count] == progress.tokens

    def is_behind(self, progress: ClientProgress) -> bool:
        """Return whether a client has these tokens and more: from another conductor."""
        return len(progress.tokens) > len(self.tokens) and progress.tokens[: len(self.tokens)] == self.tokens

    def delta_after(self, progress: ClientProgress) -> conductor_pb2.TokenDelta | None:
        """Return everything that a client lacks of this choice; None for no news."""
        position = len(progress.tokens)
        self._set_client_chars(progress.text_chars)
        text, self._lacking, tokens = self._lacking, "", self.tokens[position:]
        reason = UNFINISHED if self.finish == CANCELLED else self.finish
        delta = conductor_pb2.TokenDelta(
            position=position, token_ids=tokens, text=text, choice=self.index, reason=reason
        )
        if tokens and self._request.sampling.logprobs is not None:
            delta.logprobs.CopyFrom(logprobs_to_proto(self._logprobs.part(position - self.resumed_at)))
        return delta if tokens or text else None

    def _set_client_chars(self, count: int) -> None:
        """Note how many characters of the text the client has."""
        text = "".join(self._text_parts)
        self._text_parts = [text]
        self._lacking, self._ahead_chars = text[count:], max(0, count - len(text))

    # --- text ---------------------------------------------------------------------------------------------------------

    def _spell(self, token_ids: array[int]) -> str:
        """Return the text that is certain with the next tokens. Stop strings count from `min_tokens` on.

        With stop strings, tokens come one by one.
        """
        self._spelled += len(token_ids)
        text = self._detokenizer.push(token_ids)
        return self._stop.push(text) if self._spelled >= self._request.sampling.min_tokens else text

    def _held_back_text(self) -> str:
        """Return the text that was not certain before the end."""
        if self._stop.stopped or not self._spelled:
            return ""
        return self._stop.push(self._detokenizer.flush()) + ("" if self._stop.stopped else self._stop.flush())

    def _unsent(self, text: str) -> str:
        """New text, after what a resuming client lacks and without what the client has already."""
        self._text_parts.append(text)
        unsent = self._lacking + text[self._ahead_chars :]
        self._lacking, self._ahead_chars = "", max(0, self._ahead_chars - len(text))
        return unsent
