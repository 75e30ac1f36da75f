"""Random requests, evictions, losses and restarts: an engine is never promised to hold more than it holds."""

import os
import random

import pytest

from moonpool.interop.kv_events.feed import Interrupted
from tests.unit.interop.adapter.model_engine import ModelEngine
from tests.unit.interop.kv_events.follower import Follower

SEEDS = range(6)
STEPS = 250


def prompt(draw: random.Random) -> list[int]:
    """Prompts that share prefixes."""
    tokens = [draw.randrange(3)] * 4
    for _ in range(draw.randrange(5)):
        tokens += [draw.randrange(3)] * 4
    return tokens + [9] * draw.randrange(4)


def act(draw: random.Random, engine: ModelEngine) -> None:
    """One engine step."""
    for _ in range(draw.randrange(1, 4)):
        kind = draw.random()
        if kind < 0.03:
            engine.clear()
        elif kind < 0.13 and engine.held[-1]:
            engine.evict(engine.groups - 1, draw.choice(list(engine.held[-1])))
        elif kind < 0.2:
            engine.compute(prompt(draw), lora="adapter")
        else:
            engine.compute(prompt(draw), draw.choice(["", "a", "b"]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_prefix_is_promised_that_the_engine_does_not_hold(seed: int, groups: int) -> None:
    seed += int(os.environ.get("MOONPOOL_FUZZ_SEED", "0"))
    print(f"MOONPOOL_FUZZ_SEED={seed}")
    draw = random.Random(seed)
    engine = ModelEngine(
        groups=groups, maps=draw.random() < 0.5, digests=draw.random() < 0.5, buffer=draw.choice([3, 1000])
    )
    follower = Follower(engine, max_names=draw.choice([4, 64]))
    for _ in range(STEPS):
        if draw.random() < 0.02:
            engine.restart()
        act(draw, engine)
        batch = engine.publish()
        if draw.random() < 0.02:
            follower.handle(Interrupted())
        if batch is None or draw.random() < 0.05:
            continue  # the batch is lost
        follower.receive(batch)
        assert follower.feed.settled
        for tenant in ("", "a", "b"):
            tokens = prompt(draw)
            assert follower.match(tokens, tenant) <= engine.hit(tokens, tenant)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_that_the_engine_holds_is_told_when_nothing_is_lost_for_good(seed: int) -> None:
    seed += int(os.environ.get("MOONPOOL_FUZZ_SEED", "0"))
    print(f"MOONPOOL_FUZZ_SEED={seed}")
    draw = random.Random(seed)
    engine = ModelEngine(maps=draw.random() < 0.5, digests=draw.random() < 0.5)
    follower = Follower(engine)
    for _ in range(STEPS):
        if draw.random() < 0.01:
            engine.restart()
            follower.handle(Interrupted())
        act(draw, engine)
        batch = engine.publish()
        if batch is None or draw.random() < 0.2:
            continue  # the batch is lost, and comes with the next replay
        follower.receive(batch)
        for tenant in ("", "a", "b"):
            tokens = prompt(draw)
            assert follower.match(tokens, tenant) == engine.hit(tokens, tenant)
