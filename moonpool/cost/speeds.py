"""An instance's speeds: the coefficients from which seconds are predicted."""

from __future__ import annotations

from dataclasses import replace

from moonpool.frozen import frozen

DEFAULT_BYTES_PER_S = 1e9
"""Assumed rate of loading or sending KV where nothing was measured yet, bytes per second."""


@frozen
class Speeds:
    """Speeds of one instance, measured or given by a profile; field for field the contract's `SpeedReport`.

    `moonpool.cluster.speeds` translates. All times are seconds, all rates bytes per second. A rate of 0 means "not
    measured"; `DEFAULT_BYTES_PER_S` is assumed for it, and for
    `peer_bytes_per_s` what is known of loading from stores. `prefill_base_s` is counted per engine step,
    `prefill_per_prompt_s` per prompt, `prefill_per_cached_token_s` per prompt and token of its cached prefix.
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
    peer_bytes_per_s: float = 0.0

    def loading_from_peers(self) -> Speeds:
        """Return these speeds with the rate of reading from other instances as that of loading, where it is known."""
        return replace(self, load_bytes_per_s=self.peer_bytes_per_s) if self.peer_bytes_per_s else self

    def slowed_prefill(self, factor: float, load_factor: float = 1.0, fixed_factor: float | None = None) -> Speeds:
        """Return these speeds with all prefill seconds multiplied by `factor`, and those of loading by another one.

        `fixed_factor` is one for what a step takes whatever is in it; None = as for the others.
        """
        load_bytes_per_s = self.load_bytes_per_s
        if load_factor != 1.0:
            load_bytes_per_s = (load_bytes_per_s or DEFAULT_BYTES_PER_S) / load_factor
        return Speeds(  # several times as quick as `replace`, and done for each report
            self.prefill_base_s * (factor if fixed_factor is None else fixed_factor),
            self.prefill_per_token_s * factor,
            self.prefill_per_pair_s * factor,
            self.decode_base_s,
            self.decode_per_sequence_s,
            self.decode_per_context_token_s,
            load_bytes_per_s,
            self.transfer_bytes_per_s,
            self.prefill_per_prompt_s * factor,
            self.prefill_per_cached_token_s * factor,
            self.peer_bytes_per_s,
        )

    def slowed_decode(self, factor: float) -> Speeds:
        """Return these speeds with all decode seconds multiplied by `factor`."""
        return replace(
            self,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
            decode_per_context_token_s=self.decode_per_context_token_s * factor,
        )
