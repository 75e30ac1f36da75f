"""Errors: the tree, the table of status codes, and the way back."""

import asyncio
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from moonpool.base import errors
from moonpool.base.rpc.errors import DETAIL_KEY, from_rpc_error, to_status
from moonpool.base.rpc.peer_calls import CallLimits, PeerCalls
from moonpool.base.rpc.server import ErrorInterceptor
from moonpool.v1 import kv_pb2

OVERLOADED = errors.Overloaded(
    "too slow", reason="ttft_slo", predicted_ttft_s=2.5, predicted_tbt_s=0.25, slo_s=1.0, retry_after_s=4.0
)
WIRE = [
    errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"),
    OVERLOADED,
    errors.Unavailable("nobody"),
    errors.NotFound("no such request"),
    errors.Mismatch("layout.dtype", "float32 here"),
    errors.Unsupported("not built"),
    errors.DeadlineExceeded("too long"),
    errors.TransferFailed("lease over"),
    errors.FrameError("bad checksum"),
]


def over_the_wire(error: BaseException) -> errors.MoonpoolError:
    code, text, detail = to_status(error)
    metadata = grpc.aio.Metadata((DETAIL_KEY, detail.SerializeToString()))
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=text))


def bare(code: grpc.StatusCode, text: str = "x") -> errors.MoonpoolError:
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text))


@pytest.mark.parametrize("error", WIRE, ids=lambda e: type(e).__name__)
def test_comes_back_as_it_left(error: errors.MoonpoolError) -> None:
    back = over_the_wire(error)
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_codes() -> None:
    codes = {type(e).__name__: to_status(e)[0].name for e in [*WIRE, errors.StreamBroken("s"), errors.Internal("i")]}
    assert codes == {
        "InvalidRequest": "INVALID_ARGUMENT",
        "Overloaded": "RESOURCE_EXHAUSTED",
        "Unavailable": "UNAVAILABLE",
        "NotFound": "NOT_FOUND",
        "Mismatch": "FAILED_PRECONDITION",
        "Unsupported": "UNIMPLEMENTED",
        "DeadlineExceeded": "DEADLINE_EXCEEDED",
        "TransferFailed": "ABORTED",
        "FrameError": "DATA_LOSS",
        "StreamBroken": "UNAVAILABLE",
        "Internal": "INTERNAL",
    }


def test_what_is_not_ours_tells_nothing() -> None:
    for error in (ValueError("secret"), errors.ConfigError("path", "secret"), errors.CheckpointError("secret")):
        code, text, detail = to_status(error)
        assert code is grpc.StatusCode.INTERNAL
        assert "secret" not in text + detail.message
        assert detail.kind == kv_pb2.ERROR_KIND_INTERNAL


def test_groups_count_as_a_leaf() -> None:
    ours = errors.Unavailable("nobody")
    assert to_status(ExceptionGroup("g", [ExceptionGroup("h", [ours])]))[:2] == (grpc.StatusCode.UNAVAILABLE, "nobody")
    assert to_status(ExceptionGroup("g", [ours, KeyError("k")]))[0] is grpc.StatusCode.INTERNAL


def test_common_python_errors() -> None:
    assert to_status(TimeoutError())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert to_status(NotImplementedError())[0] is grpc.StatusCode.UNIMPLEMENTED


def test_exhausted_without_detail_is_not_overloaded() -> None:
    back = bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
    assert type(back) is errors.Internal
    assert "larger than max" in str(back)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.Mismatch),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.ABORTED, errors.TransferFailed),
        (grpc.StatusCode.DATA_LOSS, errors.FrameError),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
        (grpc.StatusCode.INTERNAL, errors.Internal),
    ],
)
def test_bare_codes(code: grpc.StatusCode, kind: type[errors.MoonpoolError]) -> None:
    assert type(bare(code)) is kind


def test_a_stream_that_ended_while_it_was_written_to_is_a_broken_connection() -> None:
    assert type(bare(grpc.StatusCode.INTERNAL, "Internal error from Core")) is errors.Unavailable


@pytest.mark.parametrize("where", ["127.0.0.1:1", "[::1]:50051"])
def test_an_address_at_which_nobody_listens_is_named_first(where: str) -> None:
    kind, why = "ipv6" if where.startswith("[") else "ipv4", "Connection refused"
    theirs = f"{kind}:{where}: Failed to connect to remote host: {why}"
    error = bare(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: UNKNOWN: {theirs}")
    assert str(error) == f"cannot connect to {where}: {why}"


def test_a_damaged_detail_is_no_detail() -> None:
    metadata = grpc.aio.Metadata((DETAIL_KEY, b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata, details="x")
    assert type(from_rpc_error(error)) is errors.Internal
    assert type(from_rpc_error(grpc.RpcError("no code"))) is errors.Internal


def test_long_texts_are_cut_to_what_metadata_carries() -> None:
    code, text, detail = to_status(errors.InvalidRequest("f" * 100_000, "m" * 100_000))
    assert len(text) + detail.ByteSize() < 4096
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "error", [*WIRE, errors.ConfigError("a", "b"), errors.UnsupportedModel("a", "b")], ids=lambda e: type(e).__name__
)
def test_errors_are_copied_and_pickled_whole(error: errors.MoonpoolError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert (str(twin), vars(twin)) == (str(error), vars(error))


def test_the_tree() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert all(issubclass(kind, errors.MoonpoolError) for kind in kinds)
    assert not any(issubclass(kind, asyncio.CancelledError) for kind in kinds)
    for kind in kinds:
        if not kind.__name__.startswith("_"):
            assert f" {kind.__name__}" in f" {errors.__doc__}"


def test_what_travels_fits_the_metadata() -> None:
    """A message of any length and script arrives, cut at a character's end, within gRPC's 8 KiB."""
    long = "模型" * 3000
    _, text, detail = to_status(errors.InvalidRequest(long, long + "\ud800"))
    status = sum(1 if 0x20 <= byte < 0x7F else 3 for byte in text.encode())
    assert status + -(-len(detail.SerializeToString()) // 3) * 4 < 8000
    assert set(text) <= set("模型: ")
    assert len(text) > 300


def test_oversize_is_a_wrong_request() -> None:
    for words in (
        "CLIENT: Sent message larger than max (9 vs. 5)",
        "SERVER: Received message larger than max (9 vs. 5)",
    ):
        error = bare(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        assert type(error) is errors.InvalidRequest
        assert "(9 vs. 5)" in str(error)
    assert type(bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "no threads")) is errors.Internal


async def test_a_status_that_nobody_waits_for_is_dropped() -> None:
    """The call's deadline may pass while the method raises: gRPC then refuses the status."""

    class Ended:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError

    async def method(request: object, context: object) -> None:
        raise errors.DeadlineExceeded("it took too long")

    async def continuation(_: object) -> Any:
        return grpc.unary_stream_rpc_method_handler(method)

    details: Any = SimpleNamespace(method="/moonpool.v1.ConductorService/Generate")
    handler = await ErrorInterceptor(PeerCalls(CallLimits())).intercept_service(continuation, details)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_stream(None, Ended())


@pytest.mark.parametrize(
    "said",
    [
        "errors resolving nowhere: [field:hostname lookup error:address lookup failed: Domain name not found]",
        "DNS resolution failed for nowhere:50051: C-ares status is not ARES_SUCCESS qtype=A name=nowhere",
    ],
)
def test_a_name_without_an_address(said: str) -> None:
    code = grpc.StatusCode.UNAVAILABLE
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=said))
    assert str(error) == "cannot connect to nowhere: no address of this name is known"
