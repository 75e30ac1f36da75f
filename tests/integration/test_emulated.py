"""Clusters with emulated compute: everything else is real, and every output says so."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.cli.check import wait_at_rest
from moonpool.client import Client
from moonpool.engine.emulated.profile import load_profile
from simulator.traces.mooncake import TRACE_VARIABLE, trace_path
from tests.integration.test_cli import CLI, children_of, environment, moonpool
from tests.load.trace import Report, main, parse, run

MB = 1 << 20


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


@pytest.fixture
def up(
    each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """`moonpool serve` with so many prefill and decode instances, emulated, and its ready line."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    flags = ["--engine", "emulated:llama-70b-a800", "--time-scale", "20", "--prefill", str(each), "--decode", str(each)]
    command = [*CLI, "serve", *flags, "--port", "0", "--data-dir", str(tmp_path / "data"), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout)
        ready = next(line for line in lines if "ready" in line)
        yield process, ready
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("each", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_up(up: tuple[subprocess.Popen[str], dict[str, object]], each: int, tmp_path: Path) -> None:
    """Light processes without torch, no engine process, and the word "emulated" wherever one looks."""
    process, ready = up
    assert (ready["emulated"], ready["time_scale"]) == ("llama-70b-a800", 20.0)
    address = str(ready["ready"])
    services = children_of(process.pid)
    assert len(services) == 4 + 2 * each, "a fork server, conductor, kvstore, gateway, and engines"
    for pid in services:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        assert int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 200 * MB

    done = moonpool("generate", "--address", address, "hello " * 2000, "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert "(emulated)" in done.stderr
    with Client(address) as client:
        assert client.generate(prompt="hello").placement.emulated
        assert client.cluster_state().emulated == "llama-70b-a800"

    readings = wait_at_rest(address, 20)
    emulated = {reading.instance: reading.value for reading in readings if reading.name == "emulated"}
    assert set(emulated.values()) == {1.0}
    assert len(emulated) == 1 + 2 * each
    assert "compute is emulated" in (tmp_path / "data" / "logs" / "prefill-0.log").read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


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
