"""Decode's service on an event loop in virtual time: its own shell, driver and journal, told a script by the simulator.

Steps take as long as an emulated engine's; copies to DRAM, loads and writes as long as they took in the simulator, and
what of them ends at one time ends in the same order.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.instance import ExecutorParts
from moonpool.engine.request import IncomingRequest
from moonpool.errors import Overloaded
from moonpool.kv.keys import BlockKey, block_keys, tokens_digest
from moonpool.runtime.journal import JournalWriter
from moonpool.sampling_params import SamplingParams
from moonpool.scheduling.block_manager import LendBlocks, ReturnBlocks
from moonpool.scheduling.latency import Speeds
from moonpool.scheduling.state_machine import IoEnded
from moonpool.scheduling.steps import LayerDone, SequenceSampling, Step, StepResult
from moonpool.telemetry.spans import Recorder
from moonpool.transport.flow_control import StreamTraffic
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.core import actions
from services.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    ComputePrompt,
    ReserveBlocks,
    RunDone,
    RunProgress,
    StartDecoding,
    StreamClosed,
    StreamOpened,
    TransferComplete,
    TransferOpened,
    TransferProgress,
)
from services.decode.core.scheduler import DecodeScheduler
from services.decode.executor import DecodeExecutor
from services.decode.live_requests import LiveRequest, Subscriber
from simulator.clock import ps
from simulator.cluster.config import ClusterConfig, Runs, decode_core_config
from tests.unit.fakes.engine import FakeEngine, after
from tests.unit.simulator.cluster.scripts import BT, Noted, assert_same, decided, journalled
from tests.unit.simulator.cluster.virtual_loop import run_virtually, virtual_loop
from tests.unit.transport.fakes import ROOT

CAPACITY = 1 << 20
ANSWER_BITS = 20
"""Of a token; those below say whose answer it is, those above which one."""
UNKNOWN = 1 << ANSWER_BITS - 1
"""More than any request's number."""
SECRET = bytes(16)
"""Of all who may resume."""
Outer = (
    ReserveBlocks | TransferOpened | TransferProgress | TransferComplete | StartDecoding | ComputePrompt | AbortRequest
    | AdoptRequest | StreamOpened | StreamClosed
    | LendBlocks | ReturnBlocks
)  # fmt: skip
"""What others tell an instance."""


class TimedEngine(FakeEngine):
    """Steps take the time that an emulated engine's do, also those of runs; what follows a token is the same again."""

    def __init__(self, blocks: int, speeds: Speeds) -> None:
        super().__init__(blocks)
        self._speeds = speeds

    async def run(
        self, step: Step, *, on_layer: Any = None, on_step: Callable[[StepResult], None] | None = None
    ) -> StepResult:
        assert on_layer is None or on_layer is LayerDone
        loop = virtual_loop()
        while True:
            begun = loop.time()
            await loop.until(loop.now + ps(step_seconds(self._speeds, step, decode=True)))
            tokens = tuple(None if it.sample is None else array("i", it.token_ids)[-1] for it in step.sequences)
            result = StepResult(tokens, False, round(begun * 1e9), round(loop.time() * 1e9))
            following = None if step.step_id in self.cuts else after(step, tokens)
            if following is None:
                return result
            assert on_step is not None
            on_step(result)
            step = following


class Outside:
    """Kvstores and DRAM: copies, writes and loads end as they did in the simulator. It is write-back and reader."""

    sessions, traffic = 0, StreamTraffic()

    def __init__(self, script: list[Noted]) -> None:
        self._loop = virtual_loop()
        self._over: dict[int, asyncio.Future[Any]] = {}
        self._stores: deque[asyncio.Future[Any]] = deque()
        self._loads: deque[asyncio.Future[Any]] = deque()
        for action in (action for noted in script for action in noted.actions):
            match action:
                case actions.SwapOut(io) | actions.SwapIn(io):
                    self._begins(io, self._loop.jobs)
                case actions.StoreBlock(io):
                    self._begins(io, self._stores)
                case actions.LoadStoredBlocks(io):
                    self._begins(io, self._loads)

    def tell(self, ended: IoEnded[Any]) -> None:
        """I/O is over; receiving ends by itself."""
        if ended.io in self._over:
            self._over[ended.io].set_result(ended.result)

    def room(self, store: kv_pb2.Instance, blocks: int) -> int:
        return blocks

    def submit(
        self, store: kv_pb2.Instance, keys: Listed[BlockKey], parents: Listed[BlockKey], tenant: str,
        blocks: Listed[int], over: Callable[[bool], None],
    ) -> None:  # fmt: skip
        assert len(keys) == len(parents) == len(blocks) == 1
        self._stores.popleft().add_done_callback(lambda ended: over(ended.result().ok))

    async def read(self, keys: Listed[BlockKey], **how: Any) -> int:
        result = await self._loads.popleft()
        assert not result.failed
        return int(result.blocks)

    async def aclose(self) -> None:
        assert not self._loads

    def _begins(self, io: int, line: deque[asyncio.Future[Any]]) -> None:
        self._over[io] = self._loop.create_future()
        line.append(self._over[io])


class Service:
    """The shell of a decode instance, told by a script."""

    def __init__(self, config: ClusterConfig, runs: Runs, script: list[Noted], journal: Path) -> None:
        self._loop = virtual_loop()
        self._script, self._numbers = script, request_numbers(script)
        self.engine = TimedEngine(config.blocks, config.profile.speeds)
        self._outside = Outside(script)
        outside: Any = self._outside
        self.executor = DecodeExecutor(
            DecodeScheduler(decode_core_config(config, runs)),
            ExecutorParts(
                self.engine,
                outside,
                Recorder("decode-0", None),
                lambda *, soon=False: None,
                JournalWriter(journal, "decode-0", 1 << 30),
                self._loop.time,
            ),
            CAPACITY,
            lambda _: outside,
        )
        self._key_of: dict[BlockKey, BlockKey] = {}
        self._streams: dict[int, Subscriber] = {}
        self._lives: dict[int, LiveRequest] = {}

    async def play(self) -> None:
        """Tells the shell what comes from outside, what comes at one time in its order; the rest happens by itself."""
        work = asyncio.create_task(self.executor.run())
        for noted in self._script:
            if isinstance(noted.event, Outer | IoEnded):
                await self._loop.until(ps(noted.now))
                await self._loop.settled()
                self._tell(noted.event)
                await self._loop.settled()
        await self.executor.empty.wait()
        await self._loop.until(ps(self._script[-1].now + 1.0))
        self.executor.close()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        self.engine.pool.close()

    def _tell(self, event: Outer | IoEnded[Any]) -> None:
        match event:
            case IoEnded():
                self._outside.tell(event)
            case StreamOpened(stream, conductor):
                self._streams[stream] = Subscriber(instance(conductor))
                self.executor.subscribe(self._streams[stream])
            case StreamClosed(stream):
                self.executor.unsubscribe(self._streams[stream])
            case ReserveBlocks():
                self._reserve(event)
            case TransferOpened(number, older):
                self.executor.open(self._lives[number], lambda _: None, older=older)
            case TransferProgress(number):
                self.executor.transfer_progress(self._lives[number])
            case TransferComplete(number):
                self.executor.transfer_complete(self._lives[number])
            case StartDecoding() | ComputePrompt():
                self.executor.start(self._streams[event.stream], self._start(event))
            case AbortRequest(number, why):
                self.executor.abort(self._lives[number], why)
            case LendBlocks(number, keys):
                self.executor.pool.lend(LendBlocks(number, tuple(self._key_of[key] for key in keys)))
            case ReturnBlocks():
                self.executor.pool.take_back(event)
            case AdoptRequest():
                self.executor.resume(self._streams[event.stream], self._resume(event))

    def _start(self, event: StartDecoding | ComputePrompt) -> decode_pb2.StartSequence:
        live = self._lives[event.id]
        message = decode_pb2.StartSequence(
            request_id=live.request_id, transfer_id=live.id, generation=live.transfer.generation,
            compute_prompt=isinstance(event, ComputePrompt),
        )  # fmt: skip
        if isinstance(event, StartDecoding):
            words = [answer << ANSWER_BITS | self._word(event.id) for answer in range(1 + len(event.others))]
            message.first_token_id, *further = words
            message.further_token_ids.extend(further)
            message.known_token_ids.extend(words[:1] * (event.known[0] if event.known else 0))
            for word, count in zip(further, event.known[1:], strict=False):
                message.further_known.add(token_ids=[word] * count)
        return message

    def _resume(self, event: AdoptRequest) -> decode_pb2.ResumeSequence:
        live = self._lives[event.id]
        digests = [
            tokens_digest(live.incoming.chain_root, answer.tokens[:position])
            for answer, position in zip(live.outputs, event.positions, strict=True)
        ]
        message = decode_pb2.ResumeSequence(
            request_id=live.request_id, transfer_id=live.id, generation=live.transfer.generation, fence=event.fence,
            secret=SECRET, from_position=event.positions[0], digest=digests[0],
        )  # fmt: skip
        for position, digest in zip(event.positions[1:], digests[1:], strict=True):
            message.further.add(from_position=position, digest=digest)
        return message

    def _word(self, number: int) -> int:
        """The token that the first answer of a sequence consists of: no two requests have the same."""
        return self._numbers.get(number, UNKNOWN + number)

    def _reserve(self, event: ReserveBlocks) -> None:
        params = SamplingParams(max_tokens=event.total_tokens - event.request.prompt_tokens, n=event.request.width)
        sampling = SequenceSampling.of(params, event.request.prompt_tokens, ())
        tokens = tokens_of(event, self._word(event.id))
        keys = block_keys(BlockKey(ROOT), tokens, self.engine.layout.block_tokens)
        self._key_of.update(zip(event.request.keys, keys, strict=True))
        spec = replace(event.request, keys=tuple(keys))
        incoming = IncomingRequest(f"r{event.id}", tokens, BlockKey(ROOT), sampling, spec)
        stores = [kv_pb2.Instance(id=f"s{number}", address=f"s{number}:1") for number in range(event.stores)]
        with suppress(Overloaded):  # the core's answer is in the journal
            promised, _ = self.executor.reserve(
                incoming, stores, event.tbt_slo_s, instance(event.conductor), event.starts_in_s,
                secret=SECRET if event.resumable else b"", fence=event.fence,
            )  # fmt: skip
            self._lives[event.id] = promised


def tokens_of(event: ReserveBlocks, word: int) -> "array[int]":
    """Tokens of a prompt, whose keys are equal where those of the simulator are, and of its answer so far.

    The answer, and what of the prompt follows its last full block, are one word again and again.
    """
    words = [crc32(key) >> 1 for key in event.request.keys[: event.request.prompt_tokens // BT]]
    prompt = [it for it in words for _ in range(BT)]
    return array("i", [*prompt, *[word] * (event.request.tokens - len(prompt))])


def request_numbers(script: list[Noted]) -> dict[int, int]:
    """Of the sequences that have full blocks with tokens of an answer: the simulator's keys of these tell."""
    found = {}
    for event in (noted.event for noted in script):
        full: Listed[tuple[int, BlockKey]] = ()
        if isinstance(event, ReserveBlocks):
            full = [(event.id, key) for key in event.request.keys]
        elif isinstance(event, RunProgress | RunDone):
            full = event.filled
        found.update({it: int.from_bytes(key[16:], "little") >> 32 for it, key in full if key.startswith(b"answer")})
    return found


def instance(conductor: str) -> kv_pb2.Instance:
    """A conductor that a core knows by this name."""
    name, _, incarnation = conductor.partition("/")
    return kv_pb2.Instance(id=name, incarnation=int(incarnation))


def in_its_words(noted: list[Noted]) -> list[Noted]:
    """With one reason for all ends of answers, as the simulator has one only, and streams in the order of opening."""
    streams = [one.event.stream for one in noted if isinstance(one.event, StreamOpened)]

    def said(action: Any) -> Any:
        match action:
            case actions.FinishSequence():
                return replace(action, reason=0)
            case actions.RequestAdopted() | actions.FenceConductor():
                return replace(action, stream=streams.index(action.stream))
        return action

    return [replace(one, actions=[said(action) for action in one.actions]) for one in noted]


def played(config: ClusterConfig, runs: Runs, expected: list[Noted], folder: Path) -> None:
    """The shell decides the same. The simulator tells steps of a run together, the service each one."""

    async def play() -> None:
        await Service(config, runs, expected, folder).play()

    run_virtually(play())
    found, wanted = in_its_words(journalled(folder)), in_its_words(expected)
    assert_same(decided(found, RunProgress), decided(wanted, RunProgress))
