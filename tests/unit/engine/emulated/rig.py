"""What tests of the emulated engine share: a clock of their own, sequences, and engines over small pools."""

import asyncio
import heapq
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moonpool.base.kv.keys import BlockKey, block_keys, chain_root, tokens_to_bytes
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import SequenceStep, Step, StepResult, TokenHistory
from moonpool.engine.emulated.engine import MONOTONIC, EmulatedEngine, EngineClock, start_emulated
from moonpool.engine.emulated.profile import EmulatedCompute, Profile
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec

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
    """Time that passes only while all tasks sleep; `source` is what the engine is given."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self.late_s = 0.0
        self.source = EngineClock(self.time, self.sleep)

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now + seconds + self.late_s, self._count, future))
        await future

    async def settle(self) -> None:
        """Lets all tasks work that can without time passing."""
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
        assert self._sleepers, "no task sleeps, and the work is not done"
        self.now, _, future = heapq.heappop(self._sleepers)
        if not future.done():
            future.set_result(None)
        await self.settle()


def spec_of(
    *,
    decode: bool = False,
    stages: int = 1,
    scale: float = 1.0,
    gate_timeout_s: float = 30.0,
    profile: Profile = PROFILE,
) -> EngineSpec:
    return EngineSpec(
        checkpoint="",
        dtype="float16",
        layout=PROFILE.layout(BT),
        blocks=16,
        stages=stages,
        gate_timeout_s=gate_timeout_s,
        emulated=EmulatedCompute(profile, scale, decode, VOCAB, frozenset({1})),
    )


@asynccontextmanager
async def engine_of(spec: EngineSpec | None = None, clock: Clock | None = None) -> AsyncIterator[EmulatedEngine]:
    spec = spec or spec_of(scale=1e6)
    assert spec.emulated is not None
    async with start_emulated(
        spec.emulated,
        spec.layout,
        spec.blocks,
        stages=spec.stages,
        gate_timeout_s=spec.gate_timeout_s,
        clock=clock.source if clock else MONOTONIC,
    ) as engine:
        yield engine


def history(tokens: list[int], root: BlockKey = ROOT) -> TokenHistory:
    ids = array("i", tokens)
    return TokenHistory(root, ids, block_keys(root, ids, BT))


def part(of: TokenHistory, start: int, end: int, table: tuple[int, ...], *, sample: bool = False) -> SequenceStep:
    return SequenceStep(
        tokens_to_bytes(of.token_ids[start:end]), start, table, SampleSpec() if sample else None, history=of
    )


def slices(engine: Engine, table: tuple[int, ...]) -> list[bytes]:
    return [bytes(engine.pool.slice(layer, block)) for layer in range(LAYERS) for block in table]


async def fill(engine: EmulatedEngine, clock: Clock, what: list[tuple[TokenHistory, tuple[int, ...]]]) -> None:
    """Computes all but the last token of some sequences."""
    for number, (of, table) in enumerate(what):
        step = Step(number, (part(of, 0, len(of.token_ids) - 1, table),))
        await clock.run(asyncio.ensure_future(engine.run(step)))
