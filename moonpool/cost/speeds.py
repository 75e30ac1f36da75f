"""An instance's speeds: the coefficients from which seconds are predicted."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from moonpool.v1 import conductor_pb2

DEFAULT_BYTES_PER_S = 1e9
"""Assumed rate of loading or sending KV where nothing was measured yet, bytes per second."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one instance, measured or given by a profile; field for field the contract's `SpeedReport`.

    All times are seconds, all rates bytes per second. A rate of 0 means "not measured"; `DEFAULT_BYTES_PER_S` is
    assumed for it. `prefill_base_s` is counted per engine step, `prefill_per_prompt_s` per prompt,
    `prefill_per_cached_token_s` per prompt and token of its cached prefix.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    decode_base_s: float = 0.0
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0
    load_bytes_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    prefill_per_prompt_s: float = 0.0
    prefill_per_cached_token_s: float = 0.0

    def to_proto(self) -> conductor_pb2.SpeedReport:
        """Return the contract's message."""
        return conductor_pb2.SpeedReport(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_proto(cls, report: conductor_pb2.SpeedReport) -> Speeds:
        """Read the contract's message; NaN, negative and infinite values become 0 (unknown)."""
        return cls(**{field.name: _sane(getattr(report, field.name)) for field in fields(cls)})

    def slowed_prefill(self, factor: float) -> Speeds:
        """Return these speeds with all prefill seconds multiplied by `factor`."""
        return replace(
            self,
            prefill_base_s=self.prefill_base_s * factor,
            prefill_per_token_s=self.prefill_per_token_s * factor,
            prefill_per_pair_s=self.prefill_per_pair_s * factor,
            prefill_per_prompt_s=self.prefill_per_prompt_s * factor,
            prefill_per_cached_token_s=self.prefill_per_cached_token_s * factor,
        )

    def slowed_decode(self, factor: float) -> Speeds:
        """Return these speeds with all decode seconds multiplied by `factor`."""
        return replace(
            self,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
            decode_per_context_token_s=self.decode_per_context_token_s * factor,
        )


def _sane(value: float) -> float:
    return value if 0.0 <= value < float("inf") else 0.0
