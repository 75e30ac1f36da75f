"""One request in the shell: tokens and text so far, the queue of messages to its client, and resuming a stream."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.unknown_fields import UnknownFieldSet

from moonpool import errors
from moonpool.checkpoint import StopWatcher
from moonpool.cluster.proto_conversion import finite_or_zero
from moonpool.contracts import logprobs_from_proto, logprobs_to_proto
from moonpool.errors import InvalidRequest, Mismatch, MoonpoolError, Overloaded, StreamBroken, Unavailable
from moonpool.kv.delete_kv import KVSelection
from moonpool.kv.keys import BlockKey
from moonpool.logprobs import Logprobs
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from services.conductor.core.events import (
    ATTEMPT_MARK,
    CompletionReason,
    DecodeReservation,
    Failure,
    FailureKind,
    RequestSpec,
    ReserveGranted,
    ResumeState,
)
from services.conductor.core.request import MIN_KNOWN_TOKENS
from services.conductor.request import ServedModelSpec, ValidRequest

FINISH_REASONS = {
    CompletionReason.STOP: kv_pb2.FINISH_REASON_STOP,
    CompletionReason.LENGTH: kv_pb2.FINISH_REASON_LENGTH,
    CompletionReason.CANCELLED: kv_pb2.FINISH_REASON_CANCELLED,
}


_FAILURE_KINDS = {getattr(errors, kind.value): kind for kind in FailureKind}


def failure_of(error: MoonpoolError) -> Failure:
    """An error as the core sees it."""
    kind = _FAILURE_KINDS.get(type(error), FailureKind.INTERNAL)
    if isinstance(error, InvalidRequest | Mismatch):
        return Failure(kind, error.message, field=error.field)
    if isinstance(error, Overloaded):
        return Failure(
            kind,
            error.message,
            reason=error.reason,
            predicted_ttft_s=error.predicted_ttft_s,
            predicted_tbt_s=error.predicted_tbt_s,
            slo_s=error.slo_s,
            retry_after_s=error.retry_after_s,
        )
    return Failure(kind, error.message)


def error_of(failure: Failure) -> MoonpoolError:
    """The error that a client gets."""
    match failure.kind:
        case FailureKind.OVERLOADED:
            return Overloaded(
                failure.message,
                reason=failure.reason,
                predicted_ttft_s=failure.predicted_ttft_s,
                predicted_tbt_s=failure.predicted_tbt_s,
                slo_s=failure.slo_s,
                retry_after_s=failure.retry_after_s,
            )
        case FailureKind.INVALID:
            return InvalidRequest(failure.field, failure.message)
        case FailureKind.MISMATCH:
            return Mismatch(failure.field, failure.message)
    kind: type[MoonpoolError] = getattr(errors, failure.kind.value)
    return kind(failure.message)


def finish_of(reason: kv_pb2.FinishReason.ValueType) -> CompletionReason | None:
    """A finish reason as the core sees it; None when there is none yet."""
    return next((finish for finish, value in FINISH_REASONS.items() if value == reason), None)


def granted_of(response: decode_pb2.ReserveResponse) -> ReserveGranted:
    """A decode instance's promise."""
    target, decode = response.target, response.target.decode
    plain = DecodeReservation(
        decode.id, decode.incarnation, decode.address, target.transfer_id, target.generation, target.held_blocks
    )
    return ReserveGranted(
        plain, finite_or_zero(response.lease_s), response.number, finite_or_zero(response.predicted_tbt_s)
    )


def reserved_instance_proto(target: DecodeReservation) -> kv_pb2.Instance:
    """The instance that has promised."""
    return kv_pb2.Instance(
        id=target.decode,
        incarnation=target.incarnation,
        kind=kv_pb2.INSTANCE_KIND_DECODE,
        address=target.address,
    )


def reservation_proto(target: DecodeReservation) -> kv_pb2.TransferTarget:
    """The promise in the contract's form."""
    return kv_pb2.TransferTarget(
        decode=reserved_instance_proto(target),
        transfer_id=target.transfer_id,
        generation=target.generation,
        held_blocks=target.held_blocks,
    )


SECRET_BYTES = 16
"""Of the secrets that are drawn here."""


SECRET_LENGTHS = range(16, 65)


MAX_SEQUENCE_CHARS = 256


_ATTEMPT = re.compile(r"(?:(\d{1,10})\.)?\d{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """What a client has of one answer: its tokens, and so many characters of its text."""

    tokens: array[int]
    text_chars: int


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What a client has of its answers, and where that came from.

    Attributes:
        answers: each of them.
        point: what the client was told last. It proves that it is the same client.
        resumed: the same for the core.
        unscored: the prompt's log probabilities are wanted, and it has not got them.
    """

    answers: tuple[ClientProgress, ...]
    point: conductor_pb2.ResumePoint
    resumed: ResumeState
    unscored: bool = False


def secret_for(resume: ResumeRequest | None) -> bytes:
    """The client's own; for a new request one that nobody can guess."""
    return secrets.token_bytes(SECRET_BYTES) if resume is None else resume.point.secret


def read_resume(
    message: conductor_pb2.GenerateRequest, request: ValidRequest, served: ServedModelSpec
) -> ResumeRequest | None:
    """What is to be resumed; None for a new request.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    if not message.HasField("resume"):
        _require("from_position", message.from_position == 0, "must be 0 unless a stream is resumed")
        return None
    resume, point = message.resume, message.resume.point
    for name, part in (("resume", resume), ("resume.point", point)):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(name, f"has field number {unknown[0].field_number}, which is not known here")
    _require("request_id", message.request_id != "", "a stream is resumed by its request's id")
    seeded = message.sampling.HasField("seed") or request.has_beams
    _require("sampling.seed", seeded, "must be the seed that was told when it was placed")
    _require("resume.count", resume.count >= 1, "must be at least 1")
    count, further = len(resume.token_ids), request.choices - 1
    _require("from_position", message.from_position == count, f"must be {count}, as resume.token_ids has so many")
    _require("resume.further", len(resume.further) == further, f"must have {further}: one for each further answer")
    parts = [("resume.token_ids", resume.token_ids, resume.text_chars)]
    parts += [("resume.further.token_ids", it.token_ids, it.text_chars) for it in resume.further]
    answers = tuple([_read_had(*part, request, served.config.vocab_size) for part in parts])
    least, most = SECRET_LENGTHS[0], SECRET_LENGTHS[-1]
    _require("resume.point.secret", len(point.secret) in SECRET_LENGTHS, f"must have {least} to {most} bytes")
    _check_sequence(point.sequence, request.id, resume.count)
    unscored = _lacks_scores(resume.prompt_scored, request, answers)
    alone = request.choices == 1 and not request.has_beams
    target = None if unscored else target_of(point)  # no decode instance has the prompt's log probabilities
    resumed = ResumeState(count if alone else 0, resume.count, point.sequence, target)
    return ResumeRequest(answers, point, resumed, unscored)


def resume_point(
    secret: bytes, placement: conductor_pb2.Placement, sequence: str, target: DecodeReservation | None
) -> conductor_pb2.ResumePoint:
    """What a client is told when its request is placed."""
    point = conductor_pb2.ResumePoint(placement=placement, sequence=sequence, secret=secret)
    if target is not None:
        point.target.CopyFrom(reservation_proto(target))
    return point


def target_of(point: conductor_pb2.ResumePoint) -> DecodeReservation | None:
    """Decode's promise, None without one; where the instance is, only its own word counts."""
    if not point.HasField("target"):
        return None
    target, decode = point.target, point.target.decode
    _require(
        "resume.point.target.decode.id",
        1 <= len(decode.id) <= MAX_SEQUENCE_CHARS,
        f"1 to {MAX_SEQUENCE_CHARS} characters",
    )
    return DecodeReservation(decode.id, decode.incarnation, "", target.transfer_id, target.generation, 0)


def _read_had(
    field: str, token_ids: Sequence[int], text_chars: int, request: ValidRequest, vocabulary: int
) -> ClientProgress:
    _require(field, len(token_ids) <= request.max_tokens, f"the answer has at most {request.max_tokens} tokens")
    known = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary)
    _require(field, known, f"token ids must be in [0, {vocabulary})")
    return ClientProgress(array("i", token_ids), text_chars)


def _lacks_scores(scored: bool, request: ValidRequest, answers: Sequence[ClientProgress]) -> bool:
    """Whether the client is still to be told the prompt's log probabilities, which come before the first token."""
    wanted, begun = request.sampling.prompt_logprobs is not None, any(it.tokens for it in answers)
    field = "resume.prompt_scored"
    _require(field, wanted or not scored, "only where sampling.prompt_logprobs wants a prompt's log probabilities")
    _require(field, scored or not (wanted and begun), "must be set: who has tokens was told them before")
    return wanted and not scored


def _check_sequence(sequence: str, request_id: str, count: int) -> None:
    """Only an earlier attempt of this request is meant: the names of those to come must be free."""
    name, mark, attempt = sequence.partition(ATTEMPT_MARK)
    match = _ATTEMPT.fullmatch(attempt)
    earlier = not mark or (match is not None and int(match[1] or 0) < count)
    _require("resume.point.sequence", name == request_id and earlier, "is not an earlier placement of this request")


def _require(field: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)


class OutputText:
    """Text of one answer. What all `push` and `end` return, concatenated, is the final text."""

    def __init__(self, request: ValidRequest, served: ServedModelSpec) -> None:
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
class ChoiceOutput:
    """One of the answers to a request. `finish` is set with its last token.

    Of a client that has resumed: `resumed_at` counts the tokens that it had, `owed` is text that it lacks, and `ahead`
    counts the characters that it has beyond the text of its tokens. `scores` are the log probabilities of the tokens
    since then, where they are wanted, and `pieces` all of the text.
    """

    request: ValidRequest
    index: int
    text: OutputText
    tokens: array[int] = field(default_factory=lambda: array("i"))
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    resumed_at: int = 0
    owed: str = ""
    ahead: int = 0
    score: float | None = None  # of a hypothesis of a beam search
    scores: Logprobs = field(default_factory=Logprobs)
    pieces: list[str] = field(default_factory=list)

    def resume(self, had: ClientProgress) -> None:
        """Go on from what a client has; it has all text that was certain with its tokens, and maybe the answer's rest.

        `finish` is set when its tokens complete the answer.
        """
        self.extend(had.tokens)
        self._goes_to(had.text_chars)
        self.resumed_at = len(self.tokens)

    def has(self, had: ClientProgress) -> bool:
        """Whether a client's tokens are these, and what follows them can be told again."""
        count = len(had.tokens)
        return count >= self.resumed_at and self.tokens[:count] == had.tokens

    def lags(self, had: ClientProgress) -> bool:
        """Whether a client has these tokens and more: another conductor has told them."""
        return len(had.tokens) > len(self.tokens) and had.tokens[: len(self.tokens)] == self.tokens

    def again(self, had: ClientProgress) -> conductor_pb2.TokenDelta | None:
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
class OutputState:
    """What was generated for a request so far: one answer or several, and when."""

    request: ValidRequest
    choices: list[ChoiceOutput]
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
    def begin(cls, request: ValidRequest, served: ServedModelSpec, arrived: float) -> OutputState:
        choices = [ChoiceOutput(request, index, OutputText(request, served)) for index in range(request.choices)]
        return cls(request, choices, arrived)

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def new(self) -> int:
        """Those of them that a client that has resumed did not have."""
        return sum(choice.new for choice in self.choices)

    def resume(self, answers: Sequence[ClientProgress]) -> None:
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


class OutputQueue:
    """One client's messages. The end, or a failure, comes after the last message.

    With `whole` nobody is woken for tokens.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._messages: deque[conductor_pb2.GenerateResponse] = deque()
        self._waiting: dict[
            int, conductor_pb2.GenerateResponse
        ] = {}  # by choice: the last of `_messages`, may still grow
        self._changed = asyncio.Event()
        self._ended = False
        self._failure: MoonpoolError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will be told."""
        return self._ended

    def placed(self, placed: conductor_pb2.Placed) -> None:
        """The request is placed."""
        self._waiting.clear()
        self._put(conductor_pb2.GenerateResponse(placed=placed))

    def prompt_logprobs(self, scored: conductor_pb2.PromptLogprobs) -> None:
        """The prompt's log probabilities are known."""
        self._put(conductor_pb2.GenerateResponse(prompt_logprobs=scored))

    def delta(self, delta: conductor_pb2.TokenDelta | None) -> None:
        """Tokens and text; None for nothing."""
        if delta is None:
            return
        last = self._waiting.get(delta.choice)
        if last is not None:
            last.delta.token_ids.extend(delta.token_ids)
            last.delta.text += delta.text
            if delta.HasField("logprobs"):
                last.delta.logprobs.MergeFrom(delta.logprobs)
            return
        self._waiting[delta.choice] = conductor_pb2.GenerateResponse(delta=delta)
        self._put(self._waiting[delta.choice], at_once=not self._whole)

    def finished(self, finished: conductor_pb2.Finished) -> None:
        """The answer is complete; nothing follows."""
        self._put(conductor_pb2.GenerateResponse(finished=finished))
        self.end()

    def end(self, failure: MoonpoolError | None = None) -> None:
        """Nothing follows but the failure."""
        self._ended, self._failure = True, failure
        self._changed.set()

    def drop(self) -> None:
        """Another call tells the client all of it: nothing follows, nor what waits."""
        self._messages.clear()
        self._waiting.clear()
        self.end()

    async def next(self) -> conductor_pb2.GenerateResponse | None:
        """The next message, None after the last.

        Raises:
            MoonpoolError: the failure.
        """
        while not self._messages:
            if self._ended:
                break
            self._changed.clear()
            await self._changed.wait()
        else:
            message = self._messages.popleft()
            if self._waiting.get(message.delta.choice) is message:
                del self._waiting[message.delta.choice]
            return message
        if self._failure is not None:
            raise self._failure
        return None

    def _put(self, message: conductor_pb2.GenerateResponse, *, at_once: bool = True) -> None:
        self._messages.append(message)
        if at_once:
            self._changed.set()


MAX_TIMES = 512
"""Times of tokens that are kept for `Explain`."""


@dataclass(slots=True)
class Session:
    """A request that the core has not ended.

    Attributes:
        ask: what the core knows of it.
        number: its first one at the core; it gets another one where it is taken back.
        answer: the tokens and the text so far.
        first_seen: is told of the first token.
        kv_delivered: is told when the KV has arrived at decode, maybe after the answer's end.
        outgoing: what its client is to be told.
        keys: of all full blocks of the prompt and the tokens at the last placement.
        secret: who knows it may resume the request.
        clock: of the core's times, seconds.
        resumes: how often its client has resumed it.
        placement: the last one; `placements` how many there were, `sequence` under which engines have it.
        started: decode was told to start there.
        opening_logprobs: of the tokens with which decode begins, where they are wanted.
        prompt_unscored: the client wants the prompt's log probabilities, and they are not known here.
        transient: its KV was deleted meanwhile: engines keep nothing of it.
        story: what it has gone through; usage and times are the answer's.
    """

    ask: RequestSpec
    answer: OutputState
    first_seen: Callable[[Session], None]
    kv_delivered: Callable[[Session], None]
    keys: list[BlockKey]
    secret: bytes
    clock: Callable[[], float]
    number: int = field(init=False)
    outgoing: OutputQueue = field(init=False)
    resumes: int = 0
    placement: conductor_pb2.Placement = field(default_factory=conductor_pb2.Placement)
    placements: int = 0
    sequence: str = ""
    started: bool = False
    opening_logprobs: Logprobs | None = None
    transient: bool = False
    prompt_unscored: bool = field(init=False)
    story: conductor_pb2.Timeline = field(default_factory=conductor_pb2.Timeline)
    _hashed: int = 0
    _spec: kv_pb2.SequenceSpec | None = None
    _finished: conductor_pb2.Finished | None = None
    _placed: conductor_pb2.Placed | None = None
    _scored: conductor_pb2.PromptLogprobs | None = None

    def __post_init__(self) -> None:
        self.number = self.ask.number
        self.prompt_unscored = self.ask.scored
        self.outgoing = OutputQueue(whole=self.answer.request.whole)
        self.story.tenant = self.answer.request.tenant
        self.story.arrived_at = time.time() - (self.clock() - self.answer.arrived)

    @property
    def reusable_keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that need not be computed wherever they are: none where the prompt is to be scored."""
        return () if self.prompt_unscored else tuple(self.keys)

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self.ask.deadline - self.clock(), 0.001)

    def spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        """The engines' form of what is placed under this id."""
        if self._spec is None or self._spec.request_id != sequence:
            answer, scored = self.answer, self.prompt_unscored
            self._spec = answer.request.sequence(sequence, answer.continued[: self._hashed], self.keys, scored=scored)
            self._spec.transient = self.transient
        return self._spec

    def forget(self, selection: KVSelection, namespace: bytes) -> None:
        """KV was deleted, maybe this request's."""
        named = self.answer.request.tenant in selection.tenants or namespace in selection.namespaces
        if named or not selection.keys.isdisjoint(self.keys):
            self.transient, self._spec = True, None

    def rehash(self) -> int:
        """Keys of all full blocks of the prompt and of what is continued of the answer; returns the latter's length."""
        self._spec = None
        self._hashed = len(self.answer.continued)
        self.keys = self.answer.request.keys_with(self.answer.continued)
        return self._hashed

    def placed(self, placement: conductor_pb2.Placement, sequence: str, target: DecodeReservation | None) -> None:
        """Tells the client where its request goes, and how to resume it.

        Under the name that it has already it is placed once: a prefill instance has not taken it.
        """
        request, corrected = self.answer.request, sequence == self.sequence
        self.placement, self.sequence, self.started = placement, sequence, False
        self.placements += not corrected
        self._placed = conductor_pb2.Placed(
            request_id=request.id,
            placement=placement,
            prompt_tokens=len(request.prompt),
            seed=request.sampling.seed or 0,
            resume=resume_point(self.secret, placement, sequence, target),
            corrected=corrected,
        )
        self.outgoing.placed(self._placed)

    # --- clients that resume ----------------------------------------------------------------------------------------

    def resumed(self, resume: ResumeRequest) -> None:
        """The request was another conductor's, or another call's: text that its client lacks follows."""
        self.resumes = resume.resumed.fence
        self.placement.CopyFrom(resume.point.placement)
        self.rehash()
        for choice in self.answer.choices:
            self.outgoing.delta(choice.rest() if choice.finish else None)

    def rejoin(self, resume: ResumeRequest) -> None:
        """Another call of the same client takes the place of the one so far, which ends.

        Raises:
            InvalidRequest: what the client says that it has is not what it was told.
            Unavailable: it has more than is known here. Another conductor went on meanwhile: the tokens come here too,
                or the sequence is known to be the other one's soon, and the request ends here.
        """
        pairs = list(zip(self.answer.choices, resume.answers, strict=True))
        if not all(choice.has(had) or choice.lags(had) for choice, had in pairs):
            raise InvalidRequest("resume.token_ids", "are not those that were told")
        if any(choice.lags(had) for choice, had in pairs):
            raise Unavailable("the client has tokens that have not come here yet")
        self.outgoing.drop()
        self.outgoing, self.resumes = OutputQueue(whole=self.answer.request.whole), resume.resumed.fence
        placed = self._placed
        if placed is not None and placed.resume != resume.point:
            placed.corrected = placed.resume.sequence == resume.point.sequence
            self.outgoing.placed(placed)
        if resume.unscored and self._scored is not None:
            self.outgoing.prompt_logprobs(self._scored)
        for choice, had in pairs:
            self.outgoing.delta(choice.again(had))

    def fenced(self, number: int) -> bool:
        """Another conductor has taken the sequence over, by a call that its client made earlier than its last one here.

        Returns:
            Whether it is to be taken back; then it is a new request for the core, of this number.
        """
        resumed = self.ask.resumed
        if self.resumes <= (resumed.fence if resumed is not None else 0):
            return False
        if self._placed is not None:
            point = self._placed.resume
            sequence, target = point.sequence, target_of(point)
        else:
            assert resumed is not None, "what was not placed here was resumed here"
            sequence, target = resumed.sequence, resumed.target
        target = None if self.prompt_unscored else target  # as for a client that resumes without them
        self.ask = replace(self.ask, number=number, resumed=ResumeState(self.rehash(), self.resumes, sequence, target))
        return True

    # --- what comes from the instances ------------------------------------------------------------------------------

    def first_token(self, first: prefill_pb2.FirstToken) -> kv_pb2.FinishReason.ValueType:
        """Takes a prefill's token of each answer; returns the reason when they end the request.

        Where there are beams these are candidates, and end nothing.

        Raises:
            StreamBroken: they are not one for each answer, or were others before; or have no log probabilities.
        """
        answer = self.answer
        self._computed(first)
        token_ids = [first.token_id, *first.further_token_ids]
        if answer.request.has_beams:
            if len(first.log_probabilities) != len(token_ids):
                raise StreamBroken(f"{len(first.log_probabilities)} log probabilities came for {len(token_ids)} tokens")
            answer.prefilled(first)
            answer.opening = first
            return kv_pb2.FINISH_REASON_UNSPECIFIED
        if len(token_ids) != len(answer.choices):
            raise StreamBroken(f"{len(token_ids)} first tokens came for {len(answer.choices)} answers")
        answer.prefilled(first)
        self._prompt_scored(first)
        found = logprobs_from_proto(first.logprobs) if first.HasField("logprobs") else None
        self._check(found, len(token_ids))
        for choice, token_id in enumerate(token_ids):
            its = found.part(choice, choice + 1) if found is not None else None
            self.tokens(NewTokens(choice, self._hashed, [token_id], logprobs=its))
        self.opening_logprobs = found
        return answer.finish

    def _computed(self, first: prefill_pb2.FirstToken) -> None:
        """Notes how the prompt was computed, the last time that it was."""
        story = self.story
        for field_name in ("loads", "chunks", "transfer_tail_s", "sent_bytes"):
            story.ClearField(field_name)
        story.local_tokens = first.local_tokens
        story.loads.extend(first.loads)
        story.chunks.extend(first.chunks)

    def delivered(self, finished: prefill_pb2.PrefillFinished) -> None:
        """The KV has arrived at decode."""
        self.story.transfer_tail_s, self.story.sent_bytes = finished.transfer_tail_s, finished.sent_bytes
        self.kv_delivered(self)

    def timeline(self, *, over: bool) -> conductor_pb2.Timeline:
        """What the request has gone through, up to now; `over`: to its end."""
        now = self._finished or self.answer.finished(self.placement, self.clock())
        story = conductor_pb2.Timeline(usage=now.usage, timing=now.timing)
        story.MergeFrom(self.story)
        if not over:
            story.timing.e2e_s = 0.0
        return story

    @property
    def opening_tokens(self) -> list[int]:
        """With which decode begins: the token after those that were placed of one answer, the first ones of several.

        An answer may have more tokens by then (`known_tokens`).
        """
        answer = self.answer
        if answer.opening is not None:
            return [answer.opening.token_id, *answer.opening.further_token_ids]
        return [choice.tokens[self._hashed] for choice in answer.choices]

    @property
    def known_tokens(self) -> Sequence[Sequence[int]]:
        """Of each answer, the tokens behind its opening one that it has already; empty where they are few, or beams'.

        One answer has some when it is being moved, several also when they are placed anew.
        """
        if self.answer.request.has_beams:
            return ()
        known = [choice.tokens[self._hashed + 1 :] for choice in self.answer.choices]
        return known if max(map(len, known)) >= MIN_KNOWN_TOKENS else ()

    def _prompt_scored(self, first: prefill_pb2.FirstToken) -> None:
        """Tells the client the prompt's log probabilities, where it wants them: once, whatever is placed anew.

        Raises:
            StreamBroken: they are not those of the prompt's tokens but the first.
        """
        request = self.answer.request
        if not self.prompt_unscored:
            return
        scores = logprobs_from_proto(first.prompt_logprobs)
        if len(scores) != len(request.prompt) - 1 or not scores.consistent:
            raise StreamBroken(f"{len(scores)} log probabilities came for a prompt of {len(request.prompt)} tokens")
        self.prompt_unscored = False
        self._scored = conductor_pb2.PromptLogprobs(token_ids=request.prompt, logprobs=first.prompt_logprobs)
        self.outgoing.prompt_logprobs(self._scored)

    def _check(self, found: Logprobs | None, tokens: int) -> None:
        """Log probabilities are there if they are wanted, one for each of some tokens.

        Raises:
            StreamBroken: they are not.
        """
        wanted = self.answer.request.sampling.logprobs is not None
        if wanted != (found is not None) or (found is not None and (len(found) != tokens or not found.consistent)):
            raise StreamBroken(f"the log probabilities are not those of {tokens} tokens")

    def tokens(self, new: NewTokens) -> int:
        """Takes tokens of an answer. Those known already are dropped.

        Returns:
            How many the answer has taken.

        Raises:
            StreamBroken: tokens are missing, or are not those that were told before.
        """
        answer, before = self.answer, self.answer.tokens
        if not 0 <= new.choice < len(answer.choices):
            raise StreamBroken(f"there is no answer {new.choice}")
        choice, token_ids = answer.choices[new.choice], new.token_ids
        if token_ids:
            self._check(new.logprobs, len(token_ids))
        known = choice.known(new.position, token_ids)
        choice.score = new.score
        logprobs = new.logprobs.part(known) if new.logprobs is not None else None
        now = self.clock()
        if len(token_ids) > known and len(self.story.token_s) < MAX_TIMES:
            self.story.token_s.append(now - answer.arrived)
        self.outgoing.delta(answer.extend(new.choice, token_ids[known:], now, logprobs))
        if new.reason:
            self.outgoing.delta(choice.end(new.reason))
        if not before and answer.tokens:
            self.first_seen(self)
        return answer.tokens - before

    def complete(self, finish: CompletionReason) -> None:
        """Tells the client the rest."""
        for delta in self.answer.end(FINISH_REASONS[finish]):
            self.outgoing.delta(delta)
        if not self.started:
            self.placement.decode = ""
        self._finished = self.answer.finished(self.placement, self.clock())
        self.outgoing.finished(self._finished)
