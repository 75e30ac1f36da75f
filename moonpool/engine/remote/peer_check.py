"""Who may lead a stage, and who may be one: an engine's certificate that is not revoked, where there is TLS."""

import ssl
from typing import Any

from moonpool.base.errors import PermissionDenied, Unauthenticated
from moonpool.base.rpc.roles import ENGINES, RoleGate
from moonpool.engine.remote.link import StageLink


def check_peer(link: StageLink, gate: RoleGate | None) -> None:
    """Check the certificate that the other end has shown; in plaintext everybody is let in.

    Raises:
        Unauthenticated: the certificate is revoked, or names no role.
        PermissionDenied: the role is not an engine's.
    """
    if link.tls is None or gate is None:
        return
    shown, der = link.tls.getpeercert(), link.tls.getpeercert(binary_form=True)
    if not shown or der is None:
        raise Unauthenticated("the connection shows no certificate")
    alternative: Any = shown.get("subjectAltName", ())
    names = [value.encode() for kind, value in alternative if kind == "URI"]
    caller = gate.certified({"x509_subject_alternative_name": names}, ssl.DER_cert_to_PEM_cert(der).encode())
    if caller.role not in ENGINES:
        raise PermissionDenied(f"a certificate of role {caller.role} is no engine's")
