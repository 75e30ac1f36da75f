"""A leader's engine and the hosts of its further stages, in the tests' own process over loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moonpool.base.checkpoint import weights_fingerprint
from moonpool.base.fork_server import start_service
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.tls import Security
from moonpool.engine.messages import EngineSpec
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.remote.listener import StagesListener
from moonpool.engine.remote.stage_host import StagePlace, StageProcesses, keep_serving
from moonpool.engine.start_engine import WORKER, start_processes
from tests.unit.base.rpc.certificates import tls

PATIENT_S = 30.0
"""In place of the two seconds after which a silent peer is lost, where tests are not about that."""


def security(folder: Path, role: str = "prefill") -> Security:
    """Certificates of a role, from one authority for a folder."""
    return Security(tls(folder, role), RoleGate())


class Host:
    """A host that joins a leader, again and again.

    Attributes:
        changes: whether the stage has joined, as that changes.
    """

    def __init__(self, place: StagePlace, security: Security | None, silence_s: float, worker_module: str) -> None:
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        work = keep_serving(
            place,
            security,
            self.changes.put_nowait,
            pause_s=0.05,
            silence_s=silence_s,
            processes=StageProcesses(worker_module, start_service),
        )
        self.task = asyncio.create_task(work)

    async def close(self) -> None:
        """End the host's work, and its processes."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def host(
    leader: str,
    checkpoint: Path,
    *,
    node_rank: int = 1,
    security: Security | None = None,
    silence_s: float = PATIENT_S,
    worker_module: str = WORKER,
    device: str = "cpu",
) -> AsyncIterator[Host]:
    """A host of one stage."""
    place = StagePlace(leader, node_rank, checkpoint, weights_fingerprint(checkpoint), device, threads=1)
    running = Host(place, security, silence_s, worker_module)
    try:
        yield running
    finally:
        await running.close()


def stages_listener(
    address: str = "127.0.0.1:0", count: int = 1, security: Security | None = None, silence_s: float = PATIENT_S
) -> StagesListener:
    """Where the stages of a test join."""
    return StagesListener(address, count, security, silence_s=silence_s)


@asynccontextmanager
async def leading(
    spec: EngineSpec, listener: StagesListener, *, worker_module: str = WORKER
) -> AsyncIterator[ProcessEngine]:
    """An engine whose last stages join at the listener."""
    weights = weights_fingerprint(Path(spec.checkpoint))
    async with start_processes(
        replace(spec, weights=weights),
        start_timeout_s=90,
        worker_module=worker_module,
        launcher=start_service,
        remote=listener,
    ) as engine:
        assert isinstance(engine, ProcessEngine)
        yield engine
