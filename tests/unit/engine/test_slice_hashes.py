"""Random walks of both schedulers over the real stages: a slice that may leave has the hash of its bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moonpool.kv.hashes import slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.sampling import GREEDY, SampleSpec
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.prefill_scheduler import PrefillScheduler, PrefillSequence, PrefillStep
from moonpool.sched.steps import LayerDone, SequenceStep, Step
from tests.unit.engine.test_step import BLOCKS, Stages, stages
from tests.unit.sched.helpers import BT, prefill_sequence, tokens

Stored = dict[tuple[BlockKey, int], tuple[bytes, int]]


class Walk:
    """One pool that prefills and then decodes, its blocks reused all the time.

    `stored`: what a kvstore holds, slices and hashes by key and layer. `checked`: slices that were looked at.
    """

    def __init__(self, engine: Stages, seed: int) -> None:
        self.engine, self.pool, self.layout = engine, engine.pool, engine.pool.layout
        self.random = random.Random(seed)
        self.blocks = BlockManager(BLOCKS)
        self.prefill = PrefillScheduler(
            self.blocks, block_tokens=BT, step_tokens=self.random.randint(BT, 3 * BT), stages=len(engine.runners)
        )
        self.stored: Stored = {}
        self.checked = self.aborted = self.loaded = self.failed = self.answered = 0

    def check(self, layer: int, block: int, valid_tokens: int = BT) -> None:
        data, value = self.pool.read(layer, block)
        cleaned = memoryview(bytearray(data))
        self.layout.zero_invalid(cleaned, valid_tokens)
        assert value == slice_hash(cleaned), f"layer {layer} of block {block}, {valid_tokens} tokens"
        self.checked += 1

    def run(self, plan: PrefillStep, *, abort: bool = False) -> bool:
        """A step; checks each layer as it is reported, as its slices are sent then. Returns whether it was aborted."""
        step, seen = plan.step, len(self.engine.events)
        if abort:
            self.random.choice(self.engine.gates).abort(step.step_id)
        for gates in self.engine.gates:
            gates.open(step.step_id, self.layout.layers)
        done = self.engine.run(step)[-1]
        layers = [event.layer for event in self.engine.events[seen:] if isinstance(event, LayerDone)]
        for chunk in plan.chunks:
            for layer in layers:
                for index in range(chunk.start // BT, -(-chunk.end // BT)):
                    valid = self.layout.valid_tokens(chunk.sequence.num_tokens, index)
                    self.check(layer, chunk.sequence.block_table[index], valid)
        return done.aborted

    def arrive(self, number: int) -> None:
        first = 100 * self.random.randrange(5)  # prefixes are shared, in the pool or only in the store
        sequence = prefill_sequence(str(number), tokens(self.random.randint(1, 4 * BT), first=first))
        self.prefill.add(sequence)
        while (started := self.prefill.start_next(0.0)) is not None:
            self.begin_load(started)

    def begin_load(self, sequence: PrefillSequence) -> None:
        """Loads what a store has beyond the cached blocks: some of it behind a gated step, or not to its end."""
        cached, most = sequence.num_cached // BT, self.prefill.reusable_blocks(sequence)
        keys = [key for key in sequence.keys[cached:most] if (key, 0) in self.stored]
        if not keys or self.random.random() < 0.3:
            return
        into = self.prefill.load_started(sequence.request_id, cached + len(keys))
        fails = self.random.random() < 0.5
        layers = self.random.randint(0, self.layout.layers - 1) if fails else self.layout.layers
        for layer in range(layers):
            for key, block in zip(keys, into, strict=True):
                data, value = self.stored[key, layer]
                self.pool.write(layer, block, memoryview(data), value)
        plan = None
        if layers and self.random.random() < 0.7:
            self.prefill.layer_ready(sequence.request_id)
            plan = self.prefill.plan(0.0)
        if fails:
            self.prefill.load_broken(sequence.request_id)
            self.prefill.load_failed(sequence.request_id, cached)
            self.failed += 1
        else:
            self.prefill.load_complete(sequence.request_id)
            self.loaded += 1
        if plan is not None:
            self.finish(plan, abort=fails and plan.step.gated)

    def finish(self, plan: PrefillStep, *, abort: bool) -> None:
        aborted = self.run(plan, abort=abort)
        self.aborted += aborted
        for sequence in self.prefill.step_done(plan.step.step_id, aborted=aborted).finished:
            self.leave(sequence)

    def leave(self, sequence: PrefillSequence) -> None:
        """A prompt is computed: all of it may be sent or stored. Then an answer is computed behind it, and stored."""
        for index, block in enumerate(sequence.block_table):
            for layer in range(self.layout.layers):
                self.check(layer, block, self.layout.valid_tokens(sequence.num_tokens, index))
                if index < len(sequence.keys):
                    data, value = self.pool.read(layer, block)
                    self.stored[sequence.keys[index], layer] = bytes(data), value
        self.answer(sequence)
        self.prefill.remove(sequence.request_id)

    def answer(self, prompt: PrefillSequence) -> None:
        """An answer of some tokens behind the prompt, one step each; its full blocks may leave too."""
        ids, count = tokens(prompt.num_tokens + 1), self.random.randint(1, 20)
        more = max(0, -(-(len(ids) + count - 1) // BT) - len(prompt.block_table))
        if not self.blocks.can_allocate(more):
            return
        new = self.blocks.allocate(more)
        table = [*prompt.block_table, *new]
        for _ in range(count - 1):
            last = SequenceStep(
                ids[-1:].tobytes(), len(ids) - 1, tuple(table[: -(-len(ids) // BT)]), SampleSpec(GREEDY)
            )
            self.engine.run(Step(-len(ids), (last,)))
            ids.append(7)
        for block in table[prompt.num_tokens // BT : (len(ids) - 1) // BT]:
            self.answered += 1
            for layer in range(self.layout.layers):
                self.check(layer, block)
        self.blocks.release(new)


@contextmanager
def walk(checkpoint: Path, count: int, seed: int) -> Iterator[Walk]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps are tiny: further threads only wait for each other
    try:
        with stages(checkpoint, count) as engine:
            yield Walk(engine, seed)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_slice_that_may_leave_has_the_hash_of_its_bytes(checkpoint: Path, count: int, seed: int) -> None:
    with walk(checkpoint, count, seed) as it:
        for number in range(30):
            it.arrive(number)
            plans: list[PrefillStep] = []
            while plans or it.prefill.num_started:
                while (plan := it.prefill.plan(0.0)) is not None:
                    plans.append(plan)
                it.finish(plans.pop(0), abort=it.random.random() < 0.2)
                it.engine.events.clear()
        assert it.checked > 500
        assert min(it.aborted, it.loaded, it.failed, it.answered) > 0, "the walk went past it"
