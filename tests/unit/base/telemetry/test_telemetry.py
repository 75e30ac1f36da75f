"""Logs and spans."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from moonpool.base.telemetry import logs, spans
from moonpool.base.telemetry.spans import Recorder


@pytest.fixture
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_are_chrome_trace_events(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prefill-0.jsonl"
    recorder = Recorder("prefill-0", path)
    recorder.add("engine.layer", 1_000, 3_500, step=1, layer=2)
    recorder.instant("transfer.complete", request="r")
    with pytest.raises(KeyError), recorder.span("step", name="kept"):
        raise KeyError
    recorder.close()
    recorder.close()
    recorder.add("late", 0, 1)
    name, layer, instant, step = events(path)
    assert name == {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": "prefill-0"}}
    assert layer == {
        "name": "engine.layer",
        "ph": "X",
        "ts": 1.0,
        "dur": 2.5,
        "pid": os.getpid(),
        "tid": threading.get_native_id(),
        "args": {"step": 1, "layer": 2},
    }
    assert (instant["ph"], instant["args"]) == ("i", {"request": "r"})
    assert (step["name"], step["args"]) == ("step", {"name": "kept"})
    assert step["ts"] >= instant["ts"]


def test_spans_are_written_in_batches_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder("x", path)
    for _ in range(spans.BATCH_EVENTS - 2):
        recorder.add("e", 0, 0)
    assert path.read_text() == ""
    recorder.add("e", 0, 0)
    assert len(events(path)) == spans.BATCH_EVENTS
    recorder.add("old", 0, 1)
    recorder.add("new", 0, 2 + spans.BATCH_NS)
    assert events(path)[-1]["name"] == "new"
    recorder.add("more", 0, 0)
    recorder.flush()
    assert events(path)[-1]["name"] == "more"
    recorder.close()
    Recorder("x", path).close()
    assert events(path)[-1]["name"] == "process_name"  # a restarted process goes on with its file


def test_without_a_path_nothing_happens() -> None:
    recorder = Recorder("x", None)
    assert not recorder.enabled
    with recorder.span("a"):
        recorder.add("b", 0, 1)
        recorder.instant("c")
    recorder.close()


def test_a_full_disk_ends_the_recording_not_the_service(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("x", Path("/dev/full"))
    recorder.flush()
    assert not recorder.enabled
    assert len(caplog.records) == 1
    recorder.add("a", 0, 1)
    recorder.close()


@pytest.mark.usefixtures("_own_logging")
def test_json_logs_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "decode-0", True)
    log = logs.get_logger("moonpool.test")
    log.debug("dropped")
    log.info("joined", conductor="h:1", path=Path("x"))
    structlog.get_logger("plain").warning("plain")
    logging.getLogger("library").warning("theirs %d", 1)
    secret = "a prompt"
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed")
    out, err = capsys.readouterr()
    assert out == ""
    joined, plain, theirs, failed = (json.loads(line) for line in err.splitlines())
    assert (joined["event"], joined["level"], joined["service"]) == ("joined", "info", "decode-0")
    assert (joined["conductor"], joined["path"], joined["logger"]) == ("h:1", "x", "moonpool.test")
    assert plain["event"] == "plain"
    assert (theirs["event"], theirs["service"]) == ("theirs 1", "decode-0")
    assert failed["exception"][0]["exc_type"] == "ValueError"
    assert secret not in err


@pytest.mark.usefixtures("_own_logging")
def test_warnings_and_errors_name_the_place_of_the_page_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("info", "kvstore-0", json=True)
    log = logs.get_logger("x")
    log.error("no more records are written to a data folder", path="/data")
    log.warning("the start failed", error="listen: another program listens at 127.0.0.1:1")
    log.info("the disk is full")
    log.error("something else")
    written = [json.loads(line).get("help") for line in capsys.readouterr().err.splitlines()]
    assert written == ["docs/errors.md#store-disk", "docs/errors.md#port-taken", None, None]


@pytest.mark.usefixtures("_own_logging")
def test_text_logs_are_one_line_with_a_plain_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "decode-0", False)
    log = logs.get_logger("moonpool.test")
    log.info("dropped")
    log.warning("slow", seconds=1.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "slow" in line
    assert "seconds=1.5" in line
    assert "service=decode-0" in line
    log.error("failed", exc_info=ValueError("bad"))
    assert capsys.readouterr().err.splitlines()[-1] == "ValueError: bad"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        logs.configure("loud", "x", False)


def test_lines_of_one_event_are_bounded() -> None:
    """Who reads standard error may be slow, and a client may cause a line with each request."""
    limit = logs.LineLimit()

    def written(event: str, second: float, name: str = "moonpool.test") -> dict[str, Any] | None:
        fields = {"event": event}
        record = logging.makeLogRecord({"name": name, "msg": fields, "created": second})
        return fields if limit.filter(record) else None

    found = [written("refused", 100.0 + number / 100) for number in range(logs.MAX_LINES_S + 7)]
    assert [line is not None for line in found] == [True] * logs.MAX_LINES_S + [False] * 7
    assert written("another event", 100.9) == {"event": "another event"}
    assert written("refused", 100.9, "another.module") == {"event": "refused"}
    assert limit.filter(logging.makeLogRecord({"msg": "of a library", "created": 100.9}))
    assert written("refused", 105.0) == {"event": "refused", "left_out": 7}
    assert written("refused", 105.1) == {"event": "refused"}


@pytest.mark.usefixtures("_own_logging")
def test_the_handler_of_a_service_bounds_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "gateway-0", True)
    for _ in range(3 * logs.MAX_LINES_S):
        logs.get_logger("moonpool.test").info("refused")
    assert len(capsys.readouterr().err.splitlines()) < 3 * logs.MAX_LINES_S


@pytest.mark.usefixtures("_own_logging")
def test_fields_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "gateway-0", True)
    logs.get_logger("moonpool.test").info("refused", reason="x" * 10_000, count=3)
    [line] = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert line["reason"] == "x" * logs.MAX_FIELD_CHARS + "... (10000 characters)"
    assert line["count"] == 3


@pytest.mark.usefixtures("_own_logging")
def test_a_logger_may_have_more_lines_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """A gateway logs each refused request; what bounds the lines is how many the gateway answers."""
    logs.configure("info", "gateway-0", True)
    log = logs.get_logger("moonpool.test_many", 4 * logs.MAX_LINES_S)
    for _ in range(4 * logs.MAX_LINES_S):
        log.info("request")
    assert len(capsys.readouterr().err.splitlines()) == 4 * logs.MAX_LINES_S
