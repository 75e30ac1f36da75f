"""Every service tells its build, its process and the end of its certificates."""

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from moonpool.base.config import ServiceConfig
from moonpool.base.telemetry.process_info import expiry_warning
from moonpool.base.telemetry.prometheus import PrometheusMetrics, exposition
from moonpool.base.version import COMMIT_VARIABLE, installed_version

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY_S = 24 * 3600.0


def certificate(days: int) -> bytes:
    """A certificate that is valid for some days from `START`, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "moonpool")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(START)
    signed = builder.not_valid_after(START + datetime.timedelta(days=days)).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("day", "warning"),
    [
        (0, ""),
        (59, ""),
        (61, "the certificate expires in 29.0 days"),
        (92, "the certificate has expired 2.0 days ago: peers refuse connections"),
    ],
)
def test_the_log_warns_a_month_before_a_certificate_ends(day: int, warning: str) -> None:
    assert expiry_warning(certificate(90), START.timestamp() + day * DAY_S) == warning


def test_what_is_no_certificate_is_left_to_whoever_uses_the_file() -> None:
    assert expiry_warning(b"-----BEGIN NOTHING-----", 0.0) == ""
    encoded = ssl.PEM_cert_to_DER_cert(certificate(1).decode())
    of_version_4 = encoded.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x03", 1)
    assert expiry_warning(ssl.DER_cert_to_PEM_cert(of_version_4).encode(), 0.0) == ""


def test_build_process_and_certificate_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SomeConfig(ServiceConfig):
        """A service's settings."""

    file = tmp_path / "cert.pem"
    file.write_bytes(certificate(1))
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    config = SomeConfig(id="some-0", listen="127.0.0.1:0")
    text = exposition(PrometheusMetrics.of(config, ssl_certfile=file, other=tmp_path / "gone").registry, "")[0].decode()
    (build,) = [line for line in text.splitlines() if line.startswith("moonpool_build_info{")]
    assert f'version="{installed_version()}"' in build
    assert 'commit="abc123"' in build
    assert "process_cpu_seconds_total " in text
    ends = [line for line in text.splitlines() if line.startswith("moonpool_certificate_expiry")]
    (end,) = ends
    assert 'setting="ssl_certfile"' in end
    assert float(end.split()[-1]) == START.timestamp() + DAY_S
