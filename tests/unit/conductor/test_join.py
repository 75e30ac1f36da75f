import asyncio

import pytest

import moonpool.cluster.join
from moonpool.client import SamplingParams
from moonpool.errors import Mismatch
from moonpool.v1 import kv_pb2

from .fakes import SERVICES, WAIT_S, FakePrefill, decode, expected, prefill, stack, store

KEYS = [bytes([n]) * 32 for n in range(4)]


async def test_events_reach_the_index_and_leaving_empties_it() -> None:
    k = store(keys=KEYS[:1])
    async with stack() as s:
        index = s.servicer._cluster.index
        agent = await s.join(k)
        await s.until(lambda: index.held("kvstore-0") == 1)
        k.store(KEYS[1:3])
        await s.until(lambda: index.match(KEYS) == {"kvstore-0": 3})
        agent.cancel()
        await s.until(lambda: len(s.servicer._cluster.registry) == 0)
        assert len(index) == 0


async def test_a_mismatch_ends_the_agent() -> None:
    p, d = prefill(), decode()
    async with stack(p) as s:
        agent = await s.join(d, model=s.model(head_dim=32))
        with pytest.raises(Mismatch) as caught:
            async with asyncio.timeout(WAIT_S):
                await agent
        assert caught.value.field == "model.layout.head_dim"
        assert [member.id for member in s.servicer._cluster.registry] == ["prefill-0"]


async def test_a_gap_is_healed_by_a_snapshot() -> None:
    k = store(keys=KEYS[:2])
    async with stack(k) as s:
        index = s.servicer._cluster.index
        await s.until(lambda: index.held("kvstore-0") == 2)
        member = s.servicer._cluster.registry.get("kvstore-0")
        assert member is not None
        assert k.agent is not None
        k.agent._events._next_sequence += 1  # a message gets lost
        k.store(KEYS[2:])
        await s.until(lambda: index.match(KEYS) == {"kvstore-0": 4} and index.synced("kvstore-0"))


async def test_a_later_incarnation_takes_the_place() -> None:
    old, new = prefill(), prefill(incarnation=2)
    async with stack(old) as s:
        registry = s.servicer._cluster.registry
        await s.join(new)
        await s.until(lambda: (m := registry.get("prefill-0")) is not None and m.instance.incarnation == 2)
        assert len(registry) == 1


async def test_an_agent_comes_back_after_its_stream_broke() -> None:
    k = store(keys=KEYS)
    async with stack(k) as s:
        cluster = s.servicer._cluster
        first = cluster.registry.get("kvstore-0")
        s.servicer._joins.stop()
        await s.until(lambda: cluster.registry.get("kvstore-0") is not first)
        s.servicer._joins._stopping.clear()
        await s.until(lambda: cluster.index.held("kvstore-0") == 4)


async def test_silence_is_loss() -> None:
    p, d = prefill(), decode(hold_at=1)
    async with stack(p, d, heartbeat_s=0.05) as s:
        assert d.agent is not None
        quiet = asyncio.Event()

        async def stop_writing(*args: object) -> None:
            await quiet.wait()

        d.agent._send = stop_writing  # type: ignore[assignment,method-assign]
        await s.until(lambda: s.servicer._cluster.registry.get("decode-0") is None)


async def test_requests_of_a_silent_instance_go_on_elsewhere() -> None:
    p, silent, other = prefill(), decode(0, hold_at=2), decode(1)
    async with stack(p, silent, other, heartbeat_s=0.3) as s:
        assert silent.agent is not None
        quiet = asyncio.Event()

        async def stop_writing(*args: object) -> None:
            await quiet.wait()

        silent.agent._send = stop_writing  # type: ignore[assignment,method-assign]
        params = SamplingParams(max_tokens=6, temperature=0.0)
        result = await s.client.generate(token_ids=list(range(30, 50)), sampling=params)
        assert result.token_ids == expected(20, 6)
        assert [placement.decode for placement in result.placements] == ["decode-0", "decode-1"]
        await s.rest()


class Unreachable(FakePrefill):
    """Tells an address at which nobody is."""

    @property
    def instance(self) -> kv_pb2.Instance:
        return kv_pb2.Instance(id=self.id, incarnation=1, kind=self.kind, address="127.0.0.1:1")


class Listening:
    """A logger that notes the first warning."""

    def __init__(self) -> None:
        self.warned: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def warning(self, event: str, **fields: object) -> None:
        if not self.warned.done():
            self.warned.set_result(str(fields["error"]))


async def test_an_address_that_does_not_answer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Listening()
    monkeypatch.setattr(moonpool.cluster.join, "log", log)
    monkeypatch.setitem(SERVICES, Unreachable, SERVICES[FakePrefill])
    async with stack() as s:
        agent = await s.join(Unreachable("prefill-9", kv_pb2.INSTANCE_KIND_PREFILL))
        async with asyncio.timeout(WAIT_S):
            assert "does not answer" in await log.warned
        assert len(s.servicer._cluster.registry) == 0
        agent.cancel()
