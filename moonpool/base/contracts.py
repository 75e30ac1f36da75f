"""Conversion between the contract's messages and plain values that SDK, services and engine share."""

from array import array
from collections.abc import Callable, MutableMapping, MutableSequence
from dataclasses import fields
from functools import partial
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import ITEM_LIMITS, SamplingParams, Unset, UnsetInt
from moonpool.v1 import kv_pb2

_ALL_TOKENS = 2**31 - 1
"""`top_k` for all tokens, which 0 does not express."""
_NO_MIN_P = 2.0**-126
"""`min_p` of 0, which 0 does not express; a service that does not know this drops no token for it either."""
_EARLY_STOPPING: dict[object, int] = {
    True: kv_pb2.EARLY_STOPPING_WHEN_FULL,
    "never": kv_pb2.EARLY_STOPPING_NEVER,
}
_OF_EARLY_STOPPING = {number: value for value, number in _EARLY_STOPPING.items()}


def sampling_to_proto(params: SamplingParams, field_prefix: str = "sampling") -> kv_pb2.Sampling:
    """The contract's form of sampling parameters; what was not given, or equals a default for all, stays unset.

    Raises:
        InvalidRequest: a value does not fit the field; names the field as "FIELD_PREFIX.NAME".
    """
    message = kv_pb2.Sampling()
    for parameter in fields(params):
        value = getattr(params, parameter.name)
        if value is parameter.default:  # most are
            continue
        if parameter.name == "early_stopping":
            value = _EARLY_STOPPING.get(value, value)
        if isinstance(parameter.default, UnsetInt) and value == 0 and not isinstance(value, UnsetInt):
            value = _ALL_TOKENS
        if parameter.name == "min_p" and value == 0 and not isinstance(value, Unset):
            value = _NO_MIN_P
        if value is not None:
            assign(f"{field_prefix}.{parameter.name}", partial(_set, message, parameter.name, value, parameter.default))
    return message


def sampling_from_proto(message: kv_pb2.Sampling, field_prefix: str = "sampling") -> SamplingParams:
    """Sampling parameters from the contract; unset parameters get defaults. Values are not checked.

    Raises:
        InvalidRequest: a list has too many items to be worth unpacking; names the field as "FIELD_PREFIX.NAME".
    """
    for name, limit in ITEM_LIMITS.items():
        if len(getattr(message, name)) > limit:
            raise InvalidRequest(f"{field_prefix}.{name}", f"at most {limit}")
    given = {field.name: _plain(value) for field, value in message.ListFields()}
    if given.get("top_k") == _ALL_TOKENS:
        given["top_k"] = 0
    if given.get("min_p") == _NO_MIN_P:
        given["min_p"] = 0.0
    if (early := given.get("early_stopping")) is not None:
        given["early_stopping"] = _OF_EARLY_STOPPING.get(early, "unknown")
    return SamplingParams(**given)


def logprobs_to_proto(found: Logprobs) -> kv_pb2.Logprobs:
    """The contract's form of log probabilities."""
    return kv_pb2.Logprobs(
        logprobs=found.logprobs,
        ranks=found.ranks,
        top_token_ids=found.top_token_ids,
        top_logprobs=found.top_logprobs,
    )


def logprobs_from_proto(message: kv_pb2.Logprobs) -> Logprobs:
    """Log probabilities from the contract; whether the columns fit each other is not checked."""
    return Logprobs(
        array("f", message.logprobs),
        array("I", message.ranks),
        array("i", message.top_token_ids),
        array("f", message.top_logprobs),
    )


def add_logprobs(message: kv_pb2.Logprobs, found: Logprobs) -> None:
    """Append the following tokens' log probabilities to the contract's."""
    message.logprobs.extend(found.logprobs)
    message.ranks.extend(found.ranks)
    message.top_token_ids.extend(found.top_token_ids)
    message.top_logprobs.extend(found.top_logprobs)


def copy_logprobs(message: kv_pb2.Logprobs, found: kv_pb2.Logprobs) -> None:
    """Append log probabilities, column by column: protobuf copies memory then. Whole messages are written and read."""
    message.logprobs.MergeFrom(found.logprobs)
    message.ranks.MergeFrom(found.ranks)
    message.top_token_ids.MergeFrom(found.top_token_ids)
    message.top_logprobs.MergeFrom(found.top_logprobs)


def cut_logprobs(message: kv_pb2.Logprobs, tokens: int) -> None:
    """Drop the log probabilities behind the first `tokens` tokens."""
    tops = tokens * (len(message.top_token_ids) // len(message.logprobs)) if message.logprobs else 0
    del message.logprobs[tokens:], message.ranks[tokens:], message.top_token_ids[tops:], message.top_logprobs[tops:]


def are_logprobs_of(message: kv_pb2.Logprobs, tokens: int) -> bool:
    """Return whether the contract's columns fit each other and so many tokens, without reading them."""
    tops = len(message.top_token_ids)
    is_whole = tops == len(message.top_logprobs) and not (tops % tokens if tokens else tops)
    return len(message.logprobs) == len(message.ranks) == tokens and is_whole


def assign(field: str, set_value: Callable[[], object]) -> None:
    """Set a message's field.

    Raises:
        InvalidRequest: naming `field`, when protobuf refuses the value's type or range.
    """
    try:
        set_value()
    except KeyError as error:
        raise InvalidRequest(field, f"{error} is missing") from None
    except (TypeError, ValueError, UnicodeError) as error:
        raise InvalidRequest(field, str(error)) from None


def _set(message: kv_pb2.Sampling, name: str, value: Any, default: object) -> None:
    current = getattr(message, name)
    if isinstance(current, MutableSequence):
        current.extend(value)
    elif isinstance(current, MutableMapping):
        current.update(value)
    elif not isinstance(value, Unset | UnsetInt) and (isinstance(default, Unset | UnsetInt) or value != default):
        setattr(message, name, value)


def _plain(value: Any) -> Any:
    if isinstance(value, MutableMapping):
        return dict(value)
    return tuple(value) if isinstance(value, MutableSequence) else value
