"""Counts a prompt on a prefill instance, and asks decode instances for a promise of room.

Both count from the moment of choosing; otherwise a burst of requests would go to one instance while its answers are
under way.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc

from moonpool.errors import InvalidRequest, MoonpoolError, Overloaded, Unavailable
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import decode_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from services.conductor.admission import NO_DECODE_ROOM, NO_ROOM_RETRY_S
from services.conductor.cluster import BackgroundTasks, Cluster
from services.conductor.core.cost import PrefillChoice
from services.conductor.core.facts import Demand
from services.conductor.core.picture import Picture, Plan
from services.conductor.registry import Member

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Promise:
    """Room that a decode instance promised to a sequence; counted in the picture until `release`."""

    picture: Picture
    member: Member
    target: kv_pb2.TransferTarget
    claim: int

    @property
    def decode(self) -> kv_pb2.Instance:
        """The instance that promised."""
        return self.member.instance

    def release(self, now: float) -> None:
        """Stop counting it; may be called again. `StepsStream.cancel` tells decode."""
        self.picture.release(self.claim, now)


@dataclass(frozen=True, slots=True)
class Claim:
    """A prompt's place in a prefill instance's queue, counted in the picture until `release`."""

    picture: Picture
    member: Member
    number: int

    @classmethod
    def take(cls, picture: Picture, member: Member, choice: PrefillChoice, now: float) -> Claim:
        """Count the prompt from now on, so that the next one placed sees it."""
        return cls(picture, member, picture.claim_prefill(choice.id, choice.busy_s, now, choice.kvstore))

    def known(self, taken: int) -> None:
        """The instance has the prompt, as its `taken`-th."""
        self.picture.known(self.number, taken)

    def release(self, now: float) -> None:
        """Stop counting it; may be called again."""
        self.picture.release(self.number, now)


async def reserve(
    cluster: Cluster,
    background: BackgroundTasks,
    plan: Plan,
    spec: kv_pb2.SequenceSpec,
    tbt_slo_s: float | None,
    timeout_s: float,
) -> tuple[Promise, set[str]]:
    """Ask the plan's decode instances in turn until one promises room.

    Returns:
        The promise, and the ids of instances that could not be asked.

    Raises:
        Overloaded: at least one instance was asked and has no room (or is too slow for the SLO).
        Unavailable: none could be asked.
        InvalidRequest: the request can never run there.
    """
    request = decode_pb2.ReserveRequest(sequence=spec, tbt_slo_s=tbt_slo_s)
    stores = [member.instance for view in plan.write_back if (member := cluster.registry.get(view.id)) is not None]
    if stores:
        request.write_back.CopyFrom(stores[0])
        request.replicas.extend(stores[1:])
    refusal: Overloaded | None = None
    failure: MoonpoolError = Unavailable("no decode instance is left")
    failed: set[str] = set()
    for choice in plan.decodes:
        member = cluster.registry.get(choice.id)
        if member is None:
            continue
        try:
            return await _ask(cluster, background, member, plan.demand, request, timeout_s), failed
        except Overloaded as error:
            refusal = error
        except MoonpoolError as error:
            log.warning("cannot reserve", decode=member.id, request=spec.request_id, error=str(error))
            failure = error
            failed.add(member.id)
    if refusal is not None:
        raise Overloaded(
            f"no decode instance has room: {refusal}",
            reason=refusal.reason or NO_DECODE_ROOM,
            predicted_tbt_s=refusal.predicted_tbt_s,
            predicted_ttft_s=plan.prefill.ttft_s,
            slo_s=refusal.slo_s,
            retry_after_s=refusal.retry_after_s or NO_ROOM_RETRY_S,
        )
    if isinstance(failure, InvalidRequest):
        raise failure
    raise Unavailable(f"no decode instance could be asked for room: {failure}")


async def _ask(
    cluster: Cluster,
    background: BackgroundTasks,
    member: Member,
    demand: Demand,
    request: decode_pb2.ReserveRequest,
    timeout_s: float,
) -> Promise:
    sequence_id = request.sequence.request_id
    claim = cluster.picture.claim_decode(member.id, demand.prompt_tokens, demand.total_blocks)
    try:
        promised = await _call(cluster, background, member, request, timeout_s)
        target = promised.target
        if target.decode.incarnation != member.instance.incarnation:
            cluster.steps.get(target.decode).cancel(sequence_id, target)
            raise Unavailable(f"{member.id} was restarted")
    except BaseException:
        cluster.picture.release(claim, time.monotonic())
        raise
    cluster.picture.known(claim, promised.number)
    return Promise(cluster.picture, member, target, claim)


async def _call(
    cluster: Cluster, background: BackgroundTasks, member: Member, request: decode_pb2.ReserveRequest, timeout_s: float
) -> decode_pb2.ReserveResponse:
    stub = DecodeServiceStub(cluster.channels.get(member.instance.address))

    async def call() -> decode_pb2.ReserveResponse:
        return await stub.Reserve(request, timeout=timeout_s)

    asked = asyncio.create_task(call())
    try:
        return await asyncio.shield(asked)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        # A promise may still come: wait for it in the background, then cancel it.
        async def undo() -> None:
            late = await asked
            cluster.steps.get(member.instance).cancel(request.sequence.request_id, late.target)

        background.adopt(undo)
        raise
