"""A client that lost its connection finds its request still running at the same conductor, and hears it on."""

import asyncio
from typing import Any

import pytest

from moonpool.base.errors import DeadlineExceeded, InvalidRequest, MoonpoolError, Unavailable
from moonpool.base.sampling_params import SamplingParams

from .fakes import decode, expected, prefill
from .resuming import GREEDY, Call, request, two
from .stack import WAIT_S, Stack, stack

SEVERAL = SamplingParams(max_tokens=8, n=3, logprobs=0, ignore_eos=True)


class Kept:
    """A call's context that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def time_remaining(self) -> None:
        """There is no limit."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def bare_write(self, message: Any) -> None:
        self.written.append(message)


class Unread(Kept):
    """Its client reads one message and no more."""

    async def bare_write(self, message: Any) -> None:
        await super().bare_write(message)
        if len(self.written) > 1:
            await asyncio.Event().wait()


def served(s: Stack) -> float:
    return {gauge.name: gauge.value for gauge in s.servicer.gauges.read()}["requests_served_total"]


@pytest.mark.parametrize("sampling", [GREEDY, SEVERAL], ids=["one answer", "several"])
async def test_it_goes_on_and_is_neither_cancelled_nor_placed_again(sampling: SamplingParams) -> None:
    """The conductor has not seen that the connection is lost; the earlier call ends later, and that ends nothing."""
    p, d = prefill(), decode(hold_at=5)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        whole = Call(s, request(sampling, "whole"))
        await whole.read(3, sampling.n)
        asked = request(sampling)
        lost = Call(s, asked)
        await lost.read(3, sampling.n)
        had = {choice: (len(lost.answers[choice]), len(lost.texts[choice])) for choice in range(sampling.n)}
        again = Call(s, lost.resume(asked))
        await lost.read()
        assert lost.finished is None
        d.go.set()
        await again.read()
        await whole.read()
        for choice, (tokens, chars) in had.items():
            assert lost.answers[choice][:tokens] + again.answers[choice] == expected(40, 8, choice)
            assert lost.texts[choice][:chars] + again.texts[choice] == whole.texts[choice]
        scored = [-token / 10 for tokens in again.answers.values() for token in tokens]
        assert sorted(again.logprobs) == pytest.approx(sorted(scored) if sampling is SEVERAL else [])
        assert again.finished is not None
        assert again.finished.usage.completion_tokens == 8 * sampling.n
        assert (again.placed, d.history, d.cancelled) == ([], ["whole", "r"], [])
        assert d.resumed == [], "decode hears nothing of it"
        await s.rest()
        assert served(s) == 2, "the request counts once"


async def test_a_client_that_comes_again_is_told_where_its_request_is_now() -> None:
    p, d, other = prefill(), decode(hold_at=3, fail_at=[4]), decode(1, hold_at=6)
    async with stack(p, d, other) as s, asyncio.timeout(WAIT_S):
        lost = Call(s, request())
        await lost.read(3)
        message, had = lost.resume(request()), list(lost.tokens)
        d.go.set()
        await other.until(lambda: other.history == ["r~1"])
        again = Call(s, message)
        await lost.read()
        other.go.set()
        await again.read()
        assert had + again.tokens == expected(40, 8)
        assert [placed.resume.sequence for placed in again.placed] == ["r~1"]
        assert again.finished is not None
        assert again.finished.placement.decode == "decode-1"
        await s.rest()


async def test_whoever_is_not_its_client_may_not_have_it() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        first = Call(s, request())
        await first.read(3)
        stranger, late, liar = (first.resume(request()) for _ in range(3))
        stranger.resume.point.secret = bytes(16)
        late.resume.count = 0
        liar.resume.token_ids[1] += 1
        for message, why in ((stranger, "running already"), (late, "running already"), (liar, "not those that were")):
            with pytest.raises(InvalidRequest, match=why):
                await Call(s, message).read()
        d.go.set()
        await first.read()
        assert first.tokens == expected(40, 8)
        await s.rest()


async def test_a_client_that_knows_more_tries_again_until_they_have_come_here() -> None:
    """Another conductor has told it, and was lost."""
    d = decode(hold_at=3)
    async with stack(prefill(), d) as s, asyncio.timeout(WAIT_S):
        first = Call(s, request())
        await first.read(3)
        for tokens, text in ((expected(40, 8)[3:5], "55"), ([1], "1")):
            ahead = first.resume(request())
            ahead.resume.token_ids.extend(tokens)
            ahead.from_position = len(ahead.resume.token_ids)
            ahead.resume.text_chars += len(text)
            with pytest.raises(Unavailable, match="not come here yet"):
                await Call(s, ahead).read()
        message, had = first.resume(request(), count=3), list(first.tokens)
        message.resume.token_ids.extend(expected(40, 8)[3:5])
        message.from_position = 5
        d.hold_at = 6
        d.go.set()
        await first.read(6)
        again = Call(s, message)
        await again.read()
        assert had + expected(40, 8)[3:5] + again.tokens == expected(40, 8)
        await s.rest()


@pytest.mark.parametrize("adopted", [False, True], ids=["placed here", "taken over here"])
async def test_an_older_call_that_comes_later_elsewhere_does_not_keep_the_sequence(adopted: bool) -> None:
    """It has the lower count: what it has taken over is taken back, and its client, who is gone, gets the error."""
    p, d = prefill(), decode(hold_at=3)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, request())
        await lost.read(3)
        had, counts = list(lost.tokens), (1, 2, 3) if adopted else (0, 1, 2)
        if adopted:
            message = lost.resume(request(), count=counts[0])
            first, second = second, first
            lost_again = Call(first, message)
            await d.until(lambda: len(d.resumed) == 1)
        older, newer = (lost.resume(request(), count=count) for count in counts[1:])
        again = Call(first, newer)
        await (lost_again if adopted else lost).read()
        late = Call(second, older)
        with pytest.raises(InvalidRequest, match=r"resume\.count: another conductor has the request"):
            await late.read()
        d.go.set()
        await again.read()
        assert had + again.tokens == expected(40, 8)
        assert [asked.fence for asked in d.resumed] == [1, *counts[1:]] if adopted else counts[1:]
        assert (len(p.requests), d.history, d.cancelled) == (1, ["r"], [])
        for each in (first, second):
            await each.rest()


async def test_who_resumes_again_while_it_is_read_tries_later() -> None:
    """Its connection was lost twice; nobody else is told that it may try again."""
    d = decode(hold_at=3)
    async with stack(prefill(), d) as s, asyncio.timeout(WAIT_S):
        lost = Call(s, request())
        await lost.read(3)
        messages = [lost.resume(request(), count=count) for count in (1, 2, 1, 2)]
        messages[3].resume.point.secret = bytes(16)
        had = list(lost.tokens)
        lost.call.cancel()
        await d.until(lambda: d.cancelled == ["r"])
        await s.rest()
        d.hold_at = -1
        calls = [asyncio.create_task(s.servicer.Generate(message, Kept())) for message in messages]  # type: ignore[arg-type]
        ends = await asyncio.gather(*calls[1:], return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [
            (Unavailable, "'r' is being resumed already"),
            (InvalidRequest, "request_id: 'r' is running already"),
            (InvalidRequest, "request_id: 'r' is running already"),
        ]
        await calls[0]
        again = Call(s, messages[1])
        await again.read()
        assert had + again.tokens == expected(40, 8)
        await s.rest()


async def test_it_keeps_its_place_among_those_that_run_and_a_lower_count_loses() -> None:
    """A full conductor neither refuses it nor lets another one have its place meanwhile."""
    d = decode(hold_at=5)
    async with stack(prefill(), d, max_queue=1) as s, asyncio.timeout(WAIT_S):
        first = Call(s, request())
        await first.read(3)
        had = list(first.tokens)
        again = Call(s, first.resume(request(), count=2))
        await first.read()
        with pytest.raises(MoonpoolError, match="as many as this conductor takes"):
            await Call(s, request(request_id="other")).read()
        with pytest.raises(InvalidRequest, match="running already"):
            await Call(s, first.resume(request(), count=2)).read()
        d.go.set()
        await again.read()
        assert had + again.tokens == expected(40, 8)
        await s.rest()


async def test_a_client_that_leaves_then_ends_it() -> None:
    d = decode(hold_at=5)
    async with stack(prefill(), d) as s, asyncio.timeout(WAIT_S):
        first = Call(s, request())
        await first.read(3)
        again = Call(s, first.resume(request()))
        await first.read()
        assert d.cancelled == []
        again.call.cancel()
        await d.until(lambda: d.cancelled == ["r"])
        await s.rest()


async def test_a_request_that_has_ended_meanwhile_is_read_from_decode() -> None:
    """Its call has ended with it: it is resumed as after the loss of a conductor."""
    d = decode(hold_at=5)
    async with stack(prefill(), d) as s, asyncio.timeout(WAIT_S):
        call = Call(s, request())
        await call.read(3)
        message, had = call.resume(request()), list(call.tokens)
        d.go.set()
        await call.read()
        assert call.finished is not None
        again = Call(s, message)
        await again.read()
        assert had + again.tokens == expected(40, 8)
        assert [asked.request_id for asked in d.resumed] == ["r"]
        assert again.finished is not None
        assert again.finished.reason == call.finished.reason
        await s.rest()


@pytest.mark.slow
async def test_a_call_that_nobody_reads_ends_when_its_client_has_come_again() -> None:
    """It counts among those that run no more, so it may not stay until its deadline."""
    d = decode(hold_at=5)
    async with stack(prefill(), d) as s, asyncio.timeout(WAIT_S):
        unread = Unread()
        stuck = asyncio.create_task(s.servicer.Generate(request(), unread))  # type: ignore[arg-type]
        await s.until(lambda: len(unread.written) == 2)
        first = Call(s, request())
        first.placed.append(unread.written[0].placed)
        again = Call(s, first.resume(request()))
        with pytest.raises(DeadlineExceeded):
            await stuck
        d.go.set()
        await again.read()
        assert again.tokens == expected(40, 8)
        assert served(s) == 1
        await s.rest()
