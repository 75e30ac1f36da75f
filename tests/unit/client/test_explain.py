"""The phases of a request, laid on the conductor's line of time, placement by placement."""

from moonpool.client.explain import Attempt, Explanation, RequestPhase, TimedTokens, request_phases
from moonpool.client.types import Placement

PLACE = Placement("prefill-0", "decode-0")
WHOLE = Attempt(
    PLACE,
    waited_s=0.5,
    placed_s=0.75,
    prompt_tokens=100,
    loaded_tokens=64,
    queue_s=0.25,
    prefill_s=0.75,
    loads=(TimedTokens(64, 0.25, 0.5),),
    chunks=(TimedTokens(16, 0.25, 0.5), TimedTokens(20, 0.5, 1.0)),
    computed_s=2.0,
    transfer_tail_s=0.125,
    sent_bytes=4096,
    tokens=3,
    first_token_s=2.0,
    last_token_s=2.5,
)


def phases(*attempts: Attempt) -> list[RequestPhase]:
    return request_phases(Explanation(PLACE, (), 0.0, 0.0, "", attempts=attempts))


def test_all_phases() -> None:
    """The prefill instance's times begin when the prompt came there: 1 s before the first token."""
    assert phases(WHOLE) == [
        RequestPhase("wait", 0.0, 0.5),
        RequestPhase("place", 0.5, 1.0),
        RequestPhase("queue", 1.0, 1.25),
        RequestPhase("load", 1.25, 1.5, 64),
        RequestPhase("chunk", 1.25, 1.5, 16),
        RequestPhase("chunk", 1.5, 2.0, 20),
        RequestPhase("stream", 1.25, 2.125),
        RequestPhase("steps", 2.0, 2.5, 3),
    ]


def test_every_placement_has_its_own_clock() -> None:
    """The last one computed other tokens, at another time; no phase ends before it begins; the gap is shown."""
    first = Attempt(**{name: getattr(WHOLE, name) for name in WHOLE.__slots__} | {"ended_s": 4.0})
    lost = Attempt(PLACE, "decode-0 is lost", placed_s=4.25, ended_s=5.0)
    last = Attempt(
        PLACE,
        "decode-1 does not answer",
        placed_s=5.0,
        prompt_tokens=103,
        queue_s=0.25,
        prefill_s=0.5,
        chunks=(TimedTokens(103, 0.25, 0.75),),
        computed_s=6.0,
        sent_bytes=9,
        tokens=2,
        first_token_s=6.0,
        last_token_s=6.5,
    )
    found = phases(first, lost, last)
    assert found[8:] == [
        RequestPhase("gap", 2.5, 5.0, attempt=2),
        RequestPhase("lost", 4.0, 5.0, attempt=2),
        RequestPhase("gap", 2.5, 6.0, attempt=3),
        RequestPhase("place", 5.0, 5.25, attempt=3),
        RequestPhase("queue", 5.25, 5.5, attempt=3),
        RequestPhase("chunk", 5.5, 6.0, 103, attempt=3),
        RequestPhase("stream", 5.5, 6.0, attempt=3),
        RequestPhase("steps", 6.0, 6.5, 2, attempt=3),
    ]
    assert all(phase.begin_s <= phase.end_s for phase in found)


def test_a_prompt_that_decode_computed() -> None:
    attempt = Attempt(PLACE, prompt_tokens=40, local_tokens=32, tokens=2, first_token_s=0.5, last_token_s=0.75)
    assert phases(attempt) == [RequestPhase("prompt", 0.0, 0.5, 8), RequestPhase("steps", 0.5, 0.75, 2)]


def test_nothing_is_known_before_the_first_token() -> None:
    assert phases(Attempt(PLACE, placed_s=0.25)) == []
    assert phases() == []


def test_times_of_another_clock_stay_in_order() -> None:
    """An instance that says it took longer than there was."""
    attempt = Attempt(
        PLACE,
        waited_s=0.25,
        placed_s=0.375,
        prompt_tokens=8,
        queue_s=0.5,
        prefill_s=0.5,
        chunks=(TimedTokens(8, 0.5, 1.0),),
        computed_s=0.5,
        tokens=1,
        first_token_s=0.5,
        last_token_s=0.5,
    )
    assert phases(attempt)[:3] == [
        RequestPhase("wait", 0.0, 0.25),
        RequestPhase("place", 0.25, 0.25),
        RequestPhase("queue", 0.25, 0.5),
    ]
