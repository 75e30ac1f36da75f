"""Maps Moonpool's errors to HTTP status codes and OpenAI's error body."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from moonpool.base.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MoonpoolError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from moonpool.base.remedies import remedy

RETRY_UNAVAILABLE_S = 1.0
MAX_RETRY_S = 3600.0
MAX_MESSAGE_CHARS = 2000
"""Of an error's text, which may quote the request."""
_INVALID, _NOT_FOUND, _SERVER = "invalid_request_error", "not_found_error", "server_error"
_PARAMETERS = {"token_ids": "prompt_token_ids"}
"""Names of the SDK's fields that have another name over HTTP."""


class HttpError(MoonpoolError):
    """A request refused for its HTTP form, before the content is read.

    Attributes:
        status: status code of the response.
        code: machine-readable code in the error body.
        parameter: name of the wrong field or header; "" for none.
        close: close the connection after the response, because the rest of the request is not read.
    """

    def __init__(
        self, status: HTTPStatus, code: str, message: str, *, parameter: str = "", close: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.parameter = parameter
        self.close = close


class BudgetSpentError(MoonpoolError):
    """An API key or a tenant has used up the budget.

    Attributes:
        what: "requests" or "tokens".
        retry_after_s: seconds until the budget allows a request again.
    """

    def __init__(self, what: str, owner: str, per_minute: int, retry_after_s: float) -> None:
        """`owner` names the key or tenant, `per_minute` is the budget's size."""
        super().__init__(
            f"rate limit reached: {owner} may use {per_minute} {what} per minute; try again in {retry_after_s:.1f} s"
        )
        self.what = what
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error response. `detail` has the fields of the error body beside OpenAI's four."""

    status: HTTPStatus
    kind: str
    message: str
    parameter: str | None = None
    code: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def notes(self) -> dict[str, object]:
        """What the log says of the error. The message may quote the request and is left out of wrong requests."""
        reason = {} if self.status == HTTPStatus.BAD_REQUEST else {"reason": self.message}
        return {"code": self.code or "", "parameter": self.parameter or "", **reason}

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        error = {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.code}
        return {"error": error | self.detail}


def error_response(error: Exception) -> ErrorResponse:
    """The response to an exception. A foreign exception becomes 500 without text. Long texts are cut."""
    found = _error_response(error)
    message, parameter = found.message[:MAX_MESSAGE_CHARS], found.parameter and found.parameter[:MAX_MESSAGE_CHARS]
    help_at = remedy(message, found.code or "")  # not all of a text that may quote a large body
    detail = found.detail | ({"help": help_at} if help_at else {})
    return replace(found, message=message, parameter=parameter, detail=detail)


def _error_response(error: Exception) -> ErrorResponse:
    match error:
        case HttpError():
            return _http_error(error)
        case BudgetSpentError():
            return _budget_error(error)
        case InvalidRequest(field="model"):
            return ErrorResponse(HTTPStatus.NOT_FOUND, _NOT_FOUND, error.message, "model", "model_not_found")
        case InvalidRequest():
            return _invalid_request_error(error)
        case Overloaded():
            return _overloaded_error(error)
        case Unavailable():
            headers = _retry_headers(RETRY_UNAVAILABLE_S)
            return ErrorResponse(
                HTTPStatus.SERVICE_UNAVAILABLE, _SERVER, error.message, code="unavailable", headers=headers
            )
        case DeadlineExceeded():
            return ErrorResponse(HTTPStatus.GATEWAY_TIMEOUT, _SERVER, error.message, code="timeout")
        case Unauthenticated():
            return ErrorResponse(
                HTTPStatus.UNAUTHORIZED,
                _INVALID,
                error.message,
                "authorization",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer", "connection": "close"},
            )
        case PermissionDenied():
            return ErrorResponse(HTTPStatus.FORBIDDEN, _INVALID, error.message, code="permission_denied")
        case NotFound():
            return ErrorResponse(HTTPStatus.NOT_FOUND, _NOT_FOUND, error.message, code="not_found")
        case Unsupported():
            return ErrorResponse(HTTPStatus.BAD_REQUEST, _INVALID, str(error), code="unsupported")
    message = str(error) if isinstance(error, MoonpoolError) else "internal error; see the gateway's log"
    return ErrorResponse(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER, message, code="internal")


def _http_error(error: HttpError) -> ErrorResponse:
    headers = {"connection": "close"} if error.close else {}
    return ErrorResponse(error.status, _INVALID, error.message, error.parameter or None, error.code, headers=headers)


def _budget_error(error: BudgetSpentError) -> ErrorResponse:
    """429 with a type that names the used-up budget, as OpenAI's does."""
    return ErrorResponse(
        HTTPStatus.TOO_MANY_REQUESTS,
        error.what,
        error.message,
        code="rate_limit_exceeded",
        detail={"retry_after_s": error.retry_after_s},
        headers=_retry_headers(error.retry_after_s),
    )


def _invalid_request_error(error: InvalidRequest) -> ErrorResponse:
    name = error.field.removeprefix("sampling.")
    name = _PARAMETERS.get(name, name)
    return ErrorResponse(
        HTTPStatus.BAD_REQUEST,
        _INVALID,
        f"{name}: {error.message}" if name else error.message,
        name or None,
        "invalid_value",
    )


def _overloaded_error(error: Overloaded) -> ErrorResponse:
    """429 with the conductor's reason, prediction and retry time. Clients act on the headers."""
    names = ("predicted_ttft_s", "predicted_tbt_s", "slo_s", "retry_after_s")
    detail = {"reason": error.reason, **{name: _finite(getattr(error, name)) for name in names}}
    headers = _retry_headers(error.retry_after_s)
    return ErrorResponse(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limit_error",
        error.message,
        code=error.reason,
        detail=detail,
        headers=headers,
    )


def _finite(value: float) -> float | None:
    """The value, None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _retry_headers(seconds: float) -> dict[str, str]:
    """`Retry-After` in whole seconds, and `retry-after-ms`, which OpenAI's clients read first."""
    seconds = min(seconds, MAX_RETRY_S)
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}
