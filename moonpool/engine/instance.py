"""What prefill and decode instances have in common: from flags to a running, joined, drained service.

Owns the flags of an engine, the way from a checkpoint to an `EngineSpec` and a `ModelInfo`, and the life of the
process: engine up, server up, joined to the conductor, drained. Must not know what the service does with its engine,
and must not import torch.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from moonpool.checkpoint import (
    config_hash,
    kv_layout,
    load_config,
    model_name,
    resolve,
    resolve_dtype,
    weights_fingerprint,
)
from moonpool.cluster.join import JoinAgent
from moonpool.config import PeerAddress, ServiceConfig
from moonpool.engine.arrival import Arrival
from moonpool.engine.handle import Engine, start_engine
from moonpool.engine.messages import EngineSpec
from moonpool.errors import ConfigError, Unavailable
from moonpool.kv.keys import namespace
from moonpool.kv.layout import KVLayout
from moonpool.kv.link import Link
from moonpool.rpc.channels import Channels
from moonpool.rpc.process import ProcessContext
from moonpool.rpc.server import RunningServer, Service, serving
from moonpool.sched.block_manager import BlockManager
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2

WRITE_BACK_GRACE_S = 3.0
"""Seconds that a draining instance waits for what is being written back."""
DRAIN_SHARE = 0.8
"""Share of `drain_s` in which running requests may finish."""
WRITE_BACK_SHARE = 4
"""Write-back holds this part of the pool at most, unless told otherwise."""

log = get_logger(__name__)


class EngineConfig(ServiceConfig):
    """Flags that prefill and decode share."""

    conductor: PeerAddress = Field(description="HOST:PORT of the conductor to join")
    model: str = Field(description="folder of the checkpoint, or its id on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="element type of weights and KV; auto = the checkpoint's own"
    )
    block_tokens: int = Field(64, ge=16, multiple_of=16, description="tokens per KV block; one size in the cluster")
    kv_bytes: int = Field(256 << 20, gt=0, description="bytes of the KV pool")
    blocks: int = Field(0, ge=0, description="blocks of the KV pool; 0 = as many as --kv-bytes hold")
    threads: int = Field(0, ge=0, description="compute threads of each engine process; 0 = all cores shared out")
    device: Literal["cpu"] = Field("cpu", description="where the engine computes")
    max_tokens: int = Field(0, ge=0, description="tokens of the longest sequence served; 0 = the model's own limit")
    link_bytes_per_s: float = Field(0.0, ge=0.0, description="bytes of KV sent per second at most; 0 = unlimited")
    write_back_blocks: int = Field(
        0, ge=0, description="blocks held for write-back to the kvstore at most; 0 = a quarter of the pool"
    )
    start_timeout_s: float = Field(180.0, gt=0.0, description="seconds the engine may take to get ready")

    def write_back_limit(self, blocks: int) -> int:
        """Blocks held for write-back at most, of a pool of `blocks`."""
        return self.write_back_blocks or max(1, blocks // WRITE_BACK_SHARE)

    @property
    def link_rate(self) -> float | None:
        """The link's rate as `Link` takes it: None = unlimited."""
        return self.link_bytes_per_s or None


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an instance serves, known before anything is allocated.

    Attributes:
        spec: what the engine processes are told.
        model: what the conductor is told; carries the namespace.
        vocab_size: tokens the model knows.
        max_tokens: longest sequence, tokens.
    """

    spec: EngineSpec
    model: conductor_pb2.ModelInfo
    vocab_size: int
    max_tokens: int

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self.spec.layout

    def arrival(self, spec: kv_pb2.SequenceSpec) -> Arrival:
        """A sequence that has come in, checked against what is served; raises as `Arrival.from_proto`."""
        return Arrival.from_proto(
            spec, block_tokens=self.layout.block_tokens, vocab_size=self.vocab_size, max_tokens=self.max_tokens
        )

    @property
    def namespace(self) -> bytes:
        """32 bytes; equal namespaces mean interchangeable KV."""
        return self.model.namespace


def plan_engine(config: EngineConfig, *, stages: int = 1) -> EnginePlan:
    """Reads the checkpoint's description and decides dtype, layout, pool and namespace.

    Blocks for as long as hashing the weights takes: call it in a thread.

    Raises:
        ConfigError: the pool would hold no block.
        CheckpointError: the checkpoint is missing, broken or not supported.
    """
    folder: Path = resolve(config.model)
    model = load_config(folder)
    dtype = resolve_dtype(model, config.dtype)
    layout = kv_layout(model, dtype, config.block_tokens)
    blocks = config.blocks or config.kv_bytes // layout.block_bytes
    if blocks < 1:
        raise ConfigError("kv_bytes", f"{config.kv_bytes} bytes hold no block of {layout.block_bytes} bytes")
    longest = min(config.max_tokens or model.max_position_embeddings, model.max_position_embeddings)
    spec = EngineSpec(
        checkpoint=str(folder),
        dtype=dtype,
        layout=layout,
        blocks=blocks,
        stages=stages,
        threads=config.threads,
        device=config.device,
        max_tokens=longest,
    )
    info = conductor_pb2.ModelInfo(
        name=model_name(config.model),
        namespace=namespace(weights_fingerprint(folder), layout),
        layout=layout.to_proto(),
        config_hash=config_hash(model),
        vocab_size=model.vocab_size,
        max_tokens=longest,
    )
    return EnginePlan(spec, info, model.vocab_size, longest)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a service is built from.

    Attributes:
        plan: what is served.
        engine: runs the steps.
        channels: to other instances.
        link: paces what leaves this process.
        instance: who we are; its address is filled in once the server listens.
        spans: where spans are recorded.
        poke: says that keys or load have changed, so that the conductor hears of it soon.
    """

    plan: EnginePlan
    engine: Engine
    channels: Channels
    link: Link
    instance: kv_pb2.Instance
    spans: Recorder
    poke: Callable[[], None]

    def hello(self) -> kv_pb2.StreamHello:
        """First message of the KV streams we open."""
        return kv_pb2.StreamHello(
            sender=self.instance, namespace=self.plan.namespace, layout=self.plan.layout.to_proto()
        )


class EngineService(Protocol):
    """What a prefill or decode service offers to the process that runs it."""

    @property
    def manager(self) -> BlockManager:
        """The pool's blocks; its keys and events are reported to the conductor."""
        ...

    async def run(self) -> None:
        """Works until cancelled, or raises when it cannot go on."""
        ...

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        ...

    def drain(self) -> None:
        """Take no new requests; may be called again."""
        ...

    async def drained(self) -> None:
        """Waits until no request is left. The caller bounds the wait."""
        ...


async def run_instance(
    context: ProcessContext,
    config: EngineConfig,
    kind: kv_pb2.InstanceKind.ValueType,
    build: Callable[[Parts], tuple[EngineService, Service]],
    *,
    stages: int = 1,
) -> None:
    """Runs one engine instance until it is told to stop.

    Raises:
        ConfigError: a setting is refused.
        CheckpointError: the checkpoint cannot be served.
        Mismatch: the conductor serves something else.
        Unavailable: the engine died.
    """
    plan = await asyncio.to_thread(plan_engine, config, stages=stages)
    log.info("engine starts", model=plan.model.name, dtype=plan.spec.dtype, blocks=plan.spec.blocks, stages=stages)
    async with contextlib.AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        engine = await stack.enter_async_context(start_engine(plan.spec, start_timeout_s=config.start_timeout_s))
        poke = _Poke()
        instance = context.instance(kind, config.id, "")
        parts = Parts(plan, engine, channels, Link(config.link_rate), instance, context.spans, poke)
        service, contract = build(parts)
        server = await stack.enter_async_context(serving(config.listen, [contract]))
        instance.address = config.advertised(server.port)
        agent = JoinAgent(
            channels,
            config.conductor,
            conductor_pb2.JoinHello(
                instance=instance,
                model=plan.model,
                total_blocks=plan.spec.blocks,
                speed=engine.speeds.to_proto(),
            ),
            service.load,
            lambda: _events(service.manager),
            service.manager.keys,
            service.drain,
        )
        poke.target = agent.poke
        life = _Life(service, agent, engine, server, config.drain_s)
        await life.run(context.stopping, lambda: context.announce(instance.address))


class _Poke:
    """The agent's `poke`, before there is an agent."""

    def __init__(self) -> None:
        self.target: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target()


def _events(manager: BlockManager) -> tuple[list[bytes], list[bytes]]:
    events = manager.take_events()
    return list(events.stored), list(events.removed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Life:
    """Serving, then draining; or dying with the engine."""

    service: EngineService
    agent: JoinAgent
    engine: Engine
    server: RunningServer
    drain_s: float

    async def run(self, stopping: asyncio.Event, announce: Callable[[], None]) -> None:
        """Returns after a drain; raises what made the instance unable to go on."""
        left = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(self.service.run())
                watcher = group.create_task(self._watch_engine())
                # While it drains the instance stays joined: that is how the conductor hears of it.
                joined = group.create_task(self.agent.run(left))
                announce()
                await stopping.wait()
                await self._drain()
                left.set()
                await joined
                worker.cancel()
                watcher.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _watch_engine(self) -> None:
        # The future belongs to the engine: a cancelled watcher must not cancel it.
        reason = await asyncio.shield(self.engine.failed)
        self.server.set_serving(False)
        raise Unavailable(f"the engine died: {reason}")

    async def _drain(self) -> None:
        # The process cancels us after `drain_s`; what is left of it is for leaving in order.
        grace_s = self.drain_s * DRAIN_SHARE
        log.info("draining", grace_s=grace_s)
        self.server.set_serving(False)
        self.service.drain()
        self.agent.poke()
        try:
            async with asyncio.timeout(grace_s):
                await self.service.drained()
        except TimeoutError:
            log.warning("requests were still running when the grace period ended")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group: what is reported as the reason of an end."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
