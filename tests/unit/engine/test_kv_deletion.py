"""Deletions at an engine: each is carried out once, and what is written to kvstores says which it is younger than."""

import asyncio

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.delete_kv import DEMANDED_S, DeletionLog
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.write_back import WriteBack, WriteBackLimits
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.engine.kv_service import KVDeletion
from moonpool.v1 import kv_pb2
from tests.unit.fakes.writer import FakeWriter

NAMESPACE = b"n" * 32
KEY, OTHER = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
STORE = kv_pb2.Instance(id="kvstore-0", address="a")


class Rig:
    """An engine's write-back and deletions; the pool finds three blocks each time it is looked through."""

    def __init__(self) -> None:
        self.now = 0.0
        self.writer, self.looks = FakeWriter(), list[DeleteKV]()
        self.deletions = DeletionLog(NAMESPACE, lambda: self.now)
        self.write_back = WriteBack(
            WriteBackLimits(blocks=8, workers=1),
            lambda address: self.writer,
            lambda layer, block: (memoryview(b""), 0),
            lambda: 0.0,
            self.deletions.matching,
        )
        self.deletion = KVDeletion(10, self.write_back, self._carry_out, self.deletions)
        self.dropped: list[BlockKey] = []

    def _carry_out(self, event: DeleteKV) -> int:
        self.looks.append(event)
        return 3

    def store(self, key: BlockKey, tenant: str) -> None:
        def over(stored: bool) -> None:
            if not stored:
                self.dropped.append(key)

        self.write_back.submit(STORE, [key], [BlockKey(bytes(32))], tenant, [1], over)

    async def delete(self, name: str, **named: object) -> kv_pb2.ForgetResponse:
        deletion = kv_pb2.Deletion(id=name, selection=kv_pb2.Selection(**named))  # type: ignore[arg-type]
        return await self.deletion.forget(kv_pb2.ForgetRequest(deletions=[deletion]))


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_deletion_is_carried_out_once_whoever_orders_it_and_how_often(rig: Rig) -> None:
    working = asyncio.create_task(rig.write_back.run())
    rig.store(KEY, "ours")
    await rig.writer.until(1)
    first = asyncio.create_task(rig.delete("d", tenants=["ours"]))
    again = asyncio.create_task(rig.delete("d", tenants=["ours"]))
    await asyncio.sleep(0)
    rig.store(OTHER, "ours")  # it is younger: nobody waits for it, and it is not dropped
    rig.writer.go(1)
    assert [(await call).blocks for call in (first, again)] == [3, 3]
    assert [look.selection.tenants for look in rig.looks] == [{"ours"}]
    await rig.writer.until(2)
    assert ((await rig.delete("d", tenants=["ours"])).blocks, len(rig.looks), rig.dropped) == (0, 1, [])
    working.cancel()
    await asyncio.wait([working])


async def test_what_waits_is_dropped_and_what_is_written_says_what_it_is_younger_than(rig: Rig) -> None:
    working = asyncio.create_task(rig.write_back.run())
    rig.store(KEY, "ours")
    rig.store(OTHER, "ours")
    await rig.writer.until(1)
    deleting = asyncio.create_task(rig.delete("d", keys=OTHER))
    assert (await deleting).blocks == 3  # it waits for no write of other KV
    assert rig.dropped == [OTHER]
    rig.store(OTHER, "ours")
    rig.store(KEY, "theirs")
    for number in range(2):
        rig.writer.go(number + 1)
        await rig.writer.until(number + 2)
    assert rig.writer.puts == [(KEY, []), (OTHER, ["d"]), (KEY, [])]
    working.cancel()
    await asyncio.wait([working])


async def test_many_deletions_of_one_message_look_through_the_pool_a_few_times_and_leave_others_their_turns(
    rig: Rig,
) -> None:
    """A pool may have many blocks, and a small message many deletions."""
    deletions = [
        kv_pb2.Deletion(id=str(number), selection=kv_pb2.Selection(tenants=[str(number)])) for number in range(5000)
    ]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    answer = await rig.deletion.forget(kv_pb2.ForgetRequest(deletions=deletions))
    beside.cancel()
    looks = [look.selection.tenants for look in rig.looks]
    assert frozenset().union(*looks) == {str(number) for number in range(5000)}
    assert sum(map(len, looks)) == 5000
    assert (answer.blocks, len(looks)) == (3 * len(looks), 3)
    assert turns >= 5  # between portions when they are read, after each that is carried out
    assert rig.deletions.matching([], "4999") == ["4999"]


async def test_a_wrong_deletion_changes_nothing(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match="keys"):
        await rig.delete("d", keys=b"short")
    assert (rig.looks, "d" in rig.deletions) == ([], False)


async def test_others_must_have_carried_out_what_is_recent_and_one_self_has_for_good(rig: Rig) -> None:
    await rig.delete("old", tenants=["ours"])
    rig.now = DEMANDED_S / 2
    await rig.delete("new", keys=KEY)
    both = ["new", "old"]
    assert (rig.deletions.demanded([KEY], "ours"), rig.deletions.demanded([OTHER], "theirs")) == (both, [])
    rig.now = DEMANDED_S
    await rig.delete("old", tenants=["ours"])  # a conductor repeats it, which does not begin it anew
    assert rig.deletions.demanded([KEY], "ours") == ["new"]
    rig.now = 1.5 * DEMANDED_S
    assert rig.deletions.demanded([KEY], "ours") == []
    assert (rig.deletions.matching([KEY], "ours"), "old" in rig.deletions, len(rig.looks)) == (both, True, 2)
