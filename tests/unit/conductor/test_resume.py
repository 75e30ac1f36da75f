"""Requests that are resumed at another conductor: adopted, placed anew, or only ended."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import decode, expected, prefill
from .resuming import GREEDY, PROMPT, Call, request, two
from .stack import WAIT_S, Stack, stack


async def undisturbed(at: Stack) -> tuple[list[int], str]:
    result = await at.client.generate(token_ids=PROMPT, sampling=GREEDY, tenant="t")
    return result.token_ids, result.text


async def test_another_conductor_takes_the_sequence_over_and_the_first_one_leaves_it_alone() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, request())
        await lost.read(3)
        again = Call(second, lost.resume(request()))
        with pytest.raises(InvalidRequest, match=r"resume\.count: another conductor has the request"):
            await lost.read()
        d.go.set()
        await again.read()
        assert lost.tokens + again.tokens == expected(len(PROMPT), 8)
        d.hold_at = -1
        assert (lost.tokens + again.tokens, lost.text + again.text) == await undisturbed(first)
        assert again.finished is not None
        assert again.finished.usage == pb.Usage(prompt_tokens=40, completion_tokens=8)
        assert (again.finished.placement, again.placed) == (lost.placed[0].placement, [])
        assert (len(p.requests), len(d.requests)) == (2, 2), "the request was placed once, and the undisturbed one"
        assert d.cancelled == []
        explanation = await second.client.explain("r")
        assert explanation.placement is not None
        assert explanation.placement.decode == "decode-0"
        for each, resumed in ((first, 0), (second, 1)):
            await each.rest()
            gauges = {gauge.name: gauge.value for gauge in await each.client.stats()}
            assert gauges["requests_resumed_total"] == resumed


async def test_what_decode_does_not_know_is_placed_anew_behind_the_tokens_that_are_there() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        lost = Call(first, request())
        await lost.read(3)
        message = lost.resume(request())
        lost.call.cancel()
        await d.until(lambda: d.cancelled == ["r"])
        d.hold_at = -1
        again = Call(second, message)
        await again.read()
        assert lost.tokens + again.tokens == expected(len(PROMPT), 8)
        assert d.history == ["r", "r~1.0"]
        spec = d.requests[1].sequence
        assert (spec.prompt_tokens, len(spec.token_ids) // 4) == (40, 43)
        assert d.requests[1].resume_secret == d.requests[0].resume_secret == lost.placed[0].resume.secret
        assert (d.requests[0].fence, d.requests[1].fence) == (0, 1)
        assert again.placed[0].resume.sequence == "r~1.0"
        for each in (first, second):
            await each.rest()


async def test_a_conductor_that_has_just_started_waits_for_the_instance() -> None:
    p, d = prefill(), decode(hold_at=3)
    async with stack(p, d) as first, stack() as second, asyncio.timeout(WAIT_S):
        lost = Call(first, request())
        await lost.read(2)
        with pytest.raises(Unavailable, match="has joined"):
            await Call(second, lost.resume(request())).read()
        for member in (p, d):
            hello = pb.JoinHello(instance=member.instance, total_blocks=member.total_blocks, model=second.model())
            if member is d:
                again = Call(second, lost.resume(request(), count=2))
                await second.until(lambda: len(second.servicer.core.scheduler) == 1)
            await second.follow(member, hello)
            await second.joined(member)
        d.go.set()
        await again.read()
        assert lost.tokens + again.tokens == expected(len(PROMPT), 8)
        assert [asked.fence for asked in d.resumed] == [2]


async def test_a_client_that_lacks_only_the_end_gets_it_from_any_conductor() -> None:
    """Nothing is asked of decode, also where a stop text or an end token came, and no text comes twice."""
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        whole = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, tenant="t")
        stop = whole.text[-3:-1]
        for sampling in (GREEDY, SamplingParams(max_tokens=8, temperature=0.0, stop=stop)):
            call = Call(s, request(sampling))
            await call.read()
            assert call.finished is not None
            asked = len(d.requests)
            again = Call(s, call.resume(request(sampling)))
            await again.read()
            assert (again.tokens, again.text) == ([], "")
            assert again.finished is not None
            assert again.finished.reason == call.finished.reason
            assert again.finished.usage.completion_tokens == len(call.tokens)
            message = call.resume(request(sampling))
            message.resume.text_chars -= 2
            lacking = Call(s, message)
            await lacking.read()
            assert lacking.text == call.text[-2:]
            assert len(d.requests) == asked
        await s.rest()


async def test_no_text_is_lost_or_doubled_wherever_it_is_taken_up() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        whole = Call(s, request())
        await whole.read()
        for tokens in range(9):
            part = Call(s, request(request_id=f"part{tokens}"))
            await part.read(tokens)
            part.call.cancel()
            again = Call(s, part.resume(request(request_id=f"part{tokens}")) if part.placed else request())
            await again.read()
            assert (part.tokens + again.tokens, part.text + again.text) == (whole.tokens, whole.text)
        ahead = Call(s, request(request_id="ahead"))
        await ahead.read(4)
        ahead.call.cancel()
        message = ahead.resume(request(request_id="ahead"))
        message.resume.text_chars += 2  # it was told text that was held back, when its answer was cut short
        again = Call(s, message)
        await again.read()
        assert again.text == whole.text[len(ahead.text) + 2 :]
        await s.rest()


async def test_text_that_a_drain_cuts_off_goes_on_as_if_nothing_had_happened() -> None:
    """The answer is cut in the middle of what becomes a stop text; that half of it is not told."""
    p, d = prefill(), decode()
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        tokens, text = await undisturbed(first)
        begins = len((await first.client.generate(token_ids=PROMPT, sampling=replace(GREEDY, max_tokens=3))).text)
        sampling = replace(GREEDY, stop=text[begins - 1 : begins + 1])
        d.hold_at = 3
        left = Call(first, request(sampling))
        await left.read(3)
        draining = asyncio.create_task(first.servicer.drain(0.0))
        await left.read()
        assert left.finished is not None
        assert left.finished.reason == kv_pb2.FINISH_REASON_CANCELLED
        await draining
        d.hold_at = -1
        again = Call(second, left.resume(request(sampling)))
        await again.read()
        assert left.tokens == tokens[:3]
        assert left.text + again.text == text[: begins - 1]
        taken_over = [call.request_id for call in d.resumed]
        assert (taken_over, d.cancelled, len(p.requests)) == (["r"], ["r"], 3), (
            "its stop text ends it, and not the drain"
        )
        await second.rest()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request_id"),
    ({"sampling": kv_pb2.Sampling(max_tokens=8, prompt_logprobs=1, seed=4)}, r"resume\.prompt_scored: must be set"),
    ({"resume": pb.Resume(prompt_scored=True)}, r"resume\.prompt_scored: only where sampling wants"),
    ({"sampling": kv_pb2.Sampling(max_tokens=8, n=3, seed=4)}, r"resume\.further: must have 2"),
    ({"resume": pb.Resume(further=[pb.AnswerSoFar()])}, r"resume\.further: must have 0"),
    ({"from_position": 5}, "from_position"),
    ({"sampling": kv_pb2.Sampling(max_tokens=8)}, r"sampling\.seed"),
    ({"resume": pb.Resume(count=0)}, r"resume\.count"),
    ({"resume": pb.Resume(token_ids=[5000, 1, 2])}, r"resume\.token_ids: token ids"),
    ({"resume": pb.Resume(token_ids=[1] * 9), "from_position": 9}, r"resume\.token_ids: the answer has at most 8"),
    ({"resume": pb.Resume(point=pb.ResumePoint(secret=b"short"))}, r"resume\.point\.secret"),
    ({"resume": pb.Resume(point=pb.ResumePoint(sequence="other"))}, r"resume\.point\.sequence"),
    ({"resume": pb.Resume(point=pb.ResumePoint(sequence="r~1.0"))}, r"resume\.point\.sequence"),
    ({"resume": pb.Resume(point=pb.ResumePoint(sequence="r~x"))}, r"resume\.point\.sequence"),
    (
        {"resume": pb.Resume(point=pb.ResumePoint(target=kv_pb2.TransferTarget(decode=kv_pb2.Instance(id="x" * 300))))},
        r"resume\.point\.target\.decode\.id",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
async def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        point = pb.ResumePoint(sequence="r", secret=bytes(16))
        good = pb.Resume(point=point, token_ids=[1, 2, 3], text_chars=3, count=1)
        asked = request()
        asked.sampling.seed, asked.from_position = 4, 3
        asked.resume.CopyFrom(good)
        for name, value in changes.items():
            if name == "resume":
                if value.token_ids:
                    del asked.resume.token_ids[:]
                asked.resume.MergeFrom(value)
                asked.resume.count = int(value != pb.Resume())
            elif name == "sampling":
                asked.sampling.CopyFrom(value)
            else:
                setattr(asked, name, value)
        with pytest.raises(InvalidRequest, match=message):
            await Call(s, asked).read()
        assert d.requests == []


async def test_a_position_without_a_resume_is_refused() -> None:
    async with stack(prefill(), decode()) as s:
        asked = request()
        asked.from_position = 3
        with pytest.raises(InvalidRequest, match="from_position: must be 0"):
            await Call(s, asked).read()


async def test_every_request_has_a_secret_of_its_own() -> None:
    d = decode()
    async with stack(prefill(), d) as s:
        for _ in range(3):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
    secrets = [reserve.resume_secret for reserve in d.requests]
    assert len(set(secrets)) == 3
    assert {len(secret) for secret in secrets} == {16}


SEVERAL = SamplingParams(max_tokens=8, n=3, logprobs=0, ignore_eos=True)


async def test_several_answers_are_taken_over_each_from_what_its_client_has() -> None:
    p, d = prefill(), decode(hold_at=4)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        asked = request(SEVERAL)
        lost = Call(first, asked)
        await lost.read(2, 3)
        message, had = lost.resume(asked), {choice: list(lost.answers[choice]) for choice in range(3)}
        again = Call(second, message)
        with pytest.raises(InvalidRequest, match=r"resume\.count: another conductor has the request"):
            await lost.read()
        d.go.set()
        await again.read()
        for choice in range(3):
            assert had[choice] + again.answers[choice] == expected(40, 8, choice)
        assert again.finished is not None
        assert again.finished.usage == pb.Usage(prompt_tokens=40, completion_tokens=24)
        [resumed] = d.resumed
        positions = [resumed.from_position, *(answer.from_position for answer in resumed.further)]
        assert positions == [len(had[choice]) for choice in range(3)]
        assert len(p.requests) == 1
        for each in (first, second):
            await each.rest()


async def test_several_answers_are_placed_anew_behind_what_is_known_of_each() -> None:
    p, d = prefill(), decode(hold_at=6)
    async with two(p, d) as (first, second), asyncio.timeout(WAIT_S):
        asked = request(SEVERAL)
        lost = Call(first, asked)
        await lost.read(6, 3)
        message = lost.resume(asked)
        lost.call.cancel()
        await d.until(lambda: d.cancelled == ["r"])
        d.hold_at = -1
        again = Call(second, message)
        await again.read()
        for choice in range(3):
            assert lost.answers[choice] + again.answers[choice] == expected(40, 8, choice)
        assert d.history == ["r", "r~1.0"]
        assert len(d.requests[1].sequence.token_ids) // 4 == 40, "prefill computes the prompt alone"
        assert d.known[1] == [expected(40, 8, choice)[1 : len(lost.answers[choice])] for choice in range(3)]
        for each in (first, second):
            await each.rest()


async def test_answers_that_are_whole_stay_so_where_others_are_not() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        asked = request(SEVERAL)
        whole = Call(s, asked)
        await whole.read()
        for choice in range(3):
            message = whole.resume(asked, count=choice + 1)
            part = message.resume if not choice else message.resume.further[choice - 1]
            del part.token_ids[3:]
            part.text_chars = 0
            message.from_position = len(message.resume.token_ids)
            other = message.resume if choice else message.resume.further[0]
            other.text_chars -= 2
            again = Call(s, message)
            await again.read()
            assert again.answers[choice] == expected(40, 8, choice)[3:]
            assert again.texts[choice] == whole.texts[choice]
            lacking = 1 if not choice else 0
            assert again.texts[lacking] == whole.texts[lacking][-2:]
            assert {index for index, tokens in again.answers.items() if tokens} == {choice}
            assert again.finished is not None
            assert [end.completion_tokens for end in again.finished.choices] == [8, 8, 8]
        await s.rest()


async def test_beams_are_searched_for_again_and_what_is_known_does_not_come_twice() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        asked = request(SamplingParams(max_tokens=5, beam_width=3, n=2))
        whole = Call(s, asked)
        await whole.read()
        assert whole.finished is not None
        for known in (0, 1, 2):
            message = whole.resume(asked)
            message.sampling.ClearField("seed")
            if not known:
                del message.resume.token_ids[:]
                message.resume.text_chars = 0
            if known < 2:
                message.resume.further[0].Clear()
            message.from_position = len(message.resume.token_ids)
            again = Call(s, message)
            await again.read()
            assert [again.answers[choice] for choice in range(2)] == [
                whole.answers[choice] if choice >= known else [] for choice in range(2)
            ]
            assert again.finished is not None
            assert again.finished.choices == whole.finished.choices
        await s.rest()
