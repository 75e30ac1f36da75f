"""An instance is told to change its role, by command; with Join spoken by hand."""

import pytest

from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.v1 import conductor_pb2, kv_pb2

from .fakes import FakeMember, decode, prefill, store
from .stack import Stack, stack


async def either(running: Stack, member: FakeMember) -> conductor_pb2.JoinHello:
    """The hello of a member that is served and can change its role."""
    hello = await running.serve(member)
    hello.either_role = True
    return hello


async def test_a_command_reaches_the_instance() -> None:
    async with stack(prefill(), decode()) as s:
        call = await s.call_join(await either(s, prefill(1)))
        assert (await call.read()).WhichOneof("message") == "welcome"
        await s.client.change_role("prefill-1", "decode")
        order = await call.read()
        assert order.role.kind == kv_pb2.INSTANCE_KIND_DECODE
        call.cancel()


async def test_what_cannot_be_is_refused_by_name() -> None:
    async with stack(prefill(), decode(), store()) as s:
        call = await s.call_join(await either(s, decode(1)))
        await call.read()
        last = await s.call_join(await either(s, prefill(1)))
        await last.read()
        with pytest.raises(NotFound):
            await s.client.change_role("nobody", "decode")
        for instance, kind, field, why in (
            ("prefill-0", "decode", "instance_id", "without either_role"),
            ("decode-1", "decode", "kind", "INSTANCE_KIND_DECODE"),
            ("kvstore-0", "decode", "kind", "INSTANCE_KIND_KVSTORE"),
            ("decode-1", "gateway", "kind", "must be prefill or decode"),
        ):
            with pytest.raises(InvalidRequest, match=why) as caught:
                await s.client.change_role(instance, kind)
            assert caught.value.field == field
        call.cancel()
        last.cancel()


async def test_the_last_one_of_its_kind_stays() -> None:
    async with stack(prefill()) as s:
        call = await s.call_join(await either(s, decode(1)))
        await call.read()
        with pytest.raises(InvalidRequest, match="the last one"):
            await s.client.change_role("decode-1", "prefill")
        call.cancel()
