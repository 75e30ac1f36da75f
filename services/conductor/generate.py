"""One request from arrival to its last token: place, reserve, prefill, decode; again after a failed attempt.

A new attempt starts from the prompt and the tokens generated so far. Sampling is a pure function of the position, so
the stream continues where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from moonpool.errors import (
    DeadlineExceeded,
    FrameError,
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    Overloaded,
    StreamBroken,
    TransferFailed,
    Unavailable,
    Unsupported,
)
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor import admission
from services.conductor.answer import LENGTH, STOP, Answer
from services.conductor.attempt import Attempt, Placed
from services.conductor.cluster import BackgroundTasks, Cluster
from services.conductor.config import ConductorConfig
from services.conductor.core.picture import Plan
from services.conductor.explain import placement
from services.conductor.request import ATTEMPT_MARK
from services.conductor.reserve import Claim, reserve

log = get_logger(__name__)

FIRST_BACKOFF_S = 0.05
BACKOFF_FACTOR = 4.0
_FINAL = (InvalidRequest, Unsupported)
_INNER = (TransferFailed, StreamBroken, FrameError, Mismatch)
"""Errors between instances; a client is told that its request could not be served."""

Emit = Callable[[conductor_pb2.GenerateResponse], Awaitable[None]]


class Generation:
    """One request being served."""

    def __init__(
        self,
        cluster: Cluster,
        background: BackgroundTasks,
        config: ConductorConfig,
        answer: Answer,
        deadline: float,
        emit: Emit,
    ) -> None:
        """Wire the request.

        `deadline` is in seconds of `time.monotonic()` (uvloop's own clock counts milliseconds); `emit` sends one
        message to the client and waits for a slow one.
        """
        self._cluster = cluster
        self._background = background
        self._config = config
        self._request = answer.request
        self._answer = answer
        self._deadline = deadline
        self._emit = emit
        self._clock = time.monotonic
        self._suspects: set[str] = set()
        self._attempt: Attempt | None = None
        self._placement = conductor_pb2.Placement()
        self._stopping = False

    def cancel(self) -> None:
        """End the answer now as cancelled, with the tokens so far."""
        self._stopping = True
        if self._attempt is not None:
            self._attempt.inbox.finish(kv_pb2.FINISH_REASON_CANCELLED)
        self._cluster.released()  # it may be waiting for room

    async def run(self) -> None:
        """Serve the request until its last message is sent.

        Raises:
            Overloaded, Unavailable, InvalidRequest: it was not taken, or cannot be continued.
            DeadlineExceeded: the request took too long.
        """
        try:
            async with asyncio.timeout(self._deadline - self._clock()):
                await self._serve()
                finished = self._answer.finished(self._placement, self._clock())
                await self._emit(conductor_pb2.GenerateResponse(finished=finished))
        except TimeoutError:
            raise DeadlineExceeded("the request took longer than it may") from None

    async def _serve(self) -> None:
        failures = 0
        while not self._answer.finish:
            placed = await self._place(failures)
            self._placement = placement(placed.plan, placed.promise.decode.id if placed.promise else "")
            self._cluster.decisions.placed(self._request.id, self._placement, placed.plan.candidates)
            try:
                await self._attempt_at(placed)
            except MoonpoolError as error:
                if isinstance(error, _FINAL):
                    raise
                if self._stopping or failures >= self._config.retries:
                    raise _given_up(error, failures + 1) from error
                log.warning("placing anew", request=self._request.id, failures=failures + 1, error=str(error))
                await self._back_off(failures)
                failures += 1

    async def _back_off(self, failures: int) -> None:
        """Wait before a retry, unless it is the first and other instances can take over."""
        kinds = (kv_pb2.INSTANCE_KIND_PREFILL, kv_pb2.INSTANCE_KIND_DECODE)
        members = [self._cluster.registry.of_kind(kind) for kind in kinds]
        alone = any(all(member.id in self._suspects for member in same) for same in members)
        if failures or alone:
            await asyncio.sleep(FIRST_BACKOFF_S * BACKOFF_FACTOR**failures)

    async def _attempt_at(self, placed: Placed) -> None:
        attempt = Attempt(self._cluster, self._background, self._answer, placed, self._deadline)
        self._attempt = attempt
        try:
            async with attempt:
                if self._stopping:
                    self.cancel()
                await self._emit_placed()
                await self._consume(attempt)
        except MoonpoolError:
            self._suspects |= attempt.blamed()
            raise
        finally:
            self._attempt = None
        if not attempt.decode_used:
            self._placement.decode = ""

    async def _consume(self, attempt: Attempt) -> None:
        """Hand tokens on until the answer has ended."""
        answer = self._answer
        while not answer.finish:
            tokens, reason = await attempt.inbox.take()
            first = not answer.tokens
            delta = answer.extend(tokens, self._clock())
            if answer.finish or reason:
                attempt.ended_here(known_at_decode=reason in (STOP, LENGTH))
            if first and answer.tokens:
                self._cluster.decisions.first_token(self._request.id, answer.first_token_at - answer.arrived)
            await self._emit_delta(delta)
            if reason and not answer.finish:
                await self._emit_delta(answer.end(reason))

    async def _emit_delta(self, delta: conductor_pb2.TokenDelta | None) -> None:
        if delta is not None:
            await self._emit(conductor_pb2.GenerateResponse(delta=delta))

    async def _emit_placed(self) -> None:
        placed = conductor_pb2.Placed(
            request_id=self._request.id,
            placement=self._placement,
            prompt_tokens=len(self._request.prompt),
            seed=self._request.sampling.seed or 0,
        )
        await self._emit(conductor_pb2.GenerateResponse(placed=placed))

    async def _place(self, failures: int) -> Placed:
        """Find a place; waits for room, or for lost instances to come back, within limits."""
        keys = self._request.keys_with(self._answer.tokens)
        wire_id = f"{self._request.id}{ATTEMPT_MARK}{failures}" if failures else self._request.id
        spec = self._request.sequence(wire_id, self._answer.tokens, keys)
        error: MoonpoolError
        try:
            if failures or not self._cluster.room_queue.locked():
                return await self._try_place(keys, spec, recovering=failures > 0)
            error = admission.no_room("other requests wait for room already")
        except (Unavailable, Overloaded) as refusal:
            error = refusal
        return await self._wait_for_place(keys, spec, error, recovering=failures > 0)

    async def _wait_for_place(
        self, keys: Sequence[bytes], spec: kv_pb2.SequenceSpec, error: MoonpoolError, *, recovering: bool
    ) -> Placed:
        """Look for a place whenever the cluster changes; one request at a time looks for room."""
        queue = contextlib.nullcontext() if recovering else self._cluster.room_queue
        limit_s = self._wait_limit_s(error, recovering=recovering)
        if self._stopping or limit_s <= 0:
            self._cluster.decisions.refused(self._request.id, str(error))
            raise error
        try:
            async with asyncio.timeout(limit_s), queue:
                while True:
                    change = self._cluster.next_change()
                    try:
                        return await self._try_place(keys, spec, recovering=recovering)
                    except (Unavailable, Overloaded) as refusal:
                        error = refusal
                    if self._stopping or self._wait_limit_s(error, recovering=recovering) <= 0:
                        break
                    await change.wait()
        except TimeoutError:
            pass
        self._cluster.decisions.refused(self._request.id, str(error))
        raise error

    def _wait_limit_s(self, error: MoonpoolError, *, recovering: bool) -> float:
        """Seconds to wait for the cluster to change after `error`."""
        if recovering:
            return self._config.recovery_s
        if not isinstance(error, Overloaded) or error.reason != admission.NO_DECODE_ROOM:
            return 0.0
        if self._request.slo.ttft_s is None:
            return self._config.room_wait_s
        return min(self._config.room_wait_s, self._request.slo.ttft_s - (self._clock() - self._answer.arrived))

    async def _try_place(self, keys: Sequence[bytes], spec: kv_pb2.SequenceSpec, *, recovering: bool) -> Placed:
        now = self._clock()
        plan = self._cluster.picture.plan(
            tokens=len(self._request.prompt) + len(self._answer.tokens),
            answer_tokens=self._answer.remaining,
            keys=keys,
            prompt_key=self._request.prompt_key,
            now=now,
            suspects=self._suspects,
        )
        if not recovering:
            self._admit(plan, now)
        member = self._cluster.registry.get(plan.prefill.id)
        assert member is not None, "planned an instance that is not there"
        claim = Claim.take(self._cluster.picture, member, plan.prefill, now)
        if not plan.decodes:
            return Placed(plan, spec, claim, None)
        tbt_s = None if recovering else self._request.slo.tbt_s
        try:
            promise, refused = await reserve(
                self._cluster, self._background, plan, spec, tbt_s, self._config.reserve_timeout_s
            )
        except BaseException:
            claim.release(self._clock())
            raise
        self._suspects |= refused
        return Placed(plan, spec, claim, promise)

    def _admit(self, plan: Plan, now: float) -> None:
        """Refuse a request whose SLO is predicted to be missed; only before its first placement.

        Raises:
            Overloaded: with reason, prediction and retry time.
        """
        slo = self._request.slo
        try:
            admission.check_ttft(slo, plan.prefill, now - self._answer.arrived)
            if plan.decodes:
                admission.check_tbt(slo, min(choice.tbt_s for choice in plan.decodes))
        except Overloaded as error:
            self._cluster.decisions.refused(self._request.id, f"{error.reason}: {error}", plan.candidates)
            raise


def _given_up(error: MoonpoolError, attempts: int) -> MoonpoolError:
    """The error for the client when the last attempt has failed."""
    if isinstance(error, _INNER):
        return Unavailable(f"given up after {attempts} placements; the last failed: {error}")
    return error
