"""The table of transports, and the flags that choose among them.

To add a transport, write a class like `moonpool.base.transport.tcp.TcpTransport` and add an entry to `TRANSPORTS`
(docs/extend/kv_transport.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, field_validator

from moonpool.base.config import ServiceConfig

TRANSPORTS = {
    "local": "moonpool.base.transport.shared_memory:SharedMemoryTransport",
    "tcp": "moonpool.base.transport.tcp:TcpTransport",
    "tls": "moonpool.base.transport.tls:TlsTransport",
    "nixl": "moonpool.base.transport.nixl:NixlTransport",
}
"""Module and class of each transport, by the name that flags use. A class is imported on first use. gRPC is not in the
table: every stream begins on gRPC, and stays there if no transport in the table can be used."""
GRPC_NAME = "grpc"


def _check_names(text: str) -> str:
    names = text.split(",")
    if not set(names) <= {GRPC_NAME, *TRANSPORTS} or len(set(names)) < len(names):
        raise ValueError(f"must be some of {', '.join([GRPC_NAME, *TRANSPORTS])}, with commas between them")
    return text


class TransportConfig(ServiceConfig):
    """Flags for services that exchange KV."""

    flag_groups: ClassVar = {"KV cache": ("kv_transports",)}
    kv_transports: Annotated[str, AfterValidator(_check_names)] = Field(
        "local",
        description=(
            "ways to move KV, best first, separated by commas: local (shared memory, between processes of one user "
            "on one machine), tcp (TCP at a separate port; with `tls_cert` this is tls), tls (TCP within TLS; both "
            "ends need `tls_cert`), nixl (as tcp, and pools are read over NIXL, "
            "for example by RDMA); grpc is always the last resort, and alone if only grpc is named"
        ),
    )
    kv_transports_dir: Path | None = Field(
        None,
        description="folder for the sockets of `local`; all processes that use `local` need the same folder (in "
        "containers a volume); default: moonpool-UID in XDG_RUNTIME_DIR or the temporary folder",
    )
    kv_transports_trusted: bool = Field(
        False,
        description="use plain transports between machines even with `tls_cert`, although they neither encrypt nor "
        "authenticate",
    )

    @field_validator("kv_transports_dir", mode="before")
    @classmethod
    def _no_dir(cls, value: Any) -> Any:
        return None if value == "" else value
