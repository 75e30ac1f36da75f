"""A storm counts only when its faults really happened."""

from dataclasses import replace

import pytest

from tests.faults.report import Outcome, Report, StormPlan
from tests.faults.schedule import RESTARTED, Ask, Fault, plan_faults

PLAN = StormPlan(seed=1, seconds=2.0)
FAULTS = [Fault(1.0, "kill", "decode-0", 0.1), Fault(1.5, "reset", "prefill-0", 0.0)]


def report() -> Report:
    """A storm in which everything happened."""
    ask = Ask(0, (9,), 1, None, "run", 0.0)
    outcomes = [Outcome(ask, [1], "complete", placements=count) for count in (1, 2)]
    found = Report(PLAN, outcomes, FAULTS, injected=FAULTS, seen=FAULTS, restarted=1, frames_damaged=3)
    found.transports_opened, found.connections_broken = 2, 1
    return found


def test_a_storm_that_happened_has_no_shortfall() -> None:
    assert report().shortfalls() == []


def test_a_storm_without_any_effect_is_found() -> None:
    ask = Ask(0, (9,), 1, None, "run", 0.0)
    quiet = Report(PLAN, [Outcome(ask, [1], "complete", placements=1)], FAULTS)
    assert quiet.shortfalls() == [
        "only 0 of 2 faults were injected",
        "0 services were restarted, 0 were ended",
        "no frame was damaged",
        "KV never took the local transport",
        "no transport was broken",
        "no request was placed anew",
    ]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"seen": FAULTS[1:]}, "kill: seen 0 of 1 times"),
        ({"injected": [*FAULTS, *FAULTS[1:] * 2], "seen": FAULTS[:1]}, "reset: injected 3 times and never seen"),
        ({"restarted": 0}, "0 services were restarted, 1 were ended"),
        ({"frames_damaged": 0}, "no frame was damaged"),
        ({"transports_opened": 0}, "KV never took the local transport"),
        ({"connections_broken": 0}, "no transport was broken"),
        ({"up_share": 0.0}, "at no time was a service of each kind undisturbed: every refusal was explained"),
    ],
)
def test_each_missing_effect_is_named(changes: dict[str, object], found: str) -> None:
    changed = report()
    for name, value in changes.items():
        setattr(changed, name, value)
    assert changed.shortfalls() == [found]


def test_only_requests_of_the_storm_count_for_its_rate() -> None:
    late = report()
    late.outcomes += [replace(late.outcomes[0]) for _ in range(10)]
    assert late.per_s == 1.0


def test_every_storm_ends_and_restarts_a_service() -> None:
    for seed in range(50):
        faults = plan_faults(seed, 15.0, ["conductor", "decode-0", "kvstore-0", "prefill-0"])
        assert any(fault.kind in RESTARTED for fault in faults), f"seed {seed}"


@pytest.mark.parametrize(
    ("conductors", "tokens", "why", "may"),
    [
        (1, [1], "each conductor was disturbed", True),
        (1, [], "", False),
        (3, [], "each decode was disturbed", True),
        (3, [1], "each decode was disturbed", False),
    ],
)
def test_several_conductors_lose_no_stream(conductors: int, tokens: list[int], why: str, may: bool) -> None:
    outcome = Outcome(Ask(0, (9,), 1, None, "run", 0.0), tokens)
    assert replace(PLAN, conductors=conductors).may_fail(outcome, why) is may
