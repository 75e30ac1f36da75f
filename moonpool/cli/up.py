"""`moonpool up` and `moonpool down`: a local stack in the foreground, and its end from elsewhere."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan
from moonpool.engine.emulated.profile import emulated_profile

STOP_TIMEOUT_S = 60.0


def state_file() -> Path:
    """Where the last `moonpool up` of this user says who it is."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"moonpool-up-{os.getuid()}.json"


@contextlib.contextmanager
def _data_folder(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        yield data_dir
        return
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        yield Path(folder)


def run_up(plan: Callable[[Path], StackPlan], data_dir: Path | None, *, as_json: bool) -> int:
    """Starts a stack, says so, waits for SIGINT or SIGTERM (or the end of a service), drains.

    Returns:
        0 after a clean stop; 1 when a service ended by itself or did not end well.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())

    def say(event: dict[str, object], text: str) -> None:
        typer.echo(json.dumps(event) if as_json else text)
        sys.stdout.flush()

    def on_ready(service: ServiceProcess) -> None:
        say({"service": service.id, "address": service.address, "pid": service.pid}, f"{service.id} {service.address}")

    with _data_folder(data_dir) as folder:
        planned = plan(folder)
        ready, note = _emulated(planned)
        stack = LocalStack(planned, on_ready=on_ready)
        state = state_file()
        with stack:
            state.write_text(json.dumps({"pid": os.getpid(), "address": stack.address, "data_dir": str(folder)}))
            say({"ready": stack.address, "data_dir": str(folder), **ready}, f"ready: {stack.address}{note}")
            try:
                lost = _wait(stack, stopping)
                statuses = stack.stop()
            finally:
                state.unlink(missing_ok=True)
    bad = {name: status for name, status in statuses.items() if status != 0}
    if lost:
        typer.echo(lost, err=True)
    if bad:
        typer.echo(f"did not end well: {bad}", err=True)
    return 1 if lost or bad else 0


def _emulated(plan: StackPlan) -> tuple[dict[str, object], str]:
    """What the ready line says of emulated compute, as JSON fields and as text; nothing when compute is real."""
    found = emulated_profile(plan.engine, plan.time_scale)
    if found is None:
        return {}, ""
    profile, scale = found
    text = f"compute is emulated as {profile.name}: {profile.hardware}"
    return {"emulated": profile.name, "time_scale": scale}, f" ({text}; time scale {scale:g})"


def _wait(stack: LocalStack, stopping: threading.Event) -> str:
    """Waits for the wish to stop; returns why a service was lost, empty when none was."""
    while not stopping.wait(0.5):
        for service in stack.services.values():
            if service.returncode is not None:
                return f"{service.id} ended with status {service.returncode}\n{service.log_tail()}"
    return ""


def run_down(data_dir: Path | None) -> int:
    """Stops the running `moonpool up` and waits until it has gone.

    Returns:
        0 when it is gone or none ran; 1 when it did not go.
    """
    state = state_file()
    try:
        running = json.loads(state.read_text())
        pid = int(running["pid"])
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError):
        typer.echo("no stack is running")
        return 0
    if data_dir is not None and Path(running["data_dir"]).resolve() != data_dir.resolve():
        typer.echo(f"the running stack uses {running['data_dir']}", err=True)
        return 1
    os.kill(pid, signal.SIGTERM)
    pause = threading.Event()
    for _ in range(int(STOP_TIMEOUT_S / 0.1)):
        if not state.exists():  # its last act; the process itself may stay a zombie until its parent looks
            typer.echo(f"stopped {running['address']}")
            return 0
        pause.wait(0.1)
    typer.echo(f"process {pid} is still there", err=True)
    return 1
