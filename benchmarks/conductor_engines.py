"""Engines that cost next to nothing, so that a conductor alone is measured: they compute nothing.

`python -m benchmarks.conductor_engines --conductor ADDRESS` joins prefill and decode instances from one process. A
prefill answers with a token at once; a decode gives every sequence a token per step, one message per step.
"""

# ruff: noqa: N802  # methods are named as in the contract

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from moonpool.base.bundled import model_dir
from moonpool.base.cluster import HeldKeys, InstanceReport, JoinAgent
from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import Service, serving
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2

TOKEN = 100
BLOCKS = 1 << 20
STEP_S = 0.01
LAYOUT = KVLayout.uniform(layers=2, kv_heads=2, head_dim=16, block_size=64, dtype="float32")


class FreePrefill:
    """Answers each prompt with a token."""

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: object) -> AsyncIterator[Any]:
        """Accept, answer, end."""
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
        first = prefill_pb2.FirstToken(token_id=TOKEN, computed_tokens=len(request.sequence.token_ids) // 4)
        yield prefill_pb2.PrefillResponse(first_token=first)
        yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())


@dataclass(slots=True)
class Sequence:
    """A promised sequence: output tokens so far and in all."""

    position: int
    length: int
    runs: bool = False


class FreeDecode:
    """Promises room to everyone; each step gives each started sequence a token."""

    def __init__(self, instance: kv_pb2.Instance) -> None:
        self._instance = instance
        self._transfers = itertools.count(1)
        self._sequences: dict[str, Sequence] = {}

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.ReserveResponse:
        """Always promises."""
        self._sequences[request.sequence.request_id] = Sequence(1, request.sequence.sampling.max_tokens)
        target = kv_pb2.TransferTarget(decode=self._instance, transfer_id=next(self._transfers), generation=1)
        return decode_pb2.ReserveResponse(target=target, lease_s=60.0)

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Any) -> None:
        """Run steps for as long as the conductor listens."""
        steps = asyncio.create_task(self._steps(context))
        try:
            async for request in requests:
                if request.HasField("start") and request.start.request_id in self._sequences:
                    self._sequences[request.start.request_id].runs = True
                elif request.HasField("cancel"):
                    self._sequences.pop(request.cancel.request_id, None)
        finally:
            steps.cancel()

    async def _steps(self, context: Any) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            tokens = [self._step(name, sequence) for name, sequence in list(self._sequences.items()) if sequence.runs]
            if tokens:
                await context.write(decode_pb2.StepsResponse(tokens=tokens))

    def _step(self, name: str, sequence: Sequence) -> decode_pb2.SequenceTokens:
        position, sequence.position = sequence.position, sequence.position + 1
        reason = kv_pb2.FINISH_REASON_UNSPECIFIED
        if sequence.position >= sequence.length:
            reason = kv_pb2.FINISH_REASON_LENGTH
            del self._sequences[name]
        return decode_pb2.SequenceTokens(request_id=name, position=position, token_ids=[TOKEN], finish_reason=reason)


async def join(stack: AsyncExitStack, channels: Channels, conductor: str, kind: str, number: int) -> JoinAgent:
    """Serve an engine and let the engine join until the stack closes."""
    served = Checkpoint.load(str(model_dir())).served()
    instance = kv_pb2.Instance(id=f"{kind}-{number}", epoch=1)
    service: Service
    if kind == "prefill":
        instance.kind = kv_pb2.INSTANCE_KIND_PREFILL
        service = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], FreePrefill()
    else:
        instance.kind = kv_pb2.INSTANCE_KIND_DECODE
        service = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], FreeDecode(instance)
    server = await stack.enter_async_context(serving("127.0.0.1:0", [service]))
    instance.address = server.address
    model = conductor_pb2.ModelInfo(
        name=served.name,
        namespace=b"n" * 32,
        layout=LAYOUT.to_proto(),
        config_hash=served.config_hash,
        vocab_size=served.vocab_size,
        max_tokens=4096,
    )
    hello = conductor_pb2.JoinHello(instance=instance, model=model, total_blocks=BLOCKS)
    load = conductor_pb2.LoadReport(free_blocks=BLOCKS, drain_s=0.0)
    agent = JoinAgent(channels, conductor, InstanceReport(hello, lambda: load, HeldKeys(1, lambda _: ())))
    task = asyncio.create_task(agent.run(asyncio.Event()))
    stack.callback(task.cancel)
    return agent


async def main() -> None:
    """Join, say so, and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conductor", required=True)
    parser.add_argument("--each", type=int, default=4, help="instances of each kind")
    options = parser.parse_args()
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        for kind, number in itertools.product(("prefill", "decode"), range(options.each)):
            agent = await join(stack, channels, options.conductor, kind, number)
            await agent.joined.wait()
        print(f"ready: {options.conductor}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
