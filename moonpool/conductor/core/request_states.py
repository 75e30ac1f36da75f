"""States of a request, phases of its attempt, and the timers for both.

docs/states.md has the diagrams, which are generated from the tables here.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


class RequestState(Enum):
    """What a request does now."""

    ARRIVED = 0
    """Just taken in. No request is in this state between two events."""
    PLACED = 1
    """Has an attempt: instances are chosen, and calls carry the attempt out."""
    WAITING_MEMORY = 2
    """No decode instance had enough KV blocks. Waits in `DecodeMemoryQueue`."""
    WAITING_SLO = 3
    """No placement kept the SLO, and the client lets the request wait. Waits in `SloQueue`."""
    WAITING_INSTANCE = 4
    """No instance could take the request. Waits until one joins."""
    BACKOFF = 5
    """An attempt failed. Waits before the next one."""
    REHASHING = 6
    """Waits for the block keys of the prompt and the answer so far."""
    WAITING_OWNER = 7
    """Resumed. Waits for the decode instance that runs the sequence to join this conductor."""
    TAKEN_OVER = 8
    """Follows a sequence without an attempt here: another conductor started the sequence, or moving the sequence away
    failed.
    """
    ENDED = 9
    """Complete, failed, or dropped."""


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.ARRIVED: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.WAITING_OWNER,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.PLACED: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_MEMORY,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.BACKOFF,
        RequestState.REHASHING,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.WAITING_MEMORY: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.WAITING_INSTANCE,
        RequestState.ENDED,
    }),
    RequestState.WAITING_SLO: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_SLO,
        RequestState.ENDED,
    }),
    RequestState.WAITING_INSTANCE: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.ENDED,
    }),
    RequestState.BACKOFF: frozenset({
        RequestState.REHASHING,
        RequestState.ENDED,
    }),
    RequestState.REHASHING: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.WAITING_OWNER: frozenset({
        RequestState.PLACED,
        RequestState.WAITING_INSTANCE,
        RequestState.TAKEN_OVER,
        RequestState.ENDED,
    }),
    RequestState.TAKEN_OVER: frozenset({
        RequestState.BACKOFF,
        RequestState.REHASHING,
        RequestState.ENDED,
    }),
    RequestState.ENDED: frozenset(),
}  # fmt: skip


class PrefillPhase(Enum):
    """How far an attempt is at the prefill instance."""

    NOT_CALLED = 0
    """Decode memory is reserved first."""
    CALLED = 1
    """The prompt waits or is computed: at prefill, or at an instance in the role both."""
    FIRST_TOKEN = 2
    """The first token has come. KV may still be on the way to decode."""
    ENDED = 3
    """The call has ended, or is not waited for, or decode computes the prompt."""


PREFILL_TRANSITIONS: Mapping[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.NOT_CALLED: frozenset({PrefillPhase.CALLED, PrefillPhase.ENDED}),
    PrefillPhase.CALLED: frozenset({PrefillPhase.NOT_CALLED, PrefillPhase.FIRST_TOKEN, PrefillPhase.ENDED}),
    PrefillPhase.FIRST_TOKEN: frozenset({PrefillPhase.ENDED}),
    PrefillPhase.ENDED: frozenset(),
}
"""CALLED leads back to NOT_CALLED if the instance's queue was longer than predicted (`StalePlacement`)."""


class DecodePhase(Enum):
    """How far an attempt is at decode."""

    NOT_CALLED = 0
    """Decode is not needed, or not called yet."""
    RESERVING = 1
    """Decode instances are asked for memory."""
    RESERVED = 2
    """An instance keeps KV blocks for the request."""
    STARTED = 3
    """The sequence is started there. The sequence runs as soon as the KV has arrived."""
    STREAMING = 4
    """Tokens have come."""
    ENDED = 5
    """The sequence has ended, or the instance is lost."""


DECODE_TRANSITIONS: Mapping[DecodePhase, frozenset[DecodePhase]] = {
    DecodePhase.NOT_CALLED: frozenset({DecodePhase.RESERVING}),
    DecodePhase.RESERVING: frozenset({DecodePhase.RESERVED}),
    DecodePhase.RESERVED: frozenset({DecodePhase.STARTED, DecodePhase.ENDED}),
    DecodePhase.STARTED: frozenset({DecodePhase.STREAMING, DecodePhase.ENDED}),
    DecodePhase.STREAMING: frozenset({DecodePhase.ENDED}),
    DecodePhase.ENDED: frozenset(),
}


class TimerKind(Enum):
    """What a timer of the scheduler is for; the number in a `TimerKey` is a request's or a call's."""

    DEADLINE = 0
    """A request must have ended."""
    WAIT = 1
    """A request has waited for a placement as long as allowed."""
    BACKOFF = 2
    """A request's pause between two attempts is over."""
    RENEWAL = 3
    """A request's reservation at decode must be renewed."""
    DELIVERY = 4
    """Decode must have said whether a request's KV has arrived."""
    OWNER = 5
    """The instance that runs a resumed request's sequence must have joined."""
    RESERVE = 6
    """A `CallReserve` has taken too long: the next instance is asked."""
    LINGER = 7
    """A prefill call must have ended after the answer is complete."""
    SLO_QUEUE = 8
    """Requests in the `SloQueue` look for a placement again."""


TimerKey = tuple[TimerKind, int]
REQUEST_TIMERS = (
    TimerKind.DEADLINE,
    TimerKind.WAIT,
    TimerKind.BACKOFF,
    TimerKind.RENEWAL,
    TimerKind.DELIVERY,
    TimerKind.OWNER,
)
"""Timers numbered by a request. They end with the request."""


def checked(transitions: Mapping[S, frozenset[S]], before: S, after: S) -> S:
    """Return `after`, which the table must allow behind `before`."""
    assert after in transitions[before], f"{before.name} -> {after.name} is no transition"
    return after
