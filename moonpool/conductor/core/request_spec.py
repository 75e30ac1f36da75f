"""A request as the core sees it: no tokens, a number and latency limits."""

from __future__ import annotations

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.conductor.core.output_lengths import Stratum, hinted

ATTEMPT_MARK = "~"  # separates a request's id from the number of the attempt in the ids that engines see
MIN_KNOWN_TOKENS = 4
"""Fewer tokens that a sequence has elsewhere are generated again: that is about as quick as prefilling them."""


@frozen
class RequestSpec:
    """A request without tokens.

    Attributes:
        number: names the request in events and actions.
        id: the client's name of the request.
        prompt_tokens: length of the prompt.
        max_tokens: tokens generated at most.
        prompt_key: hash of the prompt.
        slo: latency limits.
        arrived: time of arrival, seconds on the core's clock.
        deadline: time at which the request fails.
        choices: sequences that run together. Prefill computes the prompt alone for several.
        deferred: decode sends the answers whole, at their end; a new attempt begins again.
        tenant: owner of the request.
        scored: log probabilities or the embedding of the prompt are returned, which prefill computes.
        resumed: progress of a resumed request; None = new.
        priority: among the tenant's requests; lower ones go first.
        weight: the tenant's share relative to other tenants.
        needs: sampling options that not every engine has, as far as the request sets them.
        expected_tokens: tokens that the client expects of the answer; 0 = the client says nothing.
        session: what the client says of the session that the request is a turn of; None = nothing.
        pictures: where pictures stand in the prompt, [begin, end).
        row_keys: for each picture, the key of the first block of its encoded rows.
    """

    number: int
    id: str
    prompt_tokens: int
    max_tokens: int
    prompt_key: bytes
    slo: SloLimits
    arrived: float
    deadline: float
    choices: int = 1
    deferred: bool = False
    tenant: str = ""
    scored: bool = False
    resumed: ResumeState | None = None
    priority: int = 0
    weight: float = 1.0
    needs: tuple[str, ...] = ()
    session: SessionTurn | None = None
    expected_tokens: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
    row_keys: tuple[bytes, ...] = ()

    @property
    def queue_key(self) -> QueueKey:
        """The request's position among waiting requests."""
        return QueueKey(self.tenant, priority_rank(self.arrived, self.priority), self.number, self.weight)

    def queue_key_at(self, now: float) -> QueueKey:
        """Return the request's position at an instance on arrival now."""
        return QueueKey(self.tenant, priority_rank(now, self.priority), self.number, self.weight)

    @property
    def stratum(self) -> Stratum:
        """Requests that share forecasts of the answer's length."""
        return hinted(self.tenant, self.expected_tokens)


@frozen
class SloLimits:
    """What a request expects, seconds; None = no limit.

    `queue_s`: longest wait at the conductor before a refusal, not counted in `ttft_s`.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float = 0.0


@frozen
class ResumeState:
    """A request's progress when the client has lost the conductor.

    Attributes:
        tokens: tokens of the answer that the client has; 0 with several answers.
        fence: number of times the request has resumed, including now.
        sequence: last id under which decode knew the request.
        target: reservation at decode then, without the address. None = there was none.
    """

    tokens: int
    fence: int
    sequence: str
    target: DecodeReservation | None


@frozen
class DecodeReservation:
    """KV blocks that a decode instance keeps for one transfer."""

    decode: str
    epoch: int
    address: str
    transfer_id: int
    generation: int
    held_blocks: int
