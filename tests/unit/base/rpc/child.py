"""A small service for tests of a whole process; `--parent` starts one and waits."""

import asyncio
import subprocess
import sys
import threading

from pydantic import Field

from moonpool.base.config import ServiceConfig
from moonpool.base.rpc.process import ProcessContext, run_main
from moonpool.base.rpc.server import serving
from moonpool.v1 import decode_pb2, kv_pb2


class ChildConfig(ServiceConfig):
    """Serves an empty decode service."""

    kv_bytes: int = Field(1, gt=0, description="nothing, bytes")


def _never_end(ctx: ProcessContext) -> None:
    ctx.starting("what takes for ever")
    threading.Event().wait()


async def main(ctx: ProcessContext, config: ChildConfig) -> None:
    # `-X dev` warns of what takes 0.1 s, as anything may on a busy machine.
    asyncio.get_running_loop().slow_callback_duration = 60.0
    if config.kv_bytes > 1:  # its start never ends, and keeps a thread
        await asyncio.to_thread(_never_end, ctx)
    service = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
    async with serving(config.listen, [(service, object())], grace_s=1) as server:
        print("a stray print", type(asyncio.get_running_loop()).__module__)
        ctx.instance(kv_pb2.INSTANCE_KIND_DECODE, "", config.advertised(server.port))
        with ctx.spans.span("life"):
            ctx.announce(server.address)
            await ctx.stopping.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["--parent"]:
        subprocess.Popen([sys.executable, "-m", "tests.unit.base.rpc.child"])
        sys.stdin.read()
    sys.exit(run_main(ChildConfig, main))
