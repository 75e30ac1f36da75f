"""The emulated engine: exact times, exact bytes, gates and aborts like the real one's, and wrong KV that is noticed."""

import asyncio
import heapq
import pickle
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from moonpool.cost import Speeds
from moonpool.engine.emulated import engine as paced
from moonpool.engine.emulated.content import PacedKV, continuation
from moonpool.engine.emulated.engine import PacedEngine, start_paced
from moonpool.engine.emulated.profile import Emulation, Profile
from moonpool.engine.handle import Engine, StepResult
from moonpool.engine.messages import EngineSpec, LayerDone
from moonpool.engine.start import start_engine
from moonpool.errors import Internal, Unavailable
from moonpool.kv.keys import BlockKey, block_keys, chain_root, tokens_to_bytes
from moonpool.sampling import SampleSpec
from moonpool.sched.steps import History, SequenceStep, Step

BT = 16
LAYERS = 4
VOCAB = 1000
ROOT = BlockKey(chain_root(bytes(32), ""))
PROMPT = [(7 * i + i * i) % 900 + 5 for i in range(40)]
SPEEDS = Speeds(
    prefill_base_s=1.0,
    prefill_per_token_s=0.25,
    decode_base_s=2.0,
    decode_per_sequence_s=0.5,
    decode_per_context_token_s=0.125,
    load_bytes_per_s=2 * 16.0,
)
PROFILE = Profile("test", "none", SPEEDS, token_bytes=LAYERS * 16, max_tokens=4096, layers=LAYERS)


class Clock:
    """Time that passes only while everybody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, future))
        await future

    async def settle(self) -> None:
        """Lets everybody work who can without time passing."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def run(self, work: "asyncio.Future[StepResult]") -> StepResult:
        """Passes time until `work` is done."""
        await self.settle()
        while not work.done():
            await self.next()
        return work.result()

    async def next(self) -> None:
        """Passes time until the next sleeper wakes."""
        assert self._sleepers, "nobody sleeps and nothing is done"
        self.now, _, future = heapq.heappop(self._sleepers)
        if not future.done():
            future.set_result(None)
        await self.settle()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(paced, "_now", clock.time)
    monkeypatch.setattr(paced, "_sleep", clock.sleep)
    return clock


def spec_of(*, decode: bool = False, stages: int = 1, scale: float = 1.0, gate_timeout_s: float = 30.0) -> EngineSpec:
    return EngineSpec(
        checkpoint="",
        dtype="float16",
        layout=PROFILE.layout(BT),
        blocks=16,
        stages=stages,
        gate_timeout_s=gate_timeout_s,
        emulation=Emulation(PROFILE, scale, decode, VOCAB, frozenset({1})),
    )


@asynccontextmanager
async def engine_of(spec: EngineSpec | None = None) -> AsyncIterator[PacedEngine]:
    spec = spec or spec_of(scale=1e6)
    assert spec.emulation is not None
    async with start_paced(spec, spec.emulation) as engine:
        assert isinstance(engine, PacedEngine)
        yield engine


def history(tokens: list[int], root: BlockKey = ROOT) -> History:
    ids = array("i", tokens)
    return History(root, ids, block_keys(root, ids, BT))


def part(of: History, start: int, end: int, table: tuple[int, ...], *, sample: bool = False) -> SequenceStep:
    return SequenceStep(
        tokens_to_bytes(of.token_ids[start:end]), start, table, SampleSpec() if sample else None, history=of
    )


def slices(engine: Engine, table: tuple[int, ...]) -> list[bytes]:
    return [bytes(engine.pool.slice(layer, block)) for layer in range(LAYERS) for block in table]


async def test_is_an_engine() -> None:
    async with start_engine(spec_of()) as engine:
        assert isinstance(engine, Engine)
        assert isinstance(engine, PacedEngine)
        assert (engine.blocks, engine.stages, engine.layout.token_bytes) == (16, 1, LAYERS * 16)
        assert engine.speeds == SPEEDS


def test_content_is_what_it_was() -> None:
    """Stored emulated KV outlives a release; these bytes may change with the namespace only."""
    kv = PacedKV(PROFILE.layout(BT))
    base = kv.base(bytes(32), array("i", [1, 2]))
    # The blake3 hash of 32 zero bytes is 2ada83c1819a5372 dae1238fc1ded123 ...
    assert base.hex() == "2bda83c1819a5372d8e1238fc1ded123"
    view = memoryview(bytearray(kv.layout.slice_bytes))
    kv.write(view, 1, base, first_slot=3)
    assert bytes(view[24:40]).hex() == bytes((x * 5 + 146) % 256 for x in base).hex()
    assert bytes(view[128 + 24 : 128 + 40]) == bytes((x * 7 + 219) % 256 for x in base)
    assert kv.wrong_slot(view, 1, base, 3) is None
    assert kv.wrong_slot(view, 2, base, 3) == 3
    view[128 + 39] ^= 1
    assert kv.wrong_slot(view, 1, base, 3) == 4
    assert sum(view[40:128]) == 0


def test_answer_depends_on_the_whole_history_alone() -> None:
    assert continuation(range(10), 5, VOCAB, {1}) == [320, 938, 234, 751, 462]  # tests elsewhere rely on it
    answer = continuation(PROMPT, 8, VOCAB, {1})
    assert answer == [*answer[:3], *continuation([*PROMPT, *answer[:3]], 5, VOCAB, {1})]
    assert answer != continuation([PROMPT[0] + 1, *PROMPT[1:]], 8, VOCAB, {1})
    assert set(continuation(PROMPT, 200, 3, {1})) == {0, 2}
    assert continuation(PROMPT, 8, VOCAB, seed=5) != answer


async def test_steps_take_the_profiles_time_layer_by_layer(clock: Clock) -> None:
    async with engine_of(spec_of()) as engine:
        seen: list[tuple[int, float]] = []
        of = history(PROMPT)
        step = Step(1, (part(of, 0, 40, (3, 5, 7), sample=True),), layer_events=True)
        run = asyncio.ensure_future(engine.run(step, on_layer=lambda done: seen.append((done.layer, clock.now))))
        result = await clock.run(run)
        # 1 s + 40 tokens x 0.25 s = 11 s over 4 layers.
        assert seen == [(0, 102.75), (1, 105.5), (2, 108.25), (3, 111.0)]
        assert result.sampled == tuple(continuation(PROMPT, 1, VOCAB, {1}))
        gauges = {name: read() for name, read, _ in engine.gauges()}
        assert gauges == {"emulated_step_seconds": 11.0, "emulated_late_seconds": 0.0, "emulated_slices_checked": 0}


async def test_decode_takes_the_time_of_batch_and_context(clock: Clock) -> None:
    async with engine_of(spec_of(decode=True, scale=2.0)) as engine:
        one, two = history([3] * 7), history([4] * 11)
        await fill(engine, clock, [(one, (1,)), (two, (2,))])
        began = clock.now
        step = Step(9, (part(one, 6, 7, (1,), sample=True), part(two, 10, 11, (2,), sample=True)))
        result = await clock.run(asyncio.ensure_future(engine.run(step)))
        assert clock.now - began == (2.0 + 2 * 0.5 + 18 * 0.125) / 2.0
        assert list(result.sampled) == continuation([3] * 7, 1, VOCAB, {1}) + continuation([4] * 11, 1, VOCAB, {1})


async def fill(engine: PacedEngine, clock: Clock, what: list[tuple[History, tuple[int, ...]]]) -> None:
    """Puts all but the last token of sequences into the pool."""
    for number, (of, table) in enumerate(what):
        step = Step(number, (part(of, 0, len(of.token_ids) - 1, table),))
        await clock.run(asyncio.ensure_future(engine.run(step)))


async def test_lateness_is_made_up_for_or_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    late = 0.003

    async def sleep(seconds: float) -> None:
        clock.now += seconds + late

    monkeypatch.setattr(paced, "_sleep", sleep)
    async with engine_of(spec_of()) as engine:
        ends = []
        for number in range(3):
            await engine.run(Step(number, (part(history([5]), 0, 1, (0,)),)))
            ends.append(round(clock.now, 6))
        assert ends == [101.253, 102.503, 103.753]  # 1.25 s each, however late the timers are
        assert engine.late_s == 0.0
        late = 1.0
        await engine.run(Step(3, (part(history([5]), 0, 1, (0,)),)))
        assert engine.late_s == pytest.approx(0.995)


async def test_chunks_and_batches_make_no_difference() -> None:
    async with engine_of() as engine:
        whole, parts = history(PROMPT), history(PROMPT)
        await engine.run(Step(1, (part(whole, 0, 40, (0, 1, 2), sample=True),)))
        await engine.run(Step(2, (part(history([8] * 20), 0, 20, (9, 10)), part(parts, 0, 16, (3,)))))
        last = await engine.run(Step(3, (part(parts, 16, 40, (3, 4, 5), sample=True),)))
        for layer in range(LAYERS):
            for a, b, slots in ((0, 3, 16), (1, 4, 16), (2, 5, 8)):
                for plane in range(2):
                    span = slice(plane * 128, plane * 128 + slots * 8)
                    assert engine.pool.slice(layer, a)[span] == engine.pool.slice(layer, b)[span]
        assert last.sampled == tuple(continuation(PROMPT, 1, VOCAB, {1}))


async def test_decode_goes_on_from_bytes_that_came_from_elsewhere() -> None:
    answer = continuation(PROMPT, 30, VOCAB, {1})
    async with engine_of() as prefill, engine_of(spec_of(decode=True, scale=1e6)) as decode:
        await prefill.run(Step(1, (part(history(PROMPT), 0, 40, (0, 1, 2)),)))
        for layer in range(LAYERS):
            for a, b in ((0, 8), (1, 6), (2, 4)):
                decode.pool.slice(layer, b)[:] = prefill.pool.slice(layer, a)
        of, table = history(PROMPT), (8, 6, 4, 2, 0)
        for number in range(29):
            of.token_ids.append(answer[number])
            end = len(of.token_ids)
            step = Step(number, (part(of, end - 1, end, table[: -(-end // BT)], sample=True),))
            assert (await decode.run(step)).sampled == (answer[number + 1],)
        # What decode has filled is what a prefill of prompt and answer would have made.
        await prefill.run(Step(2, (part(history([*PROMPT, *answer[:24]]), 0, 64, (5, 6, 7, 9)),)))
        assert slices(prefill, (7, 9)) == slices(decode, (4, 2))


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("byte", [0, 8 * 15, 128, 255])
async def test_a_wrong_byte_in_the_prefix_fails_the_engine(layer: int, byte: int) -> None:
    async with engine_of() as engine:
        await engine.run(Step(1, (part(history(PROMPT), 0, 32, (0, 1)),)))
        engine.pool.slice(layer, 1)[byte] ^= 4
        with pytest.raises(Unavailable, match=rf"wrong KV in step 2.*block 1 of the pool.*layer {layer}, slot"):
            await engine.run(Step(2, (part(history(PROMPT), 32, 40, (0, 1, 2)),)))
        assert "wrong KV" in engine.failed.result()
        with pytest.raises(Unavailable, match="wrong KV"):
            await engine.run(Step(3, (part(history(PROMPT), 0, 1, (0,)),)))


async def test_kv_of_others_is_wrong() -> None:
    """Of another tenant, of another history, and of another block of the same sequence."""
    wrong = [
        (history(PROMPT, BlockKey(chain_root(bytes(32), "other"))), (0, 1, 2)),
        (history([6, *PROMPT[1:]]), (0, 1, 2)),
        (history(PROMPT), (1, 0, 2)),
    ]
    for of, table in wrong:
        async with engine_of() as engine:
            await engine.run(Step(1, (part(history(PROMPT), 0, 32, (0, 1)),)))
            with pytest.raises(Unavailable, match="does not hold its tokens' KV"):
                await engine.run(Step(2, (part(of, 32, 40, table),)))


async def test_a_block_overwritten_under_a_running_sequence_is_noticed() -> None:
    async with engine_of(spec_of(decode=True, scale=1e6)) as engine:
        of = history(PROMPT)
        await engine.run(Step(0, (part(of, 0, 40, (0, 1, 2)),)))
        engine.pool.slice(2, 1)[:] = bytes(256)
        found = []
        for number in range(1, 2 * LAYERS + 1):  # every slice of the two full blocks has its turn
            of.token_ids.append(9)
            end = len(of.token_ids)
            step = Step(number, (part(of, end - 1, end, (0, 1, 2, 3)[: -(-end // BT)]),))
            found.append(await asyncio.gather(engine.run(step), return_exceptions=True))
        results = [result for (result,) in found]
        assert [isinstance(result, Unavailable) for result in results] == [False] * 5 + [True] * 3
        assert "block 1 of the pool" in engine.failed.result()


async def test_contradictions_are_noticed() -> None:
    other = history(PROMPT)
    other.keys = [*other.keys[:1], BlockKey(bytes(32))]
    cases: list[tuple[SequenceStep, str]] = [
        (replace(part(history(PROMPT), 0, 16, (0,)), history=None), "does not say"),
        (replace(part(history(PROMPT), 0, 16, (0,)), token_ids=bytes(64)), "are not those"),
        (part(other, 32, 40, (0, 1, 2)), "has a key that is not its tokens'"),
    ]
    for step, message in cases:
        async with engine_of() as engine:
            with pytest.raises(Unavailable, match=message):
                await engine.run(Step(1, (step,)))


async def test_gates(clock: Clock) -> None:
    """A layer begins when its gate opens, and not before its share of the prefix could have been loaded."""
    async with engine_of(spec_of()) as engine:
        of = history(PROMPT)
        await clock.run(asyncio.ensure_future(engine.run(Step(1, (part(of, 0, 32, (0, 1)),)))))
        began = clock.now
        # 32 tokens x 64 bytes / 32 bytes per second = 64 s of loading, 16 per layer; computing: 3 s, 0.75 per layer.
        seen: list[tuple[int, float]] = []
        chunk = replace(part(of, 32, 40, (0, 1, 2)), loading_tokens=32)
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
        assert [(layer, now - began) for layer, now in seen] == [(0, 16.75), (1, 32.75), (2, 50.75), (3, 64.75)]
        engine.open_gate(2, 3)  # after the end: ignored
        assert not engine._flights


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
        assert not engine._flights


async def test_after_an_abort_nothing_is_taken_for_granted() -> None:
    async with engine_of() as engine:
        of = history(PROMPT)
        await engine.run(Step(1, (part(of, 0, 16, (0,)),)))
        engine.abort(2)
        await engine.run(Step(2, (part(of, 16, 32, (0, 1)),)))
        engine.pool.slice(3, 0)[0] ^= 1
        with pytest.raises(Unavailable, match="block 0 of the pool"):
            await engine.run(Step(3, (part(of, 16, 32, (0, 1)),)))


async def test_stages_are_a_pipeline(clock: Clock) -> None:
    """Two steps of 1.5 s in two stages end after 1.5 and 2.25 s, in order, an aborted one too."""
    async with engine_of(spec_of(stages=2)) as engine:
        of, other = history([5, 5]), history([6, 6])
        first = asyncio.ensure_future(engine.run(Step(1, (part(of, 0, 2, (0,)),))))
        second = asyncio.ensure_future(engine.run(Step(2, (part(other, 0, 2, (1,)),))))
        await clock.settle()
        with pytest.raises(Internal, match="one more than the 2"):
            await engine.run(Step(3, (part(of, 0, 2, (0,)),)))
        await clock.run(first)
        assert (clock.now, second.done()) == (101.5, False)
        await clock.run(second)
        assert clock.now == 102.25

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
    async with engine_of(spec_of()) as engine:
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
        kv = PacedKV(PROFILE.layout(BT))
        view = memoryview(bytearray(kv.layout.slice_bytes))
        kv.write(view, layer, kv.base(ROOT, array("i", tokens)))
        return bytes(view)

    return at


def test_history_stays_in_its_process() -> None:
    step = Step(1, (part(history(PROMPT), 0, 16, (0,)),))
    assert pickle.loads(pickle.dumps(step)) == step
    assert pickle.loads(pickle.dumps(step)).sequences[0].history is None
