"""Requests of several answers, and beams, that another conductor resumes: each answer from its own position on."""

from array import array

import pytest

from moonpool.base.kv.keys import tokens_digest
from moonpool.engine.decode.core.events import SearchRules
from moonpool.v1 import decode_pb2, kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.decode.calls import Conductor, conducting, reserve, transfer
from tests.unit.engine.decode.core.plain_beams import plain_search
from tests.unit.engine.decode.test_beams import WIDTH, asked, following
from tests.unit.engine.decode.test_resume import SECRET, TOKENS
from tests.unit.fakes.engine import continuation, digest_after, most_likely
from tests.unit.instances import Decode, decoding, spec

PLAIN = SearchRules(0.5, False)
FIRST = (9, 11, 13)
NAMES = ("a", "a/1", "a/2")
CONDUCTOR = kv_pb2.Instance(id="conductor")
ANSWERS = [[first, *continuation([*TOKENS, first], 11)] for first in FIRST]


async def started(decode: Decode, conductor: Conductor, known: tuple[int, ...] = (0, 0, 0)) -> kv_pb2.TransferTarget:
    """Three answers, perhaps with more tokens than the first that are known of each."""
    sequence = spec("a", TOKENS, max_tokens=12, n=3)
    target = await reserve(decode, sequence, resume_secret=SECRET, conductor=CONDUCTOR)
    await transfer(decode, target, TOKENS)
    behind = [answer[1 : 1 + count] for answer, count in zip(ANSWERS, known, strict=True)]
    await conductor.start("a", target, *FIRST, known=behind if any(known) else ())
    return target


async def resume(conductor: Conductor, target: kv_pb2.TransferTarget, have: list[list[int]], fence: int = 1) -> None:
    """Resumes "a" for a client that has these tokens of each answer."""
    conductor.expect("a", *map(len, have))
    first, *further = [
        decode_pb2.ResumedAnswer(from_position=len(answer), digest=tokens_digest(ROOT, array("i", answer)))
        for answer in have
    ]
    message = decode_pb2.ResumeSequence(
        request_id="a",
        transfer_id=target.transfer_id,
        generation=target.generation,
        from_position=first.from_position,
        fence=fence,
        secret=SECRET,
        digest=first.digest,
        further=further,
    )
    await conductor.call.write(decode_pb2.StepsRequest(resume=message))


@pytest.mark.parametrize("grace_s", [5.0, 0.0], ids=["runs on", "parks"])
async def test_each_goes_on_behind_what_is_had_of_it(grace_s: float) -> None:
    async with decoding(grace_s=grace_s) as decode:
        async with conducting(decode) as conductor:
            _, go = decode.engine.hold(after=3)
            target = await started(decode, conductor)
            await conductor.until(lambda: [len(conductor.tokens.get(name, [])) for name in NAMES] == [3, 3, 3])
        await decode.until(lambda: decode.service.core.orphans.of("conductor/0") != [])
        if not grace_s:
            go.set()
            await decode.rest()
            assert len(decode.service.core.orphans.retained) == 1
        async with conducting(decode, "another") as another:
            await resume(another, target, [ANSWERS[0][:4], ANSWERS[1][:1], ANSWERS[2][:2]])
            await decode.until(lambda: decode.service.executor.log.adopted == 1)
            go.set()
            await another.until(lambda: len(another.reasons) == 3)
        for name, answer, had in zip(NAMES, ANSWERS, (4, 1, 2), strict=True):
            assert another.tokens[name] == answer[had:]
        await decode.rest()


async def test_what_has_ended_is_read_again() -> None:
    async with decoding() as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            target = await started(decode, conductor)
            await conductor.until(lambda: len(conductor.reasons) == 3)
        await resume(another, target, [ANSWERS[0], ANSWERS[1][:1], []])
        await another.until(lambda: len(another.reasons) == 3)
        for name, answer, had in zip(NAMES, ANSWERS, (12, 1, 0), strict=True):
            assert another.tokens[name] == answer[had:]
        assert another.reasons == conductor.reasons
        await resume(another, target, [[1], [2], [3]], fence=2)
        await another.until(lambda: "a" in another.failed)
        assert "no such sequence" in another.failed["a"], "it is another answer"


async def test_answers_begin_behind_what_is_known_of_each_and_whole_ones_stay_so() -> None:
    async with decoding() as decode, conducting(decode) as conductor:
        await started(decode, conductor, (11, 0, 5))
        await conductor.until(lambda: len(conductor.reasons) == 3)
        for name, answer, known in zip(NAMES, ANSWERS, (12, 1, 6), strict=True):
            assert conductor.tokens[name] == answer[known:]
        await decode.rest()
        assert len(decode.engine.steps) <= 2 + 11
        assert decode.service.core.planner.recomputed_tokens == 0, "nothing was computed here before"


async def test_known_tokens_are_those_of_each_answer_or_of_none() -> None:
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", TOKENS, max_tokens=12, n=3))
        await conductor.start("a", target, *FIRST, known=[[1], [2]])
        await conductor.until(lambda: "a" in conductor.failed)
        assert conductor.failed == {"a": "3 answers are wanted, of each tokens may be known"}
        await conductor.cancel("a", target)
        await decode.rest()


@pytest.mark.parametrize("grace_s", [5.0, 0.0], ids=["runs on", "parks"])
@pytest.mark.parametrize("ended", [False, True])
async def test_a_search_goes_on_and_tells_its_hypotheses_to_whoever_has_it(grace_s: float, ended: bool) -> None:
    ends, longest = list(range(8, 24)), 12
    wanted = plain_search(TOKENS, WIDTH, longest, PLAIN, following, ends)[:2]
    async with decoding(grace_s=grace_s) as decode:
        async with conducting(decode) as conductor:
            reached, go = decode.engine.hold(after=3)
            target = await reserve(decode, asked(TOKENS, longest, ends, 2), resume_secret=SECRET, conductor=CONDUCTOR)
            await transfer(decode, target, TOKENS)
            first = most_likely(digest_after(TOKENS), WIDTH + len(ends))
            await conductor.start("a", target, *first.tokens, scores=first.log_probabilities)
            await reached.wait()
            if ended:
                go.set()
                await conductor.until(lambda: len(conductor.reasons) == 2)
        if not ended:
            await decode.until(lambda: decode.service.core.orphans.of("conductor/0") != [])
        if not ended and not grace_s:
            go.set()
            await decode.rest()
            assert len(decode.service.core.orphans.retained) == 1
        async with conducting(decode, "another") as another:
            have = [wanted[0][0], []] if ended else [[], []]
            await resume(another, target, have)
            await decode.until(lambda: decode.service.executor.log.adopted == 1)
            go.set()
            await another.until(lambda: len(another.reasons) == 2)
        found = [(another.tokens[name], another.scores[name]) for name in NAMES[:2]]
        assert found == [(answer[len(had) :], score) for (answer, score), had in zip(wanted, have, strict=True)]
        await decode.rest()
