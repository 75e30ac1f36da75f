"""A request and its present attempt, as data: what it waits for, and how far its legs at prefill and decode are."""

from dataclasses import dataclass, field
from enum import Enum

from services.conductor.core.cost import DecodeChoice
from services.conductor.core.failures import Failure, Series
from services.conductor.core.messages import ATTEMPT_MARK, Ask, Target
from services.conductor.core.pace import NOTHING, Foreseen
from services.conductor.core.plan import Plan


class PrefillLeg(Enum):
    """Where a request is at prefill."""

    NONE = 0
    SENT = 1
    TOKEN = 2
    OVER = 3


class DecodeLeg(Enum):
    """Where a request is at decode."""

    NONE = 0
    ASKED = 1
    PROMISED = 2
    STARTED = 3
    STREAMING = 4
    OVER = 5


@dataclass(slots=True)
class Attempt:
    """One placement of a request.

    Attributes:
        sequence: the id that engines see. It ends with the attempt's number, which is the fence: what earlier attempts
            still send is not mixed up with this one's.
        plan: where it goes; `incarnation` is that of the prefill instance.
        options: decode instances that were not asked yet, best first.
        asked: the `Reserve` that is waited for; 0 for none.
        late: those that have taken too long. The first promise counts, also a late one.
        full: the last refusal for want of room or speed; `failed` the last failure to ask.
        target: the promise.
        claim: of the prompt at prefill; 0 once it is released.
        lease_s: how long decode keeps it without news.
        promise: claim of the promised room, until the sequence's call holds it.
        delivered: decode has everything.
        places: instances that have, or had, a part in it.
        begun: when it was planned; `queued_s` before that the request had looked for a place in vain.
        token_at: when prefill gave its token; None before.
        pace: what of the times between its tokens is foreseen.
        stale: so many prefill instances in a row have not taken the prompt, as their queues were longer than thought.
        max_queue_s: the one that is called need not take it where its queue is longer; None = it must, or has taken it.
    """

    sequence: str
    plan: Plan
    incarnation: int
    options: list[DecodeChoice]
    claim: int
    prefill: PrefillLeg = PrefillLeg.NONE
    decode: DecodeLeg = DecodeLeg.NONE
    prefill_io: int = 0
    sequence_io: int = 0
    asked: int = 0
    late: list[int] = field(default_factory=list)
    full: Failure | None = None
    failed: Failure | None = None
    target: Target | None = None
    lease_s: float = 0.0
    promise: int = 0
    delivered: bool = False
    places: list[str] = field(default_factory=list)
    begun: float = 0.0
    token_at: float | None = None
    pace: Foreseen = NOTHING
    queued_s: float = 0.0
    stale: int = 0
    max_queue_s: float | None = None

    @property
    def may_be_stale(self) -> bool:
        """Whether prefill may answer that its queue is longer than thought."""
        return self.prefill is PrefillLeg.SENT and self.max_queue_s is not None

    @property
    def torn(self) -> bool:
        """Prefill is over, and nothing says that decode has everything."""
        return self.prefill is PrefillLeg.OVER and not self.delivered and self.decode is not DecodeLeg.STREAMING

    def runs(self, *, beams: bool) -> bool:
        """Whether decode computes the sequence; of beams, which say nothing before their end, when it can."""
        return self.decode is DecodeLeg.STREAMING or (beams and self.decode is DecodeLeg.STARTED and self.delivered)


class Phase(Enum):
    """What a request waits for: an attempt, room, a member, a pause to end, or its keys.

    QUEUE: a placement that keeps its limits. A resumed one: the instance that has its sequence, or the sequence that
    was taken over there. A sequence that is to be moved and finds no place is followed like one that was taken over.
    """

    PLACED = 0
    ROOM = 1
    MEMBER = 2
    PAUSE = 3
    KEYS = 4
    OWNER = 5
    ADOPTED = 6
    QUEUE = 7


@dataclass(slots=True)
class Request:
    """One request from its arrival to its end.

    Attributes:
        ask: what was asked for.
        keys: of all full blocks of the prompt and the tokens at the last placement.
        phase: what is waited for.
        tokens: length of the answer so far; 0 when there are several, of which prefill computes none.
        made: tokens that have come of all answers here; none of beams before their end.
        attempts: placements so far; the next one's number.
        failures: the latest attempts, as far as they failed.
        suspects: instances that failed it.
        attempt: the present one; None while it waits.
        adopted: the call that follows a sequence without an attempt: another conductor had it, or it is being moved;
            0 for none.
        stays_until: it is not moved before; there was no other place.
        reserves: `Reserve` calls that are out, of all attempts.
        unasked: placements in a row for which no decode instance could be asked.
        refusal: what the client is told when waiting is in vain.
        waits_since: when it began to look for a place in vain; None while it has one.
        queued_s: how long it has looked before, as far as that does not count in its limit.
        charged: its tenant has paid for it, and it has counted for copies.
        recovering: it was placed before, or could not be for a passing reason: it is not refused early.
    """

    ask: Ask
    keys: tuple[bytes, ...]
    phase: Phase = Phase.PLACED
    tokens: int = 0
    made: int = 0
    attempts: int = 0
    failures: Series = field(default_factory=Series)
    suspects: list[str] = field(default_factory=list)
    attempt: Attempt | None = None
    adopted: int = 0
    stays_until: float = 0.0
    reserves: int = 0
    unasked: int = 0
    refusal: Failure | None = None
    waits_since: float | None = None
    queued_s: float = 0.0
    charged: bool = False
    recovering: bool = False

    @property
    def moving(self) -> bool:
        """Whether its sequence goes on while it is placed anew."""
        return bool(self.adopted) and self.phase is not Phase.ADOPTED

    @property
    def begun(self) -> bool:
        """Whether some of its answer is here, or is being computed."""
        placed = self.attempt is not None and self.attempt.prefill is not PrefillLeg.NONE
        return bool(self.tokens or self.made or self.adopted or placed)

    @property
    def next_sequence(self) -> str:
        """The id under which engines see its next attempt: with the fence, which no earlier attempt had."""
        resumed, number = self.ask.resumed, self.attempts
        fence = f"{resumed.fence}.{number}" if resumed is not None else str(number)
        return f"{self.ask.id}{ATTEMPT_MARK}{fence}" if number or resumed is not None else self.ask.id

    def attempt_as(self, sequence: str) -> Attempt | None:
        """The present attempt, if engines see it under this id: the fence."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.sequence == sequence else None

    def elapsed_s(self, now: float) -> float:
        """Seconds since it arrived that count in its limit for the first token."""
        until = now if self.waits_since is None or not self.ask.slo.queue_s else self.waits_since
        return until - self.ask.arrived - self.queued_s

    def grow(self, tokens: int) -> None:
        """The answer, or one of them, has so many more tokens."""
        self.made += tokens
        if self.ask.choices == 1 and not self.ask.beams:
            self.tokens += tokens

    def suspect(self, instance: str) -> None:
        """Avoids an instance from now on."""
        if instance not in self.suspects:
            self.suspects.append(instance)
