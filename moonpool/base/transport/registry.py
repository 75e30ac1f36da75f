"""Which transports a process uses: classes by name, from the table in config.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module

from moonpool.base.rpc.tls import Tls
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.base import Transport, TransportUnavailableError
from moonpool.base.transport.config import GRPC_NAME, TRANSPORTS, TransportConfig

log = get_logger(__name__)


def transport_class(name: str) -> type[Transport]:
    """A transport's class.

    Raises:
        ValueError: No transport has this name.
    """
    path = TRANSPORTS.get(name)
    if path is None:
        raise ValueError(f"there is no transport {name!r}; known are {', '.join(TRANSPORTS)}")
    module, _, cls = path.partition(":")
    found: type[Transport] = getattr(import_module(module), cls)
    return found


def transport_kinds() -> dict[str, int]:
    """Each transport's number in messages, by name."""
    return {name: transport_class(name).kind for name in TRANSPORTS}


def transport_name(kind: int) -> str:
    """The name of the transport with this number in messages; gRPC's name if no transport has the number."""
    return next((name for name, number in transport_kinds().items() if number == kind), GRPC_NAME)


def open_transports(config: TransportConfig, tls: Tls | None = None) -> tuple[Transport, ...]:
    """The transports that a process can use, best first; with certificates, only transports safe between machines.

    A transport that this machine or process lacks is left out, with a warning in the log.

    Args:
        config: Names the transports.
        tls: This process's certificates; None: as the flags say.

    Raises:
        ConfigError: A flag asks for what this machine lacks.
    """
    tls = tls or Tls.of(config)
    names = [name for name in config.kv_transports.split(",") if name != GRPC_NAME]
    if tls is not None and not config.kv_transports_trusted:
        names = list(dict.fromkeys(_encrypted(names)))
    found: list[Transport] = []
    for name in names:
        try:
            found.append(transport_class(name).create(config, tls))
        except TransportUnavailableError as error:
            log.warning(f"no {name} transport", reason=str(error))
    return tuple(found)


def _encrypted(names: Iterable[str]) -> Iterator[str]:
    """Transports that a process with certificates uses instead of the given transports."""
    for name in names:
        safe = transport_class(name).encrypted_as
        if safe is None:
            log.warning(f"no {name} transport", reason="not encrypted; with certificates set kv_transports_trusted")
        else:
            yield safe
