"""`moonpool serve`: run a local stack in the foreground."""

import contextlib
import json
import os
import signal
import socket
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from moonpool.base.config import LOOPBACK, WILDCARDS, check_free, format_address, is_loopback, parse_address
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.kv import native_library
from moonpool.base.native.build import BuildError, build
from moonpool.cli.engine_plan import decide_engines, engine_memory, memory_text, tell_memory
from moonpool.cli.forks import forked_services
from moonpool.cli.interrupts import STOPPING_NOW, StopFlag, answered_interrupts, tell
from moonpool.cli.progress import StartProgress, start_progress
from moonpool.cli.running_stacks import recorded_stack
from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan, setting_of
from moonpool.cli.start_checks import check_start
from moonpool.cli.supervisor import Supervisor
from moonpool.client import Client
from moonpool.engine.emulated.profile import SCHEME, emulated_profile
from moonpool.engine.setup import check_engine_installed

SUPERVISE_INTERVAL_S = 0.1
STOPPING = "stopping: running requests end first (at most 20 s); Ctrl-C again stops at once"
LABEL_WIDTH, WIDTH = 10, 80
"""Columns of the greeting's labels, and of its lines."""
TRIED_PORTS = 100
"""Ports that are tried one after the other where nobody named a port."""
ReportStatus = Callable[[dict[str, object], str], None]
"""Prints an event: the JSON form or the text."""


@contextlib.contextmanager
def _data_dir(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        yield data_dir
        return
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        yield Path(folder)


def run_serve(plan: StackPlan, data_dir: Path | None, *, movable: Collection[str], restart: bool, as_json: bool) -> int:
    """Start a stack, report the addresses, run until SIGINT or SIGTERM, and drain.

    Args:
        plan: the stack's parts and settings.
        data_dir: data folder; None = a temporary one.
        movable: fields of the plan with a port that gives way to the next free one.
        restart: start a service again that ends unasked; otherwise the end of a service stops the stack.
        as_json: print JSON lines.

    Returns:
        0 after a clean stop; 1 when a service was given up or did not end well.
    """

    def say(event: dict[str, object], text: str) -> None:
        with contextlib.suppress(OSError):  # whoever read the output has left; the stack serves on
            print(json.dumps(event) if as_json else text, flush=True)

    def on_ready(service: ServiceProcess) -> None:
        if as_json:
            say({"service": service.id, "address": service.address, "pid": service.pid}, "")

    def choose(taken: Collection[int]) -> tuple[int, int]:
        return free_ports(plan, movable, taken)

    with _data_dir(data_dir) as folder, recorded_stack(folder, plan.model, plan.name, choose) as record:
        port, http_port = record.ports
        plan = replace(plan, data_dir=folder, port=port, http_port=http_port)
        if word := open_word(plan):
            typer.echo(word, err=True)
        planned, engines = decide_engines(plan, one_client=False)
        with contextlib.ExitStack() as running:
            stack = running.enter_context(started_stack(planned, on_ready))
            stopping = _stop_at_signals(stack)
            where = ",".join(stack.addresses)
            record.write(where, stack.http_address, planned.engines)
            ready = emulated_fields(planned)
            ready |= {"http": stack.http_address, "engines": planned.engines, "engines_chosen": engines}
            say({"ready": where, "data_dir": str(folder), **ready}, greeting(planned, stack, record.name, engines))
            lost = _supervise(stack, stopping, say) if restart else _wait_for_end(stack, stopping)
            statuses = stack.stop()
    bad = {name: status for name, status in statuses.items() if status}
    if lost:
        typer.echo(lost, err=True)
    if bad:
        typer.echo(f"did not end well: {bad}", err=True)
    return 1 if lost or bad else 0


@contextlib.contextmanager
def started_stack(
    plan: StackPlan, on_ready: Callable[[ServiceProcess], None], console: Console | None = None
) -> Iterator[LocalStack]:
    """Start a stack and show how that goes; what can be found out before anything is loaded is found out first.

    Raises:
        ConfigError: a port is taken, a setting is wrong, or the packages of engines are not installed.
        CheckpointError: the model cannot be used.
        Unavailable: a service did not start.
    """
    if not plan.engine.startswith(SCHEME):
        check_engine_installed()
    check_ports(plan)
    check_start(plan)
    with contextlib.ExitStack() as running:
        interrupts = running.enter_context(answered_interrupts())
        with start_progress(console) as progress:
            plan = tell_memory(plan, progress)
            compile_ahead(plan, progress)

            def ready(service: ServiceProcess) -> None:
                progress.finish(service.id)
                on_ready(service)

            stack = LocalStack(
                plan, on_ready=ready, on_start=lambda service, what, done, of: progress.show(service.id, what, done, of)
            )
            interrupts.services = stack.services
            running.enter_context(forked_services())  # also for restarts
            running.enter_context(stack)
        with interrupts.left_to_body():
            yield stack


def check_ports(plan: StackPlan) -> None:
    """See that a stack's ports are free.

    Raises:
        ConfigError: naming the flag of `moonpool serve`: another program listens there.
    """
    if plan.http_port:
        check_free(format_address(plan.host, plan.http_port), "port")
    for number in range(plan.conductors if plan.port else 0):
        check_free(format_address(LOOPBACK, plan.port + number), "conductor_port")


def free_ports(plan: StackPlan, movable: Collection[str], taken: Collection[int]) -> tuple[int, int]:
    """The ports of a stack's first conductor and of the gateway.

    Args:
        plan: the stack, with the ports that are wanted.
        movable: fields of the plan with a port that gives way to the next free one.
        taken: ports of stacks that start.
    """
    ports = []
    for field, host, count in (("port", LOOPBACK, plan.conductors), ("http_port", plan.host, 1)):
        first: int = getattr(plan, field) or 0
        if first and field in movable:
            tried = range(first, first + TRIED_PORTS)
            first = next((port for port in tried if _all_free(host, range(port, port + count), taken)), 0)
        ports.append(first)
    return ports[0], ports[1]


def _all_free(host: str, ports: range, taken: Collection[int]) -> bool:
    if any(port in taken for port in ports):
        return False
    try:
        for port in ports:
            check_free(format_address(host, port), "port")
    except ConfigError:
        return False
    return True


def open_word(plan: StackPlan) -> str:
    """A warning that others may use the model without a key; "" if they cannot, or need one."""
    if is_loopback(plan.host) or plan.api_key_hashes or setting_of(plan, "gateway", "api_keys", ""):
        return ""
    return (
        f"WARNING: whoever reaches port {plan.http_port or '(any free one)'} of this machine may use the model, "
        "without a key.\n--api-key KEY asks for a key; `moonpool keys create NAME` makes keys for several."
    )


def compile_ahead(plan: StackPlan, progress: StartProgress) -> None:
    """Compile the native code that the stack's services need, so that they find the code."""

    def report(what: str) -> None:
        progress.show("kernels", what)

    native_library.build_ahead(report)
    if not plan.engine.startswith(SCHEME) and os.environ.get("MOONPOOL_KERNELS", "native") in ("", "native"):
        with contextlib.suppress(BuildError):  # each engine's log says so
            build(report=report)
    progress.finish("kernels")


def _stop_at_signals(stack: LocalStack) -> StopFlag:
    """A flag that SIGINT and SIGTERM set, each with a word; a further signal ends the services at once."""
    stopping = StopFlag()

    def stop(*_: object) -> None:
        again = stopping.is_set()
        stopping.set()
        tell(STOPPING_NOW if again else STOPPING)
        if again:
            for service in list(stack.services.values()):
                service.signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping


def greeting(plan: StackPlan, stack: LocalStack, name: str, engines: str) -> str:
    """What a person reads when a stack is ready: where, what, in how much memory, and what to do.

    Args:
        plan: the stack's plan, with the engines decided.
        stack: the stack, started.
        name: the stack's name.
        engines: why there are these engines; "" = the user decided.
    """
    secure = "https" if setting_of(plan, "gateway", "ssl_certfile", "") else "http"
    page = f"{secure}://{stack.http_address}/"
    with Client(stack.addresses, tls=plan.tls) as client:
        state = client.cluster_state()
    lines = [("ready", page), ("model", f"{state.model}, {state.max_tokens:,} tokens of prompt and answer")]
    if found := emulated_profile(plan.engine, plan.time_scale):
        profile, scale = found
        hardware = f"compute is emulated as {profile.name}: {profile.hardware} (time scale {scale:g})"
        lines.append(("emulated", hardware))
    elif (memory := engine_memory(plan)) is not None:
        lines.append(("memory", memory_text(plan, memory)))
    if engines:
        lines.append(("engines", engines))
    if plan.host in WILDCARDS:
        port = parse_address(stack.http_address)[1]
        lines.append(("others", f"{secure}://{format_address(own_address(), port)}/ from other machines"))
    lines.append(("try", f"moonpool chat --address {name}, or an OpenAI client at {page}v1, or:"))
    needs_key = bool(plan.api_key_hashes or setting_of(plan, "gateway", "api_keys", ""))
    told = "\n".join(_wrapped(f"{label + ':':<{LABEL_WIDTH}}{text}") for label, text in lines)
    return f"{told}\n{curl_line(page, needs_key=needs_key)}\nCtrl-C stops."


def _wrapped(line: str) -> str:
    """The line in `WIDTH` columns; further lines begin under the text behind the label."""
    indent = " " * LABEL_WIDTH
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def own_address() -> str:
    """This machine's address in its network, as the system routes; nothing is sent. Loopback if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def curl_line(page: str, *, needs_key: bool) -> str:
    """A command that asks a gateway, to be pasted into a shell; `page` is the gateway's URL."""
    asked = {"messages": [{"role": "user", "content": "Write a haiku."}], "max_tokens": 64}
    body = json.dumps(asked, separators=(",", ":"))
    key = ['-H "Authorization: Bearer $KEY"'] if needs_key else []
    parts = [f"curl {page}v1/chat/completions", *key, "-H 'Content-Type: application/json'", f"-d '{body}'"]
    return " \\\n  ".join(parts)


def emulated_fields(plan: StackPlan) -> dict[str, object]:
    """JSON fields about emulated compute; none where compute is real."""
    found = emulated_profile(plan.engine, plan.time_scale)
    return {} if found is None else {"emulated": found[0].name, "time_scale": found[1]}


def _supervise(stack: LocalStack, stopping: StopFlag, say: ReportStatus) -> str:
    """Restart services until a signal comes; return why a service was given up, or ""."""

    def on_end(name: str, status: int, pause_s: float) -> None:
        event: dict[str, object] = {"service": name, "ended": status, "restart_in_s": pause_s}
        say(event, f"{name} ended with status {status}; restarting it in {pause_s:g} s")

    def on_ready(name: str) -> None:
        service = stack.services[name]
        event: dict[str, object] = {"service": name, "address": service.address, "pid": service.pid, "restarted": True}
        say(event, f"{name} {service.address} (restarted)")

    supervisor = Supervisor(stack.services, stack.spawn_again, on_end, on_ready)
    while not stopping.wait(SUPERVISE_INTERVAL_S):
        try:
            supervisor.look()
        except Unavailable as error:
            return str(error)
    return ""


def _wait_for_end(stack: LocalStack, stopping: StopFlag) -> str:
    """Wait for a signal or a service's end; return which service ended, or ""."""
    while not stopping.wait(SUPERVISE_INTERVAL_S):
        for service in list(stack.services.values()):
            if service.returncode is not None:
                return f"{service.id} ended with status {service.returncode}\n{service.log_tail()}"
    return ""
