"""The phases of a request, laid on the conductor's line of time."""

from moonpool.client.explain import Explanation, RequestPhase, TimedTokens, Timeline, request_phases
from moonpool.client.types import Placement, Timing, Usage


def explained(line: Timeline, waited_s: float = 0.0) -> Explanation:
    return Explanation(Placement("prefill-0", "decode-0"), (), 0.0, 0.0, "", waited_s=waited_s, timeline=line)


def test_all_phases() -> None:
    """The prefill instance's times begin when the prompt came there: 1 s before the first token."""
    line = Timeline(
        usage=Usage(100, 64, 3),
        timing=Timing(ttft_s=2.0, tpot_s=0.25, e2e_s=2.5, queue_s=0.25, prefill_s=0.75),
        loads=(TimedTokens(64, 0.25, 0.5),),
        chunks=(TimedTokens(16, 0.25, 0.5), TimedTokens(20, 0.5, 1.0)),
        transfer_tail_s=0.125,
        sent_bytes=4096,
        token_s=(2.0, 2.25, 2.5),
    )
    assert request_phases(explained(line, waited_s=0.5)) == [
        RequestPhase("wait", 0.0, 0.5),
        RequestPhase("place", 0.5, 1.0),
        RequestPhase("queue", 1.0, 1.25),
        RequestPhase("load", 1.25, 1.5, 64),
        RequestPhase("chunk", 1.25, 1.5, 16),
        RequestPhase("chunk", 1.5, 2.0, 20),
        RequestPhase("stream", 1.25, 2.125),
        RequestPhase("steps", 2.0, 2.5, 3),
    ]


def test_a_prompt_that_decode_computed() -> None:
    line = Timeline(usage=Usage(40, 32, 2), timing=Timing(ttft_s=0.5, e2e_s=0.75))
    assert request_phases(explained(line)) == [RequestPhase("prompt", 0.0, 0.5, 8), RequestPhase("steps", 0.5, 0.75, 2)]


def test_one_that_runs_ends_with_its_last_token() -> None:
    line = Timeline(usage=Usage(8, 0, 2), timing=Timing(ttft_s=0.5), token_s=(0.5, 0.625))
    assert request_phases(explained(line))[-1] == RequestPhase("steps", 0.5, 0.625, 2)


def test_nothing_is_known_before_the_first_token() -> None:
    assert request_phases(explained(Timeline(tenant="ann"))) == []


def test_times_of_another_clock_stay_in_order() -> None:
    """An instance that says it took longer than there was."""
    line = Timeline(
        usage=Usage(8, 0, 1), timing=Timing(ttft_s=0.5, queue_s=0.5, prefill_s=0.5), chunks=(TimedTokens(8, 0.5, 1.0),)
    )
    assert request_phases(explained(line, waited_s=0.25))[:3] == [
        RequestPhase("wait", 0.0, 0.25),
        RequestPhase("place", 0.25, 0.25),
        RequestPhase("queue", 0.25, 0.5),
    ]
