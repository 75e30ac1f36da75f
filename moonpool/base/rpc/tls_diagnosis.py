"""Why a connection fails that TLS is to protect, in words: gRPC only says that a socket is closed."""

from __future__ import annotations

import asyncio
import ssl

from moonpool.base import world
from moonpool.base.config import parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.tls import NAME, Tls

LIMIT_S = 2.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and an empty SETTINGS frame
_FRAME_BYTES = 9
_SETTINGS = 4


async def tls_trouble(address: str, tls: Tls | None) -> str:
    """Connect once, and say what is wrong with the certificates, or with which end speaks TLS. Takes 2 s at most.

    Returns:
        A sentence; "" if TLS is not what is wrong, or nobody listens there.
    """
    if not isinstance(world.CURRENT.get().network, world.GrpcNetwork):
        return ""  # a network of tests has no TLS
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls.client_context()
    except (ConfigError, OSError):
        return ""  # whoever uses the files says more
    if tls is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _trouble(address, tls, context)
    except (OSError, ValueError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
        return ""


async def _trouble(address: str, tls: Tls | None, context: ssl.SSLContext) -> str:
    host, port = parse_address(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=NAME)
        try:
            if tls is None:
                return f"{address} speaks TLS and this side does not: set MOONPOOL_TLS_CA, or tls_ca of a service"
            await reader.readexactly(_FRAME_BYTES)
        finally:
            writer.transport.abort()  # a closing within TLS would wait for the peer, beyond the end of the loop
    except ssl.SSLCertVerificationError as error:
        return f"{address} shows a certificate that is not accepted: {error.verify_message}"
    except asyncio.IncompleteReadError:  # gRPC's servers close without a word
        assert tls is not None
        return f"{address} does not accept {tls.shown()}"
    except (ssl.SSLError, ConnectionResetError):
        return await _plaintext(address, tls)
    return ""


async def _plaintext(address: str, tls: Tls | None) -> str:
    """Whether a gRPC server answers there without TLS."""
    if tls is None:
        return ""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    try:
        writer.write(_PREFACE)
        frame = await reader.readexactly(_FRAME_BYTES)
    finally:
        writer.transport.abort()
    if frame[3] != _SETTINGS:
        return ""
    return f"{address} speaks plaintext and this side TLS: give the service there tls_cert, tls_key and tls_ca"
