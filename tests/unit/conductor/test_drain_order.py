"""An instance is told to take nothing new, by command."""

import pytest

from moonpool.base.errors import InvalidRequest, NotFound

from .fakes import decode, prefill, store
from .stack import stack


async def test_the_order_reaches_the_instance() -> None:
    async with stack(prefill(), decode()) as s:
        call = await s.call_join(await s.serve(prefill(1)))
        assert (await call.read()).WhichOneof("message") == "welcome"
        await s.client.drain("prefill-1")
        assert (await call.read()).WhichOneof("message") == "drain"
        call.cancel()


async def test_the_last_engine_of_a_kind_and_strangers_are_refused() -> None:
    async with stack(prefill(), decode(), store()) as s:
        with pytest.raises(NotFound, match="nobody"):
            await s.client.drain("nobody")
        with pytest.raises(InvalidRequest, match="the last one of its kind") as caught:
            await s.client.drain("decode-0")
        assert caught.value.field == "instance_id"
        await s.client.drain("kvstore-0")  # KV can be computed again
