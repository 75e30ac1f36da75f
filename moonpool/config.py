"""Configuration of a service: one frozen class per service, read from flags, environment and a file.

A flag goes before the environment, the environment before the file, the file before the default. Every error names its
setting.
"""

import argparse
import difflib
import ipaddress
import os
import re
import socket
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum, EnumType
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

import yaml
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

from moonpool.errors import ConfigError

ENV_PREFIX = "MOONPOOL_"
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  # these are refused, not bound
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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


def read_mapping(value: object) -> object:
    """A mapping by name, from a flag (YAML or JSON) or a file; raises ValueError when it is none."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value) if value.strip() else {}
        except yaml.YAMLError as error:
            raise ValueError(f"is no YAML: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping by name")
    return {str(name): row for name, row in value.items()}


def _check_bind(address: str) -> str:
    parse_address(address)
    return address


def _check_optional(address: str) -> str:
    return _check_bind(address) if address else address


def check_peer(address: str) -> str:
    """The address of another service, as it was given.

    Raises:
        ValueError: not of the form, or no address that can be reached.
    """
    host, port = parse_address(address)
    if host in _WILDCARDS or port == 0:
        raise ValueError(f"must be an address that can be reached, got {address!r}")
    return address


def _split(value: Any) -> Any:
    """Parts of a list, or of text that has commas between them; each once."""
    parts = [str(value)] if isinstance(value, str | Path) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    found = (one.strip() for part in parts for one in part.split(","))
    return tuple(dict.fromkeys(one for one in found if one))


def _check_peers(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(check_peer, addresses))


# "host:port" to listen at; port 0 = any free one.
ListenAddress = Annotated[str, AfterValidator(_check_bind)]
# The same, or "" for none.
OptionalAddress = Annotated[str, AfterValidator(_check_optional)]
# "host:port" of other services, or folders: the flag is given again, or there are commas between them in one value.
PeerAddresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_peers)]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split)]


class ServiceConfig(BaseSettings):
    """Settings that every service has.

    Subclasses add fields (name with unit, a `Field(description=...)` each) and are named `<Service>Config`. Constructed
    directly, keyword arguments go before the environment; `load` is what a process uses.
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
    log_json: bool = Field(False, description="log one JSON object per line, not text for people")
    spans_dir: Path | None = Field(
        None, description="folder for recorded spans, one file <id>.jsonl per process; default: nothing is recorded"
    )
    metrics_listen: OptionalAddress = Field(
        "", description="HOST:PORT of Prometheus metrics over HTTP (/metrics); default: none are served"
    )
    tls_cert: Path | None = Field(
        None,
        description="certificate that this service shows to others (PEM; `moonpool certs create` makes one); "
        "default: connections are in plaintext",
    )
    tls_key: Path | None = Field(None, description="private key of --tls-cert (PEM)")
    tls_ca: Path | None = Field(None, description="authorities that others' certificates must come from (PEM)")
    tls_revoked: Path | None = Field(
        None, description="file of certificates that are not accepted any more, a line `sha256:HEX` each"
    )
    drain_s: float = Field(
        30.0, gt=0, le=86400, description="seconds to finish what runs after SIGTERM; then it is cancelled"
    )

    # Name of the service in ids, logs and help; None = the class's name without "Config", in lower case.
    service_name: ClassVar[str | None] = None

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str | None = None) -> Self:
        """Read the settings: flags, then MOONPOOL_* variables, then the YAML file of `--config`, then defaults.

        Args:
            argv: the command line without the program's name.
            prog: the program's name in `--help`.

        Raises:
            ConfigError: a setting is unknown, missing or wrong; names it and where it came from.
            SystemExit: after `--help`, with code 0.
        """
        flags = _parse_flags(cls, argv, prog)
        path = flags.pop("config", None)
        file = {} if path is None else _read_yaml(cls, Path(path))
        try:
            environment = EnvSettingsSource(cls)()
        except SettingsError as error:
            named = re.search(r'field "(\w+)"', str(error))  # of a list or tuple; others fail in validation
            name = named[1] if named else "environment"
            raise ConfigError(name, f"must be JSON (from {ENV_PREFIX}{name.upper()})") from error
        try:
            return cls(**{**file, **environment, **flags})
        except ValidationError as error:
            raise _config_error(cls, error, flags, environment, file) from None

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
        if value and host in _WILDCARDS:
            raise ValueError(f"must be an address that others can reach, got {value!r}")
        return value

    @model_validator(mode="after")
    def _secured(self) -> Self:
        given = [name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(self, name) is not None]
        if 0 < len(given) < 3 or (self.tls_revoked is not None and not given):
            lacking = next(name for name in ("tls_cert", "tls_key", "tls_ca") if name not in given)
            raise ConfigError(lacking, "must be given: certificate, key and authority go together")
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not self.advertise and parse_address(self.listen)[0] in _WILDCARDS:
            raise ConfigError(
                "advertise", f"must be set when listening at {self.listen!r}, which other hosts cannot connect to"
            )
        return self


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

    def error(self, message: str) -> NoReturn:
        named = re.match(r"argument (--[a-z0-9-]+)[^:]*: (.*)", message, re.DOTALL)
        if named:
            raise ConfigError(named[1].removeprefix("--no-").lstrip("-").replace("-", "_"), named[2])
        raise ConfigError("command line", message)


def _parse_flags(cls: type[ServiceConfig], argv: Sequence[str], prog: str | None) -> dict[str, Any]:
    """The settings on the command line, as strings; pydantic converts them."""
    parser = _Parser(
        prog=prog or f"moonpool {cls.service()}",
        description=(cls.__doc__ or "").strip().split("\n\n")[0],
        epilog=f"A flag goes before its environment variable ({ENV_PREFIX} and the setting's name in capitals), that "
        "before the file of --config, that before the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    common = ServiceConfig.model_fields
    own = parser.add_argument_group(f"{cls.service()} settings")
    shared = parser.add_argument_group("settings of every service")
    for name, field in cls.model_fields.items():
        _add_flag(shared if name in common else own, name, field)
    shared.add_argument("--config", metavar="FILE", help="YAML file of settings, named as flags but with underscores")
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [_flag(name) for name in (*cls.model_fields, "config")]
        raise ConfigError(unknown[0].split("=")[0], "no such flag" + _suggestion(unknown[0].split("=")[0], known))
    return vars(namespace)


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    kind = _plain_type(field.annotation)
    if field.is_required():
        default = "required"
    elif field.default in (None, "", (), PydanticUndefined):
        default = ""  # the description tells what happens then
    else:
        shown = field.default.value if isinstance(field.default, Enum) else field.default
        default = f"default: {str(shown).lower() if kind is bool else shown}"
    text = (field.description or "").replace("%", "%%")
    text += f" [{default}]".replace("%", "%%") if default else ""
    if kind is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
    elif typing.get_origin(kind) in (list, tuple, set, frozenset):
        group.add_argument(_flag(name), action="append", metavar="VALUE", help=text + " (may be given again)")
    else:
        group.add_argument(_flag(name), metavar=_metavar(kind), help=text)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal or isinstance(kind, EnumType):
        return "{" + ",".join(str(getattr(one, "value", one)) for one in typing.get_args(kind) or kind) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_yaml(cls: type[ServiceConfig], path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError("config", f"{path} must hold a mapping of setting to value")
    for key in data:
        if key not in cls.model_fields:
            raise ConfigError(key, f"no such setting (in {path}){_suggestion(key, list(cls.model_fields))}")
    return data


def _config_error(
    cls: type[ServiceConfig],
    error: ValidationError,
    flags: Mapping[str, Any],
    environment: Mapping[str, Any],
    file: Mapping[str, Any],
) -> ConfigError:
    """The first complaint, with the setting's name (and place in it) and where its value came from."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ConfigError(name, f"is needed; give {_flag(name)} or {ENV_PREFIX}{name.upper()}")
    if name in flags:
        source = f" (from {_flag(name)})"
    elif name in environment:
        source = f" (from {ENV_PREFIX}{name.upper()})"
    elif name in file:
        source = " (from the file of --config)"
    else:
        source = ""
    given = first.get("input")
    if name in cls.model_fields and isinstance(given, str | int | float) and repr(given) not in text:
        text += f", got {given!r}"
    return ConfigError(".".join(map(str, first["loc"])) or name, text[:1].lower() + text[1:] + source)
