"""A request's answers as they grow: tokens, text, finish reason and measured times. Times are arguments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.contracts import logprobs_to_proto
from moonpool.errors import StreamBroken
from moonpool.logprobs import Logprobs
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.conductor.request import Request, Served
from services.conductor.resume import Had
from services.conductor.text import AnswerText

STOP = kv_pb2.FINISH_REASON_STOP
LENGTH = kv_pb2.FINISH_REASON_LENGTH
CANCELLED = kv_pb2.FINISH_REASON_CANCELLED


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of an answer, as an engine tells them.

    Attributes:
        choice: which answer.
        position: of the first of them in the answer.
        reason: with an answer's last tokens, why it ends.
        score: of a beam search's hypothesis, which comes whole.
        logprobs: of these tokens, where they are wanted.
    """

    choice: int
    position: int
    token_ids: Sequence[int]
    reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    score: float | None = None
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Choice:
    """One of the answers to a request. `finish` is set with its last token.

    Of a client that has resumed: `resumed_at` counts the tokens that it had, `owed` is text that it lacks, and `ahead`
    counts the characters that it has beyond the text of its tokens. `scores` are the log probabilities of the tokens
    since then, where they are wanted, and `pieces` all of the text.
    """

    request: Request
    index: int
    text: AnswerText
    tokens: array[int] = field(default_factory=lambda: array("i"))
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    resumed_at: int = 0
    owed: str = ""
    ahead: int = 0
    score: float | None = None  # of a hypothesis of a beam search
    scores: Logprobs = field(default_factory=Logprobs)
    pieces: list[str] = field(default_factory=list)

    def resume(self, had: Had) -> None:
        """Go on from what a client has; it has all text that was certain with its tokens, and maybe the answer's rest.

        `finish` is set when its tokens complete the answer.
        """
        self.extend(had.tokens)
        self._goes_to(had.text_chars)
        self.resumed_at = len(self.tokens)

    def has(self, had: Had) -> bool:
        """Whether a client's tokens are these, and what follows them can be told again."""
        count = len(had.tokens)
        return count >= self.resumed_at and self.tokens[:count] == had.tokens

    def lags(self, had: Had) -> bool:
        """Whether a client has these tokens and more: another conductor has told them."""
        return len(had.tokens) > len(self.tokens) and had.tokens[: len(self.tokens)] == self.tokens

    def again(self, had: Had) -> conductor_pb2.TokenDelta | None:
        """What the answer has beyond what a client has that hears it from now on; None for nothing."""
        position = len(had.tokens)
        self._goes_to(had.text_chars)
        text, self.owed, lacking = self.owed, "", self.tokens[position:]
        delta = conductor_pb2.TokenDelta(position=position, token_ids=lacking, text=text, choice=self.index)
        if lacking and self.request.sampling.logprobs is not None:
            delta.logprobs.CopyFrom(logprobs_to_proto(self.scores.part(position - self.resumed_at)))
        return delta if lacking or text else None

    def _goes_to(self, text_chars: int) -> None:
        """The client has so many characters of the text."""
        text = "".join(self.pieces)
        self.pieces = [text]
        self.owed, self.ahead = text[text_chars:], max(0, text_chars - len(text))

    @property
    def remaining(self) -> int:
        """Largest number of tokens still to come."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def new(self) -> int:
        """Tokens so far, less those that a client had that has resumed."""
        return len(self.tokens) - self.resumed_at

    def known(self, position: int, token_ids: Sequence[int]) -> int:
        """How many of some tokens, from a position on, are known already; all when the answer is complete.

        Raises:
            StreamBroken: tokens before them are missing, or known ones were others.
        """
        known = len(self.tokens) - position
        if self.finish:
            return len(token_ids)
        if known < 0:
            raise StreamBroken(f"tokens {len(self.tokens)} to {position - 1} were lost")
        if list(token_ids[:known]) != self.tokens[position : position + len(token_ids)].tolist():
            raise StreamBroken(f"tokens from {position} on are not those that were told before")
        return known

    def extend(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> conductor_pb2.TokenDelta | None:
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
        delta = conductor_pb2.TokenDelta(position=position, token_ids=taken, text=self._untold(text), choice=self.index)
        if logprobs is not None:
            its = logprobs.part(0, len(taken))
            self.scores.extend(its)
            delta.logprobs.CopyFrom(logprobs_to_proto(its))
        return delta

    def end(self, reason: kv_pb2.FinishReason.ValueType) -> conductor_pb2.TokenDelta | None:
        """End the answer for a reason from outside; returns held-back text, None for none.

        One that is cut short may go on at another conductor: what is not certain yet is not told.
        """
        if self.finish:
            return None
        self.finish = reason
        return self.rest("" if reason == CANCELLED else self.text.end())

    def rest(self, text: str = "") -> conductor_pb2.TokenDelta | None:
        """Text that comes without tokens: this one, and what a client that resumed still lacks; None for none."""
        text = self._untold(text)
        return conductor_pb2.TokenDelta(position=len(self.tokens), text=text, choice=self.index) if text else None

    def _untold(self, text: str) -> str:
        """New text, less what a client that resumed has already, after what it lacks."""
        self.pieces.append(text)
        new, self.owed, self.ahead = self.owed + text[self.ahead :], "", max(0, self.ahead - len(text))
        return new

    def finished(self) -> conductor_pb2.FinishedChoice:
        """Its end."""
        return conductor_pb2.FinishedChoice(reason=self.finish, completion_tokens=len(self.tokens), score=self.score)


@dataclass(slots=True)
class Answer:
    """What was generated for a request so far: one answer or several, and when."""

    request: Request
    choices: list[Choice]
    arrived: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    opening: prefill_pb2.FirstToken | None = None
    """What may follow the prompt, where there are beams: they have no first token then."""
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    lane: str = ""
    """On which the prompt's KV goes to decode."""

    @classmethod
    def begin(cls, request: Request, served: Served, arrived: float) -> Answer:
        choices = [Choice(request, index, AnswerText(request, served)) for index in range(request.choices)]
        return cls(request, choices, arrived)

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def new(self) -> int:
        """Those of them that a client that has resumed did not have."""
        return sum(choice.new for choice in self.choices)

    def resume(self, answers: Sequence[Had]) -> None:
        """Goes on from what a client has of each; see `Choice.resume`."""
        for choice, had in zip(self.choices, answers, strict=True):
            choice.resume(had)

    @property
    def finish(self) -> kv_pb2.FinishReason.ValueType:
        """Set when all answers are complete: the first one's."""
        whole = all(choice.finish for choice in self.choices)
        return self.choices[0].finish if whole else kv_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first (new) token; 0 before it."""
        return self.first_token_at - self.arrived if self.new else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens of the longest answer; 0 before the second one."""
        count = max(choice.new for choice in self.choices)
        return (self.last_token_at - self.first_token_at) / (count - 1) if count > 1 else 0.0

    @property
    def continued(self) -> array[int]:
        """Tokens that are part of what prefill computes where the request is placed anew: of one answer.

        Several answers begin there with their prompt, and decode is told what is known of each. Beams begin again.
        """
        alone = len(self.choices) == 1 and not self.request.has_beams
        return self.choices[0].tokens if alone else array("i")

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """Note how the prompt was prefilled; only what came before the first token counts."""
        if not self.tokens:
            self.cached_tokens = min(first.local_tokens + first.loaded_tokens, len(self.request.prompt))
            self.queue_s, self.prefill_s, self.lane = first.queue_s, first.prefill_s, first.lane

    def computed_at_decode(self, held_blocks: int) -> None:
        """Note that the prompt is computed where the answer is, behind what is held there."""
        if not self.tokens:
            self.cached_tokens = min(held_blocks * self.request.block_tokens, len(self.request.prompt) - 1)

    def extend(
        self, choice: int, token_ids: Sequence[int], now: float, logprobs: Logprobs | None = None
    ) -> conductor_pb2.TokenDelta | None:
        """Take tokens of an answer; see `Choice.extend`."""
        first, delta = not self.new, self.choices[choice].extend(token_ids, logprobs)
        if delta is not None:
            self.first_token_at = now if first else self.first_token_at
            self.last_token_at = now
        return delta

    def end(self, reason: kv_pb2.FinishReason.ValueType) -> list[conductor_pb2.TokenDelta]:
        """End all answers for a reason from outside; returns held-back texts."""
        return [delta for choice in self.choices if (delta := choice.end(reason)) is not None]

    def finished(self, placement: conductor_pb2.Placement, now: float) -> conductor_pb2.Finished:
        """Return the last message of the stream."""
        return conductor_pb2.Finished(
            reason=self.finish,
            usage=conductor_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                cached_tokens=self.cached_tokens,
                completion_tokens=self.tokens,
            ),
            timing=conductor_pb2.Timing(
                ttft_s=self.ttft_s,
                tpot_s=self.tpot_s,
                e2e_s=now - self.arrived,
                queue_s=self.queue_s,
                prefill_s=self.prefill_s,
            ),
            placement=placement,
            choices=[choice.finished() for choice in self.choices],
        )
