"""Every error Moonpool raises on purpose, in one tree; free of grpc and torch.

`moonpool.base.rpc.errors` maps them to gRPC status codes and back.

    MoonpoolError
    ├── InvalidRequest      the request is wrong; `field` names the wrong field
    ├── Overloaded          no placement keeps the request's SLO; says why, the prediction and when to retry
    ├── Unavailable         no instance can serve this now, or the peer cannot be reached
    ├── NotFound            the named object does not exist
    ├── Mismatch            two sides disagree (namespace, layout, generation, epoch)
    ├── Unsupported         part of the contract, not built yet
    ├── Unauthenticated     the caller has no valid identity
    ├── PermissionDenied    the caller may not do this
    ├── DeadlineExceeded    a wait took longer than allowed
    ├── Internal            a defect of ours
    ├── ConfigError         a setting is wrong; `field` names the setting
    ├── CheckpointError     a checkpoint is damaged or incomplete
    │   └── UnsupportedModel    the checkpoint is whole, but `field` asks for an unbuilt feature
    ├── TransferFailed      KV did not arrive whole; no part may be used
    ├── StreamBroken        a multiplexed stream ended under its transfers
    └── FrameError          bytes that are not a proper frame
"""

# ruff: noqa: N818  # the names are the words that callers and documents use


class MoonpoolError(Exception):
    """Root of the tree.

    Attributes:
        message: one or more sentences for a person.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class _FieldError(MoonpoolError):
    """An error about one named thing; `str()` is "field: message"."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.args = (field, message)  # so that copies and pickles are made with both
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidRequest(_FieldError):
    """The request is wrong and will stay wrong; `field` names the wrong field, as the contract spells the name."""


class Overloaded(MoonpoolError):
    """No placement can keep the request's SLO now.

    Attributes:
        reason: machine-readable, for example "ttft_slo", "tbt_slo", "no_decode_room", "queue_full".
        predicted_ttft_s: time to first token at the best placement, seconds; 0 = not predicted.
        predicted_tbt_s: time between tokens at the best placement, seconds; 0 = not predicted.
        slo_s: the request's limit that the prediction breaks, seconds; 0 = none.
        retry_after_s: when a retry is expected to succeed, seconds from now.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        predicted_ttft_s: float = 0.0,
        predicted_tbt_s: float = 0.0,
        slo_s: float = 0.0,
        retry_after_s: float,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_tbt_s = predicted_tbt_s
        self.slo_s = slo_s
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_overloaded, (self.message, {k: v for k, v in vars(self).items() if k != "message"}))


def _overloaded(message: str, fields: dict[str, object]) -> Overloaded:
    """Rebuild an `Overloaded`, with keyword arguments, from a pickle."""
    return Overloaded(message, **fields)  # type: ignore[arg-type]


class Unavailable(MoonpoolError):
    """No instance can serve this now, or the peer cannot be reached; another try may succeed."""


class NotFound(MoonpoolError):
    """What was asked for is not there."""


class Mismatch(_FieldError):
    """The two sides disagree; `field` names the first difference."""


class Unsupported(MoonpoolError):
    """Part of the contract, not built yet."""


class Unauthenticated(MoonpoolError):
    """The caller has no valid identity, or the identity is no longer accepted."""


class PermissionDenied(MoonpoolError):
    """The caller is known and may not do this."""


class DeadlineExceeded(MoonpoolError):
    """A wait took longer than allowed."""


class Internal(MoonpoolError):
    """A defect of ours."""


class ConfigError(_FieldError):
    """A setting is wrong; `field` names the setting as the configuration class does."""


class CheckpointError(MoonpoolError):
    """A checkpoint cannot be read: missing, damaged or incomplete."""


class UnsupportedModel(CheckpointError):
    """A checkpoint asks for something that is not built; `field` names the setting, key or tensor."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.args = (field, message)
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class TransferFailed(MoonpoolError):
    """KV did not arrive whole and intact; no part may be used."""


class StreamBroken(MoonpoolError):
    """A multiplexed stream ended under open transfers; a new stream may succeed."""


class FrameError(MoonpoolError):
    """Bytes that are not a proper frame of the transfer they came on."""
