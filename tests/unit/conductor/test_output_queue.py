"""Messages to one client: merged while the client does not read, never reordered."""

import asyncio

import pytest

from moonpool.base.errors import Unavailable
from moonpool.conductor import output_queue
from moonpool.conductor.output_queue import MAX_MERGED_TOKENS, OutputQueue
from moonpool.v1 import conductor_pb2


def delta(position: int, *tokens: int, text: str = "") -> conductor_pb2.TokenDelta:
    return conductor_pb2.TokenDelta(position=position, token_ids=tokens, text=text)


async def read(outgoing: OutputQueue) -> list[conductor_pb2.GenerateResponse]:
    messages = []
    while (message := await outgoing.next()) is not None:
        messages.append(message)
    return messages


async def test_tokens_for_a_client_that_does_not_read_are_merged_and_nothing_is_reordered() -> None:
    outgoing = OutputQueue()
    outgoing.placed(conductor_pb2.Placed(request_id="r"))
    outgoing.delta(delta(0, 1, text="a"))
    outgoing.delta(None)
    outgoing.delta(delta(1, 2, 3, text="bc"))
    outgoing.placed(conductor_pb2.Placed(request_id="again"))
    outgoing.delta(delta(3, 4, text="d"))
    outgoing.finished(conductor_pb2.Finished())
    messages = await read(outgoing)
    assert [message.WhichOneof("event") for message in messages] == ["placed", "delta", "placed", "delta", "finished"]
    assert (messages[1].delta.position, list(messages[1].delta.token_ids), messages[1].delta.text) == (
        0,
        [1, 2, 3],
        "abc",
    )
    assert list(messages[3].delta.token_ids) == [4]


@pytest.mark.parametrize("whole", [False, True])
async def test_a_message_has_a_bounded_number_of_tokens(whole: bool) -> None:
    outgoing = OutputQueue(whole=whole)
    count = 2 * MAX_MERGED_TOKENS + 5
    for position in range(count):
        outgoing.delta(delta(position, position, text="a"))
    outgoing.end()
    deltas = [message.delta for message in await read(outgoing)]
    assert [delta.position for delta in deltas] == [0, MAX_MERGED_TOKENS, 2 * MAX_MERGED_TOKENS]
    assert [token for delta in deltas for token in delta.token_ids] == list(range(count))
    assert "".join(delta.text for delta in deltas) == "a" * count


async def test_answers_that_come_mixed_are_merged_each() -> None:
    outgoing = OutputQueue()
    for position in range(3):
        for choice in range(2):
            token = 10 * choice + position
            outgoing.delta(conductor_pb2.TokenDelta(choice=choice, position=position, token_ids=[token]))
    outgoing.end()
    deltas = [message.delta for message in await read(outgoing)]
    assert [(delta.choice, delta.position, list(delta.token_ids)) for delta in deltas] == [
        (0, 0, [0, 1, 2]),
        (1, 0, [10, 11, 12]),
    ]


async def test_a_client_that_wants_the_answer_whole_is_woken_at_its_end() -> None:
    outgoing = OutputQueue(whole=True)
    outgoing.placed(conductor_pb2.Placed(request_id="r"))
    message = await outgoing.next()
    assert message is not None
    assert message.placed.request_id == "r"
    reading = asyncio.ensure_future(outgoing.next())
    await asyncio.sleep(0)
    for position in range(3):
        outgoing.delta(delta(position, position, text="abc"[position]))
        await asyncio.sleep(0)
    assert not reading.done()
    outgoing.finished(conductor_pb2.Finished())
    message = await reading
    assert message is not None
    assert message.delta == delta(0, 0, 1, 2, text="abc")
    assert [message.WhichOneof("event") for message in await read(outgoing)] == ["finished"]


async def test_several_whole_answers_are_told_at_their_end_though_the_client_reads_meanwhile() -> None:
    """A client that is told of one choice finds tokens of another: it would never wait."""
    outgoing, messages = OutputQueue(whole=True), list[conductor_pb2.GenerateResponse]()

    async def reading() -> None:
        messages.extend(await read(outgoing))

    task = asyncio.ensure_future(reading())
    outgoing.delta(conductor_pb2.TokenDelta(choice=0, position=0, token_ids=[10]))
    outgoing.placed(conductor_pb2.Placed(request_id="r"))
    for position in range(4):
        for choice in range(3):
            token = conductor_pb2.TokenDelta(choice=choice, position=position + 1, token_ids=[position])
            outgoing.delta(token)
            await asyncio.sleep(0)
    assert not task.done()
    outgoing.finished(conductor_pb2.Finished())
    await task
    told = [(message.delta.choice, len(message.delta.token_ids)) for message in messages if message.HasField("delta")]
    assert told == [(0, 1), (0, 4), (1, 4), (2, 4)]


async def test_a_whole_answer_that_takes_long_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a client who leaves in the middle has been charged for nearly all."""
    monkeypatch.setattr(output_queue, "WHOLE_EVERY_S", 0.0)
    outgoing = OutputQueue(whole=True)
    for position in range(2):
        outgoing.delta(delta(position, position))
        message = await outgoing.next()
        assert message is not None
        assert message.delta == delta(position, position)


async def test_what_was_said_before_a_failure_is_read_before_it() -> None:
    outgoing = OutputQueue()
    reading = asyncio.create_task(read(outgoing))
    outgoing.delta(delta(0, 1))
    outgoing.end(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await reading


async def test_a_message_that_is_being_written_does_not_change() -> None:
    outgoing = OutputQueue()
    outgoing.delta(delta(0, 1))
    first = await outgoing.next()
    assert first is not None
    outgoing.delta(delta(1, 2))
    assert list(first.delta.token_ids) == [1]


async def test_of_what_another_call_tells_nothing_is_told_here() -> None:
    outgoing = OutputQueue()
    outgoing.placed(conductor_pb2.Placed(request_id="r"))
    outgoing.delta(delta(0, 1))
    assert await outgoing.next() is not None
    outgoing.drop()
    assert await outgoing.next() is None
