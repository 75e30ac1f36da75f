"""What a conductor is told, when ids come again and when it does not read."""

import asyncio

from moonpool.engine.subscriber import MAX_CANCEL_ANSWERS, Subscriber
from moonpool.v1 import decode_pb2, kv_pb2

STOP, UNKNOWN = kv_pb2.FINISH_REASON_STOP, kv_pb2.CANCEL_OUTCOME_UNKNOWN


async def told(reader: Subscriber) -> decode_pb2.StepsResponse:
    async with asyncio.timeout(60):
        message = await reader.next()
    assert message is not None
    return message


async def test_an_id_that_comes_again_is_another_sequence() -> None:
    reader = Subscriber(kv_pb2.Instance())
    reader.tokens("a", 1, [5])
    reader.tokens("a", 2, [6], STOP)
    reader.tokens("a", 1, [7])
    reader.failed("a", "gone")
    reader.tokens("a", 4, [8])
    reader.cancelled("a", UNKNOWN)  # of something else: it takes nothing from the one that runs
    message = await told(reader)
    assert [(item.position, list(item.token_ids)) for item in message.tokens] == [(1, [5, 6]), (1, [7]), (4, [8])]
    assert [item.finish_reason for item in message.tokens] == [STOP, 0, 0]
    assert (len(message.failed), len(message.cancelled), reader.waiting) == (1, 1, 0)


async def test_tokens_of_what_was_cancelled_are_not_sent() -> None:
    reader = Subscriber(kv_pb2.Instance())
    reader.tokens("a", 1, [5])
    reader.cancelled("a", kv_pb2.CANCEL_OUTCOME_IN_FLIGHT)
    assert not (await told(reader)).tokens


async def test_who_does_not_read_is_not_listened_to() -> None:
    reader = Subscriber(kv_pb2.Instance())
    for _ in range(MAX_CANCEL_ANSWERS):
        await asyncio.wait_for(reader.wait_until_read(), 60)
        reader.cancelled("a", UNKNOWN)
    waiting = asyncio.ensure_future(reader.wait_until_read())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len((await told(reader)).cancelled) == MAX_CANCEL_ANSWERS
    await asyncio.wait_for(waiting, 60)
    for _ in range(MAX_CANCEL_ANSWERS):
        reader.failed("a", "gone")
    waiting = asyncio.ensure_future(reader.wait_until_read())
    await asyncio.sleep(0)
    reader.close()
    await asyncio.wait_for(waiting, 60)
