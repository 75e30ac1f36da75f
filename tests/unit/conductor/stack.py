"""A small cluster in this process: a real conductor, and members that only speak the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import DefaultSampling
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.checkpoint.pooling import Pooling
from moonpool.base.cluster import HeldKeys, InstanceReport, JoinAgent
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import serving
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.client import AsyncClient
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.conductor.cluster_members import ClusterMembers
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.service import conductor
from moonpool.conductor.servicer import ConductorServicer
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub

from .fakes import FakeMember, ScriptedDecode, model_info

TINY = model_dir()
WAIT_S = 60.0
LOOK_S = 0.002

SERVICES = {
    kv_pb2.INSTANCE_KIND_PREFILL: prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    kv_pb2.INSTANCE_KIND_DECODE: decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
    kv_pb2.INSTANCE_KIND_KVSTORE: kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"],
}


@dataclass
class Stack:
    """A running conductor and its members."""

    servicer: ConductorServicer
    address: str
    client: AsyncClient
    checkpoint: Checkpoint
    exit: AsyncExitStack
    metrics: PrometheusMetrics

    @property
    def cluster(self) -> ClusterMembers:
        return self.servicer.cluster

    async def serve(self, member: FakeMember, model: conductor_pb2.ModelInfo | None = None) -> conductor_pb2.JoinHello:
        """Serve a member, which does not join yet; returns its hello."""
        services = [(SERVICES[member.kind], member)]
        server = await self.exit.enter_async_context(serving("127.0.0.1:0", services, grace_s=0.0))
        member.address = server.address
        hello = conductor_pb2.JoinHello(instance=member.instance, total_blocks=member.total_blocks)
        hello.computes_prompts = isinstance(member, ScriptedDecode) and member.computes_prompts
        if member.kind != kv_pb2.INSTANCE_KIND_KVSTORE:
            hello.model.CopyFrom(model or self.model())
        member.load.free_blocks = member.total_blocks
        return hello

    async def join(self, member: FakeMember, model: conductor_pb2.ModelInfo | None = None) -> asyncio.Task[None]:
        """Serve a member and let it join; returns its agent's task, which ends with the stack."""
        return await self.follow(member, await self.serve(member, model))

    async def follow(self, member: FakeMember, hello: conductor_pb2.JoinHello) -> asyncio.Task[None]:
        """Let a member that is served join with an agent; returns the agent's task."""
        channels = await self.exit.enter_async_context(Channels())
        held = HeldKeys(1, lambda _: list(member.keys))
        report = InstanceReport(hello, lambda: member.load, held, member.take_events, on_replicate=member.orders.append)
        member.agent = JoinAgent(channels, self.address, report)
        stopping = asyncio.Event()
        task = asyncio.create_task(member.agent.run(stopping))

        async def leave() -> None:
            stopping.set()
            await asyncio.wait({task}, timeout=WAIT_S)

        self.exit.push_async_callback(leave)
        return task

    async def call_join(self, hello: conductor_pb2.JoinHello) -> Any:
        """Join by hand: the stream after its hello. Its loss and its messages are the test's business."""
        channels = await self.exit.enter_async_context(Channels())
        call: Any = ConductorServiceStub(channels.get(self.address)).Join(timeout=WAIT_S)
        await call.write(conductor_pb2.JoinRequest(hello=hello))
        return call

    def model(self, **changes: Any) -> conductor_pb2.ModelInfo:
        served = self.checkpoint.served()
        same = {"name": served.name, "config_hash": served.config_hash, "vocab_size": served.vocab_size}
        return model_info(**{**same, **changes})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the conductor's picture to fulfil a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.look()

    async def settled(self, member: FakeMember) -> None:
        """Wait until a prefill instance has reported after its last token: it tells of no blocks that it computed."""
        agent, coming = member.agent, self.servicer.core.cluster.prefills.in_flight
        assert agent is not None

        def told() -> bool:
            agent.notify()
            return member.id not in coming.awaited

        await self.until(told)

    async def joined(self, member: FakeMember) -> None:
        """Wait until a member has joined."""
        await self.until(lambda: self.cluster.find(member.id) == member.instance)

    async def look(self) -> dict[str, float]:
        """The gauges after a moment, in which the conductor goes on and the processor is free."""
        await asyncio.sleep(LOOK_S)
        return await self.gauges()

    async def gauges(self) -> dict[str, float]:
        return {gauge.name: gauge.value for gauge in await self.client.stats() if gauge.at_rest is not None}

    async def rest(self) -> None:
        """Wait until nothing is held any more, and check the cores."""
        async with asyncio.timeout(WAIT_S):
            while any(gauge.at_rest not in (None, gauge.value) for gauge in await self.client.stats()):
                await self.look()
        self.servicer.core.check_invariants()
        self.cluster.registry.check_invariants()


@cache
def tiny() -> Checkpoint:
    """The bundled model's checkpoint: loading takes longer than most tests."""
    return Checkpoint.load(str(TINY))


@asynccontextmanager
async def stack(
    *members: FakeMember,
    suggested: DefaultSampling | None = None,
    rules: AnswerRules | None = None,
    pooling: Pooling | None = None,
    folder: Path = TINY,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A conductor that `members` have joined; its checkpoint, in `folder`, has `suggested` sampling, and `pooling`."""
    checkpoint = tiny() if folder == TINY else Checkpoint.load(str(folder))
    checkpoint = replace(
        checkpoint,
        config=replace(
            checkpoint.config,
            default_sampling=suggested or DefaultSampling(),
            answer_rules=rules or AnswerRules(),
            pooling=pooling,
        ),
    )
    usual = {"listen": "127.0.0.1:0", "id": "conductor-0", "model": str(folder), "heartbeat_s": 1.0}
    config = ConductorConfig(**{**usual, **settings})
    metrics = PrometheusMetrics(config.service())
    async with AsyncExitStack() as exit_stack:
        servicer, address = await exit_stack.enter_async_context(
            conductor(config, checkpoint, 7, Recorder("conductor-0", None), metrics, deletion_wait_s=0.0)
        )
        exit_stack.push_async_callback(servicer.drain, 0.0)
        client = await exit_stack.enter_async_context(AsyncClient(address, timeout_s=WAIT_S))
        running = Stack(servicer, address, client, checkpoint, exit_stack, metrics)
        for member in members:
            await running.join(member)
            await running.joined(member)  # one after the other: of equals, the first to join is the first to be chosen
        yield running
