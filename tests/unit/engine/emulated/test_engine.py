"""The emulated engine: exact times, gates, aborts and stages like the real one's."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from moonpool.base.errors import Internal, InvalidRequest, Unavailable
from moonpool.base.scheduling.steps import LayerDone, Step
from moonpool.engine.emulated.engine import EmulatedEngine
from moonpool.engine.emulated.kv import EmulatedKV, continuation
from moonpool.engine.interface import Engine
from moonpool.engine.setup import EngineSetup
from moonpool.engine.start_engine import start_engine
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.unit.engine.emulated.rig import (
    BT,
    LAYERS,
    PROFILE,
    PROMPT,
    ROOT,
    SPEEDS,
    VOCAB,
    Clock,
    engine_of,
    fill,
    history,
    part,
    spec_of,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_is_an_engine() -> None:
    async with start_engine(spec_of()) as engine:
        assert isinstance(engine, Engine)
        assert isinstance(engine, EmulatedEngine)
        assert (engine.blocks, engine.stages, engine.layout.token_bytes) == (16, 1, LAYERS * 16)
        assert engine.speeds == SPEEDS


async def test_steps_take_the_profiles_time_layer_by_layer(clock: Clock) -> None:
    async with engine_of(spec_of(), clock) as engine:
        seen: list[tuple[int, float]] = []
        of = history(PROMPT)
        step = Step(1, (part(of, 0, 40, (3, 5, 7), sample=True),), layer_events=True)
        run = asyncio.ensure_future(engine.run(step, on_layer=lambda done: seen.append((done.layer, clock.now))))
        result = await clock.run(run)
        # 1 s + 40 tokens x 0.25 s = 11 s over 4 layers.
        assert seen == [(0, 102.75), (1, 105.5), (2, 108.25), (3, 111.0)]
        assert result.sampled == tuple(continuation(PROMPT, 1, VOCAB, {1}))
        assert (engine.step_s, engine.late_s, engine.slices_checked) == (11.0, 0.0, 0)


async def test_decode_takes_the_time_of_batch_and_context(clock: Clock) -> None:
    async with engine_of(spec_of(decode=True, scale=2.0), clock) as engine:
        early, two = history([3] * 7), history([4] * 11)
        await fill(engine, clock, [(early, (1,)), (two, (2,))])
        began = clock.now
        step = Step(9, (part(early, 6, 7, (1,), sample=True), part(two, 10, 11, (2,), sample=True)))
        result = await clock.run(asyncio.ensure_future(engine.run(step)))
        assert clock.now - began == (2.0 + 2 * 0.5 + 18 * 0.125) / 2.0
        assert list(result.sampled) == continuation([3] * 7, 1, VOCAB, {1}) + continuation([4] * 11, 1, VOCAB, {1})


async def test_a_copied_block_takes_time_and_holds_the_kv(clock: Clock) -> None:
    """A sequence that shares six tokens with another goes on in a copy of the block; an empty block would fail."""
    async with engine_of(spec_of(decode=True), clock) as engine:
        early, two = history([3] * 7), history([*[3] * 6, 5])
        await fill(engine, clock, [(early, (1,))])
        began = clock.now
        step = Step(9, (part(two, 6, 7, (2,), sample=True),), copies=((1, 2),))
        result = await clock.run(asyncio.ensure_future(engine.run(step)))
        assert clock.now - began == 2.0 + 0.5 + 7 * 0.125 + 2 * BT * 0.125
        assert list(result.sampled) == continuation([*[3] * 6, 5], 1, VOCAB, {1})


async def test_lateness_is_made_up_for_or_counted(clock: Clock) -> None:
    clock.late_s = 0.003
    async with engine_of(spec_of(), clock) as engine:
        ends = []
        for number in range(4):
            clock.late_s = 1.0 if number == 3 else 0.003
            step = Step(number, (part(history([5]), 0, 1, (0,)),))
            await clock.run(asyncio.ensure_future(engine.run(step)))
            ends.append(round(clock.now, 6))
            assert engine.late_s == pytest.approx(0.995 if number == 3 else 0.0)
        assert ends == [101.253, 102.503, 103.753, 106.0]  # 1.25 s each, however late the timers are


async def test_a_prompt_pays_once_for_itself_and_for_its_cached_tokens(clock: Clock) -> None:
    """Two prompts in chunks: the first chunk of each takes 8 s more, and 0.5 s for each cached token.

    Each chunk takes 0.25 s for each token before it.
    """
    speeds = replace(SPEEDS, prefill_per_prompt_s=8.0, prefill_per_cached_token_s=0.5, prefill_per_context_token_s=0.25)
    async with engine_of(spec_of(profile=replace(PROFILE, speeds=speeds)), clock) as engine:
        early, two = history(PROMPT), history(PROMPT)
        seconds = []
        for number, (of, start, end) in enumerate([(early, 0, 16), (early, 16, 40), (two, 32, 36), (two, 36, 40)]):
            began = clock.now
            step = Step(number, (part(of, start, end, (0, 1, 2)),))
            await clock.run(asyncio.ensure_future(engine.run(step)))
            seconds.append(clock.now - began)
        assert seconds == [1 + 4 + 8, 1 + 6 + 4, 1 + 1 + 8 + 16 + 8, 1 + 1 + 9]


async def test_an_aborted_prompt_begins_again(clock: Clock) -> None:
    speeds = replace(SPEEDS, prefill_per_prompt_s=8.0)
    async with engine_of(spec_of(profile=replace(PROFILE, speeds=speeds)), clock) as engine:
        of = history(PROMPT)
        engine.abort(1)
        await engine.run(Step(1, (part(of, 0, 16, (0,)),)))
        began = clock.now
        await clock.run(asyncio.ensure_future(engine.run(Step(2, (part(of, 0, 16, (0,)),)))))
        assert clock.now - began == 1 + 4 + 8


async def test_gates(clock: Clock) -> None:
    """A layer begins when its gate opens."""
    async with engine_of(spec_of(), clock) as engine:
        of = history(PROMPT)
        await clock.run(asyncio.ensure_future(engine.run(Step(1, (part(of, 0, 32, (0, 1)),)))))
        began = clock.now
        # 3 s of computing, 0.75 per layer.
        seen: list[tuple[int, float]] = []
        chunk = part(of, 32, 40, (0, 1, 2))
        run = asyncio.ensure_future(
            engine.run(
                Step(2, (chunk,), gated=True, layer_events=True), on_layer=lambda d: seen.append((d.layer, clock.now))
            )
        )
        await clock.settle()
        assert not seen
        engine.open_gate(2, 1)
        engine.open_gate(2, 0)  # late and lower: without effect
        await clock.settle()
        while len(seen) < 2:
            await clock.next()
        clock.now = began + 50.0
        engine.open_gate(2, 3)
        await clock.run(run)
        assert [(layer, now - began) for layer, now in seen] == [(0, 0.75), (1, 1.5), (2, 50.75), (3, 51.5)]
        assert engine.load_s(32 * 64) == 64.0
        engine.open_gate(2, 3)  # after the end: ignored
        engine.drop(2, 0)
        assert engine.steps_held == 0


async def test_aborts() -> None:
    async with engine_of(spec_of(scale=1e6, gate_timeout_s=0.01)) as engine:
        of = history(PROMPT)
        engine.abort(1)
        assert (await engine.run(Step(1, (part(of, 0, 16, (0,), sample=True),)))).aborted
        assert sum(engine.pool.slice(0, 0)) == 0

        run = asyncio.ensure_future(engine.run(Step(2, (part(of, 0, 16, (0,)),), gated=True)))
        engine.open_gate(2, 0)
        result = await run  # nobody opens the second layer's gate
        assert (result.aborted, result.sampled) == (True, ())
        assert sum(engine.pool.slice(0, 0)) > 0
        assert sum(engine.pool.slice(1, 0)) == 0
        # The same blocks, computed anew after the abort.
        assert not (await engine.run(Step(3, (part(of, 0, 16, (0,)),)))).aborted
        await engine.run(Step(4, (part(of, 16, 40, (0, 1, 2)),)))
        engine.abort(4)
        assert engine.steps_held == 0


async def test_stages_are_a_pipeline(clock: Clock) -> None:
    """Three steps of 1.5 s in two stages end after 1.5, 2.25 and 3 s, in order, an aborted one too."""
    async with engine_of(spec_of(stages=2), clock) as engine:
        of, other = history([5, 5]), history([6, 6])
        first = asyncio.ensure_future(engine.run(Step(1, (part(of, 0, 2, (0,)),))))
        second = asyncio.ensure_future(engine.run(Step(2, (part(other, 0, 2, (1,)),))))
        third = asyncio.ensure_future(engine.run(Step(3, (part(of, 0, 2, (0,)),))))
        await clock.settle()
        with pytest.raises(Internal, match="one more than the 3"):
            await engine.run(Step(4, (part(of, 0, 2, (0,)),)))
        await clock.run(first)
        assert (clock.now, second.done()) == (101.5, False)
        await clock.run(second)
        assert clock.now == 102.25
        await clock.run(third)
        assert clock.now == 103.0

        slow = asyncio.ensure_future(engine.run(Step(4, (part(of, 0, 2, (0,)),))))
        engine.abort(5)
        gone = asyncio.ensure_future(engine.run(Step(5, (part(other, 0, 2, (1,)),))))
        gone.add_done_callback(lambda _: order.append("second"))
        slow.add_done_callback(lambda _: order.append("first"))
        order: list[str] = []
        await clock.run(gone)
        assert order == ["first", "second"]
        assert gone.result().aborted


async def test_misuse_and_the_end() -> None:
    async with engine_of() as engine:
        await engine.run(Step(3, (part(history(PROMPT), 0, 16, (0,)),)))
        with pytest.raises(Internal, match="step 3 after step 3"):
            await engine.run(Step(3, (part(history(PROMPT), 0, 16, (0,)),)))

        def broken(done: LayerDone) -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await engine.run(Step(4, (part(history(PROMPT), 0, 16, (0,)),), layer_events=True), on_layer=broken)
        run = asyncio.ensure_future(engine.run(Step(5, (part(history(PROMPT), 0, 16, (0,)),), gated=True)))
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="shut down"):
        await run


async def test_a_cancelled_caller_does_not_stop_the_step(clock: Clock) -> None:
    async with engine_of(spec_of(), clock) as engine:
        run = asyncio.ensure_future(engine.run(Step(1, (part(history(PROMPT), 0, 16, (0,)),))))
        await clock.settle()
        run.cancel()
        await clock.settle()
        assert run.cancelled()
        with pytest.raises(Internal):
            await engine.run(Step(2, (part(history(PROMPT), 0, 16, (0,)),)))
        await clock.next()
        assert bytes(engine.pool.slice(3, 0)) == slices_of(PROMPT[:16])(3)


def slices_of(tokens: list[int]) -> Callable[[int], bytes]:
    """What the first block of a sequence holds."""

    def at(layer: int) -> bytes:
        kv = EmulatedKV(PROFILE.layout(BT))
        view = memoryview(bytearray(kv.layout.slice_bytes(0)))
        kv.write(view, layer, kv.base(ROOT, array("i", tokens)))
        return bytes(view)

    return at


async def test_a_dropped_share_is_neither_checked_nor_written(clock: Clock) -> None:
    """Its prefix is not in the pool, which fails the engine otherwise."""
    async with engine_of(spec_of(), clock) as engine:
        late, other = history(PROMPT), history([5] * 16)
        step = Step(1, (part(late, 32, 40, (0, 1, 2)), part(other, 0, 16, (4,), sample=True)), gated=True)
        run = asyncio.ensure_future(engine.run(step))
        engine.open_gate(1, -1)
        engine.drop(1, 0)
        engine.open_gate(1, LAYERS - 1)
        result = await clock.run(run)
        assert result.sampled[1] == continuation([5] * 16, 1, VOCAB, {1})[0]
        assert not engine.failed.done()
        assert not any(engine.pool.slice(0, 2))
        assert engine.steps_held == 0


def test_beams_are_refused() -> None:
    setup = EngineSetup(spec_of(), conductor_pb2.ModelInfo(), VOCAB, 512)
    with pytest.raises(InvalidRequest, match=r"sequence\.sampling\.beam_width"):
        setup.incoming(kv_pb2.SequenceSpec(sampling=kv_pb2.Sampling(beam_width=2)))
