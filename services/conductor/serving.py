"""One request as the shell has it: its tokens and text, which the core never sees, and what its client is told."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.kv.keys import BlockKey
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.conductor.answer import Answer
from services.conductor.core.messages import Ask, Finish
from services.conductor.outgoing import Outgoing
from services.conductor.translate import FINISHES


@dataclass(slots=True)
class Serving:
    """A request that the core has not ended.

    Attributes:
        ask: what the core knows of it.
        answer: the tokens and the text so far.
        first_seen: is told of the first token.
        outgoing: what its client is to be told.
        keys: of all full blocks of the prompt and the tokens at the last placement.
        secret: who knows it may resume the request.
        placement: the last one; `placements` how many there were.
        promised_tbt_s: predicted seconds between tokens, by the decode instance that has promised room.
        started: decode was told to start there.
    """

    ask: Ask
    answer: Answer
    first_seen: Callable[["Serving"], None]
    keys: list[BlockKey]
    secret: bytes
    outgoing: Outgoing = field(default_factory=Outgoing)
    placement: conductor_pb2.Placement = field(default_factory=conductor_pb2.Placement)
    placements: int = 0
    promised_tbt_s: dict[str, float] = field(default_factory=dict)
    started: bool = False
    _hashed: int = 0
    _spec: kv_pb2.SequenceSpec | None = None

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self.ask.deadline - time.monotonic(), 0.001)

    def spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        """The engines' form of what is placed under this id."""
        if self._spec is None or self._spec.request_id != sequence:
            answer = self.answer
            self._spec = answer.request.sequence(sequence, answer.tokens[: self._hashed], self.keys)
        return self._spec

    def rehash(self) -> int:
        """Keys of all full blocks of the prompt and the answer so far; returns the answer's length."""
        self._spec = None
        self._hashed = len(self.answer.tokens)
        self.keys = self.answer.request.keys_with(self.answer.tokens)
        return self._hashed

    def placed(self, placement: conductor_pb2.Placement, point: conductor_pb2.ResumePoint) -> None:
        """Tells the client where its request goes, and how to resume it."""
        request = self.answer.request
        self.placement, self.started = placement, False
        self.placements += 1
        self.outgoing.placed(
            conductor_pb2.Placed(
                request_id=request.id,
                placement=placement,
                prompt_tokens=len(request.prompt),
                seed=request.sampling.seed or 0,
                resume=point,
            )
        )

    def first_token(self, first: prefill_pb2.FirstToken) -> kv_pb2.FinishReason.ValueType:
        """Takes a prefill's token; returns the reason when it ends the answer."""
        self.answer.prefilled(first)
        self.tokens([first.token_id], kv_pb2.FINISH_REASON_UNSPECIFIED)
        return self.answer.finish

    def tokens(self, token_ids: Sequence[int], reason: kv_pb2.FinishReason.ValueType) -> int:
        """Takes tokens, and with the last of them decode's reason; returns how many of them the answer has taken."""
        answer, before = self.answer, len(self.answer.tokens)
        self.outgoing.delta(answer.extend(token_ids, time.monotonic()))
        if reason:
            self.outgoing.delta(answer.end(reason))
        if not before and answer.tokens:
            self.first_seen(self)
        return len(answer.tokens) - before

    def complete(self, finish: Finish) -> None:
        """Tells the client the rest."""
        self.outgoing.delta(self.answer.end(FINISHES[finish]))
        if not self.started:
            self.placement.decode = ""
        self.outgoing.finished(self.answer.finished(self.placement, time.monotonic()))
