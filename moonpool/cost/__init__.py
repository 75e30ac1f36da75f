"""Predicted seconds of prefill, decode, loading and sending, corrected by measurement.

Torch-free and pure: no clock, no transport. Conductor, engine instances and emulated engines use it.
"""

from moonpool.cost.predict import (
    PrefillWork,
    attention_pairs,
    decode_step_seconds,
    load_is_cheaper,
    load_seconds,
    overlapped_seconds,
    pipelined_seconds,
    prefill_seconds,
    transfer_seconds,
    work_of,
    work_seconds,
)
from moonpool.cost.regression import Regression
from moonpool.cost.speeds import DEFAULT_BYTES_PER_S, Speeds
from moonpool.cost.tracker import SpeedTracker, learnt_rate

__all__ = [
    "DEFAULT_BYTES_PER_S",
    "PrefillWork",
    "Regression",
    "SpeedTracker",
    "Speeds",
    "attention_pairs",
    "decode_step_seconds",
    "learnt_rate",
    "load_is_cheaper",
    "load_seconds",
    "overlapped_seconds",
    "pipelined_seconds",
    "prefill_seconds",
    "transfer_seconds",
    "work_of",
    "work_seconds",
]
