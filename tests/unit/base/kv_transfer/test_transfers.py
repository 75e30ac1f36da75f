"""Transfers to decode over a real stream: whole, broken, refused, cancelled; nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonpool.base.errors import Mismatch, StreamBroken, TransferFailed
from moonpool.base.kv.frames import Slice
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.inbound_transfer import TransferState
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.transport.flow_control import EgressLink
from moonpool.base.transport.stream_spec import DEFAULT_OPTIONS, StreamSettings
from moonpool.v1 import kv_pb2
from tests.slices import slice_to_send
from tests.unit.base.transport.fakes import DECODE, HELLO, LAYOUT, FakeDecode, content, served

SLICE = LAYOUT.slice_bytes(0)
WAIT_S = 60.0


def slices(layers: range, blocks: range, last_valid: int = 16) -> list[Slice]:
    last = blocks.stop - 1
    return [
        slice_to_send(LAYOUT, layer, block, content(layer, block), last_valid if block == last else 16)
        for layer in layers
        for block in blocks
    ]


@asynccontextmanager
async def sending(
    decode: FakeDecode, settings: StreamSettings = DEFAULT_OPTIONS, **options: Any
) -> AsyncIterator[TransferSender]:
    async with served((DECODE, decode)) as (channels, address):
        sender = TransferSender(KVEndpoint(channels, address, HELLO, LAYOUT, settings), **options)
        try:
            yield sender
            assert sender.channels == 0, "every transfer is over"
        finally:
            await sender.aclose()


def check_credits(sender: TransferSender, window: int) -> None:
    assert sender.channels == 0
    assert 0 <= sender.traffic.credits_out < window // 4


async def test_the_whole_way_layer_by_layer() -> None:
    decode = FakeDecode()
    target = decode.promise(11, 4, last_valid=5, held=1)
    async with sending(decode, frame_bytes=2 * SLICE) as sender:
        transfer = await sender.open(target)
        for layer in range(LAYOUT.layers):
            assert await transfer.send(slices(range(layer, layer + 1), range(1, 4), 5)) == 3 * SLICE
        transfer.close(aborted=False)
        await transfer.verdict(WAIT_S)
        assert transfer.sent_bytes == 9 * SLICE
        check_credits(sender, decode.window)
    assert decode.transfers[11].state is TransferState.COMPLETE
    for layer in range(LAYOUT.layers):
        for block in range(1, 4):
            expected = content(layer, block)
            if block == 3:
                LAYOUT.zero_invalid(0, memoryview(expected), 5)
            assert decode.memory[11, layer, block] == expected
    assert decode.frames == 6


async def test_many_transfers_share_one_stream_and_its_credits() -> None:
    decode = FakeDecode(window=4 * SLICE)
    async with sending(decode, settings=StreamSettings(link=EgressLink())) as sender:

        async def send_one(number: int) -> None:
            async with await sender.open(decode.promise(number, 2)) as transfer:
                for layer in range(LAYOUT.layers):
                    await transfer.send(slices(range(layer, layer + 1), range(2)))
                transfer.close(aborted=False)
                await transfer.verdict(WAIT_S)

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(send_one(number))
        check_credits(sender, 4 * SLICE)
        assert decode.calls == 1
    assert all(transfer.state is TransferState.COMPLETE for transfer in decode.transfers.values())


async def test_frames_larger_than_the_window_pass() -> None:
    decode = FakeDecode(window=SLICE)
    async with sending(decode, frame_bytes=4 * SLICE) as sender:
        transfer = await sender.open(decode.promise(1, 4))
        await transfer.send(slices(range(3), range(4)))
        transfer.close(aborted=False)
        await transfer.verdict(WAIT_S)


async def test_a_corrupted_frame_fails_only_its_transfer() -> None:
    decode = FakeDecode()
    decode.corrupt.add(1)
    async with sending(decode) as sender:
        bad, good = await sender.open(decode.promise(1, 1)), await sender.open(decode.promise(2, 1))
        await bad.send(slices(range(3), range(1)))
        await good.send(slices(range(3), range(1)))
        bad.close(aborted=False)
        good.close(aborted=False)
        with pytest.raises(TransferFailed, match="wrong hash"):
            await bad.verdict(WAIT_S)
        await good.verdict(WAIT_S)
        check_credits(sender, decode.window)
        assert decode.calls == 1


async def test_too_little_sent_is_no_success() -> None:
    decode = FakeDecode()
    async with sending(decode) as sender:
        transfer = await sender.open(decode.promise(1, 2))
        await transfer.send(slices(range(2), range(2)))
        transfer.close(aborted=False)
        with pytest.raises(TransferFailed, match="before it was complete"):
            await transfer.verdict(WAIT_S)


async def test_given_up_by_the_receiver_ends_sending() -> None:
    decode = FakeDecode()
    async with sending(decode) as sender:
        transfer = await sender.open(decode.promise(1, 2))
        await transfer.send(slices(range(1), range(2)))
        await decode.until(lambda: decode.frames == 1)
        decode.fail(1, "lease expired")
        with pytest.raises(TransferFailed, match="lease expired"):
            await transfer.verdict(WAIT_S)
        with pytest.raises(TransferFailed, match="lease expired"):
            await transfer.send(slices(range(1, 2), range(2)))
        transfer.close(aborted=True)


async def test_abort_is_told_and_leaves_nothing() -> None:
    decode = FakeDecode()
    async with sending(decode) as sender:
        async with await sender.open(decode.promise(1, 2)) as transfer:
            await transfer.send(slices(range(1), range(2)))
        assert sender.channels == 0
        await decode.until(lambda: bool(decode.closes))
        with pytest.raises(TransferFailed, match="closed"):
            await transfer.send(slices(range(1, 2), range(2)))
        with pytest.raises(TransferFailed, match="aborted"):
            await transfer.verdict(WAIT_S)
        check_credits(sender, decode.window)
    assert decode.closes == [(1, True)]
    assert decode.transfers[1].state is TransferState.FAILED


async def test_cancelled_while_waiting_for_credits() -> None:
    decode = FakeDecode(window=2 * SLICE, hold_credits=True)
    async with sending(decode, frame_bytes=2 * SLICE) as sender:

        async def send() -> None:
            async with await sender.open(decode.promise(1, 2)) as transfer:
                await transfer.send(slices(range(3), range(2)))

        task = asyncio.ensure_future(send())
        await decode.until(lambda: decode.frames == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sender.channels == 0
        decode.give_credits()
        await decode.until(lambda: bool(decode.closes))
        # The stream has lived on, with all its credits.
        transfer = await sender.open(decode.promise(2, 2))
        await transfer.send(slices(range(3), range(2)))
        transfer.close(aborted=False)
        await transfer.verdict(WAIT_S)
        check_credits(sender, decode.window)
        assert decode.calls == 1


async def test_credits_that_never_come_are_waited_for_only_so_long() -> None:
    decode = FakeDecode(window=2 * SLICE, hold_credits=True)
    async with sending(decode, frame_bytes=2 * SLICE, send_timeout_s=0.01) as sender:
        transfer = await sender.open(decode.promise(1, 2))
        with pytest.raises(TransferFailed, match="no credit"):
            await transfer.send(slices(range(3), range(2)))
        transfer.close(aborted=True)


async def test_a_verdict_that_never_comes_is_waited_for_only_so_long() -> None:
    decode = FakeDecode()
    decode.verdicts = False
    async with sending(decode) as sender:
        transfer = await sender.open(decode.promise(1, 1))
        transfer.close(aborted=False)
        with pytest.raises(TransferFailed, match="no verdict"):
            await transfer.verdict(0.01)


async def test_a_broken_stream_fails_its_transfers_and_the_next_one_reconnects() -> None:
    decode = FakeDecode(window=2 * SLICE, hold_credits=True)
    async with sending(decode, frame_bytes=2 * SLICE) as sender:
        first, second = await sender.open(decode.promise(1, 2)), await sender.open(decode.promise(2, 2))
        stuck = asyncio.ensure_future(first.send(slices(range(3), range(2))))
        await decode.until(lambda: decode.frames == 1)
        decode.break_now.set()
        with pytest.raises(StreamBroken, match="on purpose"):
            await stuck
        with pytest.raises(StreamBroken):
            await second.send(slices(range(1), range(2)))
        with pytest.raises(StreamBroken):
            await second.verdict(WAIT_S)
        first.close(aborted=True)
        second.close(aborted=True)
        decode.hold_credits = False
        third = await sender.open(decode.promise(3, 2))
        await third.send(slices(range(3), range(2)))
        third.close(aborted=False)
        await third.verdict(WAIT_S)
        check_credits(sender, decode.window)
        assert decode.calls == 2


async def test_a_transfer_is_opened_once() -> None:
    decode = FakeDecode()
    async with sending(decode) as sender:
        target = decode.promise(1, 1)
        transfer = await sender.open(target)
        with pytest.raises(TransferFailed, match="open already"):
            await sender.open(target)
        transfer.close(aborted=True)


async def test_another_epoch_is_refused() -> None:
    decode = FakeDecode()
    target = decode.promise(1, 1)
    target.decode.epoch = 76
    async with sending(decode) as sender:
        with pytest.raises(Mismatch) as caught:
            await sender.open(target)
        assert caught.value.field == "epoch"


async def test_another_layout_is_refused_and_later_handshakes_work() -> None:
    decode = FakeDecode()
    hello = kv_pb2.StreamHello()
    hello.CopyFrom(HELLO)
    hello.layout.kv_heads = 1
    async with served((DECODE, decode)) as (channels, address):
        wrong = TransferSender(KVEndpoint(channels, address, hello, LAYOUT))
        for _ in range(2):
            with pytest.raises(Mismatch) as caught:
                await wrong.open(decode.promise(1, 1))
            assert caught.value.field == "layout.kv_heads"
        await wrong.aclose()
        right = TransferSender(KVEndpoint(channels, address, HELLO, LAYOUT))
        (await right.open(decode.promise(2, 1))).close(aborted=True)
        await right.aclose()


async def test_nobody_there() -> None:
    decode = FakeDecode()
    async with served((DECODE, decode)) as (channels, _):
        sender = TransferSender(KVEndpoint(channels, "127.0.0.1:1", HELLO, LAYOUT))
        with pytest.raises(StreamBroken):
            await sender.open(decode.promise(1, 1))
        assert sender.channels == 0
        await sender.aclose()


async def test_a_silent_peer_is_waited_for_only_so_long_by_all_together() -> None:
    decode = FakeDecode()
    decode.silent = True
    async with sending(decode, settings=StreamSettings(connect_timeout_s=0.2)) as sender:
        opening = [sender.open(decode.promise(number, 1)) for number in range(5)]
        results = await asyncio.gather(*opening, return_exceptions=True)
        assert [type(result) for result in results] == [StreamBroken] * 5
        assert decode.calls == 1


async def test_a_cancelled_opener_does_not_disturb_others() -> None:
    decode = FakeDecode()
    async with sending(decode) as sender:
        first = asyncio.ensure_future(sender.open(decode.promise(1, 1)))
        second = asyncio.ensure_future(sender.open(decode.promise(2, 1)))
        await asyncio.sleep(0)
        first.cancel()
        (await second).close(aborted=True)
        assert first.cancelled()
        assert sender.channels == 0


async def test_aclose_fails_what_is_open_and_is_final() -> None:
    decode = FakeDecode(window=SLICE, hold_credits=True)
    async with sending(decode, frame_bytes=SLICE) as sender:
        transfer = await sender.open(decode.promise(1, 1))
        stuck = asyncio.ensure_future(transfer.send(slices(range(3), range(1))))
        await decode.until(lambda: decode.frames == 1)
        await sender.aclose()
        await sender.aclose()
        with pytest.raises(StreamBroken):
            await stuck
        with pytest.raises(StreamBroken):
            await transfer.verdict(WAIT_S)
        with pytest.raises(StreamBroken, match="closed"):
            await sender.open(decode.promise(2, 1))


async def test_aclose_while_connecting() -> None:
    decode = FakeDecode()
    decode.silent = True
    async with sending(decode) as sender:
        opening = asyncio.ensure_future(sender.open(decode.promise(1, 1)))
        await decode.until(lambda: decode.calls == 1)
        await sender.aclose()
        with pytest.raises(StreamBroken):
            await opening


async def test_after_a_storm_of_faults_nothing_is_left() -> None:
    rng = random.Random(7)
    decode = FakeDecode(window=3 * SLICE)
    async with sending(decode, frame_bytes=2 * SLICE) as sender:
        outcomes: Counter[str] = Counter()

        async def send_one(number: int, fault: str) -> None:
            try:
                async with await sender.open(decode.promise(number, 2)) as transfer:
                    for layer in range(LAYOUT.layers):
                        await transfer.send(slices(range(layer, layer + 1), range(2)))
                        if fault == "abort" and layer == 1:
                            return
                    transfer.close(aborted=False)
                    await transfer.verdict(WAIT_S)
                    outcomes["complete"] += 1
            except (TransferFailed, StreamBroken) as error:
                outcomes[type(error).__name__] += 1

        for round_ in range(4):
            running = []
            for number in range(round_ * 12, round_ * 12 + 12):
                fault = rng.choice(["none", "none", "cancel", "abort", "corrupt"])
                if fault == "corrupt":
                    decode.corrupt.add(number)
                running.append((asyncio.ensure_future(send_one(number, fault)), fault))
            for task, fault in running:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if fault == "cancel":
                    task.cancel()
            if round_ == 2:
                await decode.until(lambda: decode.calls >= 1)
                decode.break_now.set()
            await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
            assert sender.channels == 0
        last = await sender.open(decode.promise(1000, 1))
        await last.send(slices(range(3), range(1)))
        last.close(aborted=False)
        await last.verdict(WAIT_S)
        check_credits(sender, decode.window)
        assert outcomes["complete"] > 5
        assert outcomes["TransferFailed"] > 3
