"""Core values to and from messages of the protocol: failures, reservations, instances, loads, placements."""

from __future__ import annotations

from math import isfinite

from moonpool.base import errors
from moonpool.base.cluster.proto_conversion import finite_or_zero, speeds_from_proto
from moonpool.base.errors import InvalidRequest, Mismatch, MoonpoolError, Overloaded
from moonpool.base.kv.keys import KEY_BYTES, window_key
from moonpool.base.kv.layout import KVLayout
from moonpool.base.sampling_params import lora_option
from moonpool.conductor.core.actions import AnnouncePlacement
from moonpool.conductor.core.events import CompletionReason, PrefillMeasurements, ReserveGranted
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.conductor.core.tenant_activity import ConductorActivity, TellActivity, TenantActivity
from moonpool.conductor.core.tenant_ledger import MAX_CONDUCTORS, MAX_ROWS
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2

FINISH_REASONS = {
    CompletionReason.STOP: kv_pb2.FINISH_REASON_STOP,
    CompletionReason.LENGTH: kv_pb2.FINISH_REASON_LENGTH,
    CompletionReason.CANCELLED: kv_pb2.FINISH_REASON_CANCELLED,
}

_FAILURE_KINDS = {getattr(errors, kind.value): kind for kind in FailureKind}

_INSTANCE_KINDS = {
    kv_pb2.INSTANCE_KIND_PREFILL: InstanceKind.PREFILL,
    kv_pb2.INSTANCE_KIND_DECODE: InstanceKind.DECODE,
    kv_pb2.INSTANCE_KIND_KVSTORE: InstanceKind.KVSTORE,
}


# --- failures and finish reasons --------------------------------------------------------------------------------------


def failure_of(error: MoonpoolError) -> Failure:
    """Return the failure that the core gets for an error."""
    kind = _FAILURE_KINDS.get(type(error), FailureKind.INTERNAL)
    if isinstance(error, InvalidRequest | Mismatch):
        return Failure(kind, error.message, field=error.field)
    if isinstance(error, Overloaded):
        return Failure(
            kind,
            error.message,
            reason=error.reason,
            predicted_ttft_s=error.predicted_ttft_s,
            predicted_tbt_s=error.predicted_tbt_s,
            slo_s=error.slo_s,
            retry_after_s=error.retry_after_s,
        )
    return Failure(kind, error.message)


def error_of(failure: Failure) -> MoonpoolError:
    """Return the error that a client gets for a failure of the core."""
    match failure.kind:
        case FailureKind.OVERLOADED:
            return Overloaded(
                failure.message,
                reason=failure.reason,
                predicted_ttft_s=failure.predicted_ttft_s,
                predicted_tbt_s=failure.predicted_tbt_s,
                slo_s=failure.slo_s,
                retry_after_s=failure.retry_after_s,
            )
        case FailureKind.INVALID:
            return InvalidRequest(failure.field, failure.message)
        case FailureKind.MISMATCH:
            return Mismatch(failure.field, failure.message)
    kind: type[MoonpoolError] = getattr(errors, failure.kind.value)
    return kind(failure.message)


def finish_of(reason: kv_pb2.FinishReason.ValueType) -> CompletionReason | None:
    """Return the core's form of a finish reason; None if there is none yet."""
    return next((finish for finish, value in FINISH_REASONS.items() if value == reason), None)


# --- reservations at decode -------------------------------------------------------------------------------------------


def reserve_granted(response: decode_pb2.ReserveResponse) -> ReserveGranted:
    """Return a decode instance's answer to `Reserve`."""
    target, decode = response.target, response.target.decode
    reservation = DecodeReservation(
        decode.id, decode.epoch, decode.address, target.transfer_id, target.generation, target.held_blocks
    )
    return ReserveGranted(
        reservation, finite_or_zero(response.lease_s), response.number, finite_or_zero(response.predicted_tbt_s)
    )


def prefill_measurements(first: prefill_pb2.FirstToken, block_keys: bytes, lasted_s: float) -> PrefillMeasurements:
    """Return an instance's measurements of a prompt, whose blocks have these packed keys.

    No time is longer than the call, which took `lasted_s` seconds.
    """
    misses = list[tuple[str, bytes]]()
    for miss in first.misses:
        key = block_keys[miss.block * KEY_BYTES : (miss.block + 1) * KEY_BYTES]
        misses.append((miss.store.id, window_key(key) if miss.windowed and key else key))
    loads = tuple([(read.source.id, read.blocks, min(finite_or_zero(read.seconds), lasted_s)) for read in first.reads])
    there_s = min(finite_or_zero(first.queue_s) + finite_or_zero(first.prefill_s), lasted_s)
    return PrefillMeasurements(first.computed_tokens, there_s, tuple(misses), loads)


def reserved_instance_proto(reservation: DecodeReservation) -> kv_pb2.Instance:
    """Return the decode instance of a reservation."""
    return kv_pb2.Instance(
        id=reservation.decode,
        epoch=reservation.epoch,
        kind=kv_pb2.INSTANCE_KIND_DECODE,
        address=reservation.address,
    )


def reservation_proto(reservation: DecodeReservation) -> kv_pb2.TransferTarget:
    """Return a reservation as the target of a KV transfer."""
    return kv_pb2.TransferTarget(
        decode=reserved_instance_proto(reservation),
        transfer_id=reservation.transfer_id,
        generation=reservation.generation,
        held_blocks=reservation.held_blocks,
    )


# --- instances --------------------------------------------------------------------------------------------------------


def instance_facts(hello: conductor_pb2.JoinHello) -> InstanceFacts:
    """Return the facts in a checked hello."""
    kind = _INSTANCE_KINDS[hello.instance.kind]
    return InstanceFacts(
        id=hello.instance.id,
        epoch=hello.instance.epoch,
        kind=kind,
        total_blocks=hello.total_blocks,
        shape=None if kind is InstanceKind.KVSTORE else _kv_shape(hello.model),
        speeds=speeds_from_proto(hello.speed),
        stages=max(hello.stages, 1),
        max_num_batched_tokens=hello.max_num_batched_tokens,
        capacity_bytes=hello.capacity_bytes,
        switches_role=hello.either_role,
        reports_ssd=hello.tells_cold,
        kv_domain=hello.kv_domain,
        unsupported=tuple(hello.unsupported),
        loras=tuple([lora_option(lora) for lora in hello.loras]),
        uses_kvstores=hello.uses_kvstores,
        arrival_order=hello.arrival_order,
        computes_prompts=hello.computes_prompts and kind is InstanceKind.DECODE,
        in_place_role=hello.in_place_role,
    )


def kind_to_proto(kind: InstanceKind) -> kv_pb2.InstanceKind.ValueType:
    """Return the protocol's form of an instance kind."""
    return next(proto for proto, plain in _INSTANCE_KINDS.items() if plain is kind)


def load_facts(load: conductor_pb2.LoadReport) -> LoadFacts:
    """Return the facts in a load report."""
    return LoadFacts(
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks,
        context_tokens=load.context_tokens,
        drain_s=finite_or_zero(load.drain_s) if load.HasField("drain_s") else None,
        queued_tokens=load.queued_tokens,
        speeds=speeds_from_proto(load.speed) if load.HasField("speed") else None,
        draining=load.draining,
        taken=load.taken,
        answer_tokens=load.expected_answer_tokens,
        conductors=load.conductors,
        activities=tuple([_conductor_activity(activity) for activity in load.activities[:MAX_CONDUCTORS]]),
    )


def _conductor_activity(told: conductor_pb2.ConductorActivity) -> ConductorActivity:
    rows = tuple([_tenant_activity(row) for row in told.tenants[:MAX_ROWS]])
    return ConductorActivity(told.conductor, told.epoch, finite_or_zero(told.age_s), rows, told.more)


def _tenant_activity(row: conductor_pb2.TenantActivity) -> TenantActivity:
    return TenantActivity(
        row.tenant,
        row.version,
        row.weight if isfinite(row.weight) and row.weight > 0 else 1.0,
        row.requests,
        row.tokens,
        finite_or_zero(row.work_s),
        row.running,
        row.waiting,
        row.waiting_blocks,
        finite_or_zero(row.waiting_s),
        finite_or_zero(row.requests_owed),
        finite_or_zero(row.tokens_owed),
        finite_or_zero(row.age_s),
    )


def activity_to_proto(told: TellActivity) -> conductor_pb2.ConductorActivity:
    """Return what an instance is told for the other conductors."""
    rows = [
        conductor_pb2.TenantActivity(
            tenant=row.tenant,
            version=row.version,
            weight=row.weight,
            requests=row.requests,
            tokens=row.tokens,
            work_s=row.work_s,
            running=row.running,
            waiting=row.waiting,
            waiting_blocks=row.waiting_blocks,
            waiting_s=row.waiting_s,
            requests_owed=row.requests_owed,
            tokens_owed=row.tokens_owed,
        )
        for row in told.tenants
    ]
    return conductor_pb2.ConductorActivity(number=told.number, tenants=rows, more=told.more)


def _kv_shape(model: conductor_pb2.ModelInfo) -> KVShape:
    layout = KVLayout.from_proto(model.layout)
    divided = len(layout.stored_parts) > 1
    window_bytes = layout.windowed_bytes if divided else 0
    return KVShape(
        layout.block_size,
        -(-(layout.block_bytes - window_bytes) // layout.block_size),
        layout.layers,
        emulated=model.emulated != "",
        window_blocks=layout.window_blocks if divided else 0,
        window_bytes=window_bytes,
    )


# --- placements -------------------------------------------------------------------------------------------------------


def placement_proto(placed: AnnouncePlacement) -> conductor_pb2.Placement:
    """Return where a request is placed, and the predicted latencies."""
    plan = placed.plan
    return conductor_pb2.Placement(
        prefill=plan.prefill.id,
        decode=placed.target.decode if placed.target is not None else "",
        kvstore=plan.prefill.source,
        predicted_cached_blocks=plan.prefill.used_blocks,
        predicted_ttft_s=placed.waited_s + plan.prefill.ttft_s,
        emulated=plan.emulated,
        predicted_tbt_s=placed.tpot.tbt_s,
        predicted_tpot_s=placed.tpot.tpot_s,
    )


def candidate_proto(choice: PrefillChoice) -> conductor_pb2.CandidateExplanation:
    """Return a considered prefill instance, with predicted costs."""
    return conductor_pb2.CandidateExplanation(
        instance=choice.id,
        local_blocks=choice.local_blocks,
        used_blocks=choice.used_blocks,
        queue_s=choice.queue_s + choice.tail_s,
        load_s=choice.load_s,
        prefill_s=choice.prefill_s,
        excluded=choice.excluded,
        overhead_s=choice.overhead_s,
        source=choice.source,
        cold_blocks=choice.cold_blocks,
    )
