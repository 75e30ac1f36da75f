import socket
import threading

import pytest

from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.channel import AsyncChannel, BlockingChannel, ChannelClosed
from moonpool.engine.messages import OpenKVGateMessage

STEP = Step(7, (SequenceStep(b"\1\0\0\0" * 100_000, 0, tuple(range(3000)), SampleSpec(history=b"abcd")),), gated=True)


async def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    ours, theirs = socket.socketpair()
    engine = BlockingChannel(theirs)
    got: list[object] = []

    def serve() -> None:
        for _ in range(2):
            got.append(engine.receive())
            engine.send(got[-1])

    thread = threading.Thread(target=serve)
    thread.start()
    channel = await AsyncChannel.open(ours)
    channel.send(STEP)
    channel.send(OpenKVGateMessage(7, 3))
    assert await channel.receive() == STEP
    assert await channel.receive() == OpenKVGateMessage(7, 3)
    thread.join(60)
    assert got == [STEP, OpenKVGateMessage(7, 3)]
    engine.close()
    with pytest.raises(ChannelClosed):
        await channel.receive()
    channel.send(STEP)  # into the void
    channel.close()
    await channel.wait_closed()


async def test_the_blocking_end_notices_the_other_ends_death() -> None:
    ours, theirs = socket.socketpair()
    engine = BlockingChannel(theirs)
    ours.send(b"\5\0")  # half a length, then gone
    ours.close()
    with pytest.raises(ChannelClosed):
        engine.receive()
    with pytest.raises(ChannelClosed):
        engine.send(STEP)
    engine.close()
