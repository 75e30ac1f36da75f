"""A decode instance on real gRPC: transfers, generation, and everything coming back on every way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded, StreamBroken, TransferFailed, Unavailable
from moonpool.kv.frames import Slice
from moonpool.kv.keys import block_keys
from moonpool.rpc.errors import from_rpc_error
from moonpool.sched.steps import Step
from moonpool.streams.transfer_client import TransferSender
from moonpool.v1 import decode_pb2, kv_pb2
from tests.slices import slice_to_send
from tests.unit.instances import (
    BLOCK,
    WAIT_S,
    Decode,
    continuation,
    decoding,
    prompt,
    read_spans,
    slice_of_tokens,
    spec,
)
from tests.unit.streams.fakes import HELLO, LAYOUT, ROOT, STORE, FakeStore, served


async def reserve(it: Decode, sequence: kv_pb2.SequenceSpec, **fields: Any) -> kv_pb2.TransferTarget:
    try:
        answer: decode_pb2.ReserveResponse = await it.stub.Reserve(
            decode_pb2.ReserveRequest(sequence=sequence, **fields), timeout=WAIT_S
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return answer.target


@asynccontextmanager
async def sending(it: Decode) -> AsyncIterator[TransferSender]:
    sender = TransferSender(it.channels, it.instance.address, HELLO, LAYOUT)
    try:
        yield sender
    finally:
        await sender.aclose()


def slices(tokens: list[int], held: int = 0, layers: range = range(LAYOUT.layers)) -> list[Slice]:
    blocks = range(held, LAYOUT.blocks_for(len(tokens)))
    return [
        slice_to_send(LAYOUT, layer, b, slice_of_tokens(tokens, b, layer), LAYOUT.valid_tokens(len(tokens), b))
        for layer in layers
        for b in blocks
    ]


async def transfer(it: Decode, target: kv_pb2.TransferTarget, tokens: list[int]) -> None:
    """A whole transfer."""
    async with sending(it) as sender, await sender.open(target) as outbound:
        await outbound.send(slices(tokens, target.held_blocks))
        outbound.close(aborted=False)
        await outbound.verdict(WAIT_S)


class Conductor:
    """One Steps stream and what came on it."""

    def __init__(self, it: Decode) -> None:
        self.call = it.stub.Steps()
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.outcomes: dict[str, int] = {}
        self.messages = 0

    async def start(self, request_id: str, target: kv_pb2.TransferTarget, token: int) -> None:
        started = decode_pb2.StartSequence(
            request_id=request_id,
            transfer_id=target.transfer_id,
            generation=target.generation,
            first_token_id=token,
        )
        await self.call.write(decode_pb2.StepsRequest(start=started))

    async def cancel(self, request_id: str, target: kv_pb2.TransferTarget) -> None:
        cancel = decode_pb2.CancelSequence(
            request_id=request_id, transfer_id=target.transfer_id, generation=target.generation
        )
        await self.call.write(decode_pb2.StepsRequest(cancel=cancel))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                message = await self.call.read()
                assert isinstance(message, decode_pb2.StepsResponse), "the stream ended"
                self.messages += 1
                for new in message.tokens:
                    have = self.tokens.setdefault(new.request_id, [])
                    assert new.position == len(have) + 1, "tokens come in order, none twice"
                    have.extend(new.token_ids)
                    if new.finish_reason:
                        self.reasons[new.request_id] = new.finish_reason
                self.failed |= {f.request_id: f.reason for f in message.failed}
                self.outcomes |= {c.request_id: c.outcome for c in message.cancelled}


@asynccontextmanager
async def conducting(it: Decode) -> AsyncIterator[Conductor]:
    conductor = Conductor(it)
    hello = decode_pb2.StepsHello(conductor=kv_pb2.Instance(id="conductor"))
    await conductor.call.write(decode_pb2.StepsRequest(hello=hello))
    try:
        yield conductor
    finally:
        conductor.call.cancel()


def hold(it: Decode) -> tuple[asyncio.Event, asyncio.Event]:
    """Stops every step before its first layer: (set when one has come there, set it to let all go)."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def before(step: Step, layer: int) -> None:
        reached.set()
        await go.wait()

    it.engine.before_layer = before
    return reached, go


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
async def test_generates_the_right_tokens(length: int, tmp_path: Path) -> None:
    """The answer is a function of the KV that came: it is right only if every byte is where it belongs."""
    tokens = prompt(length)
    answer = continuation(tokens, 6)
    async with decoding(spans=tmp_path / "spans") as it, conducting(it) as conductor:
        target = await reserve(it, spec("a", tokens, max_tokens=6))
        assert (target.transfer_id, target.held_blocks, target.decode.incarnation) == (1, 0, 11)
        assert it.work.scheduler.promised_blocks == -(-(length + 6) // BLOCK)
        await transfer(it, target, tokens)
        assert it.work.scheduler.promised_blocks == 0
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_LENGTH
        await it.rest()
        full = block_keys(ROOT, [*tokens, *answer[:-1]], BLOCK)
        assert set(it.work.manager.keys()) == set(full)
    (complete,) = read_spans(tmp_path / "spans", "transfer.complete")
    steps = read_spans(tmp_path / "spans", "decode.step")
    assert [step["args"]["requests"] for step in steps] == [["a"]] * 5
    assert complete["ts"] <= steps[0]["ts"]


async def test_start_before_the_last_slice() -> None:
    """The sequence joins the batch only when its ledger is complete."""
    tokens = prompt(2 * BLOCK)
    answer = continuation(tokens, 3)
    async with decoding() as it, conducting(it) as conductor, sending(it) as sender:
        target = await reserve(it, spec("a", tokens, max_tokens=3))
        async with await sender.open(target) as outbound:
            await outbound.send(slices(tokens, layers=range(2)))
            await conductor.start("a", target, answer[0])
            await it.until(lambda: any(seat.first_token is not None for seat in it.work.seats))
            assert it.engine.steps == []
            await outbound.send(slices(tokens, layers=range(2, 3)))
            await outbound.verdict(WAIT_S)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:]


async def test_end_token_ends() -> None:
    tokens = prompt(20)
    answer = continuation(tokens, 5)
    async with decoding() as it, conducting(it) as conductor:
        target = await reserve(it, spec("a", tokens, max_tokens=50, ends=[answer[3]]))
        await transfer(it, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1 : answer.index(answer[3], 1) + 1]
        assert conductor.reasons["a"] == kv_pb2.FINISH_REASON_STOP


async def test_held_blocks_are_not_sent_again() -> None:
    """What decode has of a prompt is promised as held, and used."""
    tokens = prompt(3 * BLOCK + 2)
    answer = continuation(tokens, 4)
    async with decoding() as it, conducting(it) as conductor:
        for number, held in enumerate([0, 3]):
            name = f"r{number}"
            target = await reserve(it, spec(name, tokens, max_tokens=4))
            assert target.held_blocks == held
            await transfer(it, target, tokens)
            await conductor.start(name, target, answer[0])
            await conductor.until(lambda name=name: name in conductor.reasons)  # type: ignore[misc]
            assert conductor.tokens[name] == answer[1:]
            await it.rest()


async def test_everything_held() -> None:
    """A prompt of whole blocks that are all here needs no slice: opening completes it."""
    tokens = prompt(2 * BLOCK)
    async with decoding() as it, conducting(it) as conductor:
        await transfer(it, await reserve(it, spec("warm", tokens)), tokens)
        target = await reserve(it, spec("a", tokens))
        assert target.held_blocks == 2
        async with sending(it) as sender, await sender.open(target) as outbound:
            await outbound.verdict(WAIT_S)
        await conductor.start("a", target, continuation(tokens, 1)[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == continuation(tokens, 4)[1:]
        warm = next(iter(it.work.seats))
        it.work.generator.end(warm, "not wanted")


async def test_many_at_once_in_one_batch() -> None:
    prompts = {f"r{i}": prompt(5 + 7 * i, i) for i in range(5)}
    async with decoding(max_batch=3) as it, conducting(it) as conductor:
        for name, tokens in prompts.items():
            target = await reserve(it, spec(name, tokens, max_tokens=4))
            await transfer(it, target, tokens)
            await conductor.start(name, target, continuation(tokens, 1)[0])
        await conductor.until(lambda: len(conductor.reasons) == 5)
        assert conductor.tokens == {name: continuation(tokens, 4)[1:] for name, tokens in prompts.items()}
        assert max(len(step.sequences) for step in it.engine.steps) <= 3


async def test_refuses_when_promised_out() -> None:
    """A promise is a number: it counts against the pool before any block is bound."""
    async with decoding(blocks=4) as it, conducting(it) as conductor:
        target = await reserve(it, spec("a", prompt(2 * BLOCK), max_tokens=BLOCK))
        with pytest.raises(Overloaded) as refused:
            await reserve(it, spec("b", prompt(BLOCK), max_tokens=BLOCK))
        assert refused.value.reason == "no_decode_room"
        assert refused.value.retry_after_s > 0
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_BEFORE_START})
        assert it.work.scheduler.promised_blocks == 0
        await conductor.cancel("a", await reserve(it, spec("a", prompt(BLOCK), max_tokens=BLOCK)))
        await conductor.until(lambda: not it.restless)


async def test_refuses_what_is_wrong() -> None:
    async with decoding(blocks=4) as it:
        good = spec("a", prompt(20))
        cases: list[tuple[str, dict[str, Any]]] = [
            ("sequence.token_ids", {"token_ids": b"123"}),
            ("sequence.token_ids", {"token_ids": b"", "block_keys": b""}),
            ("sequence.token_ids", {"token_ids": b"\x00\x01\x00\x00" * 20}),
            ("sequence.token_ids", {"token_ids": b"\xff" * 80}),
            ("sequence.block_keys", {"block_keys": b""}),
            ("sequence.chain_root", {"chain_root": b"short"}),
            ("sequence.prompt_tokens", {"prompt_tokens": 99}),
            ("sequence.request_id", {"request_id": ""}),
            ("sequence.sampling.max_tokens", {"sampling": kv_pb2.Sampling(max_tokens=1000)}),
            ("sequence.sampling.max_tokens", {"sampling": kv_pb2.Sampling(max_tokens=0)}),
        ]
        for field, change in cases:
            wrong = kv_pb2.SequenceSpec()
            wrong.CopyFrom(good)
            for name, value in change.items():
                wrong.ClearField(name)  # type: ignore[arg-type]
                wrong.MergeFrom(kv_pb2.SequenceSpec(**{name: value}))
            with pytest.raises(InvalidRequest) as refused:
                await reserve(it, wrong)
            assert refused.value.field == field


async def test_refuses_by_predicted_tbt() -> None:
    async with decoding() as it:
        with pytest.raises(Overloaded) as refused:
            await reserve(it, spec("a", prompt(4)), tbt_slo_s=1e-4)
        assert refused.value.reason == "tbt_slo"
        assert refused.value.predicted_tbt_s == pytest.approx(1e-3)


async def test_cancel_while_receiving() -> None:
    """Cancelled in flight: the sender gets the verdict, and what it still sends lands nowhere."""
    tokens = prompt(2 * BLOCK)
    async with decoding() as it, conducting(it) as conductor, sending(it) as sender:
        target = await reserve(it, spec("a", tokens))
        async with await sender.open(target) as outbound:
            await outbound.send(slices(tokens, layers=range(1)))
            await it.until(lambda: bool(it.work.manager.num_used))
            await conductor.cancel("a", target)
            await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})
            with pytest.raises(TransferFailed, match="cancelled"):
                await outbound.verdict(WAIT_S)
        assert it.work.manager.num_free == 32


async def test_cancel_in_a_step() -> None:
    """Blocks that a running step writes to stay used until it is over."""
    tokens = prompt(20)
    async with decoding() as it, conducting(it) as conductor:
        reached, go = hold(it)
        target = await reserve(it, spec("a", tokens, max_tokens=10))
        await transfer(it, target, tokens)
        await conductor.start("a", target, 9)
        await reached.wait()
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})
        assert it.work.manager.num_used == 2
        go.set()
        await it.rest()
        assert conductor.tokens == {}


async def test_first_token_must_exist() -> None:
    tokens = prompt(20)
    async with decoding() as it, conducting(it) as conductor:
        target = await reserve(it, spec("a", tokens))
        await transfer(it, target, tokens)
        await conductor.start("a", target, 256)
        await conductor.until(lambda: "a" in conductor.failed)
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_IN_FLIGHT})


async def test_cancel_unknown() -> None:
    async with decoding() as it, conducting(it) as conductor:
        await conductor.cancel("a", kv_pb2.TransferTarget(transfer_id=7, generation=8))
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_UNKNOWN})
        await conductor.start("b", kv_pb2.TransferTarget(transfer_id=7, generation=8), 9)
        await conductor.until(lambda: "b" in conductor.failed)


@pytest.mark.parametrize("opened", [False, True])
async def test_lease_ends(opened: bool) -> None:
    """Nothing is heard: the promise ends, the conductor and the sender are told."""
    tokens = prompt(20)
    async with decoding(lease_s=0.05) as it, conducting(it) as conductor, sending(it) as sender:
        target = await reserve(it, spec("a", tokens))
        outbound = await sender.open(target) if opened else None
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.failed)
        assert "nothing was heard" in conductor.failed["a"]
        await it.rest()
        if outbound is None:
            outbound = await sender.open(target)
        with pytest.raises(TransferFailed):
            await outbound.verdict(WAIT_S)


async def test_lease_of_what_nobody_starts() -> None:
    """All KV is there, but the conductor never says a word."""
    tokens = prompt(20)
    async with decoding(lease_s=0.05) as it:
        await transfer(it, await reserve(it, spec("a", tokens)), tokens)
        await it.rest()
        assert it.work.manager.num_cached == 1


async def test_broken_transfer_stream() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as it, conducting(it) as conductor:
        target = await reserve(it, spec("a", tokens))
        await conductor.start("a", target, 9)
        async with sending(it) as sender:
            outbound = await sender.open(target)
            await outbound.send(slices(tokens, layers=range(1)))
            await it.until(lambda: bool(it.work.manager.num_used))
        with pytest.raises(StreamBroken):
            await outbound.verdict(WAIT_S)
        await conductor.until(lambda: "a" in conductor.failed)
        assert "stream broke" in conductor.failed["a"]


async def test_aborted_and_short_transfers() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as it, conducting(it) as conductor, sending(it) as sender:
        for name, aborted, reason in [("a", True, "gave up"), ("b", False, "4 slices missing")]:
            target = await reserve(it, spec(name, tokens))
            await conductor.start(name, target, 9)
            outbound = await sender.open(target)
            await outbound.send(slices(tokens, layers=range(1)))
            outbound.close(aborted=aborted)
            await conductor.until(lambda name=name: name in conductor.failed)  # type: ignore[misc]
            assert reason in conductor.failed[name]
            outbound.release()


async def test_slices_twice_fail_the_transfer() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding() as it, sending(it) as sender:
        outbound = await sender.open(await reserve(it, spec("a", tokens)))
        await outbound.send(slices(tokens, layers=range(1)))
        await outbound.send(slices(tokens, layers=range(1)))
        with pytest.raises(TransferFailed, match="before"):
            await outbound.verdict(WAIT_S)


async def test_other_incarnation_and_generation() -> None:
    """A promise of an earlier life, or of another generation, is worth nothing."""
    tokens = prompt(20)
    async with decoding() as it, sending(it) as sender:
        target = await reserve(it, spec("a", tokens))
        stale = kv_pb2.TransferTarget()
        stale.CopyFrom(target)
        stale.generation += 1
        with pytest.raises(TransferFailed, match="no such transfer"):
            await (await sender.open(stale)).verdict(WAIT_S)
        stale.CopyFrom(target)
        stale.decode.incarnation += 1
        with pytest.raises(MoonpoolError, match="incarnation"):
            await sender.open(stale)
        assert len(it.work.seats) == 1
        it.work.generator.end(next(iter(it.work.seats)), "not wanted")


async def test_two_streams_cannot_share_a_transfer() -> None:
    """A frame on a stream that did not open the transfer is stray."""
    tokens = prompt(20)
    async with decoding() as it, sending(it) as right, sending(it) as wrong:
        target = await reserve(it, spec("a", tokens))
        outbound = await right.open(target)
        other = await wrong.open(target)
        with pytest.raises(TransferFailed, match="opened before"):
            await other.verdict(WAIT_S)
        await outbound.send(slices(tokens))
        await outbound.verdict(WAIT_S)
        it.work.generator.end(next(iter(it.work.seats)), "not wanted")


async def test_conductor_leaves() -> None:
    """Its stream ends: its sequences end, those of another conductor go on."""
    tokens = prompt(20)
    async with decoding() as it:
        reached, go = hold(it)
        async with conducting(it) as staying:
            async with conducting(it) as leaving:
                for conductor, name in ((leaving, "a"), (staying, "b")):
                    target = await reserve(it, spec(name, tokens, max_tokens=3))
                    await transfer(it, target, tokens)
                    await conductor.start(name, target, continuation(tokens, 1)[0])
                await reached.wait()
                await it.until(lambda: len(it.work.generator._generating) == 2)
            await it.until(lambda: sum(seat.reader is None for seat in it.work.seats) == 1 or len(it.work.seats) == 1)
            go.set()
            await staying.until(lambda: "b" in staying.reasons)
            assert staying.tokens["b"] == continuation(tokens, 3)[1:]


async def test_engine_dies() -> None:
    """Everything fails, nothing more is taken, and the work ends with the reason."""
    tokens = prompt(20)
    async with decoding() as it, conducting(it) as conductor:
        reached, _ = hold(it)
        target = await reserve(it, spec("a", tokens))
        await transfer(it, target, tokens)
        waiting = await reserve(it, spec("b", tokens))
        await conductor.start("b", waiting, 9)
        await conductor.start("a", target, 9)
        await reached.wait()
        it.engine.fail("out of memory")
        await conductor.until(lambda: {"a", "b"} <= conductor.failed.keys())
        assert "out of memory" in conductor.failed["a"]
        await it.until(lambda: it.death is not None)
        with pytest.raises(Unavailable, match="out of memory"):
            await reserve(it, spec("c", tokens))


async def test_answer_goes_to_the_store() -> None:
    """New full blocks beyond the prompt, the one that began in the prompt included, are stored with their parents."""
    tokens, store = prompt(BLOCK + 4), FakeStore()
    answer = continuation(tokens, 2 * BLOCK)
    async with served((STORE, store)) as (_, address), decoding() as it, conducting(it) as conductor:
        place = kv_pb2.Instance(id="store", incarnation=1, address=address)
        target = await reserve(it, spec("a", tokens, max_tokens=2 * BLOCK), write_back=place)
        await transfer(it, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        await it.rest()
        everything = [*tokens, *answer]
        keys = block_keys(ROOT, everything[:-1], BLOCK)
        assert len(keys) == 3
        assert set(store.blocks) == set(keys[1:])
        assert store.parents == {keys[1]: keys[0], keys[2]: keys[1]}
        for index in (1, 2):
            for layer in range(LAYOUT.layers):
                assert store.blocks[keys[index]][layer] == bytes(slice_of_tokens(everything, index, layer))
        assert it.work.write_back.blocks_stored == 2


async def test_answer_goes_to_every_copy() -> None:
    """A store that is gone costs the other one nothing."""
    tokens, store = prompt(BLOCK), FakeStore()
    async with served((STORE, store)) as (_, address), decoding() as it, conducting(it) as conductor:
        gone = kv_pb2.Instance(id="gone", incarnation=1, address="127.0.0.1:1")
        place = kv_pb2.Instance(id="store", incarnation=1, address=address)
        target = await reserve(it, spec("a", tokens, max_tokens=BLOCK + 2), write_back=gone, replicas=[place])
        await transfer(it, target, tokens)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.reasons)
        await it.rest()
        assert (it.work.write_back.blocks_stored, it.work.write_back.blocks_dropped) == (1, 1)
        with pytest.raises(InvalidRequest, match=r"replicas\[0\]\.address"):
            await reserve(it, spec("b", tokens), replicas=[kv_pb2.Instance(id="x", incarnation=1)])


async def test_store_gone() -> None:
    """Nobody notices but a counter."""
    tokens = prompt(BLOCK)
    async with decoding() as it, conducting(it) as conductor:
        place = kv_pb2.Instance(id="store", incarnation=1, address="127.0.0.1:1")
        target = await reserve(it, spec("a", tokens, max_tokens=BLOCK + 2), write_back=place)
        await transfer(it, target, tokens)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.reasons)
        await it.rest()
        assert it.work.write_back.blocks_dropped == 1


async def test_drains() -> None:
    tokens = prompt(20)
    async with decoding() as it, conducting(it) as conductor:
        reached, go = hold(it)
        target = await reserve(it, spec("a", tokens, max_tokens=3))
        await transfer(it, target, tokens)
        await conductor.start("a", target, continuation(tokens, 1)[0])
        await reached.wait()
        it.work.drain()
        assert it.work.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await reserve(it, spec("b", tokens))
        drained = asyncio.ensure_future(it.work.drained())
        go.set()
        await conductor.until(lambda: "a" in conductor.reasons)
        await asyncio.wait_for(drained, WAIT_S)
        assert conductor.tokens["a"] == continuation(tokens, 3)[1:]


async def test_hello_is_checked() -> None:
    """Another namespace is refused at the handshake, and the next stream is fine."""
    tokens = prompt(20)
    async with decoding() as it:
        wrong = kv_pb2.StreamHello()
        wrong.CopyFrom(HELLO)
        wrong.namespace = bytes(32)
        target = await reserve(it, spec("a", tokens))
        sender = TransferSender(it.channels, it.instance.address, wrong, LAYOUT)
        with pytest.raises(MoonpoolError, match="namespace"):
            await sender.open(target)
        await sender.aclose()
        await transfer(it, target, tokens)
        it.work.generator.end(next(iter(it.work.seats)), "not wanted")
