"""What happened to a request, for `Explain` and the cluster's state."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.conductor.valid_request import ValidRequest
from moonpool.v1 import conductor_pb2, prefill_pb2

MAX_TOKEN_TIMES = 512
"""Token times that are kept."""


class RequestHistory:
    """A request's placements, how its prompt was computed, and when its tokens came.

    Args:
        request: the request.
        clock: the core's clock, seconds.
        wall_clock: gives seconds since 1970.

    Attributes:
        attempts: what is known of each placement.
        timeline: what is known of the request, without usage and times.
        cached_tokens: tokens of the prompt that were not computed.
        loaded_tokens: of these, those loaded from kvstores and other instances.
        transport: name of the transport that takes the prompt's KV to decode.
        queue_s, prefill_s: of the prefill that gave the first token.
        first_token_at, last_token_at: times of the first and the last new token.
    """

    def __init__(self, request: ValidRequest, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived = request.spec.arrived
        self._prompt_tokens = len(request.prompt)
        self._block_size = request.block_size
        self.attempts: list[conductor_pb2.Attempt] = []
        self._attempts: dict[str, conductor_pb2.Attempt] = {}  # by sequence
        self._cause = ""  # of the next placement
        self._opened_by = ""  # sequence that gave the first token
        self.timeline = conductor_pb2.Timeline(tenant=request.spec.tenant)
        self.timeline.arrived_at = wall_clock() - (clock() - request.spec.arrived)
        self.cached_tokens = self.loaded_tokens = 0
        self.transport = ""
        self.queue_s = self.prefill_s = 0.0
        self.first_token_at = self.last_token_at = 0.0

    @property
    def since_arrival_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._arrived

    # --- placements ---------------------------------------------------------------------------------------------------

    def placed(self, attempt: conductor_pb2.Attempt, sequence: str, generated: int, *, corrects: bool = False) -> None:
        """Begin an attempt, which computes the prompt and `generated` tokens; `corrects`: in place of the last one."""
        if corrects:
            self.attempts.pop()
        attempt.cause, attempt.placed_s = self._cause, self.since_arrival_s
        attempt.prompt_tokens = self._prompt_tokens + generated
        self.attempts.append(attempt)
        self._attempts[sequence] = attempt

    def taken_over(self, attempt: conductor_pb2.Attempt, sequence: str, generated: int) -> None:
        """Begin an attempt that another conductor has placed."""
        self._cause = self._cause or "the client resumed the request at this conductor"
        self.placed(attempt, sequence, generated)

    def given_up(self, cause: str) -> None:
        """End the last placement; another one follows."""
        self._cause = cause
        if self.attempts and not self.attempts[-1].ended_s:
            self.attempts[-1].ended_s = self.since_arrival_s

    # --- prompt -------------------------------------------------------------------------------------------------------

    def prefilled(self, first: prefill_pb2.FirstToken, sequence: str, *, begun: bool) -> None:
        """Keep how the prompt was computed: in the attempt and, if the answer has not begun, in the timeline."""
        if (attempt := self._attempts.get(sequence)) is not None:
            attempt.local_tokens, attempt.loaded_tokens = first.local_tokens, first.loaded_tokens
            attempt.queue_s, attempt.prefill_s, attempt.transport = first.queue_s, first.prefill_s, first.transport
            attempt.computed_s, attempt.overtaken_tokens = self.since_arrival_s, first.overtaken_tokens
            attempt.encode_s, attempt.rows_s, attempt.rows_tokens = first.encode_s, first.rows_s, first.rows_tokens
            attempt.loads.extend(first.loads)
            attempt.chunks.extend(first.chunks)
        if not begun:
            self._opened_by = sequence
            self.timeline.local_tokens = first.local_tokens
            self.timeline.loads.extend(first.loads)
            self.timeline.chunks.extend(first.chunks)

    def opened(self, first: prefill_pb2.FirstToken) -> None:
        """Keep the figures of the prefill that gave the first token."""
        self.cached_tokens = min(first.local_tokens + first.loaded_tokens, self._prompt_tokens)
        self.loaded_tokens = min(first.loaded_tokens, self.cached_tokens)
        self.queue_s, self.prefill_s, self.transport = first.queue_s, first.prefill_s, first.transport

    def computed_at_decode(self, held_blocks: int, *, begun: bool) -> None:
        """Decode computes the prompt after the blocks already held there."""
        held_tokens = min(held_blocks * self._block_size, self._prompt_tokens - 1)
        if self.attempts:
            self.attempts[-1].local_tokens = held_tokens
        if not begun:
            self.cached_tokens = held_tokens

    def kv_delivered(self, finished: prefill_pb2.PrefillFinished, sequence: str) -> None:
        """The KV of a sequence has arrived at decode."""
        if (attempt := self._attempts.get(sequence)) is not None:
            attempt.transfer_tail_s, attempt.sent_bytes = finished.transfer_tail_s, finished.sent_bytes
        if sequence == self._opened_by:
            self.timeline.transfer_tail_s, self.timeline.sent_bytes = finished.transfer_tail_s, finished.sent_bytes

    # --- answer -------------------------------------------------------------------------------------------------------

    def tokens_came(self, now: float) -> None:
        """Note the time of tokens that are new to the answer."""
        if len(self.timeline.token_s) < MAX_TOKEN_TIMES:
            self.timeline.token_s.append(now - self._arrived)

    def tokens_sent(self, now: float, *, first: bool) -> None:
        """Note the time at which tokens go to the client."""
        self.first_token_at = now if first else self.first_token_at
        self.last_token_at = now

    def grew(self, sequence: str, tokens: int, now: float) -> None:
        """Count new tokens that a sequence gave."""
        attempt = self._attempts.get(sequence)
        if tokens and attempt is not None:
            attempt.tokens += tokens
            attempt.last_token_s = now - self._arrived
            attempt.first_token_s = attempt.first_token_s or attempt.last_token_s
