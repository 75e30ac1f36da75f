"""Checks the description of an instance (id, address) that a peer has sent, before it is used."""

from __future__ import annotations

import re

from moonpool.config import check_peer
from moonpool.errors import InvalidRequest
from moonpool.v1 import kv_pb2

MAX_ID_CHARS = 256
MAX_ADDRESS_CHARS = 512
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")


def check_instance(instance: kv_pb2.Instance, field: str = "instance") -> None:
    """Check that an instance has a name, and an address at which it can be reached.

    Raises:
        InvalidRequest: names what is wrong, as "FIELD.id" or "FIELD.address".
    """
    if not 1 <= len(instance.id) <= MAX_ID_CHARS or not instance.id.isprintable():
        raise InvalidRequest(f"{field}.id", f"must have 1 to {MAX_ID_CHARS} printable characters")
    address = instance.address
    if len(address) > MAX_ADDRESS_CHARS:
        raise InvalidRequest(f"{field}.address", f"has more than {MAX_ADDRESS_CHARS} characters")
    try:
        check_peer(address)
    except ValueError as error:
        raise InvalidRequest(f"{field}.address", str(error)) from None
    if not _HOST.fullmatch(address.rpartition(":")[0]):
        raise InvalidRequest(f"{field}.address", f"no host has such a name: {address!r}")
