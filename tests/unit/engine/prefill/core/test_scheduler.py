"""Any order of requests, progress and failures: contents are right, every request ends once, everything comes back."""

import pickle
import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from tests.examples import examples
from tests.unit.engine.prefill.core.world import BT, LAYERS, World, staged

STORES = ("store-0", "store-1")


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        stages=st.integers(1, 3), window_blocks=st.integers(0, 2), spare=st.integers(0, 8), states=st.booleans()
    )
    def begin(self, stages: int, window_blocks: int, spare: int = 8, states: bool = False) -> None:
        """A window of one block may be a state's; `spare`: window blocks beyond what one prompt needs."""
        windows: dict[str, Any] = {"windowed_layers": frozenset({1}), "window_blocks": window_blocks}
        windows |= {"window_slots": window_blocks + 2 + spare}
        if window_blocks == 1 and states:
            windows |= {"recurrent": True, "states_alone": True}
        self.world = World(staged(stages, **(windows if window_blocks else {})))

    @rule(
        n=st.integers(1, 5 * BT),
        family=st.integers(0, 2),
        held=st.none() | st.integers(0, 2),
        sources=st.lists(st.tuples(st.sampled_from(STORES), st.integers(0, 5)), max_size=2),
        copies=st.lists(st.none() | st.integers(0, 4), max_size=2),
        tenant=st.sampled_from("aab"),
        priority=st.sampled_from([0, 0, 1]),
    )
    def arrive(
        self,
        n: int,
        family: int,
        held: int | None,
        sources: list[tuple[str, int]],
        copies: list[int | None],
        tenant: str = "",
        priority: int = 0,
    ) -> None:
        self.world.arrive(
            n,
            family,
            held=None if held is None else min(held, n // BT),
            sources=tuple(KVSource(*source) for source in sources),
            copies=tuple(events.WriteBackTarget(f"copy-{i}", some) for i, some in enumerate(copies)),
            tenant=tenant,
            priority=priority,
        )

    @rule(which=st.integers(0, 50))
    def leave(self, which: int) -> None:
        if self.world.clients:
            self.world.post(events.CancelPrefill(which % len(self.world.clients) + 1))

    @rule(seconds=st.sampled_from([0.0001, 0.002, 0.05, 3.0]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def loads(self) -> list[int]:
        return [io for io, action in self.world.ios.items() if isinstance(action, LoadBlocks)]

    @precondition(lambda self: self.loads())
    @rule(which=st.integers(0, 5), how=st.sampled_from(["layer", "layer", "whole", "lost", "failed", "damaged"]))
    def load(self, which: int, how: str) -> None:
        world, io = self.world, self.loads()[which % len(self.loads())]
        order = world.ios[io]
        assert isinstance(order, LoadBlocks)
        if io in world.cancelled:
            world.end(io, LoadEnded(0, failed=True))
        elif how == "layer" and world.loaded[io] < LAYERS:
            world.load_layer(io)
        elif how == "whole":
            world.load_all(io)
        elif how == "lost":
            some = world.loaded[io] == LAYERS and not world.settings.window_blocks
            whole = which % len(order.blocks) if some else 0
            world.end(io, LoadEnded(whole, missing=whole))
        else:
            world.end(io, LoadEnded(0, failed=how == "failed"))

    @rule(family=st.integers(0, 2), blocks=st.integers(1, 5))
    def copy(self, family: int, blocks: int) -> None:
        self.world.copy(family, blocks)

    def copies(self) -> list[int]:
        return [io for io, action in self.world.ios.items() if isinstance(action, actions.ReadReplica)]

    @precondition(lambda self: self.copies())
    @rule(blocks=st.integers(0, 5))
    def copied(self, blocks: int) -> None:
        self.world.end_copy(self.copies()[0], blocks)

    @rule(family=st.integers(0, 2), blocks=st.integers(1, 5))
    def lend(self, family: int, blocks: int) -> None:
        self.world.lend(family, blocks)

    @precondition(lambda self: self.world.lent)
    @rule(which=st.integers(0, 5))
    def take_back(self, which: int) -> None:
        self.world.take_back(list(self.world.lent)[which % len(self.world.lent)])

    def share(self, rng: random.Random) -> None:
        """Other instances read here, or something is copied from them."""
        if self.copies():
            self.copied(rng.randint(0, 5))
        elif len(self.world.lent) > 2:
            self.take_back(rng.randrange(6))
        else:
            rng.choice([self.lend, self.copy])(rng.randint(0, 2), rng.randint(1, 5))

    @precondition(lambda self: self.world.steps)
    @rule(which=st.integers(0, 2), gives_up=st.integers(0, 19))
    def compute(self, which: int, gives_up: int) -> None:
        """A step computes a layer, no further than the one before it; the first one may end."""
        world = self.world
        order = sorted(world.steps)
        io = order[which % len(order)]
        ahead = min((world.steps[other].layers for other in order if other < io), default=LAYERS)
        if world.can_compute(io) and world.steps[io].layers < ahead:
            world.compute_layer(io)
        elif io == order[0]:
            step = world.steps[io]
            if step.layers == LAYERS and not step.aborted and not step.sampled and gives_up % 2:
                world.sample(io)
            elif step.aborted or step.layers == LAYERS or not gives_up or io in world.cancelled:
                world.end_step(io, aborted=step.layers < LAYERS)

    @precondition(lambda self: len(self.world.ios) > len(self.world.steps))
    @rule(which=st.integers(0, 20), fails=st.integers(0, 9), damaged=st.integers(0, 4))
    def io(self, which: int, fails: int, damaged: int) -> None:
        """A transfer, a batch or a put ends."""
        world = self.world
        elsewhere = actions.RunStep | LoadBlocks | actions.ReadReplica
        found = [io for io, action in world.ios.items() if not isinstance(action, elsewhere)]
        if not found:
            return
        io = found[which % len(found)]
        action = world.ios[io]
        if not fails and not isinstance(action, actions.WriteBackBlocks):
            assert isinstance(action, actions.OpenTransfer | actions.SendSlices | actions.AwaitVerdict)
            known = damaged < len(world.clients[action.id].arrive.request.keys)
            world.end(io, events.IoFailed(damaged if known and isinstance(action, actions.AwaitVerdict) else None))
        else:
            world.finish_io(io)

    @invariant()
    def survives_a_snapshot(self) -> None:
        core = pickle.loads(pickle.dumps(self.world.core))
        assert core.digest() == self.world.core.digest()

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_rest()


PrefillMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=50)
TestPrefillMachine = PrefillMachine.TestCase


def walk(seed: int, stages: int) -> World:
    rng = random.Random(seed)
    machine = PrefillMachine()
    machine.begin(stages, window_blocks=seed % 3, spare=rng.choice([0, 1, 8]), states=rng.random() < 0.5)
    for _ in range(1000):
        choice = rng.random()
        if choice < 0.12 and len(machine.world.core.state.requests) < 8:
            sources = [(rng.choice(STORES), rng.randint(0, 5)) for _ in range(rng.randint(0, 2))]
            copies = [rng.choice([None, rng.randint(0, 4)]) for _ in range(rng.randint(0, 2))]
            held = rng.choice([None, 0, 1, 2])
            prompt = rng.randint(1, 5 * BT), rng.randint(0, 2)
            machine.arrive(*prompt, held, sources, copies, rng.choice("ab"), rng.choice([0, 0, 1]))
        elif choice < 0.14:
            machine.leave(rng.randrange(200))
        elif choice < 0.17:
            machine.share(rng)
        elif choice < 0.28:
            machine.wait(rng.choice([0.0001, 0.002, 0.05]))
        elif choice < 0.45 and machine.loads():
            machine.load(rng.randrange(6), rng.choice(["layer"] * 6 + ["whole", "lost", "failed", "damaged"]))
        elif choice < 0.75 and machine.world.steps:
            machine.compute(rng.randrange(3), rng.randrange(100))
        elif machine.world.ios:
            machine.io(rng.randrange(21), rng.randrange(60), rng.randrange(5))
    machine.teardown()
    return machine.world


def test_long_walks() -> None:
    """Deep states, which short examples hardly reach."""
    worlds = [walk(seed, stages) for seed in range(100, 105) for stages in (1, 2, 3)]
    kinds = {type(action) for world in worlds for action in world.done}
    assert {actions.DropSequenceSlice, actions.GiveUpStep, actions.WriteBackBlocks, actions.SendSlices} <= kinds
    assert any(isinstance(a, BlocksLent) and a.blocks for world in worlds for a in world.done)
    assert any(isinstance(a, actions.EndReplication) and a.blocks for world in worlds for a in world.done)
    shared = [a for world in worlds for a in world.done if isinstance(a, actions.RunStep) and len(a.chunks) > 1]
    assert any(order.gated for order in shared), "no loading request shared a step"
    ends = [client.end for world in worlds for client in world.clients.values()]
    assert sum(end is not None and end.outcome is actions.PrefillOutcome.DONE for end in ends) > 200


def test_stopped_steps_may_end_in_any_order() -> None:
    """When the engine dies, the step that was just handed to it may hear of that first."""
    world = World(staged(2))
    world.arrive(10 * BT)
    steps = sorted(world.steps)
    assert len(steps) == 3
    world.post(events.StopAllRequests())
    for io in reversed(steps):
        world.end_step(io)
    world.check_rest()


def test_stopping_ends_everything() -> None:
    world = World()
    for family in range(3):
        world.arrive(
            3 * BT,
            family,
            held=0,
            sources=(KVSource("store", 2),),
            copies=(events.WriteBackTarget("copy", None),),
        )
    world.post(events.StopAllRequests())
    assert all(client.end is not None for client in world.clients.values())
    world.settle()
    world.check_rest()
    late = world.arrive(BT)
    assert not late.accepted
