"""Deletions reach every member, those that are away too, and are known to conductors that were not there."""

import asyncio
from typing import NoReturn

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import InvalidRequest
from moonpool.conductor import deletion
from moonpool.v1 import conductor_pb2, kv_pb2

from .fakes import decode, prefill
from .stack import stack
from .stores import FakeStore

KEYS = [bytes([number]) * 32 for number in range(3)]


def told(store: FakeStore) -> list[str]:
    """Ids of the deletions that a store has heard of, in order."""
    return [deletion.id for request in store.forgotten for deletion in request.deletions]


def record(name: str) -> kv_pb2.Record:
    """Of another conductor's deletion of a tenant."""
    deletion = kv_pb2.Deletion(id=name, selection=kv_pb2.Selection(tenants=["ours"]))
    return kv_pb2.Record(kind="deletion", id=name, version=1, value=deletion.SerializeToString(), expires_at=1e12)


class Failing(asyncio.Event):
    """Who waits for it fails when it comes."""

    async def wait(self) -> NoReturn:
        await super().wait()
        raise Unavailable("once more")


async def test_what_each_member_did_is_said_and_the_rest_is_repeated() -> None:
    good, bad = FakeStore(keys=list(KEYS)), FakeStore("kvstore-1", refusals=[Unavailable("the disk is full")])
    async with stack(good, bad) as s:
        deleted = await s.client.delete_kv(keys=KEYS[:2])
        did, did_not = deleted.instances
        assert (did.instance, did.blocks, did.bytes, did.error) == ("kvstore-0", 2, 200, "")
        assert (did_not.instance, did_not.blocks) == ("kvstore-1", 0)
        assert "the disk is full" in did_not.error
        assert (deleted.complete, deleted.recorded) == (False, 2)
        assert (await s.gauges())["deletions_owed"] == 1
        await s.servicer.deletions.sweep()
        assert told(bad) == told(good) == [deleted.id]
        await s.rest()


async def test_engines_delete_before_stores_do() -> None:
    """What an engine is writing has come to its store by then."""
    order: list[str] = []
    engine, store = FakeStore("decode-0", kv_pb2.INSTANCE_KIND_DECODE, order=order), FakeStore(order=order)
    async with stack(store, engine) as s:
        await s.client.delete_kv(tenants=["ours"])
    assert order == ["decode-0", "kvstore-0"]


async def test_who_was_away_carries_it_out_before_it_is_a_member() -> None:
    there, away = FakeStore(), FakeStore("kvstore-1", refusals=[Unavailable("not yet")])
    async with stack(there) as s:
        deleted = await s.client.delete_kv(tenants=["ours"])
        task = await s.join(away)
        await s.joined(away)
        assert told(away) == [deleted.id]
        assert away.refusals == []
        assert not task.done()
        assert [record.id for record in away.replicated.of("deletion")] == [deleted.id]


async def test_a_conductor_that_was_not_there_learns_of_it_from_a_store() -> None:
    remembers, away = FakeStore(), FakeStore("kvstore-1")
    async with stack(remembers) as s:
        deleted = await s.client.delete_kv(tenants=["ours"])
    remembers.forgotten.clear()
    async with stack(remembers, away) as s:  # another one, with nothing in its memory
        assert told(remembers) == told(away) == [deleted.id]
        assert [record.id for record in away.replicated.of("deletion")] == [deleted.id]
        assert (await s.gauges())["deletions_owed"] == 0


async def test_members_carry_out_at_once_what_a_store_brings_that_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a conductor's restart, when engines are quicker than the store."""
    monkeypatch.setattr(deletion, "SWEEP_INTERVAL_S", 3600.0)
    engine, store = FakeStore("decode-0", kv_pb2.INSTANCE_KIND_DECODE), FakeStore()
    store.replicated.merge([record("theirs")])
    async with stack(engine, store) as s:
        await s.rest()  # nothing is owed
        assert told(engine) == told(store) == ["theirs"]


async def test_another_conductors_deletion_is_carried_out_when_it_is_heard_of() -> None:
    store = FakeStore()
    async with stack(store) as s:
        store.replicated.merge([record("theirs")])
        await s.servicer.deletions.sweep()
        assert told(store) == ["theirs"]


async def test_what_another_conductor_deletes_marks_what_is_on_its_way_here() -> None:
    held, store = Failing(), FakeStore()
    p, d = prefill(), decode()
    p.before.append(held)
    async with stack(store, p, d) as s:
        running = asyncio.create_task(
            s.client.generate(token_ids=list(range(30, 70)), tenant="ours", sampling=SamplingParams(max_tokens=3))
        )
        await p.until(lambda: bool(p.requests))
        store.replicated.merge([record("theirs")])
        await s.servicer.deletions.sweep()
        held.set()
        assert len((await running).token_ids) == 3
    assert [request.sequence.transient for request in p.requests] == [False, True]


async def test_a_deletion_that_is_asked_for_again_is_carried_out_once() -> None:
    """Here or at another conductor: it is ordered once, by its name. The counts are those of each call."""
    store, name = FakeStore(keys=list(KEYS)), "n" * 16
    request = conductor_pb2.DeleteKVRequest(id=name, selection=kv_pb2.Selection(keys=KEYS[0]))
    async with stack(store) as s:
        first = await s.servicer.DeleteKV(request, None)
        again = await s.servicer.DeleteKV(request, None)
        assert (first.id, again.id, first.instances[0].blocks, again.instances[0].blocks) == (name, name, 1, 0)
        assert told(store) == [name]
        request.selection.keys = KEYS[1]
        with pytest.raises(InvalidRequest, match="another deletion"):
            await s.servicer.DeleteKV(request, None)
        request.id = "short"
        with pytest.raises(InvalidRequest, match="16 to 64"):
            await s.servicer.DeleteKV(request, None)
    async with stack(store) as s:
        request.id, request.selection.keys = name, KEYS[0]
        await s.servicer.DeleteKV(request, None)
        assert [record.id for record in store.replicated.of("deletion")] == [name]


async def test_a_deletion_that_comes_in_a_round_waits_for_the_engines_of_the_next() -> None:
    """A store is not told in the middle of a round what the engines were not told in it."""
    order: list[str] = []
    engine = FakeStore("decode-0", kv_pb2.INSTANCE_KIND_DECODE, order=order)
    store = FakeStore(order=order)

    async with stack(store, engine) as s:
        store.replicated.merge([record("first")])
        engine.then = lambda: s.servicer.deletions.sync.merge([record("second")])
        await s.servicer.deletions.sweep()
        assert [told(engine), told(store)] == [["first"], ["first"]]
        await s.servicer.deletions.sweep()
        assert [told(engine), told(store)] == [["first", "second"], ["first", "second"]]


async def test_times_to_live_are_told_again_and_again() -> None:
    store = FakeStore()
    async with stack(store, tenant_ttl_s='{"ours": 60, "*": 3600}') as s:
        await s.servicer.deletions.sweep()
        assert [dict(request.ttl_s) for request in store.forgotten] == 2 * [{"ours": 60.0, "*": 3600.0}]


async def test_requests_that_run_meanwhile_keep_nothing() -> None:
    held = asyncio.Event()
    p, d = prefill(), decode()
    p.before.append(held)
    async with stack(p, d) as s:
        running = asyncio.create_task(
            s.client.generate(token_ids=list(range(30, 70)), tenant="ours", sampling=SamplingParams(max_tokens=3))
        )
        await p.until(lambda: bool(p.requests))
        deleted = await s.client.delete_kv(tenants=["ours"])
        assert not deleted.complete  # these engines do not know how
        held.set()
        assert len((await running).token_ids) == 3
        again = await s.client.generate(token_ids=[1], tenant="ours", sampling=SamplingParams(max_tokens=2))
        assert len(again.token_ids) == 2
    assert [request.sequence.transient for request in p.requests] == [False, False]


async def test_nothing_is_deleted_unless_something_is_named() -> None:
    async with stack(FakeStore()) as s:
        for wrong, field in (({}, "selection"), ({"keys": [b"x"]}, "selection.keys")):
            with pytest.raises(InvalidRequest) as refused:
                await s.client.delete_kv(**wrong)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(InvalidRequest, match="32 bytes"):
            await s.client.delete_kv(namespaces=[b"short"])
