"""Streams that lose their conductor: the client resumes them, there or elsewhere, without a gap or a doubled token."""

from collections.abc import Callable, Iterable

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import InvalidRequest, Overloaded, StreamBroken, Unavailable
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.transport import NotConnected
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .conftest import Dial

TOKENS = (5, 6, 7, 8, 9)
LOST = NotConnected("socket closed")
FULL = Overloaded("full", reason="queue_full", retry_after_s=1.0)


def losing(*told: int, then: Iterable[Exception] = ()) -> Callable[[pb.GenerateRequest], Script]:
    """A conductor that is lost after so many tokens of each call; then it answers to the end, after some errors."""
    left, errors = list(told), list(then)

    def script(request: pb.GenerateRequest) -> Script:
        start = request.from_position
        whole = answer(TOKENS, request_id=request.request_id or "drawn", from_position=start, seed=77)
        if left:
            return [*whole[: 1 + left.pop(0)], LOST]
        return [errors.pop(0)] if errors else whole

    return script


def test_a_stream_goes_on_where_it_was_lost(dial: Dial) -> None:
    fake = FakeConductor(losing(2, 1, 0))
    with dial(fake, resume_timeout_s=1.0) as client:
        stream = client.stream(prompt="hi", sampling=SamplingParams(temperature=0.5), tenant="t")
        events = [(event.position, event.token_ids) for event in stream]
    assert events == [(position, (token,)) for position, token in enumerate(TOKENS)]
    assert (stream.result.token_ids, stream.result.text) == (list(TOKENS), "5 6 7 8 9 ")
    assert stream.result.resumes == 3
    assert fake.cancelled == []


def draining(told: int) -> FakeConductor:
    """A conductor that drains: it ends its answers after so many tokens, and takes none up again."""
    whole = answer(TOKENS, request_id="drawn", reason=kv_pb2.FINISH_REASON_CANCELLED)
    refused = [Unavailable("draining")]
    return FakeConductor(lambda request: refused if request.HasField("resume") else [*whole[: 1 + told], whole[-1]])


@pytest.mark.parametrize("told", [0, 3])
def test_an_answer_that_a_draining_conductor_ends_goes_on_at_another_one(dial: Dial, told: int) -> None:
    leaving, other = draining(told), FakeConductor(losing())
    with dial(leaving, other, resume_timeout_s=1.0) as client:
        result = client.generate(prompt="hi")
    assert (result.token_ids, result.finish_reason, result.resumes) == (list(TOKENS), "stop", 1)
    assert [len(request.resume.token_ids) for request in other.requests] == [told]


@pytest.mark.parametrize("others", [[], [Unavailable("draining"), LOST]])
def test_without_another_conductor_it_ends_with_what_there_is(dial: Dial, others: list[Exception]) -> None:
    left = draining(3)
    ends = [FakeConductor(lambda _, error=error: [error]) for error in others]  # type: ignore[misc]
    with dial(left, *ends, resume_timeout_s=0.2) as client:
        result = client.generate(prompt="hi")
    assert (result.token_ids, result.finish_reason) == (list(TOKENS[:3]), "cancelled")


def test_what_a_conductor_is_told(dial: Dial) -> None:
    fake = FakeConductor(losing(2, 1))
    with dial(fake, resume_timeout_s=1.0) as client:
        client.generate(prompt="hi", sampling=SamplingParams(temperature=0.5), tenant="t")
    first, second, third = fake.requests
    assert (first.request_id, first.HasField("resume"), first.sampling.HasField("seed")) == ("", False, False)
    point = pb.ResumePoint(
        placement=pb.Placement(prefill="prefill-0", decode="decode-0"), sequence="drawn", secret=b"not a secret at all"
    )
    assert second.resume == pb.Resume(point=point, token_ids=TOKENS[:2], text_chars=4, count=1)
    assert third.resume == pb.Resume(point=point, token_ids=TOKENS[:3], text_chars=6, count=2)
    for again in (second, third):
        assert (again.request_id, again.sampling.seed, again.from_position) == (
            "drawn",
            77,
            len(again.resume.token_ids),
        )
        assert (again.text, again.tenant, again.sampling.temperature) == ("hi", "t", 0.5)


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_conductor_is_told_whether_the_prompt_s_log_probabilities_are_here(dial: Dial, tokens: int) -> None:
    scored = pb.PromptLogprobs(token_ids=[3, 4], logprobs=kv_pb2.Logprobs(logprobs=[-0.5], ranks=[1]))
    told = losing(tokens)

    def script(request: pb.GenerateRequest) -> Script:
        placed, *others = told(request)
        if placed is LOST or request.resume.prompt_scored:
            return [placed, *others]
        has = [pb.GenerateResponse(prompt_logprobs=scored)] if others != [LOST] else []
        return [placed, *has, *others]

    fake = FakeConductor(script)
    with dial(fake, resume_timeout_s=1.0) as client:
        result = client.generate(prompt="hi", sampling=SamplingParams(temperature=0.5, prompt_logprobs=0))
    assert [request.resume.prompt_scored for request in fake.requests] == [False, tokens > 0]
    assert [prompt_logprob and prompt_logprob.logprob for prompt_logprob in result.prompt_logprobs] == [None, -0.5]
    assert result.token_ids == list(TOKENS)


def test_another_conductor_goes_on_and_later_requests_go_there_first(dial: Dial) -> None:
    down = [LOST]
    first = FakeConductor(lambda request: down if first.requests[1:] else losing(2)(request))
    second = FakeConductor(losing())
    with dial(first, second, resume_timeout_s=1.0) as client:
        assert client.generate(prompt="hi").token_ids == list(TOKENS)
        assert (len(first.requests), len(second.requests)) == (1, 1)
        client.generate(prompt="again")
    assert (len(first.requests), len(second.requests)) == (1, 2)


def test_a_conductor_that_is_starting_or_full_is_asked_again(dial: Dial) -> None:
    fake = FakeConductor(losing(2, then=[Unavailable("nobody has joined"), FULL, LOST]))
    with dial(fake, resume_timeout_s=1.0) as client:
        assert client.generate(prompt="hi").token_ids == list(TOKENS)
    assert [request.resume.count for request in fake.requests] == [0, 1, 2, 3, 4]


def test_it_gives_up_when_the_time_for_it_is_over(dial: Dial) -> None:
    fake = FakeConductor(losing(2, then=[LOST] * 10))
    with dial(fake, resume_timeout_s=0.2) as client, pytest.raises(Unavailable, match="socket closed"):
        client.generate(prompt="hi")
    assert len(fake.requests) == 1 + 2, "pauses of 0.05 and 0.1 s"


def test_nothing_is_resumed_unless_it_was_lost(dial: Dial) -> None:
    """An error that the conductor tells is an answer, and so is the end of its stream."""
    for end, error in (([Unavailable("given up")], Unavailable), ([], StreamBroken)):
        fake = FakeConductor(lambda _, end=end: [*answer(TOKENS)[:3], *end])  # type: ignore[misc]
        with dial(fake, resume_timeout_s=1.0) as client, pytest.raises(error):
            client.generate(prompt="hi")
        assert len(fake.requests) == 1


@pytest.mark.parametrize("switched_off", [False, True])
def test_without_a_point_or_without_time_a_lost_stream_is_an_error(dial: Dial, switched_off: bool) -> None:
    def script(request: pb.GenerateRequest) -> Script:
        messages = answer(TOKENS)[:3]
        if not switched_off:
            messages[0].placed.ClearField("resume")  # a conductor that cannot do it
        return [*messages, LOST]

    fake = FakeConductor(script)
    limit_s = 0.0 if switched_off else 1.0
    with dial(fake, resume_timeout_s=limit_s) as client, pytest.raises(Unavailable, match="socket closed"):
        client.generate(prompt="hi")
    assert len(fake.requests) == 1


def test_a_gap_is_found(dial: Dial) -> None:
    def script(request: pb.GenerateRequest) -> Script:
        start = request.from_position
        return answer(TOKENS, from_position=start + 1) if start else [*answer(TOKENS)[:3], LOST]

    with dial(FakeConductor(script), resume_timeout_s=1.0) as client, pytest.raises(StreamBroken, match="token 2"):
        client.generate(prompt="hi")


def test_a_new_request_goes_to_the_next_address_at_once_and_to_all_again_after_a_pause(dial: Dial) -> None:
    first, second = FakeConductor(lambda _: [LOST]), FakeConductor(lambda _: [Unavailable("draining")])
    with dial(first, second, connect_timeout_s=0.06) as client, pytest.raises(Unavailable, match="draining"):
        client.generate(prompt="hi")
    assert (len(first.requests), len(second.requests)) == (2, 2), "one that has just started may serve soon"
    alone = FakeConductor(lambda _: [Unavailable("draining")])
    with dial(alone, connect_timeout_s=0.06) as client, pytest.raises(Unavailable, match="draining"):
        client.generate(prompt="hi")
    assert len(alone.requests) == 1, "nobody else may serve it"
    third = FakeConductor(lambda _: [LOST])
    with dial(first, third, connect_timeout_s=0.06) as client, pytest.raises(NotConnected):
        client.generate(prompt="hi")
    assert (len(first.requests), len(third.requests)) == (4, 2)


def test_a_client_needs_an_address(dial: Dial) -> None:
    with pytest.raises(InvalidRequest, match="address: at least one"), dial([]):
        pass
