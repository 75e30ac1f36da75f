"""Decode's shell, on an event loop in virtual time with an emulated engine, decides as the simulator does.

The simulator serves a small seeded trace and notes what its decode core was told and what it answered. The service's
own shell, driver and journal are told the same at the same times, as far as it comes from others; copies to DRAM, loads
and writes take as long as they took there. Steps, tokens and ends of answers are their own. Every decision is the same,
at the same time.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from moonpool.kv.keys import BlockKey
from moonpool.scheduling.state_machine import IoEnded
from services.conductor.core.events import ReserveGranted
from services.decode.core import actions
from services.decode.core.events import AdoptRequest, ComputePrompt, StreamClosed, TransferProgress
from services.decode.core.settings import Preemption
from simulator.clock import SimulatedWorld, ps
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig, DecodeMemory, Runs
from simulator.cluster.decode import DecodeListener, SimulatedDecode
from simulator.cluster.requests import PlacedSequence, Request, Resume
from simulator.network import SimulatedNetwork
from tests.unit.simulator.cluster.decode_service import played
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.scripts import BT, ONE_BY_ONE, SEED, Noted, requests, simulated

NAMES = {1: "conductor-0/1", 2: "conductor-1/1"}
"""Of conductors by their streams."""
RUNS = Runs(longest=2 * BT + 5, ahead=2 * BT + 5)
"""As services have them with engines of one stage."""


BY_SEEDS = pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
"""Slow tests run with others too."""


def count(noted: list[Noted], *kinds: type) -> int:
    """Actions of these kinds."""
    return sum(isinstance(action, kinds) for one in noted for action in one.actions)


def config_of(way: Preemption, blocks: int, kvstore: int = 0) -> ClusterConfig:
    """A decode instance that swaps at 1.37 MB a second."""
    memory = DecodeMemory(preemption=way, assumed_answer_tokens=2, step_tokens=40, swap_bytes=12 * BT * 100)
    speeds = replace(PROFILE.speeds, load_bytes_per_s=1.37e6)
    return ClusterConfig(
        profile=replace(PROFILE, speeds=speeds), prefill=1, decode=1, kvstore=kvstore, block_tokens=BT, step_tokens=256,
        pool_blocks=blocks, max_batch=6, memory=memory, seed=SEED,
    )  # fmt: skip


@BY_SEEDS
@pytest.mark.parametrize("way", [Preemption.CACHE, Preemption.RECOMPUTE])
@pytest.mark.parametrize("blocks", [24, 400])
def test_decides_as_the_simulator_does(way: Preemption, blocks: int, seed: int, tmp_path: Path) -> None:
    """In a pool for all, and in one for a few, with refusals and preemption."""
    config = config_of(way, blocks)
    expected = simulated(config, requests(40, random.Random(seed)), "d0", ONE_BY_ONE)
    played(config, ONE_BY_ONE, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    assert (count(expected, actions.ReservationRefused) > 3) == (blocks == 24)
    assert any(action.chunks for one in expected for action in one.actions if isinstance(action, actions.StartRun)) == (
        blocks == 24
    )


@BY_SEEDS
@pytest.mark.parametrize(
    ("way", "kvstore", "moved"),
    [
        (Preemption.SWAP, 0, actions.SwapIn),
        (Preemption.STORE, 1, actions.LoadStoredBlocks),
        (Preemption.AUTO, 1, actions.StoreBlock),
    ],
)
def test_swaps_writes_and_loads_as_the_simulator_does(
    way: Preemption, kvstore: int, moved: type, seed: int, tmp_path: Path
) -> None:
    """In a pool for a few, whose blocks go to DRAM or to a kvstore and come back."""
    config = config_of(way, 24, kvstore)
    expected = simulated(config, requests(40, random.Random(seed)), "d0", ONE_BY_ONE)
    played(config, ONE_BY_ONE, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    assert count(expected, moved) > 3
    assert any(isinstance(one.event, IoEnded) for one in expected)


def ahead(noted: list[Noted]) -> int:
    """Blocks that were granted for later steps of a run: those that come last before it, and not to who joins it."""
    count = 0
    for one in noted:
        for before, action in pairwise(one.actions):
            count += isinstance(before, actions.AppendBlock) and isinstance(action, actions.StartRun)
    return count


@BY_SEEDS
@pytest.mark.parametrize(
    ("way", "blocks", "kvstore"),
    [
        (Preemption.CACHE, 400, 1),
        (Preemption.CACHE, 24, 0),
        (Preemption.RECOMPUTE, 24, 0),
        (Preemption.SWAP, 24, 0),
        (Preemption.STORE, 24, 1),
    ],
)
def test_takes_runs_as_the_simulator_does(
    way: Preemption, blocks: int, kvstore: int, seed: int, tmp_path: Path
) -> None:
    """As with real engines: over borders of blocks, which are granted ahead, until somebody comes, ends or is late."""
    config = replace(config_of(way, blocks, kvstore), deadline_s=1.5)
    expected = simulated(config, requests(40, random.Random(seed)), "d0", RUNS)
    played(config, RUNS, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    orders = [action for one in expected for action in one.actions if isinstance(action, actions.StartRun)]
    assert sum(order.steps > BT for order in orders) > 10
    assert min(count(expected, actions.StopRun), ahead(expected), count(expected, actions.RequestAborted)) > 10
    again = blocks == 24 and way in (Preemption.CACHE, Preemption.RECOMPUTE)
    assert any(order.chunks for order in orders) == again
    assert (count(expected, actions.SwapIn) > 1) == (way is Preemption.SWAP)
    assert (count(expected, actions.LoadStoredBlocks) > 1) == (way is Preemption.STORE)


@BY_SEEDS
@pytest.mark.parametrize(("runs", "choices"), [(ONE_BY_ONE, 3), (RUNS, 1)])
def test_conductors_take_over_as_in_the_simulator(runs: Runs, choices: int, seed: int, tmp_path: Path) -> None:
    """Sequences run on when theirs is lost, and another one has them. Some rests of prompts are computed here."""
    config = config_of(Preemption.CACHE, 400)
    memory = replace(config.memory, lease_s=3.0)
    config = replace(config, conductors=2, decode_prompt_tokens=5 * BT, memory=memory)
    trace = [
        replace(one, choices=1 + number % choices, input_length=max(BT, one.input_length))
        for number, one in enumerate(requests(40, random.Random(seed), shared=0))
    ]

    def lose(cluster: Cluster) -> None:
        for at_s, name in ((0.7, "c0"), (1.9, "c1")):
            cluster.world.at(ps(at_s), lambda name: cluster.crash(name, 1.0), name)

    expected = simulated(config, trace, "d0", runs, lose)
    played(config, runs, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    heard = Counter(type(one.event) for one in expected)
    assert min(heard[StreamClosed], heard[AdoptRequest], heard[TransferProgress]) > 1
    assert (heard[ComputePrompt] > 1) == (choices == 1)
    assert (count(expected, actions.StopRun) > 10) == (choices == 1)


class Alone:
    """A simulated decode instance by itself, which two conductors use. What its core has heard and decided is noted."""

    def __init__(self, config: ClusterConfig, runs: Runs) -> None:
        self.noted: list[Noted] = []
        self.is_lost = False
        self.world = SimulatedWorld()
        ears = DecodeListener(lambda *_: None, lambda *_: None, lambda *_: None, lambda: None)
        self.instance = SimulatedDecode(self.world, SimulatedNetwork(self.world), config, "d0", (), ears, runs)
        self.instance.host.heard = lambda now, event, decided: self.noted.append(Noted(now, event, list(decided)))
        for stream in NAMES:
            self.instance.stream_opened(stream, NAMES[stream])

    def ask(self, sequence: PlacedSequence, promised: Callable[[PlacedSequence, int], None]) -> None:
        """The first conductor asks for room when a request comes."""

        def ask() -> None:
            answer = self.instance.reserve(sequence, NAMES[1])
            if isinstance(answer, ReserveGranted):
                promised(sequence, answer.target.transfer_id)

        self.world.at(sequence.request.arrived, lambda _: ask())

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Does something after a while."""

        def do(_: object) -> None:
            what()

        self.world.after(ps(seconds), do)

    def deliver(self, transfer: int) -> None:
        """The KV comes, and the first tokens."""
        self.later(0.0031, lambda: self.instance.open(transfer))
        self.later(0.0062, lambda: self.instance.kv_whole(transfer))
        self.later(0.0093, lambda: self.start(transfer))

    def start(self, transfer: int, *, compute: bool = False) -> None:
        """The first conductor starts a sequence, if it is there."""
        if not self.is_lost:
            self.instance.start(1, transfer, compute=compute)

    def lose(self) -> None:
        """The first conductor is lost."""
        self.is_lost = True
        self.instance.stream_closed(1)

    def run(self) -> list[Noted]:
        """Until nothing happens any more."""
        self.world.run()
        self.instance.check_at_rest()
        return self.noted


def sequences(count: int, most: int, rng: random.Random, blocks: int = 5) -> list[PlacedSequence]:
    """With up to three blocks, and up to so many answers of up to so many blocks, one after the other."""
    found, at = [], 0.0
    for number in range(count):
        at += rng.expovariate(12.0)
        tokens, answer = rng.randint(1, 3 * BT), rng.randint(2, blocks * BT)
        keys = tuple(BlockKey((number << 32 | block).to_bytes(32, "little")) for block in range(tokens // BT))
        request = Request(number, ps(at), tokens, answer, keys)
        found.append(PlacedSequence(request, f"r{number}", tokens, answer, width=rng.randint(1, most)))
    return found


def in_groups(config: ClusterConfig, rng: random.Random) -> list[Noted]:
    """With up to three answers to a prompt."""
    alone = Alone(config, ONE_BY_ONE)
    for sequence in sequences(30, 3, rng):
        alone.ask(sequence, lambda _, transfer: alone.deliver(transfer))
    return alone.run()


def handed_over(config: ClusterConfig, runs: Runs, rng: random.Random) -> list[Noted]:
    """With sequences that the second conductor takes, with and without right, also some time after the first is lost.

    Some have no KV sent: their prompts are computed at decode.
    """
    alone, wanted = Alone(config, runs), sequences(30, 1 if runs.longest > 1 else 2, rng, blocks=40)

    def promised(sequence: PlacedSequence, transfer: int) -> None:
        if sequence.width == 1 and rng.random() < 0.3:
            alone.later(0.0027, lambda: alone.start(transfer, compute=True))
        else:
            alone.deliver(transfer)
        for fence in rng.choices((0, 1, 2), k=rng.randint(0, 2)):
            order = Resume(transfer, sequence.id, (0,) * sequence.width, fence)
            alone.later(rng.uniform(0.02, 12.0), partial(alone.instance.resume, 2, order))
        if rng.random() < 0.2:
            alone.later(rng.uniform(0.02, 0.5), lambda: alone.instance.cancel(transfer))

    for sequence in wanted:
        alone.ask(sequence, promised)
    alone.world.at(wanted[-1].request.arrived + ps(0.005), lambda _: alone.lose())
    return alone.run()


@BY_SEEDS
@pytest.mark.parametrize(("runs", "blocks"), [(ONE_BY_ONE, 1000), (RUNS, 90)])
def test_adopts_fences_and_parks_as_the_simulator_does(runs: Runs, blocks: int, seed: int, tmp_path: Path) -> None:
    """Who is adopted late was parked, and gets room anew; what has ended is told again, and forgotten in the end."""
    config = config_of(Preemption.CACHE, blocks)
    expected = handed_over(config, runs, random.Random(seed))
    played(config, runs, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    parked, adopted, fenced = [
        {action.id for one in expected for action in one.actions if isinstance(action, kind)}
        for kind in (actions.RequestParked, actions.RequestAdopted, actions.FenceConductor)
    ]
    assert all((parked & adopted, parked - adopted, fenced & adopted, fenced - adopted))
    assert Counter(type(one.event) for one in expected)[ComputePrompt] > 1
    assert (count(expected, actions.StopRun) > 10) == (runs is RUNS)


@BY_SEEDS
@pytest.mark.parametrize(
    ("way", "blocks"), [(Preemption.RECOMPUTE, 400), (Preemption.RECOMPUTE, 26), (Preemption.SWAP, 28)]
)
def test_several_answers_to_a_prompt_as_in_the_simulator(
    way: Preemption, blocks: int, seed: int, tmp_path: Path
) -> None:
    """Forked from shared blocks, with copies of part-filled ones; in a pool for a few they are preempted together."""
    config = config_of(way, blocks)
    expected = in_groups(config, random.Random(seed))
    played(config, ONE_BY_ONE, expected, tmp_path)
    if seed != SEED:
        return  # by others less may happen
    runs = [action for one in expected for action in one.actions if isinstance(action, actions.StartRun)]
    assert sum(len(run.copies) for run in runs) > 10
    assert any(run.chunks for run in runs) == (way is Preemption.RECOMPUTE and blocks == 26)
    assert (count(expected, actions.SwapIn) > 3) == (way is Preemption.SWAP)
