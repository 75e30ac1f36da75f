"""A prefill instance on real gRPC, with a real decode instance and a small store: every way a prompt can go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded, StreamBroken, TransferFailed, Unavailable
from moonpool.kv.frames import Run
from moonpool.kv.keys import block_keys
from moonpool.rpc.errors import from_rpc_error
from moonpool.sched.steps import Step
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from tests.unit.instances import (
    BLOCK,
    WAIT_S,
    Decode,
    Prefill,
    decoding,
    next_token,
    prefilling,
    prompt,
    read_spans,
    slice_of_tokens,
    spec,
)
from tests.unit.streams.fakes import LAYOUT, ROOT, STORE, FakeStore, served


class Story:
    """One Prefill call and what it told."""

    def __init__(self, it: Prefill, request: prefill_pb2.PrefillRequest) -> None:
        self.call: Any = it.stub.Prefill(request, timeout=WAIT_S)
        self.token: prefill_pb2.FirstToken | None = None
        self.finished: prefill_pb2.PrefillFinished | None = None

    async def read(self) -> str:
        """The next event's name; "" at the end."""
        try:
            event = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        if event is grpc.aio.EOF:
            return ""
        name: str = event.WhichOneof("event")
        if name == "first_token":
            self.token = event.first_token
        elif name == "finished":
            self.finished = event.finished
        return name

    async def accepted(self) -> "Story":
        assert await self.read() == "accepted"
        return self

    async def told(self) -> prefill_pb2.FirstToken:
        assert await self.read() == "first_token"
        assert self.token is not None
        return self.token

    async def to_the_end(self) -> prefill_pb2.FirstToken:
        while await self.read():
            pass
        assert self.token is not None
        assert self.finished is not None
        return self.token


async def begin(it: Prefill, sequence: kv_pb2.SequenceSpec, **fields: Any) -> Story:
    return await Story(it, prefill_pb2.PrefillRequest(sequence=sequence, **fields)).accepted()


async def promised(decode: Decode, sequence: kv_pb2.SequenceSpec) -> kv_pb2.TransferTarget:
    answer: decode_pb2.ReserveResponse = await decode.stub.Reserve(decode_pb2.ReserveRequest(sequence=sequence))
    return answer.target


def assert_arrived(decode: Decode, tokens: list[int]) -> None:
    """The one request's blocks hold exactly the prompt's KV."""
    (request,) = decode.service.requests
    assert request.complete
    for index in range(LAYOUT.blocks_for(len(tokens))):
        for layer in range(LAYOUT.layers):
            assert bytes(decode.engine.pool.slice(layer, request.block_table[index])) == bytes(
                slice_of_tokens(tokens, index, layer)
            ), (layer, index)


def dismiss(decode: Decode) -> None:
    for request in decode.service.requests:
        decode.service.loop.end(request, "not wanted")


def hold(it: Prefill, layer: int = 0) -> tuple[asyncio.Event, asyncio.Event]:
    """Stops steps before a layer: (set when one has come there, set it to let all go)."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def before(step: Step, at: int) -> None:
        if at == layer:
            reached.set()
            await go.wait()

    it.engine.before_layer = before
    return reached, go


@asynccontextmanager
async def storing(tokens: list[int] | None = None, **options: Any) -> AsyncIterator[tuple[FakeStore, kv_pb2.Instance]]:
    """A store that holds all full blocks of some tokens."""
    store = FakeStore(**options)
    if tokens is not None:
        for index, key in enumerate(block_keys(ROOT, tokens, BLOCK)):
            store.blocks[key] = {n: bytes(slice_of_tokens(tokens, index, n)) for n in range(LAYOUT.layers)}
    async with served((STORE, store)) as (_, address):
        yield store, kv_pb2.Instance(id="store", incarnation=1, address=address)


def source(place: kv_pb2.Instance, blocks: int) -> prefill_pb2.PrefixSource:
    return prefill_pb2.PrefixSource(instance=place, blocks=blocks)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("stages", [1, 2])
async def test_computes_and_streams(length: int, stages: int, tmp_path: Path) -> None:
    tokens = prompt(length)
    async with prefilling(stages=stages, spans=tmp_path / "spans") as it, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(it, sequence, target=await promised(decode, sequence))
        first = await story.to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (0, 0, length)
        assert story.finished is not None
        assert story.finished.sent_bytes == LAYOUT.blocks_for(length) * LAYOUT.block_bytes
        assert_arrived(decode, tokens)
        await it.rest()
        assert it.service.manager.num_cached == length // BLOCK
        assert set(it.service.manager.keys()) == set(block_keys(ROOT, tokens, BLOCK))
        dismiss(decode)
    chunks = -(-length // (2 * BLOCK))
    assert len(read_spans(tmp_path / "spans", "step")) == chunks
    assert len(read_spans(tmp_path / "spans", "engine.layer")) == chunks * LAYOUT.layers
    sends = read_spans(tmp_path / "spans", "kv.send")
    assert {span["args"]["layer"] for span in sends} == set(range(LAYOUT.layers))
    assert sum(span["args"]["bytes"] for span in sends) == LAYOUT.blocks_for(length) * LAYOUT.block_bytes


async def test_a_layer_leaves_while_the_next_waits() -> None:
    """Layer 0 of the prompt is at decode before layer 1 has begun."""
    tokens = prompt(2 * BLOCK)
    async with prefilling() as it, decoding() as decode:
        reached, go = hold(it, layer=1)
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        (request,) = decode.service.requests
        accept, first_layer = request.transfer.accept, asyncio.Event()

        def accepting(run: Run, now: float) -> None:
            accept(run, now)
            if request.transfer.missing() == 2 * (LAYOUT.layers - 1):
                first_layer.set()

        request.transfer.accept = accepting  # type: ignore[method-assign]
        story = await begin(it, sequence, target=target)
        await reached.wait()
        await asyncio.wait_for(first_layer.wait(), WAIT_S)
        go.set()
        await story.to_the_end()
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_first_token_waits_for_no_transfer() -> None:
    """The token is told while the last frames cannot leave yet."""
    tokens = prompt(2 * BLOCK)
    rate = LAYOUT.block_bytes * 2 / 0.3  # the whole transfer takes about 0.3 s
    async with prefilling(rate=rate) as it, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(it, sequence, target=await promised(decode, sequence))
        await story.told()
        (request,) = decode.service.requests
        assert not request.complete
        assert await story.read() == "finished"
        assert story.finished is not None
        assert story.finished.transfer_tail_s > 0
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_only_one_token_wanted() -> None:
    """Without a target nothing is sent, and the answer is the same."""
    tokens = prompt(2 * BLOCK + 1)
    async with prefilling() as it:
        story = await begin(it, spec("a", tokens, max_tokens=1))
        assert (await story.to_the_end()).token_id == next_token(tokens)
        assert story.finished is not None
        assert story.finished.sent_bytes == 0


@pytest.mark.parametrize(("length", "local"), [(3 * BLOCK, 2 * BLOCK), (3 * BLOCK + 1, 3 * BLOCK)])
async def test_local_prefix(length: int, local: int) -> None:
    """The second time only what is not cached is computed; the last token always is. Decode gets all of it."""
    tokens = prompt(length)
    async with prefilling() as it, decoding() as decode:
        await (await begin(it, spec("warm", tokens, max_tokens=1))).to_the_end()
        sequence = spec("a", tokens)
        first = await (await begin(it, sequence, target=await promised(decode, sequence))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.computed_tokens) == (local, length - local)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_what_decode_holds_is_not_sent() -> None:
    tokens = prompt(3 * BLOCK + 2)
    async with prefilling() as it, decoding() as decode:
        sequence = spec("a", tokens)
        for held in (0, 3):
            target = await promised(decode, sequence)
            assert target.held_blocks == held
            story = await begin(it, sequence, target=target)
            await story.to_the_end()
            assert story.finished is not None
            assert story.finished.sent_bytes == (4 - held) * LAYOUT.block_bytes
            assert_arrived(decode, tokens)
            dismiss(decode)


async def test_loads_from_the_store(tmp_path: Path) -> None:
    """A stored prefix is loaded layer by layer, followed by a gated step, and goes on to decode."""
    tokens = prompt(4 * BLOCK + 3)
    async with (
        storing(tokens) as (_, place),
        prefilling(spans=tmp_path / "spans") as it,
        decoding() as decode,
    ):
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(it, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (0, 4 * BLOCK, 3)
        assert_arrived(decode, tokens)
        await it.rest()
        assert set(it.service.manager.keys()) == set(block_keys(ROOT, tokens, BLOCK))
        dismiss(decode)
    loads = read_spans(tmp_path / "spans", "kv.load")
    assert [span["args"]["layer"] for span in loads] == list(range(LAYOUT.layers))


async def test_loads_beyond_the_local_prefix() -> None:
    tokens = prompt(5 * BLOCK)
    async with storing(tokens) as (_, place), prefilling() as it, decoding() as decode:
        await (await begin(it, spec("warm", tokens[: 2 * BLOCK + 1], max_tokens=1))).to_the_end()
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(it, sequence, target=target, source=source(place, 5))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.local_tokens, first.loaded_tokens, first.computed_tokens) == (2 * BLOCK, 2 * BLOCK, BLOCK)
        assert_arrived(decode, tokens)
        dismiss(decode)


async def test_the_step_follows_the_load() -> None:
    """With layer 0 loaded and the rest held back, layer 0 computes and layer 1 waits at its gate."""
    tokens = prompt(3 * BLOCK + 3)
    slice_bytes = 3 * LAYOUT.slice_bytes
    async with storing(tokens, frame_bytes=slice_bytes) as (store, place), prefilling() as it, decoding() as decode:
        passed: list[tuple[bool, int]] = []
        gate = asyncio.Event()
        send = store._read

        async def before(step: Step, layer: int) -> None:
            passed.append((step.gated, layer))
            if layer == 1:
                gate.set()

        async def read(opening: kv_pb2.ReadOpen, writer: Any, outbox: Any) -> None:
            whole = writer.send

            async def held(session: int, generation: int, slices: list[Any], *, timeout_s: float) -> int:
                if slices and slices[0].layer == 1:
                    await gate.wait()  # layer 1 leaves the store only after the step has computed layer 0
                sent: int = await whole(session, generation, slices, timeout_s=timeout_s)
                return sent

            writer.send = held
            await send(opening, writer, outbox)

        store._read = read  # type: ignore[method-assign]
        it.engine.before_layer = before
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(it, sequence, target=target, source=source(place, 3))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == 3 * BLOCK
        assert passed == [(True, 0), (True, 1), (True, 2)]
        assert_arrived(decode, tokens)
        dismiss(decode)


@pytest.mark.parametrize("lost_at", [(0, 0), (0, 2), (1, 1), (2, 3)])
async def test_load_lost_midway(lost_at: tuple[int, int]) -> None:
    """A block is found missing when some layers are there and computed with: the rest is computed, all is right."""
    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes
    async with storing(tokens, frame_bytes=frame) as (store, place), prefilling() as it, decoding() as decode:
        store.lost_at = lost_at
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(it, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == (lost_at[1] * BLOCK if lost_at[0] == 0 else 0)
        assert_arrived(decode, tokens)
        dismiss(decode)


@pytest.mark.parametrize("fault", ["fewer", "nothing", "corrupt", "mute", "early", "refused"])
async def test_store_does_not_give_what_it_has(fault: str) -> None:
    """Whatever the store does, the answer is right and the request not failed."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with storing(tokens) as (store, place), prefilling(load_timeout_s=0.1) as it, decoding() as decode:
        if fault == "fewer":
            del store.blocks[keys[2]]
        elif fault == "nothing":
            store.blocks.clear()
        elif fault == "refused":
            place.address = "127.0.0.1:1"
        store.corrupt, store.mute, store.done_early = fault == "corrupt", fault == "mute", fault == "early"
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        first = await (await begin(it, sequence, target=target, source=source(place, 4))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == (2 * BLOCK if fault == "fewer" else 0)
        assert_arrived(decode, tokens)
        dismiss(decode)
        failed = fault not in ("fewer", "nothing")
        assert it.service.loader.failures == failed
        if failed:  # and it is left alone for a while
            again = prompt(3 * BLOCK + 3, 7)
            await (await begin(it, spec("b", again, max_tokens=1), source=source(place, 3))).to_the_end()
            assert it.service.loader.failures == 1


@pytest.mark.parametrize("fault", ["mute", "refused", "nothing", "midway"])
async def test_another_store_serves_what_the_first_does_not(fault: str) -> None:
    """As long as nothing has been handed on; after that what is missing is computed."""
    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes
    async with (
        storing(tokens, frame_bytes=frame) as (store, place),
        storing(tokens) as (other, replica),
        prefilling(load_timeout_s=0.1) as it,
        decoding() as decode,
    ):
        replica.id = "replica"
        if fault == "nothing":
            store.blocks.clear()
        elif fault == "refused":
            place.address = "127.0.0.1:1"
        elif fault == "midway":
            store.lost_at = (1, 1)
        store.mute = fault == "mute"
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        story = await begin(it, sequence, target=target, source=source(place, 4), other_sources=[source(replica, 4)])
        first = await story.to_the_end()
        assert first.token_id == next_token(tokens)
        assert (first.loaded_tokens, other.calls) == ((0, 0) if fault == "midway" else (4 * BLOCK, 1))
        assert_arrived(decode, tokens)
        dismiss(decode)
        if fault in ("mute", "refused"):  # the first one is left alone for a while
            again = await begin(it, spec("b", tokens, max_tokens=1), source=source(place, 4))
            await again.to_the_end()
            assert it.service.loader.failures == 1


async def test_loads_only_where_it_is_cheaper() -> None:
    """Loading a block is predicted to take longer than computing it: it is computed."""
    tokens = prompt(2 * BLOCK + 3)
    async with storing(tokens) as (store, place), prefilling() as it:
        it.service.tracker.observe_load(1, 3600.0)
        for _ in range(60):
            it.service.tracker.observe_load(1, 3600.0)
        first = await (await begin(it, spec("a", tokens, max_tokens=1), source=source(place, 2))).to_the_end()
        assert first.token_id == next_token(tokens)
        assert first.loaded_tokens == 0
        assert store.calls == 0


async def test_new_blocks_are_stored() -> None:
    """What was computed goes to the store, what was loaded or cached does not."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with storing(tokens[: 2 * BLOCK]) as (store, place), prefilling() as it:
        story = await begin(it, spec("a", tokens, max_tokens=1), source=source(place, 2), write_back=place)
        assert (await story.to_the_end()).loaded_tokens == 2 * BLOCK
        await it.rest()
        assert set(store.blocks) == set(keys)
        assert store.parents == {keys[2]: keys[1], keys[3]: keys[2]}
        for index in (2, 3):
            for layer in range(LAYOUT.layers):
                assert store.blocks[keys[index]][layer] == bytes(slice_of_tokens(tokens, index, layer))


async def test_every_copy_is_filled_up_from_what_its_store_holds() -> None:
    """The source gets what was computed; a store that holds less gets what was loaded, too, and what was cached."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with (
        storing(tokens[: 2 * BLOCK]) as (store, place),
        storing(tokens[:BLOCK]) as (other, replica),
        storing() as (late, new),
        prefilling() as it,
    ):
        replica.id, new.id = "replica", "new"
        copies = [prefill_pb2.StoreReplica(instance=replica, held_blocks=1)]
        sequence = spec("a", tokens, max_tokens=1)
        story = await begin(it, sequence, source=source(place, 2), write_back=place, write_back_held=2, replicas=copies)
        assert (await story.to_the_end()).loaded_tokens == 2 * BLOCK
        await it.rest()
        assert set(store.blocks) == set(other.blocks) == set(keys)
        assert store.parents == {keys[2]: keys[1], keys[3]: keys[2]}
        assert other.parents == {keys[1]: keys[0], **store.parents}
        assert it.service.write_back.blocks_stored == 5
        story = await begin(it, spec("b", tokens, max_tokens=1), write_back=new, write_back_held=0)
        assert (await story.to_the_end()).local_tokens == 4 * BLOCK
        await it.rest()
        assert set(late.blocks) == set(keys)


async def test_too_many_stores_and_stores_without_address_are_refused() -> None:
    async with prefilling() as it:
        place = kv_pb2.Instance(id="store", incarnation=1, address="127.0.0.1:1")
        sequence = spec("a", prompt(5), max_tokens=1)
        with pytest.raises(InvalidRequest, match="replicas: at most 16"):
            await begin(it, sequence, replicas=[prefill_pb2.StoreReplica(instance=place)] * 17)
        with pytest.raises(InvalidRequest, match=r"other_sources\[1\]\.instance\.address"):
            await begin(
                it, sequence, other_sources=[source(place, 1), source(kv_pb2.Instance(id="x", incarnation=1), 1)]
            )


async def test_write_back_is_bounded() -> None:
    """A store that does not answer costs dropped blocks, nothing else."""
    async with storing() as (store, place), prefilling(write_back_blocks=2) as it:
        store.acks = False
        for number in range(3):
            await (await begin(it, spec("a", prompt(2 * BLOCK, number), max_tokens=1), write_back=place)).to_the_end()
        assert it.service.write_back.blocks_held == 2
        assert it.service.write_back.blocks_dropped == 4
        store.break_now.set()
        await it.rest()
        assert it.service.write_back.blocks_dropped == 6


async def test_many_at_once() -> None:
    prompts = [prompt(9 + 11 * i, i) for i in range(6)]
    async with prefilling(stages=2) as it:
        stories = [await begin(it, spec("same id", tokens, max_tokens=1)) for tokens in prompts]
        firsts = [await story.to_the_end() for story in stories]
        assert [first.token_id for first in firsts] == [next_token(tokens) for tokens in prompts]


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_cancel_while_waiting() -> None:
    """The pool is full: the second waits without blocks, leaves, and nobody notices."""
    async with prefilling(blocks=4) as it:
        reached, go = hold(it)
        first = await begin(it, spec("a", prompt(4 * BLOCK), max_tokens=1))
        await reached.wait()
        second = await begin(it, spec("b", prompt(2 * BLOCK, 1), max_tokens=1))
        assert it.service.scheduler.num_waiting == 1
        second.call.cancel()
        await it.until(lambda: it.service.runner.jobs == 1)
        go.set()
        await first.to_the_end()


async def test_cancel_in_a_step() -> None:
    """Blocks stay used until the step that writes to them is over."""
    tokens = prompt(4 * BLOCK)
    async with prefilling() as it, decoding() as decode:
        reached, go = hold(it, layer=1)
        sequence = spec("a", tokens)
        story = await begin(it, sequence, target=await promised(decode, sequence))
        await reached.wait()
        await decode.until(lambda: any(request.block_table for request in decode.service.requests))
        story.call.cancel()
        await it.until(lambda: it.service.runner.jobs == 0)
        assert it.service.manager.num_used == 4
        assert it.service.senders.sessions == 0
        go.set()
        await it.rest()
        assert len(it.engine.steps) == 1
        await decode.rest()


async def test_cancel_while_loading() -> None:
    """The gated step waits for a layer that will never come: it is aborted, and everything comes back."""
    tokens = prompt(4 * BLOCK + 3)
    frame = 4 * LAYOUT.slice_bytes
    async with storing(tokens, frame_bytes=frame) as (store, place), prefilling() as it, decoding() as decode:
        reached, go = hold(it)
        go.set()
        store._read = _first_layer_only(store)  # type: ignore[method-assign]
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        story = await begin(it, sequence, target=target, source=source(place, 4))
        await reached.wait()
        await decode.until(lambda: any(request.block_table for request in decode.service.requests))
        assert it.engine.steps[0].gated
        story.call.cancel()
        await it.rest()
        assert it.engine.aborts == [1]
        await decode.rest()


def _first_layer_only(store: FakeStore) -> Any:
    whole = store._read

    async def read(opening: kv_pb2.ReadOpen, writer: Any, outbox: Any) -> None:
        send = writer.send

        async def first_only(session: int, generation: int, slices: list[Any], *, timeout_s: float) -> int:
            if slices[0].layer > 0:
                await asyncio.Event().wait()
            sent: int = await send(session, generation, slices, timeout_s=timeout_s)
            return sent

        writer.send = first_only
        await whole(opening, writer, outbox)

    return read


async def test_cancel_while_sending() -> None:
    """The prompt is computed, its KV still leaves: decode is told, and both sides are at rest."""
    tokens = prompt(4 * BLOCK)
    async with prefilling(rate=LAYOUT.slice_bytes * 4.0) as it, decoding() as decode:
        sequence = spec("a", tokens)
        story = await begin(it, sequence, target=await promised(decode, sequence))
        await story.told()
        await decode.until(lambda: any(request.block_table for request in decode.service.requests))
        assert it.service.manager.num_used == 4
        story.call.cancel()
        await it.rest()
        await decode.rest()


async def test_cancel_by_id() -> None:
    async with prefilling() as it:
        reached, go = hold(it)
        story = await begin(it, spec("a", prompt(BLOCK), max_tokens=1))
        await reached.wait()
        for name, outcome in (("b", kv_pb2.CANCEL_OUTCOME_UNKNOWN), ("a", kv_pb2.CANCEL_OUTCOME_IN_FLIGHT)):
            answer = await it.stub.Cancel(prefill_pb2.CancelRequest(request_id=name))
            assert answer.outcome == outcome
        with pytest.raises(Unavailable, match="cancelled"):
            await story.read()
        go.set()
        await it.rest()


# --- others fail ------------------------------------------------------------------------------------------------------


async def test_decode_refuses_the_transfer() -> None:
    """The promise is over: the prefill fails, so that the conductor can place the request anew."""
    tokens = prompt(4 * BLOCK)
    async with prefilling() as it, decoding() as decode:
        sequence = spec("a", tokens)
        target = await promised(decode, sequence)
        dismiss(decode)
        story = await begin(it, sequence, target=target)
        with pytest.raises(TransferFailed, match="no such transfer"):
            await story.to_the_end()
        target.decode.incarnation += 1
        story = await begin(it, sequence, target=target)
        with pytest.raises(TransferFailed, match="incarnation"):
            await story.to_the_end()


async def test_decode_gives_up_midway() -> None:
    tokens = prompt(2 * BLOCK)
    async with prefilling() as it, decoding() as decode:
        reached, go = hold(it, layer=1)
        sequence = spec("a", tokens)
        story = await begin(it, sequence, target=await promised(decode, sequence))
        await reached.wait()
        await decode.until(lambda: any(request.block_table for request in decode.service.requests))
        dismiss(decode)
        go.set()
        with pytest.raises((TransferFailed, StreamBroken), match="not wanted"):
            await story.to_the_end()


async def test_decode_gone() -> None:
    sequence = spec("a", prompt(2 * BLOCK))
    async with prefilling() as it:
        nobody = kv_pb2.Instance(id="decode-9", incarnation=3, address="127.0.0.1:1")
        target = kv_pb2.TransferTarget(decode=nobody, transfer_id=1, generation=1)
        with pytest.raises(MoonpoolError):
            await (await begin(it, sequence, target=target)).to_the_end()
        async with decoding() as decode:
            target = await promised(decode, sequence)
            await (await begin(it, sequence, target=target)).to_the_end()
            dismiss(decode)


async def test_decode_stops_in_the_middle() -> None:
    """Its streams end: the transfer fails, and the next decode instance under that name is served."""
    sequence = spec("a", prompt(2 * BLOCK))
    async with prefilling() as it:
        reached, go = hold(it, layer=1)
        async with decoding() as decode:
            story = await begin(it, sequence, target=await promised(decode, sequence))
            await reached.wait()
            await decode.until(lambda: any(request.block_table for request in decode.service.requests))
            dismiss(decode)
        go.set()
        with pytest.raises((TransferFailed, StreamBroken)):
            await story.to_the_end()
        it.engine.before_layer = None
        async with decoding(incarnation=12) as decode:
            await (await begin(it, sequence, target=await promised(decode, sequence))).to_the_end()
            dismiss(decode)


async def test_engine_dies() -> None:
    """All requests fail, the work ends with the reason, nothing more is taken."""
    async with prefilling() as it:
        reached, _ = hold(it)
        stories = [await begin(it, spec(f"r{n}", prompt(BLOCK, n), max_tokens=1)) for n in range(2)]
        await reached.wait()
        it.engine.fail("out of memory")
        for story in stories:
            with pytest.raises(Unavailable, match="out of memory"):
                await story.to_the_end()
        await it.until(lambda: it.death is not None)
        with pytest.raises(Unavailable, match="out of memory"):
            await begin(it, spec("late", prompt(BLOCK), max_tokens=1))
        it.service.scheduler.step_done(1, aborted=True)  # a dead engine is quiet


# --- the door ---------------------------------------------------------------------------------------------------------


async def test_refuses_what_is_wrong() -> None:
    async with prefilling(blocks=4) as it:
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
        ]
        for field, change in cases:
            wrong = kv_pb2.SequenceSpec()
            wrong.CopyFrom(good)
            for name, value in change.items():
                wrong.ClearField(name)  # type: ignore[arg-type]
                wrong.MergeFrom(kv_pb2.SequenceSpec(**{name: value}))
            with pytest.raises(InvalidRequest) as refused:
                await begin(it, wrong)
            assert refused.value.field == field
        with pytest.raises(InvalidRequest):
            await begin(it, spec("long", prompt(4 * BLOCK + 1)))


async def test_queue_is_bounded_and_drains() -> None:
    async with prefilling(max_queue=1) as it:
        reached, go = hold(it)
        story = await begin(it, spec("a", prompt(BLOCK), max_tokens=1))
        await reached.wait()
        with pytest.raises(Overloaded) as refused:
            await begin(it, spec("b", prompt(BLOCK), max_tokens=1))
        assert refused.value.reason == "queue_full"
        load = it.service.load()
        assert (load.running, load.waiting, load.queued_tokens) == (1, 0, BLOCK)
        it.service.drain()
        assert it.service.load().draining
        with pytest.raises(Unavailable, match="draining"):
            await begin(it, spec("b", prompt(BLOCK), max_tokens=1))
        drained = asyncio.ensure_future(it.service.drained())
        go.set()
        await story.to_the_end()
        await asyncio.wait_for(drained, WAIT_S)
