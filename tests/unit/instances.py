"""Prefill and decode instances in this process, on real gRPC, over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import Histogram

from moonpool.base.cluster import Notify
from moonpool.base.errors import Internal, Unavailable
from moonpool.base.kv.keys import block_keys, pack_keys, tokens_to_bytes
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import RunningServer, serving
from moonpool.base.telemetry.metrics import restless
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.flow_control import EgressLink
from moonpool.engine.config import EngineConfig
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.draft_model import DraftModel
from moonpool.engine.decode.service import DecodeInstance
from moonpool.engine.decode.service import contract as decode_contract
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.instance import InstanceContext, open_dialer_and_listener
from moonpool.engine.messages import EngineSpec
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.prefill.service import PrefillInstance
from moonpool.engine.prefill.service import contract as prefill_contract
from moonpool.engine.setup import EngineSetup
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.unit.base.transport.fakes import LAYOUT, NAMESPACE, ROOT
from tests.unit.fakes.engine import FakeEngine

WAIT_S = 60.0
LOOK_AGAIN_S = 0.05
BLOCK = LAYOUT.block_size


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens unlike those of another seed."""
    return [(i * 7 + seed * 31 + (i * i * (seed + 1)) % 13) % 200 + 8 for i in range(length)]


def spec(
    request_id: str,
    tokens: Sequence[int],
    *,
    max_tokens: int = 4,
    ends: Sequence[int] = (),
    prompt_tokens: int = 0,
    n: int = 1,
) -> kv_pb2.SequenceSpec:
    """A sequence as the conductor describes it."""
    return kv_pb2.SequenceSpec(
        request_id=request_id,
        token_ids=tokens_to_bytes(array("i", tokens)),
        prompt_tokens=prompt_tokens or len(tokens),
        block_keys=pack_keys(block_keys(ROOT, array("i", tokens), BLOCK)),
        chain_root=ROOT,
        sampling=kv_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, repetition_penalty=1.0, n=n),
        end_token_ids=ends,
    )


def read_spans(path: Path, name: str) -> list[dict[str, Any]]:
    """The recorded spans of a name, in the order of their recording."""
    spans: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for span in spans if span["name"] == name]


class Instance:
    """One instance under test: its work, its engine, and a way to wait for what it does."""

    def __init__(self, service: Any, engine: FakeEngine, instance: kv_pb2.Instance, channels: Channels) -> None:
        self.service = service
        self.engine = engine
        self.instance = instance
        self.channels = channels
        self.changed = asyncio.Event()
        self.death: BaseException | None = None

    def notify(self, *, soon: bool = False) -> None:
        """Load or keys have changed."""
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it is true; looks at every change, and now and then, as not every gauge announces its rest."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), LOOK_AGAIN_S)

    @property
    def restless(self) -> dict[str, tuple[float, float]]:
        """Gauges that are not at rest."""
        return restless(self.service.gauges().read())

    async def rest(self) -> None:
        """Waits until everything reserved has come back, and checks that it has."""
        try:
            await self.until(lambda: not self.restless)
        except TimeoutError:
            raise AssertionError(f"{self.instance.id} is not at rest: {self.restless}") from None
        self.check()

    def check(self) -> None:
        """Asserts what must hold at any time."""
        raise NotImplementedError


class Decode(Instance):
    """A decode instance."""

    service: DecodeInstance

    def check(self) -> None:
        self.service.core.check_invariants()

    @property
    def stub(self) -> Any:
        """Its contract (the stub's types are those of the blocking API)."""
        return DecodeServiceStub(self.channels.get(self.instance.address))


class Prefill(Instance):
    """A prefill instance."""

    service: PrefillInstance

    def check(self) -> None:
        self.service.core.check_invariants()

    @property
    def stub(self) -> Any:
        """Its contract (the stub's types are those of the blocking API)."""
        return PrefillServiceStub(self.channels.get(self.instance.address))


def _parts(
    engine: FakeEngine,
    channels: Channels,
    instance: kv_pb2.Instance,
    notify: Notify,
    *,
    rate: float | None = None,
    spans: Recorder,
    max_tokens: int = 512,
    config: EngineConfig,
    beside: ThreadOffload,
) -> InstanceContext:
    layout = engine.layout
    plan = EngineSetup(
        EngineSpec("checkpoint", layout.dtype, layout, engine.blocks, engine.stages),
        conductor_pb2.ModelInfo(name="fake", namespace=NAMESPACE, layout=layout.to_proto()),
        256,
        max_tokens,
    )
    dialer, transports = open_dialer_and_listener(config, engine, instance)
    return InstanceContext(
        plan,
        engine,
        channels,
        EgressLink(rate),
        instance,
        spans,
        notify,
        dialer,
        transports,
        beside,
        EngineHistograms(PrometheusMetrics("engine"), "engine"),
    )


def observed(histogram: Histogram) -> dict[str, float]:
    """How often a histogram was observed, by the labels' values; "" without labels."""
    (family,) = histogram.collect()
    counts = [sample for sample in family.samples if sample.name.endswith("_count")]
    return {" ".join(sample.labels.values()): sample.value for sample in counts}


@asynccontextmanager
async def _beside(executor: Executor | None) -> AsyncIterator[ThreadOffload]:
    """Everything that may be done beside the loop is."""
    with executor or ThreadPoolExecutor(2) as threads:
        yield ThreadOffload(threads, least_bytes=1, least_tokens=1)


@asynccontextmanager
async def _running(running: Instance, contract: Any, ended: Callable[[], None]) -> AsyncIterator[RunningServer]:
    """Work and server, as `run_instance` has them; death by engine or core is remembered, not raised."""

    async def run() -> None:
        try:
            await running.service.run()
        except (Unavailable, Internal) as error:
            running.death = error
        finally:
            ended()

    async with serving("127.0.0.1:0", [contract], grace_s=1.0) as server:
        running.instance.address = server.address
        task = asyncio.ensure_future(run())
        await asyncio.sleep(0)
        try:
            yield server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def decoding(
    *,
    blocks: int = 32,
    epoch: int = 11,
    spans: Path | None = None,
    max_tokens: int = 512,
    run_steps: int = 1,
    executor: Executor | None = None,
    draft_model: DraftModel | None = None,
    **settings: Any,
) -> AsyncIterator[Decode]:
    """A running decode instance; afterwards everything must be at rest."""
    config = DecodeConfig(conductor="127.0.0.1:1", model="fake", id="decode-0", **{"kv_transports": "grpc", **settings})
    instance = kv_pb2.Instance(id="decode-0", epoch=epoch, kind=kv_pb2.INSTANCE_KIND_DECODE)
    async with Channels() as channels, _beside(executor) as beside:
        engine, recorder = FakeEngine(blocks, run_steps=run_steps), Recorder("decode-0", spans)
        decode = Decode(None, engine, instance, channels)
        decode.service = DecodeInstance(
            _parts(
                engine,
                channels,
                instance,
                decode.notify,
                spans=recorder,
                max_tokens=max_tokens,
                config=config,
                beside=beside,
            ),
            config,
            draft_model,
        )
        async with (
            decode.service.listener.running(config),
            _running(decode, decode_contract(decode.service), decode.changed.set),
        ):
            yield decode
            if not isinstance(decode.death, Internal):  # a core that has failed gives nothing back
                await decode.rest()
        recorder.close()
        engine.pool.close()


@asynccontextmanager
async def prefilling(
    *,
    blocks: int = 32,
    epoch: int = 5,
    stages: int = 1,
    spans: Path | None = None,
    rate: float | None = None,
    executor: Executor | None = None,
    token_s: float = 1.0,
    **settings: Any,
) -> AsyncIterator[Prefill]:
    """A running prefill instance; afterwards everything must be at rest.

    `token_s`: what the engine says that a prompt's token takes. With less, computing overtakes a load that is late, as
    any load may be on a busy machine.
    """
    settings = {"block_size": BLOCK, "max_num_batched_tokens": 2 * BLOCK, "kv_transports": "grpc", **settings}
    config = PrefillConfig(conductor="127.0.0.1:1", model="fake", id="prefill-0", **settings)
    instance = kv_pb2.Instance(id="prefill-0", epoch=epoch, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    async with Channels() as channels, _beside(executor) as beside:
        engine, recorder = FakeEngine(blocks, stages=stages), Recorder("prefill-0", spans)
        engine.speeds = replace(engine.speeds, prefill_per_token_s=token_s)
        prefill = Prefill(None, engine, instance, channels)
        parts = _parts(
            engine, channels, instance, prefill.notify, rate=rate, spans=recorder, config=config, beside=beside
        )
        prefill.service = PrefillInstance(parts, config)
        async with (
            parts.listener.running(config),
            _running(prefill, prefill_contract(prefill.service), prefill.changed.set),
        ):
            yield prefill
            if not isinstance(prefill.death, Internal):  # a core that has failed gives nothing back
                await prefill.rest()
        recorder.close()
        engine.pool.close()
