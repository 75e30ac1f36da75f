"""What is done beside the loop: a request's blocks are its own until a thread is done with them, and steps go on."""

import asyncio

import pytest

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.v1 import decode_pb2, kv_pb2
from tests.unit.base.transport.fakes import LAYOUT
from tests.unit.clocks import StandingClock
from tests.unit.engine.decode.calls import conducting, reserve, sending, slices, transfer
from tests.unit.fakes.beside import Held
from tests.unit.instances import BLOCK, WAIT_S, Decode, decoding, prompt, spec

TOKENS = prompt(2 * BLOCK)
THE_POOL = 32


async def held(decode: Decode, threads: Held) -> None:
    await decode.until(lambda: bool(threads.waiting))


async def all_free(decode: Decode) -> None:
    await decode.until(lambda: decode.service.manager.num_free == THE_POOL)


async def test_steps_are_dispatched_while_a_long_prompt_is_read() -> None:
    threads = Held(on=False)
    async with decoding(executor=threads) as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", TOKENS, max_tokens=6))
        await transfer(decode, target, TOKENS)
        threads.on = True
        reading = asyncio.ensure_future(reserve(decode, spec("long", prompt(4 * BLOCK))))
        await held(decode, threads)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert len(threads.waiting) == 1
        assert len(decode.engine.steps) == 5
        assert not reading.done()
        threads.release()
        assert (await reading).transfer_id
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_a_promise_whose_call_was_cancelled_while_it_was_read_is_not_given() -> None:
    threads = Held()
    async with decoding(executor=threads) as decode:
        call = decode.stub.Reserve(decode_pb2.ReserveRequest(sequence=spec("a", TOKENS)))
        await held(decode, threads)
        call.cancel()
        other = asyncio.ensure_future(reserve(decode, spec("b", TOKENS)))
        await decode.until(lambda: len(threads.waiting) == 2)
        threads.release()
        await other
        assert [live.request_id for live in decode.service.executor] == ["b"]
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_a_conductor_cancels_by_its_name_what_is_being_read_for_it() -> None:
    """Only what is its own."""
    threads, nothing = Held(), kv_pb2.TransferTarget()
    async with decoding(executor=threads) as decode, conducting(decode) as conductor:
        asked = [
            asyncio.ensure_future(reserve(decode, spec("a", TOKENS), conductor=kv_pb2.Instance(id=name)))
            for name in ("conductor", "another")
        ]
        await decode.until(lambda: len(threads.waiting) == 2)
        await conductor.cancel("a", nothing)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_BEFORE_START})
        threads.release()
        with pytest.raises(MoonpoolError, match="cancelled during validation"):
            await asked[0]
        assert await asked[1]
        assert [live.asked.conductor for live in decode.service.executor] == ["another/0"]
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_nothing_is_promised_by_who_drains_when_it_has_been_read() -> None:
    threads = Held()
    async with decoding(executor=threads) as decode:
        asked = asyncio.ensure_future(reserve(decode, spec("a", TOKENS)))
        await held(decode, threads)
        decode.service.drain()
        threads.release()
        with pytest.raises(MoonpoolError, match="draining"):
            await asked
        assert len(decode.service.executor) == 0


@pytest.mark.parametrize("way", ["cancelled", "lease", "stream"])
async def test_blocks_that_a_thread_writes_stay_their_request_s_until_it_is_done(way: str) -> None:
    threads, clock = Held(on=False), StandingClock()
    async with decoding(executor=threads, lease_s=0.1) as decode, conducting(decode) as conductor:
        async with sending(decode) as sender:
            target = await reserve(decode, spec("a", TOKENS))
            if way == "cancelled":
                await conductor.start("a", target, 9)
            outbound = await sender.open(target)
            threads.on = True
            sent = asyncio.ensure_future(outbound.send(slices(TOKENS)))
            await held(decode, threads)
            [live] = decode.service.executor
            if way == "cancelled":
                await conductor.cancel("a", target)
            if way == "lease":
                clock.now_s += 1.0
            if way != "stream":
                await decode.until(lambda: live.ending)
                with pytest.raises(TransferFailed):
                    await outbound.verdict(WAIT_S)
            await asyncio.gather(sent, return_exceptions=True)
        await decode.until(lambda: live.ending)
        decode.service.core.check_invariants()
        assert (decode.service.manager.num_used, len(decode.service.executor)) == (2, 1)
        threads.release()
        await all_free(decode)
        assert len(decode.service.executor) == 0
        threads.on = False


async def test_a_verdict_comes_when_everything_has_landed_and_credits_go_back_then() -> None:
    threads = Held(on=False)
    async with decoding(executor=threads) as decode, sending(decode) as sender:
        outbound = await sender.open(await reserve(decode, spec("a", TOKENS)))
        await decode.until(lambda: bool(decode.service.manager.num_used))
        threads.on = True
        await outbound.send(slices(TOKENS, layers=range(1)))
        await outbound.send(slices(TOKENS, layers=range(1, 3)))
        outbound.close(aborted=False)
        await held(decode, threads)
        [receiver], [live] = decode.service.receivers, decode.service.executor
        assert sender.traffic.credits_out == 3 * 2 * LAYOUT.slice_bytes(0)
        for layers in (1, 3):
            await held(decode, threads)
            assert not live.transfer.done
            threads.release(1)
            await decode.until(lambda layers=layers: receiver.received_bytes == layers * 2 * LAYOUT.slice_bytes(0))  # type: ignore[misc]
        await outbound.verdict(WAIT_S)
        await decode.until(lambda: not sender.traffic.credits_out)
        threads.on = False
        decode.service.executor.abort(live, "not wanted")


async def test_a_defect_in_a_thread_fails_its_transfer_and_no_other() -> None:
    threads = Held(on=False)
    async with decoding(executor=threads) as decode, sending(decode) as sender:
        bad = await sender.open(await reserve(decode, spec("bad", TOKENS)))
        good = await sender.open(await reserve(decode, spec("good", TOKENS)))
        threads.defect = RuntimeError("no more memory")
        await bad.send(slices(TOKENS))
        with pytest.raises(TransferFailed, match="a frame could not be written: RuntimeError") as failed:
            await bad.verdict(WAIT_S)
        assert type(failed.value) is TransferFailed  # no block is said to be damaged
        await good.send(slices(TOKENS))
        await good.verdict(WAIT_S)
        assert [live.request_id for live in decode.service.executor] == ["good"]
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_a_stream_that_breaks_is_known_to_its_sender_before_the_thread_is_done() -> None:
    threads = Held(on=False)
    async with decoding(executor=threads) as decode:
        async with sending(decode) as sender:
            outbound = await sender.open(await reserve(decode, spec("a", TOKENS)))
            threads.on = True
            sent = asyncio.ensure_future(outbound.send(slices(TOKENS)))
            await held(decode, threads)
        with pytest.raises(StreamBroken):
            await outbound.verdict(WAIT_S)
        await asyncio.gather(sent, return_exceptions=True)
        await decode.until(
            lambda: not decode.service.receivers
        )  # else the transfer may complete, and waits for its start
        threads.release()
        threads.on = False
        await all_free(decode)
