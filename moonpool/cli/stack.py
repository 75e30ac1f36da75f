"""A local stack: all services as processes on this machine, with restarts.

`moonpool serve`, `run`, `demo` and the integration tests run the same class.
"""

import dataclasses
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from moonpool.base.checkpoint import model_name
from moonpool.base.config import ENV_PREFIX, LOOPBACK, SERVICE_MODULES, WILDCARDS, config_class, format_address
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.fork_server import IN_USE, Launcher, Program, execute, start_service
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.rpc.process import told_line
from moonpool.base.rpc.tls import Tls
from moonpool.cli.options import Engines
from moonpool.client import Client
from moonpool.engine.config import EngineConfig
from moonpool.engine.emulated.profile import SCHEME
from moonpool.engine.platforms.registry import MEMORY_SHARE, DeviceName, engine_devices

GATEWAY_ID = "gateway-0"
KEY_TENANT = "key"
"""Tenant of all keys that the user gave as such, not in a file."""
ENGINE_NAME = "engine"
"""Beginning of the id of an engine in both roles."""
BOTH_ROLES = "computes_prompts=true"
"""The setting of a decode instance that computes whole prompts."""
SHARE_SETTING = "gpu_memory_utilization"
"""Engine setting: each engine's share of a GPU."""
KINDS_WITHOUT_JOIN = ("conductor", "gateway")
"""Service kinds that join no conductor."""
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
CONDUCTOR = "conductor"
"""The first conductor; further conductors are conductor-1, conductor-2 and so on."""
LOG_TAIL_LINES = 25
_LOADING_LINE = re.compile(r"loading: (\d+) (\d+)/(\d+)")
WAIT_S = 0.1
ABORT_S = 4.0
"""Seconds that services have to end when their start is given up; then they are killed."""
DRAIN_S = 8.0
"""Seconds that a service has to finish running requests."""
OnStart = Callable[["ServiceProcess", str, int, int], None]
"""Called with a service, what the start does, how many parts are done, and how many there are; 0 = unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackPlan:
    """A local stack's parts and settings.

    Attributes:
        model: a checkpoint's folder, or a hub id.
        data_dir: folder for kvstore data and logs.
        dtype: "auto", "float32", "bfloat16" or "float16".
        kv_cache_dtype: "auto", "int8" or "fp8".
        prefill, decode, kvstore: number of instances, by kind.
        engines: "split" = as many prefill and decode instances; "one" = a single decode instance that computes prompts,
            too; "auto" = `moonpool.cli.engine_plan` decides, and a stack that nobody has decided on is split.
        conductors: number of conductors side by side; all instances join all conductors.
        kvstore_replicas: number of kvstores that hold a copy of each prefix.
        pipeline_parallel_size: pipeline stages in each prefill instance.
        port: the first conductor's port; further conductors have the following ports. 0 = any free ports.
        http_port: the gateway's port; 0 = any free port, None = no gateway.
        host: address at which the gateway listens; all other services listen at loopback.
        api_key_hashes: SHA-256 of the keys, any of which the gateway's clients must send; none = as settings say.
        alias: a further name by which clients know the model, unless settings say names; "" = none.
        engine: "real", or "emulated:PROFILE" to emulate compute at prefill and decode.
        time_scale: emulated profile seconds that pass in one second; 0 = the profile's own.
        threads: most compute threads per engine process; 0 = all cores, which engines lend each other.
        core_page: file by which the stack's engines lend each other cores, and to no other engine; None = this user's.
        block_size: tokens per KV block.
        kv_cache_memory_bytes: KV pool bytes for each engine instance; 0 = the default of `EngineConfig`.
        dram_bytes: bytes of each kvstore's DRAM tier.
        ssd_bytes: bytes of each kvstore's SSD tier.
        spans_dir: where services record their spans; None = nowhere.
        swap_roles: instances change between prefill and decode by the conductor's order, not only by command.
            Engines may have either role where the stack has more than one of a kind, and one pipeline stage.
        tls: with which the stack asks the conductors; None = as the environment says. Services take theirs by `extra`.
        extra: further flags by service kind, for example {"prefill": ["--set", "max_queue=9"]}.
    """

    model: str
    data_dir: Path
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    prefill: int = 1
    decode: int = 1
    kvstore: int = 1
    engines: Engines = "split"
    conductors: int = 1
    kvstore_replicas: int = 1
    pipeline_parallel_size: int = 1
    port: int = 0
    http_port: int | None = None
    host: str = LOOPBACK
    api_key_hashes: Sequence[str] = ()
    alias: str = ""
    engine: str = "real"
    time_scale: float = 0.0
    threads: int = 0
    core_page: Path | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_memory_bytes: int = 0
    dram_bytes: int = 256 << 20
    ssd_bytes: int = 4 << 30
    log_level: str = "info"
    spans_dir: Path | None = None
    swap_roles: bool = False
    tls: Tls | None = None
    extra: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name in short, by which the user knows the stack."""
        return self.alias.rpartition("/")[2] or model_name(self.model)

    @property
    def engine_counts(self) -> Mapping[str, int]:
        """Number of engine instances, by service kind."""
        return {"decode": 1} if self.engines == "one" else {"prefill": self.prefill, "decode": self.decode}


class ServiceProcess:
    """One service as a child process. The child dies with this process, so that a killed parent leaves no child."""

    def __init__(
        self,
        kind: str,
        service_id: str,
        arguments: Sequence[str],
        log_path: Path,
        on_start: OnStart = lambda service, what, done, of: None,
        launcher: Launcher = execute,
        starts_engine: bool = False,
    ) -> None:
        """Start the service by a `launcher`; `on_start` is called on a separate thread."""
        self._loaded: dict[int, tuple[int, int]] = {}
        self._on_start = on_start
        self._heard = time.monotonic()
        self.kind = kind
        self.id = service_id
        self.arguments = list(arguments)
        self.log_path = log_path
        self.address = ""
        self._silent = False  # its standard output is closed
        self._ready = threading.Event()
        environment = os.environ | {"MOONPOOL_DIE_WITH_PARENT": str(os.getpid())}
        if kind != "gateway":  # API keys belong to the gateway's clients; a conductor takes keys at a separate port
            environment.pop(f"{ENV_PREFIX}API_KEYS", None)
        with _open_log(log_path) as log:
            read, write = os.pipe()
            stdout = open(read, "rb")  # noqa: SIM115 - closed by its reader
            try:
                self._process = launcher(
                    Program(
                        SERVICE_MODULES[kind],
                        self.arguments,
                        environment,
                        stdout=write,
                        stderr=log.fileno(),
                        starts_engine=starts_engine,
                    )
                )
            except BaseException:
                stdout.close()
                raise
            finally:
                os.close(write)
        self._reader = threading.Thread(
            target=self._read_stdout, args=(stdout,), name=f"stdout-{service_id}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while running."""
        return self._process.poll()

    def _read_stdout(self, stdout: BinaryIO) -> None:
        with stdout:
            for line in stdout:
                self._take(line.decode(errors="replace").strip())
        self._silent = True
        self._ready.set()

    def _take(self, text: str) -> None:
        """A line from standard output."""
        self._heard = time.monotonic()
        text = told_line(text)
        if text.startswith("ready: ") and not self.address:
            self.address = text.removeprefix("ready: ")
            self._ready.set()
        elif text.startswith("starting: "):
            self._on_start(self, text.removeprefix("starting: "), 0, 0)
        elif found := _LOADING_LINE.fullmatch(text):
            stage, layers, of = map(int, found.groups())
            self._loaded[stage] = (layers, of)
            done, all_layers = (sum(counts) for counts in zip(*self._loaded.values(), strict=True))
            self._on_start(self, "loading layers", done, all_layers)

    def is_ready(self, silence_s: float, wait_s: float = 0.0) -> bool:
        """Whether the service is ready; waits for that for a moment.

        Raises:
            Unavailable: the service ended, or the start stood still for `silence_s`; the message ends with the log.
        """
        self._ready.wait(wait_s)
        silent = self._silent  # read before the address, which comes first
        if self.address:
            return True
        if silent:
            raise Unavailable(f"{self.id} ended with status {self._process.wait()}\n{self.log_tail()}")
        if time.monotonic() - self._heard > silence_s:
            raise Unavailable(f"the start of {self.id} did not go on for {silence_s:g} s\n{self.log_tail()}")
        return False

    def wait_ready(self, silence_s: float) -> str:
        """Wait for the service's ready line, for as long as the start goes on.

        Returns:
            The service's address, "host:port".

        Raises:
            Unavailable: see `is_ready`.
        """
        while not self.is_ready(silence_s, WAIT_S):
            pass
        return self.address

    def log_tail(self) -> str:
        """The log's last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"  {self.id}| {line}" for line in lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if self.returncode is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; kill the process when the time is over. Return the exit status."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join()
        return status


def _open_log(log_path: Path) -> BinaryIO:
    """The log, open for appending; others on this machine do not read it, as reasons quote requests.

    Raises:
        ConfigError: naming `data_dir`.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.fdopen(os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
        os.fchmod(log.fileno(), 0o600)  # an earlier version let others read it
        return log
    except OSError as error:
        raise ConfigError("data_dir", f"{log_path} cannot be written: {error.strerror}") from error


class LocalStack:
    """Starts conductors, kvstores, prefill and decode instances and perhaps a gateway, and stops them.

    Use as a context manager; `address` is the first conductor's, `addresses` are all conductors', `http_address` is the
    gateway's, "" for none.
    """

    def __init__(
        self,
        plan: StackPlan,
        *,
        on_ready: Callable[[ServiceProcess], None] = lambda service: None,
        on_start: OnStart = lambda service, what, done, of: None,
    ) -> None:
        """Make a stack that is not started yet.

        Args:
            plan: the stack's parts and settings.
            on_ready: called with each service that has become ready, one after the other.
            on_start: called on threads, with what each service's start does.
        """
        self._on_start = on_start
        self.plan = plan
        self.services: dict[str, ServiceProcess] = {}
        self.address = ""
        self.addresses: list[str] = []
        self.http_address = ""
        self._on_ready = on_ready

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, silence_s: float = 180.0) -> str:
        """Start everything and wait until every instance has joined every conductor.

        Args:
            silence_s: seconds within which each service's start must make progress.

        Returns:
            The first conductor's address.

        Raises:
            Unavailable: a service did not start; the message ends with the log.
        """
        if self._real_engines and IN_USE.engines is not None:
            IN_USE.engines.prepare()  # imports beside the start of the others
        names = [CONDUCTOR, *(f"{CONDUCTOR}-{number}" for number in range(1, self.plan.conductors))]
        conductors = [
            self.spawn("conductor", name, self._conductor_arguments(name, number)) for number, name in enumerate(names)
        ]
        self.addresses = [conductor.wait_ready(silence_s) for conductor in conductors]
        for conductor in conductors:
            self._on_ready(conductor)
        self.address = self.addresses[0]
        waiting = self.spawn_members("kvstore", self.plan.kvstore)
        if self.plan.http_port is not None:
            waiting.append(self.spawn("gateway", GATEWAY_ID, self.gateway_arguments(self.plan.http_port)))
        for kind, count in self.plan.engine_counts.items():
            waiting += self.spawn_members(kind, count)
        while waiting:
            for service in list(waiting):
                if service.is_ready(silence_s, WAIT_S / len(waiting)):
                    waiting.remove(service)
                    self._on_ready(service)
        if self.plan.http_port is not None:
            self.http_address = self.services[GATEWAY_ID].address
        self.wait_joined(silence_s)
        return self.address

    @property
    def _real_engines(self) -> bool:
        return not self.plan.engine.startswith(SCHEME)

    def spawn_members(self, kind: str, count: int) -> list[ServiceProcess]:
        name = kind if kind == "kvstore" or self.plan.engines != "one" else ENGINE_NAME
        names = [f"{name}-{number}" for number in range(count)]
        return [self.spawn(kind, name, self.member_arguments(kind, name)) for name in names]

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until every instance has joined every conductor that runs.

        Raises:
            Unavailable: an instance ended, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        for conductor in self._conductors():
            with Client(conductor.address or self.address, tls=self.plan.tls) as client:
                self._wait_joined(client, deadline)

    def _wait_joined(self, client: Client, deadline: float) -> None:
        pause = threading.Event()
        wanted = {service.id for service in self.services.values() if service.kind not in KINDS_WITHOUT_JOIN}
        while True:
            for service in self.services.values():
                if service.returncode is not None:
                    raise Unavailable(f"{service.id} ended with status {service.returncode}\n{service.log_tail()}")
            known = {instance.id for instance in client.cluster_state().instances}
            if wanted <= known:
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"not joined in time: {', '.join(sorted(wanted - known))}")
            pause.wait(0.05)

    def _conductors(self) -> list[ServiceProcess]:
        return [service for service in self.services.values() if service.kind == "conductor"]

    def spawn(self, kind: str, service_id: str, arguments: Sequence[str]) -> ServiceProcess:
        """Start one service, replacing any earlier service with that id; do not wait for readiness."""
        log_path = self.plan.data_dir / "logs" / f"{service_id}.log"
        starts_engine = kind in OTHER_ROLE and self._real_engines
        service = ServiceProcess(
            kind, service_id, arguments, log_path, self._on_start, self.launcher(service_id), starts_engine
        )
        self.services[service_id] = service
        return service

    def launcher(self, service_id: str) -> Launcher:
        """What starts a service."""
        return start_service

    def restart(self, service_id: str, *, kill: bool = False, timeout_s: float = 180.0) -> None:
        """Stop one member (by SIGTERM or SIGKILL), start the same id again, and wait until the member has joined."""
        old = self.services[service_id]
        old.signal(signal.SIGKILL if kill else signal.SIGTERM)
        old.wait(timeout_s)
        self.spawn_again(service_id).wait_ready(timeout_s)
        self.wait_joined(timeout_s)

    def spawn_again(self, service_id: str) -> ServiceProcess:
        """Start a service that has ended, without waiting, with the same arguments: an engine in its first role."""
        old = self.services[service_id]
        # Others look for conductors and the gateway where they were, also if their port was any free one.
        listen = ("--listen", old.address) if old.kind in KINDS_WITHOUT_JOIN and old.address else ()
        return self.spawn(old.kind, service_id, [*old.arguments, *listen])

    def stop(self, drain_s: float = 20.0) -> dict[str, int]:
        """Drain and stop everything, gateway and conductors first, so that no new request comes.

        Returns:
            Exit status by service id.
        """
        statuses: dict[str, int] = {}
        for kinds in (("gateway",), ("conductor",), ("prefill", "decode", "kvstore")):
            running = [service for service in self.services.values() if service.kind in kinds]
            for service in running:
                service.signal(signal.SIGTERM)
            for service in running:
                statuses[service.id] = service.wait(drain_s)
        self.services.clear()
        return statuses

    def abort(self) -> None:
        """End everything at once, also what is still starting."""
        for service in self.services.values():
            service.signal(signal.SIGTERM)
        deadline = time.monotonic() + ABORT_S
        for service in self.services.values():
            service.wait(max(0.0, deadline - time.monotonic()))
        self.services.clear()

    def _common_arguments(self, kind: str, service_id: str, listen: str) -> Iterator[str]:
        yield from ("--id", service_id, "--listen", listen, "--log-level", self.plan.log_level)
        yield from ("--set", f"drain_s={DRAIN_S:g}")
        if self.plan.spans_dir is not None:
            yield from ("--set", f"spans_dir={self.plan.spans_dir}")
        yield from self.plan.extra.get(kind, ())

    def _conductor_arguments(self, service_id: str, number: int) -> list[str]:
        port = self.plan.port + number if self.plan.port else 0
        arguments = ["--model", self.plan.model, "--kvstore-replicas", str(self.plan.kvstore_replicas)]
        if self.plan.swap_roles:
            arguments += ["--set", "swap_roles=true"]
        return [*arguments, *self._common_arguments("conductor", service_id, format_address(LOOPBACK, port))]

    def _join_arguments(self) -> list[str]:
        return [part for address in self.addresses for part in ("--conductor", address)]

    def gateway_arguments(self, port: int) -> list[str]:
        """The command line of the gateway; writes the file of the plan's keys."""
        batches = self.plan.data_dir / GATEWAY_ID / "batches"
        arguments = [*self._join_arguments(), "--model", self.plan.model, "--set", f"batch_dir={batches}"]
        if self.plan.alias and not setting_of(self.plan, "gateway", "served_model_name", ""):
            names = dict.fromkeys((model_name(self.plan.model), self.plan.alias))
            arguments += ["--served-model-name", ",".join(names)]
        if self.plan.api_key_hashes:
            arguments += ["--api-keys", str(self._write_keys()), "--set", f"operator_tenants={KEY_TENANT}"]
        if self.plan.host in WILDCARDS:
            arguments += ["--advertise", "[::1]:0" if ":" in self.plan.host else LOOPBACK]
        return [*arguments, *self._common_arguments("gateway", GATEWAY_ID, format_address(self.plan.host, port))]

    def _write_keys(self) -> Path:
        """Write the file of the plan's keys, all of one tenant."""
        path = self.plan.data_dir / GATEWAY_ID / "keys"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text("".join(f"sha256:{key} {KEY_TENANT}\n" for key in self.plan.api_key_hashes))
        except OSError as error:
            raise ConfigError("data_dir", f"{path} cannot be written: {error.strerror}") from error
        return path

    def member_arguments(self, kind: str, service_id: str) -> list[str]:
        """The command line of a kvstore or an engine."""
        plan = self.plan
        arguments = self._join_arguments()
        if kind == "kvstore":
            arguments += ["--data-dir", str(plan.data_dir / service_id)]
            arguments += ["--dram-bytes", str(plan.dram_bytes), "--ssd-bytes", str(plan.ssd_bytes)]
        else:
            arguments += ["--model", plan.model, "--dtype", plan.dtype, "--block-size", str(plan.block_size)]
            arguments += [
                "--kv-cache-dtype",
                plan.kv_cache_dtype,
                "--kv-cache-memory-bytes",
                str(plan.kv_cache_memory_bytes),
            ]
            arguments += ["--threads", str(plan.threads), "--engine", plan.engine]
            arguments += ["--set", f"time_scale={plan.time_scale:g}"]
            arguments += ["--set", BOTH_ROLES] if plan.engines == "one" else []
            arguments += ["--set", f"core_page={plan.core_page}"] if plan.core_page is not None else []
            share = memory_share(plan, kind)
            arguments += [] if share is None else ["--set", f"{SHARE_SETTING}={share:.3g}"]
        if kind == "prefill":
            arguments += ["--pipeline-parallel-size", str(plan.pipeline_parallel_size)]
        if kind in OTHER_ROLE and _either_role(plan, kind):
            arguments += ["--set", "either_role=true", *_settings_of_role(plan, OTHER_ROLE[kind])]
        return [*arguments, *self._common_arguments(kind, service_id, format_address(LOOPBACK, 0))]


def _either_role(plan: StackPlan, kind: str) -> bool:
    """Whether this kind's engines may have either role: as the user says, else where one may leave its pool."""
    stages = setting_of(plan, "prefill", "pipeline_parallel_size", str(plan.pipeline_parallel_size))
    # A certificate for one role is refused in the other one: whoever has such for both says so. And an instance that
    # has both roles at once has no other.
    default = sum(plan.engine_counts.values()) > len(OTHER_ROLE) and stages == "1"
    default = default and not setting_of(plan, kind, "tls_cert", "")
    default = default and setting_of(plan, "decode", "computes_prompts", "false").lower() != "true"
    return setting_of(plan, kind, "either_role", str(default)).lower() == "true"


def _settings_of_role(plan: StackPlan, kind: str) -> list[str]:
    """The plan's settings of this kind's role, as flags, for engines of the other kind: their own go before."""
    role = config_class(kind).model_fields.keys() - EngineConfig.model_fields.keys()
    own = {name for name, _ in _named(plan.extra.get(OTHER_ROLE[kind], ()))}
    return [part for name, given in _named(plan.extra.get(kind, ())) if name in role - own for part in given]


def _named(given: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Settings among flags: name, and the flag with its value."""
    for flag, value in pairwise(given):
        if flag == "--set":
            yield value.partition("=")[0], (flag, value)
        elif flag.startswith("--"):
            yield flag.removeprefix("--").replace("-", "_"), (flag, value)


def memory_share(plan: StackPlan, kind: str) -> float | None:
    """GPU share for each engine of this kind; None if the user says.

    The stack's engines that share a device divide `MEMORY_SHARE`.
    """
    given = plan.extra.get(kind, ())
    if any(part.startswith(f"{SHARE_SETTING}=") for part in given) or ENV_PREFIX + SHARE_SETTING.upper() in os.environ:
        return None
    own = _engine_devices(plan, kind)
    sharing = sum(count for other, count in plan.engine_counts.items() if own & _engine_devices(plan, other))
    return MEMORY_SHARE / max(1, sharing)


def _engine_devices(plan: StackPlan, kind: str) -> set[DeviceName]:
    """The devices for each engine of this kind, named in settings, flags or the environment."""
    name, ranks = setting_of(plan, kind, "device", "cpu"), setting_of(plan, kind, "tensor_parallel_size", "1")
    return set(chain.from_iterable(engine_devices(name, stages_of(plan, kind), int(ranks))))


def stages_of(plan: StackPlan, kind: str) -> int:
    """Pipeline stages of each engine of this kind."""
    if kind == "prefill":
        return plan.pipeline_parallel_size
    return int(setting_of(plan, kind, "pipeline_parallel_size", "1"))


def setting_of(plan: StackPlan, kind: str, name: str, default: str) -> str:
    """A setting for one service kind, from settings, flags or the environment."""
    given = list(pairwise(plan.extra.get(kind, ())))
    flags = [value for flag, value in given if flag == f"--{name}"]
    settings = [value.partition("=")[2] for flag, value in given if flag == "--set" and value.startswith(f"{name}=")]
    return [os.environ.get(f"{ENV_PREFIX}{name.upper()}", default), *flags, *settings][-1]
