"""Random walks of prefill core and decode scheduler over real stages: a slice that may leave has its bytes' hash."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest

from moonpool.base.kv.keys import BlockKey, slice_hash, tokens_to_bytes
from moonpool.base.sampling_params import GREEDY, SampleSpec
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.unit.base.scheduling.helpers import BT, keys_of, tokens
from tests.unit.engine.stages import BLOCKS, Stages, stages

Stored = dict[tuple[BlockKey, int], tuple[bytes, int]]


class Walk:
    """One pool that prefills and then decodes, its blocks reused all the time.

    `stored`: what a kvstore holds, slices and hashes by key and layer. `checked`: slices that were looked at.
    """

    def __init__(self, engine: Stages, seed: int) -> None:
        self.engine, self.pool, self.layout = engine, engine.pool, engine.pool.layout
        self.random = random.Random(seed)
        settings = PrefillSettings(
            num_blocks=BLOCKS,
            block_size=BT,
            layers=self.layout.layers,
            block_bytes=self.layout.block_bytes,
            max_num_batched_tokens=self.random.randint(BT, 3 * BT),
            stages=len(engine.runners),
        )
        self.core = PrefillScheduler(settings, Speeds(prefill_per_token_s=1.0, load_bytes_per_s=1e9))
        self.blocks = self.core.state.manager
        self.prompts: dict[int, array[int]] = {}
        self.steps: dict[int, Step] = {}
        self.loads: list[LoadBlocks] = []
        self.chunks: dict[int, actions.RunStep] = {}
        self.tables: dict[int, tuple[int, ...]] = {}
        self.transfers: dict[int, int] = {}
        self.told: list[int] = []
        self.stored: Stored = {}
        self.now = 0.0
        self.checked = self.aborted = self.loaded = self.failed = self.answered = 0

    def check(self, layer: int, block: int, valid_tokens: int = BT) -> None:
        data, value = self.pool.read(layer, block)
        cleaned = memoryview(bytearray(data))
        self.layout.zero_invalid(0, cleaned, valid_tokens)
        assert value == slice_hash(cleaned), f"layer {layer} of block {block}, {valid_tokens} tokens"
        self.checked += 1

    def post(self, event: events.Event | IoEnded[events.IoResult]) -> None:
        out: list[actions.Action] = []
        self.now += 0.001
        self.core.handle(self.now, event, out)
        for action in out:
            self.perform(action)
        while self.told:  # until now its transfer, which is never opened, has kept its blocks
            number = self.told.pop()
            self.post(events.CancelPrefill(number))
            self.post(IoEnded(self.transfers.pop(number), events.IoFailed()))
        self.core.check_invariants()

    def perform(self, action: actions.Action) -> None:
        match action:
            case actions.RunStep():
                self.chunks[action.io] = action
                self.steps[action.io] = Step(
                    action.io, tuple(map(self.sequence, action.chunks)), action.gated, layer_events=True
                )
            case actions.OpenKVGate():
                for gates in self.engine.gates:
                    gates.open(action.step, action.layer)
            case actions.GiveUpStep():
                for gates in self.engine.gates:
                    gates.abort(action.step)
            case actions.DropSequenceSlice():
                for gates in self.engine.gates:
                    gates.drop(action.step, action.index)
            case LoadBlocks():
                self.loads.append(action)
            case actions.OpenTransfer():
                self.transfers[action.id] = action.io
            case actions.ReportFirstToken():
                self.leave(action.id)
                self.told.append(action.id)

    def sequence(self, chunk: actions.ChunkOrder) -> SequenceStep:
        self.tables[chunk.id] = chunk.blocks
        ids = self.prompts[chunk.id]
        sample = SampleSpec(GREEDY) if chunk.last else None
        return SequenceStep(tokens_to_bytes(ids[chunk.start : chunk.end]), chunk.start, chunk.blocks, sample)

    def run(self) -> None:
        """The first step in flight; checks each layer as it is reported, as its slices are sent then."""
        io = min(self.steps)
        step, seen = self.steps.pop(io), len(self.engine.events)
        if self.random.random() < 0.1:
            self.random.choice(self.engine.gates).abort(io)
        done = self.engine.run(step)[-1]
        for event in self.engine.events[seen:]:
            if isinstance(event, LayerDone):
                self.check_chunks(io, event.layer)
                self.post(events.LayerComputed(io, event.layer))
        self.aborted += done.aborted
        self.engine.events.clear()
        self.post(IoEnded(io, events.StepEnded(done.aborted, 0.001)))

    def check_chunks(self, io: int, layer: int) -> None:
        for chunk in self.chunks[io].chunks:
            for index in range(chunk.start // BT, len(chunk.blocks)):
                valid = self.layout.valid_tokens(len(self.prompts[chunk.id]), index)
                self.check(layer, chunk.blocks[index], valid)

    def arrive(self, number: int) -> None:
        first = 100 * self.random.randrange(5)  # prefixes are shared, in the pool or only in the store
        ids = tokens(self.random.randint(1, 4 * BT), first=first)
        keys = keys_of(ids)
        stored = next((i for i, key in enumerate(keys) if (key, 0) not in self.stored), len(keys))
        sources = (KVSource("store", stored),) if self.random.random() < 0.7 else ()
        self.prompts[number] = ids
        self.post(events.AddRequest(number, EngineRequest(tuple(keys), len(ids), len(ids)), 0, sources))

    def load(self, order: LoadBlocks) -> None:
        """Loads what a store has beyond the cached blocks: some of it behind a gated step, or not to its end."""
        fails = self.random.random() < 0.4
        keys = keys_of(self.prompts[order.id])[order.first :]
        for layer in range(self.random.randint(0, self.layout.layers - 1) if fails else self.layout.layers):
            for key, block in zip(keys, order.blocks, strict=False):
                data, value = self.stored[key, layer]
                self.pool.write(layer, block, memoryview(data), value)
            self.post(events.LayerLoaded(order.io, layer))
        if fails:
            self.failed += 1
            self.now += 3.0  # the store is not left alone for long
            self.post(IoEnded(order.io, LoadEnded(0, missing=0)))
        else:
            self.loaded += 1
            self.post(IoEnded(order.io, LoadEnded(len(order.blocks), seconds=1e-6)))

    def leave(self, number: int) -> None:
        """A prompt is computed: all of it may be sent or stored. Then an answer is computed behind it, and stored."""
        ids, keys, table = self.prompts[number], keys_of(self.prompts[number]), self.tables[number]
        for index, block in enumerate(table):
            for layer in range(self.layout.layers):
                self.check(layer, block, self.layout.valid_tokens(len(ids), index))
                if index < len(keys):
                    data, value = self.pool.read(layer, block)
                    self.stored[keys[index], layer] = bytes(data), value
        if not self.steps:
            self.answer(len(ids), table)

    def answer(self, num_tokens: int, prompt_table: tuple[int, ...]) -> None:
        """An answer of some tokens behind the prompt, one step each; its full blocks may leave too."""
        ids, count = tokens(num_tokens + 1), self.random.randint(1, 20)
        more = max(0, -(-(len(ids) + count - 1) // BT) - len(prompt_table))
        if not self.blocks.can_allocate(more):
            return
        new = self.blocks.allocate(more)
        table = [*prompt_table, *new]
        for _ in range(count - 1):
            last = SequenceStep(
                ids[-1:].tobytes(), len(ids) - 1, tuple(table[: -(-len(ids) // BT)]), SampleSpec(GREEDY)
            )
            self.engine.run(Step(-len(ids), (last,)))
            ids.append(7)
        for block in table[num_tokens // BT : (len(ids) - 1) // BT]:
            self.answered += 1
            for layer in range(self.layout.layers):
                self.check(layer, block)
        self.blocks.release(new)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_slice_that_may_leave_has_the_hash_of_its_bytes(checkpoint: Path, count: int, seed: int) -> None:
    with stages(checkpoint, count) as engine:
        walk = Walk(engine, seed)
        for number in range(60):
            walk.arrive(number)
            while walk.steps or walk.loads:
                if walk.loads and (not walk.steps or walk.random.random() < 0.5):
                    walk.load(walk.loads.pop(0))
                else:
                    walk.run()
        assert walk.checked > 500
        assert min(walk.aborted, walk.loaded, walk.failed, walk.answered) > 0, "the walk went past it"
