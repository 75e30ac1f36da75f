"""The bundled 70B profiles against every figure they are fitted to; `pytest -s` prints the errors."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from moonpool.base.scheduling.latency import decode_step_seconds, load_seconds, prefill_seconds, transfer_seconds
from moonpool.engine.emulated.profile import Profile, load_profile

SIZES = tuple(thousands * 1024 for thousands in (8, 16, 32, 64, 128))
"""Tokens of prompt or context."""
FIGURES = {
    "prefill, nothing cached": (1.00, 2.05, 4.48, 10.59, 27.5),
    "prefill, 95 % cached": (0.135, 0.227, 0.406, 0.882, 2.33),
    "transfer between nodes": (0.034, 0.063, 0.126, 0.251, 0.498),
    "load from DRAM": (0.029, 0.053, 0.106, 0.213, 0.420),
    "decode of 128 tokens": (3.39, 3.44, 3.52, 3.66, 3.94),
}
"""Seconds for LLaMA3-70B on 8 x A800 (arXiv 2407.00079 v3), read off its figures, for each of `SIZES`."""
RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"


def predicted_s(profile: Profile, what: str, tokens: int) -> float:
    """The profile's seconds for one of `FIGURES`."""
    cached = round(0.95 * tokens)
    nbytes = tokens * profile.token_bytes
    return {
        "prefill, nothing cached": prefill_seconds(profile.speeds, tokens, 0),
        "prefill, 95 % cached": prefill_seconds(profile.speeds, tokens - cached, cached),
        "transfer between nodes": transfer_seconds(profile.speeds, nbytes),
        "load from DRAM": load_seconds(profile.speeds, nbytes),
        "decode of 128 tokens": 128 * decode_step_seconds(profile.speeds, 1, tokens),
    }[what]


@pytest.mark.parametrize("what", FIGURES)
def test_each_figure_of_the_paper_holds_within_ten_percent_and_the_median_within_five(what: str) -> None:
    profile = load_profile("llama-70b-a800")
    errors = []
    for tokens, paper_s in zip(SIZES, FIGURES[what], strict=True):
        seconds = predicted_s(profile, what, tokens)
        errors.append(abs(seconds / paper_s - 1.0))
        error = f"{seconds / paper_s - 1.0:+.1%}"
        print(f"{what:24} {tokens // 1024:4}k paper {paper_s:7.3f} s profile {seconds:7.3f} s {error}")
    assert max(errors) <= 0.10
    assert statistics.median(errors) <= 0.05


def test_the_grpc_profile_differs_in_its_rates_alone() -> None:
    """Its rates are near those of the kept rows: runs differ by a quarter, processors by more."""
    paper, grpc = load_profile("llama-70b-a800"), load_profile("llama-70b-a800-grpc")
    rates = {name: getattr(grpc.speeds, name) for name in ("load_bytes_per_s", "transfer_bytes_per_s")}
    speeds = dataclasses.replace(paper.speeds, **rates)
    assert grpc == dataclasses.replace(paper, name=grpc.name, hardware=grpc.hardware, speeds=speeds)
    # The profile's processor read a quarter slower than the one of the kept row.
    assert rates["load_bytes_per_s"] == pytest.approx(measured("kvstore", "DRAM, Get, blocks of 1024 KiB"), rel=0.4)
    assert rates["transfer_bytes_per_s"] == pytest.approx(
        measured("kv_stream", "ReceiveKV over grpc, frames of 1024 KiB"), rel=0.25
    )


def measured(benchmark: str, name: str) -> float:
    """Bytes per second of the kept row of this name."""
    rows = json.loads((RESULTS / f"{benchmark}.json").read_text())["rows"]
    (value,) = {row["value"] for row in rows if row["name"] == name}
    return 1e9 * float(value)


def test_the_pool_is_what_the_devices_memory_holds_beside_the_weights() -> None:
    """8 x 80 GiB less a tenth and 141 GB of weights: 477 GB, 1.46 million tokens."""
    profile = load_profile("llama-70b-a800")
    assert profile.pool_bytes == pytest.approx(0.9 * 8 * 80 * 2**30 - 70.6e9 * 2, rel=1e-3)
    assert profile.pool_bytes // profile.token_bytes == pytest.approx(1.46e6, rel=0.01)
