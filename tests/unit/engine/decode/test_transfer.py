"""Transfers that break, come twice or come for somebody else."""

import asyncio

import pytest

from moonpool.base.errors import MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import HELLO, LAYOUT
from tests.unit.engine.decode.calls import conducting, reserve, sending, slices, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, WAIT_S, decoding, prompt, spec


async def test_broken_transfer_stream() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens))
        await conductor.start("a", target, 9)
        async with sending(decode) as sender:
            outbound = await sender.open(target)
            await outbound.send(slices(tokens, layers=range(1)))
            await decode.until(lambda: bool(decode.service.manager.num_used))
        with pytest.raises(StreamBroken):
            await outbound.verdict(WAIT_S)
        await conductor.until(lambda: "a" in conductor.failed)
        assert "stream broke" in conductor.failed["a"]


async def test_aborted_and_short_transfers() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, conducting(decode) as conductor, sending(decode) as sender:
        for name, aborted, reason in [("a", True, "gave up"), ("b", False, "4 slices missing")]:
            target = await reserve(decode, spec(name, tokens))
            await conductor.start(name, target, 9)
            outbound = await sender.open(target)
            await outbound.send(slices(tokens, layers=range(1)))
            outbound.close(aborted=aborted)
            await conductor.until(lambda name=name: name in conductor.failed)  # type: ignore[misc]
            assert reason in conductor.failed[name]
            outbound.release()


async def test_what_has_come_whole_of_a_torn_transfer_is_not_sent_again() -> None:
    """Two blocks were whole, of the third only one layer was there; the one behind it does not count."""
    tokens = prompt(4 * BLOCK)
    whole = [part for part in slices(tokens) if part.block != 2]
    async with decoding() as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", tokens))
        await conductor.start("a", target, 9)
        async with sending(decode) as sender:
            outbound = await sender.open(target)
            await outbound.send(whole + [part for part in slices(tokens, layers=range(1)) if part.block == 2])
            live = decode.service.executor.get(target.transfer_id, target.generation)
            assert live is not None
            await decode.until(lambda: live.transfer.missing() == LAYOUT.layers - 1)
        await conductor.until(lambda: "a" in conductor.failed)
        outbound.release()
        again = await reserve(decode, spec("b", tokens))
        assert again.held_blocks == 2
        await transfer(decode, again, tokens)
        await conductor.start("b", again, continuation(tokens, 1)[0])
        await conductor.until(lambda: "b" in conductor.reasons)


async def test_a_sequence_joins_when_its_kv_is_on_the_device() -> None:
    tokens = prompt(2 * BLOCK)
    answer = continuation(tokens, 3)
    async with decoding() as decode, conducting(decode) as conductor:
        loading = decode.engine.loading = asyncio.get_running_loop().create_future()
        target = await reserve(decode, spec("a", tokens, max_tokens=3))
        await conductor.start("a", target, answer[0])
        await transfer(decode, target, tokens)  # the sender need not wait for the device
        assert not decode.engine.steps
        decode.engine.loading = None
        loading.set_result(None)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]


async def test_slices_twice_fail_the_transfer() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as decode, sending(decode) as sender:
        outbound = await sender.open(await reserve(decode, spec("a", tokens)))
        await outbound.send(slices(tokens, layers=range(1)))
        await outbound.send(slices(tokens, layers=range(1)))
        with pytest.raises(TransferFailed, match="before"):
            await outbound.verdict(WAIT_S)


async def test_other_epoch_and_generation() -> None:
    """A promise of an earlier life, or of another generation, is worth nothing."""
    tokens = prompt(20)
    async with decoding() as decode, sending(decode) as sender:
        target = await reserve(decode, spec("a", tokens))
        stale = kv_pb2.TransferTarget()
        stale.CopyFrom(target)
        stale.generation += 1
        with pytest.raises(TransferFailed, match="no such transfer"):
            await (await sender.open(stale)).verdict(WAIT_S)
        stale.CopyFrom(target)
        stale.decode.epoch += 1
        with pytest.raises(MoonpoolError, match="epoch"):
            await sender.open(stale)
        assert len(decode.service.executor) == 1
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_two_streams_cannot_share_a_transfer() -> None:
    """A frame on a stream that did not open the transfer is stray."""
    tokens = prompt(20)
    async with decoding() as decode, sending(decode) as right, sending(decode) as wrong:
        target = await reserve(decode, spec("a", tokens))
        outbound = await right.open(target)
        other = await wrong.open(target)
        with pytest.raises(TransferFailed, match="opened before"):
            await other.verdict(WAIT_S)
        await outbound.send(slices(tokens))
        await outbound.verdict(WAIT_S)
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")


async def test_hello_is_checked() -> None:
    """Another namespace is refused at the handshake, and the next stream is fine."""
    tokens = prompt(20)
    async with decoding() as decode:
        wrong = kv_pb2.StreamHello()
        wrong.CopyFrom(HELLO)
        wrong.namespace = bytes(32)
        target = await reserve(decode, spec("a", tokens))
        sender = TransferSender(KVEndpoint(decode.channels, decode.instance.address, wrong, LAYOUT))
        with pytest.raises(MoonpoolError, match="namespace"):
            await sender.open(target)
        await sender.aclose()
        await transfer(decode, target, tokens)
        decode.service.executor.abort(next(iter(decode.service.executor)), "not wanted")
