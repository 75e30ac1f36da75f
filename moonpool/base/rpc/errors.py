"""Our errors as gRPC status codes, and back.

The detail travels in trailing metadata. RESOURCE_EXHAUSTED alone is also gRPC's word for an oversize message:
`Overloaded` exists only with a detail.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from moonpool.base.errors import (
    DeadlineExceeded,
    FrameError,
    Internal,
    InvalidRequest,
    Mismatch,
    MoonpoolError,
    NotFound,
    Overloaded,
    PermissionDenied,
    StreamBroken,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from moonpool.v1 import kv_pb2

DETAIL_KEY = "moonpool-error-bin"


# Metadata is limited to 8 KiB by default. The text travels twice: as bytes in the detail (base64), and as the status'
# message, in which a byte beyond ASCII takes three.
_TEXT_BYTES = 1000
_OVERSIZE = ("CLIENT: Sent message larger than max", "SERVER: Received message larger than max")  # gRPC's own words
_HIDDEN = "internal error; the service's log tells more"
_TABLE: dict[type[MoonpoolError], tuple[grpc.StatusCode, kv_pb2.ErrorKind.ValueType]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, kv_pb2.ERROR_KIND_INVALID),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, kv_pb2.ERROR_KIND_OVERLOADED),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, kv_pb2.ERROR_KIND_UNAVAILABLE),
    NotFound: (grpc.StatusCode.NOT_FOUND, kv_pb2.ERROR_KIND_NOT_FOUND),
    Mismatch: (grpc.StatusCode.FAILED_PRECONDITION, kv_pb2.ERROR_KIND_MISMATCH),
    Unsupported: (grpc.StatusCode.UNIMPLEMENTED, kv_pb2.ERROR_KIND_UNSUPPORTED),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, kv_pb2.ERROR_KIND_UNAVAILABLE),
    TransferFailed: (grpc.StatusCode.ABORTED, kv_pb2.ERROR_KIND_UNAVAILABLE),
    StreamBroken: (grpc.StatusCode.UNAVAILABLE, kv_pb2.ERROR_KIND_UNAVAILABLE),
    FrameError: (grpc.StatusCode.DATA_LOSS, kv_pb2.ERROR_KIND_MISMATCH),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, kv_pb2.ERROR_KIND_DENIED),
    PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, kv_pb2.ERROR_KIND_DENIED),
    Internal: (grpc.StatusCode.INTERNAL, kv_pb2.ERROR_KIND_INTERNAL),
}


def to_status(exc: BaseException) -> tuple[grpc.StatusCode, str, kv_pb2.ErrorDetail]:
    """Status code, text and detail with which an exception leaves a servicer.

    A group of exceptions counts as the first leaf if all leaves are ours. Errors outside the table (foreign exceptions,
    and local errors such as ConfigError) become INTERNAL without text.
    """
    error = _first_leaf(exc)
    if isinstance(error, TimeoutError):
        error = DeadlineExceeded("a wait inside the service took too long")
    elif isinstance(error, NotImplementedError):  # what protobuf's generated base classes raise
        error = Unsupported("this call is not built yet")
    elif isinstance(error, DecodeError):
        error = InvalidRequest("", "malformed message")
    row = _TABLE.get(type(error)) if isinstance(error, MoonpoolError) else None
    if row is None:
        detail = kv_pb2.ErrorDetail(kind=kv_pb2.ERROR_KIND_INTERNAL, message=_HIDDEN)
        return grpc.StatusCode.INTERNAL, _HIDDEN, detail
    assert isinstance(error, MoonpoolError)
    code, kind = row
    detail = kv_pb2.ErrorDetail(kind=kind, message=_clipped(error.message))
    if isinstance(error, InvalidRequest | Mismatch):
        detail.field = _clipped(error.field)
    elif isinstance(error, Overloaded):
        detail.overloaded.reason = error.reason
        detail.overloaded.predicted_ttft_s = error.predicted_ttft_s
        detail.overloaded.predicted_tbt_s = error.predicted_tbt_s
        detail.overloaded.slo_s = error.slo_s
        detail.overloaded.retry_after_s = error.retry_after_s
    return code, _clipped(str(error)), detail


def _clipped(text: str) -> str:
    return text.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")


def from_rpc_error(error: grpc.RpcError) -> MoonpoolError:
    """Our error for a failed call, of `grpc` or `grpc.aio`."""
    if not isinstance(error, grpc.aio.AioRpcError) and not hasattr(error, "code"):
        return Internal(f"a call failed: {error!r}")
    code: grpc.StatusCode = error.code()
    text: str = _UNREACHED.sub(r"cannot connect to \1: ", error.details() or code.name)
    text = _UNKNOWN_HOST.sub(r"cannot connect to \1: no address of this name is known", text)
    detail = _detail(error.trailing_metadata() or ())
    if detail is None:
        return _from_bare_code(code, text)
    match detail.kind:
        case kv_pb2.ERROR_KIND_INVALID:
            return InvalidRequest(detail.field, detail.message)
        case kv_pb2.ERROR_KIND_OVERLOADED if detail.HasField("overloaded"):
            over = detail.overloaded
            return Overloaded(
                detail.message,
                reason=over.reason,
                predicted_ttft_s=over.predicted_ttft_s,
                predicted_tbt_s=over.predicted_tbt_s,
                slo_s=over.slo_s,
                retry_after_s=over.retry_after_s,
            )
        case kv_pb2.ERROR_KIND_MISMATCH if code != grpc.StatusCode.DATA_LOSS:
            return Mismatch(detail.field, detail.message)
    return _from_bare_code(code, detail.message)


_UNREACHED = re.compile(
    r"failed to connect to all addresses; last error: \w+: ipv[46]:(\S+): (?:Failed to connect to remote host: )?"
)
"""gRPC's words if no server listens at an address."""
_UNKNOWN_HOST = re.compile(r"(?:errors resolving|DNS resolution failed for) ([^\s:]+).*", re.DOTALL)
"""Its words if a name has no address."""
_WROTE_TO_ENDED = "Internal error from Core"
"""Its words if a stream ends beneath a message that is being written: the write fails before the status is known."""
_BARE: dict[grpc.StatusCode, Callable[[str], MoonpoolError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: partial(InvalidRequest, ""),
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: partial(Mismatch, ""),
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: TransferFailed,
    grpc.StatusCode.DATA_LOSS: FrameError,
}


def _from_bare_code(code: grpc.StatusCode, text: str) -> MoonpoolError:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and text.startswith(_OVERSIZE):
        return InvalidRequest("", f"the request is too large: {text}")
    if code is grpc.StatusCode.CANCELLED:  # the other side's doing: our own cancel is asyncio.CancelledError
        return Unavailable(f"the call was cancelled: {text}")
    if code is grpc.StatusCode.INTERNAL and text == _WROTE_TO_ENDED:
        return Unavailable("the call ended while a message was sent")
    make = _BARE.get(code)
    return Internal(f"{code.name}: {text}") if make is None else make(text)


def _detail(metadata: Iterable[Any]) -> kv_pb2.ErrorDetail | None:
    for key, value in metadata:
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return kv_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _first_leaf(exc: BaseException) -> BaseException:
    """The exception that a group stands for: the first leaf if all leaves are ours, else the first foreign leaf."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    leaves = [_first_leaf(inner) for inner in exc.exceptions]
    return next((leaf for leaf in leaves if not isinstance(leaf, MoonpoolError)), leaves[0])
