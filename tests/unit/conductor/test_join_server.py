"""How instances come to belong to the cluster, and how they are lost; with agents, and with Join spoken by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from moonpool.base.errors import Mismatch, MoonpoolError, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.version import installed_version
from moonpool.v1 import conductor_pb2, kv_pb2

from .fakes import FakeMember, decode, expected, prefill, store
from .stack import WAIT_S, stack

KEYS = [bytes([n]) * 32 for n in range(4)]


def events(sequence: int, keys: list[bytes], *, snapshot: bool = False) -> conductor_pb2.JoinRequest:
    message = kv_pb2.KVEvents(
        sequence=sequence, stored_keys=b"".join(keys), snapshot_begin=snapshot, snapshot_end=snapshot
    )
    return conductor_pb2.JoinRequest(events=message)


async def answer(call: Any) -> str:
    """Kind of the conductor's next message on a Join stream."""
    message = await call.read()
    kind: str = message.WhichOneof("message")
    return kind


async def test_events_reach_the_index_and_leaving_empties_it() -> None:
    k = store(keys=KEYS[:1])
    async with stack() as s:
        index = s.servicer.core.cluster.index
        agent = await s.join(k)
        await s.until(lambda: index.held("kvstore-0") == 1)
        k.store(KEYS[1:3])
        await s.until(lambda: index.lengths(KEYS) == {"kvstore-0": 3})
        agent.cancel()
        await s.until(lambda: len(s.cluster.registry) == 0)
        assert len(index) == 0


async def test_a_mismatch_ends_the_agent() -> None:
    p, d = prefill(), decode()
    async with stack(p) as s:
        agent = await s.join(d, model=s.model(head_dim=32))
        with pytest.raises(Mismatch) as caught:
            async with asyncio.timeout(WAIT_S):
                await agent
        assert caught.value.field == "model.layout.head_dim"
        assert [member.id for member in s.cluster.registry] == ["prefill-0"]


async def test_a_missing_message_empties_the_index_and_asks_for_a_snapshot() -> None:
    async with stack() as s:
        call = await s.call_join(await s.serve(store()))
        assert await answer(call) == "welcome"
        await call.write(events(1, KEYS[:2], snapshot=True))
        await s.until(lambda: s.servicer.core.cluster.index.held("kvstore-0") == 2)
        await call.write(events(3, KEYS[2:]))
        assert await answer(call) == "resync"
        assert s.servicer.core.cluster.index.held("kvstore-0") == 0
        await call.write(events(4, KEYS, snapshot=True))
        await s.until(
            lambda: (
                s.servicer.core.cluster.index.lengths(KEYS) == {"kvstore-0": 4}
                and s.servicer.core.cluster.index.synced("kvstore-0")
            )
        )
        call.cancel()


async def test_a_later_epoch_takes_the_place() -> None:
    old, new = prefill(), prefill(epoch=2)
    async with stack(old) as s:
        registry = s.cluster.registry
        await s.join(new)
        await s.until(lambda: (m := registry.get("prefill-0")) is not None and m.instance.epoch == 2)
        assert len(registry) == 1


async def test_an_instance_comes_back_after_its_stream_broke() -> None:
    async with stack() as s:
        hello = await s.serve(store())
        call = await s.call_join(hello)
        await call.write(events(1, KEYS[:1], snapshot=True))
        await s.until(lambda: s.servicer.core.cluster.index.held("kvstore-0") == 1)
        call.cancel()
        await s.until(lambda: len(s.cluster.registry) == 0)
        again = await s.call_join(hello)
        await again.write(events(9, KEYS, snapshot=True))
        await s.until(lambda: s.servicer.core.cluster.index.held("kvstore-0") == 4)
        again.cancel()


async def test_silence_is_loss() -> None:
    async with stack(heartbeat_s=0.05) as s:
        call = await s.call_join(await s.serve(decode()))
        assert await answer(call) == "welcome"
        await s.until(lambda: s.cluster.registry.get("decode-0") is None)
        with pytest.raises(MoonpoolError) as caught:
            await answer(call)
        assert "nothing was heard" in str(caught.value)


@asynccontextmanager
async def reporting(call: Any, member: FakeMember) -> AsyncIterator[None]:
    """A member says again and again that it is there: else its time may be over before it is needed."""

    enough = asyncio.Event()

    async def report() -> None:
        while not enough.is_set():
            await call.write(conductor_pb2.JoinRequest(load=member.load))
            with suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), 0.1)

    told = asyncio.create_task(report())
    try:
        yield
    finally:
        enough.set()  # and not cancelled: a write that is cancelled ends the stream
        await told


async def test_requests_of_a_silent_instance_go_on_elsewhere() -> None:
    silent = decode(0, hold_at=2)
    async with stack(prefill(), heartbeat_s=0.3) as s:
        call = await s.call_join(await s.serve(silent))
        assert await answer(call) == "welcome"
        params = SamplingParams(max_tokens=6, temperature=0.0)
        async with reporting(call, silent):
            asked = asyncio.create_task(s.client.generate(token_ids=list(range(30, 50)), sampling=params))
            await silent.until(lambda: len(silent.requests) == 1)
        await s.join(decode(1))
        result = await asked
        assert result.token_ids == expected(20, 6)
        assert [placement.decode for placement in result.placements] == ["decode-0", "decode-1"]
        await s.rest()


async def test_a_stream_that_times_out_after_its_process_has_joined_again_ends_no_request() -> None:
    d = decode(hold_at=2)
    async with stack(prefill()) as s:
        hello = await s.serve(d)
        old = await s.call_join(hello)
        assert await answer(old) == "welcome"
        params = SamplingParams(max_tokens=6, temperature=0.0)
        async with reporting(old, d):
            asked = asyncio.create_task(s.client.generate(token_ids=list(range(30, 50)), sampling=params))
            await d.until(lambda: d.streams == 1)
        await s.follow(d, hello)
        with pytest.raises(MoonpoolError) as caught:
            await answer(old)
        assert "nothing was heard" in str(caught.value)
        d.go.set()
        result = await asked
        assert result.token_ids == expected(20, 6)
        assert len(result.placements) == 1
        await s.rest()


async def test_losing_a_prefill_does_not_end_what_decodes() -> None:
    p, d = prefill(after=[asyncio.Event()]), decode(hold_at=3)
    async with stack(d, heartbeat_s=0.5) as s:
        call = await s.call_join(await s.serve(p))
        assert await answer(call) == "welcome"
        stream = s.client.stream(token_ids=list(range(30, 50)), sampling=SamplingParams(max_tokens=6, temperature=0.0))
        events, tokens = aiter(stream), list[int]()
        async with reporting(call, p):
            while len(tokens) < 3:
                tokens += (await anext(events)).token_ids
        await s.until(lambda: s.cluster.registry.get("prefill-0") is None)
        d.go.set()
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 6)
        assert stream.result is not None
        assert len(stream.result.placements) == 1
        await s.rest()
        assert d.cancelled == []


async def test_an_address_that_does_not_answer_is_not_taken() -> None:
    async with stack() as s:
        hello = await s.serve(prefill())
        hello.instance.address = "127.0.0.1:1"
        call = await s.call_join(hello)
        with pytest.raises(MoonpoolError) as caught:
            await answer(call)
        error = caught.value
        assert isinstance(error, Unavailable)
        assert "does not answer" in str(error)
        assert len(s.cluster.registry) == 0


async def test_versions_are_told_and_those_too_far_apart_are_refused() -> None:
    async with stack(prefill(), decode()) as s:
        state = await s.client.cluster_state()
        assert {instance.version for instance in state.instances} == {installed_version()}
        hello = await s.serve(decode(1))
        hello.version = "99.0.0"
        call = await s.call_join(hello)
        with pytest.raises(Mismatch, match=r"version 99\.0\.0 does not work with"):
            await answer(call)
