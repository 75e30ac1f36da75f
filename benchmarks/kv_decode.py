"""A decode instance without an engine: the real contract, requests, receiver and pool, in a separate process.

`python -m benchmarks.kv_decode --conductor 127.0.0.1:1 --model SHAPE --set blocks=N`, as `moonpool.engine.decode` with
its flags; SHAPE is a name in kv_paths.py. Joins no conductor and does not compute; for measuring what receiving KV
costs.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.kv_paths import SHAPES, VOCAB_SIZE, Shape
from moonpool.base.errors import Unavailable
from moonpool.base.kv.pool import KVPool
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext, run_main
from moonpool.base.rpc.server import serving
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.flow_control import EgressLink
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.service import DecodeInstance, contract
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.instance import BESIDE_THREADS, InstanceContext, open_dialer_and_listener
from moonpool.engine.messages import EngineSpec
from moonpool.engine.setup import EngineSetup
from moonpool.v1 import conductor_pb2, kv_pb2


class NoEngine:
    """A pool without computation."""

    stages = run_steps = max_num_batched_tokens = 1
    speeds = Speeds()

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.layout, self.blocks = shape.layout, blocks
        self.pool = KVPool.create(shape.layout, blocks, [(0, shape.layout.layers)])
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        """Refuse."""
        raise Unavailable("there is no engine here")

    def open_gate(self, step_id: int, layer: int) -> None:
        """Nothing to open."""

    def drop(self, step_id: int, index: int) -> None:
        """Nothing to drop."""

    async def fetch(self, blocks: Sequence[int]) -> None:
        """All blocks are here."""

    def load(self) -> None:
        """All KV is where steps would compute."""

    async def load_lora(self, lora: bytes, folder: str) -> int:
        """Nothing to load."""
        return 0

    async def drop_lora(self, lora: bytes) -> None:
        """Nothing to drop."""

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        """Nothing to cut."""

    def abort(self, step_id: int) -> None:
        """Nothing to abort."""

    async def idle(self) -> None:
        """Nothing to wait for."""


def quiet(*, soon: bool = False) -> None:
    """Drop the report: there is no conductor."""


async def serve(context: ProcessContext, config: DecodeConfig) -> None:
    """Receive until told to stop."""
    shape = SHAPES[config.model]
    layout, engine = shape.layout, NoEngine(shape, config.blocks)
    setup = EngineSetup(
        EngineSpec("none", layout.dtype, layout, config.blocks, 1),
        conductor_pb2.ModelInfo(name="none", namespace=shape.namespace, layout=layout.to_proto()),
        VOCAB_SIZE,
        1 << 20,
    )
    instance = context.instance(kv_pb2.INSTANCE_KIND_DECODE, config.id, "")
    async with Channels() as channels:
        dialer, transports = open_dialer_and_listener(config, engine, instance)
        kv = EgressLink(), instance, context.spans, quiet, dialer, transports
        beside = ThreadOffload(ThreadPoolExecutor(BESIDE_THREADS))
        histograms = EngineHistograms(PrometheusMetrics("decode"), "decode")
        shared = InstanceContext(setup, engine, channels, *kv, beside, histograms)
        decode = DecodeInstance(shared, config)
        async with transports.running(config), serving(config.listen, [contract(decode)]) as server:
            instance.address = config.advertised(server.port)
            running = asyncio.ensure_future(decode.run())
            context.announce(instance.address)
            await context.stopping.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    engine.pool.close()


if __name__ == "__main__":
    sys.exit(run_main(DecodeConfig, serve))
