"""A service process from the first line to the exit code.

Event loop, memory settings, signals, logs, standard output.

The service's own work is `main`, which drains after `ProcessContext.stopping` is set, and then returns.
"""

import asyncio
import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from moonpool.base import world
from moonpool.base.config import ServiceConfig, check_free
from moonpool.base.errors import CheckpointError, ConfigError, Mismatch, Unavailable
from moonpool.base.remedies import remedy
from moonpool.base.rpc.tuning import (
    hand_freed_memory_back,
    raise_open_files_limit,
    tune_gc,
    tune_grpc,
    tune_malloc,
    tune_threads,
)
from moonpool.base.telemetry import logs
from moonpool.base.telemetry.spans import CURRENT, Recorder, SpanExporter
from moonpool.v1 import kv_pb2

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def parent_watch(stopping: asyncio.Event, wanted: str) -> Iterator[None]:
    """Set `stopping` when the parent process ends; `wanted` as MOONPOOL_DIE_WITH_PARENT.

    A pidfd says so exactly. PR_SET_PDEATHSIG, the fallback, already fires when the *thread* that started us ends.
    """
    if wanted in ("", "0") or not sys.platform.startswith("linux"):
        yield
        return
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        yield
        return
    if os.getppid() != parent or (wanted.isdecimal() and int(wanted) > 1 and int(wanted) != parent):
        stopping.set()
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(descriptor)
        stopping.set()

    loop.add_reader(descriptor, ended)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def signal_counter(stopping: asyncio.Event, leave: Callable[[int], object]) -> Callable[[int], None]:
    """What a signal does.

    Counted per signal, because Ctrl-C reaches a whole process group and a parent then sends SIGTERM too.
    """
    seen: set[int] = set()

    def received(signum: int) -> None:
        if signum in seen:
            leave(128 + signum)
        seen.add(signum)
        stopping.set()

    return received


EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_MISMATCH = 3
DIE_WITH_PARENT = "MOONPOOL_DIE_WITH_PARENT"
AFTER_DRAIN_S = 10.0  # `main` keeps to drain_s and then has connections to close
CANCEL_GRACE_S = 5.0
START_GRACE_S = 1.0
LISTENING = ("listen", "client_listen", "metrics_listen", "stages_listen")
"""Settings that name an address at which a service listens."""
log = logs.get_logger(__name__)
ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


class ProcessContext:
    """What a service's `main` gets from the process.

    Attributes:
        stopping: set by the first SIGTERM or SIGINT; `main` then takes no new work, finishes, and returns.
        epoch: random 63-bit number, never 0, drawn at start, and again by `renew_epoch`.
        id: the instance's id (`ServiceConfig.id`).
        announced: the service is ready.
        spans: this process's recorder; records only if `spans_dir` is set.
        world: where time, random numbers, threads and connections come from. What `main` begins finds the same by
            `moonpool.base.world`.
    """

    def __init__(self, instance_id: str, spans: Recorder, out: TextIO, *, as_json: bool = False) -> None:
        """`as_json`: lines on standard output are JSON objects, as those of the log; see `told_line`."""
        self.stopping = asyncio.Event()
        self.world = world.CURRENT.get()
        self.renew_epoch()
        self.id = instance_id
        self.spans = spans
        self.announced = False
        self._out = out
        self._as_json = as_json

    def renew_epoch(self) -> None:
        """Draw the epoch: to others this process is another one from now on, as after a restart."""
        self.epoch = self.world.draws.bits(63) or 1

    def announce(self, address: str) -> None:
        """Print `ready: HOST:PORT` on standard output, the last thing that goes there."""
        self.announced = True
        self._tell(f"ready: {address}")

    def loading(self, stage: int, layers: int, of: int) -> None:
        """Print `loading: STAGE LAYERS/OF` on standard output: how many layers an engine stage has loaded."""
        self._tell(f"loading: {stage} {layers}/{of}")

    def starting(self, what: str) -> None:
        """Print `starting: WHAT` on standard output: what the start does now. Any thread may call this method.

        Such a line renews the time that the start may take.
        """
        self._tell(f"starting: {what}")

    def _tell(self, line: str) -> None:
        if self._as_json:
            event, _, told = line.partition(": ")
            at = datetime.datetime.fromtimestamp(world.unix_time(), datetime.UTC).isoformat()
            line = json.dumps({"event": event, "told": told, "level": "info", "timestamp": at, "service": self.id})
        try:
            print(line, file=self._out, flush=True)
        except OSError:  # the reader has left, which is no reason to end; and what is buffered must not fail later
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._out.fileno())
            os.close(null)

    def instance(self, kind: "kv_pb2.InstanceKind.ValueType", id: str, address: str) -> kv_pb2.Instance:  # noqa: A002
        """This process's description for others; `id` empty = `self.id`."""
        return kv_pb2.Instance(id=id or self.id, epoch=self.epoch, kind=kind, address=address)


def told_line(line: str) -> str:
    """A line of a service's standard output as text, `ready: HOST:PORT` and the like, also where lines are JSON."""
    if not line.startswith("{"):
        return line
    try:
        told = json.loads(line)
        return f"{told['event']}: {told['told']}"
    except (ValueError, KeyError):
        return line


Main = Callable[[ProcessContext], Awaitable[None]]


def run_main(
    config_cls: type[ConfigT],
    main: Callable[[ProcessContext, ConfigT], Awaitable[None]],
    argv: Sequence[str] | None = None,
) -> int:
    """A whole `__main__`: flags -> configuration -> `run_service`. Returns the process's exit code."""
    try:
        config = config_cls.load(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _refuse(config_cls.service(), error)
    return run_service(lambda ctx: main(ctx, config), name=config_cls.service(), config=config)


def run_service(main: Main, *, name: str, config: ServiceConfig, after_drain_s: float = AFTER_DRAIN_S) -> int:
    """Run a service in this process until the service ends; call this once, from the main thread.

    The first SIGTERM (or SIGINT) sets `ctx.stopping`; the same signal again ends the process at once. A `main` that is
    not done `config.drain_s + after_drain_s` after the first is cancelled; one that is not ready yet is cancelled at
    once. Standard output carries the `starting:`, `loading:` and `ready:` lines alone: whatever else is printed goes to
    standard error. With MOONPOOL_DIE_WITH_PARENT the parent's end counts as a SIGTERM: "1", or the parent's process
    number, which also reveals a parent that has already ended.

    Returns:
        The exit code: 0 after an orderly end, 2 for a wrong setting or checkpoint, 3 if the cluster refuses this
            instance as not fitting (`Mismatch`), 1 for any other failure.
    """
    raise_open_files_limit()
    tune_malloc()
    tune_threads()
    tune_gc()
    tune_grpc()
    logs.configure(config.log_level, config.id or name, config.log_json)
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        for setting in LISTENING:
            if address := getattr(config, setting, ""):
                check_free(address, setting)
        path = config.spans_dir / f"{config.id or name}.jsonl" if config.spans_dir else None
        try:
            spans = Recorder(config.id or name, path, _exporter(config, name))
        except OSError as error:
            raise ConfigError("spans_dir", f"cannot write {path}: {error.strerror}") from error
        CURRENT.set(spans)
        with contextlib.closing(spans), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(
                _supervise(
                    main,
                    ProcessContext(config.id or name, spans, out, as_json=config.log_json),
                    config.drain_s,
                    after_drain_s,
                )
            )
    except BaseException as exc:
        return _exit_code(name, exc)
    finally:
        sys.stdout = out


def _exporter(config: ServiceConfig, name: str) -> SpanExporter | None:
    """Where spans of traces go; None: nowhere."""
    if not config.otlp_traces_endpoint:
        return None
    from moonpool.base.telemetry.otlp import OtlpExporter  # the extra `otel`

    return OtlpExporter(config.otlp_traces_endpoint, name, config.id or name)


async def _supervise(main: Main, ctx: ProcessContext, drain_s: float, after_drain_s: float) -> int:
    """Run `main` under the signals, and cancel `main` if draining takes too long; returns the exit code."""
    with _signals(ctx), parent_watch(ctx.stopping, os.environ.get(DIE_WITH_PARENT, "")):
        running = asyncio.ensure_future(main(ctx))
        stopping = asyncio.ensure_future(ctx.stopping.wait())
        resting = asyncio.ensure_future(hand_freed_memory_back())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not ctx.announced:
                return await _stop_start(running)
            if not running.done():
                log.info("stopping", drain_s=drain_s)
                await asyncio.wait({running}, timeout=drain_s + after_drain_s)
            if not running.done():
                log.warning("draining took too long; cancelling what runs", after_s=drain_s)
                running.cancel()
                await asyncio.wait({running}, timeout=CANCEL_GRACE_S)
                if not running.done():
                    log.error("tasks did not end after they were cancelled; exiting")
                    os._exit(EXIT_FAILED)
                return EXIT_FAILED
            running.result()
            return 0
        finally:
            resting.cancel()
            stopping.cancel()
            running.cancel()


async def _stop_start(running: "asyncio.Future[None]") -> int:
    """Cancel a start; the process ends at once if a thread goes on, since threads cannot be cancelled."""
    log.info("stopping before the service is ready")
    running.cancel()
    await asyncio.wait({running}, timeout=START_GRACE_S)
    threads = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    await asyncio.wait({threads}, timeout=START_GRACE_S)
    if not (running.done() and threads.done()):
        sys.stderr.flush()
        os._exit(0)
    if not running.cancelled():
        running.result()
    return 0


@contextlib.contextmanager
def _signals(ctx: ProcessContext) -> Iterator[None]:
    """First SIGTERM or SIGINT: stop. The same signal again: exit now."""
    loop = asyncio.get_running_loop()
    received = signal_counter(ctx.stopping, os._exit)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, received, signum)
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def _exit_code(name: str, exc: BaseException) -> int:
    """Report why a process ends, and with which code."""
    leaves = _leaf_errors(exc)
    for kind, code in (((ConfigError, CheckpointError), EXIT_CONFIG), ((Mismatch,), EXIT_MISMATCH)):
        # One line is all a person needs for these; anything beside them is a consequence of the shutdown.
        found = next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
        if found is not None:
            return _refuse(name, found, code)
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return 128 + signal.SIGINT
    if all(
        isinstance(leaf, Unavailable) for leaf in leaves
    ):  # something the service needs is lost; the error says what
        log.error("service ends", error=str(leaves[0]))
        return EXIT_FAILED
    log.error("service failed", exc_info=exc)
    return EXIT_FAILED


def _refuse(name: str, error: BaseException, code: int = EXIT_CONFIG) -> int:
    text = " ".join(str(error).split())
    place = remedy(text)
    sys.stderr.write(f"{name}: {text}" + (f" ({place} tells more)" if place else "") + "\n")
    sys.stderr.flush()
    return code


def _leaf_errors(exc: BaseException) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for inner in exc.exceptions for leaf in _leaf_errors(inner)]
    return [exc]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform; the standard loop does the same work
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
