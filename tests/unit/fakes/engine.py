"""An engine without a model: computes recognisable KV bytes, and tokens that depend on every byte of them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from moonpool.base.errors import Unavailable
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import (
    LayerDone,
    SampledCandidates,
    SequenceStep,
    Step,
    StepResult,
    finished_blocks,
    max_steps_in_flight,
    stage_ranges,
)
from tests.unit.base.transport.fakes import LAYOUT


def slot(token: int, position: int, layer: int, head: int, plane: int, layout: KVLayout = LAYOUT) -> bytes:
    """KV of one token in one layer, one head, K or V: a byte unlike its neighbours'."""
    value = 1 + (token * 31 + position * 7 + layer * 13 + head * 5 + plane * 3) % 255
    return bytes([value]) * (layout.groups[0].head_dim * layout.groups[0].element_bytes)


def slots(layout: KVLayout, offset: int) -> Iterator[tuple[int, int, int, int]]:
    """(head, plane, first byte, end) of one token's places in a layer slice."""
    size = layout.groups[0].head_dim * layout.groups[0].element_bytes
    for head in range(layout.head_shares):
        for plane in range(2):
            start = ((head * 2 + plane) * layout.block_size + offset) * size
            yield head, plane, start, start + size


def write_tokens(target: memoryview, tokens: Sequence[int], first: int, layer: int, layout: KVLayout = LAYOUT) -> None:
    """Writes the KV of tokens at positions from `first` on, all in one block, into its layer slice."""
    for index, token in enumerate(tokens):
        position = first + index
        for head, plane, start, end in slots(layout, position % layout.block_size):
            target[start:end] = slot(token, position, layer, head, plane, layout)


def slice_of_tokens(tokens: Sequence[int], block: int, layer: int, layout: KVLayout = LAYOUT) -> bytearray:
    """The layer slice of a block of a sequence; zeroes where there is no token."""
    data, size = bytearray(layout.slice_bytes(0)), layout.block_size
    write_tokens(memoryview(data), tokens[block * size : (block + 1) * size], block * size, layer, layout)
    return data


def digest_after(tokens: Sequence[int], layout: KVLayout = LAYOUT) -> int:
    """Of all KV of `tokens`, if it is right."""
    digest = xxhash.xxh3_64()
    for layer in range(layout.layers):
        for position, token in enumerate(tokens):
            for head in range(layout.head_shares):
                for plane in range(2):
                    digest.update(slot(token, position, layer, head, plane, layout))
    return digest.intdigest()


TOKENS = 200
"""Different tokens that the engine samples."""


def next_token(tokens: Sequence[int], count: int = TOKENS) -> int:
    """What the engine must sample after `tokens`, if all their KV is right."""
    return 8 + digest_after(tokens) % count


def scores_of(token_ids: bytes) -> Logprobs:
    """The log probabilities that the engine gives known tokens."""
    tokens = array("i", token_ids)
    return Logprobs(array("f", [-token / 1024 for token in tokens]), array("I", [1] * len(tokens)))


def first_tokens(digest: int, count: int, different: int = TOKENS) -> tuple[int, ...]:
    """What the engine samples for several answers behind one prompt."""
    return tuple(8 + (digest + 31 * n) % different for n in range(count))


def most_likely(digest: int, count: int = 200) -> SampledCandidates:
    """What the engine gives for beams: tokens, each less likely than the one before."""
    tokens = tuple(8 + (digest + 17 * n) % 200 for n in range(count))
    return SampledCandidates(tokens, tuple(-(n + 1) * (1 + digest % 5) / 4 for n in range(count)))


def continuation(tokens: Sequence[int], count: int, different: int = TOKENS) -> list[int]:
    """The right answer; see `FakeEngine.different`."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token([*tokens, *answer], different))
    return answer


UNFOLLOWED = "a regular expression that cannot be followed"
"""As a grammar: the engine samples nothing for the sequence."""


GARBLED = "a regular expression that a defect meets"
"""As a grammar: the engine samples what is no token."""
NO_TOKEN = 1 << 40


def _has(sequence: SequenceStep, grammar: str) -> bool:
    return sequence.sample is not None and sequence.sample.params.grammar == grammar


def after(step: Step, sampled: Sequence[int | None]) -> Step | None:
    """A run's next step; None when it is over with this one, which has sampled these tokens."""
    if step.steps == 1:
        return None
    shares = []
    for share, token in zip(step.sequences, sampled, strict=True):
        if share.sample is None or token is None or token in share.end_token_ids:
            return None
        start = share.start + len(share.token_ids) // 4
        value = replace(share, token_ids=token.to_bytes(4, "little"), start=start, sample=share.sample.after(token))
        shares.append(value)
    return replace(step, sequences=tuple(shares), copies=(), steps=step.steps - 1)


class FakeEngine:
    """Satisfies `moonpool.engine.interface.Engine`; computes what `next_token` says from the bytes in its pool.

    `before_layer` is awaited before each layer of each step: tests stop the time there. It takes runs of up to
    `run_steps`.
    """

    def __init__(self, blocks: int = 32, *, stages: int = 1, layout: KVLayout = LAYOUT, run_steps: int = 1) -> None:
        self.run_steps, self.max_num_batched_tokens = run_steps, 512
        self.layout, self.blocks, self.stages = layout, blocks, stages
        self.pool = KVPool.create(layout, blocks, stage_ranges(layout.layers, stages))
        self.speeds = Speeds(prefill_per_token_s=1e-3, decode_per_sequence_s=1e-3)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.before_layer: Callable[[Step, int], Awaitable[None]] | None = None
        self.steps: list[Step] = []
        self.runs: list[int] = []
        """Steps of each run."""
        self.aborts: list[int] = []
        self.cuts: list[int] = []
        self.fetched: list[tuple[int, ...]] = []
        self.loras: list[bytes] = []
        self.loading: asyncio.Future[None] | None = None
        """Of a device that KV is brought to."""
        self.drops: list[tuple[int, int]] = []
        self.waited_ns = 0
        """So long each step says that it has waited for others."""
        self.late_every = 0
        """In each step of such a number, sequences that may skip get no token; 0 = never."""
        self.different = TOKENS
        """Tokens that are sampled: with few of them answers repeat themselves."""
        self.together = 1
        """Steps of a patient run that are told at once."""
        self._gates: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self._order = asyncio.Lock()
        self._in_flight = 0
        self._last_id = 0

    async def idle(self) -> None:
        """A cancelled step has ended already."""

    def fail(self, reason: str) -> None:
        """The engine's process dies."""
        if not self.failed.done():
            self.failed.set_result(reason)

    def hold(self, layer: int = 0, *, after: int = 0) -> tuple[asyncio.Event, asyncio.Event]:
        """Stops steps before a layer, after so many steps: (set when one has come there, set it to let all go)."""
        reached, go = asyncio.Event(), asyncio.Event()

        async def before(step: Step, at: int) -> None:
            if at == layer and len(self.steps) > after:
                reached.set()
                await go.wait()

        self.before_layer = before
        return reached, go

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        assert step.steps <= self.run_steps
        assert step.step_id > self._last_id
        assert self._in_flight < max_steps_in_flight(self.stages)
        self._last_id, self._in_flight = step.step_id, self._in_flight + 1
        work = asyncio.ensure_future(self._steps_of_run(step, on_layer, on_step, on_tokens))
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

    async def _steps_of_run(
        self,
        step: Step,
        on_layer: Callable[[LayerDone], None] | None,
        on_step: Callable[[StepResult], None] | None,
        on_tokens: Callable[[StepResult], None] | None,
    ) -> StepResult:
        self.runs.append(0)
        over: list[StepResult] = []
        while True:
            self.steps.append(step)
            self.runs[-1] += 1
            result = await self._run(step, on_layer)
            if on_tokens is not None and step.layer_events and any(token is not None for token in result.sampled):
                on_tokens(result)
                await asyncio.sleep(0)
            following = None if result.aborted or step.step_id in self.cuts else after(step, result.sampled)
            if following is None:
                return replace(result, earlier=tuple(over))
            over.append(result)
            if not step.patient or len(over) >= self.together:
                assert on_step is not None
                on_step(replace(result, earlier=tuple(over[:-1])))
                over.clear()
            step = following

    async def _run(self, step: Step, on_layer: Callable[[LayerDone], None] | None) -> StepResult:
        async with self._order:
            start_ns = time.monotonic_ns() - self.waited_ns
            for part in self.pool.parts:
                for source, block in step.copies:
                    part.copy(source, block)
            digests = [xxhash.xxh3_64() for _ in step.sequences]
            for layer in range(self.layout.layers):
                if self.before_layer is not None:
                    await self.before_layer(step, layer)
                if not await self._pass(step, layer):
                    return StepResult((), True, start_ns, time.monotonic_ns())
                began_ns = time.monotonic_ns()
                for sequence, digest in zip(step.sequences, digests, strict=True):
                    self._compute(sequence, layer, digest)
                for block, valid_tokens in finished_blocks(step, self.layout.block_size):
                    self.pool.seal(layer, block, valid_tokens)
                if on_layer is not None and step.layer_events:
                    on_layer(LayerDone(step.step_id, layer, began_ns, time.monotonic_ns()))
                await asyncio.sleep(0)
            sampled = tuple(
                self._sample(sequence.sample, digest.intdigest()) if sequence.sample is not None else None
                for sequence, digest in zip(step.sequences, digests, strict=True)
            )
            several = {
                index: most_likely(digest.intdigest(), sequence.sample.best)
                for index, (sequence, digest) in enumerate(zip(step.sequences, digests, strict=True))
                if sequence.sample is not None and sequence.sample.best
            }
            several |= {
                index: SampledCandidates(first_tokens(digest.intdigest(), sequence.sample.samples, self.different))
                for index, (sequence, digest) in enumerate(zip(step.sequences, digests, strict=True))
                if sequence.sample is not None and sequence.sample.samples > 1 and not sequence.sample.best
            }
            failed = {index: UNFOLLOWED for index, each in enumerate(step.sequences) if _has(each, UNFOLLOWED)}
            sampled = tuple(None if index in failed else token for index, token in enumerate(sampled))
            both = zip(step.sequences, sampled, strict=True)
            sampled = tuple(NO_TOKEN if _has(each, GARBLED) else token for each, token in both)
            skipping = self.late_every and len(self.steps) % self.late_every == 0
            late = frozenset(index for index, each in enumerate(step.sequences) if skipping and each.may_skip)
            sampled = tuple(None if index in late else token for index, token in enumerate(sampled))
            scores = {n: scores_of(each.scored.token_ids) for n, each in enumerate(step.sequences) if each.scored}
            embeddings = {
                index: digest.digest()
                for index, (each, digest) in enumerate(zip(step.sequences, digests, strict=True))
                if each.sample is not None and each.sample.params.embedding
            }
            times = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "waited_ns": self.waited_ns}
            rest = {"scores": scores, "embeddings": embeddings, "failed": failed, "late": late}
            return StepResult(sampled, False, several=several, **times, **rest)  # type: ignore[arg-type]

    def _sample(self, sample: SampleSpec, digest: int) -> int:
        return 8 + digest % self.different if sample.forced is None else sample.forced

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
        size = self.layout.block_size
        assert len(set(sequence.block_table)) == len(sequence.block_table) >= -(-(sequence.start + len(tokens)) // size)
        for index, token in enumerate(() if sequence.full_hit else tokens):
            position = sequence.start + index
            target = self.pool.slice(layer, sequence.block_table[position // size])
            write_tokens(target, [token], position, layer, self.layout)
        for position in range(sequence.start + len(tokens)):
            data = self.pool.slice(layer, sequence.block_table[position // size])
            for _, _, start, end in slots(self.layout, position % size):
                digest.update(data[start:end])

    async def fetch(self, blocks: Sequence[int]) -> None:
        self.fetched.append(tuple(blocks))

    def load(self) -> asyncio.Future[None] | None:
        return self.loading

    async def load_lora(self, lora: bytes, folder: str) -> int:
        self.loras.append(lora)
        return 1

    async def drop_lora(self, lora: bytes) -> None:
        self.loras.remove(lora)

    def open_gate(self, step_id: int, layer: int) -> None:
        self._gates[step_id] = max(self._gates.get(step_id, -1), layer)
        self._notify()

    def drop(self, step_id: int, index: int) -> None:
        self.drops.append((step_id, index))

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        self.cuts.append(step_id)

    def abort(self, step_id: int) -> None:
        self.aborts.append(step_id)
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._note = asyncio.ensure_future(notify())
