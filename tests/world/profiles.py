"""Profiles of emulated engines for tests."""

from pathlib import Path

_SLOW_PREFILL = """
name: slow-prefill
hardware: none; a token of a prompt takes a millisecond
model: {kv_bytes_per_token: 128, max_tokens: 4096}
kv: {layers: 4, kv_heads: 2}
prefill: {base_s: 0.01, per_token_s: 1.0e-3, per_pair_s: 0.0}
decode: {base_s: DECODE_S, per_sequence_s: 0.0, per_context_token_s: 0.0}
"""


def slow_prefill(folder: Path, rates: str = "", decode_s: float = 0.001) -> str:
    """Path of a profile for which loading is cheaper than computing.

    `rates` are its rates in YAML, `decode_s` is the time of a step of decode.
    """
    path = folder / "slow-prefill.yaml"
    path.write_text(_SLOW_PREFILL.replace("DECODE_S", f"{decode_s:.4e}") + rates)
    return str(path)
