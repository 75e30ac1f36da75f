"""The streams to decode instances: which are kept, and until when."""

from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.rpc.channels import Channels
from moonpool.conductor.decode_streams import NewTokens, StepsPool, StepsStream
from moonpool.v1 import kv_pb2

DECODE = kv_pb2.Instance(id="decode", epoch=1, address="127.0.0.1:1")


class Reopener:
    """Opens its stream again when it breaks, as a promise that is renewed just then does."""

    def __init__(self, stream: StepsStream) -> None:
        self._stream = stream

    def add_tokens(self, new: NewTokens) -> bool:
        raise AssertionError("there are none")

    def fail(self, error: MoonpoolError) -> None:
        self._stream.open()


async def test_a_stream_that_breaks_without_sequences_is_forgotten() -> None:
    async with Channels() as channels:
        pool = StepsPool(channels)
        stream = pool.get(DECODE)
        stream.open()
        stream.fail(StreamBroken("broken"))
        assert pool.get(DECODE) is not stream
        await pool.aclose()


async def test_a_stream_that_was_opened_again_while_it_broke_is_kept() -> None:
    async with Channels() as channels:
        pool = StepsPool(channels)
        stream = pool.get(DECODE)
        stream.open()
        stream.subscribe("sequence", Reopener(stream))
        stream.fail(StreamBroken("broken"))
        assert pool.get(DECODE) is stream
        await pool.aclose()
