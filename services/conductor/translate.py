"""The core's plain values as messages and errors, and back."""

from moonpool import errors
from moonpool.cluster.speeds import sane
from moonpool.errors import InvalidRequest, Mismatch, MoonpoolError, Overloaded
from moonpool.v1 import decode_pb2, kv_pb2
from services.conductor.core.failures import Failure, Kind
from services.conductor.core.messages import Finish, Promised, Target

FINISHES = {
    Finish.STOP: kv_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: kv_pb2.FINISH_REASON_LENGTH,
    Finish.CANCELLED: kv_pb2.FINISH_REASON_CANCELLED,
}
_KINDS = {getattr(errors, kind.value): kind for kind in Kind}


def failure_of(error: MoonpoolError) -> Failure:
    """An error as the core sees it."""
    kind = _KINDS.get(type(error), Kind.INTERNAL)
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
    """The error that a client gets."""
    match failure.kind:
        case Kind.OVERLOADED:
            return Overloaded(
                failure.message,
                reason=failure.reason,
                predicted_ttft_s=failure.predicted_ttft_s,
                predicted_tbt_s=failure.predicted_tbt_s,
                slo_s=failure.slo_s,
                retry_after_s=failure.retry_after_s,
            )
        case Kind.INVALID:
            return InvalidRequest(failure.field, failure.message)
        case Kind.MISMATCH:
            return Mismatch(failure.field, failure.message)
    kind: type[MoonpoolError] = getattr(errors, failure.kind.value)
    return kind(failure.message)


def finish_of(reason: kv_pb2.FinishReason.ValueType) -> Finish | None:
    """A finish reason as the core sees it; None when there is none yet."""
    return next((finish for finish, value in FINISHES.items() if value == reason), None)


def promised_of(response: decode_pb2.ReserveResponse) -> Promised:
    """A decode instance's promise."""
    target, decode = response.target, response.target.decode
    plain = Target(
        decode.id, decode.incarnation, decode.address, target.transfer_id, target.generation, target.held_blocks
    )
    return Promised(plain, sane(response.lease_s), response.number, sane(response.predicted_tbt_s))


def decode_proto(target: Target) -> kv_pb2.Instance:
    """The instance that has promised."""
    return kv_pb2.Instance(
        id=target.decode,
        incarnation=target.incarnation,
        kind=kv_pb2.INSTANCE_KIND_DECODE,
        address=target.address,
    )


def target_proto(target: Target) -> kv_pb2.TransferTarget:
    """The promise in the contract's form."""
    return kv_pb2.TransferTarget(
        decode=decode_proto(target),
        transfer_id=target.transfer_id,
        generation=target.generation,
        held_blocks=target.held_blocks,
    )
