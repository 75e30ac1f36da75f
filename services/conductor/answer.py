"""One request's answer as it grows: tokens, text, finish reason and measured times. Times are arguments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.conductor.request import Request, Served
from services.conductor.text import AnswerText

STOP = kv_pb2.FINISH_REASON_STOP
LENGTH = kv_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True)
class Answer:
    """What was generated so far. `finish` is set with the last token.

    Of a client that has resumed: `resumed_at` counts the tokens that it had, `owed` is text that it lacks, and `ahead`
    counts the characters that it has beyond the text of its tokens.
    """

    request: Request
    text: AnswerText
    arrived: float
    tokens: array[int] = field(default_factory=lambda: array("i"))
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    resumed_at: int = 0
    owed: str = ""
    ahead: int = 0

    @classmethod
    def begin(cls, request: Request, served: Served, arrived: float) -> Answer:
        return cls(request, AnswerText(request, served), arrived)

    def resume(self, token_ids: Sequence[int], text_chars: int) -> None:
        """Go on from what a client has; it has all text that was certain with its tokens, and maybe the answer's rest.

        `finish` is set when its tokens complete the answer.
        """
        known = self.extend(token_ids, self.arrived)
        text = known.text if known is not None else ""
        self.owed, self.ahead = text[text_chars:], max(0, text_chars - len(text))
        self.resumed_at = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Largest number of tokens still to come."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first (new) token; 0 before it."""
        return self.first_token_at - self.arrived if len(self.tokens) > self.resumed_at else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens; 0 before the second one."""
        count = len(self.tokens) - self.resumed_at
        return (self.last_token_at - self.first_token_at) / (count - 1) if count > 1 else 0.0

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """Note how the prompt was prefilled; only what came before the first token counts."""
        if not self.tokens:
            self.cached_tokens = min(first.local_tokens + first.loaded_tokens, len(self.request.prompt))
            self.queue_s, self.prefill_s = first.queue_s, first.prefill_s

    def extend(self, token_ids: Sequence[int], now: float) -> conductor_pb2.TokenDelta | None:
        """Take tokens up to the answer's end; returns what to tell the client, None for nothing."""
        position, text = len(self.tokens), ""
        for token_id in token_ids:
            if self.finish:
                break
            self.tokens.append(token_id)
            if self.request.ends_with(token_id, len(self.tokens)):
                self.finish = STOP  # the end token itself has no text
            else:
                text += self.text.push(token_id)
                if self.text.stopped:
                    self.finish = STOP
                elif not self.remaining:
                    self.finish = LENGTH
        if self.finish:
            text += self.text.end()
        taken = self.tokens[position:]
        if not taken:
            return None
        if position == self.resumed_at:
            self.first_token_at = now
        self.last_token_at = now
        return conductor_pb2.TokenDelta(position=position, token_ids=taken, text=self._untold(text))

    def end(self, reason: kv_pb2.FinishReason.ValueType) -> conductor_pb2.TokenDelta | None:
        """End the answer for a reason from outside; returns held-back text, None for none."""
        if self.finish:
            return None
        self.finish = reason
        return self.rest(self.text.end())

    def rest(self, text: str = "") -> conductor_pb2.TokenDelta | None:
        """Text that comes without tokens: this one, and what a client that resumed still lacks; None for none."""
        text = self._untold(text)
        return conductor_pb2.TokenDelta(position=len(self.tokens), text=text) if text else None

    def _untold(self, text: str) -> str:
        """New text, less what a client that resumed has already, after what it lacks."""
        new, self.owed, self.ahead = self.owed + text[self.ahead :], "", max(0, self.ahead - len(text))
        return new

    def finished(self, placement: conductor_pb2.Placement, now: float) -> conductor_pb2.Finished:
        """Return the last message of the stream."""
        return conductor_pb2.Finished(
            reason=self.finish,
            usage=conductor_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                cached_tokens=self.cached_tokens,
                completion_tokens=len(self.tokens),
            ),
            timing=conductor_pb2.Timing(
                ttft_s=self.ttft_s,
                tpot_s=self.tpot_s,
                e2e_s=now - self.arrived,
                queue_s=self.queue_s,
                prefill_s=self.prefill_s,
            ),
            placement=placement,
        )
