"""The `moonpool` command as a person uses it."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.config import SERVICE_MODULES
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import wait_at_rest
from moonpool.cli.main import app
from moonpool.client import Client
from tests import programs
from tests.integration.stack import REST_TIMEOUT_S

CLI = [sys.executable, "-m", "moonpool.cli.main"]
EMULATED = ["--engine", "emulated:llama-70b-a800", "--time-scale", "20"]
"""A stack that starts sooner, for what has nothing to do with engines."""


def environment() -> dict[str, str]:
    """The test's, of a plain terminal."""
    return os.environ | {"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"}


def moonpool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run("moonpool.cli.main", *arguments, timeout_s=240, environment=environment())


def piped(*arguments: str, said: str) -> subprocess.CompletedProcess[str]:
    """The same with something on standard input."""
    command = [*CLI, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), input=said, check=False)


def inside(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """The same in this process, which spares the start of another one."""
    done = CliRunner(env=environment()).invoke(app, arguments, input=said)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def children_of(pid: int) -> list[int]:
    """All living descendants of a process."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(stat.parent.name)
            found += [child, *children_of(child)]
    return found


def check_at_rest(address: str) -> None:
    """`moonpool check` finds every service and nothing held, and says the same to people and to programs."""
    check = moonpool("check", "--address", address, "--wait-s", "60")
    assert check.returncode == 0, check.stdout + check.stderr
    assert check.stdout.endswith("everything is at rest\n")
    told = json.loads(inside("check", "--address", address, "--wait-s", "60", "--json").stdout)
    assert (told["at_rest"], told["held"], told["silent"]) == (True, [], [])
    for name in ("conductor", "prefill-0", "decode-0", "kvstore-0"):
        assert f"{name}: " in check.stdout
        assert name in {gauge["instance"] for gauge in told["gauges"] if gauge["at_rest"] == 0}


@pytest.fixture
def up(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`moonpool serve --json` of the tiny checkpoint, and the address of its ready line."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    flags = [
        "--port",
        "0",
        "--data-dir",
        str(tmp_path / "data"),
        "--threads",
        "1",
        "--json",
        *getattr(request, "param", ()),
    ]
    process = subprocess.Popen(
        [*CLI, "serve", str(checkpoint), *flags], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if "ready" in lines[-1]:
                break
        else:
            pytest.fail(f"no ready line: {lines}")
        services = {line["service"]: line["address"] for line in lines[:-1]}
        assert set(services) == {"conductor", "kvstore-0", "prefill-0", "decode-0", "gateway-0"}
        assert lines[-1].get("emulated", "") == ("llama-70b-a800" if "--engine" in flags else "")
        assert lines[-1]["http"] == services["gateway-0"] != "127.0.0.1:8000"  # --port 0 implies any free one
        yield process, lines[-1]["ready"]
        if process.poll() is None:
            wait_at_rest(lines[-1]["ready"], REST_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_up_generate_check_interrupt(up: tuple[subprocess.Popen[str], str]) -> None:
    """A request through the command line, a clean check, Ctrl-C drains, and nothing is left."""
    process, address = up
    done = moonpool("generate", "--address", address, "hello", "--max-tokens", "5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) <= 5
    text = inside("generate", "--address", address, "hello", "--max-tokens", "5")
    assert text.returncode == 0
    assert "TTFT" in text.stderr
    several = inside("generate", "--address", address, "hello", "--max-tokens", "5", "--n", "2")
    assert [line.split()[1] for line in several.stdout.splitlines() if line.startswith("---")] == ["0", "1"]
    how = ("--max-tokens", "5", "--beams", "3", "--n", "2", "--length-penalty", "0")
    beams = inside("generate", "--address", address, "hello", *how)
    heads = [line.split() for line in beams.stdout.splitlines() if line.startswith("---")]
    assert [head[1] for head in heads] == ["0", "1"]
    assert 0 > float(heads[0][3]) >= float(heads[1][3])
    chat_in_a_pipe(address)
    chat_on_a_terminal(address)
    empty = moonpool("generate", "--address", address, "")
    assert empty.returncode == 2
    assert "prompt" in empty.stderr
    check_at_rest(address)
    descendants = children_of(process.pid)
    assert len(descendants) >= 6
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert [pid for pid in descendants if Path(f"/proc/{pid}").exists()] == []


def chat_in_a_pipe(address: str) -> None:
    """Each line is a turn; answers alone on standard output; without a conductor, what to do."""
    flags = ("--temperature", "0", "--max-tokens", "4", "--address")
    done = piped("chat", *flags, address, said="hello\n\nand now?\n")
    assert done.returncode == 0, done.stderr
    figures = [line for line in done.stderr.splitlines() if "cached" in line and "tokens/s" in line]
    assert len(figures) == 2
    again = inside("chat", *flags, address, said="hello\n")
    assert done.stdout.startswith(again.stdout)
    nobody = piped("chat", *flags, "127.0.0.1:1", said="hello\n")
    assert nobody.returncode == 2
    assert "`moonpool serve MODEL` starts a stack" in nobody.stderr


def chat_on_a_terminal(address: str) -> None:
    """A person types a turn and Ctrl-D."""
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal:
        flags = ["chat", "--max-tokens", "4", "--address", address]
        with subprocess.Popen([*CLI, *flags], stdin=theirs, stdout=theirs, stderr=theirs, env=environment()) as process:
            os.close(theirs)
            shown = read_until(terminal, b"> ")
            terminal.write(b"hello\n")
            shown += read_until(terminal, b"tokens/s)\r\n\r\n> ")
            terminal.write(b"\x04")
            assert process.wait(30) == 0
    assert b"Ctrl-D ends" in shown
    assert b"4 generated" in shown or b"[stop]" in shown


def read_until(terminal: RawIOBase, end: bytes) -> bytes:
    """What is shown up to `end`; the test's timeout bounds the wait."""
    shown = b""
    while not shown.endswith(end):
        shown += terminal.read(1) or b""
    return shown


def next_event(process: subprocess.Popen[str], key: str) -> dict[str, object]:
    """The next JSON line that has a key; the test's timeout bounds the wait."""
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, object] = json.loads(line)
        if key in event:
            return event
    pytest.fail(f"`up` ended without {key}")


@pytest.mark.parametrize("up", [EMULATED], indirect=True)
def test_killed_services_come_back_and_serve_until_the_stop(
    up: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    """`kill -9` of a service does not end the stack: it is restarted under its name, and requests are served.

    `moonpool stop` ends the stack that `moonpool serve` started.
    """
    process, address = up
    is_light_and_says_that_it_is_emulated(process.pid, address)
    assert "compute is emulated" in (tmp_path / "data" / "logs" / "prefill-0.log").read_text()
    for kind, name in (("decode", "decode-0"), ("conductor", "conductor")):
        (victim,) = [pid for pid in children_of(process.pid) if SERVICE_MODULES[kind].encode() in cmdline(pid)]
        os.kill(victim, signal.SIGKILL)
        ended = next_event(process, "ended")
        assert (ended["service"], ended["ended"]) == (name, -signal.SIGKILL)
        assert next_event(process, "restarted")["pid"] != victim
        assert inside("health", "--address", address, "--joined", "3", "--wait-s", "60").returncode == 0
        done = inside("generate", "--address", address, "hello", "--max-tokens", "5", "--json")
        assert done.returncode == 0, done.stderr
    done = inside("stop")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "stopped tiny-llama"
    assert process.wait(60) == 0
    assert inside("stop").stdout.strip() == "no stack is running"


def is_light_and_says_that_it_is_emulated(pid: int, address: str) -> None:
    """Processes without torch, no engine process, and the word "emulated" wherever one looks."""
    services = children_of(pid)
    assert len(services) == 6, "a fork server, conductor, kvstore, gateway, prefill and decode"
    for service in services:
        assert "libtorch" not in Path(f"/proc/{service}/maps").read_text()
        assert int(Path(f"/proc/{service}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 200 << 20
    assert "(emulated)" in inside("generate", "--address", address, "hello", "--max-tokens", "5").stderr
    with Client(address) as client:
        assert client.generate(prompt="hello").placement.emulated
        assert client.cluster_state().emulated == "llama-70b-a800"
    emulated = {each.instance: each.value for each in wait_at_rest(address, REST_TIMEOUT_S) if each.name == "emulated"}
    assert set(emulated.values()) == {1.0}
    assert len(emulated) == 3


@pytest.mark.parametrize("up", [[*EMULATED, "--no-restart"]], indirect=True)
def test_without_restarts_the_end_of_a_service_ends_the_stack(up: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = up
    (decode,) = [pid for pid in children_of(process.pid) if b"moonpool.engine.decode" in cmdline(pid)]
    os.kill(decode, signal.SIGKILL)
    assert process.wait(60) == 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conductors take time to notice that an instance is silent."""
    monkeypatch.setenv("MOONPOOL_HEARTBEAT_S", "60")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("up", [[*EMULATED, "--time-scale", "1"]], indirect=True)
def test_check_names_what_is_held_and_who_is_silent(up: tuple[subprocess.Popen[str], str]) -> None:
    """While a request runs, its blocks are named; while an instance hangs, it is. A killed stack leaves nothing."""
    process, address = up
    with Client(address) as client:
        stream = client.stream(prompt="hello", sampling=SamplingParams(max_tokens=3000, ignore_eos=True))
        events = iter(stream)  # kept: letting go of it cancels the request
        next(events)
        held = inside("check", "--address", address)
        stream.close()
    assert held.returncode == 1
    assert "HELD  decode-0: blocks_used" in held.stdout
    assert "HELD  conductor: requests_running = 1" in held.stdout
    (decode,) = [pid for pid in children_of(process.pid) if b"moonpool.engine.decode" in cmdline(pid)]
    os.kill(decode, signal.SIGSTOP)
    try:
        silent = inside("check", "--address", address, "--json")
    finally:
        os.kill(decode, signal.SIGCONT)
    assert silent.returncode == 2
    assert [line for line in json.loads(silent.stdout)["silent"] if line.startswith("decode-0 at ")]
    check = inside("check", "--address", "127.0.0.1:1")
    assert check.returncode == 2
    assert "127.0.0.1:1" in check.stderr
    leaves_nothing_when_killed(process)


def leaves_nothing_when_killed(process: subprocess.Popen[str]) -> None:
    """Even `kill -9` of `moonpool serve` ends every process of the stack."""
    descendants = [os.pidfd_open(pid) for pid in children_of(process.pid)]
    assert len(descendants) >= 5
    process.kill()
    process.wait()
    for descriptor in descendants:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, "a process outlived its stack"
        os.close(descriptor)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_model_create_and_inspect(tmp_path: Path) -> None:
    """A random checkpoint, and what it takes to serve it."""
    folder = tmp_path / "model"
    created = inside("model", "create", "tiny-qwen3", str(folder), "--seed", "3")
    assert created.returncode == 0, created.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    shown = inside("model", "inspect", str(folder), "--json", "--memory-bytes", str(1 << 30))
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["architecture"] == "Qwen3ForCausalLM"
    assert report["parameters"] > 0
    assert (report["tool_call_parser"], report["reasoning_parser"]) == ("hermes", "none")
    assert report["kv_token_bytes"] * report["block_size"] == report["kv_block_bytes"]
    assert report["fit_tokens"] == report["fit_blocks"] * report["block_size"] > 0
    beside_kv = sum(report[f"{part}_bytes"] for part in ("weight", "head", "work", "program"))
    assert report["engine_bytes"] == beside_kv + report["kv_context_bytes"]
    assert report["weights_in"] == "memory"
    assert report["fit_blocks"] == ((1 << 30) - beside_kv) // report["kv_block_bytes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["conductor", "--nonsense", "1"], "nonsense"),
        (["kvstore", "--dram-bytes", "many"], "dram"),
        (["serve", "--prefill", "0"], "--prefill"),
    ],
)
def test_wrong_use_names_the_field(arguments: list[str], named: str) -> None:
    """A clear error, no traceback."""
    done = inside(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_demo(tmp_path: Path) -> None:
    """What `make run` shows: a table, two bars, the way on, in 80 columns; it leaves no process."""
    done = moonpool("demo", "bundled", "--max-tokens", "6")
    assert done.returncode == 0, done.stderr + done.stdout
    for text in ("a long prompt, cold", "the same again", "second turn", "8 of 8 at once", "times sooner", "Next:"):
        assert text in done.stdout
    assert "serve bundled\n      has the page http://127.0.0.1:8000/" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
