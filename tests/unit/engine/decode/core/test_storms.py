"""Storms of all events at once over a crowded pool: whatever a step, a write, a reader or a copy reads is right.

`World` looks at each read, and at each block with a key after each event.
"""

import functools
import random
from collections import Counter
from typing import Any

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.kv_deletion import DeleteKV
from moonpool.engine.decode.core.actions import FenceConductor, RequestAdopted, StoreBlock, SwapIn, SwapOut
from moonpool.engine.decode.core.events import AbortRequest, SearchRules, StreamOpened
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config

SHAPES = ((0, False), (1, False), (3, False), (1, True))
"""Blocks in a window, and whether windowed layers have a recurrent state."""

QUICK = range(12)
"""Seeds that `make test` walks, with each shape and each way of preemption; `make test-all` walks all."""


class Storm:
    """One walk, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"storm {seed}")
        window, states = SHAPES[seed % len(SHAPES)]
        settings: dict[str, object] = {
            "preemption": list(Preemption)[seed // len(SHAPES) % len(Preemption)],
            "swap_blocks": rng.choice([12, 40]),
            "chunked_prefill_size": rng.choice([20, 40]),
            "assumed_answer_tokens": 4,
            "grace_s": 1.0,
            "log_ttl_s": 4.0,
            "draft_tokens": 0 if states else rng.choice([0, 0, 5]),
        }
        if window:
            settings |= {"window_blocks": window, "window_slots": 3 * (window + 2) + rng.choice([4, 12])}
            settings |= {"recurrent": states, "states_alone": states}
        ahead = rng.choice([0, BT + 2])
        settings |= {"run_steps": max(1, ahead), "ahead_steps": ahead, "preempt_every": rng.choice([0, 5, 11])}
        self.world = World(config(rng.choice([14, 20]), **settings))
        self.stream, self.fence = 1, 0
        self.seen = Counter[str]()

    @property
    def conductor(self) -> str:
        return "conductor" if self.stream == 1 else f"conductor {self.stream}"

    def run(self, events: int) -> None:
        """So many draws, then everything comes to rest."""
        for _ in range(events):
            draw = self.rng.random()
            if draw < 0.07:
                self.arrive()
            elif draw < 0.1:
                self.share()
            elif draw < 0.11:
                self.leave()
            elif draw < 0.125:
                self.conductors()
            elif draw < 0.128:
                self.delete()
            else:
                self.go_on()
        self.rest()

    def arrive(self) -> None:
        """Somebody asks; prompts share prefixes, and continue what others have answered."""
        rng, world = self.rng, self.world
        asked = prompt(rng.randint(1, 4 * BT), rng.randrange(3))
        if len(asked) > BT and rng.random() < 0.3:
            asked = asked[:-BT] + prompt(BT, 9)
        kind = rng.random()
        options: dict[str, Any] = {"stores": rng.randint(0, 2), "conductor": self.conductor, "tenant": rng.choice("ab")}
        if kind < 0.6:
            answer = rng.randint(2, 8 * BT)
            number = world.reserve(asked, answer, total=len(asked) + 9 * BT, resumable=True, **options)
        elif kind < 0.85:
            answers = tuple(rng.randint(1, 3 * BT) for _ in range(rng.randint(2, 3)))
            number = world.reserve(asked, answers, total=len(asked) + 3 * BT, resumable=True, **options)
        else:
            beams = (rng.randint(1, 2 * BT),) * rng.randint(1, 3)
            number = world.reserve(asked, beams, search=SearchRules(1.0, "never"), **options)
        if number is not None and kind < 0.6 and rng.random() < 0.4:
            world.compute(number, self.stream)
            self.seen["computed here"] += number in world.core.requests
            if number in world.core.requests:
                world.started.add(number)

    def share(self) -> None:
        """Another instance reads here."""
        world = self.world
        if len(world.lent) > 1 or (world.lent and self.rng.random() < 0.5):
            world.take_back(self.rng.choice(sorted(world.lent)))
        elif world.sequences:
            chain = tuple(self.rng.choice(list(world.sequences.values())).keys())[: self.rng.randint(1, 6)]
            number = world.lend(chain, self.rng.randint(0, len(chain)))
            self.seen["lent"] += bool(world.lent[number][1])

    def leave(self) -> None:
        """One client leaves, or many at once."""
        numbers = list(self.world.core.requests)
        count = len(numbers) if self.rng.random() < 0.1 else 1
        for number in self.rng.sample(numbers, min(count, len(numbers))):
            self.seen["left"] += 1
            self.world.post(AbortRequest(number, "cancelled"))

    def conductors(self) -> None:
        """A conductor is lost, time passes, or the next one resumes a request."""
        world, draw = self.world, self.rng.random()
        if draw < 0.2:
            world.close(self.stream)
            self.stream += 1
            world.post(StreamOpened(self.stream, self.conductor))
        elif draw < 0.5:
            world.tick(0.6)
        elif world.started:
            self.fence += 1
            self.world.adopt(self.rng.choice(sorted(world.started)), self.stream, self.fence)

    def delete(self) -> None:
        """A tenant's KV is deleted: nobody finds it any more."""
        self.world.post(DeleteKV(len(self.world.events), KVSelection(tenants=frozenset("a"))))
        self.seen["deleted"] += 1

    def go_on(self) -> None:
        """Something that can happen next, happens; some things fail."""
        rng, world = self.rng, self.world
        waiting = [
            n for n, r in world.core.requests.items() if r.status in (RequestStatus.PROMISED, RequestStatus.RECEIVED)
        ]
        if waiting and rng.random() < 0.3:
            number = rng.choice(waiting)
            if world.core.requests[number].status is RequestStatus.RECEIVED:
                self.start(number)
            elif rng.random() < 0.15:
                self.seen["torn"] += 1
                world.tear(number, rng.randint(0, 3))
            else:
                world.arrive(number)
        elif world.ios and rng.random() < 0.4:
            io = rng.choice(sorted(world.ios))
            failed = rng.random() < 0.15
            self.seen[f"{type(world.ios[io]).__name__} {'failed' if failed else 'ended'}"] += 1
            world.end_io(io, ok=not failed)
        elif world.run is not None and rng.random() < 0.02:
            self.seen["given up"] += 1
            world.abort()
        elif world.run is not None:
            self.seen["copied"] += len(world.run.copies)
            world.step()

    def start(self, number: int) -> None:
        """The first token is known, perhaps more of them."""
        known = self.rng.choice([0, 0, 0, 1, BT, 2 * BT + 1])
        self.seen["known"] += known > 0
        self.world.start(number, self.stream, 0 if self.world.asked[number].search else known)

    def rest(self) -> None:
        world = self.world
        for number in list(world.lent):
            world.take_back(number)
        for number, request in list(world.core.requests.items()):
            if request.status is RequestStatus.PROMISED:
                world.arrive(number)
            if number in world.core.requests and request.status is RequestStatus.RECEIVED:
                world.start(number, self.stream)
        for seconds in (0.0, 1.5, 5.0):  # orphans park, and what is kept goes
            world.tick(seconds)
            world.work()
        world.assert_at_rest()
        world.assert_reruns()
        assert not world.logged


@functools.cache
def storm_of(seed: int) -> Storm:
    """A seed's storm, which is over."""
    storm = Storm(seed)
    storm.run(1200)
    return storm


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in range(48)]
)
def test_reads_are_right_in_a_storm(seed: int) -> None:
    print(f"seed {seed}")
    storm_of(seed)


def test_storms_meet_everything() -> None:
    """What is to be read right does happen."""
    storms = [storm_of(seed) for seed in (2, 9, 11)]
    seen = sum((storm.seen for storm in storms), Counter[str]())
    for kind in ("computed here", "lent", "left", "deleted", "torn", "given up", "copied", "known"):
        assert seen[kind], kind
    for action in (SwapOut, SwapIn, StoreBlock):
        assert seen[f"{action.__name__} ended"], action
    actions = {type(action) for storm in storms for action in storm.world.actions}
    assert {RequestAdopted, FenceConductor} <= actions
