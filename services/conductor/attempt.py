"""One attempt at a request: a prefill instance computes, a decode instance generates if more than one token is wanted.

An async context manager: on leaving, counters, subscription, promise and call are released on every path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from moonpool.errors import Internal, MoonpoolError, StreamBroken
from moonpool.kv.keys import KEY_BYTES
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2, prefill_pb2
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from services.conductor.answer import Answer
from services.conductor.cluster import BackgroundTasks, Cluster
from services.conductor.core.picture import Plan
from services.conductor.core.stores import StoreView
from services.conductor.inbox import Inbox
from services.conductor.reserve import Claim, Promise

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A placed request: the plan, the request as engines see it, and what is reserved for it."""

    plan: Plan
    spec: kv_pb2.SequenceSpec
    claim: Claim
    promise: Promise | None


class Attempt:
    """Carries out one placement of one request."""

    def __init__(
        self,
        cluster: Cluster,
        background: BackgroundTasks,
        answer: Answer,
        placed: Placed,
        deadline: float,
    ) -> None:
        """Wire the attempt; it begins on entering and owns claim and promise of `placed` from then on.

        `deadline` is in seconds of `time.monotonic()`.
        """
        self.inbox = Inbox(len(answer.tokens), answer.request.max_tokens)
        self.decode_used = False
        """Decode was told to start."""
        self._cluster = cluster
        self._background = background
        self._answer = answer
        self._plan = placed.plan
        self._spec = placed.spec
        self._claim = placed.claim
        self._promise = placed.promise
        self._start = len(answer.tokens)
        self._deadline = deadline
        self._decode_knows = placed.promise is None
        self._prefilled = False
        self._prefill_failed = False
        self._clock = time.monotonic
        self._stack = ExitStack()
        self._call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Subscribe to decode and call prefill."""
        try:
            self._begin()
        except BaseException:
            self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything at once; a prefill whose answer is complete ends in the background."""
        if exc is None and self._prefilled and self._reader is not None and not self._reader.done():
            # The answer is complete; prefill still waits for decode's verdict and offers blocks to the store.
            call, reader = self._call, self._reader
            self._call = self._reader = None
            self._background.adopt(lambda: _finish(call, reader))
        self._release()

    def ended_here(self, *, known_at_decode: bool) -> None:
        """Note that the answer is complete; unless decode knows, it is told when the attempt is left."""
        self._decode_knows = self._decode_knows or known_at_decode

    def blamed(self) -> set[str]:
        """Ids of instances that the next attempt should avoid."""
        blamed = {self._claim.member.id} if self._prefill_failed or self._promise is None else set()
        if self._promise is not None and (self._prefilled or not self._prefill_failed):
            blamed.add(self._promise.member.id)
        return blamed

    def _begin(self) -> None:
        prefill = self._claim.member.instance
        self._stack.callback(self._release_claim)
        if self._promise is not None:
            self._stack.callback(self._release_promise, self._promise)
            self._cluster.steps.get(self._promise.decode).subscribe(self._spec.request_id, self.inbox)
            self._stack.enter_context(self._cluster.watching(self._promise.decode, self.inbox))
        self._stack.enter_context(self._cluster.watching(prefill, self.inbox))
        stub = PrefillServiceStub(self._cluster.channels.get(prefill.address))
        timeout_s = max(self._deadline - self._clock(), 0.001)
        self._call = stub.Prefill(self._prefill_request(), timeout=timeout_s)
        self._reader = asyncio.create_task(self._read(self._call))

    def _release_promise(self, promise: Promise) -> None:
        steps = self._cluster.steps.get(promise.decode)
        steps.unsubscribe(self._spec.request_id)
        promise.release(self._clock())
        if not self._decode_knows:
            steps.cancel(self._spec.request_id, promise.target)
        self._cluster.released()

    def _release_claim(self) -> None:
        self._claim.release(self._clock())

    def _release(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
        self._stack.close()

    def _prefill_request(self) -> prefill_pb2.PrefillRequest:
        request = prefill_pb2.PrefillRequest(sequence=self._spec)
        if self._promise is not None:
            request.target.CopyFrom(self._promise.target)
        sources = [
            prefill_pb2.PrefixSource(instance=instance, blocks=blocks)
            for instance, blocks in self._stores(self._plan.sources)
        ]
        if sources:
            request.source.CopyFrom(sources[0])
            request.other_sources.extend(sources[1:])
        targets = self._stores(self._plan.write_back)
        if targets:
            instance, request.write_back_held = targets[0]
            request.write_back.CopyFrom(instance)
            request.replicas.extend(prefill_pb2.StoreReplica(instance=i, held_blocks=held) for i, held in targets[1:])
        return request

    def _stores(self, views: Sequence[StoreView]) -> list[tuple[kv_pb2.Instance, int]]:
        """Those of a plan's kvstores that are still members, with the leading blocks they hold."""
        members = [(self._cluster.registry.get(view.id), view.blocks) for view in views]
        return [(member.instance, blocks) for member, blocks in members if member is not None]

    async def _read(
        self, call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
    ) -> None:
        """Read the prefill's events; its first token goes to the inbox at once."""
        try:
            async for response in call:
                if response.HasField("accepted"):
                    self._claim.known(response.accepted.number)
                if response.HasField("first_token") and not self._prefilled:
                    self._first_token(response.first_token)
            if not self._prefilled:
                self._fail(StreamBroken(f"{self._plan.prefill.id} ended without a token"))
        except grpc.aio.AioRpcError as error:
            self._fail(from_rpc_error(error))
        except Exception as defect:
            log.error("reading a prefill failed", exc_info=defect)
            self._fail(Internal("reading a prefill failed"))

    def _first_token(self, first: prefill_pb2.FirstToken) -> None:
        self._prefilled = True
        self._release_claim()
        if not first.loaded_tokens:
            picture, prefill = self._cluster.picture, self._claim.member.id
            picture.observe_prefill(prefill, first.computed_tokens, first.local_tokens, first.prefill_s)
        for miss in first.misses:
            key = self._spec.block_keys[miss.block * KEY_BYTES : (miss.block + 1) * KEY_BYTES]
            self._cluster.picture.forget(miss.store.id, [key], self._plan.index_version)
        self._answer.prefilled(first)
        self.inbox.tokens(self._start, [first.token_id])
        if self._promise is not None and not self._answer.request.ends_with(first.token_id, self._start + 1):
            self.decode_used = True
            steps = self._cluster.steps.get(self._promise.decode)
            steps.start(self._spec.request_id, self._promise.target, first.token_id)

    def _fail(self, error: MoonpoolError) -> None:
        """Fail the attempt, unless decode has begun: it begins only when all KV has arrived."""
        if not self.inbox.closed and self.inbox.position <= self._start + 1:
            self._prefill_failed = True
            self.inbox.fail(error)


async def _finish(
    call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse] | None,
    reader: asyncio.Task[None],
) -> None:
    """Wait until the prefill's stream ends; cancel it when the wait is cancelled or takes too long."""
    try:
        await reader
    finally:
        if call is not None:
            call.cancel()
