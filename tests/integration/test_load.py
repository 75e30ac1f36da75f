"""Every load program runs, against a service of its own: short, and without a failed request."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.load import conductor, decode, kvstore, prefill

SHORT = ["--requests", "8", "--warmup", "2", "--json"]
PROMPTS = ["--prompt-tokens", "192", "--shared-tokens", "128", "--output-tokens", "4"]


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (kvstore.main, ["--blocks", "2", "--slice-bytes", "16384", "--put-share", "0.5"]),
        pytest.param(prefill.main, [*PROMPTS, "--request-rate", "50"], marks=pytest.mark.slow),
        (decode.main, PROMPTS),
        (conductor.main, PROMPTS),
    ],
    ids=["kvstore", "prefill", "decode", "conductor"],
)
def test_a_short_load(
    program: Callable[[Sequence[str]], int], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "load.svg"
    assert program([*SHORT, *flags, "--picture", str(drawn)]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["requests"] == 6
    assert summary["errors"] == {}
    assert summary["requests_per_s"] > 0
    assert summary["ttft_s"]["p99"] >= summary["ttft_s"]["p50"] > 0
    assert summary["e2e_s"]["p50"] >= summary["ttft_s"]["p50"]
    assert drawn.read_text().startswith("<svg")
