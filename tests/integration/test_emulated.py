"""Clusters with emulated compute: everything else is real, and every output says so."""

from pathlib import Path

import pytest

from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.traces.mooncake import TRACE_VARIABLE, trace_path
from tests.integration.test_cli import moonpool
from tests.load.trace import Report, main, parse, run


def replay(*flags: str) -> Report:
    """A replay in which everything ended, right, and came back."""
    report = run(parse([*flags, "--json"]))
    assert report.ok, report
    assert report.emulated.startswith("llama-70b-a800")
    return report


@pytest.fixture(autouse=True)
def own_trace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test of a published trace looks at the environment's."""
    if request.function is not test_the_conversation_trace:
        monkeypatch.delenv(TRACE_VARIABLE, raising=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_and_eight() -> None:
    """8 prefill and 8 decode instances under a generated trace."""
    report = replay("--prefill", "8", "--decode", "8", "--requests", "300", "--rate", "6", "--time-scale", "2")
    assert report.processes == 18
    assert len(report.prefills) == 8
    assert report.hit_rate > 0.5 * report.reusable_share


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_conversation_trace() -> None:
    """8 prefill and 8 decode instances under the beginning of a published trace."""
    if trace_path("") is None:
        pytest.skip(f"needs a trace in Mooncake's form: set {TRACE_VARIABLE}")
    report = replay("--prefill", "8", "--decode", "8", "--requests", "300", "--time-scale", "2")
    assert len(report.prefills) == 8
    assert len(report.decodes) >= 8


def test_calibrate_writes_a_profile_and_says_how_it_was_tested(tmp_path: Path) -> None:
    """With the real engine on the bundled model; one try of each size says nothing of the fit's quality."""
    out = tmp_path / "mine.yaml"
    done = moonpool("calibrate", "--out", str(out), "--repeats", "1", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "sizes held out of the fit" in done.stdout
    profile = load_profile(str(out))
    assert (profile.name, profile.token_bytes, profile.kv_dtype) == ("mine", 2560, "bfloat16")
    assert profile.speeds.prefill_per_token_s > 0
    assert "held out of the fit, are:\n# prefill median" in out.read_text()


def test_a_wrong_profile_is_named() -> None:
    done = moonpool("serve", "--engine", "emulated:nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "llama-70b-a800" in done.stderr  # what there is
    assert "Traceback" not in done.stderr


def test_the_former_spelling_names_the_new_one() -> None:
    done = moonpool("serve", "--engine", "paced:llama-70b-a800")
    assert done.returncode == 2
    assert done.stderr.strip() == "moonpool: engine: 'paced:PROFILE' is now called 'emulated:PROFILE'"


def test_the_program_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The report for people begins with the word, and its exit status is that of the answers."""
    flags = {"prefill": 1, "decode": 1, "kvstore": 0, "requests": 5, "rate": 50, "time-scale": 50}
    assert main([f"--{name}={value}" for name, value in flags.items()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EMULATED")
    for text in ("TTFT", "TPOT", "goodput", "hit rate", "everything is at rest", "seed 0"):
        assert text in out
