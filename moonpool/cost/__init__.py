"""Predicted seconds of prefill, decode, loading and sending, corrected by measurement.

Torch-free and pure: no clock, no transport. Conductor, engine instances and emulated engines use it.
"""

from moonpool.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    PrefillWork,
    Regression,
    Speeds,
    SpeedTracker,
    attention_pairs,
    decode_step_seconds,
    learnt_rate,
    load_is_cheaper,
    load_seconds,
    overlapped_seconds,
    pipelined_seconds,
    prefill_seconds,
    transfer_seconds,
    work_of,
    work_seconds,
)

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
