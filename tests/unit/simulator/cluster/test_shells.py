"""The service's shell, on an event loop in virtual time with a paced engine, decides as the simulator does.

The simulator serves a small seeded trace and notes what its decode core was told and what it answered. The service's
own shell, driver and journal are told the same requests, transfers and starts at the same times; steps, tokens and ends
of answers are their own. Every decision is the same, at the same time.
"""

import asyncio
import random
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.kernel import Tick
from moonpool.cost import Speeds
from moonpool.drive.journal import JournalWriter
from moonpool.drive.rerun import journal_files, rerun
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import Overloaded
from moonpool.kv.keys import BlockKey
from moonpool.sampling import SamplingParams
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import LayerDone, Step, StepResult
from moonpool.streams.writeback import WriteBack, WriteBackLimits
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.core.actions import Finish, Promised, Refused
from services.decode.core.config import Preemption
from services.decode.core.events import Arrived, Open, Reserve, Start, Stop, StreamOpened
from services.decode.core.machine import DecodeCore
from services.decode.live import LiveRequest
from services.decode.shell import DecodeShell
from services.decode.subscriber import Subscriber
from simulator.cluster.cluster import Cluster
from simulator.cluster.config import ClusterConfig, DecodeMemory
from simulator.cluster.decode import core_config
from simulator.traces.mooncake import TraceRequest
from tests.unit.fakes.engine import FakeEngine
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.virtual_loop import run_virtually
from tests.unit.streams.fakes import LAYOUT, ROOT

SEED = 20261122
BT = LAYOUT.block_tokens
CAPACITY = 1 << 20


@dataclass
class Noted:
    """An event, when it was handled, and what followed from it."""

    now: float
    event: Any
    actions: list[Any]


def requests(count: int, rng: random.Random) -> list[TraceRequest]:
    """Prompts of up to six blocks, some with a common beginning; answers of up to five blocks."""
    found, at, next_id = [], 0.0, 100
    for _ in range(count):
        at += rng.expovariate(25.0) * 1000
        tokens = rng.randint(1, 6 * BT)
        shared = rng.randint(0, 2) if rng.random() < 0.5 else 0
        blocks = -(-tokens // BT)
        ids = (*range(min(shared, blocks)), *range(next_id, next_id + max(0, blocks - shared)))
        next_id += blocks
        found.append(TraceRequest(at, tokens, rng.randint(1, 5 * BT), ids))
    return found


def simulated(config: ClusterConfig, trace: list[TraceRequest]) -> list[Noted]:
    """What the decode core of a simulated cluster heard and decided."""
    noted: list[Noted] = []
    cluster = Cluster(config, lambda _: None, longest_run=1)
    cluster.decodes[0].host.heard = lambda now, event, actions: noted.append(Noted(now, event, list(actions)))
    cluster.feed(trace)
    cluster.run()
    cluster.check_at_rest()
    return noted


class PacedEngine(FakeEngine):
    """Steps take the time that an emulated engine's do; tokens are zeros."""

    def __init__(self, blocks: int, speeds: Speeds) -> None:
        super().__init__(blocks)
        self._paced = speeds

    async def run(self, step: Step, *, on_layer: Any = None) -> StepResult:
        assert on_layer is None or on_layer is LayerDone
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(step_seconds(self._paced, step, decode=True))
        tokens = tuple(None if sequence.sample is None else 0 for sequence in step.sequences)
        return StepResult(tokens, False, round(begun * 1e9), round(loop.time() * 1e9))


class Service:
    """The shell of a decode instance, told by a script."""

    def __init__(self, config: ClusterConfig, journal: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = PacedEngine(config.blocks, config.profile.speeds)
        core = DecodeCore(core_config(config, run_steps=1))
        nowhere = WriteBack(WriteBackLimits(0), self._no_store, _read, self._loop.time)
        self.shell = DecodeShell(
            core, self.engine, CAPACITY, nowhere, self._no_store, Recorder("decode-0", None), lambda: None,
            JournalWriter(journal, "decode-0", 1 << 30), self._loop.time,
        )  # fmt: skip
        self._subscriber = Subscriber(kv_pb2.Instance())
        self.shell.subscribe(self._subscriber)
        self._lives: dict[int, LiveRequest] = {}

    @staticmethod
    def _no_store(address: str) -> Any:
        raise AssertionError("there is no store")

    async def play(self, script: list[Noted]) -> None:
        """Tells the shell what comes from outside; the rest happens by itself."""
        work = asyncio.create_task(self.shell.run())
        for noted in script:
            await asyncio.sleep(noted.now - self._loop.time())
            self._tell(noted.event)
        await self.shell.empty.wait()
        await asyncio.sleep(0.0)
        self.shell.close()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        self.engine.pool.close()

    def _tell(self, event: Any) -> None:
        match event:
            case Reserve():
                self._reserve(event)
            case Open(number):
                self.shell.open(self._lives[number], lambda _: None)
            case Arrived(number):
                self.shell.arrived(self._lives[number])
            case Start(number):
                live = self._lives[number]
                message = decode_pb2.StartSequence(
                    request_id=live.request_id, transfer_id=live.id, generation=live.transfer.generation
                )
                self.shell.start(self._subscriber, message)
            case Stop(number):
                self.shell.end(self._lives[number], event.why)

    def _reserve(self, event: Reserve) -> None:
        params = SamplingParams(max_tokens=event.total_tokens - event.prompt_tokens)
        sampling = SequenceSampling.of(params, event.prompt_tokens, ())
        tokens = array("i", [event.id] * event.tokens)  # so that no two answers have a block in common
        incoming = IncomingRequest(f"r{event.id}", tokens, event.keys, BlockKey(ROOT), f"t{event.id}", sampling)
        with suppress(Overloaded):  # the core's answer is in the journal
            self._lives[event.id] = self.shell.reserve(incoming, (), event.tbt_slo_s, None, event.starts_in_s)[0]


def _read(layer: int, block: int) -> Any:
    raise AssertionError("nothing is read")


def served(config: ClusterConfig, script: list[Noted], folder: Path) -> list[Noted]:
    """What the service's core heard and decided, by its journal, whose rerun gives the same actions."""

    async def play() -> None:
        await Service(config, folder).play(script)

    run_virtually(play())
    noted: list[Noted] = []
    [path] = journal_files(folder)
    again = rerun(path, lambda _, entry, actions: noted.append(Noted(entry.now, entry.event, actions)), check=True)
    assert again.difference is None
    return noted


def decided(noted: list[Noted]) -> list[Noted]:
    """Without what only says that time has passed, or who listens."""
    return [one for one in noted if not isinstance(one.event, Tick | StreamOpened) or one.actions]


def plain(one: Noted) -> tuple[str, list[Any]]:
    """The event by its kind, and the actions; predictions differ by what was measured in nanoseconds."""
    actions: list[Any] = []
    for action in one.actions:
        match action:
            case Promised() | Refused():
                actions.append((replace(action, tbt_s=0.0), pytest.approx(action.tbt_s, rel=1e-4)))
            case Finish(number):
                actions.append(("finish", number))
            case _:
                actions.append(action)
    return type(one.event).__name__, actions


@pytest.mark.parametrize("way", [Preemption.CACHE, Preemption.RECOMPUTE])
@pytest.mark.parametrize("blocks", [24, 400])
def test_decides_as_the_simulator_does(way: Preemption, blocks: int, tmp_path: Path) -> None:
    """In a pool for all, and in one for a few, with refusals and preemption."""
    print(f"seed {SEED}")
    memory = DecodeMemory(preemption=way, assumed_answer_tokens=2, step_tokens=40)
    config = ClusterConfig(profile=PROFILE, prefill=1, decode=1, kvstore=0, block_tokens=BT, step_tokens=256,
                           pool_blocks=blocks, max_batch=6, memory=memory, seed=SEED)  # fmt: skip
    expected = simulated(config, requests(40, random.Random(SEED)))
    script = [one for one in expected if isinstance(one.event, Reserve | Open | Arrived | Start | Stop)]
    found = served(config, script, tmp_path)
    for one, other in zip(decided(found), decided(expected), strict=False):
        assert plain(one) == plain(other)
        assert one.now == pytest.approx(other.now, abs=1e-6)
    assert len(decided(found)) == len(decided(expected))
    preempted = rerun(journal_files(tmp_path)[0]).core.parking.preemptions
    refused = sum(isinstance(action, Refused) for one in expected for action in one.actions)
    assert (preempted > 3, refused > 3) == (blocks == 24, blocks == 24)
