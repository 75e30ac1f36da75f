"""Write-back: bounded, in the background, and every reference comes back once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from moonpool.base.errors import FrameError, InvalidRequest, Overloaded, StreamBroken
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv_transfer.write_back import MAX_PAUSE_S, WriteBack, WriteBackLimits
from moonpool.v1 import kv_pb2
from tests.slices import hashed
from tests.unit.base.transport.turns import turn
from tests.unit.fakes.writer import FakeWriter

WAIT_S = 60.0
STORE = kv_pb2.Instance(id="store", epoch=1, address="a:1")


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


class Bench:
    def __init__(self, blocks: int = 4) -> None:
        self.writers: dict[str, FakeWriter] = {}
        self.released: list[int] = []
        self.stored: list[int] = []
        self.came_back = asyncio.Event()
        self.now = 0.0
        self.write_back = WriteBack(
            WriteBackLimits(blocks, workers=1, pause_s=2.0),
            self.open_writer,
            hashed(lambda layer, block: bytes([layer, block])),
            lambda: self.now,
        )

    def _over(self, blocks: Sequence[int], *, stored: bool) -> None:
        self.released += blocks
        self.stored += blocks if stored else ()
        self.came_back.set()

    def open_writer(self, address: str) -> FakeWriter:
        return self.writers.setdefault(address, FakeWriter())

    def submit(self, blocks: Sequence[int], store: kv_pb2.Instance = STORE) -> bool:
        blocks = blocks[: self.write_back.room(store, len(blocks))]
        if blocks:
            self.write_back.submit(
                store, keys(*blocks), keys(*blocks), "", blocks, lambda stored: self._over(blocks, stored=stored)
            )
        return bool(blocks)

    async def settle(self) -> None:
        assert await self.write_back.idle(WAIT_S)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.ensure_future(bench.write_back.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.write_back.blocks_held == 0


async def test_stores_and_gives_back() -> None:
    async with running(Bench()) as bench:
        bench.open_writer("a:1").go()
        assert bench.submit([3, 1])
        assert bench.write_back.blocks_held == 2
        await bench.settle()
        assert bench.released == bench.stored == [3, 1]
        assert bench.writers["a:1"].read == [b"\x00\x03", b"\x00\x01"]
        assert (bench.write_back.blocks_stored, bench.write_back.blocks_present, bench.write_back.blocks_dropped) == (
            1,
            1,
            0,
        )


async def test_is_bounded_and_takes_leading_blocks() -> None:
    async with running(Bench(blocks=3)) as bench:
        assert bench.submit([1, 2])
        assert bench.submit([3, 4])
        assert not bench.submit([5])
        assert bench.write_back.blocks_dropped == 2
        bench.open_writer("a:1").go()
        await bench.settle()
        assert sorted(bench.released) == [1, 2, 3]


async def test_a_store_that_does_not_answer_keeps_no_other_waiting() -> None:
    other = kv_pb2.Instance(id="other", epoch=1, address="b:1")
    async with running(Bench(blocks=6)) as bench:
        bench.open_writer("b:1").go()
        assert bench.submit([1, 2])
        assert bench.write_back.room(STORE, 9) == 4  # alone, it may have all
        assert bench.submit([1, 2], other)  # the same blocks, a second copy
        assert bench.write_back.room(STORE, 9) == 1
        assert bench.write_back.room(other, 9) == 1
        async with asyncio.timeout(WAIT_S):
            await bench.came_back.wait()
        assert bench.writers["b:1"].read == [b"\x00\x01", b"\x00\x02"]
        assert bench.released == [1, 2]
        bench.open_writer("a:1").go()
        await bench.settle()
        assert bench.released == [1, 2, 1, 2]


async def test_what_was_submitted_early_is_stored_once_it_runs() -> None:
    bench = Bench()
    bench.open_writer("a:1").go()
    assert bench.submit([1])
    async with running(bench):
        await bench.settle()
    assert bench.released == [1]


async def test_a_failing_store_is_left_alone_for_a_while() -> None:
    async with running(Bench()) as bench:
        writer = bench.open_writer("a:1")
        writer.go()
        for error in (StreamBroken("gone"), ZeroDivisionError("a defect")):
            writer.error = error
            assert bench.submit([1])
            assert bench.submit([2])  # dropped when its turn comes
            await bench.settle()
            assert not bench.submit([3])
            bench.now += 2.5
        assert bench.released == [1, 2, 1, 2]
        assert not bench.stored
        assert bench.write_back.blocks_dropped == 6
        writer.error = None
        assert bench.submit([4])
        await bench.settle()
        assert bench.writers["a:1"].read == [b"\x00\x04"]


async def test_a_refusal_is_not_tried_again_and_the_store_is_left_alone_as_long_as_it_says() -> None:
    async with running(Bench()) as bench:
        writer = bench.open_writer("a:1")
        writer.go()
        writer.error = Overloaded("full of pins", reason="kvstore_pinned", retry_after_s=10.0)
        assert bench.submit([1])
        await bench.settle()
        bench.now += 9.5
        assert not bench.submit([2])
        bench.now += 1.0
        for error in (
            InvalidRequest("keys", "more than the tenant may have"),
            FrameError("layer 0 of block 0: wrong hash"),
            Overloaded("others are guaranteed it", reason="kvstore_guaranteed", retry_after_s=9.0),
        ):
            writer.error = error
            assert bench.submit([3])  # costs that job only
            await bench.settle()
        writer.error = Overloaded("never", reason="kvstore_pinned", retry_after_s=1e9)
        assert bench.submit([4])
        await bench.settle()
        bench.now += MAX_PAUSE_S + 0.1
        writer.error = None
        assert bench.submit([5])
        await bench.settle()
        assert bench.writers["a:1"].read == [b"\x00\x05"]


async def test_the_end_drops_what_waits() -> None:
    async with running(Bench()) as bench:
        assert bench.submit([1])
        assert bench.submit([2])
        assert not await bench.write_back.idle(0.01)
    assert sorted(bench.released) == [1, 2]
    assert all(writer.closed for writer in bench.writers.values())
    assert not bench.submit([3])


async def test_deleted_jobs_are_dropped_and_those_under_way_are_waited_for() -> None:
    """When it is said to be done, no such block can come to a store any more."""
    selection, namespace = KVSelection(keys=frozenset(keys(1, 2))), bytes(32)
    async with running(Bench()) as bench:
        writer = bench.open_writer("a:1")
        for number in (1, 2, 3):
            bench.submit([number])
        await turn()
        assert writer.channels == 1
        doing = bench.write_back.forget(selection, namespace)
        assert bench.released == [2]
        assert not await bench.write_back.ended(doing, 0.0)
        forgetting = asyncio.ensure_future(bench.write_back.ended(doing, WAIT_S))
        await asyncio.sleep(0)
        assert not forgetting.done()
        writer.go()
        assert await forgetting
        await bench.settle()
        assert bench.stored == [1, 3]
        assert await bench.write_back.ended(bench.write_back.forget(selection, namespace), 0.0)
