"""Storms of all events at once over a crowded pool: whatever a step, a batch, a put or a reader reads is right.

`World` looks at each read by layer, and at each block with a key after each event.
"""

import random
from collections import Counter

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.unit.engine.prefill.core.test_scheduler import STORES, PrefillMachine
from tests.unit.engine.prefill.core.world import BT, LAYERS, World, staged

SHAPES = ((0, False), (1, False), (2, False), (1, True))
"""Blocks in a window, and whether windowed layers have a recurrent state."""

QUICK = (0, 1, 2, 3, 6, 12)
"""Seeds that `make test` walks; `make test-all` walks all."""


class Storm:
    """One walk, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"storm {seed}")
        window, states = SHAPES[seed % len(SHAPES)]
        settings: dict[str, object] = {"num_blocks": rng.choice([8, 12, 20])}
        if window:
            settings |= {"windowed_layers": frozenset({rng.randrange(LAYERS)}), "window_blocks": window}
            settings |= {"window_slots": window + 2 + rng.choice([0, 1, 8])}
            settings |= {"recurrent": states, "states_alone": states}
        self.machine = PrefillMachine()
        self.machine.world = self.world = World(staged(1 + seed // len(SHAPES) % 2, **settings))
        self.seen = Counter[str]()

    def run(self, draws: int) -> None:
        """So many draws, then everything comes to rest."""
        rng, machine, world = self.rng, self.machine, self.world
        for _ in range(draws):
            draw = rng.random()
            if draw < 0.1 and len(world.core.state.requests) < 8:
                self.arrive()
            elif draw < 0.12:
                self.leave()
            elif draw < 0.15:
                machine.share(rng)
            elif draw < 0.153:
                world.post(DeleteKV(len(world.done), KVSelection(tenants=frozenset("a"))))
                self.seen["deleted"] += 1
            elif draw < 0.25:
                machine.wait(rng.choice([0.0001, 0.01, 0.3]))
            elif draw < 0.45 and machine.loads():
                self.load(rng.choice(machine.loads()))
            elif draw < 0.75 and world.steps:
                machine.compute(rng.randrange(3), rng.randrange(100))
            elif world.ios:
                machine.io(rng.randrange(21), rng.randrange(60), rng.randrange(5))
        machine.teardown()

    def arrive(self) -> None:
        rng, world = self.rng, self.world
        tokens = rng.randint(1, min(6, world.settings.num_blocks) * BT)
        names = [(name, rng.randint(1, 6), rng.random() < 0.2) for name in rng.sample(STORES, rng.choice([0, 1, 1, 2]))]
        world.arrive(
            tokens,
            rng.randint(0, 5),
            held=rng.choice([None, 0, min(1, tokens // BT), min(2, tokens // BT)]),
            sources=tuple(KVSource(*source) for source in names),
            copies=tuple(events.WriteBackTarget("copy", rng.choice([None, 0, 3])) for _ in range(rng.randint(0, 2))),
            tenant=rng.choice("ab"),
            reuse=rng.random() < 0.95,
        )

    def leave(self) -> None:
        """One client leaves, or all at once."""
        requests = list(self.world.core.state.requests)
        for number in requests if self.rng.random() < 0.1 else requests[:1]:
            self.seen["left"] += 1
            self.world.post(events.CancelPrefill(number))

    def load(self, io: int) -> None:
        """A load brings its next layer, or ends: whole, short, failed or called off with a layer half written."""
        rng, world = self.rng, self.world
        order = world.ios[io]
        assert isinstance(order, LoadBlocks)
        if world.loaded[io] < LAYERS and io not in world.cancelled and rng.random() < 0.85:
            world.load_layer(io)
            return
        if world.loaded[io] == LAYERS and io not in world.cancelled:
            whole = len(order.blocks) if rng.random() < 0.6 else rng.randrange(len(order.blocks))
            short = whole < len(order.blocks)
            self.seen["short" if short else "whole"] += 1
            world.end(io, LoadEnded(whole, whole if short else None, seconds=0.01))
            return
        if world.loaded[io] < LAYERS:
            for block in order.blocks[: rng.randint(0, len(order.blocks))]:
                world.memory[world.loaded[io], block] = ("half a layer",)
        self.seen["failed"] += 1
        world.end(io, LoadEnded(0, failed=rng.random() < 0.5))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 8 else ()) for seed in range(48)]
)
def test_reads_are_right_in_a_storm(seed: int) -> None:
    print(f"seed {seed}")
    Storm(seed).run(3000)


def test_storms_meet_everything() -> None:
    """What is to be read right does happen."""
    storms = [Storm(seed) for seed in range(100, 104)]
    for storm in storms:
        storm.run(3000)
    seen = sum((storm.seen for storm in storms), Counter[str]())
    for kind in ("left", "deleted", "whole", "short", "failed"):
        assert seen[kind], kind
    done = [action for storm in storms for action in storm.world.done]
    assert any(isinstance(action, actions.RunStep) and action.gated for action in done)
    kinds = {type(action) for action in done}
    assert {actions.DropSequenceSlice, actions.GiveUpStep, actions.SendSlices, actions.WriteBackBlocks} <= kinds
