"""A service's configuration: one frozen class per service, read from flags, environment and a file.

A setting has a flag if the class lists the setting in `flag_groups`; others are set by `--set KEY=VALUE`, environment
or file. The command line goes before the environment, the environment before the file, the file before the default.
Every error names the setting.
"""

import argparse
import difflib
import errno
import importlib
import ipaddress
import os
import re
import socket
import types
import typing
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum, EnumType
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from moonpool.base.errors import ConfigError
from moonpool.base.help_page import HelpRow, HelpSection, help_page
from moonpool.base.json_parts import parse_yaml
from moonpool.base.settings import default_of, statements
from moonpool.base.sizes import format_size, parse_size

ENV_PREFIX = "MOONPOOL_"
ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "gguf")
"""Packages of the extra `engine`, which prefill and decode need."""
EXTRA_ADVICE = "install Moonpool with its extra `{}` (docs/install.md)"
"""What to do where an extra's packages are missing."""
LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104
"""Hosts that stand for all addresses of this machine."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RENAMED = {
    "block_tokens": ("block_size",),
    "https_cert": ("ssl_certfile",),
    "https_key": ("ssl_keyfile",),
    "kv_bytes": ("kv_cache_memory_bytes",),
    "kv_dtype": ("kv_cache_dtype",),
    "kv_lanes": ("kv_transports",),
    "kv_lanes_dir": ("kv_transports_dir",),
    "kv_lanes_trusted": ("kv_transports_trusted",),
    "max_batch": ("max_num_seqs",),
    "max_sessions": ("max_transfers",),
    "max_tokens": ("max_model_len",),
    "session_timeout_s": ("transfer_timeout_s",),
    "stages": ("pipeline_parallel_size",),
    "step_tokens": ("chunked_prefill_size", "max_num_batched_tokens"),
    "tool_parser": ("tool_call_parser",),
}
"""Settings that had another name, with the names of today, at most one for a service; an old name is an error that says
the new one."""
REMOVED = {
    "balancing_threshold": "1.0 (docs/placement.md)",
    "deletion_wait_s": "4 s (docs/contexts.md)",
    "explain_history": "4,096 requests (docs/placement.md)",
    "lease_timeout_s": "600 s (docs/kvstore.md)",
    "max_index_keys": "4,000,000 blocks (docs/placement.md)",
    "max_pins": "1024 pins (docs/kvstore.md)",
    "max_queued_bytes": "64 MiB (docs/overload.md)",
    "max_running": "as the engine's memory allows (docs/engines.md)",
    "promise_s": "600 s (docs/adr/0007-growing-sequences.md)",
    "recovery_s": "15 s (docs/adr/0001-failures-are-placed-anew.md)",
    "role_dwell_s": "20 s (docs/roles.md)",
    "role_hold_s": "10 s (docs/roles.md)",
    "role_ratio": "1.5 (docs/roles.md)",
    "role_tbt_s": "0.1 s (docs/roles.md)",
    "role_ttft_s": "10 s (docs/roles.md)",
    "room_wait_s": "30 s, or queue_deadline_s if that is set (docs/overload.md)",
    "ssd_prefetch_bytes_per_s": "1 GiB/s (docs/eviction.md)",
    "ssd_scrub_bytes_per_s": "8 MiB/s (docs/kvstore.md)",
    "token_timeout_s": "60 s (docs/engines.md)",
    "tokenizer_threads": "2 threads of a conductor, 1 of a gateway (docs/limits.md)",
    "watermark": "0.01 of the pool (docs/adr/0007-growing-sequences.md)",
}
"""What is constant now, with its page, by the name of the former setting; such a name is an error that says so."""


def present_name(former: str, known: Container[str]) -> str:
    """Return the name among `known` that a setting of that former name has now; "" for none."""
    return next((name for name in RENAMED.get(former, ()) if name in known), "")


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port"; the host comes back without brackets.

    Raises:
        ValueError: not of that form, or the port is not in [0, 65535].
    """
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT with a port in [0, 65535], got {address!r}")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"an IPv6 host must stand in brackets, got {address!r}")
    if re.search(r"[\s/]", host):
        raise ValueError(f"must be HOST:PORT without a scheme or spaces, got {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can connect to what listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(address: str, name: str) -> None:
    """Check that a service can listen at "host:port", before loading anything; `name` is that of the setting.

    Raises:
        ConfigError: another program listens there, or no program may.
    """
    host, port = parse_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError:  # the real attempt says what is wrong with the name
        return
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(where)
            attempt.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(name, f"another program listens at {address}") from None
            raise ConfigError(name, f"cannot listen at {address}: {error.strerror}") from None


def read_mapping(value: object) -> object:
    """A mapping by name, from a flag (YAML or JSON) or a file; raises ValueError for any other value."""
    if isinstance(value, str):
        value = parse_yaml(value) if value.strip() else {}
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping by name")
    return {str(name): row for name, row in value.items()}


def _check_bind(address: str) -> str:
    parse_address(address)
    return address


def _check_optional(address: str) -> str:
    return _check_bind(address) if address else address


def check_peer(address: str) -> str:
    """Another service's address, as given.

    Raises:
        ValueError: not of the form, or no address that can be reached.
    """
    host, port = parse_address(address)
    if host in WILDCARDS or port == 0:
        raise ValueError(f"must be an address that can be reached, got {address!r}")
    return address


def _split(value: Any) -> Any:
    """Parts of a list, or of text separated by commas; each once."""
    parts = [str(value)] if isinstance(value, str | Path) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    found = (item.strip() for part in parts for item in part.split(","))
    return tuple(dict.fromkeys(item for item in found if item))


def _check_peers(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(check_peer, addresses))


def assignments(values: Sequence[str]) -> dict[str, str]:
    """Values by name, from texts NAME=VALUE.

    Raises:
        ValueError: a text is not of the form, or a name stands there twice.
    """
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ValueError(f"must be NAME=VALUE, got {text!r}")
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found


def _check_assignments(values: tuple[str, ...]) -> tuple[str, ...]:
    assignments(values)
    return values


# Bytes, and bytes per second: a number, or a text such as "4GiB".
ByteSize = Annotated[int, BeforeValidator(parse_size)]
ByteRate = Annotated[float, BeforeValidator(parse_size)]
# "host:port" to listen at; port 0 = any free one.
ListenAddress = Annotated[str, AfterValidator(_check_bind)]
# The same, or "" for none.
OptionalAddress = Annotated[str, AfterValidator(_check_optional)]
# "host:port" of other services, or folders: repeat the flag, or separate values by commas.
PeerAddresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_peers)]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split)]
# NAME=VALUE, as often as you want; see `assignments`.
Assignments = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_assignments)]
SERVICES = ("conductor", "prefill", "decode", "kvstore", "gateway")
SERVICE_MODULES = {
    "conductor": "moonpool.conductor",
    "prefill": "moonpool.engine.prefill",
    "decode": "moonpool.engine.decode",
    "stage": "moonpool.engine.remote",
    "kvstore": "moonpool.kvstore",
    "gateway": "moonpool.gateway",
    "adapter": "moonpool.interop.adapter",
    "indexer": "moonpool.interop.indexer",
}
"""Kind of service -> package that runs as a program."""
OTHER_VARIABLES = (
    "ADDRESS", "API_KEY", "TRACE", "TRACES",  # of commands, SDK and benchmarks
    "KERNELS", "KERNELS_CACHE", "KERNELS_PREBUILT", "TRITON_DEVICE", "COMMIT",  # of native code and kernels
    "DIE_WITH_PARENT", "FAULT_BREAK_CONNECTIONS", "FAULT_CORRUPT_FRAMES", "FAULT_SEED",  # of processes and tests
    "DYNAMO", "FUZZ_EVENTS", "FUZZ_EXAMPLES", "FUZZ_SEED", "STORM_MESSAGES",
    "STACK_BASE", "STACK_CERTS", "STACK_CONDUCTOR", "STACK_HOST", "STACK_HTTP", "STACK_MEMORY", "STACK_MODELS",
    "STACK_PUBLIC", "STACK_PUBLISH", "STACK_SIZE",  # of compose.yaml
)  # fmt: skip
"""MOONPOOL_* variables that are no setting of a service."""


class ServiceConfig(BaseSettings):
    """Settings that every service has.

    Subclasses add fields (name with unit, a `Field(description=...)` each) and are named `<Service>Config`. Constructed
    directly, keyword arguments go before the environment; `load` is what a process uses.

    Attributes:
        flag_groups: fields of this class that have a flag, by their heading in `--help`.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        protected_namespaces=(),
        validate_default=True,
    )

    listen: ListenAddress = Field(
        "127.0.0.1:0", description="HOST:PORT to listen at; port 0 takes any free port, which `ready: HOST:PORT` tells"
    )
    advertise: str = Field(
        "",
        description="HOST or HOST:PORT at which others reach this service; default: --listen with the actual port. "
        "Needed when listening at all addresses",
    )
    id: str = Field(
        "",
        description="name of this instance, unique in the cluster and the same after a restart "
        "(letters, digits, '.', '_', '-'); default: made of service, host name and process number",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_json: bool = Field(
        False, description="log one JSON object per line, not text for people; lines on standard output, too"
    )
    spans_dir: Path | None = Field(
        None, description="folder for recorded spans, one file <id>.jsonl per process; default: no recording"
    )
    otlp_traces_endpoint: str = Field(
        "",
        description="URL of an OpenTelemetry collector for the spans of requests, by OTLP over HTTP, such as "
        "http://collector:4318/v1/traces; needs the extra `otel`; default: none are sent",
    )
    metrics_listen: OptionalAddress = Field(
        "", description="HOST:PORT of Prometheus metrics over HTTP (/metrics); default: none are served"
    )
    tls_cert: Path | None = Field(
        None,
        description="certificate that this service shows to others (PEM; `moonpool certs create` makes one); "
        "default: connections are in plaintext",
    )
    tls_key: Path | None = Field(None, description="private key of `tls_cert` (PEM)")
    tls_ca: Path | None = Field(None, description="authorities that others' certificates must come from (PEM)")
    tls_revoked: Path | None = Field(
        None, description="file of certificates that are not accepted any more, a line `sha256:HEX` each"
    )
    drain_s: float = Field(
        30.0, gt=0, le=86400, description="seconds for running work to finish after SIGTERM; then the work is cancelled"
    )

    flag_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "network": ("listen", "advertise", "metrics_listen"),
        "process": ("id", "log_level"),
    }
    # Name of the service in ids, logs and help; None = the class's name without "Config", in lower case.
    service_name: ClassVar[str | None] = None

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str | None = None) -> Self:
        """Read the settings: `--set`, flags, MOONPOOL_* variables, the file of `--config`, defaults, in this order.

        Args:
            argv: the command line without the program's name.
            prog: the program's name in `--help`.

        Raises:
            ConfigError: a setting is unknown, missing or wrong; names the setting and the source.
            SystemExit: after `--help`, with code 0.
        """
        flags = _parse_flags(cls, argv, prog)
        path = flags.pop("config", None)
        keys = _parse_keys(cls, flags.pop("set", []))
        file = {} if path is None else _read_yaml(cls, Path(path))
        _refuse_old_variables(cls)
        refuse_unknown_variables(cls.model_fields)
        try:
            environment = EnvSettingsSource(cls)()
        except SettingsError as error:
            named = re.search(r'field "(\w+)"', str(error))  # of a list or tuple; others fail in validation
            name = named[1] if named else "environment"
            raise ConfigError(name, f"must be JSON (from {ENV_PREFIX}{name.upper()})") from error
        try:
            return cls(**{**file, **environment, **flags, **keys})
        except ValidationError as error:
            raise _config_error(
                cls, error, {"--set": keys, "flag": flags, "variable": environment, "file": file}
            ) from None

    @classmethod
    def flags(cls) -> dict[str, tuple[str, ...]]:
        """The settings that have a flag, by heading: the service's own before those of every service."""
        found: dict[str, tuple[str, ...]] = {}
        for base in cls.__mro__:
            for heading, names in vars(base).get("flag_groups", {}).items():
                found[heading] = tuple(dict.fromkeys((*found.get(heading, ()), *names)))
        return found

    @classmethod
    def service(cls) -> str:
        """The service's name, for example "prefill"."""
        return cls.service_name or cls.__name__.removesuffix("Config").lower()

    def advertised(self, port: int) -> str:
        """The address told to others, "host:port", when this service really listens at `port`."""
        if not self.advertise:
            return format_address(parse_address(self.listen)[0], port)
        if self.advertise.startswith("[") or ":" in self.advertise:
            host, advertised_port = parse_address(self.advertise)
            return format_address(host, advertised_port or port)
        return format_address(self.advertise, port)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments, then environment; no .env file and no secrets folder."""
        return init_settings, env_settings

    @model_validator(mode="before")
    @classmethod
    def _default_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("id") and cls.model_fields["id"].default == "":
            host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
            return {**data, "id": f"{cls.service()}-{host}-{os.getpid()}"}
        return data

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError(f"must be letters, digits, '.', '_' and '-', got {value!r}")
        return value

    @field_validator("spans_dir", "tls_cert", "tls_key", "tls_ca", "tls_revoked", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("advertise")
    @classmethod
    def _check_advertise(cls, value: str) -> str:
        host = value
        if value.startswith("[") or ":" in value:
            host = parse_address(value)[0]
        elif re.search(r"[\s/]", value):
            raise ValueError(f"must be HOST or HOST:PORT, got {value!r}")
        if value and host in WILDCARDS:
            raise ValueError(f"must be an address that others can reach, got {value!r}")
        return value

    @model_validator(mode="after")
    def _secured(self) -> Self:
        given = [name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(self, name) is not None]
        if 0 < len(given) < 3 or (self.tls_revoked is not None and not given):
            lacking = next(name for name in ("tls_cert", "tls_key", "tls_ca") if name not in given)
            raise ConfigError(lacking, "must be given: tls_cert, tls_key and tls_ca go together")
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not self.advertise and parse_address(self.listen)[0] in WILDCARDS:
            raise ConfigError(
                "advertise", f"must be set when listening at {self.listen!r}, which other hosts cannot connect to"
            )
        return self


def stated(record: type[Any], name: str) -> Any:
    """The field of a config for a setting that a core's settings record states (`moonpool.base.settings`)."""
    meaning, bounds = statements(record)[name]
    return Field(default_of(record, name), description=meaning, **bounds)  # type: ignore[call-overload]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain_type(annotation: Any) -> Any:
    """The type behind Annotated and Optional."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _plain_type(inner[0]) if len(inner) == 1 else str
    return annotation


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting."""

    def format_help(self) -> str:
        sections = [
            HelpSection(
                _heading(group.title or "options"), [_help_row(self, action) for action in group._group_actions]
            )
            for group in self._action_groups
        ]
        return help_page(f"{self.prog} [OPTIONS]", self.description or "", sections, self.epilog or "")

    def error(self, message: str) -> NoReturn:
        named = re.match(r"argument (--[a-z0-9-]+)[^:]*: (.*)", message, re.DOTALL)
        if named:
            raise ConfigError(named[1].removeprefix("--no-").lstrip("-").replace("-", "_"), named[2])
        raise ConfigError("command line", message)


def _heading(title: str) -> str:
    return title[:1].upper() + title[1:]


def _help_row(parser: argparse.ArgumentParser, action: argparse.Action) -> HelpRow:
    """A flag in a help page."""
    names = "/".join(action.option_strings) if len(action.option_strings) < 3 else action.option_strings[0]
    text = (action.help or "") % {"prog": parser.prog}
    return HelpRow(names if action.nargs == 0 else f"{names} {action.metavar}", text)


def _parse_flags(cls: type[ServiceConfig], argv: Sequence[str], prog: str | None) -> dict[str, Any]:
    """The settings on the command line, as strings, and those of `--set`; pydantic converts them."""
    parser = _Parser(
        prog=prog or f"moonpool {cls.service()}",
        description=(cls.__doc__ or "").strip().split("\n\n")[0],
        epilog="docs/flags.md lists all settings. The command line goes before environment variables "
        f"({ENV_PREFIX} and the setting's name in capitals), these before the file, the file before the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for heading, names in cls.flags().items():
        group = parser.add_argument_group(heading)
        for name in names:
            _add_flag(group, name, cls.model_fields[name])
    others = parser.add_argument_group("all settings")
    others.add_argument("--config", metavar="FILE", help="YAML file of settings by name")
    others.add_argument("--set", metavar="NAME=VALUE", action="append", help="any setting by name (may be given again)")
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].split("=")[0]
        name = flag.lstrip("-").replace("-", "_").removeprefix("no_")
        if flag.startswith("--") and (moved := _moved(cls, name)):
            raise ConfigError(name, moved)
        known = [_flag(name) for names in cls.flags().values() for name in (*names, "config", "set")]
        raise ConfigError(flag, "no such flag" + suggestion(flag, known))
    return vars(namespace)


def _moved(cls: type[ServiceConfig], name: str) -> str:
    """How a setting that has no such flag is set now; "" for an unknown setting."""
    now = name if name in cls.model_fields else present_name(name, cls.model_fields)
    if name in REMOVED:
        return _constant(name)
    if now not in cls.model_fields:
        return ""
    if any(now in names for names in cls.flags().values()):
        return f"is now {_flag(now)}" if now != name else ""
    return f"has no flag; give --set {now}=VALUE, or `{now}` in the file of --config"


def _parse_keys(cls: type[ServiceConfig], given: Sequence[str]) -> dict[str, str]:
    """The settings of `--set`."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("set", f"must be NAME=VALUE, got {text!r}")
        _check_name(cls, name, "from --set")
        found[name] = value
    return found


def _constant(name: str) -> str:
    return f"is no longer a setting: it is {REMOVED[name]}"


def _check_name(cls: type[ServiceConfig], name: str, source: str) -> None:
    if name not in cls.model_fields and name in REMOVED:
        raise ConfigError(name, f"{_constant(name)} ({source})")
    if name not in cls.model_fields:
        now = present_name(name, cls.model_fields)
        hint = f"; it is now {now}" if now else suggestion(name, list(cls.model_fields))
        raise ConfigError(name, f"no such setting ({source}){hint}")


def refuse_unknown_variables(own: Iterable[str] = ()) -> None:
    """See that each MOONPOOL_* variable means something to a service, a command or a test.

    Args:
        own: settings of the service that asks.

    Raises:
        ConfigError: one does not; names the variable that may have been meant.
    """
    links = _service_links()
    given = [name for name in os.environ if name.startswith(ENV_PREFIX) and not (links and links.fullmatch(name))]
    others = {ENV_PREFIX + name.upper() for name in (*OTHER_VARIABLES, *RENAMED, *own)}
    if all(name in others for name in given):
        return
    known = others | {ENV_PREFIX + name.upper() for cls in map(config_class, SERVICES) for name in cls.model_fields}
    for name in given:
        if (former := name.removeprefix(ENV_PREFIX).lower()) in REMOVED:
            raise ConfigError(name, _constant(former))
        if name not in known:
            meant = suggestion(name.removeprefix(ENV_PREFIX), sorted(other.removeprefix(ENV_PREFIX) for other in known))
            hint = meant.replace("mean ", f"mean {ENV_PREFIX}")
            raise ConfigError(name, f"nothing reads this environment variable{hint}")


def _service_links() -> re.Pattern[str] | None:
    """Variables that Kubernetes sets in each container for a Service whose name begins with "moonpool"; None: none.

    A Service `moonpool-kv` has MOONPOOL_KV_SERVICE_HOST, MOONPOOL_KV_SERVICE_PORT, MOONPOOL_KV_PORT and longer names.
    """
    suffix = "_SERVICE_HOST"
    services = [name.removesuffix(suffix) for name in os.environ if name.endswith(suffix)]
    ours = [re.escape(name) for name in services if f"{name}_".startswith(ENV_PREFIX)]
    # Not any name of this form: without the Service's host, a mistyped setting must stay an error.
    return re.compile(rf"({'|'.join(ours)})_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_[A-Z]+\w*)?)") if ours else None


def config_class(kind: str) -> type[ServiceConfig]:
    """The settings class for a kind of service.

    Imports the class's module, which this module does not know otherwise.
    """
    module = importlib.import_module(f"{SERVICE_MODULES[kind]}.config")
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value.__module__ == module.__name__
    ]
    return found


def _refuse_old_variables(cls: type[ServiceConfig]) -> None:
    for old in RENAMED:
        now, variable = present_name(old, cls.model_fields), f"{ENV_PREFIX}{old.upper()}"
        if os.environ.get(variable) and now and old not in cls.model_fields:
            raise ConfigError(old, f"{variable} is now {ENV_PREFIX}{now.upper()}")


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    kind = _plain_type(field.annotation)
    if field.is_required():
        default = "required"
    elif field.default in (None, "", (), PydanticUndefined):
        default = ""  # the description tells what happens then
    else:
        shown = field.default.value if isinstance(field.default, Enum) else field.default
        default = f"default: {default_text(name, shown)}"
    text = (field.description or "").replace("%", "%%")
    text += f" [{default}]".replace("%", "%%") if default else ""
    if kind is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
    elif typing.get_origin(kind) in (list, tuple, set, frozenset):
        group.add_argument(_flag(name), action="append", metavar="VALUE", help=text + " (may be given again)")
    else:
        group.add_argument(_flag(name), metavar="SIZE" if is_size(name) else _metavar(kind), help=text)


def is_size(name: str) -> bool:
    """Whether a setting is a size in bytes, or a rate of bytes; the setting's name says so."""
    return "bytes" in name.split("_")


def default_text(name: str, value: object) -> str:
    """A default in the form for help and docs."""
    if isinstance(value, bool):
        return str(value).lower()
    return format_size(int(value)) if is_size(name) and isinstance(value, int | float) else str(value)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal or isinstance(kind, EnumType):
        return "{" + ",".join(str(getattr(choice, "value", choice)) for choice in typing.get_args(kind) or kind) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, if any."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_yaml(cls: type[ServiceConfig], path: Path) -> dict[str, Any]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError("config", f"{path} must hold a mapping of setting to value")
    for key in data:
        _check_name(cls, key, f"in {path}")
    return data


def _config_error(
    cls: type[ServiceConfig],
    error: ValidationError,
    sources: Mapping[str, Mapping[str, Any]],
) -> ConfigError:
    """The first complaint; `sources` has values by kind of source, in order of precedence, lowest last."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ConfigError(name, f"is needed; give {_flag(name)} or {ENV_PREFIX}{name.upper()}")
    told = {"flag": _flag(name), "variable": f"{ENV_PREFIX}{name.upper()}", "file": "the file of --config"}
    source = next((f" (from {told.get(kind, kind)})" for kind, values in sources.items() if name in values), "")
    given = first.get("input")
    if name in cls.model_fields and isinstance(given, str | int | float) and repr(given) not in text:
        text += f", got {given!r}"
    return ConfigError(".".join(map(str, first["loc"])) or name, text[:1].lower() + text[1:] + source)
