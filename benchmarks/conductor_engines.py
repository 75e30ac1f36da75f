"""Engines that cost next to nothing, so that a conductor alone is measured: they compute nothing.

`python -m benchmarks.conductor_engines --conductor ADDRESS` joins prefill and decode instances from one process, at one
conductor or several. A prefill answers with a token at once; a decode gives every sequence a token per step, one
message per step and conductor.
"""

# ruff: noqa: N802  # methods are named as in the contract

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from moonpool.base.bundled import model_dir
from moonpool.base.cluster import HeldKeys, InstanceReport, JoinAgent
from moonpool.base.cluster.join import InstanceBoard, KeyChangeFeed
from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import Service, serving
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2

TOKEN = 302
"""Letters of a word; a token that is no whole character would be held back."""
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
class RunningSequence:
    """A promised sequence.

    Attributes:
        position: output tokens so far.
        length: output tokens in all.
        sent: tokens that the conductor has.
        gather: the conductor takes all tokens at the end.
    """

    position: int
    length: int
    sent: int = 1
    gather: bool = False

    @property
    def ended(self) -> bool:
        """Whether all tokens are there."""
        return self.position >= self.length

    @property
    def due(self) -> bool:
        """Whether tokens are sent now."""
        return not self.gather or self.ended


class FreeDecode:
    """Promises room to everyone; each step gives each started sequence a token."""

    def __init__(self, instance: kv_pb2.Instance, step_s: float) -> None:
        self._instance, self._step_s = instance, step_s
        self._transfers = itertools.count(1)
        self._promised: dict[str, RunningSequence] = {}

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.ReserveResponse:
        """Always promises."""
        self._promised[request.sequence.request_id] = RunningSequence(1, request.sequence.sampling.max_tokens)
        target = kv_pb2.TransferTarget(decode=self._instance, transfer_id=next(self._transfers), generation=1)
        return decode_pb2.ReserveResponse(target=target, lease_s=60.0)

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Any) -> None:
        """Run a conductor's sequences for as long as the conductor listens."""
        running = dict[str, RunningSequence]()
        steps = asyncio.create_task(self._steps(running, context))
        try:
            async for request in requests:
                if request.HasField("start") and request.start.request_id in self._promised:
                    start = request.start
                    sequence = running[start.request_id] = self._promised.pop(start.request_id)
                    sequence.gather = start.gather
                elif request.HasField("cancel"):
                    self._promised.pop(request.cancel.request_id, None)
                    running.pop(request.cancel.request_id, None)
        finally:
            steps.cancel()

    async def _steps(self, running: dict[str, RunningSequence], context: Any) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for sequence in running.values():
                sequence.position += 1
            tokens = [self._tokens(name, running) for name, sequence in list(running.items()) if sequence.due]
            if tokens:
                await context.write(decode_pb2.StepsResponse(tokens=tokens))

    def _tokens(self, name: str, running: dict[str, RunningSequence]) -> decode_pb2.SequenceTokens:
        sequence = running[name]
        begin, sequence.sent = sequence.sent, sequence.position
        reason = kv_pb2.FINISH_REASON_UNSPECIFIED
        if sequence.ended:
            reason = kv_pb2.FINISH_REASON_LENGTH
            del running[name]
        token_ids = [TOKEN] * (sequence.sent - begin)
        return decode_pb2.SequenceTokens(request_id=name, position=begin, token_ids=token_ids, finish_reason=reason)


async def join(
    stack: AsyncExitStack, channels: Channels, conductors: Sequence[str], kind: str, number: int, step_s: float = STEP_S
) -> list[JoinAgent]:
    """Serve an engine and let the engine join all conductors until the stack closes."""
    served = Checkpoint.load(str(model_dir())).served()
    instance = kv_pb2.Instance(id=f"{kind}-{number}", epoch=1)
    service: Service
    if kind == "prefill":
        instance.kind = kv_pb2.INSTANCE_KIND_PREFILL
        service = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], FreePrefill()
    else:
        instance.kind = kv_pb2.INSTANCE_KIND_DECODE
        service = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], FreeDecode(instance, step_s)
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
    report = InstanceReport(hello, lambda: load, HeldKeys(1, lambda _: ()))
    board = InstanceBoard(KeyChangeFeed(report.take_events), len(conductors))
    agents = [JoinAgent(channels, conductor, report, board=board) for conductor in conductors]
    for agent in agents:
        stack.callback(asyncio.create_task(agent.run(asyncio.Event())).cancel)
    return agents


async def main() -> None:
    """Join, say so, and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conductor", required=True, help="HOST:PORT, or several, separated by commas")
    parser.add_argument("--each", type=int, default=4, help="instances of each kind")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="seconds from token to token")
    options = parser.parse_args()
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        for kind, number in itertools.product(("prefill", "decode"), range(options.each)):
            for agent in await join(stack, channels, options.conductor.split(","), kind, number, options.step_s):
                await agent.joined.wait()
        print(f"ready: {options.conductor}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
