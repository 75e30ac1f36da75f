"""A session's turns stay at the instance of the last one, as long as that costs little."""

import pytest

from moonpool.conductor.placement.base import SessionFacts

from .test_policies import world


@pytest.mark.parametrize(
    ("busy_s", "session", "first"),
    [
        (0.0, SessionFacts(3, "prefill-2"), "prefill-2"),
        (1.9, SessionFacts(3, "prefill-2"), "prefill-2"),
        (2.1, SessionFacts(3, "prefill-2"), "prefill-0"),
        (0.0, SessionFacts(3, "prefill-1"), "prefill-1"),
        (0.0, SessionFacts(3, "gone"), "prefill-0"),
        (0.0, SessionFacts(), "prefill-0"),
        (0.0, None, "prefill-0"),
    ],
)
def test_the_last_turns_instance_is_kept_within_two_seconds(
    busy_s: float, session: SessionFacts | None, first: str
) -> None:
    found = world("session_affinity")
    found.report("prefill-2", drain_s=busy_s)
    plan = found.plan(64, session=session)
    assert plan.prefill.id == first
    names = [candidate.id for candidate in plan.candidates]
    assert sorted(names) == sorted(set(names))
