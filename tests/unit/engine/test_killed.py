"""An engine process that is killed in the middle of a copy, under a real decode instance: everything comes back."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import Unavailable
from moonpool.base.kv.keys import chain_root
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.rpc.server import serving
from moonpool.base.telemetry.metrics import restless
from moonpool.base.telemetry.spans import Recorder
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.service import DecodeInstance, decode_role
from moonpool.engine.instance import EngineService, InstanceContext, run_instance
from moonpool.engine.interface import Engine
from moonpool.engine.messages import MAX_FETCHES, EngineSpec
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_processes
from moonpool.engine.start_listener import StartListener
from moonpool.v1 import conductor_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from tests.unit.engine.decode.calls import conducting, reserve
from tests.unit.fakes.conductor import FakeConductor
from tests.unit.instances import WAIT_S, prompt, spec

HELD = "tests.unit.engine.held_worker"


class Life:
    """A decode instance on a real engine process."""

    def __init__(self, channels: Channels, config: DecodeConfig) -> None:
        self.channels, self.config = channels, config
        self.service: DecodeInstance | None = None
        self.engine: Engine | None = None
        context = ProcessContext("decode-0", Recorder("decode-0", None), io.StringIO())
        self._role = decode_role(config)
        role = replace(self._role, build=self._build)
        self.task = asyncio.ensure_future(run_instance(context, config, [role], start=self._start))

    def _start(
        self, spec: EngineSpec, *, start_timeout_s: float, listener: StartListener
    ) -> AbstractAsyncContextManager[Engine]:
        spec = replace(spec, measure=False)  # its steps would be held
        return start_processes(spec, start_timeout_s=start_timeout_s, listener=listener, worker_module=HELD)

    def _build(self, shared: InstanceContext) -> tuple[EngineService, object]:
        service, servicer = self._role.build(shared)
        assert isinstance(service, DecodeInstance)
        self.service, self.engine = service, shared.engine
        return service, servicer

    @property
    def stub(self) -> Any:
        assert self.service is not None
        return DecodeServiceStub(self.channels.get(self.service.identity.address))


@asynccontextmanager
async def living(checkpoint: Path, **settings: Any) -> AsyncIterator[Life]:
    """An instance that has joined its conductor."""
    fake, descriptor = FakeConductor(), conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
    async with serving("127.0.0.1:0", [(descriptor, fake)], grace_s=0.1) as server, Channels() as channels:
        common: dict[str, Any] = {"id": "decode-0", "dtype": "float32", "block_size": 16, "blocks": 32, "threads": 1}
        life = Life(channels, DecodeConfig(conductor=server.address, model=str(checkpoint), **common, **settings))
        try:
            joined = asyncio.ensure_future(fake.has_load.wait())
            await asyncio.wait((joined, life.task), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert joined.done(), life.task
            yield life
        finally:
            life.task.cancel()
            await asyncio.gather(life.task, return_exceptions=True)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A FIFO."""
    path = tmp_path / "told"
    os.mkfifo(path)
    return path


@asynccontextmanager
async def hearing(path: Path) -> AsyncIterator[asyncio.Event]:
    """Set when something comes through a FIFO."""
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    loop.add_reader(fd, heard.set)
    try:
        yield heard
    finally:
        loop.remove_reader(fd)
        os.close(fd)


@pytest.mark.parametrize(
    ("stream", "seed"),
    [
        pytest.param("down", 2, id="down-lazy"),
        pytest.param("up", 10, id="up-eager"),
        pytest.param("down", 10, id="down-eager", marks=pytest.mark.slow),
        pytest.param("up", 2, id="up-lazy", marks=pytest.mark.slow),
    ],
)
async def test_killed_in_a_copy(
    checkpoint: Path, told: Path, monkeypatch: pytest.MonkeyPatch, stream: str, seed: int
) -> None:
    """Out of the device in a swap, or into it before the sequence goes on, which holds no step and no other copy."""
    monkeypatch.setenv("HELD_STREAM", stream)
    monkeypatch.setenv("HELD_TOLD", str(told))
    swapping = {"preemption": "swap", "preempt_every": 1, "device": f"staged:{seed}"}
    async with hearing(told) as held, living(checkpoint, **swapping) as life, conducting(life) as conductor:
        service, engine = life.service, life.engine
        assert service is not None
        assert isinstance(engine, ProcessEngine)
        asked = spec("a", prompt(5), max_tokens=40)
        asked.chain_root = chain_root(service.setup.namespace, "")
        await conductor.compute("a", await reserve(life, asked))
        async with asyncio.timeout(WAIT_S):
            await held.wait()
        core = service.core
        copying = RequestStatus.SWAPPING_OUT if stream == "down" else RequestStatus.SWAPPING_IN
        assert core.count(copying) == 1
        assert not service.executor.step_in_flight
        assert core.blocks.num_used == 1, "what is being copied is nobody else's"
        copies = [asyncio.ensure_future(engine.fetch((block,))) for block in range(MAX_FETCHES + 2)]
        await asyncio.sleep(0)

        os.kill(engine.pids[0], signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(Unavailable, match="was killed by signal 9"):
                await life.task
            ends = await asyncio.gather(*copies, return_exceptions=True)
        over = {Unavailable} if stream == "down" else {Unavailable, type(None)}
        assert {type(end) for end in ends} <= over
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pids[0], 0)
        core.check_invariants()
        assert (core.blocks.num_used, core.preempted.swapped_blocks, core.preempted.blocks_being_freed) == (0, 0, 0)
        assert restless(service.gauges().read()) == {}
