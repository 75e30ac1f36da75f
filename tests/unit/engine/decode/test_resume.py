"""Sequences that another conductor resumes: tokens come from the position on, to whoever has the higher fence."""

import secrets
from array import array
from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import BlockKey, tokens_digest
from moonpool.base.logprobs import Logprobs
from moonpool.engine.decode.output import AnswerOutput, RequestOutput
from moonpool.engine.subscriber import Subscriber
from moonpool.v1 import decode_pb2, kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.clocks import StandingClock
from tests.unit.engine.decode.calls import Conductor, conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import Decode, decoding, prompt, spec

TOKENS = prompt(20)
SECRET = secrets.token_bytes(16)


async def started(
    decode: Decode, conductor: Conductor, max_tokens: int, *, gather: bool = False, **settings: Any
) -> kv_pb2.TransferTarget:
    """A sequence "a" that runs, or waits for the engine's step."""
    settings = {"resume_secret": SECRET, "conductor": kv_pb2.Instance(id="conductor"), **settings}
    target = await reserve(decode, spec("a", TOKENS, max_tokens=max_tokens), **settings)
    await transfer(decode, target, TOKENS)
    await conductor.start("a", target, continuation(TOKENS, 1)[0], gather=gather)
    return target


async def resume(
    conductor: Conductor, target: kv_pb2.TransferTarget, have: list[int], fence: int = 1, **fields: Any
) -> None:
    """Resumes "a" for a client that has these tokens."""
    message = decode_pb2.ResumeSequence(
        request_id="a",
        transfer_id=target.transfer_id,
        generation=target.generation,
        from_position=len(have),
        fence=fence,
        secret=SECRET,
        digest=tokens_digest(ROOT, array("i", have)),
    )
    message.MergeFrom(decode_pb2.ResumeSequence(**fields))
    conductor.expect("a", len(have))
    await conductor.call.write(decode_pb2.StepsRequest(resume=message))


async def test_a_running_sequence_goes_on_at_another_conductor() -> None:
    answer = continuation(TOKENS, 12)
    async with decoding() as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            _, go = decode.engine.hold(after=3)
            target = await started(decode, conductor, 12)
            await conductor.until(lambda: len(conductor.tokens.get("a", [])) == 3)
        await decode.until(lambda: decode.service.core.orphans.of("conductor/0") != [])
        await resume(another, target, answer[:2])
        await decode.until(lambda: decode.service.executor.log.adopted == 1)
        go.set()
        await another.until(lambda: "a" in another.reasons)
        assert another.tokens["a"] == answer[2:]


async def test_what_was_gathered_and_not_told_is_told_to_who_resumes() -> None:
    """In the middle of a run, of which nothing but the prefill's token had been told."""
    answer = continuation(TOKENS, 12)
    async with decoding(run_steps=12) as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            reached, go = decode.engine.hold(after=3)
            target = await started(decode, conductor, 12, gather=True)
            await reached.wait()
        await decode.until(lambda: decode.service.core.orphans.of("conductor/0") != [])
        await resume(another, target, answer[:1])
        await another.until(lambda: len(another.tokens.get("a", [])) == 3)
        go.set()
        await another.until(lambda: "a" in another.reasons)
        assert conductor.tokens == {}
        assert another.tokens["a"] == answer[1:]


async def test_a_parked_sequence_goes_on_and_computes_only_what_is_gone() -> None:
    answer = continuation(TOKENS, 12)
    async with decoding(grace_s=0.0) as decode:
        async with conducting(decode) as conductor:
            _, go = decode.engine.hold(after=3)
            target = await started(decode, conductor, 12)
            await conductor.until(lambda: len(conductor.tokens.get("a", [])) == 3)
        await decode.until(lambda: decode.service.core.orphans.of("conductor/0") != [])
        go.set()
        await decode.rest()
        assert decode.service.manager.num_used == 0
        assert len(decode.service.core.orphans.retained) == 1
        async with conducting(decode, "another") as another:
            await resume(another, target, answer[:1])
            await another.until(lambda: "a" in another.reasons)
        assert another.tokens["a"] == answer[1:]
        assert 0 < decode.service.core.planner.recomputed_tokens < len(TOKENS)


async def test_an_answer_that_has_ended_can_be_read_again_for_a_while() -> None:
    answer, clock = continuation(TOKENS, 5), StandingClock()
    async with decoding(log_ttl_s=0.1) as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            target = await started(decode, conductor, 5)
            await conductor.until(lambda: "a" in conductor.reasons)
        await resume(another, target, answer[:3])
        await another.until(lambda: "a" in another.reasons)
        assert another.tokens["a"] == answer[3:]
        assert another.reasons["a"] == conductor.reasons["a"]
        clock.now_s += 1.0
        await decode.until(lambda: not len(decode.service.core.orphans.retained))
        await resume(another, target, answer[:3], fence=2)
        await another.until(lambda: "a" in another.failed)
        assert "no such sequence" in another.failed["a"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": bytes(16)},
        {"digest": tokens_digest(ROOT, array("i", [1, 2]))},
        {"digest": tokens_digest(bytes(32), array("i", continuation(TOKENS, 2)))},
        {"from_position": 100},
        {"generation": 77},
        {"request_id": "b"},
    ],
    ids=["secret", "other tokens", "other tenant", "too far", "generation", "name"],
)
async def test_nobody_else_may_have_it(wrong: dict[str, Any]) -> None:
    answer = continuation(TOKENS, 4)
    async with decoding() as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            target = await started(decode, conductor, 4)
            await conductor.until(lambda: "a" in conductor.reasons)
        await resume(another, target, answer[:2], **wrong)
        await another.until(lambda: bool(another.failed))
        assert (another.tokens, list(another.failed)) == ({}, [wrong.get("request_id", "a")])


async def test_without_a_secret_a_sequence_ends_with_its_conductor() -> None:
    async with decoding() as decode, conducting(decode, "another") as another:
        async with conducting(decode) as conductor:
            target = await started(decode, conductor, 400, resume_secret=b"")
            await conductor.until(lambda: len(conductor.tokens.get("a", [])) >= 1)
        await decode.rest()
        await resume(another, target, [], secret=b"")
        await another.until(lambda: "a" in another.failed)
        assert not len(decode.service.core.orphans.retained)


async def test_the_loser_is_told_and_can_neither_cancel_nor_take_it_back() -> None:
    answer = continuation(TOKENS, 6)
    async with decoding() as decode, conducting(decode) as conductor, conducting(decode, "another") as another:
        reached, go = decode.engine.hold()
        target = await started(decode, conductor, 6)
        await reached.wait()
        await resume(another, target, [], fence=3)
        await conductor.until(lambda: conductor.fenced == ["a"])
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_UNKNOWN})
        await resume(conductor, target, [], fence=3)
        await conductor.until(lambda: conductor.fenced == ["a", "a"])
        go.set()
        await another.until(lambda: "a" in another.reasons)
        assert another.tokens["a"] == answer
        assert conductor.tokens == {}


async def test_a_cancelled_sequence_tells_what_it_had_and_that_it_ends() -> None:
    async with decoding() as decode, conducting(decode) as conductor, conducting(decode, "another") as another:
        target = await started(decode, conductor, 400)
        await conductor.until(lambda: len(conductor.tokens.get("a", [])) >= 2)
        await conductor.cancel("a", target)
        await decode.rest()
        await resume(another, target, [])
        await another.until(lambda: "a" in another.failed)
        said = another.tokens["a"]
        assert len(said) >= 3
        assert said == continuation(TOKENS, len(said))
        assert another.failed == {"a": "cancelled"}


async def test_secrets_that_can_be_guessed_are_refused() -> None:
    async with decoding() as decode:
        with pytest.raises(InvalidRequest, match="resume_secret: must have 16 to 64 bytes"):
            await reserve(decode, spec("a", TOKENS), resume_secret=b"1234")


async def test_what_waits_for_a_conductor_is_sent_once_when_it_resumes_on_the_same_stream() -> None:
    subscriber = Subscriber(kv_pb2.Instance(id="conductor"))
    subscriber.tokens("a", 3, [13, 14])
    said = array("i", [10, 11, 12, 13, 14])
    transcript = RequestOutput("a", 1, SECRET, BlockKey(ROOT), [AnswerOutput(said)])
    transcript.send(subscriber, [2])
    subscriber.tokens("a", 5, [15])
    message = await subscriber.next()
    assert message is not None
    assert [(token.position, list(token.token_ids)) for token in message.tokens] == [(2, [12, 13, 14, 15])]
    subscriber.tokens("a", 6, [16])
    subscriber.fenced("a")
    message = await subscriber.next()
    assert message is not None
    assert (list(message.tokens), [fence.request_id for fence in message.fenced]) == ([], ["a"])


async def test_log_probabilities_come_from_the_position_on_as_far_as_they_are_known() -> None:
    """Those of an earlier placement were told by another instance: here the sequence is not known then."""
    said, found = array("i", [10, 11, 12, 13]), Logprobs(array("f", [-1.0, -2.0, -4.0]), array("I", [1, 2, 3]))
    transcript = RequestOutput("a", 1, SECRET, BlockKey(ROOT), [AnswerOutput(said, logprobs=found, scored_from=1)])
    subscriber = Subscriber(kv_pb2.Instance(id="conductor"))
    transcript.send(subscriber, [2])
    message = await subscriber.next()
    assert message is not None
    assert [(list(token.token_ids), list(token.logprobs.logprobs)) for token in message.tokens] == [
        ([12, 13], [-2.0, -4.0])
    ]
    asked = decode_pb2.ResumeSequence(request_id="a", generation=1, secret=SECRET)
    for position, known in ((0, False), (1, True), (4, True)):
        asked.from_position, asked.digest = position, tokens_digest(ROOT, said[:position])
        assert transcript.matches(asked) == known
