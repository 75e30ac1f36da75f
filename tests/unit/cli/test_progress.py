"""What a service says of its start, and how that is shown: bars on a terminal, lines in a pipe."""

import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moonpool.base.errors import Unavailable
from moonpool.cli.progress import PLAIN_INTERVAL_S, PlainProgress, start_progress
from moonpool.cli.stack import ServiceProcess
from tests.unit.cli.fake_services import instead


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that tell of a start as services do: one becomes ready, one says nothing more."""
    lines = ["starting: compiling, 1 of 2 files", "loading: 0 1/2", "what else", "loading: 1 1/3", "loading: 0 2/2"]
    said = "\n".join(f"print({line!r}, flush=True)" for line in lines)
    (tmp_path / "fake_service.py").write_text(f"{said}\nprint('ready: 127.0.0.1:9', flush=True)")
    (tmp_path / "mute_service.py").write_text(f"{said}\nimport time\ntime.sleep(300)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")  # bars are not drawn on one that is "dumb"
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bars_on_a_terminal(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of all stages are counted together; standard output stays what it is."""
    out, all_layers = StringIO(), threading.Event()
    with start_progress(Console(file=out, force_terminal=True, width=100)) as progress:

        def show(service: ServiceProcess, what: str, done: int, of: int) -> None:
            progress.show(service.id, what, done, of)
            if (done, of) == (3, 5):
                all_layers.set()

        service = ServiceProcess("prefill", "prefill-0", [], told / "log", show, instead("fake_service"))
        assert service.wait_ready(60) == "127.0.0.1:9"
        assert all_layers.wait(60)
        assert service.wait(60) == 0
        print('{"service": "prefill-0"}')
    assert "prefill-0: loading layers 3/5" in out.getvalue()
    assert capsys.readouterr().out == '{"service": "prefill-0"}\n'


def test_lines_in_a_pipe(told: Path) -> None:
    out = StringIO()
    with start_progress(Console(file=out)) as progress:
        service = ServiceProcess(
            "prefill",
            "prefill-0",
            [],
            told / "log",
            lambda service, what, done, of: progress.show("p", what, done, of),
            instead("fake_service"),
        )
        service.wait_ready(60)
        service.wait(60)
    assert out.getvalue().splitlines() == ["p: compiling, 1 of 2 files", "p: loading layers 1/2"]


def test_plain_lines_come_now_and_then() -> None:
    now = 0.0
    lines: list[str] = []
    progress = PlainProgress(lines.append, lambda: now)
    progress.show("a", "compiling, 0 of 9 files")
    progress.show("a", "compiling, 1 of 9 files")
    progress.show("b", "loading layers", 1, 4)
    now = PLAIN_INTERVAL_S
    progress.show("a", "compiling, 2 of 9 files")
    progress.show("b", "loading layers", 4, 4)
    assert lines == [
        "a: compiling, 0 of 9 files",
        "b: loading layers 1/4",
        "a: compiling, 2 of 9 files",
        "b: loading layers 4/4",
    ]


def test_a_start_may_take_as_long_as_it_goes_on(told: Path) -> None:
    """A service that says nothing more is given up; the time counts from the last line."""
    heard = threading.Event()

    def on_start(service: ServiceProcess, what: str, done: int, of: int) -> None:
        if of == 5 and done == 3:
            heard.set()

    service = ServiceProcess("prefill", "mute-0", [], told / "log", on_start, instead("mute_service"))
    assert heard.wait(60)
    assert not service.is_ready(60)
    with pytest.raises(Unavailable, match="the start of mute-0 did not go on for 0 s"):
        service.is_ready(0.0)
    assert service.wait(0.0) == -9
