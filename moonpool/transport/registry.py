"""Which transports a process uses: classes by name, from the table in config.py."""

from __future__ import annotations

from importlib import import_module

from moonpool.telemetry.logs import get_logger
from moonpool.transport.base import Transport, TransportUnavailableError
from moonpool.transport.config import GRPC_NAME, TRANSPORTS, TransportConfig

log = get_logger(__name__)


def transport_class(name: str) -> type[Transport]:
    """The class of a transport.

    Raises:
        ValueError: There is no transport of this name.
    """
    path = TRANSPORTS.get(name)
    if path is None:
        raise ValueError(f"there is no transport {name!r}; known are {', '.join(TRANSPORTS)}")
    module, _, cls = path.partition(":")
    found: type[Transport] = getattr(import_module(module), cls)
    return found


def transport_kinds() -> dict[str, int]:
    """The number of each transport in messages, by name."""
    return {name: transport_class(name).kind for name in TRANSPORTS}


def transport_name(kind: int) -> str:
    """The name of the transport with this number in messages; that of gRPC if there is none."""
    return next((name for name, number in transport_kinds().items() if number == kind), GRPC_NAME)


def open_transports(config: TransportConfig) -> tuple[Transport, ...]:
    """The transports that a process can use, best first; none with TLS unless the flags trust them.

    A transport that this machine lacks is left out, with a warning in the log.

    Raises:
        ConfigError: A flag asks for what this machine lacks.
    """
    if config.tls_cert is not None and not config.kv_transports_trusted:
        return ()
    found: list[Transport] = []
    for name in config.kv_transports.split(","):
        if name == GRPC_NAME:
            continue
        try:
            found.append(transport_class(name).create(config))
        except TransportUnavailableError as error:
            log.warning(f"no {name} transport", reason=str(error))
    return tuple(found)
