"""What a service says of its engine's loading, and the bars that are made of it."""

import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moonpool.cli.stack import ServiceProcess, loading_bars


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `services` whose service tells of two stages, says something else, and ends."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").touch()
    lines = ["loading: 0 1/2", "what else", "loading: 1 1/3", "loading: 0 2/2", "ready: 127.0.0.1:9"]
    (package / "fake.py").write_text("\n".join(f"print({line!r}, flush=True)" for line in lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")  # bars are not drawn on one that is "dumb"
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bar_counts_the_layers_of_all_stages(stages: Path) -> None:
    out, told = StringIO(), threading.Event()
    with loading_bars(Console(file=out, force_terminal=True, width=100)) as show:

        def on_loading(service: ServiceProcess) -> None:
            show(service)
            if service.loaded == {0: (2, 2), 1: (1, 3)}:
                told.set()

        service = ServiceProcess("fake", "prefill-0", [], stages / "log", on_loading)
        assert service.wait_ready(60) == "127.0.0.1:9"
        assert told.wait(60)
        assert service.wait(60) == 0
    assert "prefill-0 loads layers" in out.getvalue()
    assert "3/5" in out.getvalue()


def test_standard_output_stays_what_it_is(stages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines that go to a pipe while bars are drawn on a terminal."""
    out = StringIO()
    with loading_bars(Console(file=out, force_terminal=True)) as show:
        service = ServiceProcess("fake", "prefill-0", [], stages / "log", show)
        service.wait(60)
        print('{"service": "prefill-0"}')
    assert capsys.readouterr().out == '{"service": "prefill-0"}\n'


def test_no_bars_where_there_is_no_terminal(stages: Path) -> None:
    out = StringIO()
    with loading_bars(Console(file=out)) as show:
        service = ServiceProcess("fake", "prefill-0", [], stages / "log", show)
        service.wait_ready(60)
        service.wait(60)
    assert out.getvalue() == ""
