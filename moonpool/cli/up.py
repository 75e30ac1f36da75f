"""`moonpool up` runs a local stack in the foreground; `moonpool down` stops it from another terminal."""

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

from moonpool.cli.loading import loading_bars
from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan
from moonpool.cli.supervisor import Supervisor
from moonpool.engine.emulated.profile import emulated_profile
from moonpool.errors import Unavailable
from moonpool.rpc.process import EXIT_ROLE

STOP_TIMEOUT_S = 60.0
LOOK_S = 0.1

Say = Callable[[dict[str, object], str], None]
"""Prints an event: its JSON form or its text."""


def state_file() -> Path:
    """File in which this user's running `moonpool up` notes its process and address."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"moonpool-up-{os.getuid()}.json"


@contextlib.contextmanager
def _data_folder(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        yield data_dir
        return
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        yield Path(folder)


def run_up(plan: Callable[[Path], StackPlan], data_dir: Path | None, *, restart: bool, as_json: bool) -> int:
    """Starts a stack, reports its addresses, runs it until SIGINT or SIGTERM, drains it.

    Args:
        plan: makes the stack's plan for a data folder.
        data_dir: data folder; None = a temporary one.
        restart: start a service again that ends by itself; otherwise its end stops the stack.
        as_json: print JSON lines.

    Returns:
        0 after a clean stop; 1 when a service was given up or did not end well.
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
        state = state_file()
        with contextlib.ExitStack() as running:
            with loading_bars() as on_loading:
                stack = running.enter_context(LocalStack(planned, on_ready=on_ready, on_loading=on_loading))
            where = ",".join(stack.addresses)
            state.write_text(json.dumps({"pid": os.getpid(), "address": where, "data_dir": str(folder)}))
            ready |= {"http": stack.http_address}
            say({"ready": where, "data_dir": str(folder), **ready}, f"ready: {where}{note}")
            if not as_json:
                typer.echo(f"try it in a browser, http://{stack.http_address}/, or:\n{curl_line(stack.http_address)}")
                sys.stdout.flush()
            try:
                lost = _supervise(stack, stopping, say) if restart else _wait(stack, stopping)
                statuses = stack.stop()
            finally:
                state.unlink(missing_ok=True)
    bad = {name: status for name, status in statuses.items() if status not in (0, EXIT_ROLE)}
    if lost:
        typer.echo(lost, err=True)
    if bad:
        typer.echo(f"did not end well: {bad}", err=True)
    return 1 if lost or bad else 0


def curl_line(http_address: str) -> str:
    """A command that asks a gateway, to be pasted into a shell."""
    body = {"messages": [{"role": "user", "content": "Write a function that adds two numbers."}], "max_tokens": 64}
    url = f"http://{http_address}/v1/chat/completions"
    return f"curl {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _emulated(plan: StackPlan) -> tuple[dict[str, object], str]:
    """Additions to the ready line when compute is emulated, as JSON fields and as text."""
    found = emulated_profile(plan.engine, plan.time_scale)
    if found is None:
        return {}, ""
    profile, scale = found
    text = f"compute is emulated as {profile.name}: {profile.hardware}"
    return {"emulated": profile.name, "time_scale": scale}, f" ({text}; time scale {scale:g})"


def _supervise(stack: LocalStack, stopping: threading.Event, say: Say) -> str:
    """Restarts services until a signal comes; returns why one was given up, empty when none was."""

    def on_end(name: str, status: int, pause_s: float) -> None:
        event: dict[str, object] = {"service": name, "ended": status, "restart_in_s": pause_s}
        why = "has drained to change its role" if status == EXIT_ROLE else f"ended with status {status}"
        say(event, f"{name} {why}; restarting it in {pause_s:g} s")

    def on_ready(name: str) -> None:
        service = stack.services[name]
        event: dict[str, object] = {"service": name, "address": service.address, "pid": service.pid, "restarted": True}
        say(event, f"{name} {service.address} (restarted)")

    supervisor = Supervisor(stack.services, stack.spawn_again, on_end, on_ready)
    while not stopping.wait(LOOK_S):
        try:
            supervisor.look()
        except Unavailable as error:
            return str(error)
    return ""


def _wait(stack: LocalStack, stopping: threading.Event) -> str:
    """Waits for a signal or the end of a service; returns which one ended, empty when none did.

    One that ended to change its role is started anew.
    """
    while not stopping.wait(LOOK_S):
        for service in list(stack.services.values()):
            if service.returncode == EXIT_ROLE:
                stack.spawn_again(service.id)
            elif service.returncode is not None:
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
        if not state.exists():  # removed last; the process may remain a zombie until its parent reaps it
            typer.echo(f"stopped {running['address']}")
            return 0
        pause.wait(0.1)
    typer.echo(f"process {pid} is still there", err=True)
    return 1
