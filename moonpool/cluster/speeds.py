"""Translates an instance's speeds between the contract's message and plain values."""

from dataclasses import fields

from moonpool.cost import Speeds
from moonpool.v1 import conductor_pb2

_NAMES = tuple(field.name for field in fields(Speeds))


def speeds_to_proto(speeds: Speeds) -> conductor_pb2.SpeedReport:
    """The contract's message."""
    return conductor_pb2.SpeedReport(**{name: getattr(speeds, name) for name in _NAMES})


def speeds_from_proto(report: conductor_pb2.SpeedReport) -> Speeds:
    """The plain values; NaN, negative and infinite ones become 0 (unknown)."""
    return Speeds(**{name: sane(getattr(report, name)) for name in _NAMES})


def sane(value: float) -> float:
    """The value, or 0 for one that no measurement gives: NaN, negative, infinite."""
    return value if 0.0 <= value < float("inf") else 0.0
