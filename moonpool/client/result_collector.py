"""From a stream's messages to events and a result."""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Sequence

from moonpool.base.contracts import are_logprobs_of, logprobs_from_proto
from moonpool.base.errors import StreamBroken
from moonpool.base.logprobs import LogprobRows, Logprobs, PromptLogprobRows, TokenLogprobs
from moonpool.client.translate import from_message
from moonpool.client.types import (
    Choice,
    FinishReason,
    GenerateResult,
    Placement,
    Timing,
    TokenEvent,
    Usage,
)
from moonpool.v1 import conductor_pb2, kv_pb2

_FINISH: dict[int, FinishReason] = {
    kv_pb2.FINISH_REASON_STOP: "stop",
    kv_pb2.FINISH_REASON_LENGTH: "length",
    kv_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


class ResultCollector:
    """Turns a stream's messages into events and a result, and checks that no token is missing or repeated."""

    def __init__(self) -> None:
        self.result: GenerateResult | None = None
        """The whole answer; None before the end."""
        self.request_id = ""
        self.prompt_tokens = 0
        """Number of prompt tokens; 0 before the request is placed."""
        self.placements: list[Placement] = []
        self.resumes = 0
        """How many times the stream was resumed."""
        self._seed = 0
        self._point: conductor_pb2.ResumePoint | None = None
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)  # by choice
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._logprobs: defaultdict[int, Logprobs] = defaultdict(Logprobs)
        self._prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._new_prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # no event has had these
        self._embedding: tuple[float, ...] = ()

    @property
    def started(self) -> bool:
        """Whether a message has arrived."""
        return bool(self.placements or self._tokens or self.result)

    @property
    def resumable(self) -> bool:
        """Whether the conductor has sent the point from which the stream can be resumed."""
        return self._point is not None

    def resume(self, request: conductor_pb2.GenerateRequest) -> conductor_pb2.GenerateRequest:
        """The request for the rest of the answer; at first the original request."""
        if self._point is None:
            return request
        self.resumes += 1
        again = conductor_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.request_id, again.from_position = self.request_id, len(self._tokens[0])
        if self._seed:  # 0: none was drawn
            again.sampling.seed = self._seed
        first, *further = [
            conductor_pb2.AnswerSoFar(token_ids=self._tokens[choice], text_chars=sum(map(len, self._text[choice])))
            for choice in range(max(1, request.sampling.n))
        ]
        again.resume.CopyFrom(
            conductor_pb2.Resume(
                point=self._point,
                token_ids=first.token_ids,
                text_chars=first.text_chars,
                count=self.resumes,
                further=further,
                prompt_scored=bool(self._prompt_logprobs or self._embedding),
            )
        )
        return again

    def take(self, message: conductor_pb2.GenerateResponse) -> TokenEvent | None:
        """Take a message. Returns the message's event, or None.

        Raises:
            StreamBroken: tokens are missing or repeated.
        """
        match message.WhichOneof("event"):
            case "placed":
                self.request_id = message.placed.request_id
                self.prompt_tokens = message.placed.prompt_tokens
                self._seed = message.placed.seed
                self._point = message.placed.resume if message.placed.HasField("resume") else None
                if message.placed.corrected:
                    del self.placements[-1:]
                self.placements.append(from_message(Placement, message.placed.placement))
            case "delta":
                return self._delta(message.delta)
            case "prompt_logprobs":
                self._prompt_logprobs = _prompt_logprobs(message.prompt_logprobs)
                self._new_prompt_logprobs = self._prompt_logprobs
            case "embedding":
                self._embedding = _floats(message.embedding.values)
            case "finished":
                self.result = self._finished(message.finished)
        return None

    def ended(self) -> GenerateResult:
        """The result, at the end of the stream.

        Raises:
            StreamBroken: the stream ended before the answer.
        """
        if self.result is None:
            raise StreamBroken("the stream ended before the answer did")
        return self.result

    def _delta(self, delta: conductor_pb2.TokenDelta) -> TokenEvent:
        tokens = self._tokens[delta.choice]
        if delta.position != len(tokens):
            raise StreamBroken(f"expected token {len(tokens)} of the answer, got {delta.position}")
        tokens.extend(delta.token_ids)
        self._text[delta.choice].append(delta.text)
        logprobs: Sequence[TokenLogprobs] = ()
        if delta.HasField("logprobs"):
            found, before = _logprobs(delta.logprobs, delta.token_ids), self._logprobs[delta.choice]
            if before and found and before.top != found.top:
                raise StreamBroken(f"{found.top} likely tokens beside each follow {before.top}")
            before.extend(found)
            logprobs = LogprobRows(tuple(delta.token_ids), found)
        prompt_logprobs, self._new_prompt_logprobs = self._new_prompt_logprobs, ()
        return TokenEvent(
            delta.position,
            tuple(delta.token_ids),
            delta.text,
            delta.choice,
            logprobs,
            _FINISH.get(delta.reason),
            prompt_logprobs,
        )

    def _choices(self, finished: conductor_pb2.Finished) -> tuple[Choice, ...]:
        ends = finished.choices or [conductor_pb2.FinishedChoice(reason=finished.reason)]
        return tuple(
            Choice(
                list(self._tokens[index]),
                "".join(self._text[index]),
                _FINISH.get(end.reason, "cancelled"),
                end.score if end.HasField("score") else None,
                self._scored(index),
            )
            for index, end in enumerate(ends)
        )

    def _scored(self, choice: int) -> Sequence[TokenLogprobs]:
        found = self._logprobs.get(choice)
        return LogprobRows(self._tokens[choice], found) if found else ()

    def _finished(self, finished: conductor_pb2.Finished) -> GenerateResult:
        last, choices = from_message(Placement, finished.placement), self._choices(finished)
        return GenerateResult(
            request_id=self.request_id,
            token_ids=choices[0].token_ids,
            text=choices[0].text,
            finish_reason=choices[0].finish_reason,
            usage=from_message(Usage, finished.usage),
            timing=from_message(Timing, finished.timing),
            placement=last,
            seed=self._seed,
            placements=(*self.placements[:-1], last),
            choices=choices,
            resumes=self.resumes,
            logprobs=choices[0].logprobs,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )


def _logprobs(message: kv_pb2.Logprobs, token_ids: Sequence[int]) -> Logprobs:
    """Log probabilities of tokens.

    Raises:
        StreamBroken: their number does not match the tokens.
    """
    found = logprobs_from_proto(message)
    if len(found) != len(token_ids) or not found.consistent:
        raise StreamBroken(f"the log probabilities are not those of {len(token_ids)} tokens")
    return found


def _floats(values: bytes) -> tuple[float, ...]:
    """Little-endian float32 as numbers.

    Raises:
        StreamBroken: the bytes are no whole numbers.
    """
    if len(values) % 4:
        raise StreamBroken(f"{len(values)} bytes are no float32 numbers")
    return struct.unpack(f"<{len(values) // 4}f", values)


def _prompt_logprobs(message: conductor_pb2.PromptLogprobs) -> PromptLogprobRows:
    """Log probabilities of a prompt's tokens.

    Raises:
        StreamBroken: their number does not match the tokens.
    """
    tokens = array("i", message.token_ids[1:])
    if not are_logprobs_of(message.logprobs, len(tokens)):
        raise StreamBroken(f"the log probabilities are not those of {len(tokens)} tokens")
    return PromptLogprobRows(LogprobRows(tokens, message.logprobs))
