"""`moonpool certs`: a local certificate authority, for clusters that have no other.

Keys are on the curve P-256. A service's certificate carries the DNS name that Moonpool's channels check. Roles that
only call have no such name, and prove no server. Hosts are for others' programs. The role is a URI, and the common
name is the instance's or tenant's name.
"""

import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moonpool.base.errors import ConfigError
from moonpool.base.rpc.roles import CLIENTS, ROLE_URI, ROLES, fingerprint
from moonpool.base.rpc.tls import NAME
from moonpool.cli.whole_words import say

AUTHORITY_DAYS = 3650
CLOCK_SKEW = datetime.timedelta(minutes=5)
"""Certificates are valid from so long ago on: clocks of machines differ."""
MAX_NAME_CHARS = 64
"""X.509's bound of a common name."""
_UTC = datetime.UTC

app = typer.Typer()


@app.command()
def create(
    folder: Annotated[Path, typer.Argument(help="Where the authority lies, or is made: ca.pem and ca.key.")],
    role: Annotated[
        list[str], typer.Option(help=f"One of {', '.join(ROLES)}; may be given again. Default: one of each.")
    ] = [],  # noqa: B006
    name: Annotated[str, typer.Option(help="The instance, or a client's tenant; default: the role.")] = "",
    host: Annotated[
        list[str], typer.Option(help="DNS name or IP address that other programs check; may be given again.")
    ] = [],  # noqa: B006
    days: Annotated[int, typer.Option(min=1, max=AUTHORITY_DAYS, help="How long they are valid.")] = 365,
) -> None:
    """Make certificates: NAME.pem and NAME.key in the folder, and the authority if there is none yet."""
    roles = role or list(ROLES)
    for granted in roles:
        if granted not in ROLES:
            raise ConfigError("role", f"is one of {', '.join(ROLES)}, not {granted!r}")
    if name and len(roles) > 1:
        raise ConfigError("name", "is for one role at a time")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = Authority.at(folder)
    for granted in roles:
        path = authority.issue(folder, granted, name or granted, host, days)
        _print_made(path, granted)


@app.command()
def renew(
    folder: Annotated[Path, typer.Argument(help="Where the authority and the certificates lie.")],
    within_days: Annotated[
        int, typer.Option(min=0, max=AUTHORITY_DAYS, help="Renew those that end within so many days.")
    ] = 30,
    days: Annotated[int, typer.Option(min=1, max=AUTHORITY_DAYS, help="How long the new ones are valid.")] = 365,
) -> None:
    """Make certificates that end soon anew: with new keys, for the same roles, names and hosts."""
    authority = Authority.existing(folder)
    now, renewed = datetime.datetime.now(_UTC), 0
    for path in sorted(folder.glob("*.pem")):
        granted = authority.issued(path)
        if granted is None or granted.ends > now + datetime.timedelta(days=within_days):
            continue
        authority.issue(folder, granted.role, path.stem, granted.hosts, days)
        renewed += 1
        _print_made(path, granted.role)
    if authority.ends < now + datetime.timedelta(days=days):
        say(f"{folder / 'ca.pem'} itself ends on {authority.ends:%Y-%m-%d}: make another authority before", err=True)
    if not renewed:
        say(f"no certificate in {folder} ends within {within_days} days")


def _print_made(path: Path, role: str) -> None:
    """One line in a pipe; two at a terminal, which is narrower."""
    between = "\n  " if sys.stdout.isatty() else "  "
    typer.echo(f"{path}  {role}{between}sha256:{fingerprint(path.read_bytes())}")


@dataclass(frozen=True, slots=True)
class Issued:
    """What a certificate of the authority was made for."""

    role: str
    hosts: list[str]
    ends: datetime.datetime


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def at(cls, folder: Path) -> "Authority":
        """The authority in `folder`, made if there is none.

        Raises:
            ConfigError: the authority's files cannot be used.
        """
        certificate, key = folder / "ca.pem", folder / "ca.key"
        if not certificate.exists() and not key.exists():
            return cls._make(certificate, key)
        try:
            private = serialization.load_pem_private_key(key.read_bytes(), None)
            if not isinstance(private, ec.EllipticCurvePrivateKey):
                raise ValueError("its key is not one that this command made")
            return cls(x509.load_pem_x509_certificate(certificate.read_bytes()), private)
        except (OSError, ValueError) as error:
            raise ConfigError("folder", f"the authority in {folder} cannot be used: {error}") from error

    @classmethod
    def existing(cls, folder: Path) -> "Authority":
        """The authority in `folder`.

        Raises:
            ConfigError: there is none, or its files cannot be used.
        """
        if not (folder / "ca.pem").exists():
            raise ConfigError("folder", f"{folder} has no authority: ca.pem and ca.key")
        return cls.at(folder)

    @property
    def ends(self) -> datetime.datetime:
        """Until when the authority's own certificate is valid."""
        return self._certificate.not_valid_after_utc

    def issued(self, path: Path) -> Issued | None:
        """What a certificate file was made for; None if the file is no certificate of this authority for a service."""
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
            found.verify_directly_issued_by(self._certificate)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        role = next((uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)), None)
        hosts = [name for name in names.get_values_for_type(x509.DNSName) if name != NAME]
        hosts += map(str, names.get_values_for_type(x509.IPAddress))
        return None if role is None else Issued(role, hosts, found.not_valid_after_utc)

    @classmethod
    def _make(cls, certificate: Path, key: Path) -> "Authority":
        private = ec.generate_private_key(ec.SECP256R1())
        subject = _common_name("Moonpool local authority")
        builder = (
            _builder(subject, subject, private, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        )
        made = builder.sign(private, hashes.SHA256())
        _write(key, _private(private), 0o600)
        _write(certificate, made.public_bytes(serialization.Encoding.PEM), 0o644)
        return cls(made, private)

    def issue(self, folder: Path, role: str, name: str, hosts: Sequence[str], days: int) -> Path:
        """Make NAME.pem and NAME.key, replacing earlier files; return the former's path.

        Raises:
            ConfigError: the name cannot be used.
        """
        if name in ("ca", "") or len(name) > MAX_NAME_CHARS or "/" in name:
            raise ConfigError("name", f"must be a file's name of at most {MAX_NAME_CHARS} characters, and not ca")
        private = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(ROLE_URI + role), *map(_host, hosts)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role not in CLIENTS:
            names.append(x509.DNSName(NAME))
        if role not in CLIENTS or hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            _builder(_common_name(name), self._certificate.subject, private, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(folder / f"{name}.key", _private(private), 0o600)
        path = folder / f"{name}.pem"
        _write(path, made.public_bytes(serialization.Encoding.PEM), 0o644)
        return path


def _builder(
    subject: x509.Name, issuer: x509.Name, private: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(_UTC)
    return x509.CertificateBuilder(
        issuer, subject, private.public_key(), x509.random_serial_number(),
        now - CLOCK_SKEW, now + datetime.timedelta(days=days),
    )  # fmt: skip


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=certificates, crl_sign=certificates, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace an earlier file atomically, so that a concurrent reader gets a whole file."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    beside.replace(path)
