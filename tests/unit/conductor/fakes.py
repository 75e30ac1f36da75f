"""A small cluster in this process: a real conductor, and engines that only speak the contract."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moonpool.bundled
from moonpool.client import AsyncClient
from moonpool.cluster import HeldKeys, JoinAgent
from moonpool.errors import MoonpoolError, Overloaded
from moonpool.kv.keys import tokens_from_bytes
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels
from moonpool.rpc.server import serving
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from services.conductor.checkpoint import Checkpoint
from services.conductor.config import ConductorConfig
from services.conductor.service import conductor
from services.conductor.servicer import ConductorServicer

TINY = Path(moonpool.bundled.__file__).parent / "tiny"
BLOCK_TOKENS = 16
WAIT_S = 10.0


def next_token(length: int) -> int:
    """The one token that follows any `length` tokens, the same at every instance."""
    return 20 + (length * 7) % 61


def expected(prompt_tokens: int, count: int) -> list[int]:
    return [next_token(prompt_tokens + i) for i in range(count)]


def model_info(**changes: Any) -> conductor_pb2.ModelInfo:
    """What a fake engine serves; keywords change fields of the model or its layout."""
    layout: dict[str, Any] = {
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "block_tokens": BLOCK_TOKENS,
        "dtype": "float32",
    }
    layout |= {name: changes.pop(name) for name in list(changes) if name in layout}
    model = {
        "name": "tiny",
        "namespace": b"n" * 32,
        "config_hash": b"c" * 32,
        "vocab_size": 1000,
        "max_tokens": 512,
    }
    return conductor_pb2.ModelInfo(layout=KVLayout(**layout).to_proto(), **{**model, **changes})


@dataclass
class FakeEngine:
    """What fakes have in common."""

    id: str
    kind: kv_pb2.InstanceKind.ValueType
    total_blocks: int = 64
    incarnation: int = 1
    address: str = ""
    load: conductor_pb2.LoadReport = field(default_factory=conductor_pb2.LoadReport)
    keys: list[bytes] = field(default_factory=list)
    new_keys: list[bytes] = field(default_factory=list)
    agent: JoinAgent | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        """Something happened here."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what happens here to fulfil a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.changed.wait()

    @property
    def instance(self) -> kv_pb2.Instance:
        return kv_pb2.Instance(id=self.id, incarnation=self.incarnation, kind=self.kind, address=self.address)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        stored, self.new_keys = self.new_keys, []
        return stored, []

    def store(self, keys: list[bytes]) -> None:
        assert self.agent is not None
        self.keys += keys
        self.new_keys += keys
        self.agent.notify()


@dataclass
class FakePrefill(FakeEngine):
    """Samples the first token at once. `before` and `after` are raised or awaited around it, first come first used."""

    before: list[MoonpoolError | asyncio.Event] = field(default_factory=list)
    after: list[MoonpoolError | asyncio.Event] = field(default_factory=list)
    requests: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    running: int = 0
    first_token: int | None = None
    cached_tokens: int = 0

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.running += 1
        self.note()
        try:
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
            await _meet(self.before)
            length = len(tokens_from_bytes(request.sequence.token_ids))
            token = next_token(length) if self.first_token is None else self.first_token
            first = prefill_pb2.FirstToken(
                token_id=token, local_tokens=self.cached_tokens, computed_tokens=length - self.cached_tokens
            )
            yield prefill_pb2.PrefillResponse(first_token=first)
            await _meet(self.after)
            yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())
        finally:
            self.running -= 1
            self.note()


@dataclass
class FakeDecode(FakeEngine):
    """Generates by the rule of `next_token`, one message per token."""

    refusals: list[MoonpoolError] = field(default_factory=list)
    fail_at: list[int] = field(default_factory=list)  # output positions at which a sequence fails, once each
    hold_at: int = -1  # position at which sequences wait for `go`
    break_at: list[int] = field(default_factory=list)  # positions at which the whole stream breaks, once each
    end_token: int = -1
    go: asyncio.Event = field(default_factory=asyncio.Event)
    reserved: dict[str, decode_pb2.ReserveRequest] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    requests: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    progress: Callable[[], None] = lambda: None
    streams: int = 0
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        self.reserved[request.sequence.request_id] = request
        self.history.append(request.sequence.request_id)
        self.requests.append(request)
        self.note()
        target = kv_pb2.TransferTarget(decode=self.instance, transfer_id=next(self._ids), generation=1)
        return decode_pb2.ReserveResponse(target=target, lease_s=5.0)

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Any) -> None:
        self.streams += 1
        self.note()
        tasks: dict[str, asyncio.Task[None]] = {}
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None] = asyncio.Queue()
        writer = asyncio.create_task(self._write(outgoing, context))
        reader = asyncio.create_task(self._read(requests, tasks, outgoing))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader, *tasks.values()):
                task.cancel()

    async def _write(self, outgoing: asyncio.Queue[decode_pb2.StepsResponse | None], context: Any) -> None:
        while (message := await outgoing.get()) is not None:
            await context.write(message)

    async def _read(
        self,
        requests: AsyncIterator[decode_pb2.StepsRequest],
        tasks: dict[str, asyncio.Task[None]],
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None],
    ) -> None:
        assert (await anext(requests)).HasField("hello")
        async for request in requests:
            if request.HasField("start"):
                start = request.start
                tasks[start.request_id] = asyncio.create_task(self._generate(start, outgoing))
            elif request.HasField("cancel"):
                sequence_id = request.cancel.request_id
                self.cancelled.append(sequence_id)
                self.reserved.pop(sequence_id, None)
                if sequence_id in tasks:
                    tasks[sequence_id].cancel()
                self.note()
                self.progress()

    async def _generate(
        self, start: decode_pb2.StartSequence, outgoing: asyncio.Queue[decode_pb2.StepsResponse | None]
    ) -> None:
        spec = self.reserved[start.request_id].sequence
        tokens = [*tokens_from_bytes(spec.token_ids), start.first_token_id]
        assert start.first_token_id == next_token(len(tokens) - 1)
        while True:
            position = len(tokens) - spec.prompt_tokens
            if position in self.fail_at:
                self.fail_at.remove(position)
                del self.reserved[start.request_id]
                failed = decode_pb2.SequenceFailed(request_id=start.request_id, reason="a test says so")
                outgoing.put_nowait(decode_pb2.StepsResponse(failed=[failed]))
                return
            if position in self.break_at:
                self.break_at.remove(position)
                self.reserved.clear()
                outgoing.put_nowait(None)
                return
            if position == self.hold_at:
                await self.go.wait()
            tokens.append(next_token(len(tokens)))
            reason = kv_pb2.FINISH_REASON_UNSPECIFIED
            if tokens[-1] in spec.end_token_ids:
                reason = kv_pb2.FINISH_REASON_STOP
            elif position + 1 == spec.sampling.max_tokens:
                reason = kv_pb2.FINISH_REASON_LENGTH
            message = decode_pb2.SequenceTokens(
                request_id=start.request_id, position=position, token_ids=[tokens[-1]], finish_reason=reason
            )
            if reason:
                del self.reserved[start.request_id]
            outgoing.put_nowait(decode_pb2.StepsResponse(tokens=[message]))
            self.note()
            self.progress()
            if reason:
                return
            await asyncio.sleep(0)


@dataclass
class FakeStore(FakeEngine):
    """Holds keys."""


async def _meet(steps: list[MoonpoolError | asyncio.Event]) -> None:
    if not steps:
        return
    step = steps.pop(0)
    if isinstance(step, asyncio.Event):
        await step.wait()
    else:
        raise step


def no_room() -> Overloaded:
    return Overloaded("full", reason="no_decode_room", retry_after_s=1.0)


SERVICES: dict[type, Any] = {
    FakePrefill: prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    FakeDecode: decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
    FakeStore: kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"],
}


@dataclass
class Stack:
    """A running conductor and its engines."""

    servicer: ConductorServicer
    address: str
    client: AsyncClient
    checkpoint: Checkpoint
    _exit: AsyncExitStack

    async def join(self, engine: FakeEngine, model: conductor_pb2.ModelInfo | None = None) -> asyncio.Task[None]:
        """Serve an engine and let it join; returns its agent's task, which ends with the stack."""
        services = [(SERVICES[type(engine)], engine)]
        server = await self._exit.enter_async_context(serving("127.0.0.1:0", services, grace_s=0.0))
        engine.address = server.address
        hello = conductor_pb2.JoinHello(instance=engine.instance, total_blocks=engine.total_blocks)
        if not isinstance(engine, FakeStore):
            hello.model.CopyFrom(model or self.model())
        engine.load.free_blocks = engine.total_blocks
        channels = await self._exit.enter_async_context(Channels())
        engine.agent = JoinAgent(
            channels,
            self.address,
            hello,
            lambda: engine.load,
            engine.take_events,
            HeldKeys(1, lambda _: list(engine.keys)),
        )
        stopping = asyncio.Event()
        task = asyncio.create_task(engine.agent.run(stopping))

        async def leave() -> None:
            stopping.set()
            await asyncio.wait({task}, timeout=WAIT_S)

        self._exit.push_async_callback(leave)
        return task

    def model(self, **changes: Any) -> conductor_pb2.ModelInfo:
        served = self.checkpoint.served()
        same = {"name": served.name, "config_hash": served.config_hash, "vocab_size": served.vocab_size}
        return model_info(**{**same, **changes})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the conductor's picture to fulfil a condition."""
        cluster = self.servicer._cluster
        async with asyncio.timeout(WAIT_S):
            while not condition():
                change = cluster.next_change()
                if condition():
                    return
                await change.wait()

    async def gauges(self) -> dict[str, float]:
        return {gauge.name: gauge.value for gauge in await self.client.stats() if gauge.at_rest is not None}

    async def rest(self) -> None:
        """Wait until nothing is held any more, and check the cores."""
        async with asyncio.timeout(WAIT_S):
            while any(gauge.at_rest not in (None, gauge.value) for gauge in await self.client.stats()):
                pass  # each question lets the conductor go on
        self.servicer._cluster.registry.check_invariants()
        self.servicer._cluster.index.check_invariants()


@asynccontextmanager
async def stack(*engines: FakeEngine, **settings: Any) -> AsyncIterator[Stack]:
    """A conductor that `engines` have joined."""
    checkpoint = Checkpoint.load(str(TINY))
    config = ConductorConfig(
        **{"listen": "127.0.0.1:0", "id": "conductor-0", "model": str(TINY), "heartbeat_s": 1.0, **settings}
    )
    async with AsyncExitStack() as exit_stack:
        servicer, address = await exit_stack.enter_async_context(
            conductor(config, checkpoint, 7, Recorder("conductor-0", None))
        )
        exit_stack.callback(servicer._joins.stop)
        client = await exit_stack.enter_async_context(AsyncClient(address, timeout_s=WAIT_S))
        running = Stack(servicer, address, client, checkpoint, exit_stack)
        for engine in engines:
            await running.join(engine)
        await running.until(lambda: len(servicer._cluster.registry) == len(engines))
        yield running


def prefill(number: int = 0, **settings: Any) -> FakePrefill:
    return FakePrefill(f"prefill-{number}", kv_pb2.INSTANCE_KIND_PREFILL, **settings)


def decode(number: int = 0, **settings: Any) -> FakeDecode:
    return FakeDecode(f"decode-{number}", kv_pb2.INSTANCE_KIND_DECODE, **settings)


def store(number: int = 0, **settings: Any) -> FakeStore:
    return FakeStore(f"kvstore-{number}", kv_pb2.INSTANCE_KIND_KVSTORE, **settings)
