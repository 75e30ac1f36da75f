"""What `moonpool replay` refuses before it sends anything, and how it notes tokens and shows a fit."""

from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.cli.predict_options import ReplayOptions
from moonpool.cli.replay import FittedSimulation, note_tokens, print_fit, run_replay
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.requests import Request, TokenTimes
from moonpool.simulator.experiments.calibration import Extras
from moonpool.simulator.traces.mooncake import TraceRequest, write_trace

NOBODY = "127.0.0.1:1"


def ended(number: int, ttft_s: int, tpot_s: int) -> Request:
    request = Request(number, 0, 10, 2, (), outcome="done")
    request.take(TokenTimes(ttft_s * PS, [tpot_s * PS], (ttft_s + tpot_s) * PS))
    return request


@pytest.mark.parametrize(
    ("field", "profile", "calibrate_on", "time_scale"),
    [
        ("calibrate_on", "", 1, 1.0),
        ("calibrate_on", "llama-70b-a800", 2, 1.0),
        ("time_scale", "llama-70b-a800", 1, 0.0),
    ],
)
def test_bad_flags_are_named(tmp_path: Path, field: str, profile: str, calibrate_on: int, time_scale: float) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(0.0, 10, 2, (1,)), TraceRequest(5.0, 10, 2, (2,))])
    with pytest.raises(ConfigError) as wrong:
        run_replay(
            ReplayOptions(
                trace=trace,
                address=NOBODY,
                time_scale=time_scale,
                simulate=profile,
                calibrate_on=calibrate_on,
                as_json=True,
            )
        )
    assert wrong.value.field == field


def test_tokens_that_come_together_share_the_time() -> None:
    request = Request(1, 0, 10, 4, ())
    note_tokens(request.answers[0], 2, 100)
    note_tokens(request.answers[0], 2, 160)
    assert (request.first_at, request.made, request.intervals) == (100, 4, [0, 30, 30])


def test_a_fit_is_shown_with_what_was_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    found = FittedSimulation(Extras(), 0.1, [ended(1, 2, 10)], [[ended(1, 2, 11)], [ended(1, 4, 11)]])  # of two draws
    print_fit(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("fitted to the first requests: prefill 1, prefill_step_s 0.002, decode 1,")
    assert [line.split() for line in lines[4:6]] == [
        ["TTFT", "p50", "2", "3", "1.500", "within", "15%:", "missed"],
        ["TTFT", "p90", "2", "3.8", "1.900", "within", "25%:", "missed"],
    ]
    assert lines[6].rstrip().endswith("within 15%: met")
    assert found.to_json()["near"] == 0.1
