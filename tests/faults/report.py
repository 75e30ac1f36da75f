"""What a storm is asked to do, what became of its requests, and what really happened in it."""

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.base.transport.config import GRPC_NAME
from tests.faults.schedule import FAULTS, RESTARTED, Ask, Fault, FaultKind

REQUEST_TIMEOUT_S = 40.0
CERTAIN: tuple[FaultKind, ...] = (*RESTARTED, "stop")
"""Faults whose effect is always seen: the process itself suffers it."""
ENOUGH = 3
"""Other faults may find no connection, no traffic or no engine process; not so many times in a row."""


@dataclass(frozen=True, slots=True)
class StormPlan:
    """One storm.

    Attributes:
        seed: of everything that is drawn.
        seconds: how long faults happen.
        kinds: faults that may happen.
        targets: kinds of services that may be hit.
        clients: requests at once.
        corrupt: share of KV frames that are damaged.
        transports: the transport that KV takes.
        break_connections: share of payloads before which their transport breaks.
        gap_s: mean seconds between two faults.
        longest_prompt, longest_answer: tokens.
        conductors: side by side. With several no stream that has begun may be lost.
    """

    seed: int
    seconds: float
    kinds: Sequence[FaultKind] = FAULTS
    targets: Sequence[str] = ("prefill", "decode", "kvstore", "conductor")
    clients: int = 6
    corrupt: float = 0.05
    transports: str = "local"
    break_connections: float = 0.03
    gap_s: float = 2.0
    longest_prompt: int = 400
    longest_answer: int = 60
    conductors: int = 1

    def may_fail(self, outcome: "Outcome", why: str) -> bool:
        """Whether a client may be told that its request cannot be served; `why`: the faults that explain it."""
        return bool(why) and not (outcome.tokens and self.conductors > 1)


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    """ "complete", "cancelled", or the error's type."""
    error: str = ""
    seconds: float = 0.0
    timeout_s: float = REQUEST_TIMEOUT_S
    placements: int = 0
    loaded: bool = False
    began: float = 0.0
    """On the monotonic clock."""


@dataclass(slots=True)
class Report:
    """What happened in a storm.

    Attributes:
        plan: what was asked for.
        outcomes: of all requests, those after the storm included.
        planned: faults that were drawn.
        injected: faults that were injected; the others found their service still busy with an earlier one.
        seen: injected faults whose effect was seen (see `StormStack.hit`).
        failures: promises that were broken; empty when every promise was kept.
        rest_s: seconds until everything was at rest.
        restarted: services that were started anew.
        frames_damaged: frames that services damaged on purpose, from their logs.
        transports_opened, connections_broken: log lines of transports opened, and connections broken on purpose.
        up_share: share of the storm in which each kind of service had one that no fault disturbed.
        storm_requests: the first so many outcomes are those of the storm.
    """

    plan: StormPlan
    outcomes: list[Outcome]
    planned: list[Fault]
    injected: list[Fault] = field(default_factory=list)
    seen: list[Fault] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rest_s: float = 0.0
    restarted: int = 0
    frames_damaged: int = 0
    transports_opened: int = 0
    connections_broken: int = 0
    up_share: float = 1.0
    storm_requests: int = 0

    def __post_init__(self) -> None:
        self.storm_requests = len(self.outcomes)

    @property
    def placed_anew(self) -> int:
        """Completed requests that took more than one placement, or were resumed."""
        return sum(outcome.placements > 1 for outcome in self.outcomes)

    @property
    def per_s(self) -> float:
        """Completed requests per second of the storm."""
        complete = sum(outcome.ended == "complete" for outcome in self.outcomes[: self.storm_requests])
        return complete / self.plan.seconds

    def shortfalls(self) -> list[str]:
        """What the storm should have done and did not; a storm whose faults do not happen proves nothing."""
        injected, seen = kinds(self.injected), kinds(self.seen)
        found = []
        if 2 * len(self.injected) < len(self.planned) or not self.injected:
            found.append(f"only {len(self.injected)} of {len(self.planned)} faults were injected")
        for kind in CERTAIN:
            if seen[kind] < injected[kind]:
                found.append(f"{kind}: seen {seen[kind]} of {injected[kind]} times")
        for kind in set(injected) - set(CERTAIN):
            if not seen[kind] and injected[kind] >= ENOUGH:
                found.append(f"{kind}: injected {injected[kind]} times and never seen")
        ended = sum(seen[kind] for kind in RESTARTED)
        if self.restarted < max(ended, "kill" in self.plan.kinds):
            found.append(f"{self.restarted} services were restarted, {ended} were ended")
        if self.plan.corrupt and not self.frames_damaged:
            found.append("no frame was damaged")
        if self.plan.transports != GRPC_NAME and not self.transports_opened:
            found.append(f"KV never took the {self.plan.transports} transport")
        if self.plan.transports != GRPC_NAME and self.plan.break_connections and not self.connections_broken:
            found.append("no transport was broken")
        if not self.placed_anew:
            found.append("no request was placed anew")
        if self.up_share <= 0.0:
            found.append("at no time was a service of each kind undisturbed: every refusal was explained")
        return found

    def summary(self) -> str:
        """Some lines for people."""
        ends = collections.Counter(outcome.ended for outcome in self.outcomes)
        loaded = sum(outcome.loaded for outcome in self.outcomes)
        tokens = sum(len(outcome.tokens) for outcome in self.outcomes)
        told = collections.Counter(re.sub(r"[0-9a-f]{16}|[0-9]+", "#", o.error)[:200] for o in self.outcomes if o.error)
        slowest = max((outcome.seconds for outcome in self.outcomes), default=0.0)
        return (
            f"storm seed {self.plan.seed}, {self.plan.seconds:g} s: {len(self.outcomes)} requests {dict(ends)}, "
            f"{self.per_s:.1f} completed per second, {self.placed_anew} placed anew, "
            f"up for {self.up_share:.0%} of the time, "
            f"{loaded} with a prefix from a kvstore, {tokens} tokens checked, slowest {slowest:.1f} s; "
            f"faults planned {len(self.planned)}, injected {dict(kinds(self.injected))}, "
            f"seen {dict(kinds(self.seen))}; {self.restarted} restarts, {self.frames_damaged} frames damaged, "
            f"{self.connections_broken} transports broken; "
            f"at rest after {self.rest_s:.1f} s; {len(self.failures)} failures"
            + "".join(f"\n  {count:4} x {error}" for error, count in told.most_common())
        )


def kinds(faults: Iterable[Fault]) -> collections.Counter[FaultKind]:
    """Faults by kind."""
    return collections.Counter(fault.kind for fault in faults)
