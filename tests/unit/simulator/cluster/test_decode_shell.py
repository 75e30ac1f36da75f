"""Decode's shell, on an event loop in virtual time with an emulated engine, decides as the simulator does.

The simulator serves a small seeded trace and notes what its decode core was told and what it answered. The service's
own shell, driver and journal are told the same requests, transfers and starts at the same times; copies to DRAM, loads
and writes take as long as they took there. Steps, tokens and ends of answers are their own. Every decision is the same,
at the same time.
"""

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.kernel import Ended
from moonpool.cost import Speeds
from moonpool.drive.journal import JournalWriter
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import Overloaded
from moonpool.kv.keys import BlockKey
from moonpool.sampling import SamplingParams
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import LayerDone, Step, StepResult
from moonpool.streams.credits import Traffic
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import decode_pb2, kv_pb2
from services.conductor.core.messages import Promised
from services.decode.core import actions
from services.decode.core.config import Preemption
from services.decode.core.events import Arrived, Open, Reserve, Start, Stop, StreamOpened
from services.decode.core.machine import DecodeCore
from services.decode.live import LiveRequest
from services.decode.shell import DecodeShell
from services.decode.subscriber import Subscriber
from simulator.cluster.config import ClusterConfig, DecodeMemory
from simulator.cluster.decode import DecodeInstance, Ears
from simulator.cluster.requests import Request, Sequence
from simulator.cluster.settings import core_config
from simulator.kernel.clock import World, ps
from simulator.kernel.links import Network
from tests.unit.fakes.engine import FakeEngine
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.scripts import (
    BT,
    SEED,
    Noted,
    assert_same,
    decided,
    ends,
    journalled,
    requests,
    simulated,
)
from tests.unit.simulator.cluster.virtual_loop import VirtualLoop, run_virtually
from tests.unit.streams.fakes import ROOT

CAPACITY = 1 << 20


class TimedEngine(FakeEngine):
    """Steps take the time that an emulated engine's do; tokens are zeros."""

    def __init__(self, blocks: int, speeds: Speeds) -> None:
        super().__init__(blocks)
        self._speeds = speeds

    async def run(self, step: Step, *, on_layer: Any = None, on_step: Any = None) -> StepResult:
        assert on_layer is None or on_layer is LayerDone
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(step_seconds(self._speeds, step, decode=True))
        tokens = tuple(None if sequence.sample is None else 0 for sequence in step.sequences)
        return StepResult(tokens, False, round(begun * 1e9), round(loop.time() * 1e9))


class Outside:
    """Kvstores and DRAM: copies, writes and loads end as they did in the simulator. It is write-back and reader."""

    sessions, traffic = 0, Traffic()

    def __init__(self, script: list[Noted]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, over = loop, ends(script)
        self._stores: deque[tuple[float, Any]] = deque()
        self._loads: deque[tuple[float, Any]] = deque()
        for action in (action for noted in script for action in noted.actions):
            match action:
                case actions.SwapOut(io) | actions.SwapIn(io):
                    loop.jobs.append(over[io][0])
                case actions.Store(io):
                    self._stores.append(over[io])
                case actions.Load(io):
                    self._loads.append(over[io])

    def room(self, store: kv_pb2.Instance, blocks: int) -> int:
        return blocks

    def submit(
        self, store: kv_pb2.Instance, keys: Listed[BlockKey], parents: Listed[BlockKey], tenant: str,
        blocks: Listed[int], over: Callable[[bool], None],
    ) -> None:  # fmt: skip
        assert len(keys) == len(parents) == len(blocks) == 1
        when, result = self._stores.popleft()
        self._loop.call_at(when, over, result.ok)

    async def read(self, keys: Listed[BlockKey], **how: Any) -> int:
        when, result = self._loads.popleft()
        await asyncio.sleep(when - self._loop.time())
        assert not result.failed
        return int(result.blocks)

    async def aclose(self) -> None:
        assert not self._loads


class Service:
    """The shell of a decode instance, told by a script."""

    def __init__(self, config: ClusterConfig, script: list[Noted], journal: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._script = script
        self.engine = TimedEngine(config.blocks, config.profile.speeds)
        outside: Any = Outside(script)
        self.shell = DecodeShell(
            DecodeCore(core_config(config, run_steps=1)), self.engine, CAPACITY, outside, lambda _: outside,
            Recorder("decode-0", None), lambda *, soon=False: None,
            JournalWriter(journal, "decode-0", 1 << 30), self._loop.time,
        )  # fmt: skip
        self._subscriber = Subscriber(kv_pb2.Instance())
        self.shell.subscribe(self._subscriber)
        self._lives: dict[int, LiveRequest] = {}

    async def play(self) -> None:
        """Tells the shell what comes from outside; the rest happens by itself."""
        work = asyncio.create_task(self.shell.run())
        for noted in self._script:
            if isinstance(noted.event, Reserve | Open | Arrived | Start | Stop):
                await asyncio.sleep(noted.now - self._loop.time())
                self._tell(noted.event)
        await self.shell.empty.wait()
        await asyncio.sleep(self._script[-1].now + 1.0 - self._loop.time())
        self.shell.close()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        self.engine.pool.close()

    def _tell(self, event: Any) -> None:
        match event:
            case Reserve():
                self._reserve(event)
            case Open(number, older):
                self.shell.open(self._lives[number], lambda _: None, older=older)
            case Arrived(number):
                self.shell.arrived(self._lives[number])
            case Start(number):
                live = self._lives[number]
                message = decode_pb2.StartSequence(
                    request_id=live.request_id, transfer_id=live.id, generation=live.transfer.generation,
                    further_token_ids=range(1, 1 + len(event.others)),  # so that no two have a block in common
                )  # fmt: skip
                self.shell.start(self._subscriber, message)
            case Stop(number):
                self.shell.end(self._lives[number], event.why)

    def _reserve(self, event: Reserve) -> None:
        params = SamplingParams(max_tokens=event.total_tokens - event.prompt_tokens, n=event.width)
        sampling = SequenceSampling.of(params, event.prompt_tokens, ())
        tokens = array("i", [event.id] * event.tokens)  # so that no two answers have a block in common
        incoming = IncomingRequest(f"r{event.id}", tokens, event.keys, BlockKey(ROOT), f"t{event.id}", sampling)
        stores = [kv_pb2.Instance(id=f"s{number}", address=f"s{number}:1") for number in range(event.stores)]
        with suppress(Overloaded):  # the core's answer is in the journal
            promised, _ = self.shell.reserve(
                incoming, stores, event.tbt_slo_s, None, event.starts_in_s,
                secret=bytes(16) if event.resumable else b"", fence=event.fence,
            )  # fmt: skip
            self._lives[event.id] = promised


def same_reasons(noted: list[Noted]) -> list[Noted]:
    """With one reason for all ends of answers: the simulator has one only."""
    return [
        Noted(
            one.now, one.event, [replace(it, reason=0) if isinstance(it, actions.Finish) else it for it in one.actions]
        )
        for one in noted
    ]


def played(config: ClusterConfig, expected: list[Noted], folder: Path) -> None:
    """The shell decides the same."""

    async def play() -> None:
        await Service(config, expected, folder).play()

    run_virtually(play())
    found, wanted = same_reasons(journalled(folder)), same_reasons(expected)
    assert_same(decided(found, StreamOpened), decided(wanted, StreamOpened))


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


@pytest.mark.parametrize("way", [Preemption.CACHE, Preemption.RECOMPUTE])
@pytest.mark.parametrize("blocks", [24, 400])
def test_decides_as_the_simulator_does(way: Preemption, blocks: int, tmp_path: Path) -> None:
    """In a pool for all, and in one for a few, with refusals and preemption."""
    print(f"seed {SEED}")
    config = config_of(way, blocks)
    expected = simulated(config, requests(40, random.Random(SEED)), "d0")
    played(config, expected, tmp_path)
    assert (count(expected, actions.Refused) > 3) == (blocks == 24)
    assert any(action.chunks for one in expected for action in one.actions if isinstance(action, actions.Run)) == (
        blocks == 24
    )


@pytest.mark.parametrize(
    ("way", "kvstore", "moved"),
    [
        (Preemption.SWAP, 0, actions.SwapIn),
        (Preemption.STORE, 1, actions.Load),
        (Preemption.AUTO, 1, actions.Store),
    ],
)
def test_swaps_writes_and_loads_as_the_simulator_does(
    way: Preemption, kvstore: int, moved: type, tmp_path: Path
) -> None:
    """In a pool for a few, whose blocks go to DRAM or to a kvstore and come back."""
    print(f"seed {SEED}")
    config = config_of(way, 24, kvstore)
    expected = simulated(config, requests(40, random.Random(SEED)), "d0")
    played(config, expected, tmp_path)
    assert count(expected, moved) > 3
    assert any(isinstance(one.event, Ended) for one in expected)


def in_groups(config: ClusterConfig, rng: random.Random) -> list[Noted]:
    """What the core of a simulated instance heard and decided that makes up to three answers to a prompt."""
    noted: list[Noted] = []
    world = World()
    ears = Ears(lambda *_: None, lambda *_: None, lambda *_: None, lambda: None)
    instance = DecodeInstance(world, Network(world), config, "d0", (), ears, longest_run=1)
    instance.host.heard = lambda now, event, decided: noted.append(Noted(now, event, list(decided)))
    instance.stream_opened(1, "conductor")

    def go_on(came: tuple[int, int]) -> None:
        stage, transfer = came
        if stage == 1:
            instance.open(transfer)
        elif stage == 2:
            instance.kv_whole(transfer)
        else:
            instance.start(1, transfer)

    def ask(sequence: Sequence) -> None:
        answer = instance.reserve(sequence, "conductor")
        if isinstance(answer, Promised):
            for stage in range(1, 4):
                world.after(ps(0.0031 * stage), go_on, (stage, answer.target.transfer_id))

    at = 0.0
    for number in range(30):
        at += rng.expovariate(12.0)
        tokens, answer = rng.randint(1, 3 * BT), rng.randint(2, 5 * BT)
        keys = tuple(BlockKey((number << 32 | block).to_bytes(32, "little")) for block in range(tokens // BT))
        request = Request(number, ps(at), tokens, answer, keys)
        world.at(ps(at), ask, Sequence(request, f"r{number}", tokens, answer, width=rng.randint(1, 3)))
    world.run()
    instance.check_at_rest()
    return noted


@pytest.mark.parametrize(
    ("way", "blocks"), [(Preemption.RECOMPUTE, 400), (Preemption.RECOMPUTE, 26), (Preemption.SWAP, 28)]
)
def test_several_answers_to_a_prompt_as_in_the_simulator(way: Preemption, blocks: int, tmp_path: Path) -> None:
    """Forked from shared blocks, with copies of part-filled ones; in a pool for a few they are preempted together."""
    print(f"seed {SEED}")
    config = config_of(way, blocks)
    expected = in_groups(config, random.Random(SEED))
    played(config, expected, tmp_path)
    runs = [action for one in expected for action in one.actions if isinstance(action, actions.Run)]
    assert sum(len(run.copies) for run in runs) > 10
    assert any(run.chunks for run in runs) == (way is Preemption.RECOMPUTE and blocks == 26)
    assert (count(expected, actions.SwapIn) > 3) == (way is Preemption.SWAP)
