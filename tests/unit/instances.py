"""Prefill and decode instances in this process, on real gRPC, over an engine that computes recognisable bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import xxhash

from moonpool.cost import Speeds
from moonpool.engine.handle import StepResult
from moonpool.engine.instance import EnginePlan, Parts
from moonpool.engine.messages import EngineSpec, LayerDone
from moonpool.engine.stages import stage_ranges
from moonpool.errors import Unavailable
from moonpool.kv.keys import block_keys, pack_keys, tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import KVPool
from moonpool.rpc.channels import Channels
from moonpool.rpc.server import RunningServer, serving
from moonpool.sched.steps import SequenceStep, Step, finished_blocks
from moonpool.streams.link import Link
from moonpool.telemetry.gauges import restless
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from services.decode.config import DecodeConfig
from services.decode.service import contract as decode_contract
from services.decode.work import Work as DecodeWork
from services.prefill.config import PrefillConfig
from services.prefill.service import contract as prefill_contract
from services.prefill.work import Work as PrefillWork
from tests.unit.streams.fakes import LAYOUT, NAMESPACE, ROOT

WAIT_S = 20.0
LOOK_AGAIN_S = 0.05
BLOCK = LAYOUT.block_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens unlike those of another seed."""
    return [(i * 7 + seed * 31 + (i * i * (seed + 1)) % 13) % 200 + 8 for i in range(length)]


def spec(
    request_id: str, tokens: Sequence[int], *, max_tokens: int = 4, ends: Sequence[int] = (), prompt_tokens: int = 0
) -> kv_pb2.SequenceSpec:
    """A sequence as the conductor describes it."""
    return kv_pb2.SequenceSpec(
        request_id=request_id,
        token_ids=tokens_to_bytes(array("i", tokens)),
        prompt_tokens=prompt_tokens or len(tokens),
        block_keys=pack_keys(block_keys(ROOT, array("i", tokens), BLOCK)),
        chain_root=ROOT,
        sampling=kv_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        end_token_ids=ends,
    )


def slot(token: int, position: int, layer: int, head: int, plane: int, layout: KVLayout = LAYOUT) -> bytes:
    """KV of one token in one layer, one head, K or V: a byte unlike its neighbours'."""
    value = 1 + (token * 31 + position * 7 + layer * 13 + head * 5 + plane * 3) % 255
    return bytes([value]) * (layout.head_dim * layout.element_bytes)


def slots(layout: KVLayout, offset: int) -> Iterator[tuple[int, int, int, int]]:
    """(head, plane, first byte, end) of one token's places in a layer slice."""
    size = layout.head_dim * layout.element_bytes
    for head in range(layout.kv_heads):
        for plane in range(2):
            start = ((head * 2 + plane) * layout.block_tokens + offset) * size
            yield head, plane, start, start + size


def write_tokens(target: memoryview, tokens: Sequence[int], first: int, layer: int, layout: KVLayout = LAYOUT) -> None:
    """Writes the KV of tokens at positions from `first` on, all in one block, into its layer slice."""
    for index, token in enumerate(tokens):
        position = first + index
        for head, plane, start, end in slots(layout, position % layout.block_tokens):
            target[start:end] = slot(token, position, layer, head, plane, layout)


def slice_of_tokens(tokens: Sequence[int], block: int, layer: int, layout: KVLayout = LAYOUT) -> bytearray:
    """The layer slice of a block of a sequence; zeroes where there is no token."""
    data, size = bytearray(layout.slice_bytes), layout.block_tokens
    write_tokens(memoryview(data), tokens[block * size : (block + 1) * size], block * size, layer, layout)
    return data


def next_token(tokens: Sequence[int], layout: KVLayout = LAYOUT) -> int:
    """What the engine must sample after `tokens`, if all their KV is right."""
    digest = xxhash.xxh3_64()
    for layer in range(layout.layers):
        for position, token in enumerate(tokens):
            for head in range(layout.kv_heads):
                for plane in range(2):
                    digest.update(slot(token, position, layer, head, plane, layout))
    return 8 + digest.intdigest() % 200


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """The right answer."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token([*tokens, *answer]))
    return answer


def read_spans(path: Path, name: str) -> list[dict[str, Any]]:
    """The recorded spans of a name, in the order of their recording."""
    spans: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for span in spans if span["name"] == name]


class FakeEngine:
    """Satisfies `moonpool.engine.handle.Engine`; computes what `next_token` says from the bytes in its pool.

    `before_layer` is awaited before each layer of each step: tests stop the time there.
    """

    def __init__(self, blocks: int = 32, *, stages: int = 1, layout: KVLayout = LAYOUT) -> None:
        self.layout, self.blocks, self.stages = layout, blocks, stages
        self.pool = KVPool.create(layout, blocks, stage_ranges(layout.layers, stages))
        self.speeds = Speeds(prefill_per_token_s=1e-3, decode_per_sequence_s=1e-3)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.before_layer: Callable[[Step, int], Awaitable[None]] | None = None
        self.steps: list[Step] = []
        self.aborts: list[int] = []
        self._gates: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self._order = asyncio.Lock()
        self._in_flight = 0
        self._last_id = 0

    def fail(self, reason: str) -> None:
        """The engine's process dies."""
        if not self.failed.done():
            self.failed.set_result(reason)

    async def run(self, step: Step, *, on_layer: Callable[[LayerDone], None] | None = None) -> StepResult:
        assert step.step_id > self._last_id
        assert self._in_flight < self.stages
        self._last_id, self._in_flight = step.step_id, self._in_flight + 1
        self.steps.append(step)
        work = asyncio.ensure_future(self._run(step, on_layer))
        try:
            waiting: set[asyncio.Future[Any]] = {work, self.failed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise Unavailable(f"the engine failed: {self.failed.result()}")
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._in_flight -= 1

    async def _run(self, step: Step, on_layer: Callable[[LayerDone], None] | None) -> StepResult:
        async with self._order:
            start_ns = time.monotonic_ns()
            digests = [xxhash.xxh3_64() for _ in step.sequences]
            for layer in range(self.layout.layers):
                if self.before_layer is not None:
                    await self.before_layer(step, layer)
                if not await self._pass(step, layer):
                    return StepResult((), True, start_ns, time.monotonic_ns())
                began_ns = time.monotonic_ns()
                for sequence, digest in zip(step.sequences, digests, strict=True):
                    self._compute(sequence, layer, digest)
                for block, valid_tokens in finished_blocks(step, self.layout.block_tokens):
                    self.pool.seal(layer, block, valid_tokens)
                if on_layer is not None and step.layer_events:
                    on_layer(LayerDone(step.step_id, layer, began_ns, time.monotonic_ns()))
                await asyncio.sleep(0)
            sampled = tuple(
                8 + digest.intdigest() % 200 if sequence.sample is not None else None
                for sequence, digest in zip(step.sequences, digests, strict=True)
            )
            return StepResult(sampled, False, start_ns, time.monotonic_ns())

    async def _pass(self, step: Step, layer: int) -> bool:
        """Waits at the layer's gate; False when the step is given up."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: step.step_id in self.aborts or not step.gated or self._gates.get(step.step_id, -1) >= layer
            )
        return step.step_id not in self.aborts

    def _compute(self, sequence: SequenceStep, layer: int, digest: Any) -> None:
        tokens = array("i")
        tokens.frombytes(sequence.token_ids)
        size = self.layout.block_tokens
        assert len(set(sequence.block_table)) == len(sequence.block_table) == -(-(sequence.start + len(tokens)) // size)
        for index, token in enumerate(tokens):
            position = sequence.start + index
            target = self.pool.slice(layer, sequence.block_table[position // size])
            write_tokens(target, [token], position, layer, self.layout)
        for position in range(sequence.start + len(tokens)):
            data = self.pool.slice(layer, sequence.block_table[position // size])
            for _, _, start, end in slots(self.layout, position % size):
                digest.update(data[start:end])

    def open_gate(self, step_id: int, layer: int) -> None:
        self._gates[step_id] = max(self._gates.get(step_id, -1), layer)
        self._notify()

    def abort(self, step_id: int) -> None:
        self.aborts.append(step_id)
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._note = asyncio.ensure_future(notify())


class Instance:
    """One instance under test: its work, its engine, and a way to wait for what it does."""

    def __init__(self, work: Any, engine: FakeEngine, instance: kv_pb2.Instance, channels: Channels) -> None:
        self.work = work
        self.engine = engine
        self.instance = instance
        self.channels = channels
        self.changed = asyncio.Event()
        self.death: BaseException | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it is true; looks at every change, and now and then, as not every gauge announces its rest."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), LOOK_AGAIN_S)

    @property
    def restless(self) -> dict[str, tuple[float, float]]:
        """Gauges that are not at rest."""
        return restless(self.work.gauges().read())

    async def rest(self) -> None:
        """Waits until everything reserved has come back, and checks that it has."""
        try:
            await self.until(lambda: not self.restless)
        except TimeoutError:
            raise AssertionError(f"{self.instance.id} is not at rest: {self.restless}") from None
        self.work.scheduler.check_invariants()


class Decode(Instance):
    """A decode instance."""

    work: DecodeWork

    @property
    def stub(self) -> Any:
        """Its contract (the stub's types are those of the blocking API)."""
        return DecodeServiceStub(self.channels.get(self.instance.address))


class Prefill(Instance):
    """A prefill instance."""

    work: PrefillWork

    @property
    def stub(self) -> Any:
        """Its contract (the stub's types are those of the blocking API)."""
        return PrefillServiceStub(self.channels.get(self.instance.address))


def _parts(
    engine: FakeEngine,
    channels: Channels,
    instance: kv_pb2.Instance,
    poke: Callable[[], None],
    *,
    rate: float | None = None,
    spans: Recorder,
    max_tokens: int = 512,
) -> Parts:
    layout = engine.layout
    plan = EnginePlan(
        EngineSpec("checkpoint", layout.dtype, layout, engine.blocks, engine.stages),
        conductor_pb2.ModelInfo(name="fake", namespace=NAMESPACE, layout=layout.to_proto()),
        256,
        max_tokens,
    )
    return Parts(plan, engine, channels, Link(rate), instance, spans, poke)


@asynccontextmanager
async def _running(it: Instance, contract: Any, ended: Callable[[], None]) -> AsyncIterator[RunningServer]:
    """Work and server, as `run_instance` has them; death by the engine is remembered, not raised."""

    async def run() -> None:
        try:
            await it.work.run()
        except Unavailable as error:
            it.death = error
        finally:
            ended()

    async with serving("127.0.0.1:0", [contract], grace_s=1.0) as server:
        it.instance.address = server.address
        task = asyncio.ensure_future(run())
        await asyncio.sleep(0)
        try:
            yield server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def decoding(
    *, blocks: int = 32, incarnation: int = 11, spans: Path | None = None, max_tokens: int = 512, **settings: Any
) -> AsyncIterator[Decode]:
    """A running decode instance; afterwards everything must be at rest."""
    config = DecodeConfig(conductor="127.0.0.1:1", model="fake", id="decode-0", **settings)
    instance = kv_pb2.Instance(id="decode-0", incarnation=incarnation, kind=kv_pb2.INSTANCE_KIND_DECODE)
    async with Channels() as channels:
        engine, recorder = FakeEngine(blocks), Recorder("decode-0", spans)
        it = Decode(None, engine, instance, channels)
        it.work = DecodeWork(
            _parts(engine, channels, instance, it.changed.set, spans=recorder, max_tokens=max_tokens), config
        )
        async with _running(it, decode_contract(it.work), it.changed.set):
            yield it
            await it.rest()
        recorder.close()
        engine.pool.close()


@asynccontextmanager
async def prefilling(
    *, blocks: int = 32, stages: int = 1, spans: Path | None = None, rate: float | None = None, **settings: Any
) -> AsyncIterator[Prefill]:
    """A running prefill instance; afterwards everything must be at rest."""
    settings = {"step_tokens": 2 * BLOCK, **settings}
    config = PrefillConfig(conductor="127.0.0.1:1", model="fake", id="prefill-0", **settings)
    instance = kv_pb2.Instance(id="prefill-0", incarnation=5, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    async with Channels() as channels:
        engine, recorder = FakeEngine(blocks, stages=stages), Recorder("prefill-0", spans)
        it = Prefill(None, engine, instance, channels)
        it.work = PrefillWork(_parts(engine, channels, instance, it.changed.set, rate=rate, spans=recorder), config)
        async with _running(it, prefill_contract(it.work), it.changed.set):
            yield it
            await it.rest()
        recorder.close()
        engine.pool.close()
