"""Certificates for tests, as `moonpool certs create` makes them."""

from pathlib import Path

from moonpool.base.rpc.tls import Tls
from moonpool.cli.certs import Authority
from tests.unit.clocks import hurried


def issue(folder: Path, role: str, name: str = "", days: int = 1) -> Path:
    """A certificate of the authority in `folder`, which is made when it is not there."""
    return Authority.at(folder).issue(folder, role, name or role, [], days)


def tls(folder: Path, role: str, name: str = "") -> Tls:
    """What a process of this role has, which looks at its files each time."""
    return Tls(folder / "ca.pem", issue(folder, role, name), folder / f"{name or role}.key", clock=hurried())
