"""run_service: standard output, signals, exit codes, and an end without warnings."""

import asyncio
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from moonpool.base.config import ServiceConfig
from moonpool.base.errors import CheckpointError, ConfigError, Mismatch, Unavailable, UnsupportedModel
from moonpool.base.rpc import tuning
from moonpool.base.rpc.channels import probe
from moonpool.base.rpc.process import ProcessContext, parent_watch, run_main, run_service, signal_counter, told_line
from moonpool.base.telemetry.spans import Recorder
from moonpool.v1 import kv_pb2

ROOT = Path(__file__).parents[4]
DEADLINE_S = 30.0


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """What `logs.configure` changes in this process is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def start(*arguments: str, stdin: int = subprocess.DEVNULL, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-m", "tests.unit.base.rpc.child", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = told_line(child.stdout.readline().strip())
    assert line.startswith("ready: "), child.communicate(timeout=DEADLINE_S)
    return line.removeprefix("ready: ")


def test_a_whole_process(tmp_path: Path) -> None:
    child = start("--id", "decode-0", "--set", f"spans_dir={tmp_path}", "--set", "log_json=true")
    asyncio.run(probe(ready(child), DEADLINE_S))
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, out) == (0, "")
    # On a busy machine `-X dev` warns of a slow start, before the child can forbid that.
    stray, *lines = (line for line in err.splitlines() if '"logger": "asyncio"' not in line)
    assert stray.startswith("a stray print uvloop")
    assert [json.loads(line)["event"] for line in lines] == ["stopping"]  # so no warning either
    events = [json.loads(line) for line in (tmp_path / "decode-0.jsonl").read_text().splitlines()]
    assert [event["name"] for event in events] == ["process_name", "life"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_whatever_it_does(number: signal.Signals) -> None:
    child = start("--set", "kv_bytes=2")
    assert child.stdout is not None
    assert child.stdout.readline() == "starting: what takes for ever\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, out) == (0, "")
    assert "stopping before the service is ready" in err


def test_a_taken_port_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for setting in ("listen", "metrics_listen"):
            child = start("--set", f"{setting}={address}", "--set", "kv_bytes=2")
            out, err = child.communicate(timeout=DEADLINE_S)
            said = f"child: {setting}: another program listens at {address} (docs/errors.md#port-taken tells more)\n"
            assert (child.returncode, out, err) == (2, "", said)


def test_ends_with_its_parent() -> None:
    parent = start("--parent", stdin=subprocess.PIPE, MOONPOOL_DIE_WITH_PARENT="1")
    ready(parent)
    parent.kill()
    out, err = parent.communicate(timeout=DEADLINE_S)  # ends only when the child has closed its end too
    assert out == ""
    assert "stopping" in err


def test_a_bad_flag_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    async def never(ctx: ProcessContext, config: ServiceConfig) -> None:
        raise AssertionError

    assert run_main(ServiceConfig, never, ["--log-level", "loud"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("service: log_level: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("kv_bytes", "too little\nmemory"), 2, "prefill: kv_bytes: too little memory\n"),
        (CheckpointError("no config.json in x"), 2, "prefill: no config.json in x\n"),
        (UnsupportedModel("rope_type", "yarn"), 2, "prefill: rope_type: yarn\n"),
        (Mismatch("layout.dtype", "float32 there"), 3, "prefill: layout.dtype: float32 there\n"),
        (ExceptionGroup("g", [Unavailable("x"), ExceptionGroup("h", [ConfigError("a", "b")])]), 2, "prefill: a: b\n"),
    ],
)
def test_errors_a_person_can_mend_are_one_line(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(ctx: ProcessContext) -> None:
        raise error

    assert run_service(main, name="prefill", config=ServiceConfig(id="prefill-0")) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.usefixtures("_own_logging")
def test_other_errors_tell_where(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(ctx: ProcessContext) -> None:
        raise RuntimeError("a defect")

    assert run_service(main, name="prefill", config=ServiceConfig(id="prefill-0")) == 1
    err = capsys.readouterr().err
    assert "service failed" in err
    assert "RuntimeError: a defect" in err
    assert "Traceback" in err


@pytest.mark.usefixtures("_own_logging")
def test_the_loss_of_what_it_needs_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(ctx: ProcessContext) -> None:
        raise Unavailable("the engine died")

    assert run_service(main, name="prefill", config=ServiceConfig(id="prefill-0")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "service ends" in line
    assert "the engine died" in line


@pytest.mark.usefixtures("_own_logging")
def test_an_unwritable_spans_dir_is_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    async def never(ctx: ProcessContext) -> None:
        raise AssertionError

    assert run_service(never, name="decode", config=ServiceConfig(id="d", spans_dir=tmp_path / "file")) == 2
    assert capsys.readouterr().err.startswith("decode: spans_dir: cannot write ")


@pytest.mark.usefixtures("_own_logging")
def test_a_main_that_drains_too_long_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def main(ctx: ProcessContext) -> None:
        ctx.announce("h:1")
        ctx.stopping.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    assert run_service(main, name="decode", config=ServiceConfig(id="d", drain_s=0.001), after_drain_s=0.0) == 1
    assert cancelled == [True]


def test_the_same_signal_twice_leaves_at_once() -> None:
    stopping = asyncio.Event()
    left: list[int] = []
    received: Callable[[int], None] = signal_counter(stopping, left.append)
    received(signal.SIGINT)
    assert stopping.is_set()
    received(signal.SIGTERM)
    assert left == []
    received(signal.SIGTERM)
    assert left == [128 + 15]


def test_context() -> None:
    out = io.StringIO()
    ctx = ProcessContext("decode-0", Recorder("decode-0", None), out)
    ctx.loading(0, 3, 30)
    ctx.announce("127.0.0.1:5")
    assert out.getvalue() == "loading: 0 3/30\nready: 127.0.0.1:5\n"
    as_json = io.StringIO()
    ProcessContext("decode-0", ctx.spans, as_json, as_json=True).announce("127.0.0.1:5")
    said = json.loads(as_json.getvalue())
    assert (said["event"], said["told"], said["service"]) == ("ready", "127.0.0.1:5", "decode-0")
    assert told_line(as_json.getvalue().strip()) == "ready: 127.0.0.1:5"
    for line in ("ready: 127.0.0.1:5", "{no JSON", '{"event": "else"}'):
        assert told_line(line) == line
    assert 0 < ctx.epoch < 1 << 63
    assert ctx.epoch != ProcessContext("decode-0", ctx.spans, out).epoch
    told = ctx.instance(kv_pb2.INSTANCE_KIND_DECODE, "", "h:1")
    assert told == kv_pb2.Instance(id="decode-0", epoch=ctx.epoch, kind=kv_pb2.INSTANCE_KIND_DECODE, address="h:1")


def test_announcing_to_nobody_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        ctx = ProcessContext("d", Recorder("d", None), out)
        ctx.announce("h:1")
        ctx.announce("h:1")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pidfd")
def test_a_parent_that_has_gone_already_is_noticed() -> None:
    async def watch(wanted: str) -> bool:
        stopping = asyncio.Event()
        with parent_watch(stopping, wanted):
            return stopping.is_set()

    assert asyncio.run(watch("999999999"))
    assert not asyncio.run(watch(str(os.getppid())))
    assert not asyncio.run(watch("1"))
    assert not asyncio.run(watch(""))


def test_malloc_is_tuned_or_left_alone() -> None:
    assert tuning.tune_malloc() is (os.confstr("CS_GNU_LIBC_VERSION") is not None)
