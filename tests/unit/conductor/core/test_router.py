"""A whole plan equals the one that predicts every instance.

The expected plan is made by the same cluster with a policy that asks for the prediction of each candidate and sorts
them; prefixes, decode instances and limits are counted again here. What is exact: where the instances of a class have
equal speeds, the plan is that of a full scan. Where they differ within a class, which is what classes are for, the
chosen one is the best of the eight that its class's speeds name: at most the classes' width worse than the best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.scheduling.fair_share import QueueKey as Turn
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.in_flight_prefixes import COMPARED_LENGTHS
from moonpool.conductor.core.latency_model import DecodeLatencyModel
from moonpool.conductor.core.load_ranking import SHORTLIST
from moonpool.conductor.core.prefill_pool import CLASS_WIDTH, TtftLimit
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import Candidates, PrefillChoice
from moonpool.conductor.placement.decode_policies.least_time import SPEED_NOISE
from moonpool.conductor.placement.policies import POLICIES
from tests.examples import examples

from .worlds import BLOCK_SIZE, SHAPE, World, facts

BLOCKS = 9
NOW = 2.0
By = Callable[[PrefillChoice], float]
SECONDS: Mapping[str, By] = {
    "kvcache_centric": lambda choice: choice.known_s,
    "cache_aware": lambda choice: choice.known_s,
    "load_balance": lambda choice: choice.queue_s,
}


def chain(blocks: int) -> list[bytes]:
    """The asked prompt's first keys."""
    return [bytes([number]) * 32 for number in range(1, blocks + 1)]


@dataclass(frozen=True)
class Scan:
    """A policy that predicts every candidate."""

    by: By
    limited: bool
    stages: Mapping[str, int]
    stores: bool

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        everyone = [(candidates.predict(place), place) for place in candidates]
        best = sorted((self.by(choice), place, choice) for choice, place in everyone)[:limit]
        rated = sorted((seconds, self.stages[place.name], place, choice) for seconds, place, choice in best)
        choices = [choice for *_, choice in rated]
        return candidates.keeping(choices) if self.limited else choices


@dataclass(frozen=True)
class Engine:
    """A drawn instance: its speeds, its pool, what it holds of the asked prompt, and how loaded it is."""

    speeds: Speeds
    stages: int
    total_blocks: int
    held: int
    load: float
    running: int


@dataclass(frozen=True)
class Scene:
    """A drawn cluster, prompts placed there that begin as the asked one does, and what is asked.

    `placed`: the number of the instance, how many blocks it has in common, and whether it has been computed since.
    `stores`: blocks that each kvstore holds, and how many of these are on SSD only.
    """

    prefills: tuple[Engine, ...]
    decodes: tuple[Engine, ...]
    stores: tuple[tuple[int, int], ...]
    placed: tuple[tuple[int, int, bool], ...]
    suspects: frozenset[str]
    within_s: float | None
    tokens: int
    peers: bool

    def world(self, policy: object) -> World:
        world = World(policy=policy, peers=self.peers)
        for kind, engines in (("prefill", self.prefills), ("decode", self.decodes)):
            for number, engine in enumerate(engines):
                name = f"{kind}-{number}"
                shape = {"speeds": engine.speeds, "stages": engine.stages, "total_blocks": engine.total_blocks}
                world.join(facts(name, max_num_batched_tokens=64, **shape))
                world.events(name, chain(engine.held))
                if kind == "prefill":
                    world.report(name, NOW - 1.0, drain_s=engine.load, taken=0)
                else:
                    room = max(0, engine.total_blocks - 10 * engine.running)
                    context = 100 * engine.running
                    world.report(name, running=engine.running, context_tokens=context, free_blocks=room)
        for number, (held, cooled) in enumerate(self.stores):
            world.join(facts(f"kvstore-{number}", reports_ssd=True))
            world.events(f"kvstore-{number}", chain(held), cooled=chain(held)[held - cooled :])
        self._place(world)
        return world

    def _place(self, world: World) -> None:
        cluster = world.cluster
        for number, (at, blocks, computed) in enumerate(self.placed):
            name = f"prefill-{at % len(self.prefills)}"
            claim = cluster.claim_prefill(name, 0.25, NOW - 0.5)
            own = [bytes([100 + number, block]) * 16 for block in range(3)]
            cluster.prefills.in_flight.placed(claim, name, [*chain(blocks), *own])
            if computed:
                cluster.prefills.computed(claim)
                cluster.release(claim, NOW - 0.25)
            cluster.claim_decode("decode-0", PlacedAnswer(50, 4))

    def soon(self, name: str) -> int:
        """Leading blocks that a prefill instance holds, or will hold by what is placed there."""
        number = int(name.removeprefix("prefill-"))
        in_flight = [blocks for at, blocks, _ in self.placed if at % len(self.prefills) == number]
        marks = [
            max((mark for mark in COMPARED_LENGTHS if mark <= min(blocks, self.full)), default=0)
            for blocks in in_flight
        ]
        return max([min(self.prefills[number].held, self.full), *marks])

    @property
    def full(self) -> int:
        """Full blocks of the asked prompt."""
        return self.tokens // BLOCK_SIZE

    def plan(self, world: World) -> RoutingDecision | type[Exception]:
        limit = TtftLimit(self.within_s, Turn("tenant", 0.0, 1000)) if self.within_s is not None else None
        keys = chain(self.full)
        try:
            return world.plan(
                self.tokens, answer_tokens=40, keys=keys, now=NOW, suspects=self.suspects, ttft_limit=limit
            )
        except (Unavailable, InvalidRequest) as error:
            return type(error)


BASES = [
    Speeds(prefill_per_token_s=1e-3, prefill_per_pair_s=1e-7, load_bytes_per_s=1e4, decode_base_s=0.01),
    Speeds(prefill_per_token_s=5e-3, load_bytes_per_s=1e3, decode_base_s=0.05, decode_per_sequence_s=1e-3),
    Speeds(prefill_base_s=0.01, prefill_per_token_s=2e-3, peer_bytes_per_s=3e3, transfer_bytes_per_s=1e4),
]
ENGINES = st.builds(
    Engine,
    speeds=st.sampled_from(BASES),
    stages=st.sampled_from([1, 1, 2, 4]),
    total_blocks=st.sampled_from([8, 50, 100]),
    held=st.integers(0, BLOCKS),
    load=st.sampled_from([0.0, 0.5, 1.25, 1.5, 4.0]),
    running=st.integers(0, 8),
)
STORES = st.integers(0, BLOCKS).flatmap(lambda held: st.tuples(st.just(held), st.integers(0, held)))
SCENES = st.builds(
    Scene,
    prefills=st.one_of(
        st.lists(ENGINES, min_size=3, max_size=SHORTLIST), st.lists(ENGINES, min_size=3 * SHORTLIST, max_size=40)
    ).map(tuple),
    decodes=st.lists(ENGINES, min_size=1, max_size=SHORTLIST).map(tuple),
    stores=st.lists(STORES, max_size=3).map(tuple),
    placed=st.lists(st.tuples(st.integers(0, 23), st.integers(1, BLOCKS), st.booleans()), max_size=8).map(tuple),
    suspects=st.sets(
        st.sampled_from([f"{kind}-{number}" for kind in ("prefill", "decode") for number in range(6)]), max_size=6
    ).map(frozenset),
    within_s=st.sampled_from([None, 0.05, 0.5, 2.0]),
    tokens=st.integers(1, BLOCKS * BLOCK_SIZE + 15),
    peers=st.booleans(),
)


@settings(max_examples=examples(150))
@given(SCENES, st.sampled_from(sorted(SECONDS)))
def test_a_plan_equals_that_of_a_full_scan(scene: Scene, name: str) -> None:
    policy = POLICIES[name]
    stages = {f"prefill-{number}": prefill.stages for number, prefill in enumerate(scene.prefills)}
    scan = Scan(SECONDS[name], name != "load_balance", stages, policy.stores)
    world = scene.world(policy)
    found, expected = scene.plan(world), scene.plan(scene.world(scan))
    if isinstance(found, type) or isinstance(expected, type):
        assert found == expected
        return
    assert found.prefill == expected.prefill
    seconds = [SECONDS[name](choice) for choice in expected.candidates]
    assert [SECONDS[name](choice) for choice in found.candidates] == pytest.approx(seconds), "the others that are shown"
    assert found.decodes == expected.decodes
    assert (found.sources, found.write_back, found.send_s) == (expected.sources, expected.write_back, expected.send_s)
    for choice in found.candidates:
        assert choice.local_blocks == scene.soon(choice.id)
    check_source(scene, found, policy.stores)
    if found.decodes:
        assert found.decodes[0].id == best_decode(scene, world, found)


def check_source(scene: Scene, plan: RoutingDecision, stores: bool) -> None:
    """A prefix is loaded from somebody who has it, and more of it than the instance will have itself."""
    choice = plan.prefill
    if not choice.source:
        assert choice.used_blocks == choice.local_blocks
        return
    kind, number = choice.source.split("-")
    held = {"kvstore": [blocks for blocks, _ in scene.stores], "prefill": [prefill.held for prefill in scene.prefills],
            "decode": [decode.held for decode in scene.decodes]}[kind][int(number)]  # fmt: skip
    assert stores
    assert kind == "kvstore" or (scene.peers and choice.source not in scene.suspects)
    assert choice.used_blocks == min(held, scene.full) > choice.local_blocks


def best_decode(scene: Scene, world: World, plan: RoutingDecision) -> str:
    """By predicting every decode instance: of those that did not fail and have room the one with least to do and most
    of the prompt, among those that are about as quick as the quickest."""
    model, pool = DecodeLatencyModel(plan.demand, SHAPE), world.cluster.decodes
    groups: dict[tuple[bool, bool], list[tuple[float, tuple[int, int, int, int, str]]]] = {}
    for number, decode in enumerate(scene.decodes):
        instance = pool.get(f"decode-{number}")
        assert instance is not None
        if decode.total_blocks >= plan.demand.total_blocks:
            need, held = model.blocks(instance.load.answer_tokens), min(decode.held, scene.full)
            choice = model.choice(instance.facts.id, instance.speeds, instance.there, held, need)
            group = instance.facts.id in scene.suspects, instance.available_blocks < need
            rank = (instance.sequences, -held, instance.context_tokens, instance.turn, instance.facts.id)
            groups.setdefault(group, []).append((choice.finish_s * pool.optimism_factor(instance), rank))
    first = groups[min(groups)]
    quickest = min(finish_s for finish_s, _ in first)
    return min(rank for finish_s, rank in first if finish_s <= SPEED_NOISE * quickest)[-1]


ALIKE = st.lists(
    st.tuples(st.floats(0.7, 1.4), st.sampled_from([0.0, 1.01, 1.05, 1.1, 1.3]), st.integers(0, BLOCKS)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=examples(100))
@given(ALIKE, st.sampled_from(["kvcache_centric", "cache_aware"]), st.integers(1, BLOCKS * BLOCK_SIZE + 15))
def test_the_width_of_a_class_is_what_a_plan_may_lose(
    drawn: list[tuple[float, float, int]], name: str, tokens: int
) -> None:
    """A member is within three quarters of a width of its class; so who is left out seems to be so much slower than it
    is, and who is taken as much quicker."""
    engines = tuple(Engine(BASES[0].slowed_prefill(factor), 1, 100, held, load, 0) for factor, load, held in drawn)
    scene = Scene(engines, (Engine(BASES[0], 1, 100, 0, 0.0, 0),), (), (), frozenset(), None, tokens, False)
    stages = {f"prefill-{number}": 1 for number in range(len(engines))}
    expected = scene.plan(scene.world(Scan(SECONDS[name], False, stages, False)))
    found = scene.plan(scene.world(POLICIES[name]))
    assert not isinstance(found, type)
    assert not isinstance(expected, type)
    best, taken = expected.prefill, found.prefill
    assert best.known_s <= taken.known_s <= best.queue_s + best.alone_s * CLASS_WIDTH**1.5 + 1e-9
    if len(engines) <= SHORTLIST:
        assert taken == best
