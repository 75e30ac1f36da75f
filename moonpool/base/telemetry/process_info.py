"""What every process exports: the build, and until when certificates are valid."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from moonpool.base.version import commit, installed_version

EXPIRY_WARNING_S = 30 * 24 * 3600.0
"""Seconds before a certificate's end from which the log warns."""


def expiry_of(pem: bytes) -> float:
    """When the first certificate of a PEM file ends, seconds since 1970.

    Raises:
        ValueError: the bytes hold no certificate.
    """
    from cryptography import x509  # a process without TLS does without

    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except x509.InvalidVersion as error:  # no ValueError
        raise ValueError(str(error)) from None


def expiry_warning(pem: bytes, now: float) -> str:
    """What is wrong with the time of a PEM file's first certificate; "" for nothing.

    Args:
        pem: the file's bytes.
        now: seconds since 1970.
    """
    try:
        left_s = expiry_of(pem) - now
    except ValueError:
        return ""  # whoever uses the certificate says more
    days = abs(left_s) / (24 * 3600)
    if left_s <= 0:
        return f"the certificate has expired {days:.1f} days ago: peers refuse connections"
    return f"the certificate expires in {days:.1f} days" if left_s < EXPIRY_WARNING_S else ""


def register_process(registry: CollectorRegistry, service: str) -> None:
    """Export the build, and what the operating system knows of this process."""
    registry.register(_BuildInfo(service))
    ProcessCollector(registry=registry)


class _BuildInfo(Collector):
    def __init__(self, service: str) -> None:
        self._labels = {
            "service": service,
            "version": installed_version(),
            "commit": commit(),
            "python_version": platform.python_version(),
        }

    def collect(self) -> Iterable[MetricFamily]:
        return [InfoMetricFamily("moonpool_build", "1; the labels have service, version and commit.", self._labels)]


class CertificateExpiry(Collector):
    """Until when certificates are valid, read from their files at each scrape."""

    def __init__(self, files: Mapping[str, Path | None]) -> None:
        """`files` has the certificate of each setting; None for no certificate."""
        self._files = {setting: path for setting, path in files.items() if path is not None}

    def describe(self) -> Iterable[MetricFamily]:
        """The metric without values, so that registering reads no file."""
        return [self._family()]

    def collect(self) -> Iterable[MetricFamily]:
        """The ends now; runs on a scrape's thread. A file that cannot be read has no value."""
        family = self._family()
        for setting, path in self._files.items():
            try:
                family.add_metric([setting], expiry_of(path.read_bytes()))
            except (OSError, ValueError):
                continue
        return [family]

    def _family(self) -> GaugeMetricFamily:
        text = "When the certificate in the file of a setting ends, seconds since 1970."
        return GaugeMetricFamily("moonpool_certificate_expiry_timestamp_seconds", text, labels=["setting"])
